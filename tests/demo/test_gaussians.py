"""The demonstration of ADML's appendix E, shortened: what it trains, attacks, writes and says."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorhold.cli import main as cli
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.demo.gaussians import ATTACKS, EPS, SIDE, attacked, pictures, run_gaussians, table
from anchorhold.errors import RunError, SettingsError
from anchorhold.geometry import euclidean
from anchorhold.model.embedder import Embedder, load_embedder
from anchorhold.random import Key

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {"train": {"epochs": 1}, "optimiser": {"lr": 1e-4}}


class Told(Silent):
    """Remembers what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.slow
def test_it_trains_attacks_writes_and_tells(tmp_path: Path) -> None:
    report = Told()
    result = run_gaussians(tmp_path, seed=3, side=5, report=report, overrides=QUICK)
    assert json.loads((tmp_path / "gaussians.json").read_text()) == result
    assert result["points"] == [508, 516] and result["inputs"] == 75 and result["network"] == "75 → 128 → 128 → 2"
    rates = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in ("natural", "robust")}
    for name, rate in (("natural", 0.0), ("robust", 1.0)):
        assert rates[name]["settings"]["defence"]["attack_rate"] == rate == result[name]["attack_rate"]
        assert rates[name]["settings"]["optimiser"]["lr"] == 1e-4 == result["lr"]
        assert rates[name]["settings"]["train"]["seed"] == 3 and result[name]["steps"] == 508 // result["batch"]
        # What the JSON says is what the saved model does.
        found, _ = attacked(load_embedder(tmp_path / name), pictures(3, 5).test, Key.of(3)("gaussians"))
        assert found.items() <= result[name].items()
    assert (tmp_path / "gaussians.png").read_bytes().startswith(b"\x89PNG") and result["figure"]
    lines = table(result).splitlines()
    assert lines[1].split()[0] == "natural" and float(lines[2].split()[1]) == round(result["robust"]["clean"], 1)
    assert "learning rate 0.0001" in table(result) and "seeds 0 to 3" in table(result)
    assert not any("matplotlib" in line for line in report.lines)


@pytest.mark.slow
def test_without_matplotlib_it_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = Told()
    result = run_gaussians(tmp_path, side=4, report=report, overrides=QUICK)
    assert "figure" not in result and not (tmp_path / "gaussians.png").exists()
    assert json.loads((tmp_path / "gaussians.json").read_text()) == result
    assert "anchorhold[plots]" in report.lines[-1]


def test_the_pictures_are_the_papers() -> None:
    data = pictures(1, 20)
    for split in (data.train, data.test):
        assert split.images is not None and split.images.shape[1:] == (20, 20, 3)
        for label, mean in ((0, 0.25), (1, 0.75)):
            own = split.images[split.labels == label]
            assert len(own) == len(split) // 2
            assert float(own.mean()) == pytest.approx(mean, abs=1e-3)
            assert float(own.std()) == pytest.approx(0.025, abs=1e-3)


def test_the_figure_shows_what_the_attack_did() -> None:
    torch.manual_seed(0)
    data, model = pictures(0, 16), Embedder("mlp", dim=2, channels=3, size=16, seed=3)
    found, circle = attacked(model, data.test, Key.of(0))
    assert len(circle.shown.unique()) == 16 and set(found["attacked"]) == set(ATTACKS)
    assert found["attacked"]["margin"] <= found["attacked"]["nearest"] <= found["clean"] == 100
    for place, (point, neighbour) in enumerate(zip(circle.shown.tolist(), circle.neighbours.tolist())):
        away = euclidean(circle.moved[place], circle.clean)
        away[point] = torch.inf
        assert int(away.argmin()) == neighbour != point
    shift = euclidean(circle.moved, circle.clean[circle.shown])
    assert shift.min() > 0 and found["shift"] == pytest.approx(float(shift.mean()), rel=0.5)


def test_it_attacks_as_print_does_and_harder() -> None:
    first, second = ATTACKS["nearest"], ATTACKS["margin"]
    assert (EPS, first.steps, first.start) == (0.01, 5, "random") and first.alpha == pytest.approx(0.004)
    assert second.steps == 40 and second.keep == "best"
    settings = settings_from("adml-contrastive", {"data": {"name": "gaussians"}})
    assert settings.train.epochs == 25 and settings.defence.eps == EPS and settings.model.dim == 2


def test_what_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "natural").mkdir()
    (tmp_path / "natural" / "run.json").write_text('{"schema": "anchorhold.run/1", "data": {"name": "digits"}}')
    with pytest.raises(RunError, match="choose another out="):
        run_gaussians(tmp_path, side=4, report=Silent(), overrides=QUICK)
    with pytest.raises(SettingsError, match="at least 1"):
        run_gaussians(tmp_path, side=0, report=Silent())


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []

    def quick(out: Path, *, seed: int, side: int, report: Any) -> dict[str, Any]:
        asked.append((out, seed, side))
        return run_gaussians(out, seed=seed, side=4, report=Silent(), overrides=QUICK)

    monkeypatch.setattr("anchorhold.demo.gaussians.run_gaussians", quick)

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["anchorhold", "demo", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), "".join(capsys.readouterr())

    code, text = run("gaussians", "--out", str(tmp_path), "--seed", "5")
    assert code == 0 and "robust" in text and "gaussians.json" in text and "gaussians.png" in text
    assert asked == [(tmp_path, 5, SIDE)]
    code, text = run("gaussian")
    assert code == 2 and "did you mean gaussians" in text
    code, text = run("--side", "4", "--out", str(tmp_path))
    assert code == 2 and "--side" in text
