"""verify(): do the receipts of an audit hold? In seconds, without attacking.

Is this the model, are these the data, are all of the samples there and no other, is every image within ε of its sample,
is the target the one that the seed draws, does the model answer as stated, and does audit.json, where it lies beside,
say the same?
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attacks import Goal, Scene, goal_named
from ..console import Report, Silent
from ..data.datasets import dataset
from ..device import device_named, living_on
from ..errors import DataError, RunError
from ..model.chunked import chunked
from ..model.frozen import Embed, embed_all, frozen, precise
from ..model.victim import as_victim, fingerprint_of
from ..random import Key
from .ensemble import Task, tasks
from .intake import Data, Material, prepare, sample
from .receipts import digest, read_pixels, read_receipts, receipted
from .sweep import AttackRun
from .verdict import fraction

__all__ = ["Verified", "verify"]

SLACK = 1e-3  # of a level
AGREES = 2e-3  # how far a measure may be from what is stated: two ranks of a thousand
ROUNDING = 1e-4  # how far fp32 on another device may move an embedding, ten times over
LARGEST = 10_000  # setting of an attack, such as w: more targets than memory holds are no attack
DRAWS = 16  # such moves that are tried where a target or a measure is not as stated


@dataclass(frozen=True)
class Verified:
    """What was checked, and what is wrong with it."""

    images: int
    means: dict[str, float]  # by goal, with settings that are not the usual ones: its images' measure by this model
    eps: float
    seed: int
    limit: int
    of: str  # the images they are of, in words
    beside: bool  # whether audit.json was there to compare with
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        goals = ", ".join(f"{name} {mean:.3f}" for name, mean in self.means.items())
        many = f"{self.limit:,} samples" if self.limit else "all samples"
        same = "model, data, ε, seed and goals are those of audit.json, whose scores were not made again"
        told = same if self.beside else "there is no audit.json to compare with"
        return (
            f"{self.images} images of {len(self.means)} goals hold: {goals}\n"
            f"ε = {fraction(self.eps)}, seed {self.seed}, {many} of {self.of}; measures within {AGREES:g}; {told}"
        )


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
    place = Path(folder)
    place = place / "receipts" if (place / "receipts").is_dir() else place
    told = read_receipts(place)
    goals = {name: _task(place, name, how) for name, how in told["goals"].items()}
    where, victim = device_named(device), as_victim(model)
    data = _meant(data, told)
    # Images that an audit skipped are skipped here too; with any others the fingerprints differ.
    material = prepare(data, victim, where, report or Silent(), told.get("resize"), told.get("crop"), "skip")
    problems, beside = _compare(place, told)
    known = len(problems)
    if fingerprint_of(victim) != told["model"]:
        problems.append(f"the receipts are of another model: weights {told['model']}, not {fingerprint_of(victim)}")
    for side in ("gallery", "query"):
        if material.describe()[side]["fingerprint"] != told["data"][side]["fingerprint"]:
            problems.append(f"the receipts are of other data: the {side} has another fingerprint")
    means: dict[str, float] = {}
    if len(problems) == known:
        with living_on(victim, where), frozen(victim) as view, precise():
            embed = chunked(view, batch)
            gallery = embed_all(embed, material.gallery.plain(batch=batch))
            queries = gallery if material.same else embed_all(embed, material.query.plain(batch=batch))
            bench = _Bench(place, told, embed, material, material.scene(queries, gallery), problems)
            for name, task in goals.items():
                means[name + _unusual(task)] = bench.check(name, task, told["receipts"][name])
    count = sum(len(entries) for entries in told["receipts"].values())
    split = material.query.split
    of = f"{split.name} ({len(split):,} images of {len(torch.unique(split.labels)):,} classes)"
    return Verified(count, means, told["eps"], told["seed"], told["limit"], of, beside, tuple(problems))


def _meant(data: Data, told: Mapping[str, Any]) -> Data:
    """Of a folder or a CSV the test split that training makes of it, where that was audited and not all of it."""
    kind = {"folder/test": "folder", "csv/test": "csv"}.get(str(told["data"]["query"].get("name")))
    if kind is None or not isinstance(data, str | Path):
        return data
    try:
        return dataset(kind, data)
    except DataError:  # then it is another folder: the fingerprints say so
        return data


@dataclass(frozen=True, eq=False)
class _Bench:
    """What receipts are held against; what is wrong with them is added to `problems`."""

    place: Path
    told: Mapping[str, Any]
    embed: Embed
    material: Material
    scene: Scene
    problems: list[str]

    def check(self, name: str, task: Task, entries: Sequence[Mapping[str, Any]]) -> float:
        """All receipts of one goal: samples, hashes, ε, targets and measures; the mean of these is returned."""
        told, goal, key = self.told, task.goal, Key.of(self.told["seed"])("audit")
        labels = self.material.labels if goal.side == "query" else self.material.gallery_labels
        due = receipted(sample(labels, told["limit"], key("sample")))
        entries = sorted(entries, key=lambda entry: int(entry["sample"]))
        given = [entry["sample"] for entry in entries]
        if given != due:
            absent, other = len(set(due) - set(given)), len(set(given) - set(due))
            what = f"the {len(due)} samples that seed {told['seed']} and limit {told['limit']} fix"
            said = f"{absent} are missing, {other} are of another sample"
            self.problems.append(f"{name}: {len(given)} receipts for {what}: {said}")
            return math.nan
        ids = torch.tensor(due)
        (clean,) = self.material.side(goal.side).plain(ids, batch=len(ids))
        pixels = [read_pixels(self.place / entry["file"], tuple(clean.shape[1:])) for entry in entries]
        levels = torch.stack([torch.from_numpy(image).permute(2, 0, 1) for image in pixels]).to(clean.device)
        away = (levels.double() - 255 * clean.double()).abs().flatten(1).amax(1).tolist()
        numbers = ids.to(self.scene.gallery.device)
        aims, drawn = self._aims(goal, numbers, [entry["targets"] for entry in entries], key)
        for entry, image, far, aim in zip(entries, pixels, away, drawn):
            if entry["hash"] != digest(told, name, entry, image):
                self.problems.append(f"{entry['file']}: its hash is another; image, target or measure was changed")
            if far > max(255 * told["eps"], 0.5) + SLACK:
                said = f"{far:.0f} levels from its sample, and ε is {255 * told['eps']:g}"
                self.problems.append(f"{entry['file']}: {said}")
            if entry["targets"] != aim:
                self.problems.append(
                    f"{entry['file']}: aims at {entry['targets']}, and seed {told['seed']} draws {aim}"
                )
        embeddings = embed_all(self.embed, [levels.to(self.scene.gallery.dtype) / 255])

        def measure(e: Tensor, rows: Tensor) -> Tensor:
            at = None if aims is None else aims[rows]
            return goal.measure(self.scene, numbers[rows], at, e, e)[task.main].double().cpu()

        measured = measure(embeddings, torch.arange(len(ids)))
        stated = torch.tensor([math.nan if e["measure"] is None else e["measure"] for e in entries]).double()
        for row in _untrue(stated, measured, embeddings, measure, key("rounding")):
            said = f"{measured[row]:.4f} is measured, {stated[row]:.4f} is stated"
            self.problems.append(f"{entries[row]['file']}: {said}")
        return float(measured.nanmean())

    def _aims(self, goal: Goal, ids: Tensor, stated: list[Any], key: Key) -> tuple[Tensor | None, list[Any]]:
        """The targets that the seed draws, and as lists; of those that rounding may decide, the stated ones.

        Some are drawn among the nearest, and where two are equally near, another device may have them the other way.
        """
        aims = goal.targets(self.scene, ids, key)
        if aims is None:
            return None, [None] * len(ids)
        scene, aims = self.scene, aims.clone()
        for draw in range(DRAWS):
            drawn = [row.reshape(-1).tolist() for row in aims]
            off = torch.tensor([row for row, (one, two) in enumerate(zip(drawn, stated)) if one != two])
            if not len(off):
                break
            moved = {
                side: _rounded(getattr(scene, side), key("rounding", side, draw)) for side in ("gallery", "queries")
            }
            other = goal.targets(replace(scene, **moved), ids[off], key)
            for row, aim in zip(off.tolist(), [] if other is None else other):
                if aim.reshape(-1).tolist() == stated[row]:
                    aims[row] = aim
        return aims, [row.reshape(-1).tolist() for row in aims]


def _rounded(e: Tensor, key: Key, rows: Tensor | None = None) -> Tensor:
    """Embeddings moved as far as rounding might, in random directions."""
    numbers = torch.arange(len(e), device=e.device) if rows is None else rows.to(e.device)
    noise = F.normalize(key.normal(numbers, e.shape[1:])).to(e)
    return e + ROUNDING * noise


def _untrue(stated: Tensor, measured: Tensor, embeddings: Tensor, measure: Any, key: Key) -> list[int]:
    """Rows that are not as stated, and would not be if the embedding were rounded otherwise.

    A right answer is 1 or 0: where two items are equally near, another device may find the other one first.
    """
    near = ((stated - measured).abs() <= AGREES) | (stated.isnan() & measured.isnan())
    rows = torch.nonzero(~near).squeeze(1)
    low = high = measured[rows]
    for draw in range(DRAWS if len(rows) else 0):
        now = measure(_rounded(embeddings[rows], key(draw), rows), rows)
        low, high = torch.minimum(low, now), torch.maximum(high, now)
    held = (stated[rows] >= low - AGREES) & (stated[rows] <= high + AGREES)
    return [int(row) for row in rows[~held]]


def _compare(place: Path, told: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What audit.json states otherwise, and whether there is one: in the folder of the receipts, or around it."""
    from ..report.collect import dig, read_audit

    folder = place.parent if place.name == "receipts" else place
    if not (folder / "audit.json").is_file():
        return [], False
    audit = read_audit(folder)
    pairs = {"model": dig(audit, "model", "weights"), "data": audit.get("data")}
    pairs |= {name: dig(audit, "settings", name) for name in ("eps", "seed", "limit", "resize", "crop")}
    problems = [f"audit.json beside it states another {name}" for name, value in pairs.items() if told[name] != value]
    runs = [(str(dig(run, "attack")), run) for run in audit.get("runs") or ()]
    stated = [name for name, run in runs if dig(run, "goals", "strong") is not None]
    if sorted(stated) != sorted(told["receipts"]):
        names = ", ".join(stated) or "no strong audit"
        problems.append(f"audit.json beside it has {names}; the receipts are of {', '.join(told['receipts'])}")
    for name, run in runs:
        how, settings = told["goals"].get(name), dig(run, "goals", "corrected")
        if None not in (how, settings) and settings != how["settings"]:
            problems.append(f"audit.json beside it has other settings of {name}")
    return list(dict.fromkeys(problems)), True


