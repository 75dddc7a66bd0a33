"""How far the natural row depends on what is not the papers': images compressed again, variances that were estimated.

    python benchmarks/sensitivity.py --root CUB_200_2011 --weights resnet18_imagenet.safetensors --out sensitivity.json

`as-is` trains the natural recipe; `webp` on the same images, stored once more as WebP of a much lower quality, and
`webp-55` of a somewhat lower one; `variances` from the same weights, with the running variances of the last stage, most
of which are estimated, moved by 15 % at random. Each is trained for as long as the row, with R@1 every five epochs; one
that moves R@1 by as much as the row is off says what the row depends on.

`distortion` trains nothing. It estimates what the files lost when they were made, which cannot be measured without the
originals, beside what storing them again takes: mean squared errors, in levels of 255, over images that were made
smaller first, so that they come near to images that were never compressed. Neither does `features`: R@1 of the pooled
features, before any training, with each of these changes and with all those variances too large or too small alike.
`models` asks how much R@1 trained models (--models) lose when the test images alone are stored once more.
"""

import argparse
import io
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import Parts
from PIL import Image
from safetensors.torch import load_file, save_file
from starts import measured

import anchorhold as ah
from anchorhold.console import Console
from anchorhold.data.images import load_images
from anchorhold.data.settings import DataSettings
from anchorhold.data.store import decode
from anchorhold.data.workers import cores
from anchorhold.device import computer_of
from anchorhold.random import Key
from anchorhold.runs.provenance import provenance
from anchorhold.training.evaluation import retrieval

Found = dict[str, Any]
STORED = 75  # the quality of the files
QUALITY = {"webp": 33, "webp-55": 55}  # of storing them again
TRAINED = ("as-is", "variances", *QUALITY)
PARTS = ("distortion", "features", "models", *TRAINED)
SIDE = 192  # three quarters of the files': small enough to hide what they lost, large enough to be alike
SAMPLE = 500  # images whose distortion is measured
APART = 0.15  # by which an estimated variance may be off
ALIKE = (0.7, 0.85, 1.15, 1.3)  # factors of all of them


def again(pixels: Any, quality: int) -> Any:
    """What is left of an image that is stored once more."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=quality)
    return np.asarray(Image.open(file).convert("RGB"))


def compressed(split: ah.Split, quality: int) -> ah.Split:
    images = decode(split, 256).images.numpy()
    with ProcessPoolExecutor(cores()) as pool:
        made = np.stack(list(pool.map(partial(again, quality=quality), images, chunksize=64)))
    return ah.Split(split.name, split.labels, split.classes, images=torch.from_numpy(made))


def distortion(split: ah.Split) -> Found:
    """Mean squared errors of storing images at the quality of the files, and once more at a lower one."""
    images = decode(split, 256).images.numpy()
    errors: dict[str, list[float]] = {}
    for pixels in images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:SAMPLE].numpy()]:
        small = np.asarray(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS))
        file = again(small, STORED)
        pairs = {"files": (small, file)} | {name: (file, again(file, q)) for name, q in QUALITY.items()}
        for name, (a, b) in pairs.items():
            errors.setdefault(name, []).append(float(np.square(a.astype(float) - b).mean()))
    return {name: float(np.mean(values)) for name, values in errors.items()}


def moved(weights: str, out: Path, factor: float | None = None) -> str:
    """The same weights with other variances in the last stage: all times one factor, or each times its own."""
    tensors = load_file(weights)
    for place, name in enumerate(name for name in tensors if name.startswith("layer4") and "running_var" in name):
        draws = Key.of(0)("variances", place).normal(torch.arange(len(tensors[name])), (), torch.float32)
        tensors[name] = tensors[name] * ((APART * draws).exp() if factor is None else factor)
    save_file(tensors, out, {"format": "pt"})
    return str(out)


def changed(name: str, data: ah.Dataset, weights: str, place: Path) -> tuple[ah.Dataset, str]:
    """What a part trains on, and from which weights."""
    if name == "variances":
        return data, moved(weights, place / "moved.safetensors")
    if name in QUALITY:
        train, test = (compressed(split, QUALITY[name]) for split in (data.train, data.test))
        return ah.Dataset(data.name, train, test), weights
    return data, weights


def models_on(test: ah.Split, models: list[str], device: torch.device) -> dict[str, dict[str, float]]:
    """R@1 in percent of trained models, by the quality at which the test images are stored once more."""
    found: dict[str, dict[str, float]] = {}
    for name, split in stored(test).items():
        images = load_images(split, DataSettings(), device, Console())
        for file in models:
            found.setdefault(Path(file).stem, {})[name] = retrieval(ah.load(file, str(device)), images)[0]["r1"]
    return found


def stored(test: ah.Split) -> dict[str, ah.Split]:
    return {"as-is": test} | {name: compressed(test, quality) for name, quality in QUALITY.items()}


def features(test: ah.Split, weights: str, place: Path, device: torch.device) -> dict[str, float]:
    """R@1 in percent of what the network gives before any training, by change."""
    files = {"variances": moved(weights, place / "moved.safetensors")}
    files |= {f"variances * {factor}": moved(weights, place / f"{factor}.safetensors", factor) for factor in ALIKE}
    found = {}
    for name, split in stored(test).items():
        images = load_images(split, DataSettings(), device, Console())
        for change, file in ({name: weights} | (files if name == "as-is" else {})).items():
            found[change] = measured(file, images, 0)["r1"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="CUB_200_2011", help="where CUB lies")
    parser.add_argument("--weights", default="", help="a file in torchvision's layout")
    parser.add_argument("--models", nargs="+", default=[], help="what Anchorhold trained, for the part of that name")
    parser.add_argument("--epochs", type=int, default=75)
    parser.add_argument("--only", default="", help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--out", default="sensitivity.json")
    args = parser.parse_args()
    chosen = args.only.split(",") if args.only else [part for part in PARTS if part != "models" or args.models]
    trained = [name for name in chosen if name in TRAINED]
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"there is no {', '.join(unknown)}; choose some of {', '.join(PARTS)}")
    if not {"distortion", "models"}.issuperset(chosen) and not args.weights:
        parser.error("--weights is missing: all parts but distortion and models begin with them")
    if "models" in chosen and not args.models:
        parser.error("--models is missing: what shall be measured?")
    place = Path(tempfile.mkdtemp())
    data = ah.dataset("cub", args.root)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = Parts(
        args.out, "sensitivity", provenance(computer_of(device)) | ({"epochs": args.epochs} if trained else {})
    )
    if "distortion" in chosen:
        made.keep("distortion", distortion(data.train))
    if "features" in chosen:
        made.keep("features", features(data.test, args.weights, place, device))
    if "models" in chosen:
        made.keep("models", models_on(data.test, args.models, device))
    for name in trained:
        images, weights = changed(name, data, args.weights, place)
        changes = {"model": {"weights": weights}, "train": {"epochs": args.epochs}}
        run = ah.fit(None, images, "natural", place / name, overrides=changes)
        evaluations = [{"epoch": row["epoch"], "r1": row["r1"]} for row in run.metrics() if "r1" in row]
        made.keep(name, evaluations)


if __name__ == "__main__":
    main()
