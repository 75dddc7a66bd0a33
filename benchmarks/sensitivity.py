"""How far the natural row depends on what is not print's: images compressed again, variances that were estimated.

    python benchmarks/sensitivity.py --root CUB_200_2011 --weights resnet18_imagenet.safetensors --out sensitivity.json

`as-is` trains the natural recipe; `webp` on the same images, stored once more as WebP of a much lower quality;
`variances` from the same weights, with the running variances of the last stage, most of which are estimated, moved by
15 % at random. Each is trained for as long as the row, with R@1 at every look; one that moves R@1 by as much as the row
is off says what the row depends on.
"""

import argparse
import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import Parts
from PIL import Image
from safetensors.torch import load_file, save_file

import anchorhold as ah
from anchorhold.data.store import decode
from anchorhold.data.workers import cores
from anchorhold.random import Key
from anchorhold.record import provenance

Found = dict[str, Any]
QUALITY = 33  # the files have 75; what they lost against the originals is less than this takes
APART = 0.15  # by which an estimated variance may be off


def again(pixels: Any) -> Any:
    """What is left of an image that is stored once more."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=QUALITY)
    return np.asarray(Image.open(file).convert("RGB"))


def compressed(split: ah.Split) -> ah.Split:
    images = decode(split, 256).images.numpy()
    with ProcessPoolExecutor(cores()) as pool:
        made = np.stack(list(pool.map(again, images, chunksize=64)))
    return ah.Split(split.name, split.labels, split.classes, images=torch.from_numpy(made))


def moved(weights: str, out: Path) -> str:
    """The same weights with other variances in the last stage."""
    tensors = load_file(weights)
    for place, name in enumerate(name for name in tensors if name.startswith("layer4") and "running_var" in name):
        draws = Key.of(0)("variances", place).normal(torch.arange(len(tensors[name])), (), torch.float32)
        tensors[name] = tensors[name] * (APART * draws).exp()
    save_file(tensors, out, {"format": "pt"})
    return str(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="CUB_200_2011", help="where CUB lies")
    parser.add_argument("--weights", required=True, help="a file in torchvision's layout")
    parser.add_argument("--epochs", type=int, default=75)
    parser.add_argument("--only", default="", help="some of as-is, webp, variances, separated by commas")
    parser.add_argument("--out", default="sensitivity.json")
    args = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    data = ah.dataset("cub", args.root)
    ways: dict[str, Callable[[], tuple[ah.Dataset, str]]] = {
        "as-is": lambda: (data, args.weights),
        "webp": lambda: (ah.Dataset("cub", compressed(data.train), compressed(data.test)), args.weights),
        "variances": lambda: (data, moved(args.weights, place / "moved.safetensors")),
    }
    chosen = args.only.split(",") if args.only else list(ways)
    if unknown := [name for name in chosen if name not in ways]:
        parser.error(f"there is no {', '.join(unknown)}; choose some of {', '.join(ways)}")
    about = {**provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")), "epochs": args.epochs}
    made = Parts(args.out, "sensitivity", about)
    for name in chosen:
        images, weights = ways[name]()
        changes = {"model": {"weights": weights}, "train": {"epochs": args.epochs}}
        run = ah.fit(None, images, "natural", place / name, overrides=changes)
        looks = [{"epoch": row["epoch"], "r1": row["r1"]} for row in run.metrics() if "r1" in row]
        made.keep(name, looks)


if __name__ == "__main__":
    main()
