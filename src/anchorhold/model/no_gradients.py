"""A function that returns vectors and no gradient, as a module: a remote service or an ONNX session."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError, SettingsError
from ..extensions import kind_of
from .code_hash import code_of

__all__ = ["Function", "check_function", "gives_gradients"]


class Function(nn.Module):
    """Calls `function` with images (B, C, H, W) on the CPU, and gives its vectors as a tensor without a gradient.

    The function gets a float32 tensor, or with `arrays` a NumPy array. It may return either, or lists of numbers. It
    has no weights, so `code` identifies it: a hash of its name and its own code, not of what it calls.
    """

    def __init__(self, function: Callable[..., Any], arrays: bool = False) -> None:
        super().__init__()
        self._function, self._arrays = function, arrays
        self.code, self.name = code_of(function), getattr(function, "__name__", type(function).__name__)

    def forward(self, images: Tensor) -> Any:
        given = images.detach().to("cpu", torch.float32).contiguous()
        with torch.no_grad():
            out = self._function(given.numpy().copy() if self._arrays else given)
        return _tensors(out, images.device)


def check_function(function: object, gradients: bool, arrays: bool) -> None:
    """Refuse what cannot be called, and options that do not belong together."""
    if not callable(function):
        raise ModelError(f"wrap needs a module or a function, got {kind_of(function)}")
    if gradients and not isinstance(function, nn.Module):
        raise ModelError(
            f"wrap needs an nn.Module, got {kind_of(function)}; call it in the forward of an nn.Module, "
            "or, if it gives no gradients, use ah.wrap(function, gradients=False)"
        )
    if arrays and (gradients or isinstance(function, nn.Module)):
        raise SettingsError(
            "arrays are for a function of NumPy arrays: use ah.wrap(function, gradients=False, arrays=True)"
        )


def gives_gradients(model: nn.Module) -> bool:
    """Whether attacks may take gradients of the model: yes, unless it was wrapped with gradients=False."""
    return bool(getattr(model, "gradients", True))


def _tensors(out: Any, device: torch.device) -> Any:
    """Arrays and lists of numbers as tensors, also inside a tuple or a mapping; refuses numbers that are not finite."""
    if isinstance(out, dict):
        return {name: _tensors(part, device) for name, part in out.items()}
    if isinstance(out, tuple):
        return tuple(_tensors(part, device) for part in out)
    if isinstance(out, list) and any(isinstance(part, np.ndarray | Tensor) and np.ndim(part) > 1 for part in out):
        return [_tensors(part, device) for part in out]  # several outputs, as an ONNX session gives them
    if not isinstance(out, np.ndarray | Tensor | list):
        return out
    try:
        made = torch.as_tensor(np.asarray(out) if isinstance(out, list) else out)
    except (TypeError, ValueError, RuntimeError):
        raise ModelError(f"the function returns {kind_of(out)} that is no array of numbers; return (B, D)") from None
    if made.is_floating_point() and made.ndim and not bool(made.isfinite().all()):
        rows = int((~made.isfinite()).reshape(len(made), -1).any(1).sum())
        raise ModelError(
            f"the function returns NaN or infinity for {rows} of {len(made)} images; attacks cannot use it"
        )
    # fp32, as the images were: NumPy's float64 would make the whole audit compute in float64.
    return made.detach().to(device, torch.float32 if made.is_floating_point() else made.dtype)
