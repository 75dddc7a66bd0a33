"""Harden a ViT of timm with adapters (LoRA) on a folder of photographs: the ViT itself stays as it is.

The run folder holds plain weights: the adapters are merged, and loading it needs no peft.
"""

import tempfile
from pathlib import Path

import torch
from textures import make_textures

import anchorhold as ah

EPS = 8 / 255


def recall(model: torch.nn.Module, photos: Path) -> tuple[float, float]:
    """R@1 on the test classes in percent, clean and attacked."""
    found = ah.audit(model, photos, attacks=["margin"], protocols=["corrected"], eps=EPS, alpha=2 / 255, steps=10)
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main() -> dict[str, tuple[float, float]]:
    """Train the ViT, harden it with adapters, and measure both."""
    place = Path(tempfile.mkdtemp())
    photos = make_textures(place / "photos")
    model = ah.Embedder("vit_tiny_patch16_224", 64, size=32)
    common = {"data": {"resize": 32, "crop": 32, "flip": False}, "batch": {"pairs": 16, "mining_pairs": 0}}
    natural = {"train": {"epochs": 3}, "optimiser": {"lr": 3e-4}}
    adapters = {"train": "lora", "lora_rank": 4}
    robust = {"train": {"epochs": 6}, "optimiser": {"lr": 2e-3}, "defence": {"steps": 4, "alpha": 3 / 255}}
    ah.fit(model, photos, "natural", place / "natural", overrides={**common, **natural})
    before = recall(ah.load(place / "natural"), photos)
    ah.fit(model, photos, "hm-lga", place / "robust", overrides={**common, **robust, "model": adapters})
    after = recall(ah.load(place / "robust"), photos)
    return {"start": before, "hardened": after}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (clean, attacked) in main().items():
        print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
