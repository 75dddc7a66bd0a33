"""What ends a training early (a NaN loss, a collapse, a signal), and what only warns (canary, lost features)."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..config.settings import Settings
from ..console import Report
from ..defences.settings import HardnessSettings, Inner
from ..errors import RunError
from ..runs.fields import dig
from ..runs.folder import Run
from ..runs.health import lost, upper_end
from .checkpoint import Progress

__all__ = [
    "check_finite",
    "judge_attacks",
    "judge_canary",
    "judge_collapse",
    "judge_features",
    "stop_on_signal",
]

CANARY = 0.02  # share of the objective's gain that a fast inner attack may miss
SIGNS = {
    "separability": "separability of clean random triplets",
    "mean_distance": "mean distance of clean pairs",
}


def check_finite(run: Run, finite: bool, at: Progress) -> None:
    """Stop the run if a loss became NaN or infinite."""
    if not finite:
        raise _stopped(run, f"the loss became NaN or infinite in epoch {at.epoch + 1}, by step {at.step}")


def judge_collapse(run: Run, settings: Settings, at: Progress, row: Mapping[str, Any], report: Report) -> None:
    """Stop, or warn, when two epochs in a row show a collapse.

    A collapse is a separability or a mean distance under its threshold in the settings.
    """
    t = settings.train
    least = {"separability": "collapse_separability", "mean_distance": "collapse_distance"}
    flat = [
        f"{SIGNS[sign]} {upper_end(row, sign):.4f}, under train.{name} = {getattr(t, name):g}"
        for sign, name in least.items()
        if upper_end(row, sign) < getattr(t, name)
    ]
    at.collapsed = at.collapsed + 1 if flat and at.epoch > t.collapse_warmup else 0
    if at.collapsed < 2:
        return
    reason = f"the model collapsed by epoch {at.epoch}: {'; '.join(flat)}"
    if t.on_collapse == "stop":
        raise _stopped(run, reason)
    if at.collapsed == 2:
        report.say(f"warning: {reason}; training continues, because train.on_collapse = warn")


def judge_canary(run: Run, row: Mapping[str, Any], report: Report) -> None:
    """Flag a run whose fast inner attack finds clearly less than the same attack in fp32."""
    gap = row.get("canary_gap", 0.0)
    if gap > CANARY:
        text = (
            f"by epoch {row['epoch']} the inner attack misses {100 * gap:.0f} % of what it finds in fp32 without "
            "dropping finished triplets; set train.precision to fp32 and train.compile to off"
        )
        _flag(run, report, "canary", row["epoch"], text, gap)


def judge_attacks(run: Run, settings: Settings, at: Progress, report: Report) -> None:
    """Flag a finished training whose settings mean to attack, but whose attack never took a step: it did not harden.

    Nothing is meant with eps, steps or an attack rate of 0 (`Inner.attacks`), or where all batches are benign.
    """
    defence = settings.defence
    meant = isinstance(defence, Inner) and defence.attacks and settings.train.benign < 1
    if meant and run.writes and not at.image_steps:
        text = "no image was attacked in training, so this model is not hardened"
        if isinstance(defence, HardnessSettings):
            text += (
                f"; {settings.recipe or 'this defence'} begins to attack once the loss falls: train longer, or raise "
                "optimiser.lr (1e-3 suits a network with random weights)"
            )
        else:
            text += "; train longer, or check the settings of defence"
        _flag(run, report, "no-attack", at.epoch, text, 0.0)


def judge_features(run: Run, start: float | None, row: Mapping[str, Any], report: Report) -> None:
    """Flag, once, a training that has lost the features it began with: its attack is too strong."""
    text = lost(start, row.get("features_r1"), finished="r1" in row)
    if text and all(dig(flag, "name") != "features" for flag in _flags(run)):
        _flag(run, report, "features", row["epoch"], f"by epoch {row['epoch']} {text}", row["features_r1"])


def _flags(run: Run) -> list[Any]:
    flags = run.read_json().get("flags")
    return flags if isinstance(flags, list) else []


def _flag(run: Run, report: Report, name: str, epoch: int, text: str, value: float) -> None:
    """Warn, and record the flag in run.json."""
    report.say(f"warning: {text}")
    flag = {"name": name, "epoch": epoch, "text": text, "value": value}
    run.update_json(flags=[*_flags(run), flag])


def _stopped(run: Run, reason: str) -> RunError:
    """Record why the run stopped; the caller raises what is returned."""
    run.update_json(status="stopped", reason=reason)
    kept = (
        "the last good checkpoint is kept" if (run.path / "last.safetensors").exists() else "there is no checkpoint yet"
    )
    return RunError(f"training stopped: {reason}; {kept} in {run.path}; try a smaller optimiser.lr or a milder defence")


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C or SIGTERM came; the current step is then finished and saved.

    A second signal stops at once.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    # An ignored signal stays ignored, such as Ctrl-C for a job in the background.
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in heard}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
