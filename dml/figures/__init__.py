"""Pure plots: from arrays and tables to pictures."""
