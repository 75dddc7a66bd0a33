"""Square: an attack that asks for values only, never for a gradient (Andriushchenko et al., ECCV 2020).

It starts with vertical stripes of ±ε. Each query puts ±ε, one sign a channel, into a square at a random place and keeps
it if the objective rose. The squares shrink as the queries are spent. What a model does to gradients is nothing
to it: where it beats an attack by gradients, the gradients mislead.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..random import Key
from ..settings import check
from .ascend import Ascent, Budget, Objective, Watch
from .ball import Ball

__all__ = ["share_of", "square"]

SHARE = 0.8  # of the pixels that the first square covers
_HALVED = (10, 50, 200, 1000, 2000, 4000, 6000, 8000)  # after so many of 10,000 queries the share halves


def share_of(query: int, queries: int) -> float:
    """The share of pixels that a square covers: 0.8, halved after 0.1, 0.5, 2, 10, 20, 40, 60, 80 % of all queries.

    >>> share_of(0, 1000), share_of(150, 1000)
    (0.8, 0.05)
    """
    spent = 10_000 * query / max(queries, 1)
    return float(SHARE / 2 ** sum(spent > end for end in _HALVED))


@torch.no_grad()
def square(
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    objective: Objective,
    ball: Ball,
    budget: Budget,
    *,
    key: Key | None = None,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    watch: Watch | None = None,
    starts: Tensor | None = None,
) -> Ascent:
    """Climb `objective` with `budget.steps` queries for each of `images` (U, 1, C, H, W); arguments as in `ascend`.

    A unit that met its goal stops asking. Random places and signs are functions of `key`, the query and the unit's id.
    """
    check(ball.norm == "linf", "Square moves within an Linf ball; use PGD, APGD or C&W for L2")
    check(images.ndim == 5 and images.shape[1] == 1, "Square attacks images (U, 1, C, H, W), one view a unit")
    check(not objective.coupled, "Square compares values unit by unit, and a coupled objective has none")
    check(key is not None, "Square draws at random: give a key")
    ball.admit(images)
    assert key is not None
    clean = images[:, 0]
    count, channels, height, width = clean.shape
    positions = torch.arange(count, device=clean.device)
    ids = positions if ids is None else ids.to(clean.device)
    low, high = ((clean + shift).clamp(ball.low, ball.high) for shift in (-ball.eps, ball.eps))

    def signs(name: str, query: int, who: Tensor, shape: tuple[int, ...]) -> Tensor:
        return key(name, query).uniform(ids[who], shape) < 0.5

    def seen(x: Tensor, who: Tensor) -> tuple[Tensor, Tensor | None]:
        # Convolutions in half precision want channels that lie together, and would copy at every layer.
        e = embed(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)[:, None]
        value = objective.value(e, who)
        return value.double(), objective.met(e, who, value)

    level, met = seen(clean, positions) if count else (clean.new_zeros(0, dtype=torch.float64), None)
    best, asked = clean.clone(), count
    active = positions if met is None else positions[~met]
    for query in range(budget.steps):
        if not len(active):
            break
        if query == 0:
            stripes = signs("stripes", 0, active, (channels, 1, width)).expand(-1, -1, height, -1)
            tried = starts[active, 0] if starts is not None else torch.where(stripes, low[active], high[active])
        else:
            side = round((share_of(query, budget.steps) * height * width) ** 0.5)
            tall, wide = max(1, min(side, height)), max(1, min(side, width))
            top = key("top", query).integers(ids[active], height - tall + 1)[:, None]
            left = key("left", query).integers(ids[active], width - wide + 1)[:, None]
            row, column = torch.arange(height, device=clean.device), torch.arange(width, device=clean.device)
            inside = ((row >= top) & (row < top + tall))[:, :, None] & ((column >= left) & (column < left + wide))[
                :, None
            ]
            down = signs("signs", query, active, (channels, 1, 1))
            patch = torch.where(down, low[active], high[active])
            tried = torch.where(inside[:, None], patch, best[active])
        value, met = seen(tried, active)
        asked += len(active)
        better = value > level[active]
        better = better if met is None else better | met
        level[active[better]], best[active[better]] = value[better], tried[better]
        if met is not None:
            active = active[~met]
    return Ascent(best[:, None], level, 0, [], asked)
