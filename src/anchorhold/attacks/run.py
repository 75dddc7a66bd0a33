"""Run one goal on some samples: draw targets, climb, measure."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..errors import DataError, check
from ..interface import argument
from ..model.frozen import Embed, embed_all
from ..perturb.ascend import ascend
from ..perturb.ball import Ball
from ..perturb.methods import Method
from ..perturb.problem import Objective, Problem
from ..perturb.settings import THREATS, Budget
from ..random import Key
from .goal import Goal, Scene

__all__ = ["BALL", "PGD", "Attack", "Attacked", "Climbed", "fgsm"]


Climbed = Callable[[Goal, Scene, Tensor, Tensor | None], Objective]
"""Makes the objective of a goal from scene, ids and targets."""


BALL, PGD = THREATS["standard"].ball, THREATS["standard"].budget


def fgsm(ball: Ball) -> Budget:
    """One step of the ball's full radius."""
    return Budget(1, ball.eps)


@dataclass(frozen=True)
class Attacked:
    """The result of an attack on its samples, in their order."""

    goal: Goal
    ids: Tensor  # (N,)
    targets: Tensor | None  # (N,) or (N, T); -1 where the sample stays clean
    images: Tensor  # (N, …) perturbed
    embeddings: Tensor  # (N, D) of them, in full precision
    early: Tensor | None  # (N, D) before the last step, where requested
    measures: dict[str, Tensor]  # (N,) each
    image_steps: int
    queries: int = 0  # forward passes without a gradient
    rejected: Tensor | None = None  # (N,) perturbed to an image without a finite embedding: they are clean again

    @property
    def success(self) -> Tensor | None:
        """Which samples the attack beat; None where the goal cannot be reached or missed."""
        return self.goal.success(self.measures)

    def measured(self, goal: Goal, scene: Scene) -> dict[str, Tensor]:
        """The same perturbations, measured by another goal with the same `run`."""
        check(goal.run == self.goal.run, f"{goal.name} {goal.protocol} is another run: {goal.run}, not {self.goal.run}")
        return goal.measure(scene, self.ids, self.targets, self.embeddings, self.early)


