"""From the rows of attack runs to the numbers of a protocol: columns, ERS and ARS, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SettingsError
from ..random import Key
from ..scores import (
    ARS_COLUMNS,
    ERS_COLUMNS,
    Interval,
    ars_terms,
    ers_terms,
    group_means,
    interval,
    overall,
    resampled_means,
)
from ..scores import ars as ars_of

__all__ = ["NOT_PERCENT", "Column", "Outcome", "RunRows", "Score", "by_start", "estimate", "in_units", "outcome"]

GROUP = 112  # the published means are means of the means of so many samples
NOT_PERCENT = ("TMA", "ES:D")


@dataclass(frozen=True)
class Column:
    """One number of the table, its 95 % interval, and what it was before the attack."""

    value: float
    low: float | None
    high: float | None
    initial: float | None = None
    std: float | None = None  # over the random starts, where there are several; `value` is their mean
    seeds: tuple[float, ...] | None = None  # the value from each start


@dataclass(frozen=True)
class Score:
    """ERS or ARS, with its terms and the means of its two groups."""

    value: float
    low: float
    high: float
    terms: dict[str, float]
    ranking: float
    recall: float
    initial: dict[str, float] | None = None  # ARS: the values before the attack


@dataclass(frozen=True)
class Outcome:
    """What one protocol says."""

    columns: dict[str, Column]
    ers: Score | None
    ars: dict[str, Score | None]  # "constants" and "measured"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class RunRows:
    """All rows of one attack run, in data-set order; fractions, cosines and distances as they were measured."""

    label: str
    attack: str
    goals: dict[str, dict[str, Any]]  # by protocol: the goal's settings
    side: str
    ids: Tensor
    targets: Tensor | None
    shift: Tensor
    measures: dict[str, dict[str, Tensor]]  # by protocol and column
    initial: dict[str, dict[str, Tensor]]
    examples: dict[str, Tensor]
    seconds: float
    image_steps: int
    start_seed: int = 0

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols that this run serves."""
        return tuple(self.goals)


def in_units(name: str) -> float:
    """By what a measure is multiplied to stand in a table."""
    return 1.0 if name in NOT_PERCENT else 100.0


def estimate(values: Tensor, protocol: str = "corrected") -> float:
    """The mean over samples; published, the mean of the means of groups of 112. NaN is left out."""
    if protocol == "published":
        means = torch.stack([group.nanmean() for group in values.split(GROUP)])
        return float(means.nanmean())
    return float(values.nanmean())


def by_start(runs: Sequence[RunRows], protocol: str) -> dict[str, Tensor]:
    """Every measure of a protocol, (starts, samples)."""
    rows: dict[str, list[Tensor]] = {}
    for run in runs:
        for name, row in run.measures.get(protocol, {}).items():
            rows.setdefault(name, []).append(row)
    return {name: torch.stack(each) for name, each in rows.items()}


def outcome(protocol: str, runs: Sequence[RunRows], key: Key, resamples: int, together: bool) -> Outcome:
    """Columns, scores and intervals of one protocol; `together`: queries and gallery are the same images."""
    starts = {name: in_units(name) * rows for name, rows in by_start(runs, protocol).items()}
    rows = {name: each.mean(0) for name, each in starts.items()}
    before: dict[str, Tensor] = {}
    ids: dict[str, Tensor] = {}
    for run in runs:
        for name, row in run.initial.get(protocol, {}).items():
            before[name] = in_units(name) * row
            # Draws are shared by the same samples; a query and a gallery item of one number are not the same.
            ids[name] = run.ids if together or run.side == "query" else -1 - run.ids
    drawn = resampled_means(
        rows | {f"initial {name}": row for name, row in before.items()},
        key("bootstrap"),
        resamples,
        ids | {f"initial {name}": own for name, own in ids.items()},
    )
    spans = {name: interval(drawn[name]) for name in rows}
    columns = {
        name: Column(
            estimate(row, protocol),
            spans[name].low,
            spans[name].high,
            estimate(before[name], protocol),
            *_spread([estimate(each, protocol) for each in starts[name]]),
        )
        for name, row in rows.items()
    }
    notes: list[str] = []
    if not set(ERS_COLUMNS) <= set(columns):
        return Outcome(columns, None, {"constants": None, "measured": None})
    value = {name: columns[name].value for name in ERS_COLUMNS}
    after = {name: drawn[name] for name in ERS_COLUMNS}
    clean = columns["ES:R"].initial or 0.0  # R@1 of the attacked queries, as this protocol counts it
    drawn_clean = drawn["initial ES:R"]
    initial = {name: columns[name].initial or 0.0 for name in ARS_COLUMNS}
    drawn_initial = {name: drawn[f"initial {name}"] for name in ARS_COLUMNS}

    def empirical() -> Score:
        draws = overall(ers_terms(after))
        return _score(ers_terms(value), interval(draws))

    def resistance(measured: bool) -> Score:
        whole = ars_of(value, clean, initial if measured else None)
        draws = overall(ars_terms(after, drawn_clean, drawn_initial if measured else None))
        return _score(whole.columns, interval(draws), whole.initial_values)

    def attempt(name: str, make: Any) -> Score | None:
        try:
            made: Score = make()
            return made
        except SettingsError as error:  # a score that is not defined is left out, with the reason
            notes.append(f"{protocol} {name}: {error}")
            return None

    scored = attempt("ERS", empirical)
    resisted = {name: attempt("ARS", lambda: resistance(name == "measured")) for name in ("constants", "measured")}  # noqa: B023
    return Outcome(columns, scored, resisted, tuple(dict.fromkeys(notes)))


def _spread(values: Sequence[float]) -> tuple[float | None, tuple[float, ...] | None]:
    """Sample standard deviation and all values, where there are several."""
    if len(values) < 2:
        return None, None
    return float(torch.tensor(values, dtype=torch.float64).std()), tuple(values)


def _score(terms: Mapping[str, float], span: Interval, initial: Mapping[str, float] | None = None) -> Score:
    groups = group_means(dict(terms))
    known = None if initial is None else dict(initial)
    return Score(overall(terms), span.low, span.high, dict(terms), groups["ranking"], groups["recall"], known)
