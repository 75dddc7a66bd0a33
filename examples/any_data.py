"""Bring data in any form, and a network with dropout, tied weights and an input that is not square.

`fit` and `audit` take the same forms: tensors, arrays, a torch Dataset, a DataLoader, a folder, a CSV or a name. Labels
are numbers or names. Here digits of 8 × 6 pixels come as arrays with names, as a Dataset and as a DataLoader.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import anchorhold as ah

EPS = 0.1
NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


class Narrow(nn.Module):
    """Dropout, two layers with one weight, and images of 8 × 6."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        )
        self.wide, self.drop = nn.Linear(64 * 8 * 6, 64), nn.Dropout(0.1)
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.two.weight = self.one.weight

    def forward(self, images: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.wide(self.first(images).flatten(1))))
        vectors: Tensor = self.two(torch.relu(self.one(x)))
        return vectors


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Training and test classes as arrays: images (N, 1, 8, 6) in [0, 1], and names of classes."""
    data = ah.dataset("digits")
    parts = []
    for split in (data.train, data.test):
        assert split.images is not None
        pixels = split.images.permute(0, 3, 1, 2)[..., 1:7].float() / 255
        numbers = np.array([int(name) for name in split.classes])[split.labels.numpy()]
        parts.append((pixels.numpy(), NAMES[numbers]))
    return parts[0], parts[1]


def recall(model: nn.Module, data: Any) -> tuple[float, float]:
    """R@1 in percent, clean and attacked."""
    how = {"attacks": ["margin"], "protocols": ["corrected"], "eps": EPS, "alpha": EPS / 4, "steps": 10}
    found = ah.audit(model, data, **how, limit=300, examine=None, device="cpu")
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main(place: Path) -> dict[str, tuple[float, float]]:
    """Train, harden, and audit the result in several forms of the same images."""
    train, test = digits()
    torch.manual_seed(0)
    model = Narrow()
    arrays = {"train": train, "test": test}
    common = {"data.flip": False, "batch.pairs": 64, "batch.mining_pairs": 0, "optimiser.lr": 1e-3}
    ah.fit(model, arrays, "natural", place / "natural", overrides={**common, "train.epochs": 4}, device="cpu")
    found = {"start": recall(ah.load(place / "natural", module=Narrow()), test)}
    robust = {**common, "train.epochs": 8, "defence.eps": 77 / 255, "defence.alpha": 0.075}
    ah.fit(model, arrays, "hm-lga", place / "robust", overrides=robust, device="cpu")
    hard = ah.load(place / "robust", module=Narrow())
    pixels, names = torch.from_numpy(test[0]), torch.from_numpy(np.unique(test[1], return_inverse=True)[1])
    forms = {"hardened": test, "as a Dataset": TensorDataset(pixels, names)}
    forms["as a DataLoader"] = DataLoader(forms["as a Dataset"], batch_size=64)
    return found | {name: recall(hard, form) for name, form in forms.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (clean, attacked) in main(Path(folder)).items():
            print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
