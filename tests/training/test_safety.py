"""When a training is judged to have collapsed."""

from pathlib import Path
from typing import Any

import pytest

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import Settings
from anchorhold.console import Silent
from anchorhold.errors import RunError
from anchorhold.runs.folder import Run
from anchorhold.training.checkpoint import Progress
from anchorhold.training.safety import judge_attacks, judge_collapse, judge_features

FLAT = {"separability": 0.0, "mean_distance": 1.0}
ROUND = {"separability": 0.5, "mean_distance": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", {"status": "training"})


def after(warmup: int, on_collapse: str = "stop") -> Settings:
    return settings_from("hm-lga", {"train": {"collapse_warmup": warmup, "on_collapse": on_collapse}})


def judge(run: Run, settings: Settings, at: Progress, *rows: dict[str, float]) -> None:
    """One epoch a row."""
    for row in rows:
        at.epoch += 1
        judge_collapse(run, settings, at, row, Silent())


def test_one_flat_epoch_is_no_collapse_and_two_running_are(run: Run) -> None:
    settings, at = after(0), Progress()
    judge(run, settings, at, FLAT, ROUND, FLAT)
    assert run.read_json()["status"] == "training" and at.collapsed == 1
    with pytest.raises(
        RunError, match=r"by epoch 4: separability of .* 0.0000, under train.collapse_separability = 0.02"
    ):
        judge(run, settings, at, FLAT)
    assert run.read_json()["status"] == "stopped"


def test_epochs_of_the_warmup_do_not_count(run: Run) -> None:
    settings, at = after(3), Progress()
    judge(run, settings, at, FLAT, FLAT, FLAT)
    assert at.collapsed == 0
    judge(run, settings, at, FLAT)
    with pytest.raises(RunError, match="the model collapsed by epoch 5"):
        judge(run, settings, at, FLAT)


def test_embeddings_on_one_point_are_flat_however_well_they_separate(run: Run) -> None:
    # A training of ours went on to its end with a mean distance of 0.015, its loss at the margin.
    point, apart = ({"separability": 0.5, "mean_distance": distance} for distance in (0.049, 0.051))
    judge(run, after(0), Progress(), apart, apart)
    with pytest.raises(
        RunError, match=r"by epoch 2: mean distance of clean pairs 0\.0490, under train\.collapse_distance = 0\.05;"
    ):
        judge(run, after(0), Progress(), point, point)


def test_features_are_lost_below_half_of_what_they_found_before(run: Run) -> None:
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    for start, now in ((None, 1.0), (0.0, 0.0), (100.0, 50.0), (100.0, None)):
        judge_features(run, start, {"epoch": 1, "features_r1": now} if now is not None else {"epoch": 1}, report)
    assert not said and "flags" not in run.read_json()
    for epoch in (2, 3):
        judge_features(run, 100.0, {"epoch": epoch, "features_r1": 49.9}, report)
    (flag,) = run.read_json()["flags"]
    assert len(said) == 1 and said[0] == f"warning: {flag['text']}" and "fell from 100.0 to 49.9" in said[0]
    assert (flag["name"], flag["epoch"], flag["value"]) == ("features", 2, 49.9)
    assert flag["text"].endswith("then start from that run, with larger values")  # advice for a pretraining


def test_a_collapse_that_is_gone_on_with_is_said_once(run: Run) -> None:
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    at = Progress()
    for at.epoch in (1, 2, 3, 4):
        judge_collapse(run, after(0, "warn"), at, FLAT, report)
    assert len(said) == 1 and "by epoch 2" in said[0] and run.read_json()["status"] == "training"


def test_few_images_are_no_evidence_of_a_collapse(run: Run) -> None:
    """A small folder: the value is below its threshold, and so far from certain that nothing follows from it."""
    at = Progress()
    judge(run, after(0), at, *[{**FLAT, "separability_high": 0.3, "mean_distance_high": 0.9}] * 6)
    judge(run, after(0), at, *[{**FLAT, "separability_high": 0.01, "beyond_chance": 0.4}] * 2)
    assert at.collapsed == 0 and run.read_json()["status"] == "training"
    with pytest.raises(RunError, match=r"separability of .* 0\.0100, under"):
        judge(run, after(0), at, *[{**FLAT, "separability_high": 0.01}] * 2)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("adml", {"defence.attack_rate": 0.0}),
        ("adml-contrastive", {"defence.attack_rate": 0.0}),
        ("adml", {"defence.eps": 0.0}),
        ("est", {"defence.steps": 0}),
        ("hm", {"defence.destination": "softhard"}),
        ("act", {"train.benign": 1.0}),
        ("natural", {}),
    ],
)
def test_a_training_that_means_to_attack_nothing_is_not_flagged(run: Run, recipe: str, changes: dict[str, Any]) -> None:
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    judge_attacks(run, settings_from(recipe, changes), Progress(epoch=3), report)
    assert not said and "flags" not in run.read_json()


@pytest.mark.parametrize(("recipe", "waits"), [("hm-lga", True), ("adml", False), ("act", False), ("catride", False)])
def test_an_attack_that_never_began_is_flagged_with_advice_that_fits(run: Run, recipe: str, waits: bool) -> None:
    settings = settings_from(recipe, {"train.benign": 0.5})
    judge_attacks(run, settings, Progress(epoch=3, image_steps=8.0), Silent())
    assert "flags" not in run.read_json()
    judge_attacks(run, settings, Progress(epoch=3), Silent())
    (flag,) = run.read_json()["flags"]
    assert (flag["name"], flag["epoch"]) == ("no-attack", 3) and ("lga" in flag["text"]) == waits


@pytest.mark.medium
def test_a_natural_row_of_adml_ends_without_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    quick = {"train.epochs": 1, "model.dim": 8, "defence.attack_rate": 0.0}
    done = ah.fit(None, "digits", "adml", tmp_path / "a", overrides=quick, device="cpu", report=report).read_json()
    assert done["image_steps"] == 0 and not done.get("flags") and not [line for line in said if "warning" in line]
