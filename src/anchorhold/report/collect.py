"""Find runs and audits in folders, and match each audit with its run.

A folder with a run.json is a run, one with an audit.json an audit. An audit inside a run's folder belongs to that run.
Elsewhere it belongs to the run with the same weights (`weights` of both records). Older records lack this field: they
match by the folder's name (audits/hm-cub to runs/hm) if model and R@1 agree. Only an audit on the run's own test
images is shown with it; any other gets its own line. Of several audits the one with the most attacked images counts,
plus one strong audit.

A run repeats the published row that its run.json names under `row`. Otherwise rows.toml in its parent folder may name
it, with lines such as hm-lga-75 = "hm/t6/cub/hm-lga-8".
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.build import build, to_dict
from ..config.recipes import toml
from ..errors import AnchorholdError, RunError, SettingsError
from ..reproduce.rows import row_named
from ..runs.audits import read_audit
from ..runs.fields import dig, number
from ..runs.folder import Run
from ..runs.health import lost, upper_end
from .curve import headline_of
from .shifts import shifts_by_today

__all__ = ["Entry", "Found", "collect", "data_name", "dig", "flat_since", "number", "read_audit", "read_run", "walk"]

_PASSED_OVER = ("shards",)  # folders to skip: rows of audits
_AGREE = 0.5  # points of R@1 that the same model may differ by between two machines


@dataclass(frozen=True, eq=False)
class Entry:
    """A run with its audit, a run alone, or an audit alone."""

    path: Path
    info: Mapping[str, Any]  # run.json; empty for an audit alone
    rows: tuple[Mapping[str, Any], ...] = ()  # metrics.jsonl, with current names
    audit: Mapping[str, Any] | None = None
    name: str = ""
    audit_at: Path | None = None  # the folder of the audit
    strong: "Entry | None" = None  # a strong audit of the run other than `audit`
    curved: "Entry | None" = None  # an audit of the run with R@1 against ε, where `audit` and `strong` have none
    row: str = ""  # the published row that it repeats
    derived: frozenset[str] = frozenset()  # columns of `rows` derived from others, see shifts.py

    def setting(self, key: str) -> Any:
        """A setting by its dotted name, the recipe, or a defence's setting by its name; None if there is none."""
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
        """The strong audit: a separate one, or `audit` itself."""
        own = self if isinstance(dig(self.audit, "protocols", "strong"), Mapping) else None
        return self.strong or own

    @property
    def epoch(self) -> int | None:
        """The number of finished epochs."""
        epoch = self.last("epoch")
        return None if epoch is None else int(epoch)

    @property
    def finished(self) -> bool:
        """Whether the run has ended: it is done, or it was stopped because it collapsed."""
        return not self.info or self.info.get("status") in ("done", "stopped")

    @property
    def collapsed(self) -> bool:
        """Whether training stopped it, or its last two epochs show a collapse (training may only warn)."""
        if self.info.get("status") == "stopped":
            return True
        # A run without R@1 (pretraining) has an untrained head: nothing to judge.
        if len(self.rows) < 2 or self.last("r1") is None:
            return False
        warm = number(self.setting("train.collapse_warmup")) or 0
        return all(_flat(row, self) and (number(row.get("epoch")) or 0) > warm for row in self.rows[-2:])

    @property
    def lost_features(self) -> str:
        """A message for a training that lost its initial features; empty for others."""
        start, finished = number(dig(self.info, "start", "features_r1")), self.last("r1") is not None
        return lost(start, self.last("features_r1"), finished)

    @property
    def status(self) -> str:
        """How the run ended, or how far it is, in a few words."""
        if not self.info:
            return "audit alone"
        state, planned = str(self.info.get("status", "unknown")), number(self.setting("train.epochs"))
        if self.collapsed:
            diverged = "NaN" in str(self.info.get("reason", ""))
            return f"{'loss not finite' if diverged else 'collapsed'}, epoch {self.epoch or 0}"
        state = state if state == "done" or planned is None else f"{state}, {self.epoch or 0} of {planned}"
        return f"{state}, features lost" if self.lost_features else state


