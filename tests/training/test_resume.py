"""Killed and resumed: every defence, pretraining and command ends bit for bit as if nothing had happened.

A kill of a training is an exception at a chosen step. It reaches no code that could save. A kill of a command is a
SIGKILL inside one of its writes, in a fork of this process, where torch is loaded already.
"""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kills import Writes, cases, differing, ended, facts, forked

import anchorhold as ah
from anchorhold.config.build import to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import DEFENCE_SETTINGS
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.step import Step
from anchorhold.extensions import code_named_in
from anchorhold.pretraining.menu import PRETRAININGS
from anchorhold.runs.folder import Run

pytestmark = pytest.mark.medium

STEPS = 10  # of a whole run: two epochs of five


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    """So few digits that an epoch has five steps."""
    whole = ah.dataset("digits")
    return replace(
        whole,
        train=whole.train.keep(torch.arange(len(whole.train)) < 150),
        test=whole.test.keep(torch.arange(len(whole.test)) < 60),
    )


# Every defence and every pretraining ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A recipe with settings under which a run has something to forget."""

    recipe: str
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: Callable[[], ah.Embedder] | None = None

    @property
    def defence(self) -> str:
        return str(to_dict(settings_from(self.recipe, {"data": {"name": "digits"}}))["defence"]["name"])

    def overrides(self) -> dict[str, Any]:
        settings = to_dict(settings_from(self.recipe, {"data": {"name": "digits"}}))
        quick: dict[str, dict[str, Any]] = {
            "train": {"epochs": 2, "evaluate_every": 1, "checkpoint_seconds": 0, "collapse_warmup": 9},
            "batch": BATCHES[settings["batch"]["kind"]],
            "data": {"crop": 6, "flip": True},  # so that augmentation counts too
            "defence": {"steps": 2} if "steps" in settings["defence"] and self.recipe != "proxy" else {},
            "optimiser": {"schedule": "cosine"},  # by the steps of the whole run, however often it is stopped
        }
        if self.model is None:
            quick["model"] = {"backbone": "small", "dim": 8, "weights": ""}
        return {name: {**quick.get(name, {}), **self.sections.get(name, {})} for name in {*quick, *self.sections}}

    def resume(self, data: ah.Dataset, out: Path) -> Run:
        return ah.resume(out, data=data, device="cpu", allow=list(code_named_in(self.sections)))

    def fit(self, data: ah.Dataset, out: Path) -> Run:
        model, overrides = self.model() if self.model else None, self.overrides()
        if "teacher" in overrides["defence"]:  # a run folder beside this one
            overrides["defence"]["teacher"] = str(out.parent / "teacher.safetensors")
            ah.Embedder("small", 8, channels=1, size=6, seed=7).save(out.parent / "teacher.safetensors")
        return ah.fit(model, data, self.recipe, out, overrides=overrides, device="cpu")


def live() -> ah.Embedder:
    """A model whose BatchNorm has running statistics."""
    return ah.Embedder("test_resnet", 8, channels=1, size=6, freeze_batchnorm=False)


BOOSTED: dict[str, Any] = {"destination": "semihard", "boost": 0.1, "ics": 0.5, "steps": 2}  # both need the loss before

BATCHES = {"pairs": {"pairs": 32}, "classes": {"classes": 5, "instances": 6}, "images": {"images": 32}}
ONE_CYCLE: dict[str, Any] = {
    "optimiser": {"schedule": "one-cycle"},
    "data": {"crop": 6, "crop_least": 0.6, "jitter": 0.3},
}
AWP: dict[str, Any] = {"awp": 0.01, "awp_from": 1, "clean": 0.4, "steps": 2}  # begins in the second epoch
TAUGHT: dict[str, Any] = {"steps": 2, "cutmix": 0.5, "teacher": "TEACHER", "drift": 0.01}
PROXY_ANCHOR = "pytorch_metric_learning.losses:ProxyAnchorLoss"
HARDENED: dict[str, Any] = {"triplets": 0.5, "triplet_attack": "hm"}  # remembers the loss before
YOURS: dict[str, Any] = {"loss": PROXY_ANCHOR, "steps": 2, "awp": 0.01, "teacher": "TEACHER", **HARDENED}

