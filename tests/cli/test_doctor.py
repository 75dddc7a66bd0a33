"""doctor: what is optional is listed, found or not, with the extra that brings it."""

import tomllib
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from anchorhold.cli import doctor

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))


def test_extras_are_those_of_the_project() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "docs"}
    for extra, (_, modules) in doctor.EXTRAS.items():
        packages = [each.split(">")[0].removesuffix("-cpu").removesuffix("_torch") for each in extras[extra]]
        assert [each.replace("-", "_") for each in packages] == list(modules)


def test_what_is_optional_is_found_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        return None if name in ("onnxruntime", "faiss") else "here"

    monkeypatch.setattr(util, "find_spec", find)
    found = [(sign, text) for sign, text in doctor.findings() if text.startswith("optional: ")]
    assert found == [
        ("✓", "optional: matplotlib, for plot"),
        ("–", "optional: onnxruntime not installed; for export, run pip install 'anchorhold[onnx]'"),
        ("✓", "optional: pyarrow, for embed --parquet"),
        ("–", "optional: faiss not installed; for search --backend faiss, run pip install 'anchorhold[faiss]'"),
        ("✓", "optional: pytorch_metric_learning, for losses of pytorch-metric-learning"),
        ("✓", "optional: peft, for train --set model.train=lora"),
        ("✓", "optional: open_clip, transformers, for models open_clip:… and transformers:…"),
        ("✓", "optional: tensorboard, for train --track tensorboard"),
    ]
