"""BatchNorm folded into the convolutions before it, for frozen views of a model.

In eval mode BatchNorm is the affine map γ(x − μ)/√(σ² + ε) + β of each channel, so a convolution (w, b) followed
by it is the convolution (w·s, (b − μ)·s + β) with s = γ/√(σ² + ε). This saves a third of a ResNet's kernels.
The structure of the folded network is cached on the meta device; its weights are computed for each view.
"""

import copy
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

__all__ = ["Folded", "foldable", "folded"]

_Pair = tuple[str, str]  # names of a convolution and of the BatchNorm folded into it
_SHAPES: weakref.WeakKeyDictionary[nn.Module, tuple[fx.GraphModule, list[_Pair]] | None] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Folded:
    """A network without BatchNorm, and its current weights."""

    graph: fx.GraphModule  # on the meta device
    tensors: dict[str, Tensor]
    _cast: dict[torch.dtype, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self, x: Tensor) -> Tensor:
        tensors = self.tensors
        if torch.is_autocast_enabled(x.device.type):
            tensors = self.to(torch.get_autocast_dtype(x.device.type))
        out: Tensor = functional_call(self.graph, tensors, (x,))
        return out

    def to(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights in another precision, cached; autocast would cast every weight at every call."""
        if dtype not in self._cast:
            cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
            self._cast[dtype] = cast
        return self._cast[dtype]


def foldable(module: nn.Module) -> bool:
    """Whether the module has a BatchNorm that can be folded; with adapters in it (LoRA) it is used as it is."""
    if any(hasattr(each, "base_layer") for each in module.modules()):
        return False
    if module not in _SHAPES:
        _SHAPES[module] = _shape(module)
    return _SHAPES[module] is not None


def folded(module: nn.Module) -> Folded | None:
    """`module` in eval mode as a function without BatchNorm, or None if there is nothing to fold."""
    shape = _SHAPES[module] if foldable(module) else None
    if shape is None:
        return None
    graph, pairs = shape
    own = {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}
    for conv, norm in pairs:
        eps = float(module.get_submodule(norm).eps)  # type: ignore[arg-type]
        scale = own[f"{norm}.weight"] / torch.sqrt(own[f"{norm}.running_var"] + eps)
        bias = own[f"{conv}.bias"] if f"{conv}.bias" in own else torch.zeros_like(scale)
        own[f"{conv}.weight"] = own[f"{conv}.weight"] * scale.reshape(-1, *[1] * (own[f"{conv}.weight"].ndim - 1))
        own[f"{conv}.bias"] = (bias - own[f"{norm}.running_mean"]) * scale + own[f"{norm}.bias"]
    names = [name for name, _ in (*graph.named_parameters(), *graph.named_buffers())]
    return Folded(graph, {name: own[name] for name in names})


def _shape(module: nn.Module) -> tuple[fx.GraphModule, list[_Pair]] | None:
    """The network without BatchNorm, and the pairs of convolution and BatchNorm; None if that fails."""
    try:
        with torch.device("meta"):
            graph = fx.symbolic_trace(copy.deepcopy(module).to("meta").eval())
    except Exception:  # a forward that cannot be traced is not folded
        return None
    pairs = []
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    times = Counter(id(graph.get_submodule(str(node.target))) for node in calls)
    for node in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        conv, norm = (graph.get_submodule(str(each.target)) for each in (before, node))
        # Only plain layers that are used once: timm's BatchNormAct2d is a BatchNorm2d with an activation.
        if type(conv) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d or times[id(conv)] + times[id(norm)] != 2:
            continue
        if not norm.affine or norm.running_var is None:
            continue
        conv.bias = nn.Parameter(torch.empty(conv.out_channels, device="meta"))
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)
        pairs.append((str(before.target), str(node.target)))
    if not pairs:
        return None
    graph.graph.lint()
    graph.recompile()
    graph.delete_all_unused_submodules()
    return graph, pairs
