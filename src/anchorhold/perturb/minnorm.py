"""The smallest perturbation that reaches a goal: Carlini and Wagner's attacks, and a search over ε.

C&W (IEEE S&P 2017) moves in w with x = low + (high − low) (tanh w + 1) / 2, so that no pixel can leave its range, with
Adam. L2 minimises ‖x − clean‖² − c min(value, κ) and searches for the constant c. The Linf form, which 003 uses
(appendices B and D), replaces the norm by Σ max(|x − clean| − τ, 0).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..random import Key
from ..settings import check
from .ascend import Ascent, Budget, Objective, Watch
from .ball import Ball

__all__ = ["CW_STEPS", "carlini_wagner", "smallest_eps", "smallest_l2"]

CW_STEPS = 50  # 003, appendix B
# tanh never reaches its ends, and near them hardly moves: black and white pixels begin inside, within a small ball.
INSIDE = 1 - 8 / 255


class _Adam:
    """Adam for rows that leave: torch's own holds its state by tensor."""

    def __init__(self, rate: float) -> None:
        self.rate, self.first, self.second, self.count = rate, torch.tensor(0.0), torch.tensor(0.0), 0

    def step(self, gradient: Tensor) -> Tensor:
        """What is to be subtracted."""
        self.count += 1
        self.first = 0.9 * self.first.to(gradient) + 0.1 * gradient
        self.second = 0.999 * self.second.to(gradient) + 0.001 * gradient.square()
        first, second = self.first / (1 - 0.9**self.count), self.second / (1 - 0.999**self.count)
        return self.rate * first / (second.sqrt() + 1e-8)


def _to_free(x: Tensor, low: float, high: float, eps: float = 1.0) -> Tensor:
    inside = max(INSIDE, 1 - eps / (high - low))
    return torch.atanh((2 * (x - low) / (high - low) - 1).clamp(-inside, inside))


