"""The check `python -m dml.smoke`: its parts, each in a process of its own, and the table and drawing of results."""
