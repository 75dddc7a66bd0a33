"""Embeds batches of any size, in parts that fit into memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError, SettingsError
from .frozen import Embed

__all__ = ["chunked"]


def chunked(embed: Embed, batch: int) -> Embed:
    """The same embedding function, with at most `batch` images at a time; halved whenever GPU memory runs out.

    Gradients reach only the images, as through a frozen view. A split batch keeps no activations: each part is
    embedded again to compute its gradient.

    >>> chunked(lambda x: 2 * x.flatten(1), 2)(torch.ones(5, 1, 1, 1)).sum()
    tensor(10.)
    """
    if batch < 1:
        raise SettingsError(f"batch must be at least 1, got {batch}")
    parts = _Parts(batch)

    def run(images: Tensor) -> Tensor:
        if len(images) <= parts.limit:
            try:
                return embed(images)
            except torch.OutOfMemoryError:
                pass  # the memory of the attempt is freed only outside this clause
            parts.shrink(len(images))
        out: Tensor = _Split.apply(images, embed, parts)
        return out

    return run


class _Parts:
    """The number of images that fit, remembered from call to call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def each(self, count: int, act: Callable[[slice], Tensor]) -> Tensor:
        """Run `act` on all of `count` images, part by part."""
        done: list[Tensor] = []
        start = 0
        while start < count:
            rows = slice(start, min(start + self.limit, count))
            try:
                done.append(act(rows))
                start = rows.stop
                continue
            except torch.OutOfMemoryError:
                pass
            self.shrink(rows.stop - rows.start)
        return torch.cat(done)

    def shrink(self, tried: int) -> None:
        if tried == 1:
            raise ModelError("a single image does not fit into GPU memory; free some, or use smaller images")
        self.limit = tried // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, embed: Embed, parts: _Parts) -> Tensor:
        kind = images.device.type
        ctx.save_for_backward(images)
        ctx.embed, ctx.parts = embed, parts
        ctx.cast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}
        ctx.cast["enabled"] = torch.is_autocast_enabled(kind)
        return parts.each(len(images), lambda rows: embed(images[rows]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        (images,) = ctx.saved_tensors

        def gradient(rows: slice) -> Tensor:
            here = images[rows].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(**ctx.cast):
                out = ctx.embed(here)
            found: Tensor = torch.autograd.grad(out, here, above[rows])[0]
            return found

        return ctx.parts.each(len(images), gradient), None, None
