"""The tables and figures of the papers: the trainings that their rows need, and what was measured here."""
