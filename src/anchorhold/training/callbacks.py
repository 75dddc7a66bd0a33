"""Callbacks: what is told about a run while it trains, for trackers and for code of yours.

    class Mine:
        def on_epoch(self, row): ...  # the row of metrics.jsonl, after it is written
        def on_end(self, run): ...  # the run folder; run.read_json()["status"] says how it ended

    ah.fit(model, data, callbacks=[Mine(), "tensorboard"])

The first rank calls them, in order. One that raises is named in a warning and not called again; training continues.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from ..console import Report, Silent
from ..distributed import Ranks, started
from ..errors import SettingsError, nearest
from ..extensions import USER, imported, kind_of, names_code, reason_of
from ..runs.folder import Run, without_nan

__all__ = ["TRACKERS", "Callback", "Callbacks", "callbacks_of"]


@runtime_checkable
class Callback(Protocol):
    """What `callbacks` of `fit` and `resume` take: an object with these two methods.

    It may also have `on_start(run)`, which is called before the first step. `run.metrics()` then holds the rows of
    epochs that are kept from before, where a run is resumed; later rows come again.

    >>> class Best:
    ...     r1 = 0.0
    ...
    ...     def on_epoch(self, row):
    ...         self.r1 = max(self.r1, row.get("r1", 0.0))
    ...
    ...     def on_end(self, run):
    ...         print(f"{run.path}: {self.r1:.1f}")
    >>> isinstance(Best(), Callback)
    True
    """

    def on_epoch(self, row: Mapping[str, Any], /) -> None:
        """Called after each epoch.

        Args:
            row: its row of metrics.jsonl: step, epoch, loss, and r1 … where the epoch was evaluated.
        """

    def on_end(self, run: Run, /) -> None:
        """Called once when training ends: done, stopped or interrupted.

        Args:
            run: the run folder; `run.read_json()["status"]` says how it ended.
        """


def _tensorboard() -> Callback:
    from .tensorboard import TensorBoard

    return TensorBoard()


TRACKERS = {"tensorboard": _tensorboard}
"""Trackers by the name that --track takes."""


def callbacks_of(given: Sequence[Any]) -> list[Callback]:
    """Callbacks from objects, names of trackers and `module:thing`; a class or a function is called first."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SettingsError(f"callbacks is a list, such as [MyCallback()], not {kind_of(given)}")
    if not Ranks(*started()).first:  # making one may begin something, such as a session with a server
        return []
    return [_callback(each) for each in given]


def _callback(given: Any) -> Callback:
    name = given if isinstance(given, str) else ""
    if name in TRACKERS:
        return TRACKERS[name]()
    if name and not names_code(name):
        raise SettingsError(f"no tracker {name!r}; {nearest(name, TRACKERS)}, or module:thing of yours")
    thing = imported(name, USER) if name else given
    if inspect.isclass(thing) or (name and inspect.isroutine(thing)):
        try:
            thing = thing()
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise SettingsError(f"{name or thing.__name__}() fails ({reason_of(error)}); give an object") from error
    if not all(callable(getattr(thing, method, None)) for method in ("on_epoch", "on_end")):
        raise SettingsError(
            f"{name or 'a callback'} is {kind_of(thing)}: it needs the methods on_epoch(row) and on_end(run)"
        )
    found: Callback = thing
    return found


class Callbacks:
    """The callbacks of a run. None of them can end it."""

    def __init__(self, given: Sequence[Callback], run: Run, report: Report) -> None:
        self.run, self.report = run, report
        self.active = list(given) if run.writes else []  # the first rank calls them

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around a training: its start, and its end however it ends."""
        self._call("on_start", self.run)
        try:
            yield
        finally:
            self._call("on_end", self.run)

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Give each of them a copy of the row as metrics.jsonl has it."""
        self._call("on_epoch", row)

    def _call(self, method: str, about: Any) -> None:
        for each in list(self.active):
            call = getattr(each, method, None)
            if call is None:  # on_start is optional
                continue
            try:
                call(without_nan(about) if isinstance(about, Mapping) else about)
            except (Exception, SystemExit) as error:  # user code may raise anything
                self.active.remove(each)
                self._warn(
                    f"warning: {type(each).__name__}.{method} fails ({reason_of(error)}); it is not called again"
                )

    def _warn(self, text: str) -> None:
        self.report.say(text)
        if isinstance(self.report, Silent):  # somebody who asked for no progress still has to know
            warnings.warn(text.removeprefix("warning: "), RuntimeWarning, stacklevel=2)
