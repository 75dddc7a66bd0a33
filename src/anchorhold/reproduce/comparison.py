"""Which published row a run repeats, the paper's numbers, and whether the run reproduces them.

A row of Zhou & Patel 2022 that the robust-init study trained again has a second pair of numbers, the rerun. A run
reproduces its row when R@1 and the published ERS both lie in the band around one of the two, with the row's settings.
Where the paper started from robust weights, which cannot be downloaded here, the gain over plain weights is compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..columns import pixel_fraction
from ..config.build import to_dict
from ..config.recipes import settings_from
from ..config.settings import DEFENCE_SETTINGS, Settings
from ..data.settings import WHOLE
from ..errors import AnchorholdError, SettingsError
from ..perturb.settings import THREATS
from ..runs.fields import dig
from .rows import Row, row_named, row_settings, rows

__all__ = ["BAND", "ars_of", "departures", "plain_start_of", "published_gains", "rerun_of", "row_of", "verdict"]

BAND = {"R@1": 3.0, "ERS": 5.0}  # points
_RANDOM_START = "defence.start=random"
_JUDGED = {
    "defence": None,  # all of it
    "optimiser": None,
    "batch": None,
    "data": ("resize", "crop", "crop_least", "interpolation", "proportions", "flip", "jitter", "test_crop", "beside"),
    "model": ("backbone", "dim", "freeze_batchnorm", "train", "head"),  # adapters: train is not all then
    "train": ("epochs", "benign", "ema", "mean_from"),
}


class Repeat(Protocol):
    """A run with its audit, as `report.collect` finds it."""

    @property
    def info(self) -> Mapping[str, Any]: ...  # run.json

    @property
    def audit(self) -> Mapping[str, Any] | None: ...  # audit.json

    @property
    def row(self) -> str: ...  # the published row that it repeats

    @property
    def finished(self) -> bool: ...


R = TypeVar("R", bound=Repeat)


def row_of(entry: Repeat) -> Row | None:
    """The row that a run repeats, on its data; None where it names no known row, or held classes out."""
    if dig(entry.info, "settings", "data", "held_out"):
        return None
    try:
        row = row_named(entry.row) if entry.row else None
    except SettingsError:  # from another version
        return None
    return row if row is not None and row.data == dig(entry.info, "data", "name") else None


@cache
def _alike(name: str) -> tuple[Row, ...]:
    """Other rows with the same settings and the same start: no robust weights is ε = 0.

    robust-init says that EST's attack starts at random (A.7), where Zhou & Patel 2022 say nothing: it is one method.
    """

    def settings(row: Row) -> tuple[object, ...]:
        changed = frozenset(each for each in row.overrides if each != _RANDOM_START)
        return row.data, row.recipe, changed, row.published.get("init", 0.0)

    own = row_named(name)
    return tuple(row for row in rows() if settings(row) == settings(own) and row.id != own.id)


def rerun_of(row: Row) -> Row | None:
    """The robust-init study's row for the same settings. Its rows without `init` are copies of Zhou & Patel 2022's.

    For the study's own rows from robust weights this is its second row, which some settings have.
    """
    return next((each for each in _alike(row.id) if each.paper == "robust-init" and "init" in each.published), None)


def ars_of(row: Row) -> float | None:
    """The published ARS; for some rows of Zhou & Patel 2022 it is from Tian et al. 2024."""
    return next((each.published["ARS"] for each in (row, *_alike(row.id)) if "ARS" in each.published), None)


def published_gains(row: Row) -> dict[str, dict[str, float]]:
    """The gain of robust over plain weights in R@1 and ERS, by row; a row that the paper reports twice has two.

    >>> twice = published_gains(row_named("robust-init/a5/cub/hm-lga-8-init-4"))
    >>> {name: round(gain["ERS"], 1) for name, gain in twice.items()}
    {'robust-init/a5/cub/hm-lga-8-init-4': 17.1, 'robust-init/a2/cub/hm-lga-8-init-4': 19.1}
    >>> once = published_gains(row_named("robust-init/a3/cub/natural-r-init-4"))
    >>> {name: round(gain["ERS"], 1) for name, gain in once.items()}
    {'robust-init/a3/cub/natural-r-init-4': 11.3}
    """
    same = [r for r in rows() if (r.data, r.recipe, set(r.overrides)) == (row.data, row.recipe, set(row.overrides))]
    plain = [each.published for each in same if each.paper == "robust-init" and not each.published.get("init")]
    if not plain or not row.published.get("init"):
        return {}
    start = min(plain, key=lambda numbers: "init" not in numbers)  # the study's own run, else a copied one
    twice = [each for each in (row, rerun_of(row)) if each is not None]
    return {each.id: {name: each.published[name] - start[name] for name in BAND} for each in twice}


def plain_start_of(entry: R, entries: Sequence[R]) -> R | None:
    """The finished run with the same settings and seed but plain weights, if this one started from robust ones."""

    def settings(each: Repeat) -> tuple[object, ...]:
        judged = [_chosen(each, section, keys) for section, keys in (_JUDGED | {"model": None}).items()]
        return dig(each.info, "data"), dig(each.info, "settings", "train", "seed"), judged

    if not _robust(entry):
        return None
    alike = (each for each in entries if each.finished and settings(each) == settings(entry))
    return next((each for each in alike if _weights(each) and not _robust(each)), None)


def _chosen(entry: Repeat, section: str, keys: Sequence[str] | None) -> dict[str, Any] | None:
    """A run's values of a section, or of these keys of it; a setting newer than the run had its default then."""
    own = dig(entry.info, "settings", section)
    if not isinstance(own, Mapping):
        return None
    kind = DEFENCE_SETTINGS.get(str(own.get("name"))) if section == "defence" else type(getattr(Settings(), section))
    whole = {**(asdict(kind()) if kind else {}), **own}
    return {key: value for key, value in whole.items() if (key in keys if keys else key != "weights")}


