"""The configuration of a run: where its files lie, which values its options may have, and how components are made."""
