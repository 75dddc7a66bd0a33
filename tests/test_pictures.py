"""The pictures of docs/pictures: curves.py finds every audit with a curve, and what is drawn is what JSON says."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from anchorhold.attacks.menu import goal_named
from anchorhold.auditing.members import MEMBERS
from anchorhold.report.epsilon import draw_curves, told
from anchorhold.runs.schemas import AUDIT_SCHEMA

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "pictures" / "curves.py"


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["curves"] = module
    spec.loader.exec_module(module)
    return module


def an_audit(place: Path, data: str, recall: list[float] | None) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    audit: dict[str, Any] = {"schema": AUDIT_SCHEMA, "data": {"query": {"name": f"{data}/test"}}}
    if recall is not None:
        curve = {
            "eps": [0.0, 4 / 255, 8 / 255],
            "lines": {"R@1": recall},
            "intervals": {"R@1": [[v, v] for v in recall]},
        }
        audit |= {"curve": curve}
    place.write_text(json.dumps(audit))


@pytest.mark.medium
def test_every_audit_with_a_curve_is_drawn(curves: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    an_audit(tmp_path / "strong" / "digits-a.json", "digits", [90, 50, 10])
    an_audit(tmp_path / "cub" / "hm" / "audit.json", "cub", [40, 20, 5])
    an_audit(tmp_path / "cub" / "own" / "strong" / "audit.json", "cub", [41, 21, 6])
    an_audit(tmp_path / "cub" / "none" / "audit.json", "cub", None)
    (tmp_path / "strong" / "cost.json").write_text('{"schema": "anchorhold.strong-cost/1", "curve": [0.03, 0.06]}')
    found = {each.name: each for _, each in curves.curves(tmp_path)}
    assert set(found) == {"a", "hm", "own"} and found["own"].recall == (41, 21, 6)
    drawn = [found["hm"], found["own"]]
    with Image.open(draw_curves({"linf": drawn}, tmp_path / "curve.png", "cub")) as file:
        assert file.info["Description"] == told(drawn)


def test_the_pictures_are_of_the_recorded_audits(curves: ModuleType) -> None:
    """After a new audit with a curve: python docs/pictures/curves.py."""
    if not (ROOT / "results").is_dir():
        pytest.skip("an sdist has no results")
    for name, (_, drawn) in curves.pictures(ROOT / "results").items():
        picture = ROOT / "docs" / "pictures" / name
        assert picture.stat().st_size < 200_000
        with Image.open(picture) as file:
            assert file.info["Description"] == told(drawn), name


def test_the_picture_of_scores_is_of_the_recorded_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new audit: python docs/pictures/scores.py."""
    pytest.importorskip("matplotlib")
    if not (ROOT / "results").is_dir():
        pytest.skip("an sdist has no results")
    try:
        scores = module_of("scores", monkeypatch)
    finally:
        sys.modules.pop("style", None)
    recorded = scores.scores_of(ROOT / "results" / "cub")
    assert all(
        json.loads((ROOT / "results" / "cub" / name / "run.json").read_text())["final"]["epoch"] == 75
        for name in recorded
    )
    with Image.open(SCRIPT.parent / "scores.png") as file:
        assert file.info["Description"] == scores.numbers(recorded)


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of docs/pictures, which imports its style from beside it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    spec = importlib.util.spec_from_file_location(f"pictures_{name}", SCRIPT.parent / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_picture_of_an_attack_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    try:
        picture = module_of("attack", monkeypatch).main(tmp_path, epochs=2)
    finally:
        sys.modules.pop("style", None)
    assert picture.parent == tmp_path
    with Image.open(picture) as drawn, Image.open(SCRIPT.parent / picture.name) as shown:
        assert drawn.width > 800 and abs(drawn.width / drawn.height - shown.width / shown.height) < 0.2


@pytest.mark.slow
def test_the_screenshots_are_of_the_pages(tmp_path: Path) -> None:
    """One part of a page has the size that was asked for, and is not empty; a repeated one is the same."""
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium")
    folder = tmp_path / "pictures"
    shutil.copytree(SCRIPT.parent, folder, ignore=shutil.ignore_patterns("*.png"))
    text = "<body style='background: linear-gradient(red, blue)'><h1>page</h1><div style='height: 4000px'></div>"
    for name in ("audit/page.html", "run/training.html", "compare.html"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    curve = {"eps": [0.0, 0.06], "lines": {"R@1": [90.0, 20.0]}, "attacks": {"R@1": ["ES"]}}
    audit = {"commit": "0123", "model": {"weights": "4567"}, "curve": curve}
    (tmp_path / "audit" / "audit.json").write_text(json.dumps(audit), encoding="utf-8")
    asked = [sys.executable, "pages.py", *(str(tmp_path / name) for name in ("audit", "run", "compare.html"))]
    subprocess.run(asked, cwd=folder, check=True, capture_output=True)
    sizes = {"audit-page": 1895, "audit-examples": 3150 - 2450, "training-page": 1645, "compare-page": 700}
    assert {path.stem for path in folder.glob("*.png")} == set(sizes)
    for name, height in sizes.items():
        with Image.open(folder / f"{name}.png") as drawn:
            assert drawn.size == (1000, height) and len(drawn.convert("RGB").getcolors(10**6) or ()) > 10, name
    about = json.loads((folder / "pages.json").read_text(encoding="utf-8"))
    assert about["attacks"] == ["ES"] and about["R@1"] == [90.0, 20.0] and about["commit"] == "0123"
    assert about["sha256"] == {path.name: digest(path) for path in folder.glob("*.png")}
    (tmp_path / "run" / "training.html").unlink()  # or the picture would be the browser's error page
    assert subprocess.run(asked, cwd=folder, check=False, capture_output=True).returncode == 1


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_screenshots_are_of_todays_ensemble() -> None:
    """If not: audit the two models of docs/guides/comparing.md again, and run docs/pictures/pages.py."""
    about = json.loads((SCRIPT.parent / "pages.json").read_text(encoding="utf-8"))
    assert about["sha256"] == {name: digest(SCRIPT.parent / name) for name in about["sha256"]}
    assert len(about["sha256"]) == 4 and "dirty" not in about["commit"]
    goal = goal_named("margin", "corrected")
    members = [member.name for member in MEMBERS if member.wants(goal) and member.kind != "transfer"]
    assert about["attacks"] == ["ES", "LTM", "GTM", *members]


def test_the_picture_of_the_demo_is_of_the_strong_attack_of_today() -> None:
    """Both models of seed 0, all queries. If not: audit them again with --attacks GTM --full."""
    if not (ROOT / "results").is_dir():
        pytest.skip("an sdist has no results")
    goal = goal_named("margin", "corrected")
    members = [member.name for member in MEMBERS if member.wants(goal) and member.kind != "transfer"]
    for name in ("natural", "robust"):
        found = json.loads((ROOT / "results" / "demo" / f"strong-{name}" / "audit.json").read_text(encoding="utf-8"))
        assert found["commit"] and "dirty" not in found["commit"] and not found["flags"]
        assert found["curve"]["attacks"]["R@1"] == ["GTM", *members] and found["curve"]["protocol"] == "strong"
        assert found["data"]["attacked"][0] == found["data"]["images"][0] == found["curve"]["queries"] == 896
