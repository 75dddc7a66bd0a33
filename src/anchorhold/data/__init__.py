"""Data sets, splits, batches and images."""
