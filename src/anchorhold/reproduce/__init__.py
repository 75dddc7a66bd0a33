"""The papers' tables as data, and the comparison of a run with a row."""
