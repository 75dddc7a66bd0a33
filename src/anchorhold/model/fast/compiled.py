"""A compiled frozen embedder: one program for all batch sizes and weights; small batches replay a CUDA graph.

An attack makes thousands of steps through the same network. Compilation fuses the small kernels between convolutions.
The first convolution has 3 channels, which is slow on a GPU; `_stem` turns it into one with 12. A batch of a few dozen
images is limited by kernel launches: it is padded to one of a few sizes and replayed as a graph. The weights of a new
view are copied into the memory from which program and graphs read.
"""

import copy
import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from ..frozen import Embed
from .fold import Folded

__all__ = ["compiled", "quiet"]

# Batch sizes that are captured as graphs, each in some tenths of a second; larger batches run without a graph.
SIZES = (6, 12, 24, 36, 56, 84, 112, 168)
ROUND = 32  # larger batches are padded to a multiple of it
_Run = Callable[[Tensor, dict[str, Tensor]], Tensor]
_RUNS: dict[tuple[str, bool], _Run] = {}
_PROGRAMS: weakref.WeakKeyDictionary[nn.Module, dict[bool, "_Program"]] = weakref.WeakKeyDictionary()


def compiled(owner: nn.Module, parts: Callable[[], tuple[Folded, dict[str, Tensor]]], unit: bool = True) -> Embed:
    """Compiled backbone and linear head in bf16, with unit vectors as output; without `unit`, not normalised.

    `parts` returns the current folded backbone, mean and std and, with a head, weight and bias. The program is cached
    as long as its owner lives. It has the weights of the view that was opened last.
    """
    programs = _PROGRAMS.setdefault(owner, {})
    if unit not in programs:
        programs[unit] = _Program(parts()[0].graph, unit)
    program = programs[unit]
    program.fill(parts, tuple(tensor.data_ptr() for tensor in (*owner.parameters(), *owner.buffers())))
    return program


def _named(parts: tuple[Folded, dict[str, Tensor]]) -> dict[str, Tensor]:
    backbone, rest = parts
    return {f"backbone.{name}": t for name, t in backbone.to(torch.bfloat16).items()} | rest


def _runner(graph: fx.GraphModule, unit: bool) -> _Run:
    """The compiled function of an architecture; weights are arguments, so all models of that kind share it."""
    kind = f"{graph}\n{graph.code}", unit
    if kind not in _RUNS:
        network = _rewritten(graph)

        def run(images: Tensor, numbers: dict[str, Tensor]) -> Tensor:
            x = ((images - numbers["mean"]) / numbers["std"]).to(torch.bfloat16)
            own = {n.removeprefix("backbone."): t for n, t in numbers.items() if n.startswith("backbone.")}
            x = functional_call(network, own, (x,))
            if "weight" in numbers:
                x = F.linear(x, numbers["weight"], numbers["bias"])
            return F.normalize(x.float(), dim=1) if unit else x.float()

        _RUNS[kind] = torch.compile(run, fullgraph=True)
    return _RUNS[kind]


