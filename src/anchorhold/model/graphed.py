"""The forward and backward pass of training, compiled and replayed: at some hundred images launches take the time."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from .compiled import quiet

__all__ = ["Graphed"]

SHAPES = 2  # how many batch sizes are captured: the usual one, and the short one at the end of an epoch


class _Call(nn.Module):
    # Capturing replaces the forward of the module it is given: this one, and the model keeps its own.
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.model(images)
        return out


class Graphed:
    """The model on a batch, with gradient to its weights; the result is valid until the next call.

    For models whose forward pass depends on nothing but weights and images: live BatchNorm counts batches.
    """

    def __init__(self, model: nn.Module, precision: Callable[[], AbstractContextManager[object]]) -> None:
        self.model, self.precision = model, precision
        self._compiled = torch.compile(model)
        self._calls: dict[tuple[int, ...], Callable[[Tensor], Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        shape = tuple(images.shape)
        images = images.contiguous(memory_format=torch.channels_last)
        if shape not in self._calls:
            if len(self._calls) == SHAPES:
                with self.precision():
                    out: Tensor = self.model(images)
                return out
            with quiet(), self.precision(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                sample = images.clone(memory_format=torch.channels_last)
                torch._dynamo.mark_dynamic(sample, 0)  # so that the short batch is no other program
                call = torch.cuda.make_graphed_callables(_Call(self._compiled), (sample,))
            self._calls[shape] = cast(Callable[[Tensor], Tensor], call)
        return self._calls[shape](images)
