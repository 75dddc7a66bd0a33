"""Square: an attack that uses values only, no gradients (Andriushchenko et al., ECCV 2020).

It starts with vertical stripes of ±ε. Each query puts ±ε, one sign per channel, into a square at a random place and
keeps it if the objective rose. The squares shrink as the queries are spent. Masked gradients do not affect it: where
it beats gradient attacks, the gradients mislead.
"""

import torch
from torch import Tensor

from ..errors import check
from .problem import Ascent, Problem, Watch, check_units, refuse_watch
from .rules import Climb

__all__ = ["share_of", "square"]

SHARE = 0.8  # share of the pixels that the first square covers
_HALVED = (
    10,
    50,
    200,
    1000,
    2000,
    4000,
    6000,
    8000,
)  # out of 10,000 queries: the share halves after each


def share_of(query: int, queries: int) -> float:
    """The share of pixels that a square covers: 0.8, halved after 0.1, 0.5, 2, 10, 20, 40, 60, 80 % of all queries.

    >>> share_of(0, 1000), share_of(150, 1000)
    (0.8, 0.05)
    """
    spent = 10_000 * query / max(queries, 1)
    return float(SHARE / 2 ** sum(spent > end for end in _HALVED))


@torch.no_grad()
def square(
    problem: Problem,
    images: Tensor,
    *,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    starts: Tensor | None = None,
    watch: Watch | None = None,
) -> Ascent:
    """Climb `objective` with `budget.steps` queries for each of `images` (U, 1, C, H, W); arguments as in `ascend`.

    A unit that met its goal makes no more queries. Random places and signs are functions of `key`, the query and the
    unit's id. The best image is kept, so there is no last step to `watch`. It begins at the clean image and tries
    `starts`, or stripes, first. The starts zero and tiny are the same here. It reads no other field of the budget.
    """
    embed, objective, ball, budget = problem.embed, problem.objective, problem.ball, problem.budget
    budget.read_by("Square", "steps", "start")
    check(budget.start != "random", "Square starts at the clean image and tries stripes first: leave start out")
    refuse_watch(watch, "Square")
    check_units(images, ids, embedded, starts)
    check(ball.norm == "linf", "Square moves within an Linf ball; use PGD, APGD or C&W for L2")
    check(images.ndim == 5 and images.shape[1] == 1, "Square attacks images (U, 1, C, H, W), one view per unit")
    check(not objective.coupled, "Square compares values per unit, and a coupled objective has none")
    key = problem.drawn("the random squares of Square")
    ball.admit(images)
    clean = images[:, 0]
    count, channels, height, width = clean.shape
    positions = torch.arange(count, device=clean.device)
    ids = positions if ids is None else ids.to(clean.device)
    low, high = ((clean + shift).clamp(ball.low, ball.high) for shift in (-ball.eps, ball.eps))

    given = None if starts is None else ball.project(starts, images)[:, 0]

    def signs(name: str, query: int, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        return key(name, query).uniform(ids[rows], shape) < 0.5

    def seen(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        # Channels last: convolutions in half precision would otherwise copy at every layer.
        e = embed(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)[:, None]
        value = objective.value(e, rows)
        return value.double(), objective.met(e, rows, value)

    begun = Climb.at(clean.clone())
    if embedded is not None and count:
        begun.settle(objective, embedded, positions)
    best, level = begun.x, begun.level
    active = positions[~begun.met]
    asked = len(active)
    if asked:
        level[active], met = seen(clean[active], active)
        active = active if met is None else active[~met]
    for query in range(budget.steps):
        if not len(active):
            break
        if query == 0:
            stripes = signs("stripes", 0, active, (channels, 1, width)).expand(-1, -1, height, -1)
            tried = torch.where(stripes, low[active], high[active]) if given is None else given[active]
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
