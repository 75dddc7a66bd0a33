"""Look before you train: what can be set, what your folder would take, and what makes it shorter.

    python examples/look_before_you_train.py             # draws a small folder of photos
    python examples/look_before_you_train.py photos/     # yours

On the command line: `anchorhold settings`, `anchorhold recipes show hm-lga --resolved`,
`anchorhold train photos/ --dry-run`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import anchorhold as ah


def draw_photos(root: Path) -> Path:
    """Ten classes of thirty images, each class a colour with noise over it."""
    draw = np.random.default_rng(0)
    for label in range(10):
        place, colour = root / f"class{label}", draw.integers(40, 215, 3)
        place.mkdir(parents=True)
        for number in range(30):
            noise = draw.integers(-40, 40, (32, 32, 3))
            Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return root


def main(photos: str | Path) -> None:
    # Every setting has a type, a default and a meaning. Find one by its key or by its meaning.
    for setting in ah.list_settings("learning rate"):
        print(f"{setting.key} = {setting.default} ({setting.allowed}): {setting.meaning}")

    # Small images and a small network, so that this runs anywhere.
    small = {"data.resize": 32, "data.crop": 28, "model.backbone": "small", "model.weights": "", "model.dim": 64}

    # Some real steps are timed; nothing is written. A small folder gets a batch that suits it.
    robust = ah.estimate(None, photos, "hm-lga", overrides=small, device="cpu", seconds=3)
    print(f"\n{robust}")

    # The same without attacks.
    plain = ah.estimate(None, photos, "natural", overrides=small, device="cpu", seconds=3)
    print(f"\nwithout attacks {robust.seconds / plain.seconds:.0f} times shorter; a batch that you set yourself:")
    whole = ah.estimate(None, photos, "natural", overrides={**small, "batch.pairs": 240}, device="cpu", seconds=3)
    print(f"{whole.steps_per_epoch} step an epoch; try {whole.suggestions[0] if whole.suggestions else 'nothing else'}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(draw_photos(Path(folder) / "photos"))
