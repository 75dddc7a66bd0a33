"""Any module as attack code wants it: outputs, shapes, precision, sizes; models by name; batches that do not fit."""

import dataclasses
import re
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anchorhold.errors import ModelError, SettingsError
from anchorhold.model.chunked import chunked
from anchorhold.model.embedder import Embedder
from anchorhold.model.frozen import frozen
from anchorhold.model.load import load_model
from anchorhold.model.wrap import Victim, as_victim, wrap

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Net(nn.Module):
    """A small net with every kind of layer that has a mode, and an output made to order."""

    def __init__(self, output: Callable[[Tensor], Any] = lambda features: features) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.drop = nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.Dropout(0.5)
        self.output = output

    def forward(self, images: Tensor) -> Any:
        return self.output(self.drop(self.norm(self.conv(images))).mean((2, 3)))


def _images(count: int = 4, side: int = 9) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def _expected() -> Tensor:
    features: Tensor = _Net().eval()(_images())
    return F.normalize(features, dim=1)


# ---------------------------------------------------------------- outputs

Pair = namedtuple("Pair", ["features", "logits"])


@dataclasses.dataclass
class _Result:
    logits: Tensor
    embeddings: Tensor


@pytest.mark.parametrize(
    ("output", "made"),
    [
        (None, lambda f: f),
        (None, lambda f: f[..., None, None]),
        (None, lambda f: (f, -f)),
        (None, lambda f: [None, f]),
        (1, lambda f: (-f, f)),
        (-1, lambda f: [-f, -f, f]),
        (None, lambda f: {"anything": f}),
        (None, lambda f: {"logits": -f, "embedding": f}),
        (None, lambda f: OrderedDict(last_hidden_state=f[:, None], pooler_output=f)),
        ("b", lambda f: {"a": -f, "b": f}),
        ("features", lambda f: {"embedding": -f, "features": f}),
        (None, lambda f: Pair(f, -f)),
        ("features", lambda f: Pair(f, -f)),
        (None, lambda f: _Result(-f, f)),
        ("embeddings", lambda f: SimpleNamespace(embeddings=f)),
    ],
)
def test_the_embedding_is_found(output: int | str | None, made: Callable[[Tensor], Any]) -> None:
    victim = wrap(_Net(made), output=output).eval()
    torch.testing.assert_close(victim(_images()), _expected())


