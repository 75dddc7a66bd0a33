"""The runs and audits that lie in folders, each audit with the run it is of.

A folder with a run.json is a run, one with an audit.json an audit. An audit belongs to the run whose folder it lies
in; one that lies elsewhere to the run after which its folder is called (audits/hm-cub to runs/hm), provided that
model and R@1 agree. Only an audit on the run's own test images is shown with it: any other is a line of its own. Of
several the one that attacks most images counts, and beside it one strong audit.

A run repeats the row of print that its run.json names under `row`; for a run that names none, rows.toml in the folder
around it may: lines such as hm-lga-75 = "001/t6/cub/hm-lga-8".
"""

import json
import math
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..auditing.verdict import SCHEMA as AUDIT_SCHEMA
from ..errors import AnchorholdError, RunError, SettingsError
from ..layers import build, to_dict
from ..record import Run
from ..rows import row_named
from ..stopping import lost

__all__ = ["Entry", "Found", "collect", "dig", "flat_since", "number", "read_audit", "read_run", "walk"]

_PASSED_OVER = ("shards",)  # rows of audits
_AGREE = 0.5  # points of R@1 by which the same model may differ between two machines


def dig(tree: Any, *keys: str) -> Any:
    """What stands at the end of these keys, None where one is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def number(value: Any) -> float | None:
    """`value` if it is a finite number."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if real else None


@dataclass(frozen=True, eq=False)
class Entry:
    """A run with its audit, a run alone, or an audit alone."""

    path: Path
    info: Mapping[str, Any]  # run.json; empty for an audit alone
    rows: tuple[Mapping[str, Any], ...] = ()  # metrics.jsonl
    audit: Mapping[str, Any] | None = None
    name: str = ""
    audit_at: Path | None = None  # the folder of the audit
    strong: "Entry | None" = None  # a strong audit of the run that is not `audit`
    row: str = ""  # the row of print that it repeats

    def setting(self, key: str) -> Any:
        """A setting by its dotted name, the recipe, or one of the defence by its own; None where there is none such."""
        settings = self.info.get("settings")
        place = key.split(".") if "." in key or key == "recipe" else ("defence", key)
        value = dig(settings, *place)
        return str(value) if isinstance(value, list) else value

    def last(self, column: str) -> float | None:
        """The last value of a column of metrics.jsonl."""
        values = (number(row.get(column)) for row in reversed(self.rows))
        return next((value for value in values if value is not None), None)

    @property
    def strongest(self) -> "Entry | None":
        """The strong audit, be it one beside the other or both in one."""
        own = self if isinstance(dig(self.audit, "protocols", "strong"), Mapping) else None
        return self.strong or own

    @property
    def epoch(self) -> int | None:
        """How many epochs it was trained."""
        epoch = self.last("epoch")
        return None if epoch is None else int(epoch)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come: it is done, or it was stopped because it had collapsed."""
        return not self.info or self.info.get("status") in ("done", "stopped")

    @property
    def collapsed(self) -> bool:
        """Whether training stopped it, or it ended with two flat epochs: collapse only warned, or was not seen then."""
        if self.info.get("status") == "stopped":
            return True
        # A run that never looks at retrieval (pretraining) has an untrained head: nothing to judge.
        if len(self.rows) < 2 or self.last("r1") is None:
            return False
        warm = number(self.setting("train.collapse_warmup")) or 0
        return all(_flat(row, self) and (number(row.get("epoch")) or 0) > warm for row in self.rows[-2:])

    @property
    def lost_features(self) -> str:
        """What to say of a pretraining that has lost the features it began with; nothing of others."""
        return lost(number(dig(self.info, "start", "features_r1")), self.last("features_r1"))

    @property
    def status(self) -> str:
        """In a few words how the run ended, or how far it is."""
        if not self.info:
            return "audit alone"
        state, planned = str(self.info.get("status", "unknown")), number(self.setting("train.epochs"))
        if self.collapsed:
            diverged = "NaN" in str(self.info.get("reason", ""))
            return f"{'loss not finite' if diverged else 'collapsed'}, epoch {self.epoch or 0}"
        state = state if state == "done" or planned is None else f"{state}, {self.epoch or 0} of {planned}"
        return f"{state}, features lost" if self.lost_features else state


def _flat(row: Mapping[str, Any], run: Entry) -> bool:
    """Whether an epoch shows what training calls a collapse."""
    for column, threshold in (("separability", "collapse_separability"), ("mean_distance", "collapse_distance")):
        value, least = number(row.get(column)), number(run.setting(f"train.{threshold}")) or 0.0
        if value is not None and value < least:
            return True
    return False


def flat_since(run: Entry) -> tuple[list[tuple[float, float]], int | None]:
    """Stretches of epochs, warm-up apart, that show the signs of collapse, and the first such epoch."""
    if run.last("r1") is None:  # pretraining has an untrained head: nothing to judge
        return [], None
    warm = number(run.setting("train.collapse_warmup")) or 0
    bands: list[tuple[float, float]] = []
    for row in run.rows:
        epoch = number(row.get("epoch"))
        if epoch is None or epoch <= warm or not _flat(row, run):
            continue
        if bands and bands[-1][1] == epoch - 1:
            bands[-1] = bands[-1][0], epoch
        else:
            bands.append((epoch, epoch))
    return bands, int(bands[0][0]) if bands else None


@dataclass(frozen=True)
class Found:
    """What there is to compare, and a line for everything that had to be left out."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()


