"""APGD: steps of momentum whose length falls by itself (Croce and Hein, ICML 2020).

    z = P(x + η g),  x' = P(x + ¾ (z − x) + ¼ (x − x before))

η starts at 2ε. At fixed moments it is halved for a unit that rose in fewer than three quarters of the steps since
the last one, or that kept its η there and found nothing better; it then goes on from its best iterate, with the
iterate before the present one in its momentum. There is no step length to choose, and the best iterate is kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..settings import check
from .ball import Ball

if TYPE_CHECKING:
    from .ascend import Objective

__all__ = ["Climb", "adapt", "moments"]

MOMENTUM = 0.75
RISES = 0.75  # share of steps in which the objective has to rise
FIRST, LESS, LEAST = 0.22, 0.03, 0.06  # the moments' distances, in parts of all steps


@dataclass
class Climb:
    """One start: where the moving views arrived, how high, which units met their goal, what it took."""

    x: Tensor
    level: Tensor
    met: Tensor
    work: int = 0
    active: list[int] = field(default_factory=list)


def moments(steps: int) -> list[int]:
    """The steps ⌈pⱼ · steps⌉ after which η may be halved: p₀ = 0, p₁ = 0.22, pⱼ₊₁ = pⱼ + max(pⱼ − pⱼ₋₁ − 0.03, 0.06).

    >>> moments(100), moments(60)
    ([22, 41, 57, 70, 80, 87, 93, 99], [14, 25, 35, 42, 48, 53, 56, 60])
    """
    before, now, found = 0.0, FIRST, []
    while now < 1 - 1e-9:
        found.append(math.ceil(now * steps - 1e-9))
        before, now = now, now + max(now - before - LESS, LEAST)
    return sorted(set(found))


def adapt(
    embed_units: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    origin: Tensor,
    objective: "Objective",
    ball: Ball,
    steps: int,
    rows: Tensor,
    positions: Tensor,
    drop: bool = True,
) -> Climb:
    """Climb from x for `steps` steps and keep the best iterate; a unit that met its goal stops there."""
    count, wide = len(x), (-1, *[1] * (x.ndim - 1))
    out = Climb(
        x.clone(),
        torch.full((count,), -torch.inf, dtype=torch.float64, device=x.device),
        torch.zeros(count, dtype=torch.bool, device=x.device),
    )
    turns, last_turn = set(moments(steps)), 0
    active = torch.arange(count, device=x.device)
    here, before, centre = x, x, origin
    size = torch.full((count,), 2 * ball.eps, dtype=x.dtype, device=x.device)
    height = torch.full_like(out.level, -torch.inf)  # at the iterate before
    rises = torch.zeros_like(active)
    best_then, kept = height.clone(), torch.zeros_like(out.met)  # at the last turn: the best, and whether η stayed
    slope = torch.zeros_like(x)  # at the best iterate
    for step in range(steps + 1):
        looking = step == steps
        if not len(active):
            out.active += [] if looking else [0]
            continue
        here = here.detach().requires_grad_(not looking)
        own = rows[active]
        with torch.set_grad_enabled(not looking):
            embeddings = embed_units(here, own)
            value = objective.value(embeddings, positions[own])
        check(
            value.shape == active.shape,
            f"the objective gave {tuple(value.shape)} for {len(active)} units; APGD needs one number for each",
        )
        now = value.detach().double()
        done = objective.met(embeddings, positions[own], value)
        better = now > out.level[active]
        if done is not None:  # an objective without a hinge may have been higher where the goal was not met
            better |= done & ~out.met[active]
            out.met[active] |= done
        if looking:
            gradient = torch.zeros_like(here)
        else:
            (gradient,) = torch.autograd.grad(value.sum(), here)
            out.work += len(active) * x.shape[1]
        here = here.detach()
        chosen = active[better]
        out.level[chosen], out.x[chosen], slope[chosen] = now[better], here[better], gradient[better]
        rises[active] += (now > height[active]) & (step > 0)  # the start is no rise
        height[active] = now
        if looking:
            break
        if drop and done is not None and bool(done.any()):
            stay = torch.nonzero(~done).squeeze(1)
            active, here, before, centre = active[stay], here[stay], before[stay], centre[stay]
            gradient = gradient[stay]
        out.active.append(len(active))
        if step in turns:
            few = rises[active] < RISES * (step - last_turn)
            stuck = kept[active] & (out.level[active] <= best_then[active])
            halved = few | stuck
            size[active] = torch.where(halved, size[active] / 2, size[active])
            kept[active], best_then[active], rises[active], last_turn = ~halved, out.level[active], 0, step
            back = halved.reshape(wide)
            here = torch.where(back, out.x[active], here)
            gradient = torch.where(back, slope[active], gradient)
        eta = size[active].reshape(wide)
        straight = ball.project(_stride(ball, here, gradient, eta), centre)
        weight = MOMENTUM if step else 1.0
        moved = ball.project(here + weight * (straight - here) + (1 - weight) * (here - before), centre)
        here, before = moved, here
    return out


def _stride(ball: Ball, x: Tensor, gradient: Tensor, size: Tensor) -> Tensor:
    """A steepest step of each unit's own length."""
    return x + size * ball.step(torch.zeros_like(x), gradient, 1.0)
