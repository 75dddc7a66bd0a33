"""Several runs in one figure: what was logged by epoch, or scores against a setting.

matplotlib is an extra and is imported inside the functions. Every run has a colour of its own that people with any
colour vision can tell apart (Okabe and Ito's) and a line style of its own; a star is a collapse, as in 002 figure 4.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AnchorholdError, RunError
from ..record import atomic
from ..settings import check, nearest
from .collect import Entry, number
from .compare import COLLAPSE, check_setting, column_of, judged, setting_order, value_of
from .tables import Estimate, called, one_line, plain, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "plot_against", "plot_epochs"]

SCATTERED = ("rows", "cost")  # what `scatter` draws
PLOTS: dict[str, dict[str, str]] = {
    "curves": {"loss": "training loss", "r1": "R@1 (%)"},
    "collapse": {"separability": "separability", "mean_distance": "mean distance d̄", "collapseness": "collapseness C"},
    "shift": {"shift": "mean shift / d̄", "shift_overall": "overall shift / d̄"},
    "hardness": {"hardness_before": "hardness H, clean", "hardness_after": "hardness H, perturbed"},
    "active": {"active_first": "share active, first step", "active_last": "share active, last step"},
}
"""Figures by name: columns of metrics.jsonl, and what stands at their axes. collapse and shift are 002's 4 and 5."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "osD^vPX"
_HIGH = 3.2  # inches, the legend apart
_DPI = 160
_FORMATS = (".png", ".pdf", ".svg")
_STAR: dict[str, Any] = {"marker": "*", "markersize": 13, "markeredgecolor": "black", "markeredgewidth": 0.6}


def plot_epochs(entries: Sequence[Entry], what: str, out: str | Path) -> Path:
    """Draw what was logged in every epoch: a figure of `PLOTS`, or columns of metrics.jsonl by their names."""
    out = _checked(out)
    entries = [entry for entry in entries if entry.rows]
    if not entries:
        raise RunError("no run here has finished an epoch, so there is nothing to draw")
    panels = _panels(entries, what)
    figure, axes = _figure(len(panels))
    for axis, (column, label) in zip(axes, panels.items()):
        curves = [_curve(entry, column) for entry in entries]
        marked = max(map(len, curves)) <= 20  # more of them would hide the lines
        for place, (entry, points) in enumerate(zip(entries, curves)):
            if not points:
                continue
            axis.plot(*zip(*points), **_look(place), marker=_marker(place) if marked else "")
            if entry.collapsed:
                axis.plot(*points[-1], color=_look(place)["color"], **_STAR)
        axis.set(xlabel="epoch", ylabel=label, xlim=(0, 1.03 * max(entry.epoch or 1 for entry in entries)))
    names = [(_look(place), entry.name) for place, entry in enumerate(entries)]
    return _save(figure, axes, names + _explained(entries), out)


def _curve(entry: Entry, column: str) -> list[tuple[float, float]]:
    points = ((number(row.get("epoch")), number(row.get(column))) for row in entry.rows)
    return [(epoch, value) for epoch, value in points if epoch is not None and value is not None]


def plot_against(entries: Sequence[Entry], key: str, out: str | Path, series: str = "") -> Path:
    """Draw R@1 and ERS against a setting (002 figures 6 and 7, 000 figure 4), a line for each value of `series`.

    The axis is of numbers where all values are, else of names. Runs that share a place are averaged, and a bar goes
    from the least to the greatest of them; a single one has its interval instead.
    """
    out = _checked(out)
    for setting in filter(None, (key, series)):
        check_setting(entries, setting)
    entries = [entry for entry in entries if entry.finished and entry.setting(key) is not None]
    if not entries:
        raise RunError(f"no finished run has the setting {key}, so there is nothing to draw")
    values = sorted({entry.setting(key) for entry in entries}, key=setting_order)
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = {value: value if numeric else place for place, value in enumerate(values)}
    groups = sorted({entry.setting(series) for entry in entries} if series else {None}, key=setting_order)
    asked = ["r1", "ers_published", "ers_corrected"]
    asked = asked[:1] + [value for value in asked[1:] if any(value_of(e, value) is not None for e in entries)]
    figure, axes = _figure(len(asked))
    for axis, value in zip(axes, asked):
        for place, group in enumerate(groups):
            own = [entry for entry in entries if not series or entry.setting(series) == group]
            _draw_series(axis, own, key, value, places, place)
        axis.set(xlabel=key, ylabel=f"{column_of(entries, value).head} (%)", ylim=(0, max(1.08 * axis.dataLim.y1, 1)))
        if not numeric:
            slant: Any = {"rotation": 20, "ha": "right"} if len(values) <= 6 else {"rotation": 90}
            axis.set_xticks(range(len(values)), _labels(values), **slant)
            axis.margins(x=0.1)
    labels = [f"{series} = {label}" for label in _labels(groups)] if series else []
    names = [(_look(place), label) for place, label in enumerate(labels)]
    return _save(figure, axes, names + _explained(entries), out)


