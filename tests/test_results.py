"""The numbers in docs/results.md are those of the JSON files they name."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text()
ROWS = re.findall(r"^\| \[[^\]]*\]\(\.\./(results/[^)]*/run\.json)\)[^|]*\|(.*)\|$", PAGE, re.M)


def test_there_are_rows() -> None:
    assert len(ROWS) >= 3


@pytest.mark.parametrize(("path", "cells"), ROWS, ids=[path for path, _ in ROWS])
def test_a_training_row_repeats_its_run(path: str, cells: str) -> None:
    run = json.loads((ROOT / path).read_text())
    final, shown = run["final"], [cell.strip().replace(",", "") for cell in cells.split("|")]
    epochs, r1, r2, map_r, *_, seconds, image_steps = shown
    assert run["status"] == "done" and run["commit"] and "dirty" not in run["commit"]
    assert int(epochs) == final["epoch"] == run["settings"]["train"]["epochs"]
    assert [r1, r2, map_r] == [f"{final[name]:.1f}" for name in ("r1", "r2", "map_r")]
    assert seconds == f"{run['seconds']:.0f}" and int(image_steps) == run["image_steps"]


def test_the_digits_table_repeats_the_demos() -> None:
    for path in sorted((ROOT / "results" / "demo").glob("seed-*.json")):
        result = json.loads(path.read_text())
        for name in ("natural", "robust"):
            values = [result[name]["clean"], *result[name]["attacked"]]
            row = " | ".join([str(result["seed"]), name, *(f"{value:.1f}" for value in values)])
            assert f"| {row} |" in PAGE


def test_no_result_names_a_path_of_a_machine() -> None:
    for path in (ROOT / "results").rglob("*.json"):
        for value in re.findall(r'"(/[^"]*)"', path.read_text()):
            pytest.fail(f"{path}: {value}")
