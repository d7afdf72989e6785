"""From a composed configuration to a trained method."""
