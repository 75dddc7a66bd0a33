"""Reading JSON that may be damaged, with fields that may be missing or have the wrong type.

A record may have been cut off, edited, or written by someone else. Readers ask for each field with its type, and get
a one-line error if it does not fit.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import RunError
from .files import regular

__all__ = ["dig", "field", "number", "parsed", "table"]

T = TypeVar("T")

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


def parsed(text: str | bytes) -> Any:
    """Parse untrusted JSON; every defect is a ValueError.

    >>> parsed('{"dim": 8}')
    {'dim': 8}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def table(path: Path, todo: str) -> dict[str, Any]:
    """The JSON object in a file; `todo` ends the error message if it cannot be read."""
    try:
        found = parsed(regular(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path} ({error}); {todo}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} does not hold a JSON object; {todo}")
    return found


def field(record: Any, place: str, kind: type[T], where: object, todo: str) -> T:
    """The value at a dotted place of a record, checked for its type. A bool is not a number; an int passes as a float.

    >>> field({"made_with": {"crop": 8}}, "made_with.crop", int, "index.json", "make it again")
    8
    """
    value = record
    for key in place.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise RunError(f"{where} has no {place}; {todo}")
        value = value[key]
    found: Any = number(value) if kind in (int, float) else value
    if kind is float and found is not None:
        found = float(found)
    if not isinstance(found, kind):
        given = "null" if value is None else f"{value!r:.60}"
        raise RunError(f"{place} of {where} is {given}, not {_WORDS.get(kind, kind.__name__)}; {todo}")
    return found


def dig(tree: Any, *keys: str) -> Any:
    """The value at the end of these keys; None if one is missing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def number(value: Any) -> float | None:
    """`value` if it is a finite number that fits a float, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number with hundreds of digits
        return None
