"""Losses: those of pytorch-metric-learning with one call form for all, and others that it lacks."""

from dml.losses.loss import Loss

__all__ = ["Loss"]