CASES = {
    "natural": Case("natural"),
    "madry": Case("madry"),
    "trades": Case("trades"),
    "proxy": Case("proxy", ONE_CYCLE),
    "proxy min-max": Case("proxy-minmax", {"defence": AWP, "train": {"ema": 0.9}, **ONE_CYCLE}),
    "proxy trades": Case("proxy-trades", {"defence": {"loss": "proxy-anchor", "beta_warm": 0.9, "steps": 2}}),
    "proxy live": Case("proxy-minmax", {"defence": {"awp": 0.01, "steps": 2}}, model=live),
    "robust": Case("robust", {"defence": TAUGHT, **ONE_CYCLE}),
    "proxy yours": Case("proxy-minmax", {"defence": YOURS, "batch": {"kind": "pairs", "pairs": 32}}),
    "mean of late weights": Case("proxy", {"train": {"mean_from": 0.3}}),
    "mean of the weights": Case("natural", {"train": {"ema": 0.9}}),
    "hardness": Case("hm-lga"),
    "hardness boosted": Case("hm-lga", {"defence": BOOSTED}),
    "hardness benign": Case("hm-lga", {"train": {"benign": 0.5, "ema": 0.9}}),
    "free": Case("hm-free"),
    "free carried": Case("hm-free", {"defence": {"steps": 2, "carry": True, "reuse": "loss", "destination": 0.0}}),
    "act": Case("act"),
    "est": Case("est", model=live),
    "ses": Case("ses"),
    "rest": Case("rest"),
    "tride": Case("catride"),
    "tride adaptive": Case("catride", {"defence": {"steps": 2, "adaptive": 60.0, "sampler": "softhard", "ics": 0.5}}),
    "adml": Case("adml", {"data": {"crop": 6, "crop_least": 0.6}}),
    "classify": Case("classify"),
    "distil": Case("distil"),
    "distil-logits": Case("distil-logits"),
    "distil-logits live": Case("distil-logits", model=live),
}


def test_no_defence_is_left_out() -> None:
    assert {case.defence for case in CASES.values()} == set(DEFENCE_SETTINGS)


class Killed(BaseException):
    """As a kill: no `except Exception` stops it."""


def dying_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, after: bool) -> None:
    """The defence dies in that call of its generator, before its first loss or after its last optimiser step."""
    pretraining = PRETRAININGS.get(name)
    known, calls = pretraining.run if pretraining else DEFENCES[name], iter(range(1, 99))

    def dying(step: Step, settings: Any) -> Any:
        here = next(calls) == call
        if here and not after:
            raise Killed
        yield from known(step, settings)
        if here:
            raise Killed

    if pretraining:
        monkeypatch.setitem(PRETRAININGS, name, replace(pretraining, run=dying))
    else:
        monkeypatch.setitem(DEFENCES, name, dying)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_killed_training_ends_the_same(
    name: str, digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    alone = case.fit(digits, tmp_path / "alone")
    wanted = facts(alone.path)
    assert alone.metrics()[-1]["step"] == STEPS and {"model.safetensors", "last.safetensors"} <= wanted.keys()
    # In the first epoch with a step that was taken and not saved; then in the second, after an odd number of steps.
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dying_at(patch, case.defence, 3, after=True)
        case.fit(digits, tmp_path / "killed")
    killed = Run(tmp_path / "killed")
    assert step_of(killed) == 2 and not (killed.path / "model.safetensors").exists()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dying_at(patch, case.defence, 6, after=False)
        case.resume(digits, killed.path)
    assert step_of(killed) == 7
    case.resume(digits, killed.path)
    assert not list(differing(wanted, facts(killed.path)))


def step_of(run: Run) -> int:
    loaded = run.load()
    assert loaded is not None
    return int(loaded[1]["step"])


@pytest.mark.parametrize("name", ["classify", "distil"])
def test_the_companion_of_a_pretraining_is_saved(name: str, digits: ah.Dataset, tmp_path: Path) -> None:
    loaded = CASES[name].fit(digits, tmp_path / "run").load()
    assert loaded is not None and any(each.startswith("companion.") for each in loaded[0])


# Every command ----------------------------------------------------------------------------------------------

COMMANDS = ("train hm-lga", "train classify", "audit", "strong audit", "embed", "sweep")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_ends_the_same(name: str, tmp_path: Path) -> None:
    """SIGKILL with half of a file written, before and after a file gets its name, and with half a line of metrics."""
    work, counts, log = cases(tmp_path)[name], tmp_path / "counts.json", tmp_path / "log"

    def run(out: str, part: str = "", at: int = 0) -> int:
        return ended(forked(work, tmp_path / out, Writes(part, at), counts, log), None)

    assert run("alone") == 0, log.read_text()
    wanted, moments = facts(tmp_path / "alone"), json.loads(counts.read_text())
    assert wanted and moments["before"] > 2
    for part in (part for part in ("half", "before", "after", "line") if moments[part]):
        # From the middle: a resumed command has fewer writes before its end.
        assert run("killed", part, max(moments[part] // 5, 1)) == -signal.SIGKILL, log.read_text()
    assert run("killed") == 0, log.read_text()
    assert not list(differing(wanted, facts(tmp_path / "killed")))
