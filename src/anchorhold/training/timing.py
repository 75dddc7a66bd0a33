"""Elapsed and remaining time of a run."""

import time

from ..console import Report, duration

__all__ = ["Clock", "Estimate"]

WINDOW = 20  # steps that an estimate skips first, and then measures


class Clock:
    """Counts the seconds of a run over all its sessions, and the seconds since its last checkpoint."""

    def __init__(self, before: float = 0.0) -> None:
        self._before = before  # seconds of earlier sessions
        self._begun = self._saved = time.monotonic()

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._begun

    def since_checkpoint(self) -> float:
        return time.monotonic() - self._saved

    def saved(self) -> None:
        """Call it after each checkpoint."""
        self._saved = time.monotonic()


class Estimate:
    """Reports once how long the remaining steps will take; a compiled run also reports its first step.

    The first steps are left out of the estimate, because compilation and capture happen only once.
    """

    def __init__(self, report: Report, first: int, total: int, compiled: bool) -> None:
        self._report, self._first, self._total, self._compiled = report, first, total, compiled
        self._begun = self._warm = time.monotonic()

    def update(self, step: int) -> None:
        """Call it after each step; `step` counts from the beginning of the run."""
        done = step - self._first
        if self._compiled and done == 1:
            self._report.say(f"the first step took {duration(time.monotonic() - self._begun)}, including compilation")
        if done == WINDOW:
            self._warm = time.monotonic()
        if done == 2 * WINDOW:
            left = self._total - step
            seconds = left * (time.monotonic() - self._warm) / WINDOW
            self._report.say(f"about {duration(seconds)} for {left:,} steps, evaluations not included")
