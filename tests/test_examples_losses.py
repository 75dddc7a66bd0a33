"""The examples with a loss and a loop of your own: what they print holds."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
START = 23.0  # attacked R@1 of the untrained network of the recipes on digits, by the same attack


def printed(name: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_loop_of_your_own_hardens_a_network() -> None:
    rows = re.findall(r"^(\w+) +R@1 +([\d.]+), under attack +([\d.]+)$", printed("own_loop.py"), re.M)
    clean, attacked = ({name: float(row[i]) for name, *row in rows} for i in (0, 1))
    assert attacked["robust"] > max(attacked["before"], attacked["natural"]) + 10
    assert clean["robust"] > 90


@pytest.mark.slow
def test_losses_of_your_own_train_robust_networks() -> None:
    text = printed("loss_of_your_own.py")
    rows = re.findall(r"^(\w+) +([\w-]+) +R@1 +([\d.]+), under attack +([\d.]+)$", text, re.M)
    attacked = {(loss, recipe): float(value) for loss, recipe, _, value in rows}
    assert len(attacked) == 8
    for (loss, recipe), value in attacked.items():
        if recipe != "natural":
            assert value > max(attacked[loss, "natural"], START), (loss, recipe)


def test_the_examples_can_be_imported_without_running() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        assert callable(importlib.import_module("loss_of_your_own").NearestProxy)
    finally:
        sys.path.remove(str(ROOT / "examples"))
