"""What weights are worth before any training: R@1 of their pooled features, clean and under attack.

    python benchmarks/starts.py --root CUB_200_2011 --out starts.json \\
        --natural resnet18_imagenet.safetensors --robust resnet18_robust_linf4.safetensors

Between the two files lie mixtures, (1 − t) natural + t robust, BatchNorm's statistics like the rest. All are judged on
the last twenty training classes, so that a start can be chosen without a look at the test classes; the two files are
also measured on those, clean.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from parts import Parts
from safetensors.torch import load_file, save_file
from torch import Tensor

import anchorhold as ah
from anchorhold.console import Console
from anchorhold.data.images import Images, load_images
from anchorhold.data.settings import DataSettings
from anchorhold.device import computer_of
from anchorhold.random import Key
from anchorhold.runs.provenance import provenance
from anchorhold.training.evaluation import recall_under_attack, retrieval

HELD_OUT = 20  # training classes
EPS, STEPS = 8 / 255, 20  # of the attack on R@1, as in the evaluations during training
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # t


def mixed(natural: Mapping[str, Tensor], robust: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """What both have, in fp32; whole numbers are the first's."""
    return {
        name: torch.lerp(tensor.float(), robust[name].float(), share) if tensor.is_floating_point() else tensor
        for name, tensor in natural.items()
        if name in robust
    }


def measured(weights: str, images: Images, queries: int) -> dict[str, float]:
    """R@1 in percent, and under an attack on N queries; 0 leaves that out."""
    model = ah.Embedder("resnet18", 0, weights).to(images.labels.device).eval()
    found, gallery = retrieval(model, images)
    if not queries:
        return {"r1": found["r1"]}
    budget = ah.Budget(STEPS, 2.5 * EPS / STEPS, start="random", keep="best")
    attacked = recall_under_attack(model, images, gallery, ah.Ball(EPS), budget, Key.of(0), queries)
    return {"r1": found["r1"], "r1_attacked": attacked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="CUB_200_2011", help="where CUB lies")
    parser.add_argument("--natural", required=True, help="a file in torchvision's layout")
    parser.add_argument("--robust", required=True, help="another")
    parser.add_argument("--queries", type=int, default=100, help="that are attacked")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--out", default="starts.json")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    files = {"natural": Path(args.natural).name, "robust": Path(args.robust).name}
    about = {**files, "queries": args.queries, "held_out": args.held_out, "eps": EPS, "steps": STEPS}
    made = Parts(args.out, "starts", provenance(computer_of(device)) | about)
    held_out, test = (
        load_images(ah.dataset("cub", args.root, held_out=held).test, DataSettings(), device, Console())
        for held in (args.held_out, 0)
    )
    ends = load_file(args.natural), load_file(args.robust)
    with tempfile.TemporaryDirectory() as place:
        mixture = Path(place) / "mixed.safetensors"
        for share in SHARES:
            save_file(mixed(*ends, share), mixture, {"format": "pt"})
            made.keep(f"{share:g}", measured(str(mixture), held_out, args.queries))
    for name, file in (("natural, test classes", args.natural), ("robust, test classes", args.robust)):
        made.keep(name, measured(file, test, 0))


if __name__ == "__main__":
    main()
