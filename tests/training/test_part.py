"""A part of a model is trained: the head or adapters; killed, resumed, exported without adapters, and attacked."""

import os
import signal
import sys
from copy import deepcopy
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kills import differing, facts
from torch import Tensor, nn

import anchorhold as ah
import anchorhold.training.trainer
from anchorhold.console import Silent
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.step import Step
from anchorhold.errors import SettingsError
from anchorhold.model.trainable import Trainable
from anchorhold.runs.folder import Run

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {
    "train": {"epochs": 2, "evaluate_every": 1, "checkpoint_seconds": 0, "collapse_warmup": 9},
    "batch": {"pairs": 32},
    "optimiser": {"lr": 1e-3},
}
PARTS = {
    "all": {},
    "head": {"train": "head"},
    "lora": {"train": "lora", "lora_rank": 4, "lora_dropout": 0.2},
}


class Tall(nn.Module):
    """Dropout, tied weights, BatchNorm, and images of 10 × 6."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.wide = nn.Linear(16 * 15, 24)
            self.drop, self.one, self.two = nn.Dropout(0.2), nn.Linear(24, 24), nn.Linear(24, 24)
            self.last = nn.Linear(24, 12)
        self.two.weight = self.one.weight

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[1:] == (1, 10, 6)
        x = torch.relu(self.norm(self.first(images)))
        x = torch.relu(self.wide(nn.functional.max_pool2d(x, 2).flatten(1)))
        out: Tensor = self.last(torch.relu(self.two(torch.relu(self.one(self.drop(x))))))
        return out


@pytest.fixture(scope="module")
def tall() -> dict[str, Any]:
    """Digits of 10 × 6 pixels, as tensors."""
    digits = ah.dataset("digits")

    def part(split: ah.Split, count: int) -> tuple[Tensor, Tensor]:
        assert split.images is not None
        images = split.images[:count].permute(0, 3, 1, 2).float() / 255
        return nn.functional.interpolate(images, (10, 6), mode="area"), split.labels[:count]

    return {"train": part(digits.train, 150), "test": part(digits.test, 60)}


def fit(out: Path, data: Any, part: str, net: nn.Module | None = None) -> Any:
    net = net or Tall()
    overrides = QUICK | {"model": {**PARTS[part], "freeze_batchnorm": False}}
    overrides |= {"defence": {"steps": 2, "destination": "semihard"}}  # perturbs from the first step on
    ah.fit(net, data, "hm-lga", out, overrides=overrides, device="cpu")
    return net


def dies(step: int, out: Path, data: Any, part: str) -> None:
    """A training that is killed (SIGKILL) inside a step."""
    known, calls = DEFENCES["hardness"], iter(range(99))

    def dying(step_: Any, settings: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from known(step_, settings)

    DEFENCES["hardness"] = dying
    torch.set_num_threads(1)
    fit(out, data, part)


@pytest.mark.parametrize("part", PARTS)
def test_a_module_is_killed_and_ends_the_same(part: str, tall: Any, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", tall, part)
    child = get_context("spawn").Process(target=dies, args=(7, tmp_path / "cut", tall, part))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    loaded = Run(tmp_path / "cut").load()
    assert loaded is not None and (loaded[1]["epoch"], loaded[1]["index"]) == (1, 2)  # in the middle of an epoch
    assert any(".lora_A." in name for name in loaded[0]) == (part == "lora")
    torch.rand(3)
    net = Tall(9)
    ah.resume(tmp_path / "cut", model=net, data=tall, device="cpu")
    assert not list(differing(facts(tmp_path / "whole"), facts(tmp_path / "cut")))
    for name, value in whole.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert net.two.weight is net.one.weight


@pytest.mark.parametrize("part", PARTS)
def test_only_that_part_changes_and_it_loads_without_peft(
    part: str, tall: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Tall().state_dict()
    net = fit(tmp_path / "run", tall, part).eval()
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    head, adapted = {"last.weight", "last.bias"}, {"first.weight", "wide.weight"}
    assert changed == {"all": set(before), "head": head, "lora": head | adapted}[part]
    assert (statistics <= changed) == (part == "all")
    monkeypatch.setitem(sys.modules, "peft", None)
    again, x = ah.load(tmp_path / "run", module=Tall(3)), tall["test"][0]
    assert torch.equal(again(x), ah.wrap(net)(x))
    assert all(p.requires_grad for p in net.parameters()) and set(net.state_dict()) == set(before)


@pytest.mark.parametrize("part", PARTS)
def test_the_inner_attack_is_that_of_the_plain_module(
    part: str, tall: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every perturbed batch of a training is found again, bit for bit, on a deep copy that is no frozen view."""
    known, seen = Step.perturb, []

    def watched(self: Step, embed: Any, *rest: Any, **more: Any) -> Tensor:
        found = known(self, embed, *rest, **more)
        again = known(self, deepcopy(self.model).eval().requires_grad_(False), *rest, **more)
        seen.append((torch.equal(again, found), not torch.equal(found, rest[0])))
        return found

    monkeypatch.setattr(Step, "perturb", watched)
    fit(tmp_path / "run", tall, part)
    assert len(seen) == 10 and all(same and moved for same, moved in seen)