class _Program:
    def __init__(self, graph: fx.GraphModule, unit: bool) -> None:
        self.numbers: dict[str, Tensor] = {}
        self.places: tuple[int, ...] = ()  # addresses of the weights that `refill` folds
        self.refill: torch.cuda.CUDAGraph | None = None
        self.run = _runner(graph, unit)
        self.graphs: dict[tuple[int, ...], _Graph] = {}
        self.turn = 0  # counts forward replays; the shared memory holds the latest
        self.pool = torch.cuda.graph_pool_handle()

    def fill(self, parts: Callable[[], tuple[Folded, dict[str, Tensor]]], places: tuple[int, ...]) -> None:
        """Copy the current weights. Folding takes a hundred small kernels, so it is replayed as a graph too."""
        if self.refill is not None and places == self.places:
            self.refill.replay()
            return
        numbers = _named(parts())
        if not self.numbers:
            self.numbers = {name: _room_for(tensor) for name, tensor in numbers.items()}
        self._copy(numbers)
        torch.cuda.synchronize()
        self.places, self.refill = places, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.refill):
            self._copy(_named(parts()))

    def _copy(self, numbers: dict[str, Tensor]) -> None:
        torch._foreach_copy_(list(self.numbers.values()), [numbers[name] for name in self.numbers])

    def __call__(self, images: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            if (
                len(images) > SIZES[-1] and not images.requires_grad
            ):  # without a gradient torch would compile another program
                return torch.cat([self(part) for part in images.split(SIZES[-1])])
            if len(images) > SIZES[-1]:
                count, alone = len(images), _Alone.apply(images)
                # cuDNN plans each new batch size again; a hundred sizes would take seconds.
                padded = F.pad(alone, (0, 0, 0, 0, 0, 0, 0, -count % ROUND)) if count % ROUND else alone
                return self.direct(padded.contiguous(memory_format=torch.channels_last))[:count]
            size = SIZES[bisect_left(SIZES, len(images))]
            shape = (size, *images.shape[1:])
            if shape not in self.graphs:
                self.graphs[shape] = _Graph(self, shape, images.device)
            out: Tensor = _Replay.apply(images, self.graphs[shape], self)
            return out

    def direct(self, images: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(images, 0)
        out: Tensor = self.run(images, self.numbers)
        return out


def _room_for(tensor: Tensor) -> Tensor:
    """Uninitialised memory for the tensor; weights of convolutions get the memory layout of images.

    The strides depend only on the shape. A 1×1 kernel counts as both layouts and would otherwise keep its strides.
    Two models with different layouts would then need two programs.
    """
    layout = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)


class _Graph:
    """Forward and backward pass for one batch size, captured once. Graphs share memory, so only the latest is valid."""

    def __init__(self, program: _Program, shape: tuple[int, ...], device: torch.device) -> None:
        self.images = torch.zeros(shape, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
        with quiet():
            self._capture(program, device)

    def _capture(self, program: _Program, device: torch.device) -> None:
        ahead = torch.cuda.Stream(device)
        ahead.wait_stream(torch.cuda.current_stream(device))
        with (
            torch.cuda.stream(ahead),
            torch.enable_grad(),
        ):  # compilation and kernel selection must happen before the capture
            for _ in range(2):
                e = program.direct(self.images)
                torch.autograd.grad(e, self.images, torch.ones_like(e))
        torch.cuda.current_stream(device).wait_stream(ahead)
        self.above = torch.zeros_like(e)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.enable_grad():
            with torch.cuda.graph(self.forward, pool=program.pool):
                self.embeddings = program.direct(self.images)
            with torch.cuda.graph(self.backward, pool=program.pool):
                (self.gradient,) = torch.autograd.grad(self.embeddings, self.images, self.above)
        self.embeddings = self.embeddings.detach()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence a warning that capturing cannot avoid."""
    # The warning is about the warm-up on another stream, which is intended.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match", UserWarning)
        yield


class _Alone(torch.autograd.Function):
    """The same images, but not a view: torch would compile one program for each form of base tensor."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        return images.detach()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        return above


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, graph: _Graph, program: _Program) -> Tensor:
        ctx.save_for_backward(images)
        ctx.graph, ctx.program = graph, program
        ctx.turn = _replay(images, graph, program)
        return graph.embeddings[: len(images)].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        (images,) = ctx.saved_tensors
        graph, program = ctx.graph, ctx.program
        if program.turn != ctx.turn:
            _replay(images, graph, program)
        graph.above[: len(images)] = above
        graph.above[len(images) :] = 0
        graph.backward.replay()
        return graph.gradient[: len(images)].clone(), None, None


def _replay(images: Tensor, graph: _Graph, program: _Program) -> int:
    graph.images.data[: len(images)] = images  # the padding is from an earlier batch; its gradient is set to 0
    graph.forward.replay()
    program.turn += 1
    return program.turn


def _rewritten(graph: fx.GraphModule) -> fx.GraphModule:
    """The same network in a form that is faster on a GPU: `_stem`, and pooling before the ReLU."""
    graph = copy.deepcopy(graph)
    _pool_first(graph)
    for node in graph.graph.nodes:
        conv = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(conv, nn.Conv2d) or conv.in_channels > 4:
            continue
        kernel, padding = conv.kernel_size[0], conv.padding[0]
        square = conv.kernel_size == (kernel, kernel) and conv.padding == (padding, padding)
        plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
        if conv.stride == (2, 2) and square and plain and isinstance(padding, int):
            with graph.graph.inserting_before(node):
                weight = graph.graph.get_attr(f"{node.target}.weight")
                bias = graph.graph.get_attr(f"{node.target}.bias") if conv.bias is not None else None
                other = graph.graph.call_function(_stem, (node.args[0], weight, bias, padding))
            node.replace_all_uses_with(other)
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _pool_first(graph: fx.GraphModule) -> None:
    """Swap ReLU and max pooling: max(relu(x)) = relu(max(x)), also for gradients, on four times fewer numbers."""
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or not isinstance(graph.get_submodule(str(node.target)), nn.MaxPool2d):
            continue
        before = node.args[0]
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        source = before.args[0]
        if isinstance(graph.get_submodule(str(before.target)), nn.ReLU) and isinstance(source, fx.Node):
            before.replace_all_uses_with(source)
            node.append(before)
            node.replace_all_uses_with(before, lambda user, relu=before: user is not relu)
            before.args = (node,)


def _stem(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """F.conv2d(x, weight, bias, stride=2, padding=padding), computed on 2 × 2 squares of pixels as channels.

    y[i] = Σ_k w[k]·x[2i − p + k]. A zero before w makes p even, and a zero behind it makes the length of w even. The
    sum then runs over whole squares. The convolution has stride 1, a quarter of the taps and four times the channels.
    """
    outputs, channels, kernel, _ = weight.shape
    before = padding % 2
    behind = (kernel + before) % 2
    taps = (kernel + before + behind) // 2
    weight = F.pad(weight, (before, behind, before, behind))
    weight = weight.reshape(outputs, channels, taps, 2, taps, 2).permute(0, 1, 3, 5, 2, 4)
    weight = weight.reshape(outputs, 4 * channels, taps, taps).contiguous(memory_format=torch.channels_last)
    edges: list[int] = []
    for side in (x.shape[3], x.shape[2]):
        length = (side + 2 * padding - kernel) // 2 + 1
        edges += [padding + before, 2 * (length + taps - 1) - side - padding - before]
    squares = F.pixel_unshuffle(F.pad(x, edges), 2).contiguous(memory_format=torch.channels_last)
    return F.conv2d(squares, weight, bias)
