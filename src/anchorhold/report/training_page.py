"""The page of a training: its curves, and signs of collapse. The run may still be in progress."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from ..runs.fields import dig, number
from ..runs.health import LOST
from .charts import Axis, Mark, Point, Series, chart, key
from .collect import Entry, flat_since, read_run
from .matrix import leaves
from .methods import method_of
from .page import fixed, place, write_page
from .shifts import DERIVED

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["PANELS", "Panel", "write_training_page"]


@dataclass(frozen=True)
class Panel:
    """A chart: columns of metrics.jsonl with their names, an explanation, and values that the axis must include."""

    title: str
    columns: dict[str, str]
    says: str
    shows: tuple[float, ...] = (0.0,)


PANELS = (
    Panel("Loss", {"loss": "training loss"}, "A triplet loss that stays at its margin γ means equal distances."),
    Panel(
        "R@1",
        {"r1": "clean", "r1_attacked": "under attack"},
        "Share of test queries whose nearest image has their class, percent.",
        (0.0, 100.0),
    ),
    Panel(
        "Collapseness C",
        {"collapseness": "C"},
        "Weighted distance to positives minus that to negatives (Tian et al. 2024, eq. 5); 0 means collapse.",
    ),
    Panel(
        "Separability",
        {"separability": "separability"},
        "(mean d(a, n) − mean d(a, p)) / d̄ on clean random triplets (Tian et al. 2024, 4.4); near 0 means collapse.",
    ),
    Panel(
        "Mean distance d̄", {"mean_distance": "d̄"}, "Over all pairs of a clean batch; near 0 all embeddings are equal."
    ),
    Panel(
        "Embedding shift",
        {
            "shift_perturbed": "mean shift / d̄ of perturbed triplets",
            "shift_overall_perturbed": "overall shift / d̄ of perturbed triplets",
            "shift_all": "mean shift / d̄ of all triplets",
        },
        "How far the inner attack moves an embedding. Figure 5 of CA-TRIDE shows perturbed triplets; the mean over all "
        "triplets includes clean ones.",
    ),
    Panel(
        "Active share",
        {"active_first": "first step", "active_last": "last step"},
        "Triplets still below their destination hardness, before the first and the last step of the ascent.",
        (0.0, 1.0),
    ),
    Panel(
        "Hardness H",
        {"hardness_before": "clean", "hardness_after": "perturbed"},
        "d(a, p) − d(a, n), mean over the training triplets (Zhou & Patel 2022, eq. 2).",
    ),
    Panel(
        "Held-out accuracy",
        {"accuracy": "clean", "accuracy_attacked": "under attack"},
        "For pretraining by classification, percent.",
        (0.0, 100.0),
    ),
    Panel("Divergence", {"kl": "clean", "kl_attacked": "under attack"}, "From the first network's answers."),
    Panel("Feature drift", {"drift": "clean", "drift_attacked": "under attack"}, "For pretraining by distillation."),
    Panel(
        "R@1 of the features",
        {"features_r1": "clean", "features_r1_attacked": "under attack"},
        "R@1 of the pooled features, without a head, percent: in a pretraining, or for class proxies that begin with "
        "weights.",
        (0.0, 100.0),
    ),
)

# Explanations for pretraining, which has no triplets.
PRETRAINING = {
    "Loss": "On perturbed images: cross-entropy, the squared drift of features, or a divergence of answers.",
    "Active share": "Images that the inner attack still moves, before its first and its last step.",
}


def write_training_page(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of the run in `folder`, by default as training.html in it; returns its path."""
    folder = Path(folder)
    run = read_run(folder)
    info = run.info
    bands, since = flat_since(run)
    data = dig(info, "data", "name")
    return write_page(
        "training.html",
        folder / "training.html" if out is None else Path(out),
        title=f"{folder.resolve().name}: training",
        name_of=folder.resolve().name,
        status=run.status,
        going=info.get("status") == "training",
        verdict=_verdict(run, since),
        tiles=_tiles(run),
        about={
            "Method": method_of(info["settings"]["defence"]),
            "Recipe": str(info.get("recipe") or dig(info, "settings", "recipe") or "–"),
            "Published row": str(info.get("row") or "–"),
            "Data": "–" if data is None else str(data),
            "Model": str(dig(info, "model", "config", "backbone") or "–"),
        },
        charts=_charts(run, bands),
        columns=_columns(run.rows),
        rows=run.rows,
        shown=lambda row, column: _number(row.get(column)),
        settings={key: str(value) for key, value in leaves(info["settings"])},
        versions=", ".join(f"{name} {version}" for name, version in (info.get("versions") or {}).items()),
        commit=info.get("commit") or "unknown",
        device=info.get("device") or "unknown",
        commands={"To make this page again": f"anchorhold report {quote(place(folder))}"},
    )


