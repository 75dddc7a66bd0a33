"""The compiled view is the model: what can be told of it without a GPU, and with one."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from anchorhold.model.embedder import Embedder
from anchorhold.model.fast.compiled import _PROGRAMS, _Alone, _rewritten, _room_for, _stem
from anchorhold.model.fast.fold import folded
from anchorhold.model.frozen import frozen
from anchorhold.pretraining.features import Through
from tests.model.fast.test_fold import shaken

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled views are for GPUs, and there is none")


@pytest.mark.parametrize(("kernel", "padding"), [(7, 3), (3, 1), (5, 2), (4, 1), (3, 0), (2, 0), (7, 2), (6, 3)])
@pytest.mark.parametrize("side", [32, 33])
def test_the_stem_is_a_convolution_with_stride_two(kernel: int, padding: int, side: int) -> None:
    generator = torch.Generator().manual_seed(kernel)
    x, w, b = (
        torch.rand(shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 3, side, side + 3), (5, 3, kernel, kernel), (5,))
    )
    x.requires_grad_()
    plain, other = F.conv2d(x, w, b, 2, padding), _stem(x, w, b, padding)
    assert plain.shape == other.shape and torch.allclose(plain, other, atol=1e-12)
    above = torch.rand(plain.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad(y, x, above)[0] for y in (plain, other)]
    assert torch.allclose(*gradients, atol=1e-12)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_rewritten_network_is_the_same_with_its_gradients(name: str) -> None:
    view = folded(shaken(Embedder(name, dim=8)).double().backbone)
    assert view is not None
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    other = _rewritten(view.graph)
    before, after = view(x), functional_call(other, view.tensors, (x,))
    assert torch.allclose(before, after, atol=1e-10)
    gradients = [torch.autograd.grad(y[:, 0].sum(), x)[0] for y in (before, after)]
    assert torch.allclose(*gradients, atol=1e-10) and gradients[0].abs().max() > 0
    assert other.code != view.graph.code  # and it is another form


def test_images_alone_are_no_view_and_pass_their_gradient_on() -> None:
    x = torch.rand(2, 3, 3, 4, 4, requires_grad=True)
    view = x.flatten(0, 1)
    alone = _Alone.apply(view)
    assert view._base is not None and alone._base is None
    assert alone.data_ptr() == x.data_ptr()  # and no copy
    (gradient,) = torch.autograd.grad(alone.sin().sum(), x)
    assert torch.allclose(gradient, x.cos())


def test_room_for_weights_depends_on_their_shape_alone() -> None:
    for size in (1, 3):  # a kernel of one pixel counts as laid either way
        kernel = torch.rand(8, 4, size, size)
        rooms = [_room_for(each).stride() for each in (kernel, kernel.to(memory_format=torch.channels_last))]
        assert rooms[0] == rooms[1] == (4 * size * size, 1, 4 * size, 4)
    assert _room_for(torch.rand(4, 6).T).stride() == (4, 1)


@needs_gpu
def test_models_that_are_laid_differently_share_a_program() -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layout in (torch.channels_last, torch.contiguous_format):
            model = shaken(Embedder("resnet18", dim=32)).cuda().to(memory_format=layout)
            for shape in ((200, 1), (100, 3), (40, 1)):
                x = torch.rand(*shape, 3, 64, 64, device="cuda", requires_grad=True)
                with frozen(model, True) as embed, torch.autocast("cuda", torch.bfloat16):
                    e = embed(x.flatten(0, 1))
                torch.autograd.grad(e[:, 0].sum(), x)


@needs_gpu
def test_the_fast_view_agrees_with_the_plain_one_for_any_batch_and_any_weights() -> None:
    model = shaken(Embedder("resnet18", dim=32)).cuda().to(memory_format=torch.channels_last)
    for weights in range(2):
        for count in (1, 5, 40, 168, 200):
            x = torch.rand(count, 3, 64, 64, device="cuda", requires_grad=True)
            found = []
            for fast in (False, True):
                with frozen(model, fast) as embed, torch.autocast("cuda", torch.bfloat16):
                    e = embed(x)
                found.append((e, torch.autograd.grad(e[:, 0].sum(), x)[0]))
            assert F.cosine_similarity(found[0][0], found[1][0]).min() > 0.99
            assert F.cosine_similarity(found[0][1].flatten(1), found[1][1].flatten(1)).min() > 0.9
        with torch.no_grad():
            model.backbone.conv1.weight.mul_(1 + weights)


@needs_gpu
def test_fast_features_have_their_length_beside_fast_embeddings() -> None:
    model = shaken(Embedder("resnet18", dim=32)).cuda().to(memory_format=torch.channels_last)
    tail = torch.nn.Linear(model.width, 7).cuda()
    for weights in range(2):
        for count in (5, 168, 200):
            x = torch.rand(count, 3, 64, 64, device="cuda", requires_grad=True)
            for view in (Through(model), Through(model, tail), model):  # a new one each time, as in training
                found = []
                for fast in (False, True):
                    with frozen(view, fast) as embed, torch.autocast("cuda", torch.bfloat16):
                        e = embed(x).float()
                    found.append((e, torch.autograd.grad(e.square().sum(), x)[0]))
                (plain, way), (quick, other) = found
                assert (plain - quick).norm() < 0.05 * plain.norm()
                if view is not model:  # unit vectors have no gradient of their length
                    assert F.cosine_similarity(way.flatten(1), other.flatten(1)).min() > 0.9
        with torch.no_grad():
            model.backbone.conv1.weight.mul_(1.5 + weights)
    assert len(_PROGRAMS[model]) == 2


@needs_gpu
def test_two_batches_may_wait_for_their_gradients() -> None:
    model = shaken(Embedder("resnet18", dim=32)).cuda()
    x, y = (torch.rand(4, 3, 64, 64, device="cuda", requires_grad=True) for _ in range(2))
    with frozen(model, True) as embed, torch.autocast("cuda", torch.bfloat16):
        both = embed(x), embed(y)
        alone = embed(x)
        (expected,) = torch.autograd.grad(alone[:, 0].sum(), x)
        (first,) = torch.autograd.grad(both[0][:, 0].sum(), x)
    assert torch.allclose(first, expected, atol=1e-6)
