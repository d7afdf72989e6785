"""Starting of runs: a single one, all trainings of a protocol, or a sweep."""
