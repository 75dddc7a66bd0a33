"""How a perturbation is found: one loop inside a ball."""
