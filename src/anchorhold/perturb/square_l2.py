"""The moves of Square in an L2 ball (Andriushchenko et al., ECCV 2020, algorithm 3).

The perturbation always has length ε before it is clamped to the range of pixels. A query draws two windows of the same
size. Both lose what they hold. The first gets a new pattern, mixed with its old one, with the length that both had and
whatever the clamp left unused. The pattern η has two halves of opposite sign, each a pyramid that is highest at its
middle, lying or standing at random. The first query lays such tiles over the whole image, five by five.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..random import Key
from .ball import Ball
from .windows import Windows

__all__ = ["eta", "first_l2", "moved_l2"]

TILES = 5  # a side, of the first query
_TINY = 1e-12


@lru_cache(maxsize=64)
def eta(tall: int, wide: int) -> Tensor:
    """(tall, wide) the pattern η of length 1: a pyramid in the upper half, its negative in the lower one.

    >>> eta(3, 3)[0].sum() > 0, bool((eta(3, 3)[1:] < 0).all())
    (tensor(True), True)
    """
    upper = tall // 2
    made = torch.cat([_pyramid(upper, wide), -_pyramid(tall - upper, wide)])
    return _normal(made)


def _pyramid(tall: int, wide: int) -> Tensor:
    """Rectangles around the middle, the n-th reaching n pixels far and adding 1/(n + 1)²; of length 1."""
    made = torch.zeros(tall, wide, dtype=torch.float64)
    if not made.numel():
        return made
    row, column = tall // 2, wide // 2
    for reach in range(max(row, column) + 1):
        top, left = max(row - reach, 0), max(column - reach, 0)
        made[top : row + reach + 1, left : column + reach + 1] += 1 / (reach + 1) ** 2
    return _normal(made)


def _normal(pattern: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(pattern)
    return pattern / length


def _patterns(key: Key, query: int, ids: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """(N, tall, wide) η lying or standing, by a draw for each id."""
    lying, standing = (each.to(ids.device, dtype) for each in (eta(*size), eta(*size[::-1]).T))
    turned = key("turned", query).uniform(ids) < 0.5
    return torch.where(turned[:, None, None], standing, lying)


def first_l2(ball: Ball, clean: Tensor, key: Key, ids: Tensor) -> Tensor:
    """Tiles of η over the images (N, C, H, W), each with its own sign per channel, together of length ε."""
    channels, height, width = clean.shape[1:]
    size = max(1, height // TILES), max(1, width // TILES)
    counts = [min(TILES, whole // one) for whole, one in zip((height, width), size)]
    edges = [(whole - one * count) // 2 for whole, one, count in zip((height, width), size, counts)]
    shift = torch.zeros_like(clean)
    signs = _signs(key("tiles"), 0, ids, (channels, *counts), clean)
    for place in range(counts[0] * counts[1]):
        row, column = divmod(place, counts[1])
        top, left = edges[0] + row * size[0], edges[1] + column * size[1]
        pattern = _patterns(key("tile"), place, ids, size, clean.dtype)
        where = (slice(None), slice(None), slice(top, top + size[0]), slice(left, left + size[1]))
        shift[where] = pattern[:, None] * signs[:, :, row, column, None, None]
    return _of_length(ball, clean, shift)


def moved_l2(ball: Ball, clean: Tensor, best: Tensor, key: Key, ids: Tensor, query: int, side: float) -> Tensor:
    """The images to try after `best`: window one gets a new pattern, and window two gives up its length to it."""
    channels, height, width = clean.shape[1:]
    odd = round(side) // 2 * 2 + 1  # the paper stops at 3 pixels, which is too coarse for images of 8
    one, two = (Windows.drawn(key, query, ids, (height, width), (odd, odd), name) for name in ("", "second "))
    held = best - clean
    first, both = one.inside()[:, None], (one.inside() | two.inside())[:, None]
    pattern = one.placed(_patterns(key, query, ids, one.size, clean.dtype))[:, None]
    old = held * first
    fresh = pattern * _signs(key, query, ids, (channels, 1, 1), clean) + old / (_norm(old) + _TINY)
    spare = (ball.eps**2 - held.flatten(1).square().sum(1)).clamp(min=0)[:, None, None, None] / channels
    length = (spare + _norm(held * both).square()).sqrt()
    # An old pattern can be the negative of the new one. Then nothing is left to scale, and the windows stay empty.
    fresh = fresh / (_norm(fresh) + _TINY) * length
    return _of_length(ball, clean, torch.where(both, fresh * first, held))


def _of_length(ball: Ball, clean: Tensor, shift: Tensor) -> Tensor:
    """The images at distance ε in that direction, clamped, which only brings them nearer."""
    whole = torch.linalg.vector_norm(shift.flatten(1), dim=1)[:, None, None, None]
    tried = clean + shift * (ball.eps / (whole + _TINY))
    return ball.project(tried[:, None], clean[:, None])[:, 0]


def _norm(x: Tensor) -> Tensor:
    """(N, C, 1, 1) the L2 norm of each channel."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)
    return norm


def _signs(key: Key, query: int, ids: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """±1 at random."""
    down = key("signs", query).uniform(ids, shape) < 0.5
    return torch.where(down, -1.0, 1.0).to(like)
