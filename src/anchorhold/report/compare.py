"""Compare runs: one line per run.

`VALUES` lists the values of a run. ERS comes in both protocols, and from a strong audit where there is one. ARS of the
published protocol uses the published constants; ARS of the corrected protocol uses measured initial values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ..errors import RunError, check, nearest
from ..interface import Placeholder, option
from ..reproduce.comparison import BAND, ars_of, departures, plain_start_of, published_gains, rerun_of, row_of, verdict
from ..reproduce.rows import Row
from ..runs.audits import attack_in_words
from ..runs.fields import dig, number
from .collect import Entry
from .methods import method_of
from .recall_strong import AT, at_each_eps, attacked, curved, eps_of, members_of, norm_of, of_strong, queries_of
from .tables import Cell, Column, ColumnNote, Estimate, Link, Mean, Note, Side, Table, plain, written

__all__ = [
    "COLLAPSE",
    "VALUES",
    "column_of",
    "counts",
    "epsilon_table",
    "judged",
    "method_cell",
    "published_table",
    "reproduced_table",
    "runs_table",
    "score_in",
    "units",
    "value_of",
]

COLLAPSE = "collapse"
_ROW = Placeholder("ROW")
SAME = 0.05  # points that training's evaluation and an audit may differ by, since their batches round differently
GAIN = "gain"  # verdict for rows from robust weights: a note compares the gain over plain weights
SHORT = {"ers": "ers_published", "ars": "ars_published"}  # matrices are compared with the papers


@dataclass(frozen=True)
class Value:
    """A value of a run, with its column."""

    column: Column
    of: Callable[[Entry], Cell]


def _clean(name: str, logged: str) -> Callable[[Entry], Cell]:
    """The last value of the training, with the audit's interval if both agree; else the audit's value."""

    def of(entry: Entry) -> Cell:
        known, seen = entry.last(logged), dig(entry.audit, "clean", name)
        value = number(dig(seen, "value"))
        if known is not None and (value is None or abs(known - value) > SAME):
            return known
        if value is None:
            return None
        return Estimate(value if known is None else known, number(dig(seen, "low")), number(dig(seen, "high")))

    return of


def score_in(audit: Mapping[str, Any] | None, protocol: str, score: str) -> Estimate | None:
    """ers or ars of a protocol with its interval. ARS uses published constants if published, else measured values."""
    place = [score] if score == "ers" else [score, "constants" if protocol == "published" else "measured"]
    found = dig(audit, "protocols", protocol, *place)
    value = number(dig(found, "value"))
    return None if value is None else Estimate(value, number(dig(found, "low")), number(dig(found, "high")))


def _score(protocol: str, score: str) -> Callable[[Entry], Cell]:
    """A score of a run; of a collapsed model, the word, since its ERS means nothing."""

    def of(entry: Entry) -> Cell:
        audit = dict(entry.strongest.audit or {}) if protocol == "strong" and entry.strongest else entry.audit
        # Few runs have a strong audit: without one the cell stays empty.
        if entry.collapsed and (protocol != "strong" or entry.strongest):
            return COLLAPSE
        return score_in(audit, protocol, score)

    return of


def _left(entry: Entry) -> Cell:
    found = attacked(entry)
    return None if found is None else found[0]


def _value(key: str, head: str, of: Callable[[Entry], Cell], digits: int = 1, **options: bool) -> Value:
    return Value(Column(key, head, digits, **options), of)


VALUES: dict[str, Value] = {
    value.column.key: value
    for value in (
        _value("r1", "R@1", _clean("R@1", "r1")),
        _value("r2", "R@2", _clean("R@2", "r2"), span=False, spare=True),
        _value("map_r", "mAP@R", _clean("mAP@R", "map_r"), span=False, spare=True),
        _value("r1_strong", "R@1 strong", _left),
        _value("ers_published", "ERS publ.", _score("published", "ers")),
        _value("ers_corrected", "ERS corr.", _score("corrected", "ers")),
        _value("ers_strong", "ERS strong", _score("strong", "ers")),
        _value("ars_published", "ARS publ.", _score("published", "ars"), span=False, spare=True),
        _value("ars_corrected", "ARS corr.", _score("corrected", "ars"), span=False, spare=True),
        _value(
            "seconds",
            "seconds",
            lambda e: number(e.info.get("seconds")) or e.last("seconds"),
            0,
            thousands=True,
            spare=True,
        ),
        _value(
            "image_steps", "image-steps", lambda e: number(e.info.get("image_steps")), 0, thousands=True, spare=True
        ),
        _value("audit_seconds", "audit s", lambda e: number(dig(e.audit, "seconds")), 0, thousands=True, spare=True),
    )
}


def method_cell(entry: Entry) -> Cell:
    """The papers' name of its defence; None for an audit without a run."""
    return method_of(dig(entry.info, "settings", "defence")) if entry.info else None


