"""What a trained run is used for: embeddings, search, export."""
