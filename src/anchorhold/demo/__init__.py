"""Two demos that need no data: `digits` and `gaussians`."""
