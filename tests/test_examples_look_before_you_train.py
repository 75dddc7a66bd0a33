"""The example runs as it stands, and its numbers are right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_look_before_you_train(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "look_before_you_train.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "optimiser.lr = 1e-05 (number): " in text
    # 8 of the 10 classes are trained on: 240 images, 24 pairs a batch.
    assert "240 training images of 8 classes, 60 test images" in text
    assert "48 images, 10 steps an epoch" in text and "75 epochs, 750 optimiser steps" in text
    assert f"up to {24 * 3 * 8} image-steps" in text
    assert "1 step an epoch; try batch.pairs=24: 10 steps an epoch instead of 1" in text
    assert re.search(r"without attacks \d+ times shorter", text)  # of two steps by the clock: any number under load
    assert not list(tmp_path.iterdir())  # nothing is written
