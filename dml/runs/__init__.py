"""The files that a run writes, and reading them back."""