def _name(entry: Entry) -> Cell:
    file = "run.json" if entry.info else "audit.json"
    return Link(entry.name, entry.path / file)


def _batch(entry: Entry) -> Cell:
    kind, pairs, classes, instances, images = (
        entry.setting(f"batch.{key}") for key in ("kind", "pairs", "classes", "instances", "images")
    )
    if kind is None:
        return None
    if kind == "images":
        return f"{images} images"
    return f"{pairs} pairs" if kind == "pairs" else f"{classes} × {instances}"


def _reported(column: str, rerun: bool = False) -> Callable[[Entry], Cell]:
    def of(entry: Entry) -> Cell:
        row = row_of(entry)
        if rerun and row is not None:
            row = None if row.published.get("init") else rerun_of(row)
        return None if row is None else ars_of(row) if column == "ARS" else row.published.get(column)

    return of


def _verdict(entry: Entry) -> Cell:
    row = row_of(entry)
    if row is None or not entry.finished:
        return None
    r1, ers = (judged(entry, key) for key in ("r1", "ers_published"))
    if r1 == COLLAPSE:
        return COLLAPSE
    if row.published.get("init"):
        return GAIN
    numbers = [None if cell is None or isinstance(cell, str) else plain(cell) for cell in (r1, ers)]
    return verdict(row, numbers[0], numbers[1], bool(departures(entry, row)))


def _data(entry: Entry) -> Cell:
    name, held = dig(entry.info, "data", "name"), entry.setting("data.held_out")
    name = name or dig(entry.audit, "data", "query", "name")
    if name is None:
        return None
    return f"{name}, last {held} training classes" if held else str(name)


_ABOUT = (
    _value("name", "run", _name),
    _value("method", "method", method_cell),
    _value("steps", "η", lambda e: number(e.setting("steps")), 0),
    _value("data", "data", _data),
    _value("epochs", "epochs", lambda e: e.epoch, 0, spare=True),
    _value("batch", "batch", _batch, spare=True),
    _value("seed", "seed", lambda e: number(e.setting("train.seed")), 0, spare=True),
)
_PAPER = (
    _value("paper_r1", "R@1 paper", _reported("R@1"), spare=True),
    _value("paper_ers", "ERS paper", _reported("ERS"), spare=True),
    _value("paper_ars", "ARS paper", _reported("ARS"), spare=True),
    _value("rerun_r1", "R@1 rerun", _reported("R@1", rerun=True), spare=True),
    _value("rerun_ers", "ERS rerun", _reported("ERS", rerun=True), spare=True),
    _value("verdict", "paper's row", _verdict),
)
_END = (
    _value("commit", "commit", lambda e: str(e.info.get("commit") or "") or None, spare=True),
    _value("status", "status", lambda e: e.status),
)
_STRONG = (  # about R@1 strong, in this order after it
    _value("eps", "ε strong", of_strong(eps_of), spare=True),
    _value("norm", "norm strong", of_strong(norm_of), spare=True),
    _value("queries", "queries strong", of_strong(queries_of), 0, thousands=True, spare=True),
)
_MEMBERS = _value("members", "members strong", of_strong(members_of), hidden=True)
_COST = ("seconds", "image_steps", "audit_seconds")
_PERCENT = {key for key in (*VALUES, *(value.column.key for value in _PAPER)) if key not in (*_COST, "verdict")}


