"""What several runs come to together, and how sure a difference is."""
