"""matplotlib figures: create one with empty axes, and write it. matplotlib is an extra, imported when needed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AnchorholdError, check
from ..interface import option
from ..runs.writing import atomic
from .marks import LINE_STYLES, PALETTE, in_turn
from .tables import one_line, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DPI", "line_look", "new_figure", "plain_text", "save_figure", "writable"]

DPI = 160
_HIGH = 3.2  # inches, without the legend
_FORMATS = (".png", ".pdf", ".svg")


def writable(out: str | Path) -> Path:
    """Check the file name and that matplotlib is installed, before anything is read or drawn."""
    out = Path(out)
    check(out.suffix.lower() in _FORMATS, f"{option('out', str(out))}: give a file that ends in {', '.join(_FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise AnchorholdError(
            "plots need matplotlib, which is not installed: pip install 'anchorhold[plots]'"
        ) from None
    return out


def new_figure(panels: int, wide: float = 4.2, high: float = _HIGH) -> tuple["Figure", list["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Without pyplot: no global state, and no display.
    figure = Figure(figsize=(wide * panels, high), layout=ConstrainedLayoutEngine(w_pad=0.12))
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for axis in axes:
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line_look(place: int) -> dict[str, Any]:
    """Colour and line style; combinations repeat after 28 lines."""
    style = in_turn(LINE_STYLES, place)
    return {"color": in_turn(PALETTE, place), "linestyle": style, "linewidth": 1.7, "markersize": 4.5}


def plain_text(text: str, width: int = 40) -> str:
    """Text on one line, without $, which would start a formula."""
    return shortened(one_line(text), width).replace("$", r"\$")


def save_figure(
    figure: "Figure",
    axes: list["Axes"],
    names: Sequence[tuple[dict[str, Any], str]],
    out: Path,
    last: Callable[[], None] | None = None,
    about: str = "",
) -> Path:
    """Add the legend and write the figure. `last` is called after the layout; a PNG stores `about`."""
    from matplotlib.lines import Line2D

    if names:
        lines = [Line2D([], [], **look) for look, _ in names]
        labels = [plain_text(name) for _, name in names]
        room = 13 * figure.get_figwidth()  # letters
        columns = max(1, min(len(labels), int(room / (8 + max(map(len, labels))))))
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    if last is not None:
        figure.set_dpi(DPI)  # text is measured at the final resolution
        figure.draw_without_rendering()
        last()
    with atomic(out) as temporary:
        form = out.suffix[1:].lower()
        said = {"Description": about} if about and form == "png" else None
        figure.savefig(temporary, dpi=DPI, format=form, metadata=said)
    return out
