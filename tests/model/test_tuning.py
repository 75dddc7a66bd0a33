"""What trains: everything, the head alone, or adapters; and nothing of it is left in the model afterwards."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.errors import ModelError, SettingsError
from anchorhold.model.frozen import frozen
from anchorhold.model.settings import ModelSettings
from anchorhold.model.trainable import Trainable, trainable
from anchorhold.model.tuning import Tuning

X = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Neck(nn.Module):
    """Live BatchNorm inside and after the last layer, tied weights, and convolutions in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(16, 12), nn.BatchNorm1d(12)  # registered first, called last
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, groups=16)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.two.weight = self.one.weight
        self.unused = nn.Linear(16, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.deep(torch.relu(self.norm(self.first(images)))).mean((2, 3))
        out: Tensor = self.out(self.fc(torch.relu(self.two(torch.relu(self.one(x))))))
        return out


class Attention(nn.Module):
    """MultiheadAttention reads the weights of the layer inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.attend, self.mlp = nn.Conv2d(3, 16, 8, 8), nn.MultiheadAttention(16, 2), nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).permute(2, 0, 1)
        x = x + self.attend(x, x, x)[0]
        out: Tensor = self.last(torch.relu(self.mlp(x)).mean(0))
        return out


def begun(model: Any, **settings: Any) -> tuple[Any, Tuning, str]:
    settings = {"freeze_batchnorm": False, **settings}
    own = model if isinstance(model, ah.Embedder) else trainable(model, False)
    own.train()
    tuning = Tuning(own, ModelSettings(**settings))
    return own, tuning, tuning.begin(X, seed=0)


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def moved(model: Any, seed: int = 1) -> None:
    """One step of every parameter that trains, as large as the weights are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += 0.1 * torch.randn(p.shape, generator=generator)


def test_by_default_nothing_changes() -> None:
    net = Neck()
    net.first.requires_grad_(False)
    own, tuning, note = begun(net)
    assert note == "" and "module.first.weight" not in trained(own) and own.still == ()
    assert net.norm.training and len(trained(own)) == len(list(own.parameters())) - 2
    tuning.end()
    assert not net.first.weight.requires_grad and net.norm.weight.requires_grad


def test_the_head_is_what_is_called_last() -> None:
    net = Neck()
    own, tuning, note = begun(net, train="head")
    assert trained(own) == {f"module.{name}" for name in ("fc.weight", "fc.bias", "out.weight", "out.bias")}
    assert note.startswith("228 of ") and "fc, out" in note
    assert not net.norm.training and net.out.training  # statistics outside of the head stay
    before = net.norm.running_mean.clone()
    own.train()
    own(X)
    assert torch.equal(net.norm.running_mean, before) and net.out.num_batches_tracked == 1
    tuning.end()
    own.train()
    assert net.norm.training and all(p.requires_grad for p in net.parameters())


def test_you_may_name_the_head() -> None:
    own, _, _ = begun(Neck(), train="head", head="first, fc")
    assert trained(own) == {f"module.{name}" for name in ("fc.weight", "fc.bias", "first.weight", "first.bias")}
    own, _, note = begun(Neck(), train="head", head="two")  # its weight is that of `one` too
    assert trained(own) == {"module.one.weight", "module.two.bias"} and note.startswith("272 of ")
    model = ah.Embedder("test_resnet", 8, size=16)
    assert trained(begun(model, train="head")[0]) == {"head.weight", "head.bias"}
    named = trained(begun(model, train="head", head="backbone.layer4")[0])
    assert named and all(name.startswith("backbone.layer4.") for name in named)


@pytest.mark.parametrize("made", [Neck, Attention, lambda: ah.Embedder("test_resnet", 8, size=16)])
def test_adapters_start_at_zero_and_are_merged_at_the_end(made: Any) -> None:
    model = made()
    plain = model if isinstance(model, ah.Embedder) else ah.wrap(model)
    before, names = plain.eval()(X), set(plain.state_dict())
    own, tuning, _ = begun(model, train="lora", lora_rank=4)
    own.eval()
    assert torch.allclose(own(X), before, atol=1e-6)  # B = 0; frozen attention takes another path of torch's
    moved(own)
    adapted = own(X)
    assert (adapted - before).abs().max() > 0.05
    with tuning.merged():
        assert set(plain.state_dict()) == names
        assert torch.allclose(own(X), adapted, atol=1e-5)
    assert torch.equal(own(X), adapted)  # the same bits come back
    tuning.end()
    assert set(plain.state_dict()) == names and not hasattr(own, "peft_config")
    assert torch.allclose(plain(X), adapted, atol=1e-5)
    assert not any("lora" in type(each).__module__ for each in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_what_an_adapter_adds_is_the_product_of_its_matrices() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 6), nn.Linear(6, 4))
    weight, last = net[1].weight.detach().clone(), net[2].weight.detach().clone()
    own, tuning, _ = begun(net, train="lora", lora_rank=3, lora_alpha=6.0)
    moved(own)
    layer: Any = own.module[1]
    a, b = layer.lora_A["default"].weight.detach().clone(), layer.lora_B["default"].weight.detach().clone()
    tuning.end()
    assert torch.allclose(net[1].weight, weight + 6.0 / 3 * b @ a, atol=1e-6)
    assert not torch.equal(net[2].weight, last)  # the head trains in full


