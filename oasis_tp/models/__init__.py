"""Models: what an architecture is, where its files are, how its weights reach the ranks."""