def _verdict(run: Entry, since: int | None) -> dict[str, str]:
    if not run.rows:
        return {"level": "fair", "title": "No epoch has finished yet", "text": "Write the page again later."}
    reason = str(run.info.get("reason") or "")
    if run.collapsed:
        when = "" if since is None else f"First signs in epoch {since}. "
        return {"level": "bad", "title": "The model has collapsed", "text": f"{when}{reason}"}
    if run.last("separability") is None:
        found = [value for row in run.rows if (value := number(row.get("features_r1"))) is not None]
        before = number(dig(run.info, "start", "features_r1"))
        if run.lost_features:
            return _without_features(run)
        text = "The head is not trained, so collapse is not checked."
        if before is not None and found:
            text += f" R@1 of the features: {before:.1f} before training, {found[-1]:.1f} at the last evaluation."
        elif len(found) > 1:
            text += f" R@1 of the features: {found[0]:.1f} at the first evaluation, {found[-1]:.1f} at the last."
        return {"level": "good", "title": "Backbone ready", "text": text}
    if run.lost_features:
        return _without_features(run)
    if since is not None:
        return {"level": "fair", "title": "Signs of collapse", "text": f"First in epoch {since}; shaded in the charts."}
    return {"level": "good", "title": "No sign of collapse", "text": "Separability and mean distance stay high."}


def _without_features(run: Entry) -> dict[str, str]:
    return {"level": "bad", "title": "The backbone has lost its features", "text": f"{run.lost_features}."}


def _tiles(run: Entry) -> list[tuple[str, str]]:
    planned, seconds = number(run.setting("train.epochs")), number(run.info.get("seconds")) or run.last("seconds")
    epochs = f"{run.epoch or 0}" + (f" of {planned:.0f}" if planned is not None else "")
    found = ("R@1 (%)", run.last("r1"))
    if found[1] is None and run.last("features_r1") is not None:  # a pretraining
        found = ("R@1 of features (%)", run.last("features_r1"))
    tiles = [("Epochs", epochs), (found[0], fixed(found[1])), ("Loss", fixed(run.last("loss"), 4))]
    if run.last("separability") is not None:
        tiles.append(("Separability", fixed(run.last("separability"), 3)))
    return [*tiles, ("Seconds", fixed(seconds, 0))]


def _charts(run: Entry, bands: Sequence[tuple[float, float]]) -> "list[tuple[Panel, Markup, Markup | str]]":
    made = []
    for panel in PANELS:
        if run.last("separability") is None and run.rows:
            panel = replace(panel, says=PRETRAINING.get(panel.title, panel.says))
        if run.derived.intersection(panel.columns):
            panel = replace(panel, says=f"{panel.says} Perturbed triplets: {DERIVED}.")
        series = [
            Series(name, _points(run.rows, column, name), look)
            for look, (column, name) in enumerate(panel.columns.items())
        ]
        series = [each for each in series if each.points]
        if not series:
            continue
        marks = _marks(run, panel)
        shows = (*panel.shows, *(mark.y for mark in marks))
        last = "; ".join(f"{each.name} ends at {each.points[-1].y:.4g}" for each in series)
        epochs = Axis("epoch", (0.0, float(run.epoch or 1)), whole=True)
        made.append(
            (
                panel,
                chart(series, epochs, Axis("", shows), f"{panel.title} by epoch: {last}", marks, bands),
                key(series) if len(series) > 1 else "",
            )
        )
    return made


def _points(rows: Sequence[Mapping[str, Any]], column: str, name: str) -> list[Point]:
    known = ((number(row.get("epoch")), number(row.get(column))) for row in rows)
    return [Point(e, v, f"epoch {e:.0f}: {name} {v:.4g}") for e, v in known if e is not None and v is not None]


def _marks(run: Entry, panel: Panel) -> list[Mark]:
    """The limits below which training reports a collapse, or lost features."""
    if "loss" in panel.columns:
        margin = number(run.setting("margin"))
        return [] if not margin else [Mark(margin, f"γ = {margin:g}")]
    if "separability" in panel.columns:
        least = number(run.setting("train.collapse_separability"))
        return [] if not least else [Mark(least, f"collapse below {least:g}")]
    if "mean_distance" in panel.columns:
        least = number(run.setting("train.collapse_distance"))
        return [] if not least else [Mark(least, f"collapse below {least:g}")]
    if "features_r1" in panel.columns:
        before = number(dig(run.info, "start", "features_r1"))
        return [] if before is None else [Mark(LOST * before, f"lost below {LOST * before:.1f}")]
    attention = number(dig(run.info, "attention"))  # older runs do not say
    said = "" if attention is None else f" (λ = {attention:g})"
    return [Mark(0.0, f"collapse at 0{said}")] if "collapseness" in panel.columns else []


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if number(value) is not None)
    return ["epoch", *(name for name in names if name not in ("epoch", "step"))] if names else []


def _number(value: Any) -> str:
    known = number(value)
    return "–" if known is None else f"{known:.4g}" if abs(known) < 1e4 else f"{known:,.0f}"
