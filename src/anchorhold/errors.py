"""Errors that the user can act on.

Every error that a user can cause or fix is an `AnchorholdError`. Its message is one line that says what is
wrong and what to do; the command line prints that line and exits with 2.
"""

import difflib
import errno
import math
import os
from collections.abc import Iterable

__all__ = [
    "AnchorholdError",
    "DataError",
    "Interrupted",
    "ModelError",
    "RunError",
    "SettingsError",
    "brief",
    "check",
    "check_least",
    "check_most",
    "from_environment",
    "lacks_memory",
    "nearest",
]


class AnchorholdError(Exception):
    """An error that the user can fix; the message says what is wrong and what to do.

    >>> import anchorhold as ah
    >>> try:
    ...     ah.Threat(eps=8)
    ... except ah.AnchorholdError as error:
    ...     print(error)
    ε = 8 is more than a pixel can change, from 0 to 1; for 8-bit levels give 8/255
    """


class SettingsError(AnchorholdError):
    """An invalid recipe, key or value."""


class DataError(AnchorholdError):
    """Images or labels that are missing, unreadable or unusable."""


class ModelError(AnchorholdError):
    """A backbone or a weights file that cannot be used."""


class RunError(AnchorholdError):
    """A run folder that cannot be written or resumed, or a training that had to stop."""


class Interrupted(AnchorholdError):
    """The user stopped the work; it was saved, and the message says how to resume."""


# Torch's messages for a full memory; torch.OutOfMemoryError is a RuntimeError too.
_FULL = ("out of memory", "can't allocate memory", "not enough memory")


def lacks_memory(error: BaseException) -> bool:
    """Whether the host or a GPU ran out of memory; then neither a file nor a model is the cause.

    >>> lacks_memory(MemoryError()), lacks_memory(ValueError("out of range"))
    (True, False)
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in _FULL)
    return isinstance(error, MemoryError)


def from_environment(name: str, otherwise: int, least: int) -> int:
    """A whole number from an environment variable that torchrun sets."""
    text = os.environ.get(name, str(otherwise))
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise RunError(f"{name} is {text[:40]!r}, not a whole number from {least}: start with torchrun, or unset it")
    return int(text)


def check(condition: bool, message: str) -> None:
    """Raise a SettingsError with this message unless the condition holds."""
    if not condition:
        raise SettingsError(message)


def check_least(section: str, settings: object, **least: int) -> None:
    """Refuse values that are not finite or below their minimum."""
    for name, low in least.items():
        value = getattr(settings, name)
        check(math.isfinite(value), f"{section}.{name} must be finite, got {value}")
        check(value >= low, f"{section}.{name} must be at least {low}, got {value}")


def check_most(section: str, settings: object, **most: int) -> None:
    """Refuse values above their maximum, which no machine could handle, before any work starts."""
    for name, high in most.items():
        value = getattr(settings, name)
        check(value <= high, f"{section}.{name} must be at most {high:,}, got {value:g}")


def brief(value: object) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**60 else "a number of many digits"
    return text if len(text) <= 80 else f"{text[:77]}…"


def nearest(word: str, words: Iterable[str], otherwise: str = "", like: float = 0.5) -> str:
    """The end of an error message: the closest of `words`, if it is at least so much like it, or all of them.

    >>> nearest("softhrad", ["random", "softhard"])
    'did you mean softhard?'
    """
    words, word = sorted(words), word[:200]  # the search is slow on long words
    close = difflib.get_close_matches(word, words, n=1, cutoff=like)
    return f"did you mean {close[0]}?" if close else otherwise or "choose from: " + ", ".join(words)
