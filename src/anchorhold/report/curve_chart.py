"""R@1 against ε, drawn: the curve of one audit, and those of several models in one chart."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..columns import NOT_PERCENT, length
from ..runs.fields import dig, number
from .charts import Axis, Point, Series, chart, key
from .curve import classes_line, shown_lines, spans_of

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["Drawn", "drawn_curve", "drawn_together"]

Drawn = tuple["Markup", "Markup", str, str]  # the chart, its key, a description and a title

_NORMS = {"linf": "Linf", "l2": "L2"}


def drawn_curve(curve: Any, audit: Mapping[str, Any]) -> Drawn | None:
    """The chart of one audit; None without a curve."""
    eps, lines = dig(curve, "eps"), dig(curve, "lines")
    if not eps or not lines:
        return None
    lines = shown_lines(lines)
    norm = str(dig(audit, "settings", "norm") or "linf")
    series = [_series(curve, line, values, line, look, norm) for look, (line, values) in enumerate(lines.items())]
    worst = classes_line(curve)
    if worst is not None:
        series.append(_series(curve, "", worst[1], f"R@1, {worst[0]}", len(series), norm))
    whose = f" ({curve['protocol']})" if curve.get("protocol") else ""
    title = ("R@1 against ε" if "R@1" in lines else "Against ε") + whose
    percent = not set(lines) & set(NOT_PERCENT)
    scale = Axis("%" if "ERS" in lines else "R@1 (%)" if "R@1" in lines else "", (0.0, 100.0) if percent else (0.0,))
    drawn = chart(series, Axis("ε", (0.0,)), scale, title, size=(560, 280))
    queries, total, clean = curve.get("queries"), dig(audit, "data", "images"), dig(audit, "clean", "R@1", "value")
    about = str(curve.get("about", ""))
    if "R@1" in lines and queries is not None and total and queries != total[0] and number(clean) is not None:
        about += f" Clean R@1 over all {total[0]:,} queries is {clean:.1f}."
    return drawn, key(series), about, title


def drawn_together(curves: Sequence[tuple[str, Mapping[str, Any]]], norm: str = "linf") -> Drawn | None:
    """R@1 of several models against ε of one norm; None where no audit has a curve."""
    known = [(name, curve) for name, curve in curves if dig(curve, "lines", "R@1") and dig(curve, "eps")]
    if not known:
        return None
    series = [
        _series(curve, "R@1", curve["lines"]["R@1"], name, look, norm) for look, (name, curve) in enumerate(known)
    ]
    title = f"R@1 against ε under the strong attack ({_NORMS.get(norm, norm)})"
    drawn = chart(
        series, Axis(f"ε in {_NORMS.get(norm, norm)}", (0.0,)), Axis("R@1 (%)", (0.0, 100.0)), title, size=(600, 340)
    )
    queries = {curve.get("queries") for _, curve in known}
    about = "Bars are 95 % intervals."
    if len(queries) > 1:
        about += " The audits attack different numbers of queries."
    return drawn, key(series), about, title


def _series(curve: Mapping[str, Any], line: str, values: Sequence[Any], name: str, look: int, norm: str) -> Series:
    points = []
    for eps, value, span in zip(curve["eps"], values, spans_of(curve, line)):
        if number(value) is None:
            continue
        within = "" if span is None else f" [{span[0]:.1f}, {span[1]:.1f}]"
        tip = f"{name}: {value:.1f}{within} at ε = {length(eps, norm)}"
        points.append(Point(eps, value, tip, y_span=span))
    return Series(name, points, look, focus=True)
