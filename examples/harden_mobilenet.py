"""Harden torchvision's MobileNetV3 on a folder of photographs: half a minute on a CPU.

The start is a MobileNet that was trained without attacks. You would take one with pretrained weights.
"""

import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from textures import make_textures
from torch import nn
from torchvision.models import mobilenet_v3_small

import anchorhold as ah

EPS = 2 / 255


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
    how = {"attacks": ["margin"], "protocols": ["corrected"], "eps": EPS, "alpha": EPS / 4, "steps": 10}
    found = ah.audit(model, photos, **how, limit=0, examine=None)
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main() -> dict[str, tuple[float, float]]:
    """Train, harden, and measure both."""
    place = Path(tempfile.mkdtemp())
    photos = make_textures(place / "photos", each=16)
    model = ah.wrap(network(), size=32)
    common = {"data": {"resize": 32, "crop": 32, "flip": False}, "batch": {"pairs": 16, "mining_pairs": 0}}
    natural = {"train": {"epochs": 8}, "optimiser": {"lr": 2e-3}, "model": {"freeze_batchnorm": False}}
    more = {"train": {"epochs": 6}, "optimiser": {"lr": 1e-3}}
    robust = {**more, "defence": {"eps": EPS, "steps": 2, "alpha": EPS / 2}}
    ah.fit(model, photos, "natural", place / "start", overrides={**common, **natural})
    control = deepcopy(model)  # trained as long as the hardened one, without attacks
    ah.fit(control, photos, "natural", place / "control", overrides={**common, **more})
    ah.fit(model, photos, "hm", place / "hardened", overrides={**common, **robust})
    return {run: recall(ah.load(place / run, module=network()), photos) for run in ("start", "control", "hardened")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (clean, attacked) in main().items():
        print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
