"""Harden a ViT of timm with adapters (LoRA) on a folder of photographs: the ViT itself stays as it is.

The run folder holds plain weights: the adapters are merged, and loading it needs no peft.
"""

import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from textures import make_textures

import anchorhold as ah

EPS = 4 / 255
LOSS = "pytorch_metric_learning.losses:NormalizedSoftmaxLoss"  # class proxies do not collapse under min-max training


def recall(model: torch.nn.Module, photos: Path) -> tuple[float, float]:
    """R@1 on the test classes in percent, clean and attacked."""
    how = {"attacks": ["margin"], "protocols": ["corrected"], "eps": EPS, "alpha": EPS / 4, "steps": 10}
    found = ah.audit(model, photos, **how, limit=0, examine=None)
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main(place: Path) -> dict[str, tuple[float, float]]:
    """Train the ViT, harden it with adapters, and measure both."""
    photos = make_textures(place / "photos", each=16)
    model = ah.Embedder("vit_tiny_patch16_224", 64, size=32)
    common = {"data": {"resize": 32, "crop": 32, "flip": False}, "batch": {"pairs": 16, "mining_pairs": 0}}
    natural = {"train": {"epochs": 1}, "optimiser": {"lr": 3e-4}}
    more = {"train": {"epochs": 6}, "optimiser": {"lr": 3e-3}, "model": {"train": "lora"}}
    loss = {"loss": LOSS, "loss_args": {"temperature": 0.1}, "loss_lr": 1e-2}
    attack = {"eps": 6 / 255, "steps": 3, "alpha": 3 / 255}
    ah.fit(model, photos, "natural", place / "start", overrides={**common, **natural})
    control = deepcopy(model)  # trained as long as the hardened one, without attacks
    ah.fit(control, photos, "natural", place / "control", overrides={**common, **more, "defence": loss})
    ah.fit(model, photos, "madry", place / "hardened", overrides={**common, **more, "defence": {**loss, **attack}})
    return {run: recall(ah.load(place / run), photos) for run in ("start", "control", "hardened")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (clean, attacked) in main(Path(folder)).items():
            print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
