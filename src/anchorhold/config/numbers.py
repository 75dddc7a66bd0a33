"""Numbers written as decimals or fractions."""

import re
from fractions import Fraction

__all__ = ["parse_number"]


def parse_number(text: str) -> Fraction:
    """A number from text such as 0.5, 8/255, 0.5/255 or 1e-3; a ValueError if it is not a number.

    >>> float(parse_number("8 / 255")) == 8 / 255
    True
    >>> float(parse_number("0.5/255")) == 0.5 / 255
    True
    """
    text = text.replace(" ", "")
    # Fraction would compute the power of 10 exactly, whatever the exponent.
    if len(text) > 400 or re.search(r"e[+-]?_?\d[\d_]{3,}", text, re.IGNORECASE):
        raise ValueError("the number has too many digits")
    above, slash, below = text.partition("/")
    if "/" in below:
        raise ValueError("a fraction has one slash")
    return Fraction(above) / Fraction(below) if slash else Fraction(above)
