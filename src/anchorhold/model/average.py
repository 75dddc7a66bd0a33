"""A running mean of the weights, often more robust than the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Average"]


COUNT = "count"  # beside the tensors of the mean in a checkpoint


class Average:
    """A mean of the weights over optimiser steps, of one of two kinds; with decay 0 and share 0 it costs nothing.

    With a decay: θ̄ ← decay·θ̄ + (1 − decay)·θ after each step. With a share: the plain mean of all θ after that share
    of the training (as stochastic weight averaging has it, Izmailov et al. 2018), and θ itself before.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(net.weight)
    >>> mean = Average(net, 0.75)
    >>> _ = nn.init.ones_(net.weight)
    >>> mean.update()
    >>> with mean.lent():
    ...     print(net.weight.item())
    0.25
    """

    def __init__(self, model: nn.Module, decay: float, share: float = 0.0) -> None:
        self.decay, self.share = decay, share
        # Includes the statistics of live BatchNorm; the mean of a constant buffer is the buffer itself.
        tensors = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
        tensors += [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
        self._own = dict(tensors) if decay or share else {}
        self.tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in self._own.items()}
        if share:
            self.tensors[COUNT] = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def update(self, progress: float = 1.0) -> None:
        """Update the mean with the current weights; `progress` is the finished share of the training."""
        if not self._own:
            return
        weight = 1 - self.decay
        if self.share:
            # On the CPU, so that no step waits for the GPU; a resumed run finds it on the device.
            self.tensors[COUNT] = self.tensors[COUNT].cpu() + float(progress >= self.share)
            weight = 1 / max(1.0, float(self.tensors[COUNT]))
        torch._foreach_lerp_([self.tensors[name] for name in self._own], list(self._own.values()), weight)

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
