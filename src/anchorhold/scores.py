"""Robustness in one number: ERS and ARS, their terms, and bootstrap intervals.

Every function takes the columns of the papers' tables in the tables' units. Ranks are in percent of the list: 0 is the
top and 100 the end.

    CA+ CA- QA+ QA-   mean rank of the target after the attack, percent (high is robust for +, not robust for -)
    TMA               mean cosine to the target, -1 … 1
    ES:D              mean distance to the clean embedding on the unit sphere, 0 … 2
    ES:R LTM GTM      R@1 after the attack, percent
    GTT               share of queries whose first neighbour stays among the first four, percent

The formulas (`ers_terms`, `ars_terms`, `overall`, `group_means`) work on numbers and, element by element, on
tensors. The same formula scores a model and each of its bootstrap resamples.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .columns import ARS_COLUMNS, ERS_COLUMNS, PRINTED_INITIAL, RANKING, RECALL, goal_of, rises
from .errors import SettingsError, nearest
from .random import Key

__all__ = [
    "ARS",
    "Interval",
    "PerSample",
    "ars",
    "ars_per_sample",
    "ars_terms",
    "bootstrap",
    "ers",
    "ers_terms",
    "group_means",
    "interval",
    "overall",
    "resampled_means",
]


_RANGE = {"TMA": (-1.0, 1.0, "a cosine"), "ES:D": (0.0, 2.0, "a distance on the unit sphere")}
_PERCENT = (0.0, 100.0, "in percent")
_SLACK = 1e-3  # fp32 cosines and distances overshoot a little
_CELLS = 4_000_000  # resamples × samples in memory at a time

Number = TypeVar("Number", float, Tensor)


# ---------------------------------------------------------------- ERS


def ers_terms(values: Mapping[str, Number]) -> dict[str, Number]:
    """The ten terms of ERS, each 0 for a perfect attack; not clipped, so CA+ above 50 gives more than 100.

    2·CA+, 100 - CA-, 2·QA+, 100 - QA-, 100·(1 - TMA), 100·(2 - ES:D)/2, ES:R, LTM, GTM, GTT
    """
    _check("ers", values, ERS_COLUMNS)
    return {
        "CA+": 2 * values["CA+"],
        "CA-": 100 - values["CA-"],
        "QA+": 2 * values["QA+"],
        "QA-": 100 - values["QA-"],
        "TMA": 100 * (1 - values["TMA"]),
        "ES:D": 100 * (2 - values["ES:D"]) / 2,
        **{name: values[name] for name in RECALL},
    }


def ers(values: Mapping[str, Number]) -> Number:
    """The empirical robustness score: the mean of the ten terms (Zhou & Patel 2022, section 4; `ers_terms`).

    Args:
        values: CA+, CA-, QA+, QA-, TMA, ES:D, ES:R, LTM, GTM and GTT of an audit, in the units of its table.

    Returns:
        From 0, where every attack reaches its goal, to about 100; CA+ and QA+ above 50 can exceed it.

    >>> row = {"CA+": 12.7, "CA-": 46.4, "QA+": 11.6, "QA-": 39.9, "TMA": 0.567, "ES:D": 0.783}
    >>> round(ers(row | {"ES:R": 16.8, "LTM": 11.9, "GTM": 27.9, "GTT": 1.4}), 1)
    32.4
    """
    return overall(ers_terms(values))


# ---------------------------------------------------------------- ARS


class ARS(float):
    """The overall ARS as a number, with its eight columns and the initial values behind them."""

    columns: dict[str, float]
    initial: str  # "published constants" or "measured"
    initial_values: dict[str, float]  # O_i of every column, percent

    def __new__(cls, columns: Mapping[str, float], initial: str, initial_values: Mapping[str, float]) -> "ARS":
        score = super().__new__(cls, overall(columns))
        score.columns, score.initial, score.initial_values = dict(columns), initial, dict(initial_values)
        return score

    def __getnewargs__(self) -> tuple[dict[str, float], str, dict[str, float]]:  # type: ignore[override]
        return self.columns, self.initial, self.initial_values  # for copy and pickle


def ars_terms(
    values: Mapping[str, Number], clean: Number, initial: Mapping[str, Number] | None = None
) -> dict[str, Number]:
    """The eight columns of ARS, arguments as in `ars`; an element of a tensor without a score becomes NaN or ±inf.

    100 · (1 - (O_r - O_i) / (O_g - O_i)) = 100 · (O_g - O_r) / (O_g - O_i)            (Tian et al. 2024, eq. 15)
    """
    _check("ars", values, ARS_COLUMNS)
    before = _initial_values(clean, initial)
    terms: dict[str, Number] = {}
    for name in ARS_COLUMNS:
        goal = goal_of(name) or 0.0
        terms[name] = 100 * (goal - values[name]) / (goal - before[name])
    return terms


def ars(values: Mapping[str, float], clean: float, initial: Mapping[str, float] | None = None) -> ARS:
    """The adversarial resistance score: the mean of eight columns (Tian et al. 2024, eq. 15; `ars_terms`).

    Args:
        values: CA+, CA-, QA+, QA-, ES:R, LTM, GTM and GTT in percent. TMA and ES:D are accepted and not used.
        clean: R@1 without an attack, in percent.
        initial: values before the attack, in percent: mean ranks for CA+, CA-, QA+ and QA-, and if you like ES:R, LTM
            and GTM (default: `clean`) and GTT (default: 100). None takes the paper's constants for the ranks.

    Returns:
        The score as a number, with its eight `columns`, its `initial_values`, and `initial`, which names their source.

    >>> row = {"CA+": 15.5, "CA-": 37.7, "QA+": 16.6, "QA-": 30.9, "ES:R": 17.9, "LTM": 16.7, "GTM": 27.3, "GTT": 2.9}
    >>> score = ars(row, clean=34.9)
    >>> round(score, 2), round(score.columns["QA-"], 2), score.initial
    (47.15, 69.8, 'published constants')
    """
    columns = ars_terms(values, clean, initial)
    if clean <= 1 and any(values[name] > 10 for name in ("ES:R", "LTM", "GTM")):
        raise SettingsError(f"clean R@1 is {clean:g} and grows under attack: probably a fraction; give percent")
    return ARS(columns, "published constants" if initial is None else "measured", _initial_values(clean, initial))


def _initial_values(clean: Number, initial: Mapping[str, Number] | None) -> dict[str, Number | float]:
    """O_i of every column; a value at its goal is refused, since equation 15 would divide by zero."""
    if initial is not None:
        _check("initial", initial, RANKING)
    before: dict[str, Number | float] = {**PRINTED_INITIAL, "ES:R": clean, "LTM": clean, "GTM": clean, "GTT": 100.0}
    before |= {name: value for name, value in (initial or {}).items() if name in ARS_COLUMNS}
    for name, value in before.items():
        label = "clean R@1" if value is clean else f"initial {name}"
        low, high = _within(label, value, _PERCENT)
        if low == high == goal_of(name):
            raise SettingsError(f"{label} is {low:g}, already the attack's goal: ARS is not defined for this model")
    return before


@dataclass(frozen=True)
class PerSample:
    """ARS of one attack, sample by sample."""

    scores: Tensor  # percent, NaN where left out
    mean: float  # of the scores that are not NaN
    left_out: int  # samples that started at the goal


def ars_per_sample(attack: str, initial: Tensor, result: Tensor, size: int | None = None) -> PerSample:
    """Equation 15 of Tian et al. 2024 for every sample, not clipped, and without the absolute value of equation 29.

    For CA± and QA±, `initial` and `result` are 0-based ranks in a list of `size` items, and the goal is 0 or
    size - 1. For ES:R, LTM, GTM and GTT they say whether the query is answered right, and the goal is 0.

    >>> ars_per_sample("CA+", torch.tensor([4, 0, 2]), torch.tensor([1, 0, 3]))
    PerSample(scores=tensor([ 25.,  nan, 150.], dtype=torch.float64), mean=87.5, left_out=1)
    """
    if attack not in ARS_COLUMNS:
        raise SettingsError(f"ARS has no column {attack!r}; {nearest(attack, ARS_COLUMNS)}")
    if rises(attack) and (size is None or size < 2):
        raise SettingsError(f"{attack} moves a rank to the end of a list: give its length as `size`, at least 2")
    if initial.shape != result.shape or not initial.numel():
        raise SettingsError(f"{attack}: initial {tuple(initial.shape)} and result {tuple(result.shape)} do not match")
    goal = size - 1 if rises(attack) and size else 0
    initial, result = initial.double(), result.double()
    if not (initial.isfinite().all() and result.isfinite().all()):
        raise SettingsError(f"{attack} has values that are not finite; leave those samples out")
    scores = 100 * (goal - result) / (goal - initial)
    at_goal = initial == goal
    scores[at_goal] = torch.nan
    return PerSample(scores, float(scores.nanmean()), int(at_goal.sum()))


# ---------------------------------------------------------------- means and checks


def overall(terms: Mapping[str, Number]) -> Number:
    """The plain mean of a score's terms."""
    return _mean(terms.values())


