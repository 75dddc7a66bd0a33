"""Random colours for training: brightness, contrast and saturation of each image, by keyed draws."""

import torch
from torch import Tensor

from ..random import Key

__all__ = ["jittered"]

_GREY = (0.2989, 0.587, 0.114)  # of red, green and blue, as torchvision has it


def jittered(images: Tensor, amount: float, key: Key, slots: Tensor) -> Tensor:
    """Images (B, C, H, W) in [0, 1] with other brightness, contrast and saturation, in this order.

    Each factor is uniform from 1 − amount to 1 + amount, and depends only on `key` and `slots[i]`. Images with other
    than three channels have no saturation.

    >>> image = torch.full((1, 3, 2, 2), 0.5)
    >>> float(jittered(image, 0.0, Key.of(0), torch.arange(1)).max())
    0.5
    """
    for part in ("brightness", "contrast", "saturation"):
        drawn = 1 + amount * (2 * key(part).uniform(slots) - 1)
        factor = drawn.to(images).reshape(-1, 1, 1, 1)
        if part == "brightness":
            images = (factor * images).clamp(0, 1)
        elif part == "contrast":
            middle = _grey(images).mean((1, 2, 3), keepdim=True)
            images = (middle + factor * (images - middle)).clamp(0, 1)
        elif images.shape[1] == 3:
            grey = _grey(images)
            images = (grey + factor * (images - grey)).clamp(0, 1)
    return images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor(_GREY).to(images).reshape(-1, 1, 1)).sum(1, keepdim=True)
