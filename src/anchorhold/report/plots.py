"""Several runs in one figure: logged columns by epoch, or scores against a setting.

Every run has its own colour and line style (`marks`); a star marks a collapse.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, check, nearest
from ..interface import Placeholder, option, setting
from ..runs.fields import number
from .collect import Entry
from .figures import line_look, new_figure, plain_text, save_figure, writable
from .marks import MARKERS, in_turn
from .matrix import check_setting, setting_order
from .shifts import PHASES
from .tables import Estimate, called, plain
from .values import COLLAPSE, column_of, judged, value_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PLOTS", "plot_against", "plot_epochs"]

SCATTERED = ("rows", "cost", "initialisation", "epsilon")  # figures of `scatter`, `initialisation` and `epsilon`
PLOTS: dict[str, dict[str, str]] = {
    "curves": {"loss": "training loss", "r1": "R@1 (%)"},
    "robust": {
        "loss": "training loss",
        "r1_attacked": "R@1 under attack (%)",
        "map_r_attacked": "mAP@R under attack (%)",
    },
    "collapse": {"separability": "separability", "mean_distance": "mean distance d̄", "collapseness": "collapseness C"},
    "shift": {
        "shift_perturbed": "mean shift / d̄, perturbed",
        "shift_overall_perturbed": "overall shift / d̄, perturbed",
        "shift_all": "mean shift / d̄, all triplets",
    },
    "hardness": {"hardness_before": "hardness H, clean", "hardness_after": "hardness H, perturbed"},
    "active": {"active_first": "share active, first step", "active_last": "share active, last step"},
}
"""Figures by name: columns of metrics.jsonl with their axis labels. collapse and shift are CA-TRIDE's figures 4 and 5,
robust is ADML's figures 3 and 4.

Shifts are drawn by phase, as there: CAP and ANP of a CA-TRIDE run are two lines.
"""

_ATTACKED = {"r1_attacked", "map_r_attacked"}  # one of them makes the figure `robust`
_STAR: dict[str, Any] = {"marker": "*", "markersize": 13, "markeredgecolor": "black", "markeredgewidth": 0.6}


def plot_epochs(entries: Sequence[Entry], what: str, out: str | Path) -> Path:
    """Draw logged columns by epoch: a figure of `PLOTS`, or columns of metrics.jsonl by name."""
    out = writable(out)
    entries = [entry for entry in entries if entry.rows]
    if not entries:
        raise RunError("no run here has finished an epoch, so there is nothing to draw")
    panels = _panels(entries, what)
    figure, axes = new_figure(len(panels))
    lines = [(entry, phase) for entry in entries for phase in _phases(entry, panels)]
    for axis, (column, label) in zip(axes, panels.items()):
        curves = [_curve(entry, column, phase) for entry, phase in lines]
        marked = max(map(len, curves)) <= 20  # more marks would hide the lines
        for place, ((entry, _), points) in enumerate(zip(lines, curves)):
            if not points:
                continue
            axis.plot(*zip(*points), **line_look(place), marker=in_turn(MARKERS, place) if marked else "")
            if entry.collapsed:
                axis.plot(*points[-1], color=line_look(place)["color"], **_STAR)
        if label.endswith("(%)"):  # no room beyond what a share can be
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, 0.0), min(high, 100.0))
        axis.set(xlabel="epoch", ylabel=label, xlim=(0, 1.03 * max(entry.epoch or 1 for entry in entries)))
    names = [(line_look(place), _called(entry, phase, panels)) for place, (entry, phase) in enumerate(lines)]
    return save_figure(figure, axes, names + _explained(entries), out)


def _phases(entry: Entry, panels: Collection[str]) -> list[str]:
    """The phases that a run logs separately, for figures of shifts only; otherwise "", the whole run."""
    logged = {name for row in entry.rows for name in row}
    found = [phase for phase in PHASES if all(f"{column}_{phase}" in logged for column in panels)]
    return found if found and all(column.startswith("shift_") for column in panels) else [""]


def _called(entry: Entry, phase: str, panels: Collection[str]) -> str:
    """A line's name: its run, its phase, and whether its values are derived."""
    derived = " (perturbed: derived)" if entry.derived.intersection(panels) else ""
    return f"{entry.name} {phase.upper()}".rstrip() + derived


