"""Ways to train a robust model: one file per idea. `step` is the input of a defence."""
