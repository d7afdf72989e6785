"""Reports: of a run, and of several."""
