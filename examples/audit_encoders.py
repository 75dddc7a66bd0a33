"""Audit encoders that people deploy: a CLIP of open_clip and a DINOv2 of transformers.

Both are small and have random weights here, since nothing is downloaded. Yours have names, such as
open_clip:ViT-B-32/laion2b_s34b_b79k and transformers:facebook/dinov2-small.
"""

import json
import tempfile
from pathlib import Path

import open_clip
import torch
import transformers
from textures import make_textures

import anchorhold as ah


def small_models(place: Path) -> list[str]:
    """Names of a small open_clip and a small transformers model."""
    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    text = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
    place.mkdir(parents=True)
    (place / "small-clip.json").write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(place)
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    transformers.Dinov2Model(config).save_pretrained(place / "dinov2")
    sizes = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    transformers.BitImageProcessor(**sizes).save_pretrained(place / "dinov2")
    return ["open_clip:small-clip/none", f"transformers:{place / 'dinov2'}"]


def main() -> dict[str, tuple[str, float, float]]:
    """How each prepares files, and its R@1 clean and attacked, by library."""
    place, found = Path(tempfile.mkdtemp()), {}
    photos = make_textures(place / "photos", each=10)
    for name in small_models(place / "models"):
        model = ah.load(name)
        audit = ah.audit(model, photos, attacks=["margin"], protocols=["corrected"], steps=10, limit=40)
        attacked = audit.protocols["corrected"].columns["margin"].value
        found[audit.model["preset"].partition(":")[0]] = (str(model.preprocess), audit.clean["R@1"].value, attacked)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for library, (preparation, clean, attacked) in main().items():
        print(f"{library}: {preparation}; R@1 {clean:.1f}, attacked {attacked:.1f}")
