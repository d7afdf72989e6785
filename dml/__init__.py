"""Deep metric learning research: five published methods, exactly evaluated, side by side."""

__version__ = "0.1.0"