@pytest.mark.parametrize(
    ("output", "made", "message"),
    [
        (None, lambda f: f[..., None, None].expand(-1, -1, 2, 3), "feature maps (4, 6, 2, 3); pool them"),
        (None, lambda f: f[:, None], "torch.float32 of shape (4, 1, 6) for a batch of 4; it must return floats (B, D)"),
        (None, lambda f: f[:, 0], "of shape (4,) for a batch of 4"),
        (None, lambda f: f[:2], "of shape (2, 6) for a batch of 4"),
        (None, lambda f: f[:, :0], "of shape (4, 0)"),
        (None, lambda f: f.argmax(1, keepdim=True), "torch.int64 of shape (4, 1)"),
        (None, lambda f: None, "returns None without a tensor"),
        (None, lambda f: "f", "returns a str without a tensor"),
        (None, lambda f: (None, "f"), "returns a tuple without a tensor"),
        (None, lambda f: {}, "returns a dict without a tensor"),
        (None, lambda f: {"a": 1}, "returns no tensor; use ah.wrap"),
        (None, lambda f: {"a": f, "b": f[:, :2]}, "returns a (4, 6), b (4, 2); use ah.wrap(net, output='NAME')"),
        (None, lambda f: {"embedding": f, "features": f}, "use ah.wrap(net, output='NAME')"),
        ("c", lambda f: {"abc": f, "cd": f}, "no output 'c': the model returns a dict; did you mean cd?"),
        ("c", lambda f: (f, f), "choose by number"),
        (2, lambda f: (f, f), "no output 2: the model returns a tuple with 2 numbered parts"),
        (0, lambda f: {"a": f}, "no output 0: the model returns a dict with 0"),
        (0, lambda f: f, "one tensor (4, 6); leave output 0 out"),
        (0, lambda f: (3, f), "returns an int at 0"),
    ],
)
def test_other_outputs_are_refused(output: int | str | None, made: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        wrap(_Net(made), output=output)(_images())
    assert "\n" not in str(caught.value)


def test_it_says_what_it_does() -> None:
    victim = wrap(_Net(lambda f: (f, f)), mean=MEAN, std=STD, size=12)
    victim(_images())
    victim(_images())
    assert victim.notes == [
        f"the model normalises images with mean {MEAN} and std {STD}",
        "embeddings are normalised to unit length",
        "images of 9×9 pixels are resized to 12×12",
        "the first tensor of the 2 outputs is the embedding",
    ]
    raw = wrap(_Net(), unit=False).eval()
    torch.testing.assert_close(raw(_images()), _Net().eval()(_images()))
    assert raw.notes == ["embeddings are not normalised"]


# ---------------------------------------------------------------- images


def test_mean_and_std_as_by_hand_gradient_too() -> None:
    net = _Net().double().eval()
    images = _images().double().requires_grad_()
    again = images.detach().clone().requires_grad_()
    victim = wrap(net, mean=MEAN, std=STD)
    seen = victim(images)
    mean, std = (torch.tensor(values).double().view(3, 1, 1) for values in (MEAN, STD))
    by_hand = F.normalize(net((again - mean) / std), dim=1)
    assert seen.dtype == torch.float64
    torch.testing.assert_close(seen, by_hand)
    weights = torch.randn(by_hand.shape, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((seen * weights).sum(), images), torch.autograd.grad((by_hand * weights).sum(), again)
    )


@pytest.mark.parametrize("size", [5, 20, (7, 12), [9, 4]])
def test_resizing_is_interpolation_gradient_too(size: Any) -> None:
    net = _Net().double().eval()
    images = _images().double().requires_grad_()
    sides = (size, size) if isinstance(size, int) else tuple(size)
    seen = wrap(net, size=size)(images)
    resized = F.interpolate(images, sides, mode="bilinear", antialias=True)
    by_hand = F.normalize(net(resized), dim=1)
    torch.testing.assert_close(seen, by_hand)
    weights = torch.randn(by_hand.shape, dtype=torch.float64)
    (first,), (second,) = (torch.autograd.grad((out * weights).sum(), images) for out in (seen, by_hand))
    torch.testing.assert_close(first, second)
    with torch.autocast("cpu", torch.bfloat16):  # pixels do not lose digits on the way
        plain = wrap(nn.Flatten(), size=size, unit=False)(_images())
    torch.testing.assert_close(plain, resized.float().flatten(1))


def test_images_of_the_right_size_are_left_alone() -> None:
    victim = wrap(nn.Flatten(), size=9, unit=False)
    assert torch.equal(victim(_images()), _images().flatten(1))
    assert not any("resized" in note for note in victim.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_precision_is_the_models(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []
    net = _Net().to(dtype)
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    victim = wrap(net, mean=MEAN, std=STD).eval()
    images = _images().requires_grad_()
    out = victim(images)
    reference = wrap(_Net(), mean=MEAN, std=STD).eval()(_images())
    assert seen == [dtype]
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.norm(dim=1), torch.ones_like(out[:, 0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(out.float(), reference, atol=0.02, rtol=0)
    assert wrap(net, unit=False)(_images()).dtype == out.dtype
    (gradient,) = torch.autograd.grad(out[:, 0].sum(), images)
    assert gradient.dtype == torch.float32 and gradient.abs().sum() > 0
    assert any("the model runs in" in note for note in victim.notes) == (dtype != torch.float64)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 9, 9, dtype=torch.uint8), "images are torch.uint8; give floats in [0, 1]"),
        (torch.full((2, 3, 9, 9), 255.0), "images have values up to 255; give RGB in [0, 1], i.e. images / 255"),
        (torch.full((2, 3, 9, 9), 90.0, requires_grad=True), "images have values up to 90"),
        (torch.zeros(3, 9, 9), "expected images of shape (B, 3, H, W), got (3, 9, 9)"),
        (torch.zeros(2, 1, 9, 9), "expected images of shape (B, 3, H, W), got (2, 1, 9, 9)"),
        (torch.zeros(2, 3, 1, 1), "the model fails on images of shape (2, 3, 1, 1) (RuntimeError: "),
    ],
)
def test_other_images_are_refused(images: Tensor, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        wrap(_Net(), mean=MEAN, std=STD)(images)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": MEAN}, "give both mean and std, with one number per channel; mean has 3, std has 0"),
        ({"mean": MEAN, "std": (1, 1)}, "one number per channel"),
        ({"mean": (123.7, 116.3, 103.5), "std": (58.4, 57.1, 57.4)}, "divide them by 255"),
        ({"mean": MEAN, "std": (1, 0, 1)}, "must be for pixels"),
        ({"size": 0}, "size must be a side"),
        ({"size": (1, 2, 3)}, "size must be a side"),
    ],
)
def test_other_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        wrap(_Net(), **options)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"wrap needs an nn\.Module, got a function"):
        wrap(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"^a model must be an nn\.Module, not None; call it"):
        as_victim(None)  # type: ignore[arg-type]
    for name in ("runs/hm", Path("runs/hm")):
        with pytest.raises(ModelError, match=r"load it first with ah\.load\('runs/hm'\)$"):
            as_victim(name)  # type: ignore[arg-type]


