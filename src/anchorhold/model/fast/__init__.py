"""Faster computation of the same numbers: folded BatchNorm, compiled attack steps, CUDA graphs."""
