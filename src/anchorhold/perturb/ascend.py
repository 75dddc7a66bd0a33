"""The one loop that finds perturbations.

It climbs an objective of the units' embeddings by steps inside a ball. It takes gradients with respect to images
only and never changes a parameter's `.grad`.

Finished units are dropped from the batch. Under a hinged separable objective and steps without momentum their gradient
is exactly zero, so they cannot move again. The result is the same as without dropping.
"""

import torch
from torch import Tensor

from ..errors import SettingsError, check
from .problem import Ascent, Problem, Watch, check_units, refuse_watch
from .rules import Climb, Units, adaptive, averaged, laid, steepest

__all__ = ["ascend"]

TINY = 1e-3  # radius of a tiny start, as a share of the ball's


def ascend(
    problem: Problem,
    images: Tensor,
    *,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    starts: Tensor | None = None,
    batch: int | None = None,
    watch: Watch | None = None,
) -> Ascent:
    """Climb the problem's objective from `images` (U, V, …).

    Args:
        problem: embed, objective, ball, budget, key, and which views may move.
        images: the units, in the range of the ball.
        ids: (U,) random starts are drawn by these; positions by default.
        embedded: (U, V, D) the embeddings of `images` where they are known. From a zero start, units that already meet
            their goal then skip the loop, unless `budget.drop` is off.
        starts: the point of the first start, of the shape of `images`.
        batch: units at a time. With a separable objective it changes only the memory.
        watch: is called with the images that each step starts from: the moving views of the units that are not
            dropped. Only steepest steps take it.

    Here the "model" is the identity, and the objective grows with the first coordinate:

    >>> from anchorhold import Ball, Budget, Objective, Problem
    >>> objective = Objective(lambda e, at: e[:, 0, 0])
    >>> problem = Problem(lambda x: x.flatten(1), objective, Ball(0.1), Budget(steps=4, alpha=0.05))
    >>> ascend(problem, torch.full((1, 1, 2), 0.5)).images
    tensor([[[0.6000, 0.5000]]])
    """
    _check(problem, images, batch, starts, watch)
    check_units(images, ids, embedded, starts)
    count, budget = len(images), problem.budget
    positions = torch.arange(count, device=images.device)
    ids = positions if ids is None else ids
    size = batch or max(count, 1)

    def part(span: slice) -> Ascent:
        units = Units(problem, images[span], positions[span])
        known = None if embedded is None else embedded[span]
        given = None if starts is None else starts[span][:, units.moving]
        best, level, work, active = _climbed(problem, units, ids[span], known, given, watch)
        result = images[span].clone()
        result[:, units.moving] = best
        return Ascent(result, level if budget.weighs else None, work, active)

    parts = [part(slice(i, i + size)) for i in range(0, count, size)]
    if not parts:
        return Ascent(images.clone(), None, 0, [0] * budget.steps)
    values = [part.value for part in parts if part.value is not None]
    return Ascent(
        torch.cat([part.images for part in parts]),
        torch.cat(values) if values else None,
        sum(part.image_steps for part in parts),
        [sum(counts) for counts in zip(*(part.active for part in parts))],
    )


def _check(problem: Problem, images: Tensor, batch: int | None, starts: Tensor | None, watch: Watch | None) -> None:
    """Refuse combinations of objective, budget and start that cannot be climbed."""
    objective, budget = problem.objective, problem.budget
    problem.moving(images.shape[1])
    if objective.coupled and (batch or len(images)) < len(images):
        raise SettingsError("a coupled objective needs the whole batch at once; leave `batch` out")
    if objective.coupled and (budget.keep == "best" or budget.restarts > 1):
        raise SettingsError("a coupled objective has no value per unit; set keep = last and one start")
    if budget.start != "zero" or budget.restarts > 1:
        problem.drawn("random starts")
    if budget.rule != "steepest":
        method = {"apgd": "APGD", "adam": "Adam", "momentum": "momentum PGD"}[budget.rule]
        stuck = budget.start == "zero" and objective.first is not None and starts is None
        check(not stuck, f"this objective is stationary at the clean image: use a random start for {method}")
        refuse_watch(watch, method)
    problem.ball.admit(images)


def _climbed(
    problem: Problem, units: Units, ids: Tensor, embedded: Tensor | None, starts: Tensor | None, watch: Watch | None
) -> tuple[Tensor, Tensor, int, list[int]]:
    """All starts of one batch of units. Later starts attack unfinished units and replace worse results."""
    budget, clean, objective = problem.budget, units.clean, problem.objective
    best = clean.clone()
    level = torch.full((len(clean),), -torch.inf, device=clean.device, dtype=torch.float64)
    met = torch.zeros(len(clean), dtype=torch.bool, device=clean.device)
    work = 0
    active: list[int] = []
    for attempt in range(budget.restarts):
        rows = torch.nonzero(~met).squeeze(1) if attempt else torch.arange(len(clean), device=clean.device)
        if not len(rows):
            break
        given = None if starts is None or attempt else starts[rows]
        clean_start = attempt == 0 and budget.start == "zero" and given is None
        origin = clean[rows]
        begun = Climb.at(laid(_start(problem, origin, ids[rows], attempt, given)))
        if embedded is not None and clean_start and budget.drop:
            begun.settle(objective, embedded, units.positions)
        if budget.rule != "steepest":
            climb = (adaptive if budget.rule == "apgd" else averaged)(problem, units, rows, origin, begun)
        else:
            climb = steepest(problem, units, rows, origin, begun, objective.first if clean_start else None, watch)
        work += climb.work
        active = active or climb.active
        if budget.restarts == 1:
            best, level = climb.x, climb.level
        else:
            better = (climb.level > level[rows]) | climb.met
            best[rows[better]], level[rows[better]] = climb.x[better], climb.level[better]
            met[rows[climb.met]] = True
    return best, level, work, active


def _start(problem: Problem, origin: Tensor, ids: Tensor, attempt: int, given: Tensor | None) -> Tensor:
    """Where an attempt begins: at a given point, at random, or at the clean images."""
    ball, start = problem.ball, problem.budget.start
    if given is not None:
        return ball.project(given, origin)
    if start == "zero" and not attempt:
        return origin.clone()
    x = ball.start(origin, problem.drawn("random starts")("start", attempt), ids)
    return ball.project(origin + TINY * (x - origin), origin) if start == "tiny" and not attempt else x
