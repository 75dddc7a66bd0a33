"""Receipts: perturbed images of an audit, as files that anyone can check with `verifying`.

    receipts/receipts.json      model, data, ε, seed, limit; for each image its sample, target, measure and hash
    receipts/GOAL/000007.png    the images, which a PNG holds without loss

The images are those of the audit in 8 bits, within ε of the clean ones. Stated measures are of the images in the files.
Seed and limit determine the samples before the attack. Files from others cannot be trusted: a missing field or a wrong
type is refused in one line.
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

from ..errors import RunError, lacks_memory
from ..interface import option
from ..runs.files import regular
from ..runs.locks import tidy
from ..runs.writing import atomic

__all__ = ["RECEIPTS", "SCHEMA", "Receipts", "digest", "read_pixels", "read_receipts", "receipted"]

SCHEMA = "anchorhold.receipts/1"
RECEIPTS = 32  # images kept for each goal, evenly spaced over the samples, independent of the result
MOST = 100  # no measure reaches this
MOST_L2 = 10_000  # no image of a million pixels is further from another

_NUMBER = (int, float)
_STATED = {"model": str, "eps": _NUMBER, "seed": int, "limit": int, "data": dict, "goals": dict, "receipts": dict}
_ENTRY = {"file": str, "sample": int, "targets": (list, type(None)), "measure": (*_NUMBER, type(None)), "hash": str}
_HOW = {"attack": str, "measure": str, "settings": dict}


def receipted(ids: Tensor) -> list[int]:
    """Which of the attacked samples (sorted) have receipts: at most 32, evenly spaced."""
    places = torch.linspace(0, len(ids) - 1, min(RECEIPTS, len(ids))).round().long()
    return sorted(set(ids[places].tolist()))


@dataclass(frozen=True, eq=False)
class Receipts:
    """The images that an audit keeps of each goal, with their statements."""

    about: dict[str, Any]
    goals: dict[str, dict[str, Tensor]]  # by goal: ids, images (uint8 NCHW), measure, perhaps targets
    settings: dict[str, dict[str, Any]]  # by goal: its settings, which determine the targets

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
                measure = found if math.isfinite(found) else None  # samples without a target have none
                entry = {"file": file, "sample": number, "targets": aims, "measure": measure}
                entries[name].append(entry | {"hash": digest(self.about, name, entry, pixels)})
        text = {"schema": SCHEMA, **self.about, "goals": self.settings, "receipts": entries}
        with atomic(folder / "receipts.json") as temporary:
            temporary.write_text(
                json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace"
            )
        for written in (folder, *(folder / name for name in self.goals)):
            tidy(written)


# ---------------------------------------------------------------- reading files from others


def read_receipts(place: Path) -> dict[str, Any]:
    """The content of receipts.json, in the form of `Receipts.save`."""
    path = place / "receipts.json"
    try:
        told = json.loads(regular(path).read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        raise RunError(f"no receipts in {place}; an audit with {option('strength', 'strong')} writes them") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"cannot read {path} ({error}): get an intact copy") from None
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        raise RunError(f"{path} is not of schema {SCHEMA}")
    wrong = _malformed(told)
    if wrong is not None:
        raise RunError(f"{path}: {wrong}; get an intact copy, or audit again")
    return {"norm": "linf", "resize": None, "crop": None} | told


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _malformed(told: Mapping[str, Any]) -> str | None:
    """The first field that is missing or has the wrong type."""
    wrong = _untyped(told, _STATED, "it")
    if wrong is not None:
        return wrong
    if told.get("norm", "linf") not in ("linf", "l2"):
        return f"norm is {str(told['norm'])[:40]!r}"
    most = 1 if told.get("norm", "linf") == "linf" else MOST_L2
    if not (0 <= told["eps"] <= most and told["limit"] >= 0):
        return f"ε is {told['eps']:g} and limit {told['limit']}"
    if not all(type(told.get(name)) in (int, type(None)) for name in ("resize", "crop")):
        return "resize and crop are not whole numbers"
    for side in ("query", "gallery"):
        wrong = _untyped(told["data"].get(side), {"fingerprint": str}, f"{side} of its data")
        if wrong is not None:
            return wrong
    if not any(told["receipts"].values()):
        return "it holds no receipts"
    if list(told["goals"]) != list(told["receipts"]):
        return "goals and receipts have different names"
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
                wrong = f"the measure of receipt {number} of {name} is not a share, cosine or distance"
            if wrong is not None:
                return wrong
    return None


def _untyped(given: Any, wanted: Mapping[str, Any], who: str) -> str | None:
    if not isinstance(given, dict):
        return f"{who} is {type(given).__name__}, not a table"
    for name, kind in wanted.items():
        if name not in given:
            return f"{who} has no {name}"
        if not isinstance(given[name], kind) or isinstance(given[name], bool):
            return f"{name} of {who} is {type(given[name]).__name__}"
    return None


def _file(name: str, number: int) -> str:
    return f"{name}/{number:06d}.png"


def read_pixels(path: Path, shape: tuple[int, ...]) -> Any:
    """A PNG as bytes (H, W, C), checked against the shape (C, H, W) of its sample."""
    from PIL import Image

    try:
        with Image.open(regular(path)) as image:
            pixels = np.asarray(image)
    except Exception as error:  # Pillow raises a dozen kinds for damaged files
        if lacks_memory(error):
            raise
        raise RunError(f"cannot read the receipt {path} ({error}): get an intact copy") from None
    pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    if pixels.dtype != np.uint8 or (pixels.shape[2], *pixels.shape[:2]) != shape:
        raise RunError(f"the receipt {path} is {pixels.dtype} of shape {pixels.shape}; its sample has {shape}")
    return np.ascontiguousarray(pixels).copy()


def digest(about: Mapping[str, Any], name: str, entry: Mapping[str, Any], pixels: Any) -> str:
    """A hash of an image and its statements."""
    said = [about[part] for part in ("model", "eps", "seed", "limit")]
    said += ["l2"] if about.get("norm") == "l2" else []  # hashes of Linf are those of earlier versions
    said += [name, entry["sample"], entry["targets"], entry["measure"], list(pixels.shape)]
    return hashlib.blake2b(json.dumps(said).encode() + pixels.tobytes(), digest_size=16).hexdigest()
