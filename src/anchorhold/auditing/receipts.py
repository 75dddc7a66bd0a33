"""Receipts: perturbed images of an audit, as files that anybody can check; `verifying` does.

    receipts/receipts.json      of which model, data, ε, seed, limit; for each image its sample, target, measure, hash
    receipts/GOAL/000007.png    the images, which a PNG holds without loss

The images are those of the audit in 8 bits, within ε of the clean ones; what is stated is measured on them as they are
in the file. Which samples have one is fixed by seed and limit before anything is attacked. Files that come from others
may say anything: whatever is missing or of another type is refused here, in one line.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..record import atomic

__all__ = ["RECEIPTS", "SCHEMA", "Receipts", "digest", "read_pixels", "read_receipts", "receipted"]

SCHEMA = "anchorhold.receipts/1"
RECEIPTS = 32  # images that are kept for each goal, spread evenly over the samples whatever came of them
MOST = 100  # what no measure reaches

_NUMBER = (int, float)
_STATED = {"model": str, "eps": _NUMBER, "seed": int, "limit": int, "data": dict, "goals": dict, "receipts": dict}
_ENTRY = {"file": str, "sample": int, "targets": (list, type(None)), "measure": (*_NUMBER, type(None)), "hash": str}
_HOW = {"attack": str, "measure": str, "settings": dict}


def receipted(ids: Tensor) -> list[int]:
    """Which of the attacked samples (sorted) have receipts: at most 32, spread evenly."""
    places = torch.linspace(0, len(ids) - 1, min(RECEIPTS, len(ids))).round().long()
    return sorted(set(ids[places].tolist()))


@dataclass(frozen=True, eq=False)
class Receipts:
    """The images that an audit keeps of each goal, and what is said about them."""

    about: dict[str, Any]
    goals: dict[str, dict[str, Tensor]]  # by goal: ids, images (uint8 NCHW), measure, perhaps targets
    settings: dict[str, dict[str, Any]]  # by goal: how its targets are drawn

    def save(self, folder: Path) -> None:
        """Write receipts.json and the images."""
        from PIL import Image

        entries: dict[str, list[dict[str, Any]]] = {}
        for name, rows in self.goals.items():
            entries[name] = []
            for place, number in enumerate(rows["ids"].tolist()):
                pixels = rows["images"][place].permute(1, 2, 0).contiguous().numpy()
                file = _file(name, number)
                with atomic(folder / file) as temporary:
                    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(temporary, format="PNG")
                aims = rows["targets"][place].reshape(-1).tolist() if "targets" in rows else None
                found = float(rows["measure"][place])
                measure = found if math.isfinite(found) else None  # whoever aims at nobody has none
                entry = {"file": file, "sample": number, "targets": aims, "measure": measure}
                entries[name].append(entry | {"hash": digest(self.about, name, entry, pixels)})
        text = {"schema": SCHEMA, **self.about, "goals": self.settings, "receipts": entries}
        with atomic(folder / "receipts.json") as temporary:
            temporary.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- reading what others wrote


def read_receipts(place: Path) -> dict[str, Any]:
    """What receipts.json states, in the form that `Receipts.save` gives it."""
    path = place / "receipts.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        raise RunError(f"there are no receipts in {place}; audit with --strength strong writes some") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"cannot read {path} ({error}): get a whole copy of it") from None
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        raise RunError(f"{path} is not of schema {SCHEMA}")
    wrong = _malformed(told)
    if wrong is not None:
        raise RunError(f"{path}: {wrong}; get a whole copy of it, or audit again")
    return {"resize": None, "crop": None} | told


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _malformed(told: Mapping[str, Any]) -> str | None:
    """The first thing that is missing, or not of its type."""
    wrong = _untyped(told, _STATED, "it")
    if wrong is not None:
        return wrong
    if not (0 <= told["eps"] <= 1 and told["limit"] >= 0):
        return f"ε is {told['eps']:g} and limit {told['limit']}"
    if not all(type(told.get(name)) in (int, type(None)) for name in ("resize", "crop")):
        return "resize and crop are no whole numbers"
    for side in ("query", "gallery"):
        wrong = _untyped(told["data"].get(side), {"fingerprint": str}, f"{side} of its data")
        if wrong is not None:
            return wrong
    if not any(told["receipts"].values()):
        return "there is no receipt in it"
    if list(told["goals"]) != list(told["receipts"]):
        return "goals and receipts have other names"
    for name, entries in told["receipts"].items():
        wrong = _untyped(told["goals"][name], _HOW, name)
        if wrong is not None:
            return wrong
        if not isinstance(entries, list) or not entries:
            return f"{name} has no receipts"
        for number, entry in enumerate(entries):
            wrong = _untyped(entry, _ENTRY, f"receipt {number} of {name}")
            if wrong is None and entry["file"] != _file(name, entry["sample"]):
                wrong = f"receipt {number} of {name} has no file {_file(name, entry['sample'])}"
            if wrong is None and abs(entry["measure"] or 0) > MOST:
                wrong = f"measure of receipt {number} of {name} is no share, cosine or distance"
            if wrong is not None:
                return wrong
    return None


def _untyped(given: Any, wanted: Mapping[str, Any], who: str) -> str | None:
    if not isinstance(given, dict):
        return f"{who} is {type(given).__name__}, no table"
    for name, kind in wanted.items():
        if name not in given:
            return f"{who} has no {name}"
        if not isinstance(given[name], kind) or isinstance(given[name], bool):
            return f"{name} of {who} is {type(given[name]).__name__}"
    return None


def _file(name: str, number: int) -> str:
    return f"{name}/{number:06d}.png"


def read_pixels(path: Path, shape: tuple[int, ...]) -> Any:
    """A PNG as bytes (H, W, C), which have to be of the shape (C, H, W) of their sample."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
    except Exception as error:  # Pillow raises a dozen kinds for damaged files
        raise RunError(f"cannot read the receipt {path} ({error}): get a whole copy of it") from None
    pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    if pixels.dtype != np.uint8 or (pixels.shape[2], *pixels.shape[:2]) != shape:
        raise RunError(f"the receipt {path} is {pixels.dtype} of shape {pixels.shape}; its sample has {shape}")
    return np.ascontiguousarray(pixels).copy()


def digest(about: Mapping[str, Any], name: str, entry: Mapping[str, Any], pixels: Any) -> str:
    """A hash of an image with everything that is said about it."""
    said = [about[part] for part in ("model", "eps", "seed", "limit")]
    said += [name, entry["sample"], entry["targets"], entry["measure"], list(pixels.shape)]
    return hashlib.blake2b(json.dumps(said).encode() + pixels.tobytes(), digest_size=16).hexdigest()
