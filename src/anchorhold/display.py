"""How results show themselves in a notebook: a small HTML table, and rows as a pandas DataFrame."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from .console import shown
from .errors import SettingsError

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["frame_of", "html_table"]

# Colours are the page's own, and lines are half transparent: both are readable in light and in dark.
_LINE = "1px solid rgba(128,128,128,.45)"
_CELL = f"padding:.15em .6em;border-bottom:{_LINE};color:inherit;background:transparent;"
_BOX = "color:inherit;background:transparent;font-size:.92em;line-height:1.35;margin:.3em 0;"


def html_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = (), subtitle: str = ""
) -> str:
    """A table as HTML that needs no style sheet and no script; all text is escaped.

    >>> html_table("a <b>", ["name", "R@1"], [["x", "97.1"]]).count("&lt;")
    1
    """
    cells = [_row("th", head)] if any(head) else []
    cells += [_row("td", row) for row in rows]
    parts = [f"<strong>{_text(title)}</strong>"]
    parts += [f"<div>{_text(subtitle)}</div>"] if subtitle else []
    if cells:
        parts.append(f'<table style="border-collapse:collapse;margin:.3em 0">{"".join(cells)}</table>')
    parts += [f"<div>{_text(note)}</div>" for note in notes]
    return f'<div style="{_BOX}">{"".join(parts)}</div>'


def _row(tag: str, cells: Sequence[object]) -> str:
    made = [
        f'<{tag} style="{_CELL}text-align:{"right" if place else "left"}">{_text(cell)}</{tag}>'
        for place, cell in enumerate(cells)
    ]
    return f"<tr>{''.join(made)}</tr>"


def _text(thing: object) -> str:
    return escape(shown(str(thing)))


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> "DataFrame":
    """Rows as a pandas DataFrame; pandas is no dependency, so its absence is one line."""
    try:
        import pandas
    except ImportError:
        raise SettingsError("to_frame needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(list(rows), columns=columns)
