"""Functions that draw pictures from arrays and tables."""
