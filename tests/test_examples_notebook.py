"""examples/notebook.py and examples/track_with_tensorboard.py do what they print."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_cells_of_a_notebook(tmp_path: Path, capsys: Any) -> None:
    found = example("notebook").main(tmp_path)
    frame, audit = found["frame"], found["audit"]
    columns = sum(len(outcome.columns) for outcome in audit.protocols.values())
    assert (frame.kind == "attack").sum() == columns and frame.shape[1] == 10
    curve = frame[(frame.kind == "curve") & (frame.attack == "R@1")]
    assert curve.eps.tolist() == pytest.approx([0, 0.02, 0.05, 0.1])
    assert curve.after.is_monotonic_decreasing and curve.after.iloc[0] > curve.after.iloc[-1] + 20
    assert found["losses"].is_monotonic_decreasing and len(found["losses"]) == 3
    assert all(200 < length < 40_000 for length in found["html"].values())
    said = capsys.readouterr()
    assert re.search(rf"frames: \(3, \d+\) and \({len(frame)}, 10\)", said.out)
    assert max(map(len, said.out.splitlines())) < 200 and "training: 45 of 45" in said.err


@pytest.mark.slow
def test_a_training_is_tracked(tmp_path: Path, capsys: Any) -> None:
    curves = example("track_with_tensorboard").main(tmp_path / "run")
    assert len(curves["loss"]) == len(curves["r1"]) == 4
    said = capsys.readouterr().out
    best = max(value for _, value in curves["r1"])
    assert f"best R@1 {best:.2f}" in said and "that of metrics.jsonl: True" in said
