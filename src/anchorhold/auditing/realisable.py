"""Perturbed images as files: rounded to 8 bits, or as a JPEG of quality 90."""

import io
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..errors import check
from ..perturb.ball import Ball

__all__ = ["FILE_FORMS", "JPEG_CHANNELS", "in_8_bits", "levels_within", "through_jpeg", "to_bytes"]

JPEG_CHANNELS = (1, 3)

QUALITY = 90
HALVINGS = 16


def _levels(images: Tensor) -> Tensor:
    """Images in [0, 1] as the nearest levels 0 … 255, in their own dtype."""
    return (images.detach() * 255).round().clamp(0, 255)


def in_8_bits(images: Tensor) -> Tensor:
    """Images in [0, 1] rounded to multiples of 1/255."""
    return _levels(images) / 255


def to_bytes(images: Tensor) -> Tensor:
    """NCHW images in [0, 1] as NHWC uint8."""
    return _levels(images).to(torch.uint8).permute(0, 2, 3, 1)


def through_jpeg(images: Tensor, quality: int = QUALITY) -> Tensor:
    """NCHW images after saving and loading as JPEG; they may leave the ε ball."""
    from PIL import Image

    check(images.shape[1] in JPEG_CHANNELS, f"JPEG holds 1 or 3 channels, not {images.shape[1]}")
    back = []
    for pixels in to_bytes(images).cpu().numpy():
        buffer = io.BytesIO()
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "JPEG", quality=quality)
        back.append(torch.from_numpy(np.asarray(Image.open(buffer)).reshape(pixels.shape).copy()))
    return (torch.stack(back).permute(0, 3, 1, 2).to(images.device).to(images.dtype) / 255).contiguous()


def levels_within(images: Tensor, clean: Tensor, ball: Ball) -> Tensor:
    """The 8-bit levels (N, C, H, W) nearest to the images and within the ball around the clean ones."""
    centre = 255 * clean.double()
    if ball.norm == "l2":
        return _levels_within_l2(255 * images.double(), centre, 255 * ball.eps)
    low, high = (centre - 255 * ball.eps - 1e-4).ceil(), (centre + 255 * ball.eps + 1e-4).floor()
    wanted = (255 * images.double()).round()
    # Where no level lies within ε, take the level nearest to the clean pixel, as a file would.
    wanted = torch.where(low <= high, torch.minimum(torch.maximum(wanted, low), high), centre.round())
    return wanted.clamp(0, 255).to(torch.uint8)


def _levels_within_l2(images: Tensor, centre: Tensor, eps: float) -> Tensor:
    """Rounding can lengthen a perturbation: it is shortened until the rounded one fits. All in units of a level."""
    wide = (-1, *[1] * (images.ndim - 1))
    shift, share = images - centre, images.new_ones(len(images))
    low, high = torch.zeros_like(share), torch.ones_like(share)
    for _ in range(HALVINGS):
        levels = (centre + share.reshape(wide) * shift).round().clamp(0, 255)
        fits = torch.linalg.vector_norm((levels - centre).flatten(1), dim=1) <= eps + 1e-4
        low, high = torch.where(fits, share, low), torch.where(fits, high, share)
        share = torch.where(low == 1, low, (low + high) / 2)
    return (centre + low.reshape(wide) * shift).round().clamp(0, 255).to(torch.uint8)


# Perturbed images as files, from the images, the clean ones and their ball.
FILE_FORMS: dict[str, Callable[[Tensor, Tensor, Ball], Tensor]] = {  # JPEG for 1 or 3 channels alone
    "8 bits": lambda images, clean, ball: levels_within(images, clean, ball).to(images.dtype) / 255,
    "JPEG 90": lambda images, clean, ball: through_jpeg(images),
}
