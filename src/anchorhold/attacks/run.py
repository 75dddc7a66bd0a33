"""Run one goal on some samples: aim, climb, measure."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import DataError
from ..model.frozen import Embed, embed_all
from ..perturb.ascend import Budget, Objective, Start, ascend
from ..perturb.ball import Ball
from ..perturb.methods import Find
from ..random import Key
from ..settings import check, nearest
from .goal import Goal, Scene

__all__ = ["BALL", "BUDGETS", "PGD", "Attacked", "Climbed", "NamedBudget", "attack", "budget_named", "fgsm"]


Climbed = Callable[[Goal, Scene, Tensor, Tensor | None], Objective]
"""What is climbed for a goal: scene, ids and targets to an objective."""


@dataclass(frozen=True)
class NamedBudget:
    """What an attacker may spend, as a paper has it."""

    eps: float
    steps: int
    alpha: float | None = None  # None: 2ε/steps, with which every point of the ball is in reach of every other
    start: Start = "zero"


BUDGETS: dict[str, NamedBudget] = {
    "standard": NamedBudget(8 / 255, 32, 3 / 255),  # 000, 001 and 002; printed as .03137 and .011764
    "adml": NamedBudget(0.01, 5, start="random"),  # 003, section 4.1
}


def budget_named(
    name: str, eps: float | None = None, alpha: float | None = None, steps: int | None = None
) -> tuple[Ball, Budget]:
    """The budget of that name; what is given wins over it, and a step of 2ε/steps follows what is given.

    >>> ball, budget = budget_named("adml", eps=0.05)
    >>> ball.eps, budget.steps, budget.alpha, budget.start
    (0.05, 5, 0.02, 'random')
    """
    check(name in BUDGETS, f"no budget is called {name!r}; {nearest(str(name), BUDGETS)}")
    named = BUDGETS[name]
    eps = named.eps if eps is None else eps
    steps = named.steps if steps is None else steps
    alpha = named.alpha if alpha is None else alpha
    return Ball(eps), Budget(steps, 2 * eps / max(steps, 1) if alpha is None else alpha, named.start)


BALL, PGD = budget_named("standard")


def fgsm(ball: Ball) -> Budget:
    """One step of the ball's whole radius."""
    return Budget(1, ball.eps)


@dataclass(frozen=True)
class Attacked:
    """What an attack left of its samples, in their order."""

    goal: Goal
    ids: Tensor  # (N,)
    targets: Tensor | None  # (N,) or (N, T); -1 where the sample was left alone
    images: Tensor  # (N, …) perturbed
    embeddings: Tensor  # (N, D) of them, in full precision
    early: Tensor | None  # (N, D) before the last step, where it was asked for
    measures: dict[str, Tensor]  # (N,) each
    image_steps: int
    queries: int = 0  # images that went forward only

    @property
    def success(self) -> Tensor | None:
        """Which samples were beaten, where the goal is one that can be reached."""
        return self.goal.success(self.measures)

    def measured(self, goal: Goal, scene: Scene) -> dict[str, Tensor]:
        """The same perturbations as another goal with the same run measures them."""
        check(goal.run == self.goal.run, f"{goal.name} {goal.protocol} is another run: {goal.run}, not {self.goal.run}")
        return goal.measure(scene, self.ids, self.targets, self.embeddings, self.early)


