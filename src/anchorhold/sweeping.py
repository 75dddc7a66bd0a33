"""One training and one audit for each value of a setting, then a table and a figure of all of them.

    anchorhold sweep cub --root CUB_200_2011 --recipe catride --vary defence.attention=0,5,10,20 --out runs/attention
    anchorhold sweep cub --root CUB_200_2011 --vary model.weights=eps0.pt,eps1.pt,eps4.pt --out runs/initialisation
    anchorhold sweep digits --vary recipe=natural,act,hm-lga --out runs/defences

A sweep that was stopped goes on when it is called again: what is complete is left alone. A model that collapses is
a result like any other, and the sweep goes on after it.
"""

import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .auditing import AuditSettings, audit
from .console import Report, Silent
from .data.datasets import Dataset
from .errors import AnchorholdError, Interrupted, RunError
from .layers import build, settings_from, to_dict
from .model.embedder import load_embedder
from .record import Run, atomic
from .report.collect import collect, dig
from .report.compare import leaves, matrix, runs_table
from .report.plots import plot_against
from .report.tables import Table, called, render
from .settings import Settings, check
from .training import fit, resume, with_data

__all__ = ["Point", "Swept", "parse_vary", "points", "sweep"]

RECIPE = "recipe"  # varied like a setting: which method
SEED = "train.seed"  # runs that differ in it alone are averaged


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its folder's name, and what it is trained with."""

    folder: str
    settings: Settings


@dataclass(frozen=True)
class Swept:
    """What a sweep found, and where it was written."""

    tables: tuple[Table, ...]  # a line for each run, and a matrix where two settings are varied
    files: tuple[Path, ...]
    problems: tuple[str, ...] = ()


def parse_vary(texts: Sequence[str]) -> dict[str, list[str]]:
    """`["defence.beta=0,0.02"]` as values by setting.

    >>> parse_vary(["defence.beta=0,0.02"])
    {'defence.beta': ['0', '0.02']}
    """
    varied: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        words = [value.strip() for value in values.split(",")]
        sound = bool(equals) and ("." in key or key.strip() == RECIPE) and all(words)
        check(sound, f"--vary wants section.key=value,value, such as defence.steps=4,8; got {text!r}")
        check(key.strip() not in varied, f"--vary {key.strip()} is given twice; put all its values into one")
        varied[key.strip()] = words
    few = bool(varied) and len(varied.keys() - {SEED}) <= 2
    check(few, "vary one or two settings, such as --vary defence.steps=4,8; train.seed may be varied besides them")
    return varied


def points(recipe: str, vary: Mapping[str, Sequence[str]], overrides: Mapping[str, Any]) -> list[Point]:
    """Every combination of the values, each checked before the first is trained; `recipe` may be varied too."""
    found: list[Point] = []
    for values in itertools.product(*vary.values()):
        tree = copy.deepcopy(dict(overrides))
        chosen = dict(zip(vary, values))
        for key, value in ((k, v) for k, v in chosen.items() if k != RECIPE):
            check(key != "data.held_out", "a sweep has one data set: --set data.held_out, and vary something else")
            *sections, name = key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
                check(isinstance(branch, dict), f"{section} is a section: leave out the --set that gives it a value")
            check(name not in branch, f"{key} is both set and varied; leave out the --set")
            branch[name] = "" if (key, value) == ("model.weights", "none") else value
        settings = settings_from(chosen.get(RECIPE, recipe), tree)
        same = next((each.folder for each in found if each.settings == settings), None)
        check(same is None, f"two values of {', '.join(vary)} mean the same, as in {same}; leave one out")
        found.append(Point(",".join(f"{key}={_slug(value)}" for key, value in zip(vary, values)), settings))
    names = [point.folder for point in found]
    check(
        len(set(names)) == len(names), f"two values of {', '.join(vary)} would share a folder; rename one of the files"
    )
    return found


