"""Receipts of an attack of the user's own: checked with code that the user names, and never with code a file names."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anchorhold as ah
from anchorhold.auditing.verifying import verify
from anchorhold.cli import main as cli
from anchorhold.errors import AnchorholdError, RunError, SettingsError
from anchorhold.extensions import USER, imported

pytestmark = pytest.mark.medium

MODULE = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from anchorhold.attacks.recall import RecallGoal
from anchorhold.geometry import cosine
from anchorhold.perturb.problem import Objective

Path("imported").touch()


@dataclass(frozen=True, kw_only=True)
class Centre(RecallGoal):
    pull: float = 1.0
    parts: tuple[int, ...] = (1, 2)
    kept: ClassVar[str | None] = "centre"

    @property
    def name(self):
        return "centre"

    def objective(self, scene, ids, targets):
        middle = scene.gallery.mean(0)
        return Objective(lambda e, positions: -self.pull * cosine(e[:, 0], middle))


class Away(Centre):
    @property
    def name(self):
        return "../away"
"""
QUICK: dict[str, Any] = {"limit": 8, "steps": 3, "eps": 0.2, "alpha": 0.1, "resamples": 9, "examine": None}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "theirs_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    model = ah.Embedder("small", 16, channels=1, size=8)
    model.save(tmp_path / "m.safetensors")
    attacks = {"TMA": {}, "theirs_of_mine:Centre": {"pull": 2.0}}
    ah.audit(model, ah.dataset("digits"), attacks=attacks, strength="strong", out="audit", device="cpu", **QUICK)
    (tmp_path / "imported").unlink()
    sys.modules.pop("theirs_of_mine")
    yield tmp_path
    sys.modules.pop("theirs_of_mine", None)


def told(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anchorhold", "verify", "audit", "--model", "m.safetensors", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_it_is_checked_with_the_code_that_the_user_names(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code, _, err = told(monkeypatch, capsys, "--data", "digits", "--device", "cpu")
    assert code == 2 and err.count("\n") == 1 and "theirs_of_mine:Centre" in err and "--allow" in err
    assert not (here / "imported").exists()
    allow = ["--allow", "theirs_of_mine:Centre"]
    code, out, err = told(monkeypatch, capsys, "--data", "digits", "--device", "cpu", *allow)
    assert code == 0 and "centre:pull=2.0" in out and (here / "imported").exists(), err
    receipts = here / "audit" / "receipts" / "receipts.json"
    stated = json.loads(receipts.read_text())
    assert stated["goals"]["centre"]["code"] == "theirs_of_mine:Centre" and "code" not in stated["goals"]["TMA"]
    stated["receipts"]["centre"][0]["measure"] = 1 - stated["receipts"]["centre"][0]["measure"]
    receipts.write_text(json.dumps(stated))
    code, out, err = told(monkeypatch, capsys, "--data", "digits", "--device", "cpu", *allow)
    assert code == 2 and "hash differs" in out


@pytest.mark.slow
def test_in_python_an_object_or_a_class_will_do(here: Path) -> None:
    model, data = ah.load(here / "m.safetensors"), ah.dataset("digits")
    imported("theirs_of_mine:Centre", USER)
    module = sys.modules["theirs_of_mine"]
    for allow in ([module.Centre], [module.Centre(pull=2.0)], ["theirs_of_mine:Centre"]):
        assert not verify("audit", model, data, device="cpu", allow=allow).problems
    with pytest.raises(RunError, match="no attack is called 'centre' here"):
        verify("audit", model, data, device="cpu")
    with pytest.raises(SettingsError, match="allow is a list"):
        verify("audit", model, data, device="cpu", allow="theirs_of_mine:Centre")
    with pytest.raises(AnchorholdError, match="an attack is a Goal"):
        verify("audit", model, data, device="cpu", allow=["anchorhold.losses:triplet"])
    with pytest.raises(SettingsError, match="the name of an attack is letters"):  # it becomes a folder
        ah.audit(model, data, attacks=[module.Away()], device="cpu", **QUICK)
