"""A small folder of photographs to try things on: blurred colour patterns with noise, one class a pattern."""

from pathlib import Path

import numpy as np
from PIL import Image


def make_textures(place: Path, classes: int = 16, each: int = 20, side: int = 32, contrast: float = 0.3) -> Path:
    """Write train/CLASS/N.png and test/CLASS/N.png; half of the classes are for test. Returns the folder."""
    rng = np.random.default_rng(0)
    for number in range(classes):
        pattern = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize((side, side), Image.BICUBIC)
        folder = place / ("train" if number < classes // 2 else "test") / f"pattern{number:02}"
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(each):
            pixels = contrast * (np.asarray(pattern) / 255 - 0.5) * rng.uniform(1.4, 2.6)
            pixels = 0.5 + pixels + rng.uniform(-0.1, 0.1) + rng.normal(0, 0.06, pixels.shape)
            Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8)).save(folder / f"{copy:02}.png")
    return place
