"""A defence and an attack from outside the package: by name, as an object, audited, and never from a record."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import anchorhold as ah
from anchorhold import losses
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.recall import RecallGoal
from anchorhold.config.recipes import settings_from
from anchorhold.defences.own import OWN
from anchorhold.defences.step import Step
from anchorhold.errors import AnchorholdError, ModelError, RunError, SettingsError
from anchorhold.geometry import cosine
from anchorhold.perturb.problem import Objective

SHORT: dict[str, Any] = {"train": {"epochs": 1, "checkpoint_seconds": 0, "collapse_warmup": 9}}
MODULE = """
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor
from anchorhold import losses
from anchorhold.defences.step import Step

Path("imported").touch()

@dataclass(frozen=True)
class NoiseSettings:
    size: float = 0.05

def noise(step: Step, settings: NoiseSettings) -> Iterator[Tensor]:
    images = step.batch.images
    shift = step.key("noise").uniform(step.batch.ids, images.shape[1:], images.dtype) - 0.5
    e = step.embed((images + 2 * settings.size * shift).clamp(0, 1))
    chosen = step.mine("random", e.detach(), 0.2)
    yield losses.triplet(*(e[i] for i in (chosen.anchor, chosen.positive, chosen.negative)), 0.2)

def untyped(step, settings):
    yield

