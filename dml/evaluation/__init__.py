"""Exact retrieval and clustering figures, the evaluator that gathers embeddings for them, and the protocols."""
