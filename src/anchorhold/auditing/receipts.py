"""Receipts: perturbed images that anybody can check in seconds, without attacking.

    receipts/receipts.json      of which model, data, ε, seed; for each image its sample, target, measure, hash
    receipts/GOAL/0007.png      the images, which a PNG holds without loss

The images are those of the audit in 8 bits, within ε of the clean ones; what is stated is measured on them as they are
in the file. Which samples have one is fixed before anything is attacked. `verify` reads them back and asks: is this the
model, are these the data, is every image within ε of its sample, is the target the one that the seed draws, and does
the model answer as stated?
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..attacks import Goal, goal_named
from ..console import Report, Silent
from ..device import device_named
from ..errors import RunError
from ..model.chunked import chunked
from ..model.frozen import embed_all, frozen
from ..random import Key
from ..record import atomic
from .intake import Data, Material, prepare

__all__ = ["SCHEMA", "Receipts", "Verified", "verify"]

SCHEMA = "anchorhold.receipts/1"
SLACK = 1e-3  # of a level
AGREES = 2e-3  # how far another device may measure from what is stated; about two ranks of a thousand
OTHERWISE = 1 / 16  # of a goal's images, for which rounding on another device may decide otherwise


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
                file = f"{name}/{number:06d}.png"
                with atomic(folder / file) as temporary:
                    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(temporary, format="PNG")
                aims = rows["targets"][place].reshape(-1).tolist() if "targets" in rows else None
                entry = {"file": file, "sample": number, "targets": aims, "measure": float(rows["measure"][place])}
                entries[name].append(entry | {"hash": _digest(self.about, name, entry, pixels)})
        text = {"schema": SCHEMA, **self.about, "goals": self.settings, "receipts": entries}
        with atomic(folder / "receipts.json") as temporary:
            temporary.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Verified:
    """What was checked, and what is wrong with it."""

    images: int
    means: dict[str, float]  # by goal: the measure of its images, as this model gives it
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        goals = ", ".join(f"{name} {mean:.3f}" for name, mean in self.means.items())
        return f"{self.images} images of {len(self.means)} goals hold: {goals}"


def verify(
    folder: str | Path,
    model: nn.Module,
    data: Data,
    *,
    device: str = "auto",
    batch: int = 128,
    report: Report | None = None,
) -> Verified:
    """Check the receipts in `folder` (an audit's, or its receipts) against a model and the data it was audited on."""
    from .run import as_victim, fingerprint_of, living_on

    place = Path(folder)
    place = place / "receipts" if (place / "receipts").is_dir() else place
    told = _read(place)
    where, victim = device_named(device), as_victim(model)
    material = prepare(data, victim, where, report or Silent(), told["resize"], told["crop"])
    problems: list[str] = []
    if fingerprint_of(victim) != told["model"]:
        problems.append(f"the receipts are of another model: weights {told['model']}, not {fingerprint_of(victim)}")
    for side in ("gallery", "query"):
        if material.describe()[side]["fingerprint"] != told["data"][side]["fingerprint"]:
            problems.append(f"the receipts are of other data: the {side} has another fingerprint")
    means: dict[str, float] = {}
    count = 0
    if not problems:
        with living_on(victim, where), frozen(victim) as view:
            embed = chunked(view, batch)
            gallery = embed_all(embed, material.gallery.plain(batch=batch))
            queries = gallery if material.same else embed_all(embed, material.query.plain(batch=batch))
            scene = material.scene(queries, gallery)
            key = Key.of(told["seed"])("audit")
            for name, entries in told["receipts"].items():
                goal = goal_named(told["goals"][name]["attack"], "corrected", **told["goals"][name]["settings"])
                measured = _goal(place, told, name, entries, goal, embed, material, scene, key, problems)
                count += len(entries)
                means[name] = float(measured.mean())
    return Verified(count, means, tuple(problems))


def _goal(
    place: Path,
    told: Mapping[str, Any],
    name: str,
    entries: Sequence[Mapping[str, Any]],
    goal: Goal,
    embed: Any,
    material: Material,
    scene: Any,
    key: Key,
    problems: list[str],
) -> Tensor:
    """All receipts of one goal: hashes, ε, targets, and the measure that is stated."""
    side = material.side(goal.side)
    ids = torch.tensor([entry["sample"] for entry in entries])
    (clean,) = side.plain(ids, batch=len(ids))
    pixels = [_pixels(place / entry["file"]) for entry in entries]
    for entry, image in zip(entries, pixels):
        if entry["hash"] != _digest(told, name, entry, image):
            problems.append(f"{entry['file']}: its hash is another; image, target or measure was changed")
    levels = torch.stack([torch.from_numpy(image.copy()).permute(2, 0, 1) for image in pixels]).to(clean.device)
    if levels.shape != clean.shape:
        raise RunError(f"{name}: images of {tuple(levels.shape[1:])} for samples of {tuple(clean.shape[1:])}")
    away = (levels.double() - 255 * clean.double()).abs().flatten(1).amax(1)
    for entry, far in zip(entries, away.tolist()):
        if far > max(255 * told["eps"], 0.5) + SLACK:
            problems.append(f"{entry['file']}: {far:.0f} levels from its sample, and ε is {255 * told['eps']:g}")
    numbers = ids.to(scene.gallery.device)
    aims = goal.targets(scene, numbers, key)
    drawn = [None] * len(entries) if aims is None else [row.reshape(-1).tolist() for row in aims]
    for entry, aim in zip(entries, drawn):
        if entry["targets"] != aim:
            problems.append(f"{entry['file']}: aims at {entry['targets']}, and seed {told['seed']} draws {aim}")
    embeddings = embed_all(embed, [levels.to(scene.gallery.dtype) / 255])
    measures = goal.measure(scene, numbers, aims, embeddings, embeddings)
    measured = measures[told["goals"][name]["measure"]].cpu()
    pairs = [(entry, now) for entry, now in zip(entries, measured.tolist()) if abs(now - entry["measure"]) > AGREES]
    if len(pairs) > OTHERWISE * len(entries):
        problems += [f"{e['file']}: {now:.4f} is measured, {e['measure']:.4f} is stated" for e, now in pairs]
    return measured


def _pixels(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read the receipt {path}: {error}") from None
    return np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[:, :, None])


def _digest(about: Mapping[str, Any], name: str, entry: Mapping[str, Any], pixels: Any) -> str:
    """A hash of an image with everything that is said about it."""
    said = [about[part] for part in ("model", "eps", "seed")]
    said += [name, entry["sample"], entry["targets"], entry["measure"], list(pixels.shape)]
    return hashlib.blake2b(json.dumps(said).encode() + pixels.tobytes(), digest_size=16).hexdigest()


def _read(place: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((place / "receipts.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"there are no receipts in {place}; audit with --strength strong writes some") from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {place / 'receipts.json'}: {error}") from None
    if not isinstance(told, dict) or told.get("schema") != SCHEMA:
        raise RunError(f"{place / 'receipts.json'} is not of schema {SCHEMA}")
    return told
