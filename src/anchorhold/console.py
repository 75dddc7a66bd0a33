"""Progress of long work: a bar on a terminal or in a notebook, plain lines elsewhere."""

import builtins
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

__all__ = ["Console", "Patient", "Report", "Silent", "Visible", "duration", "in_notebook", "shown", "visible"]

Advance = Callable[[int, str], None]


class Report(Protocol):
    """Receives messages and progress of long work."""

    def say(self, text: str) -> None:
        """Show one line."""

    def task(self, name: str, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        """Yield a function to call with the amount done so far and a short note; `done` is the amount at the start."""


class Silent:
    """Shows nothing: the default in Python."""

    def say(self, text: str) -> None:
        return

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        def advance(done: int, note: str = "") -> None:
            return

        yield advance


def visible(text: str) -> str:
    """The text with control characters escaped, except newlines and tabs: file names may contain any character.

    >>> print(visible("a\\x1b[2Jb é\\nc"))
    a\\x1b[2Jb é
    c
    """
    return text if text.isprintable() else "".join(c if c in "\n\t" else shown(c) for c in text)


def shown(name: str) -> str:
    """The text on one line, with all control characters escaped; for names and error messages.

    >>> print(shown("a\\nb é"))
    a\\nb é
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


class Visible:
    """A stream that escapes control characters in everything written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Patient:
    """A stream that ignores a closed pipe, as after `| head`, so that the work still finishes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            # The rest of the buffer must go somewhere, or Python reports an error at exit.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process; a terminal with IPython is a terminal."""
    shell = getattr(builtins, "get_ipython", None)  # IPython puts it there
    kind = type(shell()) if callable(shell) else type(None)
    return kind.__name__ == "ZMQInteractiveShell" or "google.colab" in kind.__module__


def _has_widgets() -> bool:
    """Whether a notebook can draw a bar: rich needs ipywidgets for it."""
    try:
        return all(name in sys.modules or find_spec(name) is not None for name in ("IPython", "ipywidgets"))
    except ValueError:  # a module without a spec
        return False


class Console:
    """Shows messages and progress: `ah.fit(…, report=ah.Console())`, and the same for `resume` and `audit`.

    On a terminal and in Jupyter it draws a bar with rate and time left. Elsewhere it prints plain lines, and so it does
    in Jupyter without ipywidgets. Everything goes to standard error, so that results can be piped; in a notebook it
    goes below the cell. It takes no arguments.

    >>> with Console().task("reading", total=10) as advance:
    ...     advance(4, "four of ten")
    """

    EVERY = 10.0  # seconds between plain lines

    def say(self, text: str) -> None:
        """Show one line.

        Args:
            text: the line; control characters in it are escaped.
        """
        first, second = (sys.stdout, sys.stderr) if in_notebook() else (sys.stderr, sys.stdout)
        stream = first or second  # None if it is closed, e.g. by 2>&-
        if stream is not None:
            Patient(stream).write(f"{visible(text)}\n")

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        """A bar where one can be drawn, else lines.

        Args:
            name: what is being done, such as "training".
            total: how much there is to do.
            done: how much was done before.

        Returns:
            A context that gives a function: call it with the amount done so far and a short note.
        """
        notebook = in_notebook()
        drawn = _has_widgets() if notebook else sys.stderr is not None and sys.stderr.isatty()
        if drawn:
            with self._bar(name, total, done, notebook) as advance:
                yield advance
        else:
            yield self._lines(name, total, done)

    @contextmanager
    def _bar(self, name: str, total: int, first: int, notebook: bool) -> Iterator[Advance]:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        where = Terminal(force_jupyter=True) if notebook else Terminal(stderr=True)
        with Progress(*columns, console=where) as progress:
            task = progress.add_task(name, total=total, completed=first, rate="", note="")
            begun = time.monotonic()

            def advance(done: int, note: str = "") -> None:
                rate = (done - first) / max(time.monotonic() - begun, 1e-9)
                progress.update(task, completed=done, rate=f"{rate:.1f}/s" if rate else "", note=visible(note))

            try:
                yield advance
            finally:
                if notebook:  # there rich leaves the last state undrawn
                    progress.refresh()

    def _lines(self, name: str, total: int, first: int) -> Advance:
        begun = printed = time.monotonic()

        def advance(done: int, note: str = "") -> None:
            nonlocal printed
            now = time.monotonic()
            if done < total and now - printed < self.EVERY:
                return
            printed = now
            rate = (done - first) / max(now - begun, 1e-9)
            left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
            self.say(f"{name}: {done:,} of {total:,}, {rate:,.1f}/s{left}{', ' + note if note else ''}")

        return advance


def duration(seconds: float) -> str:
    """A duration as text.

    >>> duration(75), duration(8), duration(7300)
    ('1 min 15 s', '8 s', '2 h 1 min')
    """
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
