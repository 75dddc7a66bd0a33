"""Small pictures for the examples of an audit, so that its page needs no access to the images."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..report.pictures import AIMED, SHOWN, Array, Pictures
from .inputs import Material
from .outcomes import RunRows
from .realisable import to_bytes

__all__ = ["pictures_of"]

_SIDE = 96  # pixels; larger images are shrunk to it
_BATCH = 64


def pictures_of(material: Material, runs: Sequence[RunRows]) -> Pictures:
    """Pictures of all samples, queries, targets and neighbours in the examples of these runs."""
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
    images: dict[str, dict[int, Array]] = {}
    classes: dict[str, dict[int, str]] = {}
    for side, ids in wanted.items():
        chosen = torch.tensor(sorted(ids - {-1}), dtype=torch.long)  # -1 means no target
        source = material.query if side == "query" else material.gallery
        small = [_small(each).cpu() for each in source.plain(chosen, batch=_BATCH)]
        images[side] = dict(zip(chosen.tolist(), torch.cat(small).numpy()))
        labels = source.split.labels.cpu()[chosen].tolist()
        classes[side] = {at: source.split.classes[label] for at, label in zip(chosen.tolist(), labels)}
    return Pictures(images, classes)


def _small(images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    scale = _SIDE / max(height, width)
    if scale < 1:
        images = F.interpolate(images, (max(1, round(height * scale)), max(1, round(width * scale))), mode="area")
    return to_bytes(images)
