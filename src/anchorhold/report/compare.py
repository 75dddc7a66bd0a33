"""Compare runs: one line per run."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import RunError
from ..interface import Placeholder, option
from ..reproduce.comparison import BAND, ars_of, departures, plain_start_of, published_gains, rerun_of, row_of, verdict
from ..reproduce.rows import Row
from ..runs.audits import attack_in_words
from ..runs.fields import dig, number
from .collect import Entry
from .recall_strong import AT, at_each_eps, attacked, curved, eps_of, members_of, norm_of, of_strong, queries_of
from .tables import Cell, Column, ColumnNote, Estimate, Link, Note, Side, Table, plain, written
from .values import COLLAPSE, VALUES, Value, counts, judged, method_cell, new_value

__all__ = [
    "epsilon_table",
    "published_table",
    "reproduced_table",
    "runs_table",
    "units",
]

_ROW = Placeholder("ROW")
GAIN = "gain"  # verdict for rows from robust weights: a note compares the gain over plain weights


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
    new_value("name", "run", _name),
    new_value("method", "method", method_cell),
    new_value("steps", "η", lambda e: number(e.setting("steps")), 0),
    new_value("data", "data", _data),
    new_value("epochs", "epochs", lambda e: e.epoch, 0, spare=True),
    new_value("batch", "batch", _batch, spare=True),
    new_value("seed", "seed", lambda e: number(e.setting("train.seed")), 0, spare=True),
)
_PAPER = (
    new_value("paper_r1", "R@1 paper", _reported("R@1"), spare=True),
    new_value("paper_ers", "ERS paper", _reported("ERS"), spare=True),
    new_value("paper_ars", "ARS paper", _reported("ARS"), spare=True),
    new_value("rerun_r1", "R@1 rerun", _reported("R@1", rerun=True), spare=True),
    new_value("rerun_ers", "ERS rerun", _reported("ERS", rerun=True), spare=True),
    new_value("verdict", "paper's row", _verdict),
)
_END = (
    new_value("commit", "commit", lambda e: str(e.info.get("commit") or "") or None, spare=True),
    new_value("status", "status", lambda e: e.status),
)
_STRONG = (  # about R@1 strong, in this order after it
    new_value("eps", "ε strong", of_strong(eps_of), spare=True),
    new_value("norm", "norm strong", of_strong(norm_of), spare=True),
    new_value("queries", "queries strong", of_strong(queries_of), 0, thousands=True, spare=True),
)
_MEMBERS = new_value("members", "members strong", of_strong(members_of), hidden=True)
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
    """R@1 under the strong attack at every ε that two curves share, the clean value first."""
    audits = [(entry, audit) for entry in entries if (audit := curved(entry)) is not None]
    if not audits:
        asked = option("epsilons", Placeholder("…"), command="curve")
        raise RunError(f"no audit here has R@1 against ε; audit with {asked}")
    levels = at_each_eps(entries)
    columns = (_ABOUT[0].column, _STRONG[2].column, *(column for column, _ in levels))
    rows = [(_name(entry), queries_of(audit), *(of(entry) for _, of in levels)) for entry, audit in audits]
    used = [entry for entry, _ in audits]
    return Table(columns, tuple(rows), (units, *filter(None, (_on_members(used), _on_attacks(used)))))


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
    yield from filter(None, (_on_attacks(audited),))
    fewer = [entry for entry in entries if entry.strong]
    if fewer:
        counts = "; ".join(f"{e.name} {_count(e.strong)} (the others {_count(e)})" for e in fewer)
        yield ColumnNote("ers_strong", f"ERS strong is from a separate audit; number of queries: {counts}")
    yield from _notes_on_papers(entries)


def _on_attacks(audited: Sequence[Entry]) -> str:
    """That the attacks of these audits differ, if they do."""
    attacks = {attack_in_words(dig(entry.audit or {}, "settings") or {}): entry.name for entry in reversed(audited)}
    each = "; ".join(f"{attack} ({name})" for attack, name in sorted(attacks.items()))
    return f"the audits use different attacks, so their scores cannot be compared: {each}" if len(attacks) > 1 else ""


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


def _points(gain: Iterable[float]) -> str:
    return " / ".join(f"{value:+.1f}" for value in gain)


def _count(audit: Entry | None) -> str:
    counts = dig(audit.audit, "data", "attacked") if audit else None
    return f"{counts[0]:,}" if isinstance(counts, list) and counts and number(counts[0]) is not None else "?"
