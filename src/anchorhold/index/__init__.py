"""A model at work: embed images into an index, search it, export the model."""
