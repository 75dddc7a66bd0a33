"""The results of each protocol, column by column, and how much one overstates another.

The published protocol overstates the corrected one, and the standard audit (corrected) the strong one. Differences are
always within one audit, over the same images.
"""

from collections.abc import Iterator, Sequence

from ..columns import ERS_COLUMNS, NOT_PERCENT
from ..errors import RunError
from ..interface import option, worded
from ..runs.fields import dig, number
from .collect import Entry
from .tables import Cell, Column, Estimate, Link, Side, Table
from .values import COLLAPSE, method_cell, score_in

__all__ = ["columns_table", "strong_table"]

_NEXT = {"published": "corrected", "corrected": "strong"}  # the stricter protocol that it is compared with


def columns_table(entries: Sequence[Entry]) -> Table:
    """One line per run and protocol: the ten columns, ERS, ARS, and how much ERS overstates the next protocol."""
    audited = [entry for entry in entries if entry.audit]
    if not audited:
        raise RunError(
            "no audits here: make one with "
            + worded("`anchorhold audit RUN --data DATA`", "ah.audit(model, data, out=FOLDER)")
        )
    columns = (
        Column("name", "run"),
        Column("protocol", "protocol"),
        Column("queries", "queries", 0, thousands=True),
        *(Column(name, name, 3 if name in NOT_PERCENT else 1, span=False) for name in ERS_COLUMNS),
        Column("ers", "ERS"),
        Column("ars", "ARS", span=False),
        Column("overstates", "ERS overstated by"),
    )
    lines = [
        (
            _link(entry, audit),
            protocol,
            _queries(audit),
            *(_column(audit, protocol, name) for name in ERS_COLUMNS),
            _scored(entry, audit, protocol, "ers"),
            _scored(entry, audit, protocol, "ars"),
            None if entry.collapsed else _above(audit, protocol, "ers"),
        )
        for entry in audited
        for audit, protocol in _said(entry)
    ]
    return Table(columns, tuple(lines), (_on_units, _on_overstating))


def _on_units(sides: Sequence[Side]) -> str:
    """The units of the columns shown, their intervals, and the initial values of ARS."""
    shown = {column.key: cells for column, cells in sides}
    others = {"TMA": "TMA is a cosine", "ES:D": "ES:D a distance" if "TMA" in shown else "ES:D is a distance"}
    known = [words for name, words in others.items() if name in shown]
    told = [f"in %, but {' and '.join(known)}" if known else "in %"]
    if any(
        column.span and isinstance(cell, Estimate) and cell.low is not None for column, each in sides for cell in each
    ):
        told.append("[95 % intervals over queries]")
    if "ars" in shown:
        told.append("ARS of the published protocol uses the published constants, the others measured initial values")
    return "; ".join(told) if {*ERS_COLUMNS, "ers", "ars"} & shown.keys() else ""


def _on_overstating(sides: Sequence[Side]) -> str:
    """What `overstated by` is, for the protocols that have it."""
    shown = {column.key: cells for column, cells in sides}
    protocols = zip(shown.get("protocol", _NEXT), shown.get("overstates", ()))
    found = dict.fromkeys(str(protocol) for protocol, above in protocols if above is not None)
    pairs = [f"ERS {each} minus ERS {_NEXT[each]}" for each in found if each in _NEXT]
    return f"overstated by: {', '.join(pairs)}, in points, over the same images" if pairs else ""


def strong_table(entries: Sequence[Entry]) -> Table:
    """Standard and strong: ERS and ARS of the corrected protocol, and of the ensemble of attacks."""
    found = [(entry, entry.strongest) for entry in entries if entry.strongest]
    if not found:
        raise RunError(f"no strong audit here: make one with {option('strength', 'strong')}")
    columns = (
        Column("name", "run"),
        Column("method", "method"),
        Column("queries", "queries", 0, thousands=True),
        *(
            Column(f"{key}_{part}", f"{key.upper()} {head}", span=key == "ers")
            for key in ("ers", "ars")
            for part, head in (("corrected", "standard"), ("strong", "strong"), ("overstates", "overstated by"))
        ),
        Column("image_steps", "image-steps, strong", 0, thousands=True),
    )
    lines = [
        (
            _link(entry, audit),
            method_cell(entry),
            _queries(audit),
            *(
                cell
                for key in ("ers", "ars")
                for cell in (
                    _scored(entry, audit, "corrected", key),
                    _scored(entry, audit, "strong", key),
                    None if entry.collapsed else _above(audit, "corrected", key),
                )
            ),
            number(dig(audit.audit, "strong", "image_steps")),
        )
        for entry, audit in found
        if audit is not None
    ]
    notes = ("standard: the corrected protocol; strong: the worst result of an ensemble of attacks",)
    return Table(columns, tuple(lines), notes)


def _said(entry: Entry) -> Iterator[tuple[Entry, str]]:
    """Every protocol of the audit, and corrected and strong of a separate strong audit."""
    yield from ((entry, str(name)) for name in dig(entry.audit, "protocols") or {})
    if entry.strong is not None:
        yield from ((entry.strong, name) for name in ("corrected", "strong"))


def _link(entry: Entry, audit: Entry) -> Cell:
    return entry.name if audit.audit_at is None else Link(entry.name, audit.audit_at / "audit.json")


def _queries(audit: Entry) -> Cell:
    counts = dig(audit.audit, "data", "attacked")
    return number(counts[0]) if isinstance(counts, list) and counts else None


def _column(audit: Entry, protocol: str, name: str) -> Cell:
    found = dig(audit.audit, "protocols", protocol, "columns", name)
    value = number(dig(found, "value"))
    return None if value is None else Estimate(value, number(dig(found, "low")), number(dig(found, "high")))


def _scored(entry: Entry, audit: Entry, protocol: str, key: str) -> Cell:
    """A score of an audit; COLLAPSE for a collapsed run."""
    return COLLAPSE if entry.collapsed else score_in(audit.audit, protocol, key)


def _above(audit: Entry, protocol: str, key: str) -> float | None:
    """By how many points a protocol overstates the next one."""
    here, there = (score_in(audit.audit, each, key) for each in (protocol, _NEXT.get(protocol, "")))
    return None if here is None or there is None else here.value - there.value
