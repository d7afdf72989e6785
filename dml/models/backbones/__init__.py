"""Backbones: convolutional networks as runs of named stages, one file an architecture (see `stages.Backbone`)."""

from dml.models.backbones.stages import Backbone, Stages

__all__ = ["Backbone", "Stages"]