def _curve(entry: Entry, column: str, phase: str) -> list[tuple[float, float]]:
    column = f"{column}_{phase}" if phase else column
    points = ((number(row.get("epoch")), number(row.get(column))) for row in entry.rows)
    return [(epoch, value) for epoch, value in points if epoch is not None and value is not None]


def plot_against(entries: Sequence[Entry], key: str, out: str | Path, series: str = "", label: str = "") -> Path:
    """Draw R@1 and ERS against a setting (Tian et al. 2024, figures 6 and 7), a line for each value of `series`.

    The axis is numeric if all values are numbers, otherwise categorical. Runs with equal settings are averaged, and a
    bar spans their minimum and maximum. A single run has its interval instead. `label` is written at the axis.
    """
    out = writable(out)
    for name in filter(None, (key, series)):
        check_setting(entries, name)
    entries = [entry for entry in entries if entry.finished and entry.setting(key) is not None]
    if not entries:
        raise RunError(f"no finished run has the setting {key}, so there is nothing to draw")
    values = sorted({entry.setting(key) for entry in entries}, key=setting_order)
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = {value: value if numeric else place for place, value in enumerate(values)}
    groups = sorted({entry.setting(series) for entry in entries} if series else {None}, key=setting_order)
    asked = ["r1", "ers_published", "ers_corrected"]
    asked = asked[:1] + [value for value in asked[1:] if any(value_of(e, value) is not None for e in entries)]
    figure, axes = new_figure(len(asked))
    for axis, value in zip(axes, asked):
        for place, group in enumerate(groups):
            own = [entry for entry in entries if not series or entry.setting(series) == group]
            _draw_series(axis, own, key, value, places, place)
        axis.set(
            xlabel=label or key,
            ylabel=f"{column_of(entries, value).head} (%)",
            ylim=(0, min(max(1.08 * axis.dataLim.y1, 1), 100)),
        )
        if not numeric:
            slant: Any = {"rotation": 20, "ha": "right"} if len(values) <= 6 else {"rotation": 90}
            axis.set_xticks(range(len(values)), _labels(values), **slant)
            axis.margins(x=0.1)
    own_names = series == "method"  # which say what they are
    labels = [word if own_names else f"{series} = {word}" for word in _labels(groups)] if series else []
    names = [(line_look(place), word) for place, word in enumerate(labels)]
    return save_figure(figure, axes, names + _explained(entries), out)


def _draw_series(axis: "Axes", entries: list[Entry], key: str, value: str, places: dict[Any, Any], place: int) -> None:
    look = line_look(place)
    middles: list[tuple[float, float]] = []
    for choice, x in places.items():
        cells = [judged(entry, value) for entry in entries if entry.setting(key) == choice]
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
        axis.plot(*zip(*middles), marker=in_turn(MARKERS, place), **{**look, **between})


def _panels(entries: Sequence[Entry], what: str) -> dict[str, str]:
    logged = {
        name for entry in entries for row in entry.rows for name, value in row.items() if number(value) is not None
    }
    names = [name.strip() for name in what.split(",") if name.strip()]
    for name in names:
        check(
            name in PLOTS or name in logged,
            f"no plot or column {name!r}; {nearest(name, {*PLOTS, *SCATTERED, *logged})}",
        )
    if "robust" in names and not logged & _ATTACKED:
        raise RunError(
            f"no run here has logged R@1 under attack; train with {setting('train.attack_eps', Placeholder('8/255'))}"
        )
    panels: dict[str, str] = {}
    for name in names:
        panels |= PLOTS.get(name, {name: name})
    kept = {column: label for column, label in panels.items() if column in logged}
    if not kept:
        raise RunError(
            f"no run here has logged {', '.join(panels) or 'anything'}; train again, or choose another {option('what')}"
        )
    return kept


def _explained(entries: Sequence[Entry]) -> list[tuple[dict[str, Any], str]]:
    """The star for the legend, if a run collapsed."""
    star = {"color": "white", "linestyle": "", **_STAR}
    return [(star, COLLAPSE)] if any(entry.collapsed for entry in entries) else []


def _labels(values: Sequence[Any]) -> list[str]:
    """Labels of values at an axis; paths are shortened to file names if these are unique."""
    words = [f"{value:g}" if isinstance(value, float) else str(value) or "none" for value in values]
    short = [called(word) if "/" in word else word for word in words]
    return [plain_text(word, 28) for word in (short if len(set(short)) == len(words) else words)]
