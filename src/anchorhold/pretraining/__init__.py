"""Robust weights to start from."""
