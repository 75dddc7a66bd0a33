"""The code on docs/guides/trackers.md, with stand-ins for the trackers, which are not installed: every row arrives."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import anchorhold as ah

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guides" / "trackers.md"
QUICK: dict[str, Any] = {"train": {"epochs": 2, "collapse_warmup": 9}, "batch": {"pairs": 64}}


def callback(name: str) -> Any:
    """The class of that name, from its block on the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (code,) = [block for block in blocks if f"class {name}" in block]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope[name]()


@pytest.mark.medium
def test_weights_and_biases_gets_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def init(**options: Any) -> Any:
        said.append(options)
        return SimpleNamespace(log=lambda row, step: said.append((step, row)), finish=lambda: said.append("finish"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = ah.fit(
        None, "digits", "natural", tmp_path / "w", overrides=QUICK, callbacks=[callback("Wandb")], device="cpu"
    )
    first, *rows, last = said
    assert first["id"] == "w" and first["resume"] == "allow" and first["config"]["train"]["epochs"] == 2
    assert rows == [(row["step"], row) for row in run.metrics()] and last == "finish"


@pytest.mark.medium
def test_mlflow_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    fake = SimpleNamespace(
        start_run=lambda run_name: said.append(run_name),
        log_params=lambda params: said.append(params),
        log_metrics=lambda numbers, step: said.append((step, numbers)),
        end_run=lambda status: said.append(status),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run = ah.fit(
        None, "digits", "natural", tmp_path / "m", overrides=QUICK, callbacks=[callback("MLflow")], device="cpu"
    )
    assert said[:2] == ["m", {"recipe": "natural"}] and said[-1] == "FINISHED"
    known = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in run.metrics()]
    assert [numbers for _, numbers in said[2:-1]] == known
