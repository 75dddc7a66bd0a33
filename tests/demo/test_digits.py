"""The demonstration, shortened; that its claims hold is in results/, and that the README repeats them is here."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anchorhold.config.numbers import parse_number
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.demo.digits import EPSILONS, RECIPES, run_demo, table, write_pages
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.training.evaluation import recall_under_attack

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "results" / "demo").glob("seed-*.json"))


@pytest.mark.slow
def test_the_demo_trains_attacks_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[tuple[Any, ...]] = []

    def spy(model: Any, images: Any, gallery: Any, ball: Ball, budget: Budget, *rest: Any) -> float:
        spent.append((ball, budget.steps, budget.restarts))
        return recall_under_attack(model, images, gallery, ball, budget, *rest)

    monkeypatch.setattr("anchorhold.demo.digits.recall_under_attack", spy)
    quick = {"train": {"epochs": 1, "evaluate_every": 9}, "defence": {}, "model": {"dim": 8}}
    result = run_demo(tmp_path, seed=4, report=Silent(), overrides=quick, queries=40)
    # What the table says was spent on both models, after a look at the same 40 queries without an attack.
    assert spent == 2 * [(Ball(0.0), 0, 1), *((Ball(eps), 40, 2) for eps in EPSILONS)]
    for name in ("natural", "robust"):
        kept = result[name]["attacked"]
        assert len(kept) == len(EPSILONS) and kept == sorted(kept, reverse=True)
        assert result[name]["clean"] > kept[0] and kept[-1] == 0  # the attack works
        assert (Path(result[name]["run"]) / "model.safetensors").exists()
    assert json.loads((tmp_path / "demo.json").read_text()) == result
    printed = table(result)
    assert "ε = 0.06" in printed and "natural" in printed and "40 steps, 2 restarts" in printed
    pages = write_pages(tmp_path, result, Silent(), limit=4)
    assert pages == [tmp_path / name / "audit" / "page.html" for name in ("natural", "robust")]
    clean = f"robust: {result['robust']['clean']:.1f} at ε = 0/255"  # the curves of both are on either page
    assert all(clean in page.read_text() and "<article" in page.read_text() for page in pages)


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_the_recorded_demos_hold_what_is_claimed(path: Path) -> None:
    result = json.loads(path.read_text())
    at = result["epsilons"].index(0.06)
    assert result["robust"]["attacked"][at] - result["natural"]["attacked"][at] >= 15
    assert result["natural"]["attacked"][-1] == result["robust"]["attacked"][-1] == 0


def test_the_readme_repeats_the_strong_attack_on_the_demos_models() -> None:
    assert len(RESULTS) == 6
    readme = (ROOT / "README.md").read_text()
    head = re.search(r"^\| model \|(.*)\|$", readme, re.M)
    demo = json.loads(RESULTS[0].read_text())
    for name in RECIPES:
        found = json.loads((ROOT / "results" / "demo" / f"strong-{name}" / "audit.json").read_text())
        curve = found["curve"]
        assert f"under the strong attack on all {curve['queries']} queries" in readme
        assert head and re.findall(r"ε = ([\d.]+)", head[1]) == [str(eps) for eps in curve["eps"][1:]]
        row = re.search(rf"^\| {name}[^|]*\|(.*)\|$", readme, re.M)
        assert row, f"README has no row for {name}"
        assert [cell.strip() for cell in row[1].split("|")] == [f"{value:.1f}" for value in curve["lines"]["R@1"]]
        # The audited models are those of the recorded demo, whose shorter attack leaves more.
        assert curve["lines"]["R@1"][0] == pytest.approx(demo[name]["clean"], abs=0.01)
        assert all(a <= b for a, b in zip(curve["lines"]["R@1"][1:], demo[name]["attacked"]))
    (eps,) = re.findall(r"trains on them with ε = (\d+/\d+)", readme)
    assert settings_from("robust", {"data": {"name": "digits"}}).defence.eps == pytest.approx(parse_number(eps))


def test_the_readme_starts_with_two_commands() -> None:
    block = re.search(r"^## Start\n+```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block
    assert block[1].splitlines() == ["./start demo", "./start test"]
