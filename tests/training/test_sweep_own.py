"""A sweep of a module of the user's: a new one for each run, resumed and audited with it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anchorhold as ah
from anchorhold.cli import main as cli
from anchorhold.errors import ModelError, RunError, SettingsError
from anchorhold.runs.folder import Run
from anchorhold.training.sweeping import sweep

pytestmark = pytest.mark.medium

MODULE = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))

ONE = net()
"""
QUICK: dict[str, Any] = {"train": {"epochs": 1, "collapse_warmup": 9}, "batch": {"pairs": 64}}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("nets_of_mine", None)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))


def told(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_every_run_trains_a_new_module(here: Path) -> None:
    audited = {"limit": 6, "steps": 1, "eps": 0.1, "alpha": 0.1, "attacks": ("ES",), "resamples": 5}
    common: dict[str, Any] = {"overrides": QUICK, "audited": audited, "model": net, "device": "cpu"}
    vary = {"optimiser.lr": ["1e-3", "1e-2"]}
    swept = sweep(ah.dataset("digits"), "natural", vary, "swept", **common)
    assert len(swept.tables[0].rows) == 2 and not swept.problems
    weights = {}
    for rate in ("1e-3", "1e-2"):
        place = here / "swept" / f"optimiser.lr={rate}"
        assert Run(place).read_json()["status"] == "done" and (place / "audit" / "audit.json").exists()
        weights[rate] = ah.load(place, module=net()).module[1].weight
    assert not torch.equal(weights["1e-3"], weights["1e-2"])
    torch.manual_seed(0)
    first = net()
    ah.fit(first, ah.dataset("digits"), "natural", "alone", overrides={**QUICK, "optimiser.lr": 1e-3}, device="cpu")
    assert torch.equal(first[1].weight, weights["1e-3"])  # type: ignore[index]  # the start depends on the seed alone
    again = sweep(ah.dataset("digits"), "natural", vary, "swept", **common)  # nothing is left to do
    assert again.tables[0].rows == swept.tables[0].rows
    with pytest.raises(RunError, match="other settings"):
        sweep(ah.dataset("digits"), "natural", vary, "swept", overrides={**QUICK, "train.seed": 3}, model=net)


def test_a_stopped_sweep_goes_on_with_the_module(here: Path) -> None:
    common: dict[str, Any] = {"overrides": QUICK, "model": net, "device": "cpu"}
    sweep(ah.dataset("digits"), "natural", {"train.seed": ["0", "1"]}, "swept", **common)
    place = here / "swept" / "train.seed=1"
    whole = Run(place).read_json()
    record = place / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    sweep(ah.dataset("digits"), "natural", {"train.seed": ["0", "1"]}, "swept", **common)
    assert Run(place).read_json()["weights"] == whole["weights"]


def test_on_the_command_line(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    quick = ["--recipe", "natural", "--device", "cpu", "--set", "train.epochs=1", "--set", "batch.pairs=64"]
    quick += ["--set", "train.collapse_warmup=9", "--limit", "6", "--audit-steps", "1", "--out", "swept"]
    common = ["sweep", "digits", *quick, "--model", "nets_of_mine:net"]
    code, out, err = told(monkeypatch, capsys, *common, "--vary", "train.seed=0,1", "--mean", ".5", "--std", ".5")
    assert code == 0 and "written: swept/compare.md" in out, err
    config = Run(here / "swept" / "train.seed=1").read_json()["model"]["config"]
    assert config["mean"] == [0.5] and config["module"].endswith("Sequential")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nets_of_mine:ONE", "--vary", "train.seed=0,1"], "gives the same module twice"),
        (["--model", "nets_of_mine:net", "--vary", "model.dim=4,8"], "your module brings what model.dim would set"),
        (["--model", "nets_of_mine:nett", "--vary", "train.seed=0,1"], "did you mean net"),
        (["--vary", "train.seed=0,1", "--mean", ".5"], "are for --model"),
    ],
)
def test_a_slip_is_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    quick = ["--recipe", "natural", "--device", "cpu", "--set", "train.epochs=1", "--set", "batch.pairs=64"]
    quick += ["--set", "train.collapse_warmup=9", "--no-audit", "--out", "swept"]
    code, _, err = told(monkeypatch, capsys, "sweep", "digits", *quick, *words)
    assert code == 2 and message in err.splitlines()[-1]


def test_modules_that_are_one_are_refused_in_python() -> None:
    one = net()
    with pytest.raises(ModelError, match="same module twice"):
        sweep(ah.dataset("digits"), "natural", {"train.seed": ["0", "1"]}, "s", overrides=QUICK, model=lambda: one)
    with pytest.raises(SettingsError, match="your module brings"):
        sweep(ah.dataset("digits"), "natural", {"model.backbone": ["small"]}, "s", overrides=QUICK, model=net)
