"""From rows of attack runs to the numbers of a protocol: columns, ERS and ARS, with intervals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..columns import ARS_COLUMNS, ERS_COLUMNS, RANKING, SHARES, in_units
from ..errors import SettingsError
from ..random import Key
from ..scores import (
    Interval,
    PerSample,
    ars_per_sample,
    ars_terms,
    ers_terms,
    group_means,
    interval,
    overall,
    resampled_means,
    with_width,
)
from ..scores import ars as ars_of

__all__ = [
    "ColumnValue",
    "Outcome",
    "RunRows",
    "Score",
    "by_start",
    "estimate",
    "outcome",
]

GROUP = 112  # published means are means over groups of 112 samples, averaged


@dataclass(frozen=True)
class ColumnValue:
    """The value of one column, its 95 % interval, and its value before the attack.

    Attributes:
        value: in percent; TMA is a cosine and ES:D a distance.
        low: the lower end of the interval; None where there is none.
        high: the upper end.
        initial: the same measure without an attack.
        std: over the random starts, where there are several; `value` is their mean.
        seeds: the value from each start.
    """

    value: float
    low: float | None
    high: float | None
    initial: float | None = None
    std: float | None = None
    seeds: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Score:
    """ERS or ARS, with its terms and the means of its two groups.

    Attributes:
        value: the score, 0 to 100.
        low: the lower end of the 95 % interval.
        high: the upper end.
        terms: the ten terms of ERS, or the eight columns of ARS.
        ranking: the mean of the terms of CA+, CA-, QA+ and QA-.
        recall: the mean of the terms of ES:R, LTM, GTM and GTT.
        initial: of ARS: the values before the attack.
        left_out: of ARS per sample: how many samples of each column started at their goal.
    """

    value: float
    low: float
    high: float
    terms: dict[str, float]
    ranking: float
    recall: float
    initial: dict[str, float] | None = None
    left_out: dict[str, int] | None = None


@dataclass(frozen=True)
class Outcome:
    """The results of one protocol.

    Attributes:
        columns: the value of each column under attack, CA+ to GTT.
        ers: the empirical robustness score; None where attacks are missing.
        ars: the adversarial resistance score: "constants" with the paper's ranks before the attack, "measured" with
            those of this model, and "per_sample" as a mean over samples; each None where it is not defined.
        notes: what else you should know, as sentences.
    """

    columns: dict[str, ColumnValue]
    ers: Score | None
    ars: dict[str, Score | None]
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
    rejected: int = 0  # samples with a perturbed image whose embedding was not finite

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols that this run serves."""
        return tuple(self.goals)


def estimate(values: Tensor, protocol: str = "corrected") -> float:
    """The mean over samples; published, the mean of the means of groups of 112. NaN is skipped."""
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