def collect(folders: Iterable[str | Path]) -> Found:
    """All runs and audits in these folders, however deep; what cannot be read is a line of `problems`."""
    problems: list[str] = []
    runs: list[Entry] = []
    audits: list[Entry] = []
    roots = [Path(folder).expanduser() for folder in folders]
    for path in walk(roots, problems):
        for name, read, found in (("run.json", read_run, runs), ("audit.json", _audit, audits)):
            if (path / name).is_file():
                try:
                    found.append(read(path))
                except RunError as error:
                    problems.append(f"left out: {error}")
        if (path / "shards").is_dir() and not (path / "audit.json").is_file():
            problems.append(f"left out: {path}, an audit that has not come to its end")
    entries = _paired(_with_rows(runs, problems), audits, problems)
    if not entries:
        why = problems[0] if problems else "there is no run.json and no audit.json in these folders"
        raise RunError(f"nothing to compare: {why}; give folders with runs or audits")
    return Found(_named(entries, roots), tuple(problems))


def walk(roots: Sequence[Path], problems: list[str]) -> Iterator[Path]:
    """Every folder once, in order of names; links are followed, but not in circles."""
    seen: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise RunError(f"there is no folder {root}")
    waiting = list(reversed(roots))
    while waiting:
        folder = waiting.pop()
        real = folder.resolve()
        if real in seen:
            continue
        seen.add(real)
        yield folder
        try:
            inside = sorted(each.name for each in os.scandir(folder) if each.is_dir())
        except OSError as error:
            problems.append(f"left out: {folder} ({error.strerror})")
            continue
        waiting += [folder / name for name in reversed(inside) if name not in _PASSED_OVER and name[0] != "."]


def read_run(path: Path) -> Entry:
    """A run folder, finished or not; one that cannot be used is refused."""
    run = Run(path)
    info = run.read_json()
    if not isinstance(dig(info, "settings", "defence"), Mapping) or not isinstance(info.get("status"), str):
        raise RunError(f"{path / 'run.json'} has no settings or no status")
    try:
        rows = run.metrics()
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path / 'metrics.jsonl'}: {error}") from None
    kept = tuple(row for row in rows if isinstance(row, Mapping))
    return Entry(path, {**info, "settings": _of_today(info["settings"])}, kept, row=str(info.get("row") or ""))


