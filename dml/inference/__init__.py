"""Use of a trained run: embedding images, searching, thresholds, export, publishing and verification."""
