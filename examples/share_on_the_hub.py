"""Train a small model on digits, audit it, push it to the Hugging Face Hub, and load it back.

hf auth login                                    # or set HF_TOKEN
python examples/share_on_the_hub.py me/digits    # HF_ENDPOINT names another Hub than huggingface.co
"""

import sys
import tempfile
from pathlib import Path

import torch

import anchorhold as ah


def main(repo: str) -> None:
    digits = ah.dataset("digits")
    with tempfile.TemporaryDirectory() as place:
        overrides = {"train.epochs": 1, "model.dim": 32}
        run = ah.fit(None, digits, "natural", Path(place) / "run", overrides=overrides, device="cpu")
        model = ah.load(run.path)
        audit = ah.audit(model, digits, limit=20, steps=4, epsilons=(), out=Path(place) / "audit", device="cpu")
        name = model.push_to_hub(repo, run=run, audit=audit, license="apache-2.0", private=True)
    print(f"pushed: {name}")

    again = ah.load(name)  # with its commit: what others push later changes nothing
    images = digits.test.images[:8].permute(0, 3, 1, 2) / 255
    print(f"same vectors: {torch.equal(again(images), model(images))}")
    print(f"loaded from: {again.hub}")
    print(f"R@1 {audit.clean['R@1'].value:.1f}, ERS {audit.protocols['corrected'].ers.value:.1f} (corrected)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "me/digits")
