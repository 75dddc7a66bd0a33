"""Harden torchvision's MobileNetV3 on a folder of photographs: half a minute on a CPU.

The start is a MobileNet that was trained without attacks. You would take one with pretrained weights.
"""

import tempfile
from pathlib import Path

import torch
from textures import make_textures
from torch import nn
from torchvision.models import mobilenet_v3_small

import anchorhold as ah

EPS = 8 / 255


def network() -> nn.Module:
    """MobileNetV3 with 64 outputs. BatchNorm learns fast, since there are few images."""
    torch.manual_seed(0)
    net = mobilenet_v3_small(num_classes=64)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.2
    return net


def recall(model: nn.Module, photos: Path) -> tuple[float, float]:
    """R@1 on the test classes in percent, clean and attacked."""
    found = ah.audit(model, photos, attacks=["margin"], protocols=["corrected"], eps=EPS, alpha=2 / 255, steps=10)
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main() -> dict[str, tuple[float, float]]:
    """Train, harden, and measure both."""
    place = Path(tempfile.mkdtemp())
    photos = make_textures(place / "photos")
    model = ah.wrap(network(), size=32)
    common = {"data": {"resize": 32, "crop": 32, "flip": False}, "batch": {"pairs": 16, "mining_pairs": 0}}
    natural = {"train": {"epochs": 12}, "optimiser": {"lr": 2e-3}, "model": {"freeze_batchnorm": False}}
    robust = {"train": {"epochs": 8}, "optimiser": {"lr": 1e-3}, "defence": {"steps": 4, "alpha": 3 / 255}}
    ah.fit(model, photos, "natural", place / "natural", overrides={**common, **natural})
    before = recall(ah.load(place / "natural", module=network()), photos)
    ah.fit(model, photos, "hm-lga", place / "robust", overrides={**common, **robust})
    after = recall(ah.load(place / "robust", module=network()), photos)
    return {"start": before, "hardened": after}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (clean, attacked) in main().items():
        print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
