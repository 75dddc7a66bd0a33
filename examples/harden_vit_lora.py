"""Harden a ViT of timm with adapters (LoRA) on a folder of photographs: the ViT itself stays as it is.

The run folder holds plain weights: the adapters are merged, and loading it needs no peft.
"""

import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from textures import make_textures

import anchorhold as ah

EPS = 2 / 255


def recall(model: torch.nn.Module, photos: Path) -> tuple[float, float]:
    """R@1 on the test classes in percent, clean and attacked."""
    how = {"attacks": ["margin"], "protocols": ["corrected"], "eps": EPS, "alpha": EPS / 4, "steps": 10}
    found = ah.audit(model, photos, **how, limit=0, examine=None)
    return found.clean["R@1"].value, found.protocols["corrected"].columns["margin"].value


def main() -> dict[str, tuple[float, float]]:
    """Train the ViT, harden it with adapters, and measure both."""
    place = Path(tempfile.mkdtemp())
    photos = make_textures(place / "photos", each=16)
    model = ah.Embedder("vit_tiny_patch16_224", 64, size=32)
    common = {"data": {"resize": 32, "crop": 32, "flip": False}, "batch": {"pairs": 16, "mining_pairs": 0}}
    natural = {"train": {"epochs": 1}, "optimiser": {"lr": 3e-4}}
    more = {"train": {"epochs": 2}, "optimiser": {"lr": 1e-3}, "model": {"train": "lora", "lora_rank": 4}}
    robust = {**more, "defence": {"eps": EPS, "steps": 2, "alpha": EPS / 2}}
    ah.fit(model, photos, "natural", place / "start", overrides={**common, **natural})
    control = deepcopy(model)  # trained as long as the hardened one, without attacks
    ah.fit(control, photos, "natural", place / "control", overrides={**common, **more})
    ah.fit(model, photos, "hm", place / "hardened", overrides={**common, **robust})
    return {run: recall(ah.load(place / run), photos) for run in ("start", "control", "hardened")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (clean, attacked) in main().items():
        print(f"{name}: R@1 {clean:.1f}, attacked {attacked:.1f}")
