"""Why a training ends early: a loss that is no number, a collapse, a signal; and what is only said."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .checkpoint import Progress
from .console import Report
from .errors import RunError
from .record import Run
from .settings import Settings

__all__ = ["LOST", "check_finite", "judge_canary", "judge_collapse", "judge_features", "lost", "stop_on_signal"]

CANARY = 0.02  # share of the climb, in the objective's units, that a fast ascent may miss
LOST = 0.5  # of R@1 of the features at the start: a backbone that finds less than this share of it has lost them


def check_finite(run: Run, finite: bool, at: Progress, report: Report) -> None:
    if not finite:
        raise _stopped(run, f"the loss became NaN or infinite in epoch {at.epoch + 1}, by step {at.step}", report)


def judge_collapse(run: Run, settings: Settings, at: Progress, row: Mapping[str, Any], report: Report) -> None:
    """Two checks running with clean triplets that cannot be told apart, or with all pairs close together, are one."""
    t = settings.train
    signs = {
        "separability of clean random triplets": (row["separability"], "collapse_separability"),
        "mean distance of clean pairs": (row["mean_distance"], "collapse_distance"),
    }
    flat = [
        f"{sign} {value:.4f}, under train.{name} = {getattr(t, name):g}"
        for sign, (value, name) in signs.items()
        if value < getattr(t, name)
    ]
    at.collapsed = at.collapsed + 1 if flat and at.epoch > t.collapse_warmup else 0
    if at.collapsed < 2:
        return
    reason = f"the model collapsed by epoch {at.epoch}: {'; '.join(flat)}"
    if t.on_collapse == "stop":
        raise _stopped(run, reason, report)
    if at.collapsed == 2:
        report.say(f"warning: {reason}; going on, since train.on_collapse = warn")


def judge_canary(run: Run, row: Mapping[str, Any], report: Report) -> None:
    """Say when the inner attack of a fast run finds less than that of a slow one, and keep it with the run."""
    gap = row.get("canary_gap", 0.0)
    if gap > CANARY:
        text = (
            f"by epoch {row['epoch']} the inner attack misses {100 * gap:.0f} % of what it finds in fp32 with every "
            "unit kept; train with --set train.precision=fp32 --set train.compile=off"
        )
        _flag(run, report, "canary", row["epoch"], text, gap)


def judge_features(run: Run, start: float | None, row: Mapping[str, Any], report: Report) -> None:
    """Say, once, when a pretraining has lost the features it began with: under too strong an attack they all agree."""
    text = lost(start, row.get("features_r1"))
    if text and all(flag["name"] != "features" for flag in run.read_json().get("flags", [])):
        _flag(run, report, "features", row["epoch"], f"by epoch {row['epoch']} {text}", row["features_r1"])


def lost(start: float | None, now: float | None) -> str:
    """What to say of features whose R@1 was `start` before a pretraining and is `now`: nothing if they are not lost."""
    if start is None or now is None or now >= LOST * start:
        return ""
    return (
        f"R@1 of the features is {now:.1f}, and {start:.1f} before training: hardly a start for a defence; "
        "try a smaller defence.eps or optimiser.lr, then larger ones from that run by --weights"
    )


def _flag(run: Run, report: Report, name: str, epoch: int, text: str, value: float) -> None:
    """Say it, and keep it with the run."""
    report.say(f"warning: {text}")
    flag = {"name": name, "epoch": epoch, "text": text, "value": value}
    run.update_json(flags=[*run.read_json().get("flags", []), flag])


def _stopped(run: Run, reason: str, report: Report) -> RunError:
    run.update_json(status="stopped", reason=reason)
    kept = (
        "the last good checkpoint is kept" if (run.path / "last.safetensors").exists() else "no checkpoint was due yet"
    )
    return RunError(f"training stopped: {reason}; {kept} in {run.path}; try a smaller optimiser.lr or a milder defence")


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C (or SIGTERM) once lets the step end, so that what is saved is whole; twice stops at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # A signal that is ignored, as Ctrl-C is for a job in the background, stays ignored.
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in heard}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
