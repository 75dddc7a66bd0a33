"""The columns of the papers' tables: their names, their groups, and the units in which they are shown."""

from fractions import Fraction

__all__ = [
    "ARS_COLUMNS",
    "ERS_COLUMNS",
    "NOT_PERCENT",
    "PRINTED_INITIAL",
    "RANKING",
    "RECALL",
    "SHARES",
    "in_units",
    "pixel_fraction",
    "radius",
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


def in_units(name: str) -> float:
    """The factor from a measure to its value in a table."""
    return 1.0 if name in NOT_PERCENT else 100.0


def pixel_fraction(pixels: float) -> str:
    """A change of a pixel as N/255 where N is a whole number, else as a decimal.

    >>> pixel_fraction(8 / 255), pixel_fraction(0.5)
    ('8/255', '0.5')
    """
    steps = Fraction(pixels * 255).limit_denominator(4)
    return f"{steps}/255" if steps.denominator == 1 and abs(float(steps) - pixels * 255) < 1e-9 else f"{pixels:g}"


def radius(eps: float, norm: str = "linf") -> str:
    """ε in words: a pixel's for Linf, the whole image's for L2.

    >>> radius(8 / 255), radius(0.5, "l2")
    ('ε 8/255', 'L2 ε 0.5')
    """
    return f"ε {pixel_fraction(eps)}" if norm == "linf" else f"L2 ε {eps:g}"
