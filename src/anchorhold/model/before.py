"""A step before the model that has no useful gradient, such as JPEG or quantisation, with another one on the way back.

Straight-through gradients, or BPDA (Athalye, Carlini and Wagner, ICML 2018): the forward pass is exactly the true step.
The backward pass is that of a differentiable stand-in, or of the identity.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import AnchorholdError, ModelError, SettingsError, lacks_memory
from ..extensions import kind_of, reason_of

__all__ = ["Backward", "Step", "check_step", "named", "taken"]

Step = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) in [0, 1] to images of the same shape."""

Backward = Literal["identity"] | Step


def check_step(before: object, backward: object, gradients: bool) -> None:
    """Refuse a step or a stand-in that cannot be used."""
    if before is not None and not callable(before):
        raise SettingsError(f"before is {kind_of(before)}; give a function from images to images of the same shape")
    if backward is None:
        return
    if before is None:
        raise SettingsError("backward belongs to the step named by before: give before too, or leave backward out")
    if backward != "identity" and not callable(backward):
        raise SettingsError(f"backward {backward!r}; give 'identity' or a differentiable function of images")
    if not gradients:
        raise SettingsError("attacks on a model without gradients take none: leave backward out")


def taken(before: Step, backward: Backward | None, images: Tensor) -> Tensor:
    """The images after the step; gradients pass through `backward`, where that is given."""
    if backward is None:
        return _called(before, images, "before")
    with torch.no_grad():
        true = _called(before, images.detach(), "before")
    if not (images.requires_grad and torch.is_grad_enabled()):
        return true
    near = images if backward == "identity" else _called(backward, images, "backward")
    if not near.requires_grad:
        raise ModelError("backward gives images without a gradient; give a differentiable function, or 'identity'")
    out: Tensor = _Swap.apply(near, true)
    return out


def named(step: object) -> str:
    """The name of a step, for notes."""
    return str(getattr(step, "__name__", type(step).__name__))


class _Swap(torch.autograd.Function):
    """The value of the second argument with the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, near: Tensor, true: Tensor) -> Tensor:
        return true.clone()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        return above, None


def _called(step: Step, images: Tensor, role: str) -> Tensor:
    try:
        out = step(images)
    except (Exception, SystemExit) as error:  # user code may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise ModelError(f"{role} fails on images of shape {tuple(images.shape)} ({reason_of(error)})") from error
    if not isinstance(out, Tensor) or out.shape != images.shape or not out.is_floating_point():
        what = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else kind_of(out)
        raise ModelError(f"{role} returns {what} for images {tuple(images.shape)}; it must return floats of that shape")
    return out.to(images)
