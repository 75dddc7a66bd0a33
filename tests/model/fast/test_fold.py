"""Folding BatchNorm changes the number of kernels and nothing else."""

import pytest
import torch
from torch import nn

from anchorhold.model.embedder import Embedder
from anchorhold.model.fast.fold import folded
from anchorhold.model.frozen import frozen


def shaken(model: nn.Module) -> nn.Module:
    """Running statistics and affine weights that are not those of a fresh net."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


@pytest.mark.medium
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenetv2_050"])
def test_the_folded_view_is_the_model(name: str) -> None:
    model = shaken(Embedder(name, dim=8)).double()
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    model.eval()
    plain = model(x)
    (expected,) = torch.autograd.grad(plain[:, 0].sum(), x)
    with frozen(model) as embed:
        view = embed(x)
        (gradient,) = torch.autograd.grad(view[:, 0].sum(), x)
    assert torch.allclose(view, plain, atol=1e-12)
    assert torch.allclose(gradient, expected, atol=1e-12, rtol=1e-8)
    assert all(p.grad is None for p in model.parameters())


def test_a_convolution_keeps_its_own_bias() -> None:
    net = shaken(nn.Sequential(nn.Conv2d(3, 4, 3, bias=True), nn.BatchNorm2d(4))).double().eval()
    nn.init.uniform_(net[0].bias, 1.0, 2.0)  # type: ignore[index]
    x = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    view = folded(net)
    assert view is not None and torch.allclose(view(x), net(x), atol=1e-12)


def test_a_new_view_sees_new_weights_and_new_statistics() -> None:
    model = shaken(Embedder("resnet18", dim=8))
    x = torch.rand(2, 3, 32, 32)
    seen = []
    for change in (
        lambda: None,
        lambda: model.backbone.bn1.running_mean.add_(1),
        lambda: model.backbone.conv1.weight.data.mul_(2),
    ):
        change()
        with frozen(model) as embed, torch.no_grad():
            seen.append(embed(x))
        model.eval()
        assert torch.allclose(seen[-1], model(x), atol=1e-5)
    assert not torch.allclose(seen[0], seen[1], atol=1e-4) and not torch.allclose(seen[1], seen[2], atol=1e-4)


def test_autocast_reaches_the_folded_network() -> None:
    model = shaken(Embedder("resnet18", dim=8))
    x = torch.rand(2, 3, 32, 32)
    with frozen(model) as embed, torch.no_grad():
        full = embed(x)
        with torch.autocast("cpu", torch.bfloat16):
            half = embed(x)
        again = embed(x)
    assert torch.equal(full, again) and not torch.equal(full, half) and torch.allclose(full, half, atol=0.05)


def test_what_cannot_be_folded_is_left_alone() -> None:
    assert folded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())) is None

    class Curious(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)) if x.sum() > 0 else x

    assert folded(Curious()) is None
    shared = nn.Conv2d(3, 3, 1)
    twice = nn.Sequential(shared, nn.BatchNorm2d(3), shared, nn.BatchNorm2d(3)).eval()
    assert folded(twice) is None


@pytest.mark.medium
def test_the_shape_is_cached_and_dies_with_its_model() -> None:
    import gc

    from anchorhold.model.fast import fold

    gc.collect()  # models of other tests
    model = shaken(Embedder("resnet18", dim=8))
    before = len(fold._SHAPES)
    for _ in range(2):
        with frozen(model):
            pass
    assert len(fold._SHAPES) == before + 1
    del model
    gc.collect()
    assert len(fold._SHAPES) == before
