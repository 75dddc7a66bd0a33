"""CutMix: a rectangle of another image of the batch, pasted into an image (Yun et al. 2019), by keyed draws."""

import torch
from torch import Tensor

from ..random import Key

__all__ = ["pasted"]


def pasted(images: Tensor, share: float, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """Images with a rectangle of another one, which one (B,), and the area (B,) that each image keeps of itself.

    Of a rectangle the area is uniform from 0 to 1 before it is cut at the border, the centre is uniform, and the shape
    is that of the image. It lies where it lay in the other image. Draws depend only on `key` and the position in the
    batch.

    Args:
        images: (B, C, H, W).
        share: of the images that get a rectangle; the others keep an area of 1.
        key: of the step.

    >>> images = torch.rand(4, 3, 8, 8)
    >>> same, _, kept = pasted(images, 0.0, Key.of(0))
    >>> torch.equal(same, images), kept.tolist()
    (True, [1.0, 1.0, 1.0, 1.0])
    """
    count, _, height, width = images.shape
    slots = torch.arange(count)  # on the CPU, where so few draws are faster and the same for every device
    others = key("other").permutation(count)
    side = key("area").uniform(slots).sqrt() * (key("whether").uniform(slots) < share)
    inside = None
    for name, length in (("row", height), ("column", width)):
        middle, half = length * key(name).uniform(slots), length * side / 2
        begin, end = ((middle + sign * half).round().clamp(0, length) for sign in (-1, 1))
        places = torch.arange(length)
        line = (places >= begin.unsqueeze(1)) & (places < end.unsqueeze(1))  # (B, length)
        inside = line if inside is None else inside.unsqueeze(2) & line.unsqueeze(1)
    assert inside is not None
    kept = 1 - inside.to(images.dtype).mean((1, 2))
    here = others.to(images.device)
    mixed = torch.where(inside.to(images.device).unsqueeze(1), images[here], images)
    return mixed, here, kept.to(images.device)
