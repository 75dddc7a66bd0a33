"""A running mean of the weights, often more robust than the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Average"]


class Average:
    """θ̄ ← decay·θ̄ + (1 − decay)·θ after each optimiser step; decay 0 turns it off at no cost.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(net.weight)
    >>> mean = Average(net, 0.75)
    >>> _ = nn.init.ones_(net.weight)
    >>> mean.update()
    >>> with mean.lent():
    ...     print(net.weight.item())
    0.25
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        # Includes the statistics of live BatchNorm; the mean of a constant buffer is the buffer itself.
        tensors = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
        tensors += [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
        self._own = dict(tensors) if decay else {}
        self.tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in self._own.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the mean with the current weights."""
        if self.decay:
            torch._foreach_lerp_(list(self.tensors.values()), list(self._own.values()), 1 - self.decay)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Give the model the averaged weights for the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, p in self._own.items():
            kept = p.clone()
            p.copy_(self.tensors[name])
            self.tensors[name].copy_(kept)
