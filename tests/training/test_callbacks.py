"""Callbacks: what they are told and when, what they cannot do, and TensorBoard's file beside metrics.jsonl."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anchorhold as ah
from anchorhold.cli import main as cli
from anchorhold.console import Silent
from anchorhold.errors import AnchorholdError, Interrupted, RunError, SettingsError
from anchorhold.runs.folder import Run
from anchorhold.training import loop
from anchorhold.training.callbacks import Callbacks, callbacks_of
from anchorhold.training.tensorboard import FOLDER, TensorBoard

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {
    "train": {"epochs": 3, "evaluate_every": 2, "collapse_warmup": 9, "checkpoint_seconds": 0},
    "model": {"backbone": "small", "dim": 8, "weights": ""},
    "batch": {"pairs": 64},
}


class Killed(BaseException):
    """As a kill: no `except Exception` stops it."""


class Remembers:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.rows: list[Any] = []
        self.out: Path | None = None

    def on_start(self, run: Run) -> None:
        self.told.append("start")
        self.out = run.path

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        assert self.out is not None and Run(self.out).metrics()[-1] == row  # written before
        self.rows.append(row)
        self.told.append(row["epoch"])

    def on_end(self, run: Run) -> None:
        self.told.append(run.read_json()["status"])


class Fails:
    def __init__(self, method: str) -> None:
        self.method, self.calls = method, 0

    def __getattr__(self, name: str) -> Any:
        def call(about: Any) -> None:
            self.calls += 1
            if name == self.method:
                raise ValueError("no such server")

        if name.startswith("on_"):
            return call
        raise AttributeError(name)


class Says(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def fit(out: Path, **more: Any) -> Run:
    return ah.fit(None, ah.dataset("digits"), "natural", out, overrides=QUICK, device="cpu", **more)


@pytest.mark.slow
def test_every_epoch_is_told_after_it_is_written_and_the_end_once(tmp_path: Path) -> None:
    one, two = Remembers(), Remembers()
    run = fit(tmp_path / "run", callbacks=[one, two])
    assert one.told == two.told == ["start", 1, 2, 3, "done"]
    assert one.rows == run.metrics() and len(run.metrics()) == 3
    plain = fit(tmp_path / "plain")
    without = [{k: v for k, v in row.items() if k != "seconds"} for row in plain.metrics()]
    assert without == [{k: v for k, v in row.items() if k != "seconds"} for row in one.rows]


@pytest.mark.parametrize("method", ["on_start", "on_epoch", "on_end"])
def test_one_that_raises_is_dropped_with_a_line_and_the_run_goes_on(method: str, tmp_path: Path) -> None:
    bad, good, says = Fails(method), Remembers(), Says()
    with pytest.warns(RuntimeWarning, match="no such server"):  # says is a Silent
        run = fit(tmp_path / "run", callbacks=[bad, good], report=says)
    assert run.read_json()["status"] == "done" and good.told == ["start", 1, 2, 3, "done"]
    lines = [line for line in says.lines if "no such server" in line]
    assert lines == [f"warning: Fails.{method} fails (ValueError: no such server); it is not called again"]
    assert bad.calls == {"on_start": 1, "on_epoch": 2, "on_end": 5}[method]


@pytest.mark.slow
def test_a_callback_cannot_change_the_record_or_the_weights(tmp_path: Path) -> None:
    class Meddles:
        def on_epoch(self, row: dict[str, Any]) -> None:
            row.clear()
            torch.manual_seed(0)
            torch.rand(7)

        def on_end(self, run: Run) -> None:
            raise SystemExit(3)

    with pytest.warns(RuntimeWarning, match="SystemExit"):
        run = fit(tmp_path / "run", callbacks=[Meddles()])
    plain = fit(tmp_path / "plain")
    assert [row["loss"] for row in run.metrics()] == [row["loss"] for row in plain.metrics()]
    assert run.read_json()["weights"] == plain.read_json()["weights"]


def test_only_the_first_rank_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Remembers()
    silent = Callbacks([seen], Run(tmp_path, writes=False), Silent())
    with silent.told():
        silent.epoch({"epoch": 1})
    assert seen.told == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made: list[int] = []
    assert callbacks_of([lambda: made.append(1)]) == [] and not made


def test_a_stop_is_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, calls = Remembers(), iter(range(99))
    known = loop.stop_if_asked
    monkeypatch.setattr(loop, "stop_if_asked", lambda trainer, stopping: known(trainer, lambda: next(calls) == 9))
    with pytest.raises(Interrupted):
        fit(tmp_path / "run", callbacks=[seen])
    assert seen.told[-1] == "interrupted" and len(seen.told) < 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tensorbord"], "did you mean tensorboard"),
        (["wandb"], "module:thing of yours"),
        (["nowhere:thing"], "no module 'nowhere'"),
        ([f"{__name__}:QUICK"], r"needs the methods on_epoch\(row\) and on_end\(run\)"),
        ([f"{__name__}:Fails"], r"Fails\(\) fails \(TypeError"),
        ([7], "is an int"),
        ("tensorboard", "callbacks is a list"),
        (None, "callbacks is a list"),
    ],
)
def test_what_is_no_callback_is_one_line_before_any_work(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(AnchorholdError, match=message) as raised:
        fit(tmp_path / "run", callbacks=given)
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


# TensorBoard ------------------------------------------------------------------------------------------------


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / FOLDER), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(each.step, each.value) for each in read.Scalars(name)] for name in read.Tags()["scalars"]}


def expected(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The same from metrics.jsonl; an event holds single precision."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                found.setdefault(name, []).append((row["step"], float(np.float32(value))))
    return found


@pytest.mark.slow
def test_tensorboards_file_is_metrics_jsonl(tmp_path: Path) -> None:
    run = fit(tmp_path / "run", callbacks=["tensorboard"])
    found = curves(run.path)
    assert found == expected(run.path)
    assert len(found["loss"]) == 3 and len(found["r1"]) == 2  # evaluated after the second epoch and the last


@pytest.mark.parametrize("tracked_before", [True, False])
def test_killed_and_resumed_nothing_is_missing_and_nothing_is_there_twice(
    tracked_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, known = iter(range(99)), loop.judge_epoch

    def dying(trainer: Any, row: Any) -> None:
        if next(calls) == 1:  # the second row is written and tracked, and its checkpoint is not
            raise Killed
        known(trainer, row)

    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loop, "judge_epoch", dying)
        fit(out, callbacks=["tensorboard"] if tracked_before else [])
    assert len(Run(out).metrics()) == 2
    ah.resume(out, device="cpu", callbacks=["tensorboard"])
    assert curves(out) == expected(out)
    assert [step for step, _ in curves(out)["loss"]] == sorted({step for step, _ in curves(out)["loss"]})
    assert len(list((out / FOLDER).iterdir())) == 1


def test_a_link_in_the_place_of_its_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "mine"
    elsewhere.mkdir()
    (elsewhere / "events.out.tfevents.1").write_text("mine")
    run = Run.create(tmp_path / "run", {"status": "training"})
    (run.path / FOLDER).symlink_to(elsewhere)
    with pytest.raises(RunError, match="symbolic link"):
        TensorBoard().on_start(run)
    assert (elsewhere / "events.out.tfevents.1").read_text() == "mine"


def test_without_tensorboard_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "tensorboard" or "utils.tensorboard" in each]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SettingsError, match=r"pip install 'anchorhold\[tensorboard\]'"):
        TensorBoard()


# The command line -------------------------------------------------------------------------------------------

MODULE = """
class Lines:
    def on_epoch(self, row):
        with open("lines.txt", "a") as file:
            file.write(f"{row['epoch']}\\n")

    def on_end(self, run):
        with open("lines.txt", "a") as file:
            file.write(f"{run.path}\\n")
