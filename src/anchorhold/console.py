"""How long work shows itself: a bar where there is a terminal, plain lines where there is none."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TextIO

__all__ = ["Console", "Patient", "Report", "Silent", "duration"]

Advance = Callable[[int, str], None]


class Report(Protocol):
    """What long work tells the outside."""

    def say(self, text: str) -> None:
        """One line of news."""

    def task(self, name: str, total: int, done: int = 0) -> AbstractContextManager[Advance]:
        """A function to call with how much is done and a short note; `done` was done before it began."""


class Silent:
    """Tells nothing: the default in Python."""

    def say(self, text: str) -> None:
        return

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        def advance(done: int, note: str = "") -> None:
            return

        yield advance


class Patient:
    """A stream that drops what nobody reads any more, as behind `| head`: the work goes on to its end."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            # What is left in the buffer has to go somewhere, or Python would complain of it at its exit.
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Console:
    """Tells everything, on standard error so that results can be piped."""

    EVERY = 10.0  # seconds between plain lines

    def say(self, text: str) -> None:
        stream = sys.stderr or sys.stdout  # either is None where it is closed, as by 2>&-
        if stream is not None:
            Patient(stream).write(f"{text}\n")

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        if sys.stderr is not None and sys.stderr.isatty():
            with self._bar(name, total, done) as advance:
                yield advance
        else:
            yield self._lines(name, total, done)

    @contextmanager
    def _bar(self, name: str, total: int, first: int) -> Iterator[Advance]:
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
        with Progress(*columns, console=Terminal(stderr=True)) as progress:
            task = progress.add_task(name, total=total, rate="", note="")
            begun = time.monotonic()

            def advance(done: int, note: str = "") -> None:
                rate = (done - first) / max(time.monotonic() - begun, 1e-9)
                progress.update(task, completed=done, rate=f"{rate:.1f}/s" if rate else "", note=note)

            yield advance

    def _lines(self, name: str, total: int, first: int) -> Advance:
        begun = told = time.monotonic()

        def advance(done: int, note: str = "") -> None:
            nonlocal told
            now = time.monotonic()
            if done < total and now - told < self.EVERY:
                return
            told = now
            rate = (done - first) / max(now - begun, 1e-9)
            left = f", {duration((total - done) / rate)} left" if rate and done < total else ""
            self.say(f"{name}: {done:,} of {total:,}, {rate:,.1f}/s{left}{', ' + note if note else ''}")

        return advance


def duration(seconds: float) -> str:
    """Time in words.

    >>> duration(75), duration(8), duration(7300)
    ('1 min 15 s', '8 s', '2 h 1 min')
    """
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
