"""NES: gradients estimated from values (Ilyas et al., ICML 2018), for models that give vectors and no gradient.

For directions u₁ … u_P of standard normal numbers and a spread σ,

    g = 1 / (2 σ P) · Σ (value(x + σ u_p) − value(x − σ u_p)) u_p,

which in expectation is the gradient of the value, smoothed over σ. Steps follow the mean of past estimates, signed in
an Linf ball and normalised in an L2 ball, and shorten to 0. All images asked about lie in the ball and in the range of
pixels, so every one of them may be the result: the best is kept.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..random import Key
from .ball import Ball
from .problem import Ascent, Problem, Watch, check_queries
from .rules import Climb

__all__ = ["estimate", "nes"]

PAIRS = 10  # pairs of opposite directions for each step
SPREAD = 0.5  # σ, as a share of ε (Linf), or of ε by the root of the number of pixels (L2)
FIRST = 0.5  # length of the first step, as a share of ε
MOMENTUM = 0.7

Ask = Callable[[Tensor, Tensor], Tensor]
"""Images (N, C, H, W) and their rows (N,) to values (N,)."""


def estimate(ask: Ask, ball: Ball, x: Tensor, clean: Tensor, rows: Tensor, directions: Tensor, spread: float) -> Tensor:
    """The gradient at x (N, C, H, W) from two values for each of `directions` (P, N, C, H, W)."""
    found = torch.zeros_like(x)
    for u in directions:
        up, down = (ball.project((x + s * u)[:, None], clean[:, None])[:, 0] for s in (spread, -spread))
        rise = (ask(up, rows) - ask(down, rows)).to(x.dtype)
        found += rise[:, None, None, None] * u
    return found / (2 * spread * len(directions))


@torch.no_grad()
def nes(
    problem: Problem,
    images: Tensor,
    *,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    starts: Tensor | None = None,
    watch: Watch | None = None,
) -> Ascent:
    """Climb `objective` with `budget.steps` queries for each of `images` (U, 1, C, H, W); arguments as in `ascend`.

    A step takes 20 queries for the estimate and one for the new image; the last one takes what is left. A unit that met
    its goal makes no more queries, once its step is complete. Directions are functions of `key`, the query and the
    unit's id. It begins at the clean image, or at `starts`. The starts zero and tiny are the same here. It reads no
    other field of the budget.
    """
    objective, ball, budget = problem.objective, problem.ball, problem.budget
    check_queries("NES", problem, images, ids, embedded, starts, watch)
    key = problem.drawn("the random directions of NES")
    clean = images[:, 0]
    positions = torch.arange(len(clean), device=clean.device)
    ids = positions if ids is None else ids.to(clean.device)
    begun = Climb.at(clean.clone())
    if embedded is not None and len(clean):
        begun.settle(objective, embedded, positions)
    asking = _Asking(problem, begun, clean)
    if len(asking.left()):
        asking(clean[asking.left()], asking.left())
    x, slope, spent = clean.clone(), torch.zeros_like(clean), 0
    if starts is not None and budget.steps and len(asking.left()):
        x = ball.project(starts, images)[:, 0]
        asking(x[asking.left()], asking.left())
        spent = 1
    while ball.eps > 0 and budget.steps - spent >= 3 and len(rows := asking.left()):
        pairs = min(PAIRS, (budget.steps - spent - 1) // 2)
        directions = _directions(key, spent, ids[rows], pairs, clean)
        found = estimate(asking, ball, x[rows], clean[rows], rows, directions, _spread(ball, clean))
        slope[rows] = MOMENTUM * slope[rows] + _unit(found)
        size = FIRST * ball.eps * (1 - spent / budget.steps)
        moved = ball.step(x[rows, None], slope[rows, None], size)
        x[rows] = ball.project(moved, clean[rows, None])[:, 0]
        asking(x[rows], rows)
        spent += 2 * pairs + 1
    return Ascent(begun.x[:, None], begun.level, 0, [], asking.asked)


class _Asking:
    """Values of images, with the best image of each unit kept, and queries counted."""

    def __init__(self, problem: Problem, begun: Climb, clean: Tensor) -> None:
        self._problem, self._begun, self.asked = problem, begun, 0
        self._positions = torch.arange(len(clean), device=clean.device)

    def left(self) -> Tensor:
        """The units that have not met their goal."""
        return self._positions[~self._begun.met]

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        objective, best = self._problem.objective, self._begun
        e = self._problem.embed(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)[:, None]
        value = objective.value(e, rows)
        met = objective.met(e, rows, value)
        now = value.double()
        self.asked += len(rows)
        better = now > best.level[rows]
        if met is not None:  # without a hinge, an image that does not meet the goal may have a higher value
            better = (better & ~best.met[rows]) | (met & ~best.met[rows])
            best.met[rows] |= met
        best.level[rows[better]], best.x[rows[better]] = now[better], x[better]
        return now


def _directions(key: Key, query: int, ids: Tensor, pairs: int, like: Tensor) -> Tensor:
    """(P, N, C, H, W) standard normal numbers."""
    drawn = [key("directions", query, pair).normal(ids, like.shape[1:], like.dtype) for pair in range(pairs)]
    return torch.stack(drawn).to(like.device)


def _spread(ball: Ball, clean: Tensor) -> float:
    """σ; in L2 a direction then has the length SPREAD · ε, in Linf most of its pixels lie within ε."""
    return SPREAD * ball.eps / (1.0 if ball.norm == "linf" else math.sqrt(clean[0].numel()))


def _unit(gradient: Tensor) -> Tensor:
    """Each gradient with length 1, so that past and present estimates weigh as intended; zero stays zero."""
    length: Tensor = torch.linalg.vector_norm(gradient.flatten(1), dim=1)[:, None, None, None]
    return gradient / length.clamp(min=torch.finfo(gradient.dtype).tiny)
