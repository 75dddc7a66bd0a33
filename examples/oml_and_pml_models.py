"""Harden models as OpenMetricLearning and pytorch-metric-learning have them: 20 seconds on a CPU.

An extractor of OML is a module with `extract(images)` and `feat_dim`. In pytorch-metric-learning a model is a trunk and
an embedder, trained together. Both are modules from images to vectors, so `fit` takes them as they are.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import anchorhold as ah

EPS = 0.1  # of pixels in [0, 1]; digits of 8 × 8 are coarse


class Extractor(nn.Module):
    """As OML's extractors: forward gives the vectors, `extract` is another name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU())
        self.last = nn.Linear(64 * 9, self.feat_dim)

    @property
    def feat_dim(self) -> int:
        return 32

    def forward(self, images: Tensor) -> Tensor:
        vectors: Tensor = self.last(self.convolutions(images).flatten(1))
        return vectors

    def extract(self, images: Tensor) -> Tensor:
        return self(images)


def trunk_and_embedder() -> nn.Module:
    """As in pytorch-metric-learning: features, and a layer that makes vectors of them."""
    trunk = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU())
    return nn.Sequential(trunk, nn.Linear(128, 32))


def recall(model: nn.Module) -> tuple[float, float]:
    """R@1 on digits of unseen classes in percent, clean and attacked."""
    how = {"attacks": ["margin"], "protocols": ["corrected"], "eps": EPS, "alpha": EPS / 4, "steps": 10}
    found = ah.audit(model, ah.dataset("digits"), **how, limit=200, examine=None, device="cpu")
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main() -> dict[str, tuple[float, float]]:
    """Train both without attacks, harden both, and measure what that brought."""
    made: dict[str, Callable[[], nn.Module]] = {"OML": Extractor, "PML": trunk_and_embedder}
    found = {}
    for name, make in made.items():
        torch.manual_seed(0)
        model, place = make(), Path(tempfile.mkdtemp())
        ah.fit(model, "digits", "natural", place / "natural", overrides={"train.epochs": 4}, device="cpu")
        found[f"{name} start"] = recall(ah.load(place / "natural", module=make()))
        ah.fit(model, "digits", "hm-lga", place / "robust", overrides={"train.epochs": 8}, device="cpu")
        found[f"{name} hardened"] = recall(ah.load(place / "robust", module=make()))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (clean, attacked) in main().items():
        print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
