"""Embedding models: ours, yours, and how attacks see them."""
