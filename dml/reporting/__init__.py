"""Reports of a single run and of several runs."""
