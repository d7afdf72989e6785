"""Tables and figures of the papers as rows of trainings, and what was measured of them."""
