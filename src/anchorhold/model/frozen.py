"""How attack code sees a model: a frozen view, and full precision for whatever is measured."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ModelError

__all__ = ["Embed", "connected", "embed_all", "frozen", "precise"]

Embed = Callable[[Tensor], Tensor]
"""Images in [0, 1] to embeddings, (B, C, H, W) -> (B, D): all that attack code ever sees of a model."""


@contextmanager
def frozen(model: nn.Module, fast: bool = False) -> Iterator[Embed]:
    """A view of the model in eval mode whose gradients reach the images and nothing else.

    A view is of the weights as they are when it is opened; after a training step open a new one. A model with a
    method `folded` (an Embedder's) lends its folded network, with `fast` a compiled one, which holds the numbers of the
    view that was opened last. On leaving, every submodule is in the mode it was in.

    >>> net = nn.Linear(2, 2)
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> with frozen(net) as embed:
    ...     embed(x).sum().backward()
    >>> x.grad is not None, net.weight.grad is None
    (True, True)
    """
    # Flags are put back one by one: train() would undo a submodule that was left in another mode on purpose.
    modes = [(module, module.training) for module in model.modules()]
    fold = getattr(model, "folded", None)
    network: Embed | None = fold(fast) if callable(fold) else None
    tensors = (*model.named_parameters(), *model.named_buffers()) if network is None else ()
    state = {name: tensor.detach() for name, tensor in tensors}
    open_ = True

    def embed(images: Tensor) -> Tensor:
        if not open_:
            raise RuntimeError("this frozen view has ended; open a new one with frozen(model)")
        out: Tensor = functional_call(model, state, (images,)) if network is None else network(images)
        return out

    try:
        model.eval()
        yield embed
    finally:
        open_ = False
        for module, mode in modes:
            module.training = mode


def connected(embed: Embed) -> Embed:
    """The same, with a gradient of zero where a model cuts the graph: attacks then find nothing, and do not break."""

    def run(images: Tensor) -> Tensor:
        e = embed(images)
        cut = images.requires_grad and torch.is_grad_enabled() and not e.requires_grad
        return e + 0 * images.flatten(1).sum(1, keepdim=True) if cut else e

    return run


def _precisions() -> list[Any]:
    """The places where torch keeps how exact fp32 arithmetic has to be; CPUs round to bf16 if told to."""
    backends: Any = torch.backends
    return [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    # Up to torch 2.11 or so the old setters advise the new ones; we use both, for a reason.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        yield


def _readable(read: Callable[[], Any]) -> Any:
    # The old getters raise once precision was set through the new ones; then there is nothing to restore.
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def precise(tf32: bool = False) -> Iterator[None]:
    """Full fp32: no autocast, and no TF32 unless asked for; what was set before is set again afterwards.

    torch keeps two records of this, an old one (`set_float32_matmul_precision`, `cudnn.allow_tf32`) and a new
    one (`fp32_precision`), and the old getters raise while the two disagree. Both are set, so that code which
    runs inside may read either.
    """
    places = _precisions()
    before = [place.fp32_precision for place in places]
    with _quiet():
        matmul = _readable(torch.get_float32_matmul_precision)
        cudnn = _readable(lambda: torch.backends.cudnn.allow_tf32)
    try:
        with _quiet():
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
        for place in places:
            place.fp32_precision = "tf32" if tf32 and "mkldnn" not in str(place) else "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        with _quiet():
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            if cudnn is not None:
                torch.backends.cudnn.allow_tf32 = cudnn
        for place, value in zip(places, before):
            place.fp32_precision = value


def embed_all(embed: Embed, batches: Iterable[Tensor]) -> Tensor:
    """The embeddings of all batches, one after another, without gradient and in full fp32 (float64 stays).

    >>> embed_all(lambda x: 2 * x, [torch.ones(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    # The generator of batches runs under no_grad and precise too: it only loads and moves images.
    with torch.no_grad(), precise():
        parts = [embed(images) for images in batches]
    if not parts:
        raise ModelError("there are no images to embed: the data set or folder is empty")
    return torch.cat([part if part.dtype == torch.float64 else part.float() for part in parts])