def _to_image(w: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * (torch.tanh(w) + 1) / 2


def carlini_wagner(
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
    """C&W in its Linf form within a given ball: minimise Σ max(|x − clean| − τ, 0) − c value, with τ = ε.

    Arguments as in `ascend`; `budget.steps` iterations of Adam; c is 0.1 and ten times more after each fifth of
    them. An iterate is judged where it is projected into the ball, and the best is kept. In an L2 ball the penalty
    is on the length.
    """
    check(images.shape[1] == 1, "C&W attacks images (U, 1, …), one view a unit")
    check(not objective.coupled, "C&W keeps the best iterate of each unit, and a coupled objective has no value for it")
    ball.admit(images)
    positions = torch.arange(len(images), device=images.device)
    best = images.clone() if starts is None else ball.project(starts, images)
    level = torch.full((len(images),), -torch.inf, dtype=torch.float64, device=images.device)
    over = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    w = _to_free(best, ball.low, ball.high, ball.eps)
    if objective.first is not None and starts is None:
        check(key is not None, "this objective is stationary at the clean image: C&W needs a key for a random start")
        assert key is not None
        there = ball.start(images, key("start", 0), positions if ids is None else ids)
        w = _to_free(there, ball.low, ball.high, ball.eps)
    # 5e-3 is Carlini's; a wider ball is not crossed with it in so few iterations.
    adam, work = _Adam(max(5e-3, ball.eps / 2)), 0
    for step in range(budget.steps + 1):
        if not len(images) or bool(over.all()):
            break
        w = w.detach().requires_grad_()
        weight = 0.1 * 10 ** (5 * step // max(budget.steps, 1))
        with torch.enable_grad():
            x = _to_image(w, ball.low, ball.high)
            inside = ball.project(x, images)
            shift = (x - images).flatten(1)
            size = shift.abs() if ball.norm == "linf" else torch.linalg.vector_norm(shift, dim=1, keepdim=True)
            beyond = (size - ball.eps).clamp(min=0).sum(1)
            # The value is that of the projected iterate, its slope that of x: straight through the projection.
            e = embed((x + (inside - x).detach())[:, 0])[:, None]
            value = objective.value(e, positions)
            (gradient,) = torch.autograd.grad((beyond - weight * value).sum(), w)
        work += len(images)
        met = objective.met(e, positions, value)
        now = value.detach().double()
        better = now > level if met is None else (now > level) | met
        better &= ~over
        level[better], best[better] = now[better], inside.detach()[better]
        over |= met if met is not None else False
        w = w.detach() - adam.step(gradient)
    return Ascent(best, level, work, [])


def smallest_l2(
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    excess: Callable[[Tensor, Tensor], Tensor],
    *,
    steps: int = 200,
    searches: int = 9,
    rate: float = 1e-2,
    low: float = 0.0,
    high: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """C&W L2: min ‖δ‖² + c max(0, −excess) for images (N, …), c by bisection; (images, norms), inf where it failed.

    `excess` is a function of the embeddings (N, 1, D) and positions (N,), above 0 where the goal is met: the `value` of
    `attacks.recall.margin`, or a user's own.
    """
    Ball(0.0, "l2", low, high).admit(images)
    positions = torch.arange(len(images), device=images.device)
    start = _to_free(images, low, high, 1e-6)  # every length counts here, that of the beginning too
    best, norms = images.clone(), torch.full((len(images),), torch.inf, dtype=torch.float64, device=images.device)
    least, most = torch.zeros_like(norms), torch.full_like(norms, torch.inf)
    c = torch.full_like(norms, 1.0)
    for _ in range(searches):
        w, adam = start.clone(), _Adam(rate)
        reached = torch.zeros_like(norms, dtype=torch.bool)
        for step in range(steps):
            w = w.detach().requires_grad_()
            with torch.enable_grad():
                x = _to_image(w, low, high)
                squared = (x - images).flatten(1).square().sum(1)
                over = excess(embed(x)[:, None], positions)
                (gradient,) = torch.autograd.grad((squared - c.to(squared) * over.clamp(max=0)).sum(), w)
            won, length = over.detach() > 0, squared.detach().double().sqrt()
            reached |= won
            shorter = won & (length < norms)
            norms[shorter], best[shorter] = length[shorter], x.detach()[shorter]
            # The step falls to 0, or a border that is nearer than one step would be jumped over for ever.
            w = w.detach() - (1 - step / steps) * adam.step(gradient)
        most = torch.where(reached, torch.minimum(most, c), most)
        least = torch.where(reached, least, torch.maximum(least, c))
        c = torch.where(most.isinf(), 10 * c, (least + most) / 2)
    return best, norms


def smallest_eps(
    succeeds: Callable[[float, Tensor], Tensor], count: int, highest: float = 64 / 255, searches: int = 8
) -> Tensor:
    """(N,) the smallest ε at which each sample is beaten, by bisection up to `highest`; inf where it never is.

    `succeeds(ε, which)` attacks those samples at that ε and says which were beaten. What is found is at most
    highest/2^searches too large.
    """
    found = torch.full((count,), torch.inf, dtype=torch.float64)
    least, most = torch.zeros_like(found), torch.full_like(found, highest)
    everyone = torch.arange(count)
    won = succeeds(0.0, everyone).cpu()
    found[won] = 0.0
    open_ = everyone[~won]
    beaten = succeeds(highest, open_).cpu() if len(open_) else won[:0]
    found[open_[beaten]] = highest
    open_ = open_[beaten]
    for _ in range(searches):
        middle = (least + most) / 2
        # Samples on one ε are attacked together: after s halvings there are at most 2^s of them.
        for eps in middle[open_].unique().tolist():
            which = open_[middle[open_] == eps]
            beaten = succeeds(eps, which).cpu()
            most[which[beaten]], found[which[beaten]], least[which[~beaten]] = eps, eps, eps
    return found