def _of_today(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the settings that are younger than the run: it had no other value than their default."""
    try:
        whole = to_dict(build(settings))
    except AnchorholdError:  # of another version
        return settings
    return {name: {**whole[name], **own} if isinstance(own, Mapping) else own for name, own in settings.items()}


def _with_rows(runs: Sequence[Entry], problems: list[str]) -> list[Entry]:
    """Runs that name no row, with the one that rows.toml names beside them."""
    known: dict[Path, str] = {}
    for file in {run.path.parent / "rows.toml": None for run in runs}:
        try:
            lines = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            known |= {file.parent / name: row_named(str(row)).id for name, row in lines.items()}
        except (OSError, ValueError) as error:
            problems.append(f"left out: {file}, which cannot be read ({error})")
        except SettingsError as error:
            problems.append(f"left out: {file}, since there is {error}")
    return [run if run.row else replace(run, row=known.get(run.path, "")) for run in runs]


def read_audit(path: Path) -> dict[str, Any]:
    """What audit.json says; one that cannot be used is refused."""
    file = path / "audit.json"
    try:
        audit: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}") from None
    if dig(audit, "schema") != AUDIT_SCHEMA:
        raise RunError(f"{file} has schema {dig(audit, 'schema')!r}; this version reads {AUDIT_SCHEMA}")
    if not all(isinstance(audit.get(part), Mapping) for part in ("settings", "data", "clean", "protocols")):
        raise RunError(f"{file} lacks settings, data, clean metrics or protocols")
    return audit


def _audit(path: Path) -> Entry:
    return Entry(path, {}, audit=read_audit(path), audit_at=path)


# Which audit is whose ---------------------------------------------------------------------------------------


def _paired(runs: Sequence[Entry], audits: Sequence[Entry], problems: list[str]) -> list[Entry]:
    by_place = {run.path.resolve(): run for run in runs}
    theirs: dict[Path, list[Entry]] = {}
    alone: list[Entry] = []
    for audit in audits:
        place = audit.path.resolve()
        home = next((by_place[each] for each in (place, *place.parents) if each in by_place), None)
        run = home or _namesake(audit, runs)
        if run is not None and _same_images(run, audit):
            theirs.setdefault(run.path, []).append(audit)
        else:
            alone.append(audit)
    pairs = []
    for run in runs:
        found = sorted(theirs.get(run.path, []), key=_attacked, reverse=True)
        strong = next((each for each in found if each.strongest), None)
        strong = None if strong in found[:1] else strong
        problems += [
            f"left out: {each.path}, since {found[0].path} attacks as many images or more"
            for each in found[1:]
            if each is not strong
        ]
        pairs.append(replace(run, audit=found[0].audit, audit_at=found[0].path, strong=strong) if found else run)
    return pairs + alone


def _namesake(audit: Entry, runs: Sequence[Entry]) -> Entry | None:
    """The one run after which the folder of the audit is called, if it can be told."""
    name = audit.path.resolve().name
    like = [run for run in runs if _called_after(name, run.path.resolve().name) and _same_model(run, audit)]
    longest = max((len(run.path.resolve().name) for run in like), default=0)
    like = [run for run in like if len(run.path.resolve().name) == longest]
    near = [run for run in like if run.path.resolve().parent == audit.path.resolve().parent]
    best = near or like
    return best[0] if len(best) == 1 else None


def _called_after(name: str, run: str) -> bool:
    return name == run or (name.startswith(run) and name[len(run)] in "-_.")


def _same_images(run: Entry, audit: Entry) -> bool:
    mark = dig(run.info, "data", "test")
    return mark is not None and mark == dig(audit.audit, "data", "query", "fingerprint")


def _same_model(run: Entry, audit: Entry) -> bool:
    if dig(run.info, "model", "config") != dig(audit.audit, "model", "config"):
        return False
    trained, found = run.last("r1"), number(dig(audit.audit, "clean", "R@1", "value"))
    return trained is not None and found is not None and abs(trained - found) <= _AGREE


def _attacked(audit: Entry) -> int:
    counts = dig(audit.audit, "data", "attacked")
    return int(counts[0]) if isinstance(counts, list) and counts and number(counts[0]) is not None else 0


def _named(entries: Sequence[Entry], roots: Sequence[Path]) -> tuple[Entry, ...]:
    """Each called by its path inside the folder that was given; by a longer one where two would be called alike."""
    inside = [
        next(e.path.relative_to(root).as_posix() for root in roots if e.path.is_relative_to(root)) for e in entries
    ]
    places = [entry.path.resolve() for entry in entries]
    names = [place.name if short == "." else short for short, place in zip(inside, places)]
    if len(set(names)) < len(names):
        common = os.path.commonpath([place.parent for place in places])
        names = [place.relative_to(common).as_posix() for place in places]
    return tuple(replace(entry, name=name) for entry, name in zip(entries, names))
