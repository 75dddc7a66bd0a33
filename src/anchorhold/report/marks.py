"""Colours, line styles and marks, shared by the charts of pages (SVG) and the plots (matplotlib).

Pages need SVG with tips, keyboard focus and a dark mode; documents need PNG and PDF. So there are two renderers, and
both take their looks from here: series number N has colour N, line style N and mark N, each in turn.
"""

from collections.abc import Sequence

__all__ = ["DASHES", "LINE_STYLES", "MARKERS", "PALETTE", "SHAPES", "in_turn", "overlap"]

# Okabe and Ito: distinguishable with any colour vision. Pages use classes c0 … c6 of the style sheet, in this order.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

LINE_STYLES = ("-", "--", "-.", ":")  # of matplotlib
DASHES = ("", "7 4", "2 3", "9 3 2 3")  # of SVG

MARKERS = ("o", "s", "D", "^", "v", "P", "X")  # of matplotlib
SHAPES = (  # of SVG: the first four of `MARKERS` as paths
    "M-3.6 0A3.6 3.6 0 1 0 3.6 0A3.6 3.6 0 1 0-3.6 0Z",
    "M-3.4-3.4H3.4V3.4H-3.4Z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0Z",
    "M0-4.4L4.2 3.4H-4.2Z",
)


def in_turn(choices: Sequence[str], number: int) -> str:
    """Choice number `number`; after the last comes the first.

    >>> in_turn(LINE_STYLES, 5)
    '--'
    """
    return choices[number % len(choices)]


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two boxes (x0, y0, x1, y1) overlap.

    >>> overlap((0, 0, 2, 2), (1, 1, 3, 3)), overlap((0, 0, 1, 1), (1, 0, 2, 1))
    (True, False)
    """
    return bool(one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3])
