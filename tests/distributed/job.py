"""What each rank runs in the tests of several ranks: `job.py OUT PHOTOS`, or `job.py die|differ WORDS`."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import anchorhold as ah
from anchorhold.cli.main import main as command
from anchorhold.distributed import started

RECIPES = (
    "natural",
    "hm-lga",
    "hm-free",
    "catride",
    "adml-contrastive",
    "adml",
    "est",
    "classify",
    "distil",
    "few",
    "proxies",
)
RECIPES += ("proxy-minmax", "proxy-trades", "proxy-yours", "robust", "distil-logits")
LONG = ("catride",)  # whose attack is decided by all units together
IMAGES = 150  # five batches of 32 pairs, the last of them short


def digits() -> ah.Dataset:
    """So few digits that an epoch has five steps."""
    whole = ah.dataset("digits")
    kept = torch.zeros(len(whole.train), dtype=torch.bool)
    kept[:IMAGES] = True
    return replace(whole, train=whole.train.keep(kept))


def small() -> ah.Embedder:
    return ah.Embedder("small", 16, channels=1, size=(8, 8)).double()


def train(out: Path, recipe: str) -> dict[str, Any]:
    """Five optimiser steps in float64, and what they left."""
    model = small()
    overrides: dict[str, Any] = {
        "train": {"epochs": 1, "collapse_warmup": 9, "attack_eps": 0.1, "attack_steps": 2},
        "batch": {"pairs": 32, "mining_pairs": 16},
    }
    if recipe == "adml":  # whose units are coupled
        overrides["defence"] = {"formulation": 1}
    if recipe == "few":  # the last batch is too small for three ranks; were all, Adam would not see a wrong scale
        overrides |= {"batch": {"pairs": 4}, "defence": {"margin": 2.0}}  # no triplet is content
    if recipe == "proxies":  # of a loss, which every rank computes for the whole batch; weight decay sees their scale
        loss = "pytorch_metric_learning.losses:ProxyAnchorLoss"
        overrides |= {"defence": {"loss": loss, "steps": 2}, "optimiser": {"weight_decay": 0.1}}
    if recipe == "proxy-minmax":  # the gradients that perturb weights come from all ranks, and units are coupled
        defence = {"loss": "proxy-anchor", "awp": 0.02, "clean": 0.3, "steps": 2}
        overrides |= {"defence": defence, "batch": {"images": 32}}
    if recipe == "proxy-yours":  # a loss of yours, and triplets that are perturbed beside it
        loss = "pytorch_metric_learning.losses:ProxyAnchorLoss"
        more = {"triplets": 0.5, "triplet_attack": "hm", "sampler": "random", "triplet_margin": 0.02}
        overrides |= {"batch": {"kind": "pairs", "pairs": 32, "mining_pairs": 16}, "optimiser": {"weight_decay": 0.1}}
        overrides |= {"defence": {"loss": loss, "awp": 0.02, "clean": 0.3, "steps": 2, **more}}
    if recipe == "distil-logits":
        overrides |= {"batch": {"images": 32}}
    if recipe == "robust":  # with triplets and a teacher
        out.parent.mkdir(parents=True, exist_ok=True)
        teacher = out.with_suffix(f".{os.environ.get('RANK', '0')}.safetensors")
        ah.Embedder("small", 16, channels=1, size=(8, 8), seed=7).save(teacher)
        defence = {"steps": 2, "triplets": 0.5, "teacher": str(teacher), "drift": 0.01}
        overrides |= {"defence": defence, "batch": {"kind": "pairs", "pairs": 32, "mining_pairs": 16}}
    if recipe == "proxy-trades":
        defence = {"steps": 2, "cutmix": 0.5}  # two classes in an image
        overrides |= {"defence": defence, "batch": {"images": 32}, "optimiser": {"weight_decay": 0.1}}
    named = {"few": "natural", "proxies": "madry", "proxy-yours": "proxy-minmax"}.get(recipe, recipe)
    run = ah.fit(model, digits(), named, out, overrides=overrides, device="cpu")
    weights = {name: value.double().sum().item() for name, value in model.state_dict().items()}
    if recipe.startswith("prox") and run.writes:
        saved, _ = run.load() or ({}, {})
        weights |= {name: value.double().sum().item() for name, value in saved.items() if "proxies" in name}
    return {"weights": weights, "metrics": run.metrics()[-1] if run.writes else {}}


def train_on(out: Path, recipe: str) -> list[float]:
    """Every weight after 45 optimiser steps in float64."""
    model = small()
    overrides = {"train": {"epochs": 9, "evaluate_every": 9, "collapse_warmup": 9}, "batch": {"pairs": 32}}
    ah.fit(model, digits(), recipe, out, overrides=overrides, device="cpu")
    return [value for tensor in model.state_dict().values() for value in tensor.double().flatten().tolist()]


def audit(out: Path) -> dict[str, Any]:
    found = ah.audit(small(), digits(), limit=50, steps=3, batch=16, epsilons=(), device="cpu", out=out, resamples=20)
    rows = {
        f"{run.label}/{p}/{n}": r.tolist() for run in found.runs for p, m in run.measures.items() for n, r in m.items()
    }
    few: dict[str, Any] = {"attacks": ["margin"], "limit": 24, "batch": 4, "eps": 0.1, "examine": None, "device": "cpu"}
    curve = ah.audit(small(), digits(), epsilons=[0.02], steps=3, resamples=20, **few)
    rows["curve"] = curve.curve_rows["R@1"].tolist()
    return {"rows": rows, "ids": [run.ids.tolist() for run in found.runs], "flags": [flag.name for flag in found.flags]}


def embed(out: Path, photos: Path) -> str:
    """A hash of the vectors of a folder of images, eleven blocks of four."""
    ah.embed(ah.Embedder("small", 16, channels=3, size=(8, 8)), photos, out, batch=1, device="cpu")
    return hashlib.sha256((out / "vectors.safetensors").read_bytes()).hexdigest()


def dies(steps: int) -> None:
    """Let the second rank end without a word before its optimiser steps for the last of so many times."""
    step, done = torch.optim.Adam.step, 0

    def stepped(self: Any, *args: Any) -> Any:
        nonlocal done
        done += 1
        if done == steps and started()[0] == 1:
            os._exit(7)
        return step(self, *args)

    torch.optim.Adam.step = stepped  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "die":
        dies(5)
        sys.argv = ["anchorhold", *sys.argv[2:]]
        command()
        return
    if sys.argv[1] == "differ":
        ah.fit(
            ah.Embedder("small", 16, channels=1, size=(8, 8), seed=started()[0]),  # each rank with weights of its own
            digits(),
            "natural",
            sys.argv[2],
            overrides={"train": {"epochs": 1}, "batch": {"pairs": 32}},
            device="cpu",
        )
        return
    out, photos = map(Path, sys.argv[1:])
    found: dict[str, Any] = {recipe: train(out / recipe, recipe) for recipe in RECIPES}
    found["long"] = {recipe: train_on(out / f"{recipe}-long", recipe) for recipe in LONG}
    found["audit"] = audit(out / "audit")
    found["embed"] = embed(out / "index", photos)
    (out / f"rank{started()[0]}.json").write_text(json.dumps(found))
    os._exit(0)  # as the command line does


if __name__ == "__main__":
    main()
