"""Defaults and choices that the commands print in their `--help`; this module imports nothing that is slow to load."""

from pathlib import Path

SUMMARY = Path("runs/summary")  # the folder of tables and pictures over several runs

CHECKPOINTS = ("last", "best_on_test", "best_on_validation")

CHECKPOINT = "default: the one that the run's figures are of"

EMBEDDED_AT_ONCE = 64  # images

INDEXES = ("flat", "hnsw", "ivfpq")  # of a gallery

MIN_RECALL = 0.99  # of an approximate index

EXPERIMENTS = Path("runs/experiments")  # the folder of the papers' trainings

LAUNCHERS = ("basic", "joblib", "submitit_local", "submitit_slurm")  # of Hydra, for sweeps

DRAWS = 10_000  # resamples of a bootstrap

SMOKE_PARTS = ("tests", "methods", "throughput", "evaluation", "layers", "ranks", "feeding")  # of dml.smoke

SMOKE_MINUTES = 20
