"""The defence, the attack and the data set of docs/extending.md run as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SOURCE = ROOT / "src" / "anchorhold"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def put(file: Path, before: str, text: str) -> None:
    """Write `text` above the first line that begins with `before`."""
    whole = file.read_text(encoding="utf-8")
    assert f"\n{before}" in whole, before
    file.write_text(whole.replace(f"\n{before}", f"\n{text}\n{before}", 1), encoding="utf-8")


def anchorhold(place: Path, command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [sys.executable, "-m", "anchorhold", *command.split()]
    done = subprocess.run(line, cwd=place, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + f"exit {done.returncode}"


@pytest.mark.slow
def test_what_the_page_adds_runs(tmp_path: Path) -> None:
    package = tmp_path / "anchorhold"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    settings, defence, _, attack, data = blocks("python")[2:]  # after those about what you bring
    put(package / "defences" / "settings.py", "SETTINGS:", settings + "\n")
    (package / "defences" / "noise.py").write_text(defence, encoding="utf-8")
    (package / "attacks" / "centre.py").write_text(attack, encoding="utf-8")
    put(package / "data" / "datasets.py", "DATASETS", data)
    menus = [package / "defences" / "menu.py", package / "attacks" / "menu.py"]
    for menu, line in zip(menus, re.findall(r"`(from \.\w+ import [\w, ]+)`", PAGE), strict=True):
        put(menu, "from .", line)
    entries = re.findall(r'`("\w+": .+?,)`', PAGE)
    first = ('    "natural"', '    "natural"', '    "CA+"', '    "cub"')
    lists = [package / "defences" / "settings.py", *menus, package / "data" / "datasets.py"]
    for menu, entry, old in zip(lists, entries, first, strict=True):
        put(menu, old, f"    {entry}")
    for name, text in zip(("noise.toml", "stripes.toml"), blocks("toml"), strict=True):
        assert f"`{name}`" in PAGE
        (tmp_path / name).write_text(text, encoding="utf-8")

    short = "--epochs 1 --device cpu --out"
    said = anchorhold(tmp_path, f"train digits --recipe noise.toml {short} runs/a")
    assert said.endswith("exit 0"), said
    said = anchorhold(tmp_path, "audit runs/a --data digits --attacks centre --limit 50 --steps 4 --device cpu")
    assert said.endswith("exit 0") and re.search(r"^ *centre ", said, re.M), said
    said = anchorhold(tmp_path, f"train stripes --recipe stripes.toml {short} runs/b")
    assert said.endswith("exit 0"), said
    said = anchorhold(tmp_path, f"train digits --recipe natural --set defence.name=noise {short} runs/c")
    assert said.endswith("exit 2") and "sampler" in said, said