NUMBER = 3
"""


@dataclass(frozen=True)
class NoiseSettings:
    size: float = 0.05


def noise(step: Step, settings: NoiseSettings) -> Iterator[Tensor]:
    images = step.batch.images
    shift = step.key("noise").uniform(step.batch.ids, images.shape[1:], images.dtype) - 0.5
    e = step.embed((images + 2 * settings.size * shift).clamp(0, 1))
    chosen = step.mine("random", e.detach(), 0.2)
    yield losses.triplet(*(e[i] for i in (chosen.anchor, chosen.positive, chosen.negative)), 0.2)


@dataclass(frozen=True, kw_only=True)
class Centre(RecallGoal):
    """Move a query to the middle of the gallery."""

    pull: float = 1.0
    kept: ClassVar[str | None] = "centre"

    @property
    def name(self) -> str:
        return "centre"

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        middle = scene.gallery.mean(0)
        return Objective(lambda e, positions: -self.pull * cosine(e[:, 0], middle))


@dataclass(frozen=True, kw_only=True)
class Taken(Centre):
    @property
    def name(self) -> str:
        return "ES"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module of the user's, not yet imported."""
    (tmp_path / "ideas_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("ideas_of_mine", None)
    OWN.pop("ideas_of_mine:noise", None)


def trained(out: Path, **more: Any) -> ah.Dataset:
    ah.fit(None, ah.dataset("digits"), "natural", out, device="cpu", **more)
    return load_file(out / "model.safetensors")


def test_by_name_and_as_an_object_it_is_the_same(here: Path) -> None:
    named = trained(here / "a", overrides=SHORT | {"defence": {"name": "ideas_of_mine:noise", "size": 0.1}})
    given = trained(here / "b", overrides=SHORT | {"defence": {"size": 0.1}}, defence=noise)
    other = trained(here / "c", overrides=SHORT, defence=noise)
    assert all(torch.equal(named[name], given[name]) for name in named)
    assert not torch.equal(named["head.weight"], other["head.weight"])


def test_a_record_does_not_bring_it_in(here: Path) -> None:
    trained(here / "run", overrides=SHORT | {"defence": {"name": "ideas_of_mine:noise"}})
    record = here / "run" / "run.json"
    unfinished = record.read_text().replace('"status": "done"', '"status": "training"')
    record.write_text(unfinished)
    (here / "imported").unlink()
    sys.modules.pop("ideas_of_mine")
    OWN.pop("ideas_of_mine:noise")
    with pytest.raises(RunError, match=r"allow=\['ideas_of_mine:noise'\]"):
        ah.resume(here / "run", device="cpu")
    assert not (here / "imported").exists()
    ah.resume(here / "run", device="cpu", allow=["ideas_of_mine:noise"])
    assert (here / "imported").exists()
    record.write_text(unfinished)
    with pytest.raises(RunError, match=r"allow=\['ideas_of_mine:noise'\]"):  # known by now, and still not from a record
        ah.resume(here / "run", device="cpu")
    ah.load(here / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "ideas_of_mine:noise", "siz": 1}, r"no setting defence\.siz; did you mean defence\.size"),
        ({"name": "ideas_of_mine:nois"}, "did you mean noise"),
        ({"name": "ideas_of_mine:untyped"}, "frozen dataclass for settings"),
        ({"name": "ideas_of_mine:NUMBER"}, "it is an int"),
        ({"name": "nowhere:noise"}, "no module 'nowhere'"),
        ({"name": "hardnes"}, "did you mean hardness"),
    ],
)
def test_a_slip_is_one_line(here: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((SettingsError, ModelError), match=message):
        settings_from("hm-lga", {"defence": changes})


def test_an_attack_of_yours_is_audited_like_ours(tmp_path: Path) -> None:
    model, data = ah.Embedder("small", 16, channels=1, size=8), ah.dataset("digits")
    quick = {"limit": 12, "steps": 4, "eps": 0.2, "alpha": 0.1, "resamples": 9, "examine": None, "device": "cpu"}
    named = ah.audit(model, data, attacks=[f"{__name__}:Centre"], **quick)  # type: ignore[arg-type]
    given = ah.audit(model, data, attacks=["TMA", Centre()], **quick)  # type: ignore[arg-type]
    for protocol in ("published", "corrected"):
        mine = given.protocols[protocol].columns["centre"]
        assert named.protocols[protocol].columns["centre"] == mine
        assert mine.initial is not None and mine.value <= mine.initial
    assert "TMA" in given.protocols["corrected"].columns
    strong = ah.audit(model, data, attacks=[Centre()], strength="strong", **quick)  # type: ignore[arg-type]
    assert strong.protocols["strong"].columns["centre"].value <= named.protocols["corrected"].columns["centre"].value
    strong.save(tmp_path)
    with pytest.raises(SettingsError, match="ES is the name of an attack of ours"):
        ah.audit(model, data, attacks=[Taken()], **quick)  # type: ignore[arg-type]
    with pytest.raises(AnchorholdError, match="an attack is a Goal"):
        ah.audit(model, data, attacks=[f"{__name__}:noise"], **quick)  # type: ignore[arg-type]


def quiet(step: Step, settings: NoiseSettings) -> Iterator[Tensor]:
    """Another defence with settings of the same kind."""
    e = step.embed(step.batch.images)
    chosen = step.mine("random", e.detach(), 0.2)
    yield losses.triplet(*(e[i] for i in (chosen.anchor, chosen.positive, chosen.negative)), 0.2)


class Scaled:
    """A defence as an object."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, step: Step, settings: NoiseSettings) -> Iterator[Tensor]:
        for loss in quiet(step, settings):
            yield self.by * loss


@pytest.mark.slow
def test_two_defences_may_have_settings_of_one_kind(tmp_path: Path) -> None:
    weights = {}
    for name, defence in (("noise", noise), ("quiet", quiet), ("object", Scaled(1.0)), ("part", partial(quiet))):
        weights[name] = trained(tmp_path / name, overrides=SHORT, defence=defence)["head.weight"]
        told = json.loads((tmp_path / name / "run.json").read_text())["settings"]["defence"]["name"]
        assert told.rpartition(":")[2] == {"object": "Scaled", "part": "quiet"}.get(name, name)
    assert torch.equal(weights["quiet"], weights["part"]) and torch.equal(weights["quiet"], weights["object"])
    assert not torch.equal(weights["noise"], weights["quiet"])


def test_rows_of_an_attack_that_changed_are_not_used_again(tmp_path: Path) -> None:
    model, data = ah.Embedder("small", 16, channels=1, size=8), ah.dataset("digits")
    quick = {"limit": 12, "steps": 4, "eps": 0.2, "alpha": 0.1, "resamples": 9, "examine": None, "device": "cpu"}
    ah.audit(model, data, attacks=[Centre()], out=tmp_path / "a", **quick)  # type: ignore[arg-type]
    ah.audit(model, data, attacks=[Centre()], out=tmp_path / "a", **quick)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="holds rows of another audit"):
        ah.audit(model, data, attacks=[Centre(pull=-1.0)], out=tmp_path / "a", **quick)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="twice"):
        ah.audit(model, data, attacks=[Centre(), Centre(pull=2.0)], **quick)  # type: ignore[arg-type]
