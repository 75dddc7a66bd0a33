"""The interface in use, the command line or Python, so that a message names what you can change there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from shlex import quote

__all__ = [
    "Placeholder",
    "argument",
    "command_line",
    "option",
    "recorded",
    "recording",
    "replacing",
    "resuming",
    "rooted",
    "setting",
    "worded",
]

_recorded: dict[str, str] = {}
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


@contextmanager
def recording(words: Mapping[str, object]) -> Iterator[None]:
    """While it is open, an audit records what you typed, by option, so that its page can repeat the command.

    >>> with recording({"model": "models:mine", "size": "64", "mean": "", "root": None}):
    ...     recorded()
    {'model': 'models:mine', 'size': '64'}
    """
    global _recorded
    before, _recorded = _recorded, {name: str(word) for name, word in words.items() if word not in (None, "", 0)}
    try:
        yield
    finally:
        _recorded = before


def recorded() -> dict[str, str]:
    """What you typed, by option; empty in Python."""
    return dict(_recorded)


def worded(command: str, python: str) -> str:
    """The first text on the command line, the second in Python; for advice that differs in more than a name."""
    return command if _commands else python


def argument(name: str, command: str = "") -> str:
    """An argument as the subject of a sentence: `--batch` or `batch`. Give `command` where the option differs.

    >>> argument("batch")
    'batch'
    """
    return worded(_dashed(command or name), name)


class Placeholder(str):
    """Text that stands for a value of yours, such as FILE; it gets no quotes."""

    __slots__ = ()


def option(name: str, value: object = None, command: str = "") -> str:
    """An argument as you would write it: `--weights` or `weights=`, with a value where one is given.

    >>> option("weights"), option("weights", Placeholder("FILE")), option("out", "my runs"), option("limit", 50)
    ('weights=', 'weights=FILE', "out='my runs'", 'limit=50')
    >>> with command_line():
    ...     option("weights"), option("out", "my runs"), option("label", command="class")
    ('--weights', "--out 'my runs'", '--class')
    """
    dashed = _dashed(command or name)
    if value is None:
        return worded(dashed, f"{name}=")
    return worded(f"{dashed} {_in_shell(value)}", f"{name}={_in_python(value)}")


def setting(key: str, value: object) -> str:
    """A setting as you would write it.

    >>> setting("train.epochs", 3)
    "overrides={'train.epochs': 3}"
    >>> with command_line():
    ...     setting("train.epochs", 3)
    '--set train.epochs=3'
    """
    written = f"{key}={value}"
    shell = written if isinstance(value, Placeholder) else quote(written)
    return worded(f"--set {shell}", f"overrides={{{key!r}: {_in_python(value)}}}")


def resuming(run: object) -> str:
    """What resumes a run, as you would write it.

    >>> resuming("runs/hm")
    "ah.resume('runs/hm')"
    >>> with command_line():
    ...     resuming("my runs/hm")
    "anchorhold resume 'my runs/hm'"
    """
    return worded(f"anchorhold resume {quote(str(run))}", f"ah.resume({str(run)!r})")


def rooted(data: str) -> str:
    """How a data set by name gets its folder; in Python only `ah.dataset` takes it.

    >>> rooted("cub")
    "ah.dataset('cub', root=…)"
    """
    return worded("--root", f"ah.dataset({data!r}, root=…)")


def replacing() -> str:
    """What replaces an audit that exists, as you would write it.

    >>> replacing()
    'replace=True'
    """
    return worded("--replace", "replace=True")


def _dashed(name: str) -> str:
    return f"{'-' if len(name) == 1 else '--'}{name.replace('_', '-')}"


def _in_shell(value: object) -> str:
    return str(value) if isinstance(value, Placeholder) else quote(str(value))


def _in_python(value: object) -> str:
    return str(value) if isinstance(value, Placeholder) else repr(value)