def attack(
    embed: Embed,
    images: Tensor,
    scene: Scene,
    goal: Goal,
    ids: Tensor,
    ball: Ball = BALL,
    budget: Budget = PGD,
    key: Key | None = None,
    batch: int = 256,
    *,
    targets: Tensor | None = None,
    look_back: bool = False,
    find: Find = ascend,
    starts: Tensor | None = None,
    objective: Climbed | None = None,
) -> Attacked:
    """Perturb `images` (N, …), the samples `ids` (N,) on the goal's side of the scene, and measure what is left.

    `batch` samples at a time, which bounds the memory at batch × gallery and changes nothing else: targets and
    starts are drawn by `key` and id. `targets` are aimed at instead of drawn ones. `embed` may be as coarse as it
    likes (autocast, TF32) while the ascent climbs; every measurement is made in full precision. With `look_back`,
    or where the goal needs it, the embeddings from before the last step are kept too. `find` is
    one of `perturb.methods`, `starts` (N, …) are where it starts, and `objective` makes what is climbed instead of the
    goal's own, such as `scale_free`.
    """
    samples = scene.clean(goal.side)
    if len(images) != len(ids):
        raise DataError(f"{len(images)} images and {len(ids)} ids; give the number of each image in the scene")
    if not len(ids):
        raise DataError("there are no samples to attack; give at least one image")
    if int(ids.min()) < 0 or int(ids.max()) >= len(samples):
        raise DataError(f"ids must be positions on the {goal.side} side of the scene, 0..{len(samples) - 1}")
    if targets is not None and len(targets) != len(ids):
        raise DataError(f"{len(targets)} targets for {len(ids)} samples; give one row of targets for each")
    check(batch >= 1, f"batch must be at least 1, got {batch}")
    key, budget = key or Key.of(0), goal.prepare(budget)
    look_back = look_back or goal.looks_back
    check(not (look_back and budget.weighs), "one step early means one start and its last iterate: keep = last")
    ids = ids.to(samples.device)
    spans = [slice(i, i + batch) for i in range(0, len(ids), batch)]
    parts = [
        _attack(
            embed,
            images[s],
            scene,
            goal,
            ids[s],
            at,
            ball,
            budget,
            key,
            look_back,
            find,
            None if starts is None else starts[s],
            objective,
        )
        for s, at in zip(spans, [None] * len(spans) if targets is None else [targets[s] for s in spans])
    ]
    whole = {name: torch.cat([part.measures[name] for part in parts]) for name in parts[0].measures}
    return Attacked(
        goal,
        ids,
        _joined([part.targets for part in parts]),
        torch.cat([part.images for part in parts]),
        torch.cat([part.embeddings for part in parts]),
        _joined([part.early for part in parts]),
        whole,
        sum(part.image_steps for part in parts),
        sum(part.queries for part in parts),
    )


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def _attack(
    embed: Embed,
    images: Tensor,
    scene: Scene,
    goal: Goal,
    ids: Tensor,
    targets: Tensor | None,
    ball: Ball,
    budget: Budget,
    key: Key,
    look_back: bool,
    find: Find,
    starts: Tensor | None,
    objective: Climbed | None,
) -> Attacked:
    """One batch."""
    targets = goal.targets(scene, ids, key) if targets is None else targets
    perturbed, before = images.clone(), images.clone() if look_back else None
    # Whoever aims at nobody is left alone: not even a random start may touch him.
    rows = torch.arange(len(ids), device=ids.device)
    if targets is not None:
        rows = rows[(targets.reshape(len(ids), -1) >= 0).all(1)]
    at = None if targets is None else targets[rows]
    last: list[tuple[Tensor, Tensor]] = []

    def watch(step: int, x: Tensor, positions: Tensor) -> None:
        if step == budget.steps - 1:
            last.append((x[:, 0], positions))

    made = goal.objective if objective is None else partial(objective, goal)
    ascent = find(
        embed,
        images[rows, None],
        made(scene, ids[rows], at),
        ball,
        budget,
        key=key(goal.name),
        ids=ids[rows],
        embedded=scene.clean(goal.side)[ids[rows], None],
        watch=watch if look_back else None,
        starts=None if starts is None else starts[rows, None],
    )
    perturbed[rows] = ascent.images[:, 0]
    embeddings, early = embed_all(embed, [perturbed]), None
    if before is not None:
        before[rows] = ascent.images[:, 0]  # whoever left earlier did not move in the last step
        for x, positions in last:
            before[rows[positions]] = x
        early = embed_all(embed, [before])
    measures = goal.measure(scene, ids, targets, embeddings, early)
    return Attacked(goal, ids, targets, perturbed, embeddings, early, measures, ascent.image_steps, ascent.queries)
