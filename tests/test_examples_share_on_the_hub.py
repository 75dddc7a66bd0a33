"""The example runs against a Hub on this machine, and what it prints is true."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server import environment, serving

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_share_on_the_hub(tmp_path: Path) -> None:
    with serving() as hub:
        told = {**os.environ, **environment(hub, tmp_path / "hf"), "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, str(ROOT / "examples" / "share_on_the_hub.py"), "me/digits"]
        done = subprocess.run(command, capture_output=True, text=True, env=told, cwd=tmp_path, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        (oid,) = hub.repos["me/digits"].commits
        assert hub.repos["me/digits"].private
        assert set(hub.files("me/digits")) == {"README.md", "model.safetensors", "run.json"}
        card = hub.files("me/digits")["README.md"].decode()
    assert f"pushed: hf:me/digits@{oid}\n" in done.stdout
    assert "same vectors: True" in done.stdout
    assert f"loaded from: hf:me/digits@{oid}:model.safetensors" in done.stdout
    numbers = re.search(r"R@1 ([\d.]+), ERS ([\d.]+)", done.stdout)
    assert numbers and float(numbers[1]) > 50  # chance is 20
    assert f"R@1 without an attack: {numbers[1]} [" in card and f"| {numbers[2]} [" in card
    assert str(tmp_path) not in card


@pytest.mark.slow
def test_the_command_line_in_a_process_of_its_own(tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HUB_OFFLINE are read when huggingface_hub is imported."""
    import anchorhold as ah

    with serving() as hub:
        commit = hub.put(
            "me/m",
            {"model.safetensors": ah.Embedder("small", 4, size=8).save(tmp_path / "m.safetensors").read_bytes()},
        )
        told = {**os.environ, **environment(hub, tmp_path / "hf", token=""), "PYTHONPATH": str(ROOT / "src")}

        def embed(out: str, **more: str) -> subprocess.CompletedProcess[str]:
            words = ["embed", "hf:me/m", str(tmp_path / "photos"), "--out", str(tmp_path / out), "--device", "cpu"]
            command = [sys.executable, "-m", "anchorhold", *words]
            return subprocess.run(
                command, capture_output=True, text=True, env=told | more, cwd=tmp_path, timeout=120, check=False
            )

        from PIL import Image

        (tmp_path / "photos").mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
        done = embed("offline", HF_HUB_OFFLINE="1")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "HF_HUB_OFFLINE is set" in done.stderr
        assert not hub.asked
        done = embed("online")
        assert done.returncode == 0, done.stderr
        assert f"hf:me/m@{commit}:model.safetensors" in (tmp_path / "online" / "index.json").read_text()
        assert "%|" not in done.stderr  # no progress bar where there is no terminal
        assert embed("cached", HF_HUB_OFFLINE="1").returncode == 0