def outcome(protocol: str, runs: Sequence[RunRows], key: Key, resamples: int, together: bool, listed: int) -> Outcome:
    """Columns, scores and intervals of one protocol.

    `together`: queries and gallery are the same images. `listed`: the length of a query's list.
    """
    starts = {name: in_units(name) * rows for name, rows in by_start(runs, protocol).items()}
    rows = {name: each.mean(0) for name, each in starts.items()}
    before: dict[str, Tensor] = {}
    ids: dict[str, Tensor] = {}
    for run in runs:
        for name, row in run.initial.get(protocol, {}).items():
            before[name] = in_units(name) * row
            # Columns over the same samples share draws; a query and a gallery item with the same number do not.
            ids[name] = run.ids if together or run.side == "query" else -1 - run.ids
    single, notes = _single(protocol, rows, before, listed)
    drawn = resampled_means(
        rows
        | {f"initial {name}": row for name, row in before.items()}
        | {f"single {name}": each.scores for name, each in single.items()},
        key("bootstrap"),
        resamples,
        ids | {f"{head} {name}": own for name, own in ids.items() for head in ("initial", "single")},
    )
    spans = {name: interval(drawn[name]) for name in rows}
    spans |= {name: with_width(spans[name], rows[name]) for name in rows if name in SHARES}
    columns = {
        name: ColumnValue(
            estimate(row, protocol),
            spans[name].low,
            spans[name].high,
            estimate(before[name], protocol),
            *_spread([estimate(each, protocol) for each in starts[name]]),
        )
        for name, row in rows.items()
    }
    told = tuple(_mended(protocol, before, rows))
    if any(run.goals.get(protocol, {}).get("distance") is False for run in runs):
        why = "ES:D is measured before the last step here, and C&W, Square and NES keep their best iterate"
        told += (f"no ES:D, ERS and ARS: {why}",)
    if not set(ERS_COLUMNS) <= set(columns):
        return Outcome(columns, None, dict.fromkeys(("constants", "measured", "per_sample")), told)
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
        except SettingsError as error:  # an undefined score is left out, with the reason
            notes.append(f"{protocol} {name}: {error}")
            return None

    scored = attempt("ERS", empirical)
    resisted = {name: attempt("ARS", lambda: resistance(name == "measured")) for name in ("constants", "measured")}  # noqa: B023
    resisted["per_sample"] = _per_sample(protocol, single, drawn) if set(ARS_COLUMNS) <= set(single) else None
    return Outcome(columns, scored, resisted, (*told, *dict.fromkeys(notes)))


def _mended(protocol: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterator[str]:
    """A note for each attack that makes more wrong answers right than right ones wrong, by more than chance would."""
    for name in [name for name in ("ES:R", "LTM", "GTM", "nearest", "margin") if name in after]:
        mends, spoils = (int(changed.sum()) for changed in (after[name] > before[name], after[name] < before[name]))
        if mends - spoils > 2 * math.sqrt(mends + spoils):  # two standard deviations of a fair coin
            yield f"{protocol} {name}: the attack mends {mends:,} wrong answers and spoils {spoils:,} right ones"


def _single(
    protocol: str, rows: Mapping[str, Tensor], before: Mapping[str, Tensor], listed: int
) -> tuple[dict[str, PerSample], list[str]]:
    """ARS of every sample, by column, and a note for each column without any."""
    found, notes = {}, []
    for name in [name for name in ARS_COLUMNS if name in rows]:
        # Ranks are in percent of a list of this length; 1e-6 of a place is rounding.
        scale = (listed if name in RANKING else 1) / 100
        start, end = ((scale * row).round(decimals=6) for row in (before[name], rows[name]))
        try:
            each = ars_per_sample(name, start, end, listed)
        except SettingsError as error:
            notes.append(f"{protocol} ARS per sample: {error}")
            continue
        if each.left_out < len(each.scores):
            found[name] = each
        else:
            notes.append(f"{protocol} ARS per sample: every sample of {name} starts at the attack's goal")
    return found, notes


def _per_sample(protocol: str, single: Mapping[str, PerSample], drawn: Mapping[str, Tensor]) -> Score:
    """ARS as a mean of the samples' own ratios (Tian et al. 2024, appendix B), from all its columns."""
    terms = {name: estimate(single[name].scores, protocol) for name in ARS_COLUMNS}
    span = interval(overall({name: drawn[f"single {name}"] for name in ARS_COLUMNS}))
    return replace(_score(terms, span), left_out={name: single[name].left_out for name in ARS_COLUMNS})


def _spread(values: Sequence[float]) -> tuple[float | None, tuple[float, ...] | None]:
    """Sample standard deviation and all values, where there are several."""
    if len(values) < 2:
        return None, None
    return float(torch.tensor(values, dtype=torch.float64).std()), tuple(values)


def _score(terms: Mapping[str, float], span: Interval, initial: Mapping[str, float] | None = None) -> Score:
    groups = group_means(dict(terms))
    known = None if initial is None else dict(initial)
    return Score(overall(terms), span.low, span.high, dict(terms), groups["ranking"], groups["recall"], known)