def data_name(entry: Entry) -> str:
    """The data set of a run or audit, without its split; "" where it is unknown."""
    name = dig(entry.info, "data", "name") or dig(entry.audit, "data", "query", "name") or ""
    return str(name).split("/")[0]


def _flat(row: Mapping[str, Any], run: Entry) -> bool:
    """Whether an epoch shows a collapse by training's thresholds."""
    signs = {"separability": "collapse_separability", "mean_distance": "collapse_distance"}
    return any(upper_end(row, sign) < (number(run.setting(f"train.{name}")) or 0.0) for sign, name in signs.items())


def flat_since(run: Entry) -> tuple[list[tuple[float, float]], int | None]:
    """Ranges of epochs after the warm-up that show a collapse, and the first such epoch."""
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
    """The entries to compare, and a line for everything left out."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()


def collect(folders: Iterable[str | Path]) -> Found:
    """All runs and audits in these folders, at any depth; unreadable ones become lines of `problems`."""
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
            problems.append(f"left out: {path}, an unfinished audit")
    entries = _paired(_with_rows(runs, problems), audits, problems)
    if not entries:
        why = problems[0] if problems else "no run.json or audit.json in these folders"
        raise RunError(f"nothing to compare: {why}; give folders with runs or audits")
    return Found(_named(entries, roots), tuple(problems))


def walk(roots: Sequence[Path], problems: list[str]) -> Iterator[Path]:
    """Every folder once, sorted by name. Links are followed only inside `roots`, and not in circles.

    A link in a foreign folder could lead anywhere, and pages are written where runs are found.
    """
    seen: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise RunError(f"there is no folder {root}; give one with runs or audits")
    inside_of = {root.resolve() for root in roots}
    waiting = list(reversed(roots))
    while waiting:
        folder = waiting.pop()
        real = folder.resolve()
        if real in seen:
            continue
        if not inside_of & {real, *real.parents}:
            problems.append(f"left out: {folder}, a link to {real}; add that folder if you want it")
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
    """Read a run folder, finished or not; refuse one that cannot be used."""
    run = Run(path)
    info = run.read_json()
    if not isinstance(dig(info, "settings", "defence"), Mapping) or not isinstance(info.get("status"), str):
        raise RunError(f"{path / 'run.json'} has no settings or no status")
    rows = run.metrics()
    settings = _of_today(info["settings"])
    kept, derived = shifts_by_today(
        [row for row in rows if isinstance(row, Mapping)],
        derivable=not number(dig(settings, "train", "benign")),
        random_start=dig(settings, "defence", "start") == "random",
    )
    return Entry(path, {**info, "settings": settings}, kept, row=str(info.get("row") or ""), derived=derived)


def _of_today(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add settings newer than the run, with their defaults."""
    try:
        whole = to_dict(build(settings))
    except AnchorholdError:  # from another version
        return settings
    return {name: {**whole[name], **own} if isinstance(own, Mapping) else own for name, own in settings.items()}


def _with_rows(runs: Sequence[Entry], problems: list[str]) -> list[Entry]:
    """Fill in `row` from rows.toml for runs that name none."""
    known: dict[Path, str] = {}
    for file in {run.path.parent / "rows.toml": None for run in runs}:
        try:
            lines = toml(file.read_text(encoding="utf-8")) if file.is_file() else {}
            known |= {file.parent / name: row_named(str(row)).id for name, row in lines.items()}
        except (OSError, ValueError) as error:
            problems.append(f"left out: {file}, cannot be read ({error})")
        except SettingsError as error:
            problems.append(f"left out: {file}: {error}")
    return [run if run.row else replace(run, row=known.get(run.path, "")) for run in runs]


def _audit(path: Path) -> Entry:
    return Entry(path, {}, audit=read_audit(path), audit_at=path)