def group_means(terms: Mapping[str, Number]) -> dict[str, Number]:
    """Means of the ranking (CA±, QA±) and of the recall attacks (ES:R, LTM, GTM, GTT), for the terms of either score.

    >>> group_means({"CA+": 2.0, "CA-": 4.0, "QA+": 2.0, "QA-": 4.0, "ES:R": 1.0, "LTM": 1.0, "GTM": 1.0, "GTT": 5.0})
    {'ranking': 3.0, 'recall': 2.0}
    """
    absent = [name for name in ARS_COLUMNS if name not in terms]
    if absent:
        raise SettingsError(f"ranking and recall means need all eight terms; missing: {', '.join(absent)}")
    return {"ranking": _mean(terms[name] for name in RANKING), "recall": _mean(terms[name] for name in RECALL)}


def _mean(values: Iterable[Number]) -> Number:
    first, *others = values
    total = first
    for value in others:
        total = total + value
    return total / (1 + len(others))


def _check(what: str, values: Mapping[str, Number], needed: tuple[str, ...]) -> None:
    for name in values:
        if name not in ERS_COLUMNS:
            raise SettingsError(f"{what} has no column {name!r}; {nearest(name, ERS_COLUMNS)}")
    absent = [name for name in needed if name not in values]
    if absent:
        raise SettingsError(f"{what} needs {len(needed)} columns; missing: {', '.join(absent)}")
    spans = {name: _within(name, values[name], _RANGE.get(name, _PERCENT)) for name in needed}
    # No model has all columns at 1 % or less: these are fractions.
    top = max(high for name, (_, high) in spans.items() if name not in _RANGE)
    if what != "initial" and 0 < top <= 1:
        raise SettingsError(f"{what}: no percentage is above {top:g}, so these are probably fractions: multiply by 100")


