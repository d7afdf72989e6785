"""Losses: those of pytorch-metric-learning behind one call form, and what it lacks."""

from dml.losses.loss import Loss

__all__ = ["Loss"]