"""


def told(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *words])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_track_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tracks.py").write_text(MODULE)
    quick = ["--recipe", "natural", "--epochs", "2", "--set", "batch.pairs=64", "--device", "cpu"]
    both = ["--track", "tensorboard", "--track", "tracks:Lines"]
    assert told(monkeypatch, "train", "digits", "--out", "run", *quick, *both) == 0, capsys.readouterr().err
    assert curves(tmp_path / "run") == expected(tmp_path / "run")
    assert (tmp_path / "lines.txt").read_text() == "1\n2\nrun\n"
    record = tmp_path / "run" / "run.json"
    assert "tracks" not in record.read_text()  # a run names no code that it did not need
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    assert told(monkeypatch, "resume", "run", "--device", "cpu", *both) == 0, capsys.readouterr().err
    assert curves(tmp_path / "run") == expected(tmp_path / "run")
    assert (tmp_path / "lines.txt").read_text() == "1\n2\nrun\nrun\n"
    capsys.readouterr()
    assert told(monkeypatch, "train", "digits", "--out", "other", "--track", "tensorbord") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "did you mean tensorboard" in err and not (tmp_path / "other").exists()
    sys.modules.pop("tracks", None)


def test_a_folder_that_cannot_be_written_costs_the_curves_and_not_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / FOLDER).write_text("in the way")
    with pytest.warns(RuntimeWarning, match="TensorBoard.on_start fails"):
        assert fit(out, callbacks=["tensorboard"]).read_json()["status"] == "done"
    with pytest.raises(RunError):
        fit(out, callbacks=["tensorboard"])  # and it is a run now
