"""An audit as one line, as a small HTML table, and as rows of a data frame. `result` has its table in plain text."""

from typing import TYPE_CHECKING, Any

from ..columns import as_text, radius
from ..console import shown
from ..display import html_table
from ..report.audit_page import verdict_of
from ..report.curve import shown_lines, spans_of
from .outcomes import ColumnValue, Outcome, Score

if TYPE_CHECKING:
    from .result import Audit

__all__ = ["COLUMNS", "frame_rows", "html_of", "line_of", "number_in_words"]

COLUMNS = ("kind", "protocol", "attack", "eps", "before", "after", "low", "high", "std", "unit")
_SCORES = {"ARS constants": "constants", "ARS measured": "measured", "ARS per sample": "per_sample"}
_UNITS = {"TMA": "cosine", "ES:D": "distance"}


def frame_rows(audit: "Audit") -> list[dict[str, Any]]:
    """One row for each clean metric, attack, score and point of the curve; `COLUMNS` are its keys."""
    eps = audit.settings["eps"]
    rows = [
        _row("clean", None, name, 0.0, before=each.value, low=each.low, high=each.high)
        for name, each in audit.clean.items()
    ]
    for protocol, outcome in audit.protocols.items():
        for name, column in outcome.columns.items():
            rows.append(_row("attack", protocol, name, eps, **_numbers(column), before=column.initial))
        rows += [_row("score", protocol, name, eps, **_numbers(score)) for name, score in scores_of(outcome).items()]
    curve = audit.curve or {"lines": {}, "eps": ()}
    for name, values in curve["lines"].items():
        for at, value, span in zip(curve["eps"], values, spans_of(curve, name)):
            low, high = span or (None, None)
            rows.append(_row("curve", curve.get("protocol"), name, at, after=value, low=low, high=high))
    return rows


def scores_of(outcome: Outcome) -> dict[str, Score]:
    """The scores of a protocol that are defined, by the names of the table."""
    every = {"ERS": outcome.ers} | {name: outcome.ars.get(key) for name, key in _SCORES.items()}
    return {name: score for name, score in every.items() if score is not None}


def _row(kind: str, protocol: str | None, name: str, eps: float, **numbers: float | None) -> dict[str, Any]:
    empty: dict[str, Any] = dict.fromkeys(COLUMNS)
    unit = "score" if kind == "score" or name == "ERS" else _UNITS.get(name, "percent")
    return empty | {"kind": kind, "protocol": protocol, "attack": name, "eps": eps, "unit": unit} | numbers


def _numbers(value: ColumnValue | Score) -> dict[str, float | None]:
    std = value.std if isinstance(value, ColumnValue) else None
    return {"after": value.value, "low": value.low, "high": value.high, "std": std}


def line_of(audit: "Audit") -> str:
    """The audit in one line: the model, the data, and the first score of each protocol.

    The table is for `print`; a notebook shows this where it shows no HTML.
    """
    told = [f"R@1 {as_text(audit.clean['R@1'].value, 'R@1')}"] if "R@1" in audit.clean else []
    for protocol, outcome in audit.protocols.items():
        first = next(iter(scores_of(outcome).items()), None)
        if first is None and outcome.columns:
            first = next(iter(outcome.columns.items()))  # type: ignore[assignment]
        told += [f"{first[0]} {number_in_words(first[1], first[0])} ({protocol})"] if first else []
    flags = f", {len(audit.flags)} flag{'s' * (len(audit.flags) > 1)}" if audit.flags else ""
    return shown(f"<Audit of {audit.model['kind']} on {_where(audit)}: {', '.join(told)}{flags}>")


def _where(audit: "Audit") -> str:
    return f"{audit.data['query']['name']}, {radius(audit.settings['eps'], audit.settings.get('norm', 'linf'))}"


def html_of(audit: "Audit") -> str:
    """The audit as an HTML table, with its curve, flags and notes."""
    protocols, rows = audit.protocols, []
    for name in dict.fromkeys(name for outcome in protocols.values() for name in outcome.columns):
        found = [outcome.columns.get(name) for outcome in protocols.values()]
        before = next((each.initial for each in found if each is not None), None)
        cells = ["–" if each is None else number_in_words(each, name) for each in found]
        rows.append([name, as_text(before, name), *cells])
    listed = [scores_of(outcome) for outcome in protocols.values()]
    for name in dict.fromkeys(name for each in listed for name in each):
        rows.append([name, "", *(number_in_words(each[name], name) if name in each else "–" for each in listed)])
    for name, values in shown_lines(audit.curve["lines"]).items() if audit.curve else ():
        for eps, value in zip(audit.curve["eps"] if audit.curve else (), values):
            at = f"{name} at {radius(eps, audit.settings.get('norm', 'linf')) if eps else 'ε 0'}"
            rows.append([at, "", *[""] * (len(protocols) - 1), as_text(value, name)])
    asked, total = audit.data["attacked"][0], audit.data["images"][0]
    clean = ", ".join(f"{name} {as_text(column.value, name)}" for name, column in audit.clean.items())
    part = f"; attacked: {audit.data['part']}" if audit.data.get("part") else ""
    notes = [f"verdict: {verdict_of(audit.to_dict())}"]
    notes += [
        *(f"flag {flag.name}: {flag.message}" for flag in audit.flags),
        *(f"note: {note}" for note in audit.notes),
    ]
    return html_table(
        f"{audit.model['kind']} on {_where(audit)}",
        ["attack", "before", *(f"after ({name})" for name in protocols)],
        rows,
        notes,
        f"{asked:,} of {total:,} queries{part}. Clean: {clean}. [95 % intervals]",
    )


def number_in_words(number: ColumnValue | Score, name: str) -> str:
    """A value with its deviation over starts and its 95 % interval."""
    span = (
        ""
        if number.low is None or number.high is None
        else f" [{as_text(number.low, name)}, {as_text(number.high, name)}]"
    )
    std = number.std if isinstance(number, ColumnValue) else None
    return as_text(number.value, name) + ("" if std is None else f" ± {as_text(std, name)}") + span