@pytest.mark.parametrize("part", ["head", "lora"])
def test_an_embedder_s_part_resumes_from_its_folder(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ah.dataset("digits")
    data = replace(whole, train=whole.train.keep(torch.arange(150)), test=whole.test.keep(torch.arange(60)))
    overrides = QUICK | {"model": {**PARTS[part], "backbone": "small", "dim": 8, "weights": ""}}
    overrides |= {"train": QUICK["train"] | {"ema": 0.9}}
    ah.fit(None, data, "natural", tmp_path / "a", overrides=overrides, device="cpu")
    natural, calls = DEFENCES["natural"], iter(range(99))

    def dying(step: Any, settings: Any) -> Any:
        if next(calls) == 6:
            raise KeyboardInterrupt
        yield from natural(step, settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(DEFENCES, "natural", dying)
        ah.fit(None, data, "natural", tmp_path / "b", overrides=overrides, device="cpu")
    torch.rand(5)
    ah.resume(tmp_path / "b", data=data, device="cpu")
    assert not list(differing(facts(tmp_path / "a"), facts(tmp_path / "b")))
    model = ah.load(tmp_path / "b")
    assert isinstance(model, ah.Embedder) and len(model.state_dict()) == 12


def test_an_interrupted_module_is_whole_again(tall: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, names = Tall(), set(Tall().state_dict())

    def dying(step: Any, settings: Any) -> Any:
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(DEFENCES, "hardness", dying)
        fit(tmp_path / "run", tall, "lora", net)
    assert set(net.state_dict()) == names and all(p.requires_grad for p in net.parameters())


class Said(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("model", "part", "note"),
    [
        (Tall, "all", "a module of your own is not compiled"),
        (
            lambda: ah.Embedder("test_resnet", 8, channels=1, size=(10, 6)),
            "lora",
            "with adapters is not compiled",
        ),
        (lambda: ah.Embedder("small", 8, channels=1, size=(10, 6)), "head", "no BatchNorm to fold"),
        (lambda: ah.Embedder("test_resnet", 8, channels=1, size=(10, 6)), "head", ""),
    ],
)
def test_where_nothing_is_compiled_it_says_so_once(
    model: Any, part: str, note: str, tall: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a long training would be compiled."""
    short = {**QUICK, "train": {**QUICK["train"], "epochs": 1}, "model": PARTS[part]}
    said = Said()
    with monkeypatch.context() as patch:
        patch.setattr(anchorhold.training.trainer, "compiles", lambda *_: True)
        patch.setattr(anchorhold.training.trainer, "Graphed", lambda *_: None)
        ah.fit(model(), tall, "natural", tmp_path / "a", overrides=short, device="cpu", report=said)
    lines = [line for line in said.lines if "compiled" in line]
    assert len(lines) == bool(note) and all(note in line for line in lines)
    quiet = Said()
    ah.fit(model(), tall, "natural", tmp_path / "b", overrides=short, device="cpu", report=quiet)
    assert not any("compiled" in line for line in quiet.lines)  # on a CPU nothing ever is
    if part != "all":
        assert sum("parameters train" in line for line in quiet.lines) == 1


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("classify", {"model": {"train": "head"}}, "trains the whole backbone"),
        ("natural", {"model": {"train": "some"}}, "model.train = 'some'; choose from: all, head, lora"),
        ("natural", {"model": {"train": "lora"}, "train": {"compile": "on"}}, "adapters is not compiled"),
        ("natural", {"model": {"train": "head", "head": "fc"}}, "no parameters under 'fc'"),
    ],
)
def test_wrong_use_is_one_line(recipe: str, overrides: dict[str, Any], message: str, tall: Any, tmp_path: Path) -> None:
    model = ah.Embedder("small", 8, channels=1, size=(10, 6))
    with pytest.raises(SettingsError, match=message) as caught:
        ah.fit(model, tall, recipe, tmp_path / "run", overrides=overrides, device="cpu")
    assert "\n" not in str(caught.value)
    assert all(p.requires_grad for p in model.parameters())


def test_a_part_of_the_command_line(tall: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from anchorhold.cli.main import app

    (tmp_path / "part_of_mine.py").write_text(
        "from torch import nn\n\n"
        "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    command = "train digits --recipe natural --model part_of_mine:net --out run --epochs 1 --device cpu"
    command += " --set model.train=lora --set model.lora_rank=2 --set batch.pairs=64 --set train.collapse_warmup=9"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    assert "296 of 1,336 parameters train: adapters of rank 2 on 1 layer; in full 3" in done.output
    from anchorhold.model.load import load_model

    assert isinstance(load_model("part_of_mine:net=run"), Trainable)
