"""Deep metric learning research: published methods side by side, exactly evaluated."""

__version__ = "0.1.0"
