"""The smallest perturbation that reaches a goal: Carlini and Wagner's attacks, and a search over ε.

C&W (IEEE S&P 2017) optimises w by Adam, with x = low + (high − low) (tanh w + 1) / 2, so that no pixel can leave its
range. The L2 form minimises ‖x − clean‖² − c min(value, κ) and searches for the constant c. The Linf form, which ADML
uses (appendices B and D), replaces the norm by Σ max(|x − clean| − τ, 0).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import check
from .ball import Ball
from .problem import Ascent, Problem, Watch, check_units, refuse_watch
from .rules import Climb

__all__ = ["CW_STEPS", "bracketed_eps", "carlini_wagner", "smallest_eps", "smallest_l2"]

CW_STEPS = 50  # ADML, appendix B
# tanh never reaches its ends and is flat near them, so black and white pixels start slightly inside.
INSIDE = 1 - 8 / 255


class _Adam:
    """Adam for a plain tensor; torch's own keeps its state per parameter object."""

    def __init__(self, rate: float) -> None:
        self.rate, self.first, self.second, self.count = rate, torch.tensor(0.0), torch.tensor(0.0), 0

    def step(self, gradient: Tensor) -> Tensor:
        """The update to subtract. The gradient of an image counts as zero where it has NaN or infinity."""
        self.count += 1
        usable = gradient.flatten(1).isfinite().all(1).reshape(-1, *[1] * (gradient.ndim - 1))
        gradient = torch.where(usable, gradient, 0.0)
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
    problem: Problem,
    images: Tensor,
    *,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    starts: Tensor | None = None,
    watch: Watch | None = None,
) -> Ascent:
    """C&W in its Linf form within a given ball: minimise Σ max(|x − clean| − τ, 0) − c value, with τ = ε.

    Arguments as in `ascend`. It takes `budget.steps` iterations of Adam. c is 0.1 and grows tenfold after each fifth of
    them. Iterates are projected into the ball before they are measured, and the best is kept, so there is no last step
    to `watch`. In an L2 ball the penalty is on the length. The starts zero and tiny both mean the clean image, or a
    random point where the objective is stationary there. It reads no other field of the budget.
    """
    embed, objective, ball, budget = problem.embed, problem.objective, problem.ball, problem.budget
    budget.read_by("C&W", "steps", "start")
    refuse_watch(watch, "C&W")
    check_units(images, ids, embedded, starts)
    check(images.shape[1] == 1, "C&W attacks images (U, 1, …), one view per unit")
    check(not objective.coupled, "C&W compares iterates per unit, and a coupled objective has no value per unit")
    ball.admit(images)
    positions = torch.arange(len(images), device=images.device)
    begun = Climb.at(images.clone() if starts is None else ball.project(starts, images))
    w = _to_free(begun.x, ball.low, ball.high, ball.eps)
    if starts is None and (objective.first is not None or budget.start == "random"):
        key = problem.drawn("random starts, which C&W uses where the clean image is stationary,")
        there = ball.start(images, key("start", 0), positions if ids is None else ids)
        w = _to_free(there, ball.low, ball.high, ball.eps)
    elif starts is None and embedded is not None:
        begun.settle(objective, embedded, positions)
    best, level, over = begun.x, begun.level, begun.met
    # 5e-3 is Carlini's rate. It is too small to cross a wider ball in this many iterations.
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
            # Straight-through: the value is that of the projected iterate, the gradient that of x.
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
    """C&W L2: min ‖δ‖² + c max(0, −excess) for images (N, …), c by bisection.

    Returns (images, norms); a norm is inf where it failed.

    `excess` is a function of the embeddings (N, 1, D) and positions (N,), above 0 where the goal is met, such as the
    `value` of `attacks.recall.margin`.
    """
    Ball(0.0, "l2", low, high).admit(images)
    positions = torch.arange(len(images), device=images.device)
    start = _to_free(images, low, high, 1e-6)  # a small offset: the start adds to the length
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
            # The step falls to 0. A constant step would overshoot a border that is nearer than one step.
            w = w.detach() - (1 - step / steps) * adam.step(gradient)
        most = torch.where(reached, torch.minimum(most, c), most)
        least = torch.where(reached, least, torch.maximum(least, c))
        c = torch.where(most.isinf(), 10 * c, (least + most) / 2)
    return best, norms


def smallest_eps(
    succeeds: Callable[[float, Tensor], Tensor], count: int, highest: float = 64 / 255, searches: int = 8
) -> Tensor:
    """(N,) the smallest ε at which each sample is beaten, by bisection up to `highest`; inf where it never is.

    `succeeds(ε, which)` attacks those samples at that ε and says which were beaten. The result is at most
    highest/2^searches too large.
    """
    return bracketed_eps(succeeds, count, highest, searches)[1]


def bracketed_eps(
    succeeds: Callable[[float, Tensor], Tensor], count: int, highest: float = 64 / 255, searches: int = 8
) -> tuple[Tensor, Tensor]:
    """(N,) the largest ε tried at which each sample held, and (N,) the smallest at which it was beaten.

    Arguments as in `smallest_eps`. A sample that is beaten at ε = 0 has 0 and 0, one that never is `highest` and inf.
    """
    found = torch.full((count,), torch.inf, dtype=torch.float64)
    least, most = torch.zeros_like(found), torch.full_like(found, highest)
    everyone = torch.arange(count)
    won = succeeds(0.0, everyone).cpu()
    found[won] = 0.0
    open_ = everyone[~won]
    beaten = succeeds(highest, open_).cpu() if len(open_) else won[:0]
    found[open_[beaten]], least[open_[~beaten]] = highest, highest
    open_ = open_[beaten]
    for _ in range(searches):
        middle = (least + most) / 2
        # Samples with the same ε are attacked together: after s halvings there are at most 2^s values of ε.
        for eps in middle[open_].unique().tolist():
            which = open_[middle[open_] == eps]
            beaten = succeeds(eps, which).cpu()
            most[which[beaten]], found[which[beaten]], least[which[~beaten]] = eps, eps, eps
    return least, found
