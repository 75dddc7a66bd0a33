"""The interface in use, the command line or Python, so that a message names what you can change there."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["argument", "command_line", "option", "setting", "worded"]

_commands = False  # one value for the process, because worker threads and forked workers write messages too


@contextmanager
def command_line() -> Iterator[None]:
    """While it is open, messages name options of the command line; otherwise arguments of Python."""
    global _commands
    before, _commands = _commands, True
    try:
        yield
    finally:
        _commands = before


def worded(command: str, python: str) -> str:
    """The first text on the command line, the second in Python; for advice that differs in more than a name."""
    return command if _commands else python


def argument(name: str, command: str = "") -> str:
    """An argument as the subject of a sentence: `--batch` or `batch`. Give `command` where the option differs.

    >>> argument("batch")
    'batch'
    """
    return worded(_dashed(command or name), name)


def option(name: str, value: object = None, command: str = "") -> str:
    """An argument as you would write it: `--weights` or `weights=`, with a value where one is given.

    Text in capitals stands for a value of the user's, and gets no quotes.

    >>> option("weights"), option("weights", "FILE"), option("on_bad_image", "skip"), option("limit", 50)
    ('weights=', 'weights=FILE', 'on_bad_image="skip"', 'limit=50')
    >>> with command_line():
    ...     option("weights"), option("on_bad_image", "skip"), option("label", command="class")
    ('--weights', '--on-bad-image skip', '--class')
    """
    dashed = _dashed(command or name)
    if value is None:
        return worded(dashed, f"{name}=")
    return worded(f"{dashed} {value}", f"{name}={_quoted(value)}")


def setting(key: str, value: object) -> str:
    """A setting as you would write it.

    >>> setting("train.epochs", 3)
    'overrides={"train.epochs": 3}'
    >>> with command_line():
    ...     setting("train.epochs", 3)
    '--set train.epochs=3'
    """
    return worded(f"--set {key}={value}", f'overrides={{"{key}": {_quoted(value)}}}')


def _dashed(name: str) -> str:
    return f"{'-' if len(name) == 1 else '--'}{name.replace('_', '-')}"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and not value.isupper() else str(value)
