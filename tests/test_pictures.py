"""The pictures of docs/pictures: curves.py finds every audit with a curve, and what is drawn is what JSON says."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

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
    audit = {"data": {"query": {"name": f"{data}/test"}}}
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
    found = {each.name: each for each in curves.curves(tmp_path)}
    assert set(found) == {"digits-a", "cub/hm", "cub/own"} and found["cub/own"].recall == (41, 21, 6)
    assert [curves.label(eps) for eps in (0.0, 4 / 255, 0.03, 0.1)] == ["0", "4/255", "0.03", "0.1"]
    picture = curves.draw([found["cub/hm"], found["cub/own"]], "cub", tmp_path / "curve.png")
    with Image.open(picture) as file:
        assert file.info["Description"] == curves.told([found["cub/hm"], found["cub/own"]])


def test_the_pictures_are_of_the_recorded_audits(curves: ModuleType) -> None:
    """After a new audit with a curve: python docs/pictures/curves.py."""
    if not (ROOT / "results").is_dir():
        pytest.skip("an sdist has no results")
    for name, (_, drawn) in curves.pictures(ROOT / "results").items():
        picture = ROOT / "docs" / "pictures" / name
        assert picture.stat().st_size < 200_000
        with Image.open(picture) as file:
            assert file.info["Description"] == curves.told(drawn), name
