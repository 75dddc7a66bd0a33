"""Train and audit once for each value of a setting, then write a table and a figure of all runs.

    anchorhold sweep cub --root CUB_200_2011 --recipe catride --vary defence.attention=0,5,10,20 --out runs/attention
    anchorhold sweep cub --root CUB_200_2011 --vary model.weights=eps0.pt,eps1.pt,eps4.pt --out runs/initialisation
    anchorhold sweep digits --vary recipe=natural,act,hm-lga --out runs/defences

Run the same command to resume a stopped sweep: finished runs are kept. A model that collapses is a result like any
other, and the sweep continues after it.
"""

import copy
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..auditing.plan import AuditSettings
from ..auditing.run import audit
from ..config.build import build, to_dict
from ..config.listing import set_by_user
from ..config.recipes import settings_from
from ..config.settings import Settings
from ..console import Report, Silent
from ..data.splits import Dataset
from ..device import device_named
from ..distributed import joined
from ..errors import AnchorholdError, Interrupted, ModelError, RunError, check
from ..extensions import Origin, code_named_in
from ..interface import option, worded
from ..model.load import load
from ..model.trainable import trainable
from ..model.wrap import Victim
from ..report.collect import collect
from ..report.compare import runs_table
from ..report.matrix import leaves, matrix
from ..report.plots import plot_against
from ..report.rendering import render
from ..report.tables import Table, called
from ..runs.fields import dig, table
from ..runs.folder import Run
from ..runs.locks import one_writer
from ..runs.writing import atomic
from .fit import fit, resume
from .preparing import settings_for, with_data
from .suited import suited

__all__ = ["Point", "Swept", "parse_vary", "points", "sweep"]

RECIPE = "recipe"  # the recipe can be varied like a setting
SEED = "train.seed"  # runs that differ only in it are averaged


@dataclass(frozen=True)
class Point:
    """One run of a sweep: the name of its folder, and its settings."""

    folder: str
    settings: Settings


@dataclass(frozen=True)
class Swept:
    """What a sweep found, and where it was written.

    Attributes:
        tables: one with a line for each run; with two varied settings also a matrix.
        files: what was written.
        problems: runs that failed, as sentences.
    """

    tables: tuple[Table, ...]
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
        check(sound, f"--vary needs SECTION.KEY=VALUE,VALUE, e.g. defence.steps=4,8; got {text!r}")
        check(key.strip() not in varied, f"--vary {key.strip()} is given twice; put all its values into one option")
        varied[key.strip()] = words
    few = bool(varied) and len(varied.keys() - {SEED}) <= 2
    check(few, "vary one or two settings, e.g. defence.steps=4,8; train.seed may be varied too")
    return varied


def points(recipe: str, vary: Mapping[str, Sequence[str]], overrides: Mapping[str, Any]) -> list[Point]:
    """Every combination of the values. All are checked before the first is trained; `recipe` may be varied too."""
    found: list[Point] = []
    for values in itertools.product(*vary.values()):
        tree = copy.deepcopy(dict(overrides))
        chosen = dict(zip(vary, values))
        for key, value in ((k, v) for k, v in chosen.items() if k != RECIPE):
            check(
                key != "data.held_out",
                "a sweep has one data set: give data.held_out as a fixed setting, and vary another setting",
            )
            *sections, name = key.split(".")
            branch = tree
            for section in sections:
                branch = branch.setdefault(section, {})
                check(
                    isinstance(branch, dict),
                    f"{section} is a section; leave out {worded('the --set', 'the override')} that gives it a value",
                )
            check(name not in branch, f"{key} is both set and varied; leave out {worded('the --set', 'the override')}")
            branch[name] = "" if (key, value) == ("model.weights", "none") else value
        settings = settings_from(chosen.get(RECIPE, recipe), tree)
        same = next((each.folder for each in found if each.settings == settings), None)
        check(same is None, f"two values of {', '.join(vary)} give the same settings as {same}; leave one out")
        found.append(Point(",".join(f"{key}={_slug(value)}" for key, value in zip(vary, values)), settings))
    names = [point.folder for point in found]
    check(
        len(set(names)) == len(names), f"two values of {', '.join(vary)} would share a folder; rename one of the files"
    )
    return found


def _slug(value: str) -> str:
    """A value as part of a folder's name: a file gives its name, a long value is shortened with a hash."""
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
    model: Callable[[], nn.Module] | None = None,
    device: str = "auto",
    report: Report | None = None,
) -> Swept:
    """Train and audit a run for every value in a folder of its own, then write compare.md, compare.csv and sweep.png.

    Args:
        data: the data set of all runs.
        recipe: the recipe of all runs, unless it is varied.
        vary: values by setting, such as {"defence.steps": ["4", "8"]}.
        out: the folder of the sweep; give the same one to resume.
        overrides: changes to the recipe in all runs.
        audited: settings of the audits (`AuditSettings`), such as {"limit": 500}; None audits nothing. The curve of
            R@1 against ε costs more than all else, so it is left out unless you give its `epsilons`.
        model: makes the module of your own that every run trains, a new one at each call.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress and messages; None is silent.

    >>> import tempfile
    >>> from anchorhold import dataset
    >>> with tempfile.TemporaryDirectory() as place:  # doctest: +SKIP
    ...     found = sweep(
    ...         dataset("digits"),
    ...         "natural",
    ...         {"train.seed": ["0", "1"]},
    ...         place,
    ...         overrides={"train.epochs": 1},
    ...         audited={"limit": 10, "attacks": ["ES"]},
    ...         device="cpu",
    ...     )
    ...     len(found.tables[0].rows)
    2
    """
    out, report = Path(out), report or Silent()
    overrides = with_data(overrides or {}, data)
    planned = [_suited(point, data, overrides, vary) for point in points(recipe, vary, overrides)]
    modules = None if model is None else Modules(model, vary)
    with one_writer(out, joined(device_named(device)), report):
        for done, point in enumerate(planned, 1):
            report.say(f"{done} of {len(planned)}: {point.folder}")
            try:
                whole = _trained(out / point.folder, point.settings, data, modules, device, report)
                if whole and audited is not None:
                    _audit(out / point.folder, data, audited, modules, device, report)
            except Interrupted as error:
                raise Interrupted(f"{error}; or run the same sweep again to resume all of it") from None
        return _written(out, planned, list(vary), report)


