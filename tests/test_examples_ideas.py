"""examples/ideas.py: a data set, a sampler, a defence and an attack of one file, from Python and the command line."""

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import anchorhold as ah
from anchorhold.auditing.result import Audit
from anchorhold.cli import main as cli
from anchorhold.defences.own import OWN
from anchorhold.triplets import View

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
AUDIT: dict[str, Any] = {"eps": 0.1, "alpha": 0.03, "limit": 400, "resamples": 200, "device": "cpu", "examine": None}


@pytest.fixture
def ideas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The file in a folder of the user's."""
    for name in ("ideas.py", "ideas.toml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("ideas")
    sys.modules.pop("ideas", None)
    OWN.pop("ideas:pull", None)


def told(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_file_is_short() -> None:
    assert len((EXAMPLES / "ideas.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
def test_from_python_the_defence_holds_better_than_training_without_it(ideas: ModuleType, tmp_path: Path) -> None:
    def trained_and_audited(name: str, **changes: Any) -> Audit:
        run = ah.fit(None, "ideas:numerals", "ideas.toml", tmp_path / name, overrides=changes, device="cpu")
        attacks = ["ES", ideas.Centre()]
        audit = ah.audit(ah.load(run.path), ideas.numerals(), attacks=attacks, protocols="corrected", **AUDIT)
        assert audit.data["classes"] == 5 and not audit.notes  # of the test part
        return audit

    hard = trained_and_audited("hard", defence={"name": "ideas:pull", "eps": 0.15})
    easy = trained_and_audited("easy", defence={"eps": 0.0, "steps": 0})
    held, fell = (each.protocols["corrected"].columns for each in (hard, easy))
    assert hard.clean["R@1"].value > 80
    assert held["ES:R"].value > fell["ES:R"].value + 5 and held["centre"].value >= fell["centre"].value
    initial = held["centre"].initial
    assert initial is not None and held["centre"].value < initial - 5  # the attack does something


@pytest.mark.slow
def test_from_the_command_line(ideas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    short = ["--recipe", "ideas.toml", "--epochs", "1", "--out", "run", "--device", "cpu"]
    code, _, err = told(monkeypatch, capsys, "train", "ideas:numerals", *short)
    assert code == 0, err
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["settings"]["defence"]["name"] == "ideas:pull" and info["settings"]["data"]["name"] == "ideas:numerals"
    quick = ["--attacks", "TMA,ideas:Centre", "--eps", "0.1", "--alpha", "0.03", "--steps", "4", "--limit", "10"]
    words = ["run", "--data", "ideas:numerals", *quick, "--strength", "strong", "--out", "audit", "--device", "cpu"]
    code, out, err = told(monkeypatch, capsys, "audit", *words)
    assert code == 0 and "centre" in out and "--allow ideas:Centre" in out, err
    found = json.loads((tmp_path / "audit" / "audit.json").read_text())["protocols"]
    assert found["strong"]["columns"]["centre"]["value"] <= found["corrected"]["columns"]["centre"]["value"]
    check = ["verify", "audit", "--model", "run", "--data", "ideas:numerals", "--device", "cpu"]
    code, _, err = told(monkeypatch, capsys, *check)
    assert code == 2 and err.count("\n") == 1 and "--allow" in err
    code, out, err = told(monkeypatch, capsys, *check, "--allow", "ideas:Centre")
    assert code == 0 and "centre" in out, err
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    code, _, err = told(monkeypatch, capsys, "resume", "run", "--device", "cpu", "--allow", "ideas:pull")
    assert code == 2 and "--allow ideas:numerals" in err
    both = ["--allow", "ideas:pull", "--allow", "ideas:numerals"]
    code, _, err = told(monkeypatch, capsys, "resume", "run", "--device", "cpu", *both)
    assert code == 0, err


def test_the_sampler_draws_near_negatives(ideas: ModuleType) -> None:
    distances = torch.tensor([[0.0, 0.5, 0.2, 1.0], [0.5, 0.0, 0.9, 0.1]])
    same = torch.tensor([[True, True, False, False]] * 2)
    positives, chances = ideas.near(View(distances, same, torch.tensor([1, 0]), 8))
    assert positives.tolist() == [[False, True, False, False], [True, False, False, False]]
    assert chances[:, :2].sum() == 0 and chances[0, 2] > chances[0, 3] and chances[1, 3] > chances[1, 2]


@pytest.mark.medium
def test_the_sampler_by_name(ideas: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    changes = {"defence": {"sampler": "ideas:near"}, "train": {"epochs": 1}}
    run = ah.fit(None, "digits", "natural", "python", overrides=changes, device="cpu")
    words = ["train", "digits", "--recipe", "natural", "--set", "defence.sampler=ideas:near", "--epochs", "1"]
    code, _, err = told(monkeypatch, capsys, *words, "--out", "command", "--device", "cpu")
    assert code == 0, err
    for folder in (run.path, Path("command")):
        info = json.loads((folder / "run.json").read_text())
        assert info["status"] == "done" and info["settings"]["defence"]["sampler"] == "ideas:near"
    one, two = (ah.load(folder).state_dict() for folder in (run.path, "command"))
    usual = ah.fit(None, "digits", "natural", "usual", overrides={"train": {"epochs": 1}}, device="cpu")
    other = ah.load(usual.path).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "ideas:numeral", "--recipe", "ideas.toml"], "did you mean numerals"),
        (["train", "ideas:numerals", "--recipe", "ideas.toml", "--root", "x"], "has no argument 'root'"),
        (
            ["train", "ideas:numerals", "--recipe", "ideas.toml", "--set", "defence.epsilon=1"],
            "did you mean defence.eps",
        ),
        (["train", "ideas:pull", "--recipe", "ideas.toml"], "ideas:pull fails (TypeError"),
        (["train", "digits", "--recipe", "ideas.toml", "--set", "defence.name=ideas:near"], "frozen dataclass"),
    ],
)
def test_a_slip_is_one_line(
    ideas: ModuleType, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code, _, err = told(monkeypatch, capsys, *words, "--out", "none", "--device", "cpu")
    assert code == 2 and message in err and err.count("\n") == 1 and not Path("none").exists()