def _within(name: str, value: float | Tensor, limits: tuple[float, float, str]) -> tuple[float, float]:
    """The least and the greatest of a column's values; raises SettingsError unless they are numbers in its units."""
    lowest, highest, unit = limits
    try:
        low, high = (float(end) for end in torch.as_tensor(value, dtype=torch.float64).aminmax())
    except (TypeError, ValueError, RuntimeError):
        raise SettingsError(f"{name} is {value!r}: give a number") from None
    if low != low:
        raise SettingsError(f"{name} is NaN: the attack was not measured, or the embeddings are not finite")
    if low < lowest - _SLACK or high > highest + _SLACK:
        wrong = low if low < lowest - _SLACK else high
        raise SettingsError(f"{name} is {unit}, {lowest:g} to {highest:g}, and cannot be {wrong:g}")
    return low, high


# ---------------------------------------------------------------- bootstrap


@dataclass(frozen=True)
class Interval:
    """The bootstrap interval of a score over queries."""

    low: float
    high: float
    level: float
    resamples: int  # resamples with a finite score


def resampled_means(
    columns: Mapping[str, Tensor], key: Key, resamples: int = 1000, ids: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """(resamples,) means of each (Q,) column of per-query values, drawn with replacement; means skip NaN.

    `ids` identifies each column's samples, by default 0, 1, 2, …. Columns over the same samples, in any order, share
    every draw, so correlations are kept. Columns over different samples are drawn independently.
    """
    if resamples < 1:
        raise SettingsError(f"resamples is {resamples}: draw at least one, usually 1000")
    groups: dict[str, dict[str, Tensor]] = {}
    for name, column in columns.items():
        own = torch.arange(len(column)) if ids is None else ids[name]
        if column.ndim != 1 or not len(column) or own.shape != column.shape:
            raise SettingsError(
                f"{name}: values {tuple(column.shape)} and ids {tuple(own.shape)}; give one per query, at least one"
            )
        own, order = own.long().cpu().sort(stable=True)
        samples = hashlib.blake2b(own.numpy().tobytes(), digest_size=8).hexdigest()
        groups.setdefault(samples, {})[name] = column[order.to(column.device)].double()
    means: dict[str, Tensor] = {}
    for samples, members in groups.items():
        means |= zip(members, _resample(torch.stack(list(members.values()), 1), key(samples), resamples).unbind(1))
    return {name: means[name] for name in columns}


def _resample(values: Tensor, key: Key, resamples: int) -> Tensor:
    """(resamples, C) column means of rows of (Q, C) values drawn with replacement."""
    count, parts = len(values), []
    known = (~values.isnan()).double()
    values = values.nan_to_num(nan=0.0)
    for draws in torch.arange(resamples, device=values.device).split(max(1, _CELLS // count)):
        picked = (key.uniform(draws, (count,)) * count).long()
        times = torch.zeros_like(picked, dtype=torch.float64).scatter_add_(1, picked, values.new_ones(picked.shape))
        parts.append((times @ values) / (times @ known))
    return torch.cat(parts)


def interval(draws: Tensor, level: float = 0.95) -> Interval:
    """The percentile interval of a score's resamples; resamples without a finite score are skipped."""
    if not 0 < level < 1:
        raise SettingsError(f"level is {level}: give the share of resamples to cover, such as .95")
    draws = draws[draws.isfinite()].double()
    if not len(draws):
        return Interval(torch.nan, torch.nan, level, 0)
    ends = draws.quantile(draws.new_tensor([(1 - level) / 2, (1 + level) / 2]))
    return Interval(float(ends[0]), float(ends[1]), level, len(draws))


def with_width(span: Interval, rows: Tensor) -> Interval:
    """The interval of a share in percent, of rows that are 0 or 100.

    Where all rows agree, so do all resamples, and the bootstrap has no width. Then it is the exact interval: that of
    0 of n is 0 to 1 − 0.025^(1/n) (Clopper & Pearson 1934), that of n of n its mirror image.

    >>> span = with_width(Interval(0.0, 0.0, 0.95, 1000), torch.zeros(10))
    >>> round(span.high, 1)
    30.8
    """
    rows = rows[rows.isfinite()]
    if not len(rows) or not bool(((rows == rows[0]) & ((rows == 0) | (rows == 100))).all()):
        return span
    width = 100 * (1 - ((1 - span.level) / 2) ** (1 / len(rows)))
    low = 0.0 if rows[0] == 0 else 100 - width
    return Interval(low, low + width, span.level, span.resamples)


def bootstrap(
    columns: Mapping[str, Tensor],
    statistic: Callable[[dict[str, Tensor]], Tensor],
    key: Key,
    resamples: int = 1000,
    level: float = 0.95,
    ids: Mapping[str, Tensor] | None = None,
) -> Interval:
    """Percentile bootstrap over queries, with a fixed gallery, of a statistic of column means such as `ers`.

    The statistic maps (resamples,) means by column to (resamples,) scores. For several statistics of
    the same columns, draw once with `resampled_means` and call `interval` on each.

    >>> hits = (torch.arange(400) % 4 == 0).double()
    >>> found = bootstrap({"R@1": hits}, lambda means: means["R@1"], Key.of(0))
    >>> 0.20 < found.low < 0.25 < found.high < 0.30
    True
    """
    return interval(statistic(resampled_means(columns, key, resamples, ids)), level)
