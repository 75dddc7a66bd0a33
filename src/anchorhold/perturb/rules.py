"""Step rules of the loop: steepest steps of a given length, APGD, which adapts its step length, or a running mean.

APGD (Croce and Hein, ICML 2020):

    z = P(x + η g),  x' = P(x + ¾ (z − x) + ¼ (x − x before))

η starts at 2ε. At fixed checkpoints it is halved for a unit that rose in fewer than three quarters of the steps since
the last one. It is also halved for a unit that kept its η there and has not improved since. The unit then resumes from
its best iterate. Its momentum still uses the iterate before the current one. There is no step length to choose, and the
best iterate is kept.

Adam (Kingma and Ba, ICLR 2015) steps along a running mean of the gradient, pixel by pixel in units of its running size;
in L2 along the mean itself.
Momentum (Dong et al., CVPR 2018) adds up gradients, each in units of its mean size, and takes the steepest step along
the sum. The nearest items of a list change from step to step, and the gradient jumps. Signed steps follow every jump
and end in corners of the ball; a mean crosses such edges. Both find perturbations that signed steps miss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import check
from ..model.frozen import Embed
from .ball import Ball, Region
from .problem import Objective, Problem, Value, Watch

__all__ = ["Climb", "Units", "adaptive", "averaged", "laid", "moments", "steepest"]

MOMENTUM = 0.75
RISES = 0.75  # share of steps in which the objective must rise
SMALL = 1e-8  # keeps Adam's quotient finite where a pixel never had a gradient
FADES = 0.9, 0.999  # of Adam's means of the gradient and of its square
FIRST, LESS, LEAST = 0.22, 0.03, 0.06  # distances between checkpoints, as shares of all steps


class Units:
    """Some units of a batch. Only the moving views are embedded at every step; the others once."""

    def __init__(self, problem: Problem, images: Tensor, positions: Tensor) -> None:
        self.moving, self.resting = problem.moving(images.shape[1])
        self.clean, self.positions, self._embed = images[:, self.moving], positions, problem.embed
        with torch.no_grad():
            self._rest = _views(problem.embed, images[:, self.resting]) if self.resting else None

    def embed(self, x: Tensor, rows: Tensor) -> Tensor:
        """Embeddings (U', V, D) of the units `rows` with `x` (U', V', …) as their moving views."""
        moved = _views(self._embed, x)
        if self._rest is None:
            return moved
        everything = moved.new_empty(len(x), len(self.moving) + len(self.resting), moved.shape[-1])
        everything[:, self.moving] = moved
        everything[:, self.resting] = self._rest[rows].to(moved.dtype)
        return everything


@dataclass
class Climb:
    """The result of one start: the moving views, their objective, which units met their goal, and the cost."""

    x: Tensor
    level: Tensor
    met: Tensor
    work: int = 0
    active: list[int] = field(default_factory=list)
    settled: bool = False  # whether units may have met their goal before the first step

    @classmethod
    def at(cls, x: Tensor) -> "Climb":
        """Before the first step."""
        level = torch.full((len(x),), -torch.inf, dtype=torch.float64, device=x.device)
        return cls(x, level, torch.zeros(len(x), dtype=torch.bool, device=x.device))

    @torch.no_grad()
    def settle(self, objective: Objective, embedded: Tensor, positions: Tensor) -> None:
        """Units whose known embeddings (U, V, D) already meet the goal do not move."""
        if objective.goal is None:
            return
        value = objective.value(embedded, positions)
        met = objective.met(embedded, positions, value)
        assert met is not None
        self.met, self.settled = met.clone(), True
        if not objective.coupled:  # a coupled one has no level per unit
            self.level = torch.where(met, value.double(), self.level)


def steepest(
    problem: Problem,
    units: Units,
    rows: Tensor,
    origin: Tensor,
    begun: Climb,
    first: Value | None,
    watch: Watch | None,
) -> Climb:
    """Take `budget.steps` steps; with `budget.weighs`, measure the last iterate too.

    Finished units are dropped. To do so a step needs their number from the GPU. It is known after the forward pass, so
    the backward pass hides the wait.
    """
    objective, budget, positions = problem.objective, problem.budget, units.positions
    x, level, met = begun.x, begun.level, begun.met
    best = budget.keep == "best"
    out = Climb(x.clone() if best else x, level, met)
    active, here, region = torch.arange(len(x), device=x.device), x, Region(problem.ball, laid(origin))
    if begun.settled:
        active = torch.nonzero(~met).squeeze(1)
        here, region = here[active], region.rows(active)
    for step in range(budget.steps + budget.weighs):
        measuring = step == budget.steps
        if not len(active):
            out.active += [] if measuring else [0]
            continue
        here = here.detach().requires_grad_(not measuring)
        own = rows[active]
        where = positions[own]
        if watch is not None and not measuring:
            # A clone: the last step is written into the tensor of the start.
            watch(step, here.detach() if step else here.detach().clone(), where)
        opening = first is not None and step == 0 and not measuring
        with torch.set_grad_enabled(not measuring):
            embeddings = units.embed(here, own)
            value = first(embeddings, where) if first is not None and opening else objective.value(embeddings, where)
        check(
            objective.coupled or value.shape == active.shape,
            f"the objective gave {tuple(value.shape)} for {len(active)} units; "
            "give one per unit, or use ah.Objective(…, coupled=True)",
        )
        if budget.weighs:
            height = (objective.value(embeddings.detach(), where) if opening else value.detach()).double()
            better = height > level[active] if best else torch.ones_like(height, dtype=torch.bool)
            level[active[better]] = height[better]
            if best:
                out.x[active[better]] = here.detach()[better]
        done = objective.met(embeddings, where, None if opening else value)
        if done is not None:
            met[active] |= done
        if measuring:
            break
        left = _those_left(done) if done is not None else (lambda whole=active: whole)
        (gradient,) = torch.autograd.grad(value.sum(), here)
        out.work += len(active) * x.shape[1]
        here = region.move(here.detach(), gradient, budget.length(step))
        stay = left()
        out.active.append(len(stay))
        if budget.drop and len(stay) < len(active):
            if not best:
                out.x[active] = here
            stay = stay.to(x.device, non_blocking=True)
            active, here, region = active[stay], here[stay], region.rows(stay)
    if not best and budget.steps:  # without steps nothing moved
        out.x[active] = here.detach()
    return out


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


def adaptive(problem: Problem, units: Units, rows: Tensor, origin: Tensor, begun: Climb) -> Climb:
    """Take `budget.steps` steps of APGD and keep the best iterate; a unit that met its goal stops."""
    ball, origin, x, steps, drop = problem.ball, laid(origin), begun.x, problem.budget.steps, problem.budget.drop
    count, wide = len(x), (-1, *[1] * (x.ndim - 1))
    out = Climb(x.clone(), begun.level, begun.met)
    turns, last_turn = set(moments(steps)), 0
    active = torch.nonzero(~out.met).squeeze(1) if begun.settled else torch.arange(count, device=x.device)
    here, before, centre = x[active], x[active], origin[active]
    size = torch.full((count,), 2 * ball.eps, dtype=x.dtype, device=x.device)
    height = torch.full_like(out.level, -torch.inf)  # of the previous iterate
    rises = torch.zeros(count, dtype=torch.long, device=x.device)
    best_then, kept = (
        height.clone(),
        torch.zeros_like(out.met),
    )  # at the last checkpoint: best value, η unchanged
    slope = torch.zeros_like(x)  # at the best iterate
    for step in range(steps + 1):
        measuring = step == steps
        if not len(active):
            out.active += [] if measuring else [0]
            continue
        here = here.detach().requires_grad_(not measuring)
        value, done, better = _keep_best(out, problem, units, rows[active], here, active)
        if measuring:
            break
        (gradient,) = torch.autograd.grad(value.sum(), here)
        out.work += len(active) * x.shape[1]
        here, now = here.detach(), value.detach().double()
        slope[active[better]] = gradient[better]
        rises[active] += (now > height[active]) & (step > 0)  # the start does not count as a rise
        height[active] = now
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


def averaged(problem: Problem, units: Units, rows: Tensor, origin: Tensor, begun: Climb) -> Climb:
    """Steps along a running mean, by Adam or momentum; the best iterate is kept, and a unit that met its goal stops."""
    budget, ball, x, wide = problem.budget, problem.ball, begun.x, (-1, *[1] * (begun.x.ndim - 1))
    out = Climb(x.clone(), begun.level, begun.met)
    active = torch.nonzero(~out.met).squeeze(1) if begun.settled else torch.arange(len(x), device=x.device)
    here, region = x[active], Region(ball, laid(origin)).rows(active)
    mean, square = torch.zeros_like(here), torch.zeros_like(here)
    for step in range(budget.steps + 1):
        measuring = step == budget.steps
        if not len(active):
            out.active += [] if measuring else [0]
            continue
        here = here.detach().requires_grad_(not measuring)
        value, done, _ = _keep_best(out, problem, units, rows[active], here, active)
        if measuring:
            break
        (gradient,) = torch.autograd.grad(value.sum(), here)
        out.work += len(active) * x.shape[1]
        # In units of its size: objectives have any scale, and Adam's squares must stay in the range of fp32.
        gradient = gradient / gradient.flatten(1).abs().mean(1).clamp(min=torch.finfo(x.dtype).tiny).reshape(wide)
        gradient = gradient.nan_to_num_(nan=0.0)  # of an image with NaN or infinity: zero, or its means stay NaN
        mean = mean + gradient if budget.rule == "momentum" else FADES[0] * mean + (1 - FADES[0]) * gradient
        if budget.rule == "momentum" or ball.norm == "l2":  # sizes by pixel would turn an L2 step away from its optimum
            here = region.move(here.detach(), mean, budget.length(step))
        else:
            square = FADES[1] * square + (1 - FADES[1]) * gradient.square()
            slope = (mean / (1 - FADES[0] ** (step + 1))) / ((square / (1 - FADES[1] ** (step + 1))).sqrt() + SMALL)
            here = region.along(here.detach(), slope, budget.length(step))
        if budget.drop and done is not None and bool(done.any()):
            stay = torch.nonzero(~done).squeeze(1)
            active, here, region = active[stay], here[stay], region.rows(stay)
            mean, square = mean[stay], square[stay]
        out.active.append(len(active))
    return out


def _keep_best(
    out: Climb, problem: Problem, units: Units, rows: Tensor, here: Tensor, active: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Measure the iterate `here` of the units `active`, and keep it in `out` where it is the best so far.

    Returns the values, which units met their goal (None without a goal), and which improved; each is (U',). The values
    can be differentiated if `here` requires a gradient.
    """
    objective, positions = problem.objective, units.positions[rows]
    with torch.set_grad_enabled(here.requires_grad):
        embeddings = units.embed(here, rows)
        value = objective.value(embeddings, positions)
    check(
        value.shape == active.shape,
        f"the objective gave {tuple(value.shape)} for {len(active)} units; this rule needs one number per unit",
    )
    now, done = value.detach().double(), objective.met(embeddings, positions, value)
    better = now > out.level[active]
    if done is not None:  # without a hinge, an unfinished iterate may have had a higher value
        better |= done & ~out.met[active]
        out.met[active] |= done
    chosen = active[better]
    out.level[chosen], out.x[chosen] = now[better], here.detach()[better]
    return value, done, better


def _stride(ball: Ball, x: Tensor, gradient: Tensor, size: Tensor) -> Tensor:
    """A steepest step with one length per unit."""
    return x + size * ball.step(torch.zeros_like(x), gradient, 1.0)


def _those_left(done: Tensor) -> Callable[[], Tensor]:
    """A function that returns the unfinished units. It waits for `done` alone, not for later work on the GPU.

    The result lies in host memory where `done` is on a GPU.
    """
    if not done.is_cuda:
        return lambda: torch.nonzero(~done).squeeze(1)
    told = torch.empty(done.shape, dtype=torch.bool, pin_memory=True)
    told.copy_(done, non_blocking=True)
    there = torch.cuda.current_stream(done.device).record_event()

    def answer() -> Tensor:
        there.synchronize()
        return torch.nonzero(~told).squeeze(1)

    return answer


def _views(embed: Embed, images: Tensor) -> Tensor:
    """Embeddings (U, V, D) of images (U, V, …)."""
    embeddings = embed(images.flatten(0, 1))
    return embeddings.reshape(*images.shape[:2], embeddings.shape[-1])


def laid(images: Tensor) -> Tensor:
    """On a GPU, images in channels-last layout, which convolutions use without a copy."""
    if not images.is_cuda or images.ndim != 5:
        return images
    return images.movedim(2, -1).contiguous().movedim(-1, 2)
