"""verify(): check the receipts of an audit in seconds, without attacking.

The checks: model and data are the stated ones; the receipts cover exactly the samples that seed and limit determine;
every image is within ε of its sample; targets are those that the seed draws; the model gives the stated measures; and
audit.json, if present, agrees.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attacks.goal import Goal, Scene
from ..attacks.menu import ATTACKS, goal_named
from ..attacks.own import Maker, maker_of
from ..columns import radius
from ..console import Report, Silent, shown
from ..data.datasets import dataset
from ..data.splits import Dataset
from ..device import device_named, living_on, precise
from ..errors import DataError, RunError, brief, check
from ..interface import worded
from ..model.chunked import chunked
from ..model.frozen import Embed, embed_all, frozen
from ..model.preprocessing import preprocessing_of
from ..model.wrap import as_victim, fingerprint_of
from ..random import Key
from .classes import part_of
from .draws import draws_needed
from .ensemble import Task, tasks
from .inputs import Data, Material, prepare, sample, splits_of
from .plan import AttackRun
from .receipts import digest, read_pixels, read_receipts, receipted

__all__ = ["Verified", "verify"]

LEVEL_SLACK = 1e-3  # tolerance of an 8-bit level
AGREES = 2e-3  # tolerance of a stated measure: two ranks of a thousand
ROUNDING = 1e-4  # ten times the difference of an fp32 embedding between two devices
LARGEST = 10_000  # maximum of an attack's setting, such as w, to limit memory
DRAWS = 16  # random roundings tried where a target or a measure differs


@dataclass(frozen=True)
class Verified:
    """The checked receipts, and the problems found."""

    images: int
    means: dict[str, float]  # mean measure by goal; names include settings that are not the default
    eps: float
    norm: str
    seed: int
    limit: int
    of: str  # the data, in words
    beside: bool  # whether there is an audit.json to compare with
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        goals = ", ".join(f"{name} {mean:.3f}" for name, mean in self.means.items())
        count = f"{len(self.means)} goal{'s' * (len(self.means) != 1)}"
        many = f"{self.limit:,} samples" if self.limit else "all samples"
        same = "model, data, ε, seed and goals agree with audit.json; its scores were not recomputed"
        told = same if self.beside else "there is no audit.json to compare with"
        return (
            f"{self.images} images of {count} verified: {goals}\n"
            f"{radius(self.eps, self.norm)}, seed {self.seed}, {many} of {self.of}; measures within {AGREES:g}; {told}"
        )


def verify(
    folder: str | Path,
    model: nn.Module,
    data: Data,
    *,
    device: str = "auto",
    batch: int = 128,
    report: Report | None = None,
    allow: Collection[str | Goal | type[Goal]] = (),
) -> Verified:
    """Check the receipts in `folder` (an audit's, or its receipts) against a model and the data it was audited on.

    Args:
        folder: of a strong audit, or of its receipts.
        model: the audited model.
        data: what was audited.
        device: auto, cpu, cuda or cuda:N.
        batch: images embedded at a time.
        report: receives progress and messages, such as `ah.Console()`; None is silent.
        allow: attacks of your own that the audit ran: objects, classes, or `module:thing`. Receipts name them and
            never bring their code.
    """
    place = Path(folder)
    place = place / "receipts" if (place / "receipts").is_dir() else place
    told = read_receipts(place)
    makers = _makers(allow)
    goals = {name: _task(place, name, how, makers) for name, how in told["goals"].items()}
    where, victim = device_named(device), as_victim(model)
    data = _meant(data, told, victim)
    # Images that the audit skipped are skipped here too. Other changes show in the fingerprints.
    material = prepare(data, victim, where, report or Silent(), told.get("resize"), told.get("crop"), "skip")
    problems, beside = _compare(place, told)
    known = len(problems)
    if fingerprint_of(victim) != told["model"]:
        problems.append(f"the receipts belong to another model: weights {told['model']}, not {fingerprint_of(victim)}")
    sides: tuple[Literal["gallery", "query"], ...] = ("gallery", "query")
    for side in sides:
        if not material.side(side).split.has_fingerprint(told["data"][side]["fingerprint"]):
            problems.append(f"the receipts belong to other data: the fingerprint of the {side} differs")
    means: dict[str, float] = {}
    if len(problems) == known:
        with living_on(victim, where), frozen(victim) as view, precise():
            embed = chunked(view, batch)
            few = next(iter(material.gallery.plain(torch.arange(1), batch=1)))
            again = draws_needed(embed, few) == 1
            check(again, "this model is random: nobody gets its answers again, so receipts show nothing")
            gallery = embed_all(embed, material.gallery.plain(batch=batch))
            queries = gallery if material.same else embed_all(embed, material.query.plain(batch=batch))
            bench = _Bench(place, told, embed, material, material.scene(queries, gallery), problems)
            for name, task in goals.items():
                means[name + _unusual(task, makers)] = bench.check(name, task, told["receipts"][name])
    count = sum(len(entries) for entries in told["receipts"].values())
    split = material.query.split
    of = f"{split.name} ({len(split):,} images of {len(torch.unique(split.labels)):,} classes)"
    return Verified(count, means, told["eps"], told["norm"], told["seed"], told["limit"], of, beside, tuple(problems))


def _meant(data: Data, told: Mapping[str, Any], victim: nn.Module) -> Data:
    """The part that the audit attacked, where it did not attack all: of a folder, a CSV or images in memory."""
    if not isinstance(data, str | Path | Dataset):
        side = preprocessing_of(victim).told(told.get("resize"), told.get("crop")).for_pictures
        part = part_of(data, (victim,), side=side).data
        if part is data:
            return data
        query = splits_of(part, side)[0]
        return part if query.has_fingerprint(told["data"]["query"]["fingerprint"]) else data
    kind = {"folder/test": "folder", "csv/test": "csv"}.get(str(told["data"]["query"].get("name")))
    if kind is None or not isinstance(data, str | Path):
        return data
    try:
        return dataset(kind, data)
    except DataError:  # another folder: the fingerprints will differ
        return data


@dataclass(frozen=True, eq=False)
class _Bench:
    """The reference for receipts; errors are added to `problems`."""

    place: Path
    told: Mapping[str, Any]
    embed: Embed
    material: Material
    scene: Scene
    problems: list[str]

    def check(self, name: str, task: Task, entries: Sequence[Mapping[str, Any]]) -> float:
        """Check all receipts of one goal: samples, hashes, ε, targets and measures. Returns the mean measure."""
        told, goal, key = self.told, task.goal, Key.of(self.told["seed"])("audit")
        labels = self.material.labels if goal.side == "query" else self.material.gallery_labels
        due = receipted(sample(labels, told["limit"], key("sample")))
        entries = sorted(entries, key=lambda entry: int(entry["sample"]))
        given = [entry["sample"] for entry in entries]
        if given != due:
            absent, other = len(set(due) - set(given)), len(set(given) - set(due))
            what = f"the {len(due)} samples that seed {told['seed']} and limit {told['limit']} fix"
            said = f"{absent} are missing, {other} belong to another sample"
            self.problems.append(f"{name}: {len(given)} receipts for {what}: {said}")
            return math.nan
        ids = torch.tensor(due)
        (clean,) = self.material.side(goal.side).plain(ids, batch=len(ids))
        pixels = [read_pixels(self.place / entry["file"], tuple(clean.shape[1:])) for entry in entries]
        levels = torch.stack([torch.from_numpy(image).permute(2, 0, 1) for image in pixels]).to(clean.device)
        order = 2 if told["norm"] == "l2" else math.inf
        shift = (levels.double() - 255 * clean.double()).flatten(1)
        away = torch.linalg.vector_norm(shift, order, dim=1).tolist()
        # A clean image that lies between 8-bit levels cannot be written exactly.
        between = (255 * clean.double() - (255 * clean.double()).round()).flatten(1)
        least = torch.linalg.vector_norm(between, order, dim=1).tolist()
        numbers = ids.to(self.scene.gallery.device)
        aims, drawn = self._aims(goal, numbers, [entry["targets"] for entry in entries], key)
        for entry, image, far, near, aim in zip(entries, pixels, away, least, drawn):
            if entry["hash"] != digest(told, name, entry, image):
                self.problems.append(f"{entry['file']}: its hash differs: image, target or measure was changed")
            if far > max(255 * told["eps"], near) + LEVEL_SLACK:
                said = f"{far:.0f}/255 from its sample, but the audit's is {radius(told['eps'], told['norm'])}"
                self.problems.append(f"{entry['file']}: {said}")
            if entry["targets"] != aim:
                self.problems.append(
                    f"{entry['file']}: targets {entry['targets']}, but seed {told['seed']} draws {aim}"
                )
        embeddings = embed_all(self.embed, [levels.to(self.scene.gallery.dtype) / 255])

        def measure(e: Tensor, rows: Tensor) -> Tensor:
            at = None if aims is None else aims[rows]
            return goal.measure(self.scene, numbers[rows], at, e, e)[task.main].double().cpu()

        measured = measure(embeddings, torch.arange(len(ids)))
        stated = torch.tensor([math.nan if e["measure"] is None else e["measure"] for e in entries]).double()
        for row in _untrue(stated, measured, embeddings, measure, key("rounding")):
            said = f"measured {measured[row]:.4f}, stated {stated[row]:.4f}"
            self.problems.append(f"{entries[row]['file']}: {said}")
        return float(measured.nanmean())

    def _aims(self, goal: Goal, ids: Tensor, stated: list[Any], key: Key) -> tuple[Tensor | None, list[Any]]:
        """The targets that the seed draws, also as lists. Where rounding may decide, the stated targets are accepted.

        Some targets are drawn from the nearest items. If two are equally near, their order depends on the device.
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
    """Embeddings with a random error of the size of rounding."""
    numbers = torch.arange(len(e), device=e.device) if rows is None else rows.to(e.device)
    noise = F.normalize(key.normal(numbers, e.shape[1:])).to(e)
    return e + ROUNDING * noise


def _untrue(stated: Tensor, measured: Tensor, embeddings: Tensor, measure: Any, key: Key) -> list[int]:
    """Rows whose measure differs from the stated one, also under other roundings of the embedding.

    A right answer is 1 or 0. If two items are equally near, their order depends on the device.
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
    """The contradictions with audit.json, and whether there is one: in the folder of the receipts or its parent."""
    from ..report.collect import read_audit
    from ..runs.fields import dig

    folder = place.parent if place.name == "receipts" else place
    if not (folder / "audit.json").is_file():
        return [], False
    audit = read_audit(folder)
    pairs = {"model": dig(audit, "model", "weights"), "data": audit.get("data")}
    pairs |= {name: dig(audit, "settings", name) for name in ("eps", "seed", "limit", "resize", "crop")}
    pairs["norm"] = dig(audit, "settings", "norm") or "linf"
    problems = [f"audit.json states another {name}" for name, value in pairs.items() if told[name] != value]
    runs = [(str(dig(run, "attack")), run) for run in audit.get("runs") or ()]
    stated = [name for name, run in runs if dig(run, "goals", "strong") is not None]
    if sorted(stated) != sorted(told["receipts"]):
        names = ", ".join(stated) or "no strong audit"
        problems.append(f"audit.json has {names}; the receipts have {', '.join(told['receipts'])}")
    for name, run in runs:
        how, settings = told["goals"].get(name), dig(run, "goals", "corrected")
        if None not in (how, settings) and settings != how["settings"]:
            problems.append(f"audit.json has other settings for {name}")
    return list(dict.fromkeys(problems)), True


def _makers(allow: Collection[str | Goal | type[Goal]]) -> dict[str, Maker]:
    """What makes the goals of the user's own attacks, by the names of these."""
    check(not isinstance(allow, str), f"allow is a list, such as [{allow!r}]")
    makers = [maker_of(each() if isinstance(each, type) else each) for each in allow]
    return {make("corrected").name: make for make in makers}


def _maker(place: Path, how: Mapping[str, Any], makers: Mapping[str, Maker]) -> Maker:
    """What makes a goal of the receipts: one of ours, or one that the user gave."""
    attack = how["attack"]
    if attack in makers:
        return makers[attack]
    if attack not in ATTACKS:
        code = how.get("code")
        told = f" ({shown(code)})" if isinstance(code, str) else ""
        raise RunError(
            f"{place / 'receipts.json'}: no attack is called {brief(attack)} here{told}, and code named in a file is "
            f"not run; if you trust it, name it yourself with {worded('--allow module:thing', 'allow=[…]')}"
        )
    return partial(goal_named, attack)


def _task(place: Path, name: str, how: Mapping[str, Any], makers: Mapping[str, Maker]) -> Task:
    """The goal of that name in the ensemble."""
    make = _maker(place, how, makers)
    usual = asdict(make("corrected"))
    del usual["protocol"]
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) and isinstance(usual.get(key), tuple) else value
        for key, value in how["settings"].items()
    }
    for key, value in settings.items():
        kinds = type(value), type(usual.get(key))
        alike = key in usual and (kinds[0] is kinds[1] or kinds == (int, float))
        if not alike or (kinds[0] in (int, float) and abs(value) > LARGEST):
            raise RunError(f"{place / 'receipts.json'}: {how['attack']} has no setting {key} = {value!r}")
    goal = make("corrected", **settings)
    found = [task for task in tasks([AttackRun(how["attack"], (goal,))]) if task.name == name]
    if not found or (goal.name, found[0].main) != (how["attack"], how["measure"]):
        said = f"{name} is not attacked by {how['attack']} with these settings, or measured by {how['measure']}"
        raise RunError(f"{place / 'receipts.json'}: {said}")
    return found[0]


def _unusual(task: Task, makers: Mapping[str, Maker]) -> str:
    """Settings of a goal that are not the default, in the form of --attacks."""
    usual = asdict(makers.get(task.goal.name, partial(goal_named, task.goal.name))("corrected"))
    return "".join(f":{key}={value}" for key, value in asdict(task.goal).items() if value != usual[key])
