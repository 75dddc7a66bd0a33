"""The columns of the papers' tables: their names, their groups, and the units in which they are shown."""

from fractions import Fraction
from math import isfinite

__all__ = [
    "ARS_COLUMNS",
    "ERS_COLUMNS",
    "NOT_PERCENT",
    "PRINTED_INITIAL",
    "RANKING",
    "RECALL",
    "SHARES",
    "as_text",
    "goal_of",
    "in_units",
    "length",
    "pixel_fraction",
    "radius",
    "rises",
]

RANKING = ("CA+", "CA-", "QA+", "QA-")
RECALL = ("ES:R", "LTM", "GTM", "GTT")
ARS_COLUMNS = (*RANKING, *RECALL)
ERS_COLUMNS = (*RANKING, "TMA", "ES:D", *RECALL)
PRINTED_INITIAL = {"CA+": 50.0, "CA-": 1.0, "QA+": 50.0, "QA-": 1.0}
"""The ranks before an attack, in percent, behind the baseline rows of Tian et al. 2024; it does not state them."""

NOT_PERCENT = ("TMA", "ES:D")
# Each query counts or does not.
SHARES = (*RECALL, "GTT@1", "margin", "nearest", "untargeted", "targeted", "R@1", "R@2")

_GOALS: dict[str, float | None] = {"CA-": 100.0, "QA-": 100.0, "SPQA-": 100.0, "TMA": 1.0, "ES:D": 2.0}
_GOALS |= {"SPQA+:kept": None, "SPQA-:kept": None}  # the attacker wants no change of these


def goal_of(name: str) -> float | None:
    """The value of a measure that the attacker wants, in the units of the tables; None where it is to stay as it was.

    Every measure has it from here, 0 unless it is named.

    >>> goal_of("CA+"), goal_of("CA-"), goal_of("TMA"), goal_of("SPQA-:kept")
    (0.0, 100.0, 1.0, None)
    """
    return _GOALS.get(name, 0.0)


def rises(name: str) -> bool:
    """Whether the attacker raises a measure.

    >>> rises("ES:D"), rises("ES:R")
    (True, False)
    """
    return bool(goal_of(name))


def in_units(name: str) -> float:
    """The factor from a measure to its value in a table."""
    return 1.0 if name in NOT_PERCENT else 100.0


def as_text(value: float | None, name: str) -> str:
    """A value of a column as the tables show it; a dash where there is none.

    >>> as_text(12.34, "CA+"), as_text(0.5, "TMA"), as_text(None, "CA+"), as_text(float("nan"), "mAP")
    ('12.3', '0.500', '–', '–')
    """
    return "–" if value is None or not isfinite(value) else f"{value:.{3 if name in NOT_PERCENT else 1}f}"


def pixel_fraction(pixels: float) -> str:
    """A change of a pixel as N/255 where N is a whole number, else as a decimal.

    >>> pixel_fraction(8 / 255), pixel_fraction(0.5)
    ('8/255', '0.5')
    """
    steps = Fraction(pixels * 255).limit_denominator(4)
    return f"{steps}/255" if steps.denominator == 1 and abs(float(steps) - pixels * 255) < 1e-9 else f"{pixels:g}"


def length(size: float, norm: str = "linf") -> str:
    """ε or a step: in 255ths of a pixel for Linf, as a decimal for L2.

    >>> length(51 / 255), length(51 / 255, "l2")
    ('51/255', '0.2')
    """
    return pixel_fraction(size) if norm == "linf" else f"{size:g}"


def radius(eps: float, norm: str = "linf") -> str:
    """ε in words: a pixel's for Linf, the whole image's for L2.

    >>> radius(8 / 255), radius(0.5, "l2")
    ('ε 8/255', 'L2 ε 0.5')
    """
    return ("ε " if norm == "linf" else "L2 ε ") + length(eps, norm)
