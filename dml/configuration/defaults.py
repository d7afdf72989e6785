"""Defaults and choices that the commands print in their `--help`, which imports nothing heavy."""

from pathlib import Path

SUMMARY = Path("runs/summary")  # the folder of what several runs come to

CHECKPOINTS = ("last", "best_on_test", "best_on_validation")

EMBEDDED_AT_ONCE = 64  # images

DRAWS = 10_000  # of a bootstrap
