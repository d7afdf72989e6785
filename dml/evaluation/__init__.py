"""Exact retrieval and clustering metrics, the evaluator that gathers embeddings for them, and the protocols."""
