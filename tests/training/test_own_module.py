"""A module of anybody's own is trained, saved, loaded, resumed and audited."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.defences.menu import DEFENCES
from anchorhold.errors import AnchorholdError, ModelError, RunError, SettingsError
from anchorhold.model.load import load_model
from anchorhold.model.trainable import Trainable, trainable

SHORT: dict[str, Any] = {"train": {"epochs": 1, "evaluate_every": 1, "checkpoint_seconds": 0, "collapse_warmup": 9}}


class Net(nn.Module):
    """BatchNorm, LayerNorm, dropout and tied weights in one."""

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
            self.second, self.layer = nn.Conv2d(16, width, 3, stride=2, padding=1), nn.LayerNorm(width)
            self.drop, self.one, self.two = nn.Dropout(0.1), nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(images)))
        x = self.layer(torch.relu(self.second(x)).mean((2, 3)))
        out: Tensor = self.two(torch.relu(self.one(self.drop(x))))
        return out


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


@pytest.fixture(scope="module")
def trained(digits: ah.Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Net, Path]:
    net, out = Net(), tmp_path_factory.mktemp("own") / "run"
    ah.fit(net, digits, "hm-lga", out, overrides=SHORT | {"optimiser": {"lr": 1e-3}}, device="cpu")
    return net, out


@pytest.mark.parametrize("name", DEFENCES)
def test_every_defence_trains_a_module_in_place(name: str, digits: ah.Dataset, tmp_path: Path) -> None:
    net = Net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recipe = {"hardness": "hm", "free": "hm-free", "tride": "catride"}.get(name, name)
    small = digits.__class__(digits.name, digits.train.keep(torch.arange(0, 901, 6)), digits.test)
    overrides = SHORT | {"optimiser": {"lr": 1e-3}, "batch": {"pairs": 8, "mining_pairs": 0, "images": 64}}
    run = ah.fit(net, small, recipe, tmp_path / "run", overrides=overrides, device="cpu")
    assert run.read_json()["status"] == "done" and run.metrics()[-1]["r1"] > 20
    after = net.state_dict()
    assert all(not torch.equal(after[key], before[key]) for key in ("first.weight", "norm.weight", "one.weight"))
    frozen = run.read_json()["settings"]["model"]["freeze_batchnorm"]  # as the recipe has it
    assert torch.equal(after["norm.running_mean"], before["norm.running_mean"]) == frozen
    assert net.two.weight is net.one.weight


def test_what_was_trained_comes_back(trained: tuple[Net, Path], digits: ah.Dataset) -> None:
    net, out = trained
    x = torch.rand(5, 1, 8, 8)
    again = ah.load(out, module=Net(7))
    assert isinstance(again, Trainable) and not again.training
    assert torch.equal(again(x), ah.wrap(net.eval())(x))
    found = ah.audit(again, digits, limit=8, steps=1, attacks=["ES"], resamples=10, examine=None, device="cpu")
    assert found.clean["R@1"].value > 50


def test_a_file_alone_is_not_a_model(trained: tuple[Net, Path], tmp_path: Path) -> None:
    _, out = trained
    with pytest.raises(ModelError, match=r"module of yours.*module=…"):
        ah.load(out)
    with pytest.raises(ModelError, match="do not fit this module"):
        ah.load(out, module=Net(width=16))
    with pytest.raises(ModelError, match="do not fit this module"):
        ah.load(out, module=nn.Linear(3, 3))
    ours = ah.Embedder("small", 8, channels=1).save(tmp_path / "ours.safetensors")
    with pytest.raises(ModelError, match="own: load it without a module"):
        ah.load(ours, module=Net())


def test_a_stopped_run_ends_as_one_that_was_left_alone(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout too: its draws are those of the step, not of the process."""

    def fit(out: Path) -> Net:
        net = Net()
        ah.fit(net, digits, "natural", out, overrides=SHORT, device="cpu")
        return net

    whole = fit(tmp_path / "whole")
    natural, steps = DEFENCES["natural"], iter(range(99))

    def dying(step: Any, settings: Any) -> Any:
        if next(steps) == 6:
            raise KeyboardInterrupt
        yield from natural(step, settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(DEFENCES, "natural", dying)
        fit(tmp_path / "cut")
    with pytest.raises(RunError, match=r"trains a module of yours, .*Net"):
        ah.resume(tmp_path / "cut", device="cpu")
    torch.rand(3)
    net = Net(9)
    ah.resume(tmp_path / "cut", model=net, device="cpu")
    for name, value in whole.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_what_is_around_a_module_is_kept(digits: ah.Dataset, tmp_path: Path) -> None:
    """Mean, std, an input that is not square, and which output is the embedding."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(10 * 6, 16)

        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            assert images.shape[2:] == (10, 6)
            return images.sum((1, 2, 3)), self.net(images.flatten(1))

    model = ah.wrap(Two(), mean=[0.2], std=[0.4], size=(10, 6), output=1)
    ah.fit(model, digits, "natural", tmp_path / "run", overrides=SHORT, device="cpu")
    again, x = ah.load(tmp_path / "run", module=Two()), torch.rand(4, 1, 8, 8)
    assert torch.equal(again(x), model.eval()(x))
    assert again.config["size"] == [10, 6] and again.config["output"] == 1


def test_a_folder_s_unseen_classes_are_attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    for name in "abcdef":
        for place in range(4):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            pixels = (torch.rand(8, 8, 3) * 255).byte().numpy()
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{place}.png")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    overrides = SHORT | {"data": {"resize": 8, "crop": 8}, "batch": {"pairs": 4, "mining_pairs": 0}}
    ah.fit(load_model("mine:net"), "photos", "natural", "run", overrides=overrides, device="cpu")
    model = load_model("mine:net=run")
    found = ah.audit(model, "photos", steps=1, attacks=["ES"], resamples=10, examine=None, device="cpu")
    assert "not trained on" in found.data["part"] and found.data["query"]["resize"] == 8


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Net().half(), "half precision"),
        (lambda: ah.wrap(Net(), unit=False), "unit vectors"),
        (lambda: Net().requires_grad_(False), "nothing to train"),
        (lambda: nn.Identity(), "nothing to train"),
    ],
)
def test_what_cannot_be_trained_is_refused(made: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        trainable(made())


def test_pretraining_and_compiling_are_for_our_own_models(digits: ah.Dataset, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="features of an Embedder"):
        ah.fit(Net(), digits, "distil", tmp_path / "a", overrides=SHORT, device="cpu")
    with pytest.raises(AnchorholdError, match="not compiled"):
        ah.fit(Net(), digits, "natural", tmp_path / "b", overrides={"train.compile": "on"}, device="cpu")


def test_a_resumed_module_gets_what_was_around_it(digits: ah.Dataset, tmp_path: Path) -> None:
    """Mean, std and size are in run.json: you give the bare module."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8))

    ah.fit(ah.wrap(net(), mean=[0.3], std=[0.5], size=6), digits, "natural", tmp_path / "a", overrides=SHORT)
    record = tmp_path / "a" / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    ah.resume(tmp_path / "a", model=net(), device="cpu")
    assert ah.load(tmp_path / "a", module=net()).config["size"] == [6, 6]


def test_data_in_memory_are_given_again(digits: ah.Dataset, tmp_path: Path) -> None:
    images = digits.train.images
    assert images is not None
    data = (images.permute(0, 3, 1, 2), digits.train.labels)
    overrides = SHORT | {"model": {"backbone": "small", "dim": 8, "weights": ""}}
    ah.fit(None, data, "natural", tmp_path / "a", overrides=overrides, device="cpu")
    record = tmp_path / "a" / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    with pytest.raises(RunError, match="give the same again"):
        ah.resume(tmp_path / "a", device="cpu")
    ah.resume(tmp_path / "a", data=data, device="cpu")


class Double(nn.Module):
    """Logits in training, vectors in use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 8)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.net(images.flatten(1))
        return out[:, :6] if self.training else out


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Double, r"\(2, 6\) in training and \(2, 8\) in use"),
        (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), "call it once"),
        (lambda: ah.wrap(ah.wrap(Net())), "wrapped twice"),
    ],
)
def test_modules_that_would_go_wrong_are_refused(made: Any, message: str, digits: ah.Dataset, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        ah.fit(made(), digits, "natural", tmp_path / "run", overrides=SHORT, device="cpu")


def test_your_own_generators_stay_as_they_were(digits: ah.Dataset, tmp_path: Path) -> None:
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    ah.fit(Net(), digits, "natural", tmp_path / "run", overrides=SHORT, device="cpu")
    assert torch.equal(torch.rand(3), wanted)
    frozen = ah.load(tmp_path / "run", module=Net().requires_grad_(False))  # to be used, not trained
    assert not any(p.requires_grad for p in frozen.parameters())
