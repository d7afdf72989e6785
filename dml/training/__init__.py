"""Training: from a composed configuration to a trained and reported method."""
