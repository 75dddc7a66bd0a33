"""Losses of pytorch-metric-learning, and one of your own with proxies, as the training loss of three defences.

Losses train a network naturally, by min-max training (`madry`) and by hardness manipulation (`hm-lga`). R@1 is on
classes that training has not seen, clean and under attack. It takes about 25 seconds on one core:

    python examples/loss_of_your_own.py

From the command line the same is

    anchorhold train digits --recipe madry --set defence.loss=examples.loss_of_your_own:NearestProxy
    anchorhold train digits --recipe hm-lga --set defence.loss=pytorch_metric_learning.losses:MultiSimilarityLoss
        --set defence.loss_args.alpha=2 --set defence.miner=pytorch_metric_learning.miners:MultiSimilarityMiner
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anchorhold as ah

PML = "pytorch_metric_learning"


class NearestProxy(nn.Module):
    """One vector for each class, which is learnt; the nearest one should be that of the image's class."""

    def __init__(self, num_classes: int, embedding_size: int, temperature: float = 0.2) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding_size))
        self.temperature = temperature

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        cosines = embeddings @ nn.functional.normalize(self.proxies).T
        return nn.functional.cross_entropy(cosines / self.temperature, labels)


LOSSES: dict[str, dict[str, Any]] = {
    "MultiSimilarity": {
        "loss": f"{PML}.losses:MultiSimilarityLoss",
        "loss_args": {"alpha": 2, "beta": 50},
        "miner": f"{PML}.miners:MultiSimilarityMiner",
        "miner_args": {"epsilon": 0.5},
    },
    "ProxyAnchor": {"loss": f"{PML}.losses:ProxyAnchorLoss", "loss_lr": 0.1},
    "NearestProxy": {"loss": NearestProxy, "loss_args": {"temperature": 0.2}},
}
ATTACK = {"eps": 0.15, "alpha": 0.08, "steps": 3}
QUICK = {"epochs": 4, "evaluate_every": 4, "attack_eps": 0.1, "attack_steps": 10, "attack_queries": 200}
RUNS = [(loss, recipe) for loss in ("MultiSimilarity", "ProxyAnchor") for recipe in ("natural", "madry", "hm-lga")]
RUNS += [("NearestProxy", "natural"), ("NearestProxy", "madry")]


def main() -> dict[tuple[str, str], tuple[float, float]]:
    found = {}
    data = ah.dataset("digits")
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RUNS:
            defence = LOSSES[name] if recipe == "natural" else {**LOSSES[name], **ATTACK}
            overrides = {"train": QUICK, "defence": defence}
            run = ah.fit(None, data, recipe, Path(folder) / f"{name}-{recipe}", overrides=overrides, device="cpu")
            last = run.metrics()[-1]
            found[name, recipe] = last["r1"], last["r1_attacked"]
            print(f"{name:16} {recipe:8} R@1 {last['r1']:5.1f}, under attack {last['r1_attacked']:5.1f}", flush=True)
    return found


if __name__ == "__main__":
    main()
