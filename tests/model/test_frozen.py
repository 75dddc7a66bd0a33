"""The frozen view, full precision, and embedding everything."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from anchorhold.device import precise
from anchorhold.errors import ModelError
from anchorhold.model.embedder import Embedder
from anchorhold.model.frozen import embed_all, frozen


def _theirs() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5))
    return net.train()


def _ours() -> nn.Module:
    return Embedder("small", 6, channels=1).train()


@pytest.fixture(params=[_theirs, _ours], ids=["any module", "embedder"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = request.param()
    return net


def _images(count: int = 3) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_gradients_reach_the_images_only(model: nn.Module) -> None:
    first, *others = model.parameters()
    first.grad = torch.full_like(first, 7.0)
    images = _images().requires_grad_()
    with frozen(model) as embed:
        embed(images)[:, 0].sum().backward()
    assert images.grad is not None
    assert images.grad.abs().sum() > 0
    assert torch.equal(first.grad, torch.full_like(first, 7.0))
    assert all(p.grad is None for p in others)
    assert all(p.requires_grad for p in model.parameters())


def test_it_is_the_model_in_eval_mode(model: nn.Module) -> None:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with frozen(model) as embed:
        seen = embed(_images())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(seen, model.eval()(_images()))


def test_modes_come_back_one_by_one(model: nn.Module) -> None:
    odd = list(model.modules())[-1]
    odd.eval()
    modes = [m.training for m in model.modules()]
    assert any(modes)
    with frozen(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(ZeroDivisionError), frozen(model):
        _ = 1 / 0
    assert [m.training for m in model.modules()] == modes


def test_views_nest(model: nn.Module) -> None:
    with frozen(model) as outer:
        with frozen(model) as inner:
            assert torch.equal(inner(_images()), outer(_images()))
        assert not model.training
    assert model.training


def test_the_view_never_goes_stale(model: nn.Module) -> None:
    def now() -> Tensor:
        mode = [m.training for m in model.modules()]
        out: Tensor = model.eval()(_images()).detach()
        for module, training in zip(model.modules(), mode):
            module.training = training
        return out

    with frozen(model) as embed:
        first = embed(_images())
        assert torch.equal(first, now())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5).add_(0.01)
        assert torch.equal(embed(_images()), now())  # an optimiser's step, in place
    replaced = {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict({name: t.abs() for name, t in replaced.items()}, assign=True)
    with frozen(model) as embed:
        third = embed(_images())
    assert torch.equal(third, now())
    assert not torch.equal(third, first)


def test_a_view_that_has_ended_says_so(model: nn.Module) -> None:
    with frozen(model) as embed:
        pass
    with pytest.raises(RuntimeError, match="is closed"):
        embed(_images())


@pytest.fixture
def _precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def _settings() -> list[str]:
    backends = torch.backends
    kinds = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    return [kind.fp32_precision for kind in kinds]


def _set_new() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _set_old() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


@pytest.mark.usefixtures("_precision")
def test_precise_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with precise():
            pass


@pytest.mark.usefixtures("_precision")
@pytest.mark.filterwarnings("ignore:Please use the new API settings")
@pytest.mark.parametrize(
    "choose",
    [
        lambda: None,
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("medium"),
        _set_old,
        _set_new,
    ],
    ids=["default", "high", "medium", "allow_tf32", "fp32_precision"],
)
def test_precise_is_ieee_inside_and_puts_everything_back(choose: Callable[[], None]) -> None:
    choose()
    before = _settings()
    x = torch.rand(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with precise():
            assert (x @ x).dtype == torch.float32
            assert _settings() == ["ieee"] * 4
            assert torch.get_float32_matmul_precision() == "highest"  # the old record agrees with the new one
            assert torch.backends.cudnn.allow_tf32 is False
            assert torch.backends.cuda.matmul.allow_tf32 is False
        assert (x @ x).dtype == torch.bfloat16
    assert _settings() == before
    with pytest.raises(ZeroDivisionError), precise():
        _ = 1 / 0
    assert _settings() == before
    torch.set_float32_matmul_precision("high")  # and the user may go on setting it either way
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.usefixtures("_precision")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_precise_turns_tf32_off_on_the_gpu() -> None:
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(256, 256, generator=generator)
    images, kernels = (
        torch.rand(4, 64, 16, 16, generator=generator),
        torch.rand(64, 64, 3, 3, generator=generator),
    )

    def errors() -> tuple[float, float]:
        product = (a.cuda() @ a.cuda()).cpu().double() - a.double() @ a.double()
        maps = nn.functional.conv2d(images.cuda(), kernels.cuda()).cpu().double()
        exact = nn.functional.conv2d(images.double(), kernels.double())
        return product.abs().max().item(), (maps - exact).abs().max().item()

    rough = errors()
    with precise():
        fine = errors()
    assert all(f < r / 10 for f, r in zip(fine, rough))
    assert errors() == rough


def test_embed_all_joins_batches_in_full_precision(model: nn.Module) -> None:
    images = _images(5)
    with frozen(model) as embed, torch.autocast("cpu", dtype=torch.bfloat16):
        joined = embed_all(embed, images.split(2))
    with frozen(model) as embed:
        whole = embed(images)
    assert joined.dtype == torch.float32
    assert not joined.requires_grad
    torch.testing.assert_close(joined, whole)


def test_embed_all_dtypes_and_nothing_at_all() -> None:
    batches = [torch.rand(2, 3), torch.rand(1, 3)]
    assert embed_all(lambda x: x.double(), batches).dtype == torch.float64
    assert embed_all(lambda x: x.bfloat16(), batches).dtype == torch.float32
    with pytest.raises(ModelError, match="no images"):
        embed_all(lambda x: x, [])
