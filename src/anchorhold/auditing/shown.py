"""Small pictures of what the examples of an audit show, so that its page can be made where the images are not."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RunError
from ..record import atomic
from .intake import Material
from .outcomes import RunRows
from .sweep import to_bytes
from .verdict import SCHEMA

__all__ = ["AIMED", "SHOWN", "Pictures", "load_pictures", "pictures_of"]

SHOWN = 5  # so many neighbours have a picture
AIMED = ("QA+", "QA-", "TMA", "GTM", "GTT", "nearest")  # attacks whose targets are gallery items
_SIDE = 96  # pixels; larger images are shrunk to it
_BATCH = 64


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images of both sides by id: `images[side][id]` is uint8 (H, W, C), `classes[side][id]` the name of its class."""

    images: dict[str, dict[int, Tensor]]
    classes: dict[str, dict[int, str]]

    def save(self, path: Path) -> None:
        """Write them to one file; the names of the classes are its metadata."""
        tensors = {}
        for side, images in self.images.items():
            tensors[f"{side}/ids"] = torch.tensor(list(images), dtype=torch.long)
            tensors[f"{side}/images"] = torch.stack(list(images.values()))
        names = {side: list(classes.values()) for side, classes in self.classes.items()}
        with atomic(path) as temporary:
            safetensors.torch.save_file(tensors, temporary, {"schema": SCHEMA, "classes": json.dumps(names)})


def load_pictures(path: Path) -> Pictures:
    """What `Pictures.save` wrote."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            names = json.loads((file.metadata() or {})["classes"])
            ids = {side: file.get_tensor(f"{side}/ids").tolist() for side in names}
            images = {side: dict(zip(ids[side], file.get_tensor(f"{side}/images"))) for side in names}
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}; audit anew, or remove it for a page without pictures") from None
    return Pictures(images, {side: dict(zip(ids[side], map(str, names[side]))) for side in names})


def pictures_of(material: Material, runs: Sequence[RunRows]) -> Pictures:
    """Pictures of all samples, queries, targets and neighbours that the examples of these runs name."""
    wanted: dict[str, set[int]] = {"query": set(), "gallery": set()}
    for run in runs:
        found = run.examples
        if not found:
            continue
        wanted[run.side].update(found["ids"].tolist())
        wanted["query"].update(found["asked"].tolist())
        for name in ("before", "after"):
            wanted["gallery"].update(found[name][:, :SHOWN].flatten().tolist())
        if run.attack in AIMED and run.targets is not None:
            rows = torch.isin(run.ids.cpu(), found["ids"].cpu())
            wanted["gallery"].update(run.targets.cpu()[rows].reshape(int(rows.sum()), -1)[:, 0].tolist())
    images: dict[str, dict[int, Tensor]] = {}
    classes: dict[str, dict[int, str]] = {}
    for side, ids in wanted.items():
        chosen = torch.tensor(sorted(ids - {-1}), dtype=torch.long)  # -1 is nobody
        source = material.query if side == "query" else material.gallery
        small = [_small(each).cpu() for each in source.plain(chosen, batch=_BATCH)]
        images[side] = dict(zip(chosen.tolist(), torch.cat(small)))
        labels = source.split.labels.cpu()[chosen].tolist()
        classes[side] = {at: source.split.classes[label] for at, label in zip(chosen.tolist(), labels)}
    return Pictures(images, classes)


def _small(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    scale = _SIDE / max(height, width)
    if scale < 1:
        images = F.interpolate(images, (max(1, round(height * scale)), max(1, round(width * scale))), mode="area")
    return to_bytes(images)