def _draw_series(axis: "Axes", entries: list[Entry], key: str, value: str, places: dict[Any, Any], place: int) -> None:
    look = _look(place)
    middles: list[tuple[float, float]] = []
    for setting, x in places.items():
        cells = [judged(entry, value) for entry in entries if entry.setting(key) == setting]
        known = [cell for cell in cells if cell is not None and not isinstance(cell, str)]
        if COLLAPSE in cells:
            axis.plot(x, 0, color=look["color"], clip_on=False, zorder=4, **_STAR)
        if not known:
            continue
        middle = sum(plain(cell) for cell in known) / len(known)
        only = known[0] if len(known) == 1 else None
        if isinstance(only, Estimate) and only.low is not None and only.high is not None:
            ends = min(only.low, middle), max(only.high, middle)
        else:
            ends = min(map(plain, known)), max(map(plain, known))
        axis.vlines(x, *ends, color=look["color"], linewidth=1)
        middles.append((x, middle))
    if middles:
        between = {} if key != "recipe" else {"linestyle": "none"}  # methods have no order
        axis.plot(*zip(*middles), marker=_marker(place), **{**look, **between})


# The look ---------------------------------------------------------------------------------------------------


def _checked(out: str | Path) -> Path:
    """Before anything is read or drawn: a name that can be written, and something to draw with."""
    out = Path(out)
    check(out.suffix.lower() in _FORMATS, f"--out {out}: give a file that ends in {', '.join(_FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise AnchorholdError(
            "plots need matplotlib, which is not installed: pip install 'anchorhold[plots]'"
        ) from None
    return out


def _panels(entries: Sequence[Entry], what: str) -> dict[str, str]:
    logged = {
        name for entry in entries for row in entry.rows for name, value in row.items() if number(value) is not None
    }
    names = [name.strip() for name in what.split(",") if name.strip()]
    for name in names:
        check(
            name in PLOTS or name in logged,
            f"nothing to draw is called {name!r}; {nearest(name, {*PLOTS, *SCATTERED, *logged})}",
        )
    panels: dict[str, str] = {}
    for name in names:
        panels |= PLOTS.get(name, {name: name})
    kept = {column: label for column, label in panels.items() if column in logged}
    if not kept:
        raise RunError(
            f"no run here has logged {', '.join(panels) or 'anything'}; train anew, or choose another --what"
        )
    return kept


def _figure(panels: int, wide: float = 4.2, high: float = _HIGH) -> tuple["Figure", list["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Without pyplot: nothing global is touched, and no display is needed.
    figure = Figure(figsize=(wide * panels, high), layout=ConstrainedLayoutEngine(w_pad=0.12))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for axis in axes:
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _look(place: int) -> dict[str, Any]:
    """Colour and line style: 28 runs until both come again."""
    style = _STYLES[place % len(_STYLES)]
    return {"color": _COLOURS[place % len(_COLOURS)], "linestyle": style, "linewidth": 1.7, "markersize": 4.5}


def _explained(entries: Sequence[Entry]) -> list[tuple[dict[str, Any], str]]:
    """The star, in the legend of a figure that has one."""
    star = {"color": "white", "linestyle": "", **_STAR}
    return [(star, COLLAPSE)] if any(entry.collapsed for entry in entries) else []


def _marker(place: int) -> str:
    return _MARKERS[place % len(_MARKERS)]


def _labels(values: Sequence[Any]) -> list[str]:
    """Values at an axis; paths by what the files are called, if that tells them apart."""
    words = [f"{value:g}" if isinstance(value, float) else str(value) or "none" for value in values]
    short = [called(word) if "/" in word else word for word in words]
    return [_drawn(word, 28) for word in (short if len(set(short)) == len(words) else words)]


def _drawn(text: str, width: int = 40) -> str:
    """Text on one line, with no $ that would begin a formula."""
    return shortened(one_line(text), width).replace("$", r"\$")


def _save(
    figure: "Figure",
    axes: list["Axes"],
    names: Sequence[tuple[dict[str, Any], str]],
    out: Path,
    last: Callable[[], None] | None = None,
    about: str = "",
) -> Path:
    """Add the legend and write the figure; `last` is called when everything has its place, a PNG says its `about`."""
    from matplotlib.lines import Line2D

    if names:
        lines = [Line2D([], [], **look) for look, _ in names]
        labels = [_drawn(name) for _, name in names]
        room = 13 * figure.get_figwidth()  # letters
        columns = max(1, min(len(labels), int(room / (8 + max(map(len, labels))))))
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    if last is not None:
        figure.set_dpi(_DPI)  # letters are measured as they will be drawn
        figure.draw_without_rendering()
        last()
    with atomic(out) as temporary:
        form = out.suffix[1:].lower()
        said = {"Description": about} if about and form == "png" else None
        figure.savefig(temporary, dpi=_DPI, format=form, metadata=said)
    return out
