"""Square: an attack that uses values only, no gradients (Andriushchenko et al., ECCV 2020).

In an Linf ball it starts with vertical stripes of ±ε. Each query puts ±ε, one sign per channel, into a square at a
random place and keeps it if the objective rose. The squares shrink as the queries are spent. Masked gradients do not
affect it: where it beats gradient attacks, the gradients mislead. `square_l2` has the moves in an L2 ball.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..random import Key
from .ball import Ball
from .problem import Ascent, Problem, Watch, check_queries
from .rules import Climb
from .square_l2 import first_l2, moved_l2
from .windows import Windows

__all__ = ["Propose", "proposals", "share_of", "square"]

Propose = Callable[[int, Tensor, Tensor], Tensor]
"""The query's number, the rows (N,) that ask and their best images (N, C, H, W), to the images to try."""

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


def proposals(ball: Ball, clean: Tensor, ids: Tensor, key: Key, queries: int) -> Propose:
    """What Square tries for images (U, C, H, W). All draws are functions of `key`, the query and the unit's id."""
    height, width = clean.shape[2:]

    def side(query: int) -> float:
        return float((share_of(query, queries) * height * width) ** 0.5)

    if ball.norm == "l2":

        def in_l2(query: int, rows: Tensor, best: Tensor) -> Tensor:
            if query == 0:
                return first_l2(ball, clean[rows], key, ids[rows])
            return moved_l2(ball, clean[rows], best, key, ids[rows], query, side(query))

        return in_l2
    low, high = ((clean + shift).clamp(ball.low, ball.high) for shift in (-ball.eps, ball.eps))

    def in_linf(query: int, rows: Tensor, best: Tensor) -> Tensor:
        name, shape = ("stripes", (clean.shape[1], 1, width)) if query == 0 else ("signs", (clean.shape[1], 1, 1))
        down = key(name, query).uniform(ids[rows], shape) < 0.5
        patch = torch.where(down, low[rows], high[rows])
        if query == 0:
            return patch
        whole = round(side(query))
        window = Windows.drawn(key, query, ids[rows], (height, width), (whole, whole))
        return torch.where(window.inside()[:, None], patch, best)

    return in_linf


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
    `starts`, or stripes (in L2 tiles), first. The starts zero and tiny are the same here. It reads no other field of
    the budget.
    """
    embed, objective, ball, budget = problem.embed, problem.objective, problem.ball, problem.budget
    check_queries("Square", problem, images, ids, embedded, starts, watch)
    key = problem.drawn("the random squares of Square")
    clean = images[:, 0]
    positions = torch.arange(len(clean), device=clean.device)
    ids = positions if ids is None else ids.to(clean.device)
    propose = proposals(ball, clean, ids, key, budget.steps)
    given = None if starts is None else ball.project(starts, images)[:, 0]

    def seen(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        # Channels last: convolutions in half precision would otherwise copy at every layer.
        e = embed(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)[:, None]
        value = objective.value(e, rows)
        return value.double(), objective.met(e, rows, value)

    begun = Climb.at(clean.clone())
    if embedded is not None and len(clean):
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
        started = query == 0 and given is not None
        tried = given[active] if started and given is not None else propose(query, active, best[active])
        value, met = seen(tried, active)
        asked += len(active)
        better = value > level[active]
        better = better if met is None else better | met
        level[active[better]], best[active[better]] = value[better], tried[better]
        if met is not None:
            active = active[~met]
    return Ascent(best[:, None], level, 0, [], asked)