def test_only_layers_that_an_adapter_reaches_get_one() -> None:
    """Not tied weights, not convolutions in groups, not what is never called, not what attention reads itself."""
    own, _, note = begun(Neck(), train="lora")
    assert {name.split(".lora_")[0] for name in trained(own) if "lora_" in name} == {"module.first"}
    assert "on 1 layer;" in note
    own, _, _ = begun(Attention(), train="lora")
    reached = {name.split(".lora_")[0] for name in trained(own) if "lora_" in name}
    assert reached == {"module.patch", "module.mlp"}
    own, _, _ = begun(Attention(), train="lora", lora_targets="mlp")
    assert {name.split(".lora_")[0] for name in trained(own) if "lora_" in name} == {"module.mlp"}


@pytest.mark.medium
def test_every_linear_layer_of_a_timm_vit_gets_one() -> None:
    model = ah.Embedder("vit_tiny_patch16_224", 8, size=16)
    own, _, _ = begun(model, train="lora")
    found = {name.rpartition(".lora_A")[0] for name in trained(own) if "lora_A" in name}
    assert len(found) == 12 * 4 + 1 and "backbone.patch_embed.proj" in found
    assert {"head.weight", "head.bias"} <= trained(own)


@pytest.mark.medium
def test_torchvision_s_mobilenet_gets_adapters() -> None:
    from torchvision.models import mobilenet_v3_small

    own, _, _ = begun(mobilenet_v3_small(), train="lora")
    assert {"module.classifier.3.weight", "module.classifier.3.bias"} <= trained(own)
    groups = [m for m in own.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(groups) == 11 and not any("lora" in n for n, m in own.named_modules() if m in groups)
    assert len(own.still) == 34


@pytest.mark.parametrize("made", [Neck, lambda: ah.Embedder("test_resnet", 8, size=16)])
def test_attacks_see_the_adapters(made: Any) -> None:
    """The frozen view, fast or not, gives the vectors and gradients of the model as it is, bit for bit."""
    model = made()
    if isinstance(model, ah.Embedder):
        with frozen(model, fast=True) as view:  # its folded form is known before it has adapters
            view(X)
    own, tuning, _ = begun(model, train="lora", lora_dropout=0.5)
    moved(own)
    own.eval()
    x = X.clone().requires_grad_()
    wanted = own(x)
    (gradient,) = torch.autograd.grad(wanted[:, 0].sum(), x)
    own.train()
    for fast in (False, True):
        with frozen(own, fast=fast) as view:
            y = X.clone().requires_grad_()
            found = view(y)
            (slope,) = torch.autograd.grad(found[:, 0].sum(), y)
        assert torch.equal(found, wanted) and torch.equal(slope, gradient)
    tuning.end()
    with frozen(own) as view:  # folded again
        assert torch.allclose(view(X), wanted, atol=1e-5)


def test_the_first_weights_of_adapters_are_the_seed_s() -> None:
    def first(seed: int) -> Tensor:
        own = trainable(Attention(), False)
        Tuning(own, ModelSettings(train="lora")).begin(X, seed)
        return dict(own.named_parameters())["module.mlp.lora_A.default.weight"].detach()

    torch.manual_seed(5)
    wanted, draw = first(0), torch.rand(2)
    torch.manual_seed(6)
    assert torch.equal(first(0), wanted) and not torch.equal(first(1), wanted)
    torch.manual_seed(5)
    Attention()
    assert torch.equal(torch.rand(2), draw)  # the user's generator is left alone


def test_a_frozen_module_may_get_adapters() -> None:
    own = trainable(Attention().requires_grad_(False), part="lora")
    assert isinstance(own, Trainable)
    with pytest.raises(ModelError, match="nothing to train"):
        trainable(Attention().requires_grad_(False))


@pytest.mark.parametrize(
    ("made", "settings", "message"),
    [
        (Neck, {"train": "head", "head": "fcc"}, r"no parameters under 'fcc'; did you mean fc\?"),
        (lambda: ah.Embedder("test_resnet", 0, size=16), {"train": "head"}, "no head to train"),
        (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(768)), {"train": "head"}, "no layer with a weight matrix"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 4)), {"train": "lora"}, "no linear or convolutional layer"),
        (Neck, {"train": "lora", "lora_targets": "qkv"}, "no layer 'qkv' outside the head; it has first"),
        (Neck, {"train": "lora", "lora_targets": "two"}, "shares its weight"),
        (Neck, {"train": "lora", "lora_targets": "deep"}, "groups"),
        (Neck, {"train": "lora", "lora_targets": "unused"}, "would have no effect"),
        (Attention, {"train": "lora", "lora_targets": "out_proj"}, "out_proj is not called"),
    ],
)
def test_wrong_parts_are_one_line(made: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((SettingsError, ModelError), match=message) as caught:
        begun(made(), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "fc"}, "model.train = head or lora"),
        ({"train": "head", "lora_targets": "fc"}, "model.train = lora"),
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"lora_alpha": 0.0}, "lora_alpha must be above 0"),
        ({"lora_dropout": 1.0}, "below 1"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ModelSettings(**settings)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SettingsError, match=r"pip install 'anchorhold\[lora\]'"):
        begun(Neck(), train="lora")