@dataclass(frozen=True, eq=False)
class Attack:
    """An attack without its samples: a goal in a scene, and the method that climbs it.

    Args:
        embed: the model. The ascent may use low precision (autocast, TF32); all measurements are in fp32.
        scene: the clean embeddings of queries and gallery.
        goal: what the attacker wants.
        ball: how far a sample may move.
        budget: how many steps, and of which kind.
        key: targets and random starts are functions of the key and the ids.
        method: one of `perturb.methods`.
        objective: makes an objective that replaces the goal's own, such as `scale_free`.
        look_back: also keep the embeddings before the last step. Goals that need them do so anyway.
    """

    embed: Embed
    scene: Scene
    goal: Goal
    ball: Ball = BALL
    budget: Budget = PGD
    key: Key = field(default_factory=lambda: Key.of(0))
    method: Method = ascend
    objective: Climbed | None = None
    look_back: bool = False

    def run(
        self,
        images: Tensor,
        ids: Tensor,
        batch: int = 256,
        *,
        targets: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Attacked:
        """Perturb samples of the scene, and measure what is left.

        Args:
            images: (N, …) the samples.
            ids: (N,) their positions on the goal's side of the scene.
            batch: samples at a time. It limits memory to batch × gallery and does not change the result.
            targets: used instead of drawn ones.
            starts: (N, …) starting points.
        """
        samples, budget = self.scene.clean(self.goal.side), self.goal.prepare(self.budget)
        _check_samples(samples, self.goal, images, ids, targets)
        check(batch >= 1, f"{argument('batch')} must be at least 1, got {batch}")
        look_back = self.look_back or self.goal.looks_back
        check(
            not (look_back and budget.weighs),
            "the step before the last needs one start and its last iterate: set keep = last",
        )
        ids = ids.to(samples.device)
        prepared = replace(self, budget=budget, look_back=look_back)
        parts = [
            prepared._batch(images[s], ids[s], _part(targets, s), _part(starts, s))
            for s in (slice(i, i + batch) for i in range(0, len(ids), batch))
        ]
        return _joined(self.goal, parts)

    def _batch(self, images: Tensor, ids: Tensor, targets: Tensor | None, starts: Tensor | None) -> Attacked:
        scene, goal, budget = self.scene, self.goal, self.budget
        targets = goal.targets(scene, ids, self.key) if targets is None else targets
        perturbed, before = images.clone(), images.clone() if self.look_back else None
        # Samples without a target stay unperturbed: a random start would move them.
        rows = torch.arange(len(ids), device=ids.device)
        if targets is not None:
            rows = rows[(targets.reshape(len(ids), -1) >= 0).all(1)]
        at = None if targets is None else targets[rows]
        last: list[tuple[Tensor, Tensor]] = []

        def watch(step: int, x: Tensor, positions: Tensor) -> None:
            if step == budget.steps - 1:
                last.append((x[:, 0], positions))

        made = goal.objective if self.objective is None else partial(self.objective, goal)
        clean = scene.clean(goal.side)[ids]
        ascent = self.method(
            Problem(self.embed, made(scene, ids[rows], at), self.ball, budget, self.key(goal.name)),
            images[rows, None],
            ids=ids[rows],
            embedded=clean[rows, None],
            watch=watch if self.look_back else None,
            starts=None if starts is None else starts[rows, None],
        )
        perturbed[rows] = ascent.images[:, 0]
        embeddings, rejected = _embedded(self.embed, perturbed, images, clean)
        early = None
        if before is not None:
            before[rows] = ascent.images[:, 0]  # a dropped unit did not move in the last step
            for x, positions in last:
                before[rows[positions]] = x
            before[rejected] = images[rejected]
            early, _ = _embedded(self.embed, before, images, clean)
        measures = goal.measure(scene, ids, targets, embeddings, early)
        spent = ascent.image_steps, ascent.queries
        return Attacked(goal, ids, targets, perturbed, embeddings, early, measures, *spent, rejected)


def _part(values: Tensor | None, which: slice) -> Tensor | None:
    return None if values is None else values[which]


def _joined(goal: Goal, parts: list[Attacked]) -> Attacked:
    """The batches of an attack as one."""

    def whole(rows: list[Tensor | None]) -> Tensor | None:
        known = [row for row in rows if row is not None]
        return torch.cat(known) if known else None

    return Attacked(
        goal,
        torch.cat([part.ids for part in parts]),
        whole([part.targets for part in parts]),
        torch.cat([part.images for part in parts]),
        torch.cat([part.embeddings for part in parts]),
        whole([part.early for part in parts]),
        {name: torch.cat([part.measures[name] for part in parts]) for name in parts[0].measures},
        sum(part.image_steps for part in parts),
        sum(part.queries for part in parts),
        whole([part.rejected for part in parts]),
    )


def _check_samples(samples: Tensor, goal: Goal, images: Tensor, ids: Tensor, targets: Tensor | None) -> None:
    """Refuse images, ids and targets that do not match."""
    if len(images) != len(ids):
        raise DataError(f"{len(images)} images and {len(ids)} ids; give the position of each image in the scene")
    if not len(ids):
        raise DataError("there are no samples to attack; give at least one image")
    if int(ids.min()) < 0 or int(ids.max()) >= len(samples):
        raise DataError(f"ids must be positions on the {goal.side} side of the scene, 0..{len(samples) - 1}")
    if targets is not None and len(targets) != len(ids):
        raise DataError(f"{len(targets)} targets for {len(ids)} samples; give one row of targets for each")


def _embedded(embed: Embed, images: Tensor, clean: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The embeddings of `images`, and which were rejected; unchanged images keep their `known` embedding bit by bit.

    Embedded again in another batch they would differ by rounding, and a rank could change without an attack. An image
    whose embedding is not finite is no answer, so it is rejected: `images` has the clean one in its place.
    """
    embeddings = embed_all(embed, [images])
    rejected = ~embeddings.isfinite().all(1)
    images[rejected] = clean[rejected]
    still = (images == clean).flatten(1).all(1)
    embeddings[still] = known[still].to(embeddings.dtype)
    return embeddings, rejected