def _suited(point: Point, data: Dataset, overrides: Mapping[str, Any], vary: Collection[str]) -> Point:
    """The point with a batch for a small data set, as `fit` would train it."""
    fixed = {*set_by_user(point.settings.recipe, overrides), *vary}
    return replace(point, settings=suited(point.settings, data.name, data.train, fixed)[0])


class Modules:
    """Makes the module of the user's for one run after another."""

    def __init__(self, make: Callable[[], nn.Module], vary: Mapping[str, Sequence[str]]) -> None:
        own = [key for key in vary if key.startswith("model.") and key != "model.freeze_batchnorm"]
        check(not own, f"your module brings what {', '.join(own)} would set; vary something else")
        self._make, self._made = make, list[nn.Module]()

    def new(self, seed: int) -> nn.Module:
        """A module that no run has trained yet; its first weights depend on the seed of the run alone."""
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            module = self._make()
        if any(module is each or _inside(module) is _inside(each) for each in self._made):
            raise ModelError("your function gives the same module twice, and each run trains its own: make it there")
        self._made = [module]
        return module


def _inside(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Victim) else module


def _trained(
    path: Path, settings: Settings, data: Dataset, modules: Modules | None, device: str, report: Report
) -> bool:
    """Train a run unless it is trained; returns whether it has a model, which a collapsed run has not."""
    module = None if modules is None else modules.new(settings.train.seed)
    if module is not None:
        settings = settings_for(
            trainable(module, settings.model.freeze_batchnorm, settings.model.train), data, settings
        )
    begun = (path / "run.json").exists()
    # The user named this code and these weights in this call.
    allowed = frozenset((*code_named_in(to_dict(settings)), settings.model.weights))
    if begun:
        info = Run(path).read_json()
        was = build(Run(path).field(info, "settings", dict), Origin(str(path / "run.json"), allowed))
        begun = was == settings or not Run(path).unstarted()  # a failed start may be corrected
    if begun:
        _check_same(path, was, settings)
        if (status := Run(path).field(info, "status", str)) in ("done", "stopped"):
            report.say(f"already {status}")
            return status == "done"
    try:
        if begun:
            resume(path, model=module, data=data, device=device, report=report, allow=allowed)
        else:
            fit(module, data, settings=settings, out=path, device=device, report=report)
    except RunError as error:
        if not (path / "run.json").exists() or Run(path).read_json().get("status") != "stopped":
            raise
        report.say(f"{error}; this counts as a result, and the sweep continues")
        return False
    return True


def _check_same(path: Path, was: Settings, now: Settings) -> None:
    """Refuse a folder whose run has other settings; only the folder of the data may differ."""
    old, new = (dict(leaves(to_dict(each))) | {"data.root": ""} for each in (was, now))
    changed = [f"{key} = {old.get(key)!r}" for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        raise RunError(f"{path} holds a run with other settings ({', '.join(changed)}); choose another {option('out')}")


def _audit(
    path: Path, data: Dataset, options: Mapping[str, Any], modules: Modules | None, device: str, report: Report
) -> None:
    """Audit a run inside its folder, unless the same audit is there already."""
    place, options = path / "audit", {"epsilons": (), **options}
    if (place / "audit.json").exists():
        known = dig(table(place / "audit.json", "remove it to audit again"), "settings")
        usual = asdict(AuditSettings())  # for settings that an older version did not record
        asked = json.loads(json.dumps(asdict(AuditSettings(**options))))
        if isinstance(known, dict) and asked == json.loads(json.dumps(usual)) | known:
            report.say("already audited")
            return
    audit(
        load(path, module=None if modules is None else modules.new(0)),
        data,
        out=place,
        device=device,
        report=report,
        **options,
    )


def _written(out: Path, planned: Sequence[Point], keys: Sequence[str], report: Report) -> Swept:
    found = collect([out / point.folder for point in planned])
    tables = [runs_table(found.entries)]
    axes = [key for key in keys if key != SEED]
    if len(axes) > 1:
        tables.append(matrix(found.entries, axes[0], axes[1]))
    files = [out / "compare.md", out / "compare.csv"]
    for file, text in zip(files, ("\n\n".join(render(t, "markdown") for t in tables), render(tables[0], "csv"))):
        with atomic(file) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    try:
        series = axes[1] if len(axes) > 1 else ""
        files.append(plot_against(found.entries, (axes or [SEED])[0], out / "sweep.png", series=series))
    except AnchorholdError as error:  # without matplotlib you still get the table
        report.say(f"no figure: {error}")
    return Swept(tuple(tables), tuple(files), found.problems)
