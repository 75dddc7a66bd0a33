"""Which row of print a run repeats, what print says there, and whether the run comes near it.

A row of 001 that paper 000 trained again has a second pair of numbers, the rerun. A run reproduces its row when R@1
and the published ERS both lie in the band around one of the two, with the settings of the row. Where print started
from robust weights, which are not to be had, what is compared is the gain over the same run from plain ones.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from ..attacks.run import BUDGETS
from ..errors import AnchorholdError, SettingsError
from ..layers import settings_from, to_dict
from ..rows import Row, row_named, row_settings, rows
from .collect import Entry, dig

__all__ = ["BAND", "ars_of", "departures", "gains_in_print", "plain_start_of", "rerun_of", "row_of", "verdict"]

BAND = {"R@1": 3.0, "ERS": 5.0}  # points
_JUDGED = {
    "defence": None,  # all of it
    "optimiser": None,
    "batch": None,
    "model": ("backbone", "dim", "freeze_batchnorm"),
    "train": ("epochs", "benign", "ema"),
}


def row_of(entry: Entry) -> Row | None:
    """The row that a run repeats, on its data; None where it names none that is known, or held classes out."""
    if dig(entry.info, "settings", "data", "held_out"):
        return None
    try:
        row = row_named(entry.row) if entry.row else None
    except SettingsError:  # of another version
        return None
    return row if row is not None and row.data == dig(entry.info, "data", "name") else None


@cache
def _alike(name: str) -> tuple[Row, ...]:
    """Other rows with the same settings and the same start: no robust weights is ε = 0."""

    def settings(row: Row) -> tuple[object, ...]:
        return row.data, row.recipe, frozenset(row.overrides), row.printed.get("init", 0.0)

    own = row_named(name)
    return tuple(row for row in rows() if settings(row) == settings(own) and row.id != own.id)


def rerun_of(row: Row) -> Row | None:
    """What 000 got for the same settings. Its rows without `init` are copies of 001's.

    Where the row is 000's own, from robust weights, it is not run again: 000 prints some of them twice.
    """
    return next((each for each in _alike(row.id) if each.paper == "000" and "init" in each.printed), None)


def ars_of(row: Row) -> float | None:
    """ARS in print, which 002 gives for some rows of 001."""
    return next((each.printed["ARS"] for each in (row, *_alike(row.id)) if "ARS" in each.printed), None)


def gains_in_print(row: Row) -> dict[str, dict[str, float]]:
    """By row, what robust weights brought in R@1 and ERS over plain ones in 000; a row that is printed twice has two.

    >>> {name: round(gain["ERS"], 1) for name, gain in gains_in_print(row_named("000/a5/cub/hm-lga-8-init-4")).items()}
    {'000/a5/cub/hm-lga-8-init-4': 17.1, '000/a2/cub/hm-lga-8-init-4': 19.1}
    >>> {name: round(gain["ERS"], 1) for name, gain in gains_in_print(row_named("000/a3/cub/natural-r-init-4")).items()}
    {'000/a3/cub/natural-r-init-4': 11.3}
    """
    same = [r for r in rows() if (r.data, r.recipe, set(r.overrides)) == (row.data, row.recipe, set(row.overrides))]
    plain = [each.printed for each in same if each.paper == "000" and not each.printed.get("init")]
    if not plain or not row.printed.get("init"):
        return {}
    start = min(plain, key=lambda printed: "init" not in printed)  # 000's own run where there is one, else 001's copied
    twice = [each for each in (row, rerun_of(row)) if each is not None]
    return {each.id: {name: each.printed[name] - start[name] for name in BAND} for each in twice}


def plain_start_of(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The finished run with the same settings and seed from plain weights, where this one began with robust ones."""

    def settings(each: Entry) -> tuple[object, ...]:
        model = dig(each.info, "settings", "model")
        rest = {key: value for key, value in model.items() if key != "weights"} if isinstance(model, Mapping) else None
        judged = [dig(each.info, "settings", section) for section in _JUDGED if section not in ("model", "train")]
        train = [dig(each.info, "settings", "train", key) for key in ("epochs", "benign", "ema", "seed")]
        return dig(each.info, "data"), judged, train, rest

    if not _robust(entry):
        return None
    alike = (each for each in entries if each.finished and settings(each) == settings(entry))
    return next((each for each in alike if _weights(each) and not _robust(each)), None)


def _weights(entry: Entry) -> str:
    """What a run began with, without the folders where it lay."""
    return Path(str(dig(entry.info, "settings", "model", "weights") or "").replace("\\", "/")).name


def _robust(entry: Entry) -> bool:
    return "robust" in _weights(entry).lower()


def departures(entry: Entry, row: Row) -> list[str]:
    """Where a run or its audit is not as the row is meant, such as `train.epochs 40, not 75`; the seed apart."""
    try:
        meant = to_dict(settings_from(row.recipe, {**row_settings(row), "data": {"name": row.data}}))
    except AnchorholdError as error:  # a recipe that this version cannot read judges nothing
        return [str(error)]
    found = []
    for section, keys in _JUDGED.items():
        own = dig(entry.info, "settings", section)
        if not isinstance(own, Mapping):
            continue
        for key in keys or meant[section]:
            # A setting that is younger than the run had no other value then.
            if key in own and key in meant[section] and own[key] != meant[section][key]:
                found.append(f"{section}.{key} {own[key]}, not {meant[section][key]}")
    return found + _start(entry, row) + _audited(entry)


def _start(entry: Entry, row: Row) -> list[str]:
    """Robust weights to start from, where the row has none."""
    return [f"start {_weights(entry)}"] if _robust(entry) and not row.printed.get("init") else []


def _audited(entry: Entry) -> list[str]:
    """Where the audit is not print's: 32 steps of 3/255 within 8/255 on all images."""
    if entry.audit is None:
        return []
    own = dig(entry.audit, "settings")
    own = own if isinstance(own, Mapping) else {}
    budget = BUDGETS["standard"]
    meant = {"eps": budget.eps, "alpha": budget.alpha, "steps": budget.steps, "method": "pgd"}
    found = [f"audit.{name} {own[name]}, not {value}" for name, value in meant.items() if own.get(name, value) != value]
    attacked, images = (dig(entry.audit, "data", name) for name in ("attacked", "images"))
    if isinstance(attacked, list) and isinstance(images, list) and attacked[:1] != images[:1]:
        found.append(f"audited on {attacked[0]:,} of {images[0]:,} queries")
    return found


def verdict(row: Row, r1: float | None, ers: float | None, departs: bool = False) -> str | None:
    """reproduced, outside, or `within` where the settings are not the row's; None where a number is still missing.

    Both numbers must be near the same pair, print's or the rerun's. They are compared as they are read, to a tenth.
    """
    own = {"R@1": r1, "ERS": ers}
    open_ = False
    for printed in (each.printed for each in (row, rerun_of(row)) if each is not None):
        asked = [name for name in BAND if name in printed]
        near = [_near(own[name], printed[name], BAND[name]) for name in asked]
        if asked and all(near):
            return "within" if departs else "reproduced"
        open_ = open_ or (bool(asked) and False not in near)
    return None if open_ or not {*BAND} & {*row.printed} else "outside"


def _near(own: float | None, printed: float, band: float) -> bool | None:
    return None if own is None else abs(round(own, 1) - printed) <= band + 1e-9