def _weights(entry: Repeat) -> str:
    """The file name of a run's initial weights, also of a model that `fit` was given."""
    chosen = dig(entry.info, "settings", "model", "weights") or dig(entry.info, "model", "weights", "source")
    return Path(str(chosen or "").replace("\\", "/")).name


def _robust(entry: Repeat) -> bool:
    return "robust" in _weights(entry).lower()


def departures(entry: Repeat, row: Row) -> list[str]:
    """Where a run or its audit differs from the row, such as `train.epochs 40, not 75`; the seed does not count."""
    try:
        meant = to_dict(settings_from(row.recipe, {**row_settings(row), "data": {"name": row.data}}))
    except AnchorholdError as error:  # this version cannot read the recipe
        return [str(error)]
    found = []
    for section, keys in _JUDGED.items():
        own = dig(entry.info, "settings", section)
        if not isinstance(own, Mapping):
            continue
        for key in keys or meant[section]:
            # A setting newer than the run had its default then.
            if key in own and key in meant[section] and own[key] != meant[section][key]:
                found.append(f"{section}.{key} {_shown(key, own[key])}, not {_shown(key, meant[section][key])}")
    return found + _images(entry, row) + _start(entry, row) + _audited(entry)


def _images(entry: Repeat, row: Row) -> list[str]:
    """A part of the data set: less than 99 % of its training or test images."""
    own, whole = dig(entry.info, "data", "images"), WHOLE.get(row.data, ())
    if not isinstance(own, list) or len(own) != len(whole):
        return []
    pairs = zip(own, whole, ("training", "test"))
    return [f"{n:,} of {all_:,} {part} images" for n, all_, part in pairs if isinstance(n, int) and n < 0.99 * all_]


def _start(entry: Repeat, row: Row) -> list[str]:
    """Robust initial weights, where the row has none, or no weights at all."""
    if dig(entry.info, "settings", "model", "weights") == "" and not _weights(entry):
        return ["start without weights"]
    return [f"start {_weights(entry)}"] if _robust(entry) and not row.published.get("init") else []


def _audited(entry: Repeat) -> list[str]:
    """Where the audit differs from the papers': 32 steps of 3/255 within 8/255 on all images."""
    if entry.audit is None:
        return []
    own = dig(entry.audit, "settings")
    own = own if isinstance(own, Mapping) else {}
    threat = THREATS["standard"]
    meant = {"eps": threat.eps, "alpha": threat.step, "steps": threat.budget_steps, "method": "pgd", "norm": "linf"}
    found = [
        f"audit.{name} {_shown(name, own[name])}, not {_shown(name, value)}"
        for name, value in meant.items()
        if own.get(name, value) != value
    ]
    attacked, images = (dig(entry.audit, "data", name) for name in ("attacked", "images"))
    if isinstance(attacked, list) and isinstance(images, list) and attacked[:1] != images[:1]:
        found.append(f"audited on {attacked[0]:,} of {images[0]:,} queries")
    return found


def _shown(name: str, value: Any) -> str:
    """A setting as text; ε and α as N/255 where that is exact."""
    return pixel_fraction(value) if name in ("eps", "alpha") and isinstance(value, int | float) else str(value)


def verdict(row: Row, r1: float | None, ers: float | None, departs: bool = False) -> str | None:
    """reproduced, outside, or `within` where the settings are not the row's; None where a number is missing.

    Both numbers must be near the same pair, the paper's or the rerun's. They are compared as shown, rounded to 0.1.
    """
    own = {"R@1": r1, "ERS": ers}
    open_ = False
    for published in (each.published for each in (row, rerun_of(row)) if each is not None):
        asked = [name for name in BAND if name in published]
        near = [_near(own[name], published[name], BAND[name]) for name in asked]
        if asked and all(near):
            return "within" if departs else "reproduced"
        open_ = open_ or (bool(asked) and False not in near)
    return None if open_ or not {*BAND} & {*row.published} else "outside"


def _near(own: float | None, published: float, band: float) -> bool | None:
    return None if own is None else abs(round(own, 1) - published) <= band + 1e-9