# Matching audits and runs ------------------------------------------------------------------------------------


def _paired(runs: Sequence[Entry], audits: Sequence[Entry], problems: list[str]) -> list[Entry]:
    by_place = {run.path.resolve(): run for run in runs}
    theirs: dict[Path, list[Entry]] = {}
    alone: list[Entry] = []
    for audit in audits:
        place = audit.path.resolve()
        home = next((by_place[each] for each in (place, *place.parents) if each in by_place), None)
        run = home or _same_weights(audit, runs) or _namesake(audit, runs)
        if run is not None and _same_images(run, audit):
            theirs.setdefault(run.path, []).append(audit)
        else:
            alone.append(audit)
    pairs = []
    for run in runs:
        found = sorted(theirs.get(run.path, []), key=_attacked, reverse=True)
        strong = next((each for each in found if each.strongest), None)
        strong = None if strong in found[:1] else strong
        curved = _curved(found, strong)
        problems += [
            f"left out: {each.path}; {found[0].path} attacks as many images or more"
            for each in found[1:]
            if each is not strong and each is not curved
        ]
        if found:
            run = replace(run, audit=found[0].audit, audit_at=found[0].path, strong=strong, curved=curved)
        pairs.append(run)
    return pairs + alone


def _curved(found: Sequence[Entry], strong: Entry | None) -> Entry | None:
    """The audit to take R@1 against ε from, where the shown ones have none: one with the same threat as the first."""
    shown = [each for each in (*found[:1], strong) if each is not None]
    if any(headline_of(each.audit or {}) for each in shown):
        return None
    return next((each for each in found if headline_of(each.audit or {}) and _threat(each) == _threat(found[0])), None)


def _threat(audit: Entry) -> tuple[float | None, str]:
    return number(dig(audit.audit, "settings", "eps")), str(dig(audit.audit, "settings", "norm") or "linf")


def _same_weights(audit: Entry, runs: Sequence[Entry]) -> Entry | None:
    """The run whose exported model was audited; among several copies, the one with the audit's name."""
    mark = dig(audit.audit, "model", "weights")
    like = [run for run in runs if mark is not None and run.info.get("weights") == mark]
    return like[0] if len(like) == 1 else _namesake(audit, like)


def _namesake(audit: Entry, runs: Sequence[Entry]) -> Entry | None:
    """The run with the name of the audit's folder, if it is unique."""
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
    marks = [dig(run.info, "data", part) for part in ("query", "test")]  # older runs have no fingerprint of the queries
    # Still older ones identify files by their lengths, not by a hash.
    found = [dig(audit.audit, "data", "query", kind) for kind in ("fingerprint", "lengths")]
    return any(mark is not None and mark in found for mark in marks)


def _same_model(run: Entry, audit: Entry) -> bool:
    if dig(run.info, "model", "config") != dig(audit.audit, "model", "config"):
        return False
    trained, found = run.last("r1"), number(dig(audit.audit, "clean", "R@1", "value"))
    return trained is not None and found is not None and abs(trained - found) <= _AGREE


def _attacked(audit: Entry) -> int:
    counts = dig(audit.audit, "data", "attacked")
    return int(counts[0]) if isinstance(counts, list) and counts and number(counts[0]) is not None else 0


def _named(entries: Sequence[Entry], roots: Sequence[Path]) -> tuple[Entry, ...]:
    """Name each entry by its path inside the given folder, or by a longer path where names collide."""
    inside = [
        next(e.path.relative_to(root).as_posix() for root in roots if e.path.is_relative_to(root)) for e in entries
    ]
    places = [entry.path.resolve() for entry in entries]
    names = [place.name if short == "." else short for short, place in zip(inside, places)]
    if len(set(names)) < len(names):
        common = os.path.commonpath([place.parent for place in places])
        names = [place.relative_to(common).as_posix() for place in places]
    return tuple(replace(entry, name=name) for entry, name in zip(entries, names))
