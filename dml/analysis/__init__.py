"""Analyses of several runs together: the result of MLRC's folds, and how sure a difference between runs is."""