def _slug(value: str) -> str:
    """A value as part of a folder's name: of a file what it is called, and of what is too long a hash."""
    word = called(value) if os.path.isfile(os.path.expanduser(value)) else value or "none"
    word = re.sub(r"[^\w.+-]+", "-", word)
    return word if len(word) <= 60 else f"{word[:50]}-{hashlib.blake2b(value.encode(), digest_size=4).hexdigest()}"


def sweep(
    data: Dataset,
    recipe: str,
    vary: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    audited: Mapping[str, Any] | None = None,
    device: str = "auto",
    report: Report | None = None,
) -> Swept:
    """Train and audit a run for every value in a folder of its own, then write compare.md, compare.csv and sweep.png.

    `audited` are settings of the audits (`AuditSettings`), such as {"limit": 500}; None leaves the audits out.
    """
    out, report = Path(out), report or Silent()
    planned = points(recipe, vary, with_data(overrides or {}, data))
    for done, point in enumerate(planned, 1):
        report.say(f"{done} of {len(planned)}: {point.folder}")
        try:
            whole = _trained(out / point.folder, point.settings, data, device, report)
            if whole and audited is not None:
                _audit(out / point.folder, data, audited, device, report)
        except Interrupted as error:
            raise Interrupted(f"{error}; the same sweep goes on from there with all that is left") from None
    return _written(out, planned, list(vary), report)


def _trained(path: Path, settings: Settings, data: Dataset, device: str, report: Report) -> bool:
    """Train what is not trained yet; whether there is a model at the end, which a run that was stopped has not."""
    begun = (path / "run.json").exists()
    if begun:
        info = Run(path).read_json()
        _check_same(path, build(info["settings"]), settings)
        if info["status"] in ("done", "stopped"):
            report.say(f"{info['status']} already")
            return bool(info["status"] == "done")
    try:
        if begun:
            resume(path, data=data, device=device, report=report)
        else:
            fit(None, data, settings=settings, out=path, device=device, report=report)
    except RunError as error:
        if not (path / "run.json").exists() or Run(path).read_json().get("status") != "stopped":
            raise
        report.say(f"{error}; that is a result, and the sweep goes on")
        return False
    return True


def _check_same(path: Path, was: Settings, now: Settings) -> None:
    """Refuse to take a run for one that it is not; only the data may have moved."""
    old, new = (dict(leaves(to_dict(each))) | {"data.root": ""} for each in (was, now))
    changed = [f"{key} = {old.get(key)!r}" for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        raise RunError(f"{path} holds a run with other settings ({', '.join(changed)}); choose another --out")


def _audit(path: Path, data: Dataset, options: Mapping[str, Any], device: str, report: Report) -> None:
    """Audit a run inside its folder, unless that is done already with the same options."""
    place = path / "audit"
    if (place / "audit.json").exists():
        known = dig(json.loads((place / "audit.json").read_text(encoding="utf-8")), "settings")
        if json.loads(json.dumps(asdict(AuditSettings(**options)))) == known:
            report.say("audited already")
            return
    audit(load_embedder(path), data, out=place, device=device, report=report, **options)


def _written(out: Path, planned: Sequence[Point], keys: Sequence[str], report: Report) -> Swept:
    found = collect([out / point.folder for point in planned])
    tables = [runs_table(found.entries)]
    axes = [key for key in keys if key != SEED]
    if len(axes) > 1:
        tables.append(matrix(found.entries, axes[0], axes[1]))
    files = [out / "compare.md", out / "compare.csv"]
    for file, text in zip(files, ("\n\n".join(render(t, "markdown") for t in tables), render(tables[0], "csv"))):
        with atomic(file) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    try:
        series = axes[1] if len(axes) > 1 else ""
        files.append(plot_against(found.entries, (axes or [SEED])[0], out / "sweep.png", series=series))
    except AnchorholdError as error:  # without matplotlib there is still the table
        report.say(f"no figure: {error}")
    return Swept(tuple(tables), tuple(files), found.problems)