def runs_table(entries: Sequence[Entry]) -> Table:
    """One line per run: method, scores, the paper's numbers, cost and status."""
    scores, cost = ([v for key, v in VALUES.items() if (key in _COST) == costs] for costs in (False, True))
    place = 1 + [value.column.key for value in scores].index("r1_strong")
    # Of many ε only CSV and JSON have room here; `epsilon_table` shows them.
    each_eps = [Value(replace(column, hidden=True), of) for column, of in at_each_eps(entries)]
    values = (*_ABOUT, *scores[:place], *_STRONG, _MEMBERS, *each_eps, *scores[place:], *_PAPER, *cost, *_END)
    rows = tuple(tuple(value.of(entry) for value in values) for entry in entries)
    columns = tuple(_named_by(value.column, entries) for value in values)
    return Table(columns, rows, tuple(_notes(entries)))


def _named_by(column: Column, entries: Sequence[Entry]) -> Column:
    """R@1 strong with its ε in its head where all rows share it; where they do not, ε is a column of its own."""
    (eps, norms, queries) = ({cell for entry in entries if (cell := value.of(entry)) is not None} for value in _STRONG)
    if column.key == "r1_strong" and len(eps) == len(norms) == 1:
        norm = "" if norms == {"linf"} else f"{str(next(iter(norms))).upper()} "
        return replace(column, head=f"{column.head} at {norm}{written(next(iter(eps)), _STRONG[0].column)}")
    one = {"eps": len(eps) == len(norms) == 1, "norm": len(norms) == 1, "queries": len(queries) == 1}
    return replace(column, hidden=True) if one.get(column.key) else column


def epsilon_table(entries: Sequence[Entry]) -> Table:
    """R@1 under the strong attack at every ε that the curves of the audits share, the clean value first."""
    audits = [(entry, audit) for entry in entries if (audit := curved(entry)) is not None]
    if not audits:
        asked = option("epsilons", Placeholder("…"), command="curve")
        raise RunError(f"no audit here has R@1 against ε; audit with {asked}")
    levels = at_each_eps(entries)
    columns = (_ABOUT[0].column, _STRONG[2].column, *(column for column, _ in levels))
    rows = [(_name(entry), queries_of(audit), *(of(entry) for _, of in levels)) for entry, audit in audits]
    return Table(columns, tuple(rows), (units,))


def published_table(entries: Sequence[Entry]) -> Table:
    """The runs that repeat a published row, with the numbers of that row and of its rerun."""
    repeating = [entry for entry in entries if row_of(entry) is not None]
    if not repeating:
        raise RunError(
            f"no run here repeats a published row; train with {option('row', _ROW)}, or name rows in rows.toml"
        )
    values = {value.column.key: value for value in (*_ABOUT, *VALUES.values(), *_PAPER)}
    shown = [replace(values[key].column, span=False, spare=key in _BESIDE_SPARE) for key in _BESIDE]
    rows = tuple(tuple(values[key].of(entry) for key in _BESIDE) for entry in repeating)
    return Table(tuple(shown), rows, tuple(_notes_on_papers(repeating)))


