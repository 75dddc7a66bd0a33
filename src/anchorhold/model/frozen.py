"""Frozen views of a model for attacks, and embeddings in full precision for measurements."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..data.images import Images
from ..device import precise
from ..errors import ModelError

__all__ = [
    "Embed",
    "connected",
    "embed_all",
    "embed_images",
    "frozen",
]

Embed = Callable[[Tensor], Tensor]
"""Images in [0, 1] to embeddings, (B, C, H, W) -> (B, D): the only interface of a model to attacks."""


@contextmanager
def frozen(model: nn.Module, fast: bool = False) -> Iterator[Embed]:
    """A view of the model in eval mode; gradients reach only the images.

    A view has the weights of the moment it is opened; open a new one after a training step. A model with a method
    `folded`, such as an Embedder, provides its folded network. With `fast` it is compiled, and then has the weights
    of the view that was opened last. At the end every submodule returns to its previous mode.

    >>> net = nn.Linear(2, 2)
    >>> x = torch.zeros(1, 2, requires_grad=True)
    >>> with frozen(net) as embed:
    ...     embed(x).sum().backward()
    >>> x.grad is not None, net.weight.grad is None
    (True, True)
    """
    # Modes are restored one by one, because train() would change submodules that are kept in another mode.
    modes = [(module, module.training) for module in model.modules()]
    fold = getattr(model, "folded", None)
    network: Embed | None = fold(fast) if callable(fold) else None
    tensors = (*model.named_parameters(), *model.named_buffers()) if network is None else ()
    state = {name: tensor.detach() for name, tensor in tensors}
    open_ = True

    def embed(images: Tensor) -> Tensor:
        if not open_:
            raise RuntimeError("this frozen view is closed; open a new one with frozen(model)")
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
    """The same function, with a zero gradient if the model detaches its output; attacks then fail without an error."""

    def run(images: Tensor) -> Tensor:
        e = embed(images)
        cut = images.requires_grad and torch.is_grad_enabled() and not e.requires_grad
        return e + 0 * images.flatten(1).sum(1, keepdim=True) if cut else e

    return run


def embed_images(embed: Embed, images: Images, batch: int = 256) -> Tensor:
    """Embeddings of all test images of a split, in fp32; ranks share the batches."""
    parts = list(torch.arange(len(images.labels)).split(batch))

    def work(mine: Sequence[Tensor]) -> Tensor:
        return embed_all(embed, images.plain(torch.cat(list(mine)), batch))

    return images.ranks.spread(parts, work, [len(part) for part in parts])


def embed_all(embed: Embed, batches: Iterable[Tensor]) -> Tensor:
    """The embeddings of all batches, concatenated, without gradient and in full fp32 (float64 stays).

    >>> embed_all(lambda x: 2 * x, [torch.ones(2, 3), torch.ones(1, 3)]).shape
    torch.Size([3, 3])
    """
    # The generator of batches also runs under no_grad and precise, which is fine: it only loads images.
    with torch.no_grad(), precise():
        parts = [embed(images) for images in batches]
    if not parts:
        raise ModelError("there are no images to embed; give a data set or folder that has some")
    return torch.cat([part if part.dtype == torch.float64 else part.float() for part in parts])
