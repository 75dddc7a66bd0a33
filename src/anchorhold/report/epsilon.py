"""R@1 against ε of several models in one picture, from the curves of their audits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..columns import length
from ..errors import RunError
from ..interface import Placeholder, option
from ..runs.fields import dig, number
from .collect import Entry
from .curve import spans_of
from .figures import line_look, new_figure, plain_text, save_figure, writable
from .marks import MARKERS, in_turn
from .recall_strong import curved, norm_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curve", "curves_by_norm", "draw_curves", "plot_epsilon", "told"]

Span = tuple[float, float]

_LABELS = {"linf": "ε: largest change of a pixel (pixels go from 0 to 1)", "l2": "ε: length of the whole change (L2)"}


@dataclass(frozen=True)
class Curve:
    """R@1 in % of one model at each ε, with 95 % intervals where they are known."""

    name: str
    eps: tuple[float, ...]
    recall: tuple[float, ...]
    spans: tuple[Span | None, ...] = ()


def curves_by_norm(entries: Sequence[Entry]) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """The curves under the strong attack by norm, with their names: an ε in Linf and one in L2 do not compare."""
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for entry in entries:
        if (audit := curved(entry)) is not None:
            found.setdefault(norm_of(audit), []).append((entry.name, audit["curve"]))
    return found


def plot_epsilon(entries: Sequence[Entry], out: str | Path) -> Path:
    """Draw R@1 against ε under the strong attack, a line for each model and a panel for each norm."""
    out = writable(out)
    known = {
        norm: [curve for name, values in named if (curve := _curve(name, values)) is not None]
        for norm, named in curves_by_norm(entries).items()
    }
    panels = {norm: curves for norm, curves in known.items() if curves}
    if not panels:
        asked = option("epsilons", Placeholder("…"), command="curve")
        raise RunError(f"no audit here has R@1 against ε; audit with {asked}")
    return draw_curves(panels, out)


def _curve(name: str, curve: Mapping[str, Any]) -> Curve | None:
    """The points that have a number; None without any."""
    values, eps = dig(curve, "lines", "R@1"), dig(curve, "eps")
    if not isinstance(values, list) or not isinstance(eps, list):
        return None
    points = [
        (at, value, span)
        for each, cell, span in zip(eps, values, spans_of(curve, "R@1"))
        if (at := number(each)) is not None and (value := number(cell)) is not None
    ]
    if not points:
        return None
    sizes, recall, spans = zip(*points)
    return Curve(name, tuple(sizes), tuple(recall), tuple(spans))


def told(drawn: Sequence[Curve]) -> str:
    """The points of a picture as text. A PNG stores it, so that a test detects an old picture.

    >>> told([Curve("natural", (0.0, 0.03), (87.5, 52.25))])
    'natural: 0.0000 87.5, 0.0300 52.2'
    """
    lines = ([f"{eps:.4f} {value:.1f}" for eps, value in zip(each.eps, each.recall)] for each in drawn)
    return "; ".join(f"{each.name}: {', '.join(line)}" for each, line in zip(drawn, lines))


def draw_curves(panels: Mapping[str, Sequence[Curve]], out: Path, title: str = "") -> Path:
    """Draw curves by norm, a panel for each; a model has the same look in every panel."""
    figure, axes = new_figure(len(panels), 6.4 if len(panels) == 1 else 4.8, 3.4)
    places = {name: at for at, name in enumerate(dict.fromkeys(c.name for each in panels.values() for c in each))}
    for axis, (norm, drawn) in zip(axes, panels.items()):
        for each in drawn:
            _draw(axis, each, places[each.name])
        ticks = sorted({eps for each in drawn for eps in each.eps})
        apart = [eps for eps, before in zip(ticks, [-1.0, *ticks]) if eps - before > ticks[-1] / 20]
        axis.set_xticks(apart, [length(eps, norm) if eps else "0" for eps in apart])
        axis.set(xlabel=_LABELS.get(norm, f"ε ({norm})"), ylabel="R@1 (%)", ylim=(0, 100))
    if title:
        figure.suptitle(plain_text(title, 80))
    names = [({**line_look(at), "marker": in_turn(MARKERS, at)}, name) for name, at in places.items()]
    return save_figure(figure, axes, names, out, about=told([each for drawn in panels.values() for each in drawn]))


def _draw(axis: "Axes", curve: Curve, place: int) -> None:
    look = line_look(place)
    axis.plot(curve.eps, curve.recall, marker=in_turn(MARKERS, place), clip_on=False, zorder=3, **look)
    known = [(eps, *span) for eps, span in zip(curve.eps, curve.spans) if span is not None]
    if known:
        eps, low, high = zip(*known)
        axis.fill_between(eps, low, high, color=look["color"], alpha=0.15, linewidth=0)