def reproduced_table(entries: Sequence[Entry]) -> Table:
    """The audited runs with exactly the settings of a published row: R@1 and ERS, here and in the paper."""
    repeating = [(entry, row) for entry in entries if entry.audit and (row := row_of(entry)) is not None]
    exact = [entry for entry, row in repeating if not departures(entry, row)]
    if not exact:
        raise RunError(
            f"no audited run here has the settings of a published row; train with {option('row', _ROW)}, then audit"
        )
    values = {value.column.key: value for value in (*_ABOUT, *VALUES.values(), *_PAPER)}
    shown = [replace(values[key].column, span=False) for key in _EXACT]
    rows = tuple(tuple(values[key].of(entry) for key in _EXACT) for entry in exact)
    return Table(tuple(shown), rows)


_EXACT = (
    *("name", "method", "steps", "seed", "r1", "paper_r1", "rerun_r1"),
    *("ers_published", "paper_ers", "rerun_ers", "ers_corrected", "verdict"),
)
_BESIDE = (
    *("name", "method", "steps", "batch", "seed", "r1", "paper_r1", "rerun_r1"),
    *("ers_published", "paper_ers", "rerun_ers", "ers_corrected", "ars_published", "paper_ars", "verdict"),
)
_BESIDE_SPARE = ("batch", "seed", "ars_published", "paper_ars")


def _notes(entries: Sequence[Entry]) -> Iterator[Note]:
    audited = [entry for entry in entries if entry.audit]
    if audited:
        yield units
        yield StrongNote(tuple((e.name, *(value.of(e) for value in _STRONG)) for e in entries if attacked(e)))
        yield ColumnNote("r1_strong", _on_members(entries))
    attacks = {attack_in_words(dig(entry.audit or {}, "settings") or {}): entry.name for entry in reversed(audited)}
    if len(attacks) > 1:
        each = "; ".join(f"{attack} ({name})" for attack, name in sorted(attacks.items()))
        yield f"the audits use different attacks, so their scores cannot be compared: {each}"
    fewer = [entry for entry in entries if entry.strong]
    if fewer:
        counts = "; ".join(f"{e.name} {_count(e.strong)} (the others {_count(e)})" for e in fewer)
        yield ColumnNote("ers_strong", f"ERS strong is from a separate audit; number of queries: {counts}")
    yield from _notes_on_papers(entries)


