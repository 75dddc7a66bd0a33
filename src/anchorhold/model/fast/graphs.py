"""Forward and backward pass of training, compiled and replayed: batches of some hundred images are launch-bound."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from .compiled import quiet

__all__ = ["Graphed"]

PATIENCE = 3  # a batch size that comes N times in a row is captured


class _Call(nn.Module):
    # Capturing replaces the forward method of its module; with this wrapper the model keeps its own.
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.model(images)
        return out


class Graphed:
    """The model on a batch, with gradients of its weights; the result is valid until the next call.

    Only for models whose forward pass depends on nothing but weights and images; live BatchNorm counts batches.
    """

    def __init__(self, model: nn.Module, precision: Callable[[], AbstractContextManager[object]]) -> None:
        self.model, self.precision = model, precision
        self._shape: tuple[int, ...] = ()
        self._times = 0  # in a row
        self._call: Callable[[Tensor], Tensor] | None = None

    def __call__(self, images: Tensor) -> Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        if self._call is None:
            self._times = self._times + 1 if images.shape == self._shape else 1
            self._shape = tuple(images.shape)
            if self._times == PATIENCE:
                self._call = self._captured(images)
        if self._call is not None and images.shape == self._shape:
            return self._call(images)
        with self.precision():  # e.g. the short batch at the end of an epoch
            out: Tensor = self.model(images)
        return out

    def _captured(self, images: Tensor) -> Callable[[Tensor], Tensor]:
        with quiet(), self.precision(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            call = _Call(torch.compile(self.model, dynamic=False))
            sample = images.clone(memory_format=torch.channels_last)
            return cast(Callable[[Tensor], Tensor], torch.cuda.make_graphed_callables(call, (sample,)))