def _task(place: Path, name: str, how: Mapping[str, Any]) -> Task:
    """The goal of that name as the ensemble has it."""
    usual = asdict(goal_named(how["attack"], "corrected"))
    del usual["protocol"]
    for key, value in how["settings"].items():
        kinds = type(value), type(usual.get(key))
        alike = key in usual and (kinds[0] is kinds[1] or kinds == (int, float))
        if not alike or (kinds[0] in (int, float) and abs(value) > LARGEST):
            raise RunError(f"{place / 'receipts.json'}: {how['attack']} has no setting {key} = {value!r}")
    goal = goal_named(how["attack"], "corrected", **how["settings"])
    found = [task for task in tasks([AttackRun(how["attack"], (goal,))]) if task.name == name]
    if not found or (goal.name, found[0].main) != (how["attack"], how["measure"]):
        said = f"{name} is not attacked by {how['attack']} with these settings, or measured by {how['measure']}"
        raise RunError(f"{place / 'receipts.json'}: {said}")
    return found[0]


def _unusual(task: Task) -> str:
    """Settings of a goal that are not the usual ones, as --attacks takes them."""
    usual = asdict(goal_named(task.goal.name, "corrected"))
    return "".join(f":{key}={value}" for key, value in asdict(task.goal).items() if value != usual[key])
