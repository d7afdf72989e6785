"""How runs are started: one, the trainings of a protocol, a sweep."""
