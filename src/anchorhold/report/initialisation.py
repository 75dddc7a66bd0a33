"""Runs against the ε of the weights that they start from: figure 4 of the robust-init study."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import RunError
from ..reproduce.comparison import row_of
from ..runs.fields import dig, number
from ..runs.folder import EXPORT
from .collect import Entry
from .methods import method_of
from .plots import plot_against

__all__ = ["plot_initialisation", "start_eps", "start_of"]


def start_of(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """The run in `entries` whose exported model this run started from; None if it is not there."""
    weights = dig(entry.info, "model", "weights") or {}
    source = Path(str(weights.get("source")))
    if source.name != EXPORT:
        return None
    others = [other for other in entries if other is not entry]
    found = [other for other in others if other.info.get("export", "") == weights.get("sha256")]
    # Older runs do not record their export: match by folder name.
    found = found or [other for other in others if other.path.name == source.parent.name]
    return found[0] if len(found) == 1 else None


def start_eps(entry: Entry, entries: Sequence[Entry]) -> float | None:
    """ε, in 1/255, that the initial weights of a run were trained against; 0 for plain ones, None if unknown.

    It is that of the run in `entries` that made the weights. Otherwise a published row that the run repeats says it.
    """
    if entry.setting("model.weights") == "imagenet":
        return 0.0
    start = start_of(entry, entries)
    if start is not None:
        # In L2 ε is the length of a whole change; a natural run has none.
        return None if start.setting("norm") == "l2" else 255 * (number(start.setting("eps")) or 0.0)
    row = row_of(entry)
    # Rows without an init start from plain weights, which may lie in a file.
    return None if row is None else row.published.get("init", 0.0)


def plot_initialisation(entries: Sequence[Entry], out: str | Path) -> Path:
    """Draw R@1 and ERS against the ε of the initial weights, a line for each method, from finished runs with R@1."""
    shown = []
    for entry in entries:
        eps = start_eps(entry, entries)
        if entry.last("r1") is None or eps is None:
            continue
        defence = dig(entry.info, "settings", "defence") or {}
        named = {**defence, "method": method_of(defence), "init": eps}
        shown.append(replace(entry, info={**entry.info, "settings": {**entry.info["settings"], "defence": named}}))
    if len({entry.setting("init") for entry in shown}) < 2:
        raise RunError(
            "the runs here do not start from weights of several known ε: "
            "add the folders of the runs that made the weights, and a run from imagenet"
        )
    return plot_against(shown, "init", out, series="method", label="ε of the initial weights (1/255)")