def test_a_module_without_tensors() -> None:
    assert wrap(nn.Flatten(), device="cpu")(_images()).shape == (4, 243)


def test_running_out_of_memory_is_not_mistaken_for_a_bad_model() -> None:
    def full(features: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        wrap(_Net(full))(_images())


def test_a_frozen_victim_leaves_everything_untouched() -> None:
    net = _Net()
    net.norm.eval()
    net.conv.weight.requires_grad_(False)
    victim = wrap(net, mean=MEAN, std=STD, size=12)
    state = {name: tensor.clone() for name, tensor in victim.state_dict().items()}
    modes = [module.training for module in victim.modules()]
    wants = [parameter.requires_grad for parameter in victim.parameters()]
    images = _images().requires_grad_()
    with frozen(victim) as embed:
        first, second = embed(images), embed(images)
        first[:, 0].sum().backward()
    assert torch.equal(first, second)  # dropout is off
    assert images.grad is not None and images.grad.abs().sum() > 0
    assert all(torch.equal(state[name], tensor) for name, tensor in victim.state_dict().items())
    assert [module.training for module in victim.modules()] == modes
    assert [parameter.requires_grad for parameter in victim.parameters()] == wants
    assert all(parameter.grad is None for parameter in victim.parameters())
    assert set(net.state_dict()) == {name.removeprefix("module.") for name in state if name.startswith("module.")}


# ---------------------------------------------------------------- memory


class _Memory:
    """An embed for which only so many images fit."""

    def __init__(self, room: int, room_with_gradient: int | None = None) -> None:
        self.room, self.calls = (room, room_with_gradient or room), list[int]()
        self.net = _Net().double().eval()

    def __call__(self, images: Tensor) -> Tensor:
        self.calls.append(len(images))
        if len(images) > self.room[torch.is_grad_enabled() and images.requires_grad]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        out: Tensor = self.net(images)
        return out


@pytest.mark.parametrize(("room", "with_gradient"), [(100, 100), (100, 1), (10, 10), (7, 3), (1, 1)])
@pytest.mark.parametrize("batch", [64, 10, 4])
def test_batches_that_do_not_fit_are_halved(room: int, with_gradient: int, batch: int) -> None:
    memory = _Memory(room, with_gradient)
    embed = chunked(memory, batch)
    images = _images(13).double().requires_grad_()
    whole = memory.net(images)
    above = torch.randn(whole.shape, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(whole, images, above)
    for _ in range(2):
        out = embed(images)
        torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(out, images, above)
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not embed(images).requires_grad
    # What fits is remembered: the second round meets no refusal.
    memory.calls.clear()
    torch.autograd.grad(embed(images), images, above)
    assert max(memory.calls) <= min(with_gradient, batch)


def test_it_halves() -> None:
    memory = _Memory(3)
    chunked(memory, 64)(_images(13).double())
    assert memory.calls == [13, 6, 3, 3, 3, 3, 1]


def test_a_batch_that_fits_is_embedded_once() -> None:
    memory = _Memory(100)
    embed = chunked(memory, 13)
    embed(_images(13).double().requires_grad_()).sum().backward()
    assert memory.calls == [13]
    assert embed(_images(0).double()).shape == (0, 6)


def test_autocast_holds_for_the_second_pass_too() -> None:
    net = _Net().eval()
    seen = set()

    def embed(images: Tensor) -> Tensor:
        features: Tensor = net.conv(images)
        seen.add(features.dtype)
        return features.mean((2, 3)).float()

    images = _images().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = chunked(embed, 2)(images)
    out.sum().backward()
    assert seen == {torch.bfloat16}


def test_what_can_never_fit() -> None:
    with pytest.raises(ModelError, match="a single image does not fit"):
        chunked(_Memory(0), 4)(_images().double())
    with pytest.raises(SettingsError, match="batch must be at least 1"):
        chunked(_Memory(1), 0)


# ---------------------------------------------------------------- by name

THEIRS = """
import torch
from torch import nn
import anchorhold as ah

size = 3
ready = nn.Flatten()

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))

def ours():
    return ah.Embedder("small", 5, channels=3)

def nothing(): ...

def broken():
    raise KeyError("weights")

class Shop:
    @staticmethod
    def build():
        return make()
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"theirs_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(THEIRS)
    (tmp_path / f"{name}_needs.py").write_text("import a_library_that_is_gone")
    (tmp_path / f"{name}_bad.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    return name


def test_a_function_in_the_current_folder(theirs: str) -> None:
    before = list(sys.path)
    images = torch.rand(2, 3, 2, 2)
    for spec in (f"{theirs}:make", f"{theirs}:Shop.build", f"{theirs}.py:make", f"{theirs}:ready"):
        victim = load_model(spec, mean=MEAN, std=STD, size=2, device="cpu")
        assert isinstance(victim, Victim)
        assert victim(images).norm(dim=1).allclose(torch.ones(2))
    assert "normalises images" in victim.notes[0]
    assert isinstance(load_model(f"{theirs}:ours"), Embedder)
    assert load_model(f"{theirs}:ours", size=6)(images).shape == (2, 5)
    assert sys.path == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module_here:make", "no_such_module_here:make: no module 'no_such_module_here' in this folder or"),
        ("no_such.module:make", "no module 'no_such.module'"),
        ("{}:mak", "has no 'mak'; did you mean make?"),
        ("{}:size", ":size is an int; name a function that returns an nn.Module"),
        ("{}:nothing", ":nothing returns None; it must return an nn.Module"),
        ("{}:broken", ":broken fails (KeyError: 'weights')"),
        ("{}_needs:make", "needs 'a_library_that_is_gone'; install it"),
        ("{}_bad:make", "_bad fails (SyntaxError: "),
        (":make", "importing  fails (ValueError"),
        ("{}:", "has no ''"),
    ],
)
def test_functions_that_do_not_work(theirs: str, spec: str, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        load_model(spec.format(theirs))
    assert "\n" not in str(caught.value)


def test_a_run_folder_or_a_saved_model(tmp_path: Path) -> None:
    model = Embedder("small", 4).eval()
    model.save(tmp_path)
    images = torch.rand(2, 3, 8, 8)
    for place in (tmp_path, tmp_path / "model.safetensors"):
        loaded = load_model(str(place), device="cpu").eval()
        assert isinstance(loaded, Embedder)
        assert torch.equal(loaded(images), model(images))
    resized = load_model(str(tmp_path), size=8).eval()
    torch.testing.assert_close(resized(torch.rand(2, 3, 16, 16)).norm(dim=1), torch.ones(2))
    with pytest.raises(ModelError, match="has its own mean and std; leave out mean= and std="):
        load_model(str(tmp_path), mean=MEAN, std=STD)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no model at .*finished run folder"):
        load_model(str(tmp_path / "empty"))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load_model(str(tmp_path / "cut.safetensors"))


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_weights_in_torchvisions_layout(tmp_path: Path, kind: str) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    net: nn.Module = resnet18(weights=None).eval()
    path = tmp_path / f"r18.{kind}"
    if kind == "safetensors":
        safetensors.torch.save_file(net.state_dict(), path)
    else:
        torch.save(net.state_dict(), path)
    net.fc = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    by_hand = wrap(net, mean=MEAN, std=STD)(images)
    torch.testing.assert_close(load_model(f"resnet18={path}").eval()(images), by_hand)
    other = wrap(net, mean=[0.5] * 3, std=[0.5] * 3)(images)
    torch.testing.assert_close(load_model(f"resnet18={path}", mean=[0.5] * 3, std=[0.5] * 3).eval()(images), other)
    with pytest.raises(ModelError, match=f"only weights; name their backbone, as in resnet18=.*{path.name}"):
        load_model(str(path))
    with pytest.raises(ModelError, match="does not fit resnet34"):
        load_model(f"resnet34={path}")
    with pytest.raises(ModelError, match="no such file"):
        load_model("resnet18=nowhere.pth")
    with pytest.raises(ModelError, match="no backbone 'resnet81'"):
        load_model(f"resnet81={path}")


def test_a_timm_name_brings_what_it_was_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    asked: list[str] = []

    def create(tag: str, pretrained: bool = False, **options: Any) -> nn.Module:
        asked.extend([tag] * pretrained)
        net: nn.Module = real(tag.split(".")[0], pretrained=False, **options)
        return net

    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setattr("anchorhold.model.hub._reachable", lambda url: False)
    for spec, mean, size in (("timm:resnet10t", MEAN, 176), ("vit_tiny_patch16_224", (0.5, 0.5, 0.5), 224)):
        model = load_model(spec)
        assert isinstance(model, Embedder)
        assert model.config["mean"] == pytest.approx(list(mean))
        assert model.size == (size, size)
    assert asked == ["resnet10t", "vit_tiny_patch16_224"]
    told = load_model("resnet10t", mean=[0.1] * 3, std=[1] * 3, size=64)
    assert isinstance(told, Embedder)
    assert (told.config["mean"], told.size) == ([0.1] * 3, (64, 64))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet8", "no such timm name; did you mean resnet"),
        ("resnet18.no_such_tag", "no model 'resnet18.no_such_tag'"),
        ("runs/nowhere", "no model 'runs/nowhere': no such folder or file, and no such timm name; give a run folder"),
        ("resnet18.safetensors", "no such folder or file, and no such timm name; give a run folder"),
        ("small", "no ImageNet weights exist for 'small'"),
        ("nomodel", "no such timm name; give a run folder"),
        ("http://a/b", "http://a/b is an address, not a model; download the file first, or use hf:owner/name"),
    ],
)
def test_names_that_are_nothing(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(spec)


def test_a_mistyped_run_is_met_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "resnet").mkdir(parents=True)
    (tmp_path / "runs" / "resnet" / "model.safetensors").touch()
    for spec in ("runs/resnt", "resnet"):
        with pytest.raises(ModelError, match=re.escape("did you mean runs/resnet?")):
            load_model(spec)
