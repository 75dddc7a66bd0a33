"""From images and a recipe to a model in a run folder."""