def _on_members(entries: Sequence[Entry]) -> str:
    """Which rows have R@1 strong from which ensemble, where they differ."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        if (members := _MEMBERS.of(entry)) is not None:
            found.setdefault(str(members), []).append(entry.name)
    each = "; ".join(f"{members} ({', '.join(names)})" for members, names in found.items())
    return f"R@1 strong comes from different ensembles, so compare it with care: {each}" if len(found) > 1 else ""


def units(sides: Sequence[Side]) -> str:
    """Which of the columns shown are in %, and that they have intervals.

    >>> units([(Column("r1", "R@1"), [50.0]), (Column("ers_published", "ERS publ."), [Estimate(30.0, 29.0, 31.0)])])
    'R@1, ERS in %; [95 % intervals over queries]'
    """
    percent = [(c, cells) for c, cells in sides if c.key in _PERCENT or c.key.startswith(AT)]
    inside = [(column, cells) for column, cells in percent if any(map(counts, cells))]
    names = ", ".join(dict.fromkeys(column.head.split()[0] for column, _ in inside))
    spans = any(
        column.span and isinstance(cell, Estimate) and cell.low is not None
        for column, cells in inside
        for cell in cells
    )
    return f"{names} in %{'; [95 % intervals over queries]' if spans else ''}" if names else ""


@dataclass(frozen=True)
class StrongNote:
    """ε and the number of queries of R@1 strong, where no column shows them."""

    found: tuple[tuple[Cell, ...], ...]  # name, ε, norm and queries of each attacked run

    def __call__(self, sides: Sequence[Side]) -> str:
        shown = {column.key for column, _ in sides}
        if "r1_strong" not in shown or not self.found:
            return ""
        told: dict[str, list[str]] = {}
        several = len({(eps, norm) for _, eps, norm, _ in self.found}) > 1 and "eps" not in shown
        for name, eps, norm, queries in self.found:
            size = written(eps, _STRONG[0].column)
            words = [f"at {size if norm == 'linf' else f'{norm} {size}'.upper()}"] if several else []
            many = queries and "queries" not in shown
            words += [f"over {written(queries, _STRONG[2].column)} queries"] if many else []
            told.setdefault(" ".join(words), []).append(str(name))
        if set(told) == {""}:
            return ""
        parts = [words + (f" ({', '.join(names)})" if len(told) > 1 else "") for words, names in told.items() if words]
        return f"R@1 strong: {'; '.join(parts)}"


def _notes_on_papers(entries: Sequence[Entry]) -> Iterator[Note]:
    return (ColumnNote("verdict", text) for text in _told_of_papers(entries))


def _told_of_papers(entries: Sequence[Entry]) -> Iterator[str]:
    repeated = [(entry, row) for entry in entries if (row := row_of(entry)) is not None]
    if repeated:
        yield (
            f"reproduced: R@1 within {BAND['R@1']:g} points and ERS published within {BAND['ERS']:g} of the paper's, "
            "or of the rerun in the robust-init study; within: the same, but with other settings than the row's"
        )
    others = {entry.name: departures(entry, row) for entry, row in repeated}
    if any(others.values()):
        each = "; ".join(f"{name} ({', '.join(found)})" for name, found in others.items() if found)
        yield f"other settings than the row's: {each}"
    for entry, row in repeated:
        if row.published.get("init"):
            start = str(entry.setting("model.weights") or "none").replace("\\", "/").split("/")[-1]
            eps = f"{row.published['init']:g}/255"
            gains = _gains(entry, row, entries)
            yield f"gain: {entry.name} starts from {start}, the paper from weights trained against ε = {eps}{gains}"


def _gains(entry: Entry, row: Row, entries: Sequence[Entry]) -> str:
    """The gain from robust weights, here and in the papers, in points."""
    told = [f"{_points(gain.values())} in {name}" for name, gain in published_gains(row).items()]
    from_plain = plain_start_of(entry, entries)
    if from_plain is not None:
        ends = [[judged(run, key) for run in (entry, from_plain)] for key in ("r1", "ers_published")]
        own = [plain(a) - plain(b) for a, b in ends if counts(a) and counts(b)]
        told = [f"{_points(own)} over {from_plain.name}", *told] if len(own) == len(ends) else told
    return f". Gain in R@1 and ERS published: {'; '.join(told)}" if told else ""


def counts(cell: Cell) -> TypeGuard[float | Estimate | Mean]:
    """Whether a cell holds a number."""
    return cell is not None and not isinstance(cell, str)


def _points(gain: Iterable[float]) -> str:
    return " / ".join(f"{value:+.1f}" for value in gain)


def _count(audit: Entry | None) -> str:
    counts = dig(audit.audit, "data", "attacked") if audit else None
    return f"{counts[0]:,}" if isinstance(counts, list) and counts and number(counts[0]) is not None else "?"


def value_of(entry: Entry, key: str) -> Cell:
    """A value by its key: one of `VALUES`, or the last of any column of metrics.jsonl."""
    key = SHORT.get(key, key)
    return VALUES[key].of(entry) if key in VALUES else entry.last(key)


def column_of(entries: Sequence[Entry], key: str) -> Column:
    """The column of a value; refuses one that no run has."""
    key = SHORT.get(key, key)
    if key in VALUES:
        return VALUES[key].column
    logged = {name for entry in entries for row in entry.rows for name in row}
    known = {*VALUES, *SHORT, *logged}
    check(key in logged, f"no run has a value {key!r}; {nearest(key, known)}")
    return Column(key, key, 3)


def judged(entry: Entry, value: str) -> Cell:
    """A value for a comparison; COLLAPSE for a collapsed model."""
    return COLLAPSE if entry.collapsed else value_of(entry, value)
