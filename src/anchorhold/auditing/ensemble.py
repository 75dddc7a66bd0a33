"""The ensemble of the strong audit at work: its goals, and a batch of samples that the members attack in turn."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..attacks.class_losses import DIVERSE_STEPS, diverse_starts, has_class_losses
from ..attacks.goal import Goal, Scene
from ..attacks.menu import goal_named
from ..attacks.run import Attack, Attacked
from ..columns import goal_of, rises
from ..device import precise
from ..model.frozen import Embed, embed_all
from ..perturb.ascend import ascend
from ..perturb.ball import Ball
from ..perturb.methods import Method
from ..perturb.problem import Objective, Problem
from ..perturb.settings import Budget
from ..random import Key
from .members import BLACK, SQUARE_QUERIES, WARM, Member, most_steps
from .plan import AttackRun, AuditSettings
from .realisable import FILE_FORMS

__all__ = [
    "Contest",
    "Surrogate",
    "Task",
    "for_queries",
    "queries_at_most",
    "standing",
    "steps_at_most",
    "strengthened",
    "tasks",
]

RECALL = ("ES", "LTM", "GTM", "nearest", "margin")  # attacks whose goal is a wrong nearest neighbour
_NEAR = 1e-9


@dataclass(frozen=True)
class Task:
    """One goal of the ensemble, its standard runs, and its columns."""

    name: str
    goal: Goal
    first: tuple[Goal, ...]
    columns: dict[str, str]  # column of the table: measure of the goal

    @property
    def main(self) -> str:
        """The measure that decides which result is worse."""
        return next(iter(self.columns.values()))

    def hurt(self, now: Tensor, before: Tensor) -> Tensor:
        """Where the attack improved on `before`."""
        return now > before if rises(self.main) else now < before

    def lost(self, now: Tensor, gallery: int) -> Tensor:
        """Where the attack is complete: a wrong answer, rank 0, or the last rank N−1."""
        if goal_of(self.main) == 100:
            return now >= 1 - 1.5 / gallery
        return torch.zeros_like(now, dtype=torch.bool) if rises(self.main) else now <= _NEAR


@dataclass(frozen=True)
class Surrogate:
    """A second model, whose perturbations are transferred to the first."""

    embed: Embed
    scene: Scene
    weights: str  # a hash of them


def tasks(runs: Iterable[AttackRun]) -> list[Task]:
    """The goals of these standard runs, from the corrected protocol only."""
    known: dict[str, Goal] = {}
    for run in runs:
        for goal in run.goals:
            if goal.protocol == "corrected":
                known.setdefault(run.attack, goal)
    found = []
    recall = {name: goal for name, goal in known.items() if name in RECALL}
    if recall:
        columns = {str(goal.kept): "margin" for goal in recall.values()}
        found.append(Task("recall", goal_named("margin", "corrected"), tuple(recall.values()), columns))
    for name, goal in known.items():
        if name == "ES":
            found.append(Task(name, goal, (goal,), {"ES:D": "ES:D"}))
        elif name not in RECALL:
            columns = {name: name} | ({"GTT@1": "GTT@1"} if name == "GTT" else {})
            found.append(Task(name, goal, (goal,), columns))
    return found


def strengthened(settings: AuditSettings, runs: Iterable[AttackRun]) -> list[tuple[Task, int]]:
    """The goals that the ensemble attacks in this audit, each with its number of ε."""
    levels = len({*settings.epsilons, settings.ball.eps})
    every = tasks(runs) if settings.strength == "strong" or settings.epsilons else []
    recall = [(task, levels) for task in every if task.name == "recall"]
    return recall + [(task, 1) for task in every if task.name != "recall" and settings.strength == "strong"]


def steps_at_most(task: Task, levels: int, standard: int, transferred: bool = False) -> int:
    """Image-steps of a sample that withstands everything at this number of ε.

    At each ε there are the standard runs of `standard` steps, all gradient members, and the transferred ones if there
    is a second model. At all but the first there is a climb from the result of another ε.
    """
    second = WARM.image_steps(task.goal) if transferred else 0  # as long as the climb on the second model
    each = standard * len(task.first) + most_steps(task.goal) + second
    return levels * each + (levels - 1) * WARM.image_steps(task.goal)


def queries_at_most(task: Task, levels: int, standard: int) -> int:
    """Images that the model sees of a sample that withstands everything, where no gradients may be taken.

    At each ε there are the standard runs of `standard` queries and all black-box members, at all but the first a climb
    from the result of another ε. Each attack also embeds its start, and its result twice: as its own, and to compare it
    with the worst so far. At the end there are two forms of files and a receipt.
    """
    extra = 3
    each = len(task.first) * (standard + extra) + len(BLACK) * (SQUARE_QUERIES + extra)
    if not levels:  # lost before any attack: only the standard runs attack it
        each, levels = len(task.first) * (standard + extra), 1
    return levels * each + (levels - 1) * (SQUARE_QUERIES + extra) + len(FILE_FORMS) + 1


def standing(task: Task, scene: Scene, ids: Tensor, key: Key) -> int:
    """How many of these samples are not lost before any attack: the others cost the members nothing."""
    count = 0
    for part in ids.to(scene.gallery.device).split(256):
        clean = scene.clean(task.goal.side)[part]
        with precise():
            measures = task.goal.measure(scene, part, task.goal.targets(scene, part, key), clean, clean)
        count += int((~task.lost(measures[task.main], len(scene.gallery))).sum())
    return count


class Contest:
    """One batch of samples, and the worst image found for each."""

    def __init__(
        self,
        task: Task,
        embed: Embed,
        images: Tensor,
        scene: Scene,
        ids: Tensor,
        key: Key,
        random: bool = False,
    ) -> None:
        self.task, self.embed, self.scene, self.key = task, embed, scene, key
        self.random = random  # whether the model gives other vectors each time
        self.clean, self.images, self.ids = images, images.clone(), ids.to(scene.gallery.device)
        self.nearest = images.clone()  # for a wrong neighbour: the images tried that came nearest to one
        self.height = torch.full((len(images),), -torch.inf, device=images.device)
        self.targets = task.goal.targets(scene, self.ids, key)
        self.embeddings = scene.clean(task.goal.side)[self.ids].clone()
        self.measures = self.initial = self.measure(self.embeddings)
        self.steps = self.queries = 0
        self.rejected = torch.zeros(len(images), dtype=torch.bool, device=images.device)

    def part(self, which: Tensor) -> "Contest":
        """These samples (a mask) once more, from their clean images."""
        return Contest(self.task, self.embed, self.clean[which], self.scene, self.ids[which], self.key, self.random)

    def measure(self, embeddings: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        at = slice(None) if rows is None else rows
        aims = None if self.targets is None else self.targets[at]
        with precise():
            return self.task.goal.measure(self.scene, self.ids[at], aims, embeddings, embeddings)

    def offer(self, images: Tensor, rows: Tensor) -> None:
        """Keep these images for the samples where they are worse for the model.

        Images whose embedding is not finite are no answer: they are rejected, and their samples noted.
        """
        embeddings = embed_all(self.embed, [images])
        usable = embeddings.isfinite().all(1)
        if not bool(usable.all()):
            self.rejected[rows[~usable]] = True
            images, embeddings, rows = images[usable], embeddings[usable], rows[usable]
            if not len(rows):
                return
        self._remember(images, embeddings, rows)
        now = self.measure(embeddings, rows)
        worse = self.task.hurt(now[self.task.main], self.measures[self.task.main][rows])
        at = rows[worse]
        self.images[at], self.embeddings[at] = images[worse], embeddings[worse]
        self.measures = {name: row.index_copy(0, at, now[name][worse]) for name, row in self.measures.items()}

    def embedded(self, images: Tensor, rows: Tensor | None = None) -> Tensor:
        """Embeddings of changed images of these samples; the clean one where theirs is not finite."""
        at = slice(None) if rows is None else rows
        embeddings = embed_all(self.embed, [images])
        broken = ~embeddings.isfinite().all(1)
        if bool(broken.any()):
            self.rejected[at] |= broken
            clean = self.scene.clean(self.task.goal.side)[self.ids[at]]
            embeddings[broken] = clean[broken].to(embeddings.dtype)
        return embeddings

    def _remember(self, images: Tensor, embeddings: Tensor, rows: Tensor) -> None:
        """Keep these images where they come nearer to a wrong neighbour: starts for `refine` and for a larger ε."""
        if not has_class_losses(self.task.goal):
            return
        aims = None if self.targets is None else self.targets[rows]
        with torch.no_grad(), precise():
            objective = self.task.goal.objective(self.scene, self.ids[rows], aims)
            now = objective.value(embeddings[:, None], torch.arange(len(rows), device=rows.device)).to(self.height)
        nearer = now > self.height[rows]
        self.nearest[rows[nearer]], self.height[rows[nearer]] = images[nearer], now[nearer]

    def found(self) -> Tensor:
        """Starts for another ε: the worst image of each sample, or the one that came nearest where none hurt."""
        moved = (self.images != self.clean).flatten(1).any(1)
        return torch.where(moved.reshape(-1, *(1,) * (self.images.ndim - 1)), self.images, self.nearest)

    def answer(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings of the worst images and their measures; those of a random model are drawn anew.

        The members look for the worst of many noisy answers, and some are bad by luck.
        """
        if not self.random:
            return self.embeddings, self.measures
        moved = (self.images != self.clean).flatten(1).any(1)
        drawn = self.embedded(self.images)
        clean = self.scene.clean(self.task.goal.side)[self.ids]
        embeddings = torch.where(moved[:, None], drawn.to(clean), clean)
        return embeddings, self.measure(embeddings)

    def left(self) -> Tensor:
        """Rows that still withstand and have a target."""
        over = self.task.lost(self.measures[self.task.main], len(self.scene.gallery))
        if self.targets is not None:
            over |= (self.targets.reshape(len(over), -1) < 0).any(1)
        return torch.nonzero(~over).squeeze(1)

    def standard(self, ball: Ball, budget: Budget, method: Method = ascend) -> None:
        """The runs of the standard audit on the whole batch."""
        rows = torch.arange(len(self.ids), device=self.ids.device)
        for goal in self.task.first:
            attack = Attack(self.embed, self.scene, goal, ball, budget, self.key, method)
            targets = goal.targets(self.scene, self.ids, self.key)
            done = attack.run(self.clean, self.ids, len(self.ids), targets=targets)
            self._reject(done, rows)
            self.steps += done.image_steps
            self.queries += done.queries
            self.offer(done.images, rows)

    def enter(self, member: Member, ball: Ball, surrogate: Surrogate | None, starts: Tensor | None = None) -> None:
        """Attack the remaining samples, in all rounds of a member."""
        for turn in range(member.rounds if member.wants(self.task.goal) else 0):
            rows = self.left()
            if len(rows):
                given = self.nearest if member.refines and starts is None else starts
                self._round(member, turn, ball, rows, surrogate, given)

    def _round(
        self, member: Member, turn: int, ball: Ball, rows: Tensor, surrogate: Surrogate | None, starts: Tensor | None
    ) -> None:
        """Attack these samples once. Apparent successes in low precision are attacked again in fp32."""
        black, foreign = member.kind == "black", surrogate if member.kind == "transfer" else None
        with for_queries(self.embed, self.clean[rows], ball.eps) if black else nullcontext():
            given = self._starts(member, turn, ball, rows) if starts is None else starts[rows]
            done = self._climb(member, turn, ball, rows, foreign, given)
            coarse = torch.is_autocast_enabled(self.clean.device.type) or (black and self.clean.is_cuda)
            met = self._met(member, turn, done.images, rows) if coarse and foreign is None else None
        self.offer(done.images, rows)
        if met is None:
            return
        again = met & torch.isin(rows, self.left())
        if bool(again.any()):
            with precise():
                done = self._climb(member, turn, ball, rows[again], None, done.images[again])
            self.offer(done.images, rows[again])

    def _reject(self, done: Attacked, rows: Tensor) -> None:
        """Note the samples that an attack rejected."""
        if done.rejected is not None:
            self.rejected[rows] |= done.rejected

    def _key(self, member: Member, turn: int) -> Key:
        key = self.key("strong", member.name)
        return key(turn) if turn else key

    def _starts(self, member: Member, turn: int, ball: Ball, rows: Tensor) -> Tensor | None:
        """Starts in random directions of the embedding, for every second round of a diverse member."""
        if not member.diverse or turn % 2 == 0:
            return None
        problem = Problem(self.embed, Objective(lambda e, positions: e[:, 0, 0]), ball)
        self.steps += DIVERSE_STEPS * len(rows)
        return diverse_starts(problem, self.clean[rows, None], self.ids[rows], self._key(member, turn))[:, 0]

    def _climb(
        self, member: Member, turn: int, ball: Ball, rows: Tensor, foreign: Surrogate | None, starts: Tensor | None
    ) -> Attacked:
        victim = self if foreign is None else foreign
        attack = Attack(
            victim.embed,
            victim.scene,
            self.task.goal,
            ball,
            member.budget(ball.eps),
            self._key(member, turn),
            member.find,
            member.objectives[turn % len(member.objectives)],
        )
        targets = None if self.targets is None else self.targets[rows]
        done = attack.run(self.clean[rows], self.ids[rows], len(rows), targets=targets, starts=starts)
        if foreign is None:
            self._reject(done, rows)
        self.steps += done.image_steps
        self.queries += done.queries
        return done

    @torch.no_grad()
    def _met(self, member: Member, turn: int, images: Tensor, rows: Tensor) -> Tensor | None:
        """Which rows met the goal by the member's objective, in the attack's precision; None where it has no end."""
        goal, aims = self.task.goal, None if self.targets is None else self.targets[rows]
        chosen = member.objectives[turn % len(member.objectives)]
        make = goal.objective if chosen is None else partial(chosen, goal)
        objective = make(self.scene, self.ids[rows], aims)
        return objective.met(self.embed(images)[:, None], torch.arange(len(rows), device=rows.device))


def _half() -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.float16)


def for_queries(
    embed: Embed, images: Tensor, eps: float, half: Callable[[], AbstractContextManager[object]] | None = None
) -> AbstractContextManager[object]:
    """The precision of Square: fp16 on a GPU, since bf16 cannot resolve the differences that Square compares.

    fp16 has as many digits as TF32's inputs and is faster, but overflows at 65,504. TF32 is used where an embedding
    overflows at the images or at the ends of their ball. It is also used where the ascent is in fp32.
    """
    half = half or (_half if images.is_cuda and torch.is_autocast_enabled("cuda") else None)
    if half is not None:
        with torch.no_grad(), half():
            ends = (embed((images + shift).clamp(0, 1)) for shift in (0.0, -eps, eps))
            if all(bool(e.isfinite().all()) for e in ends):
                return half()
    return precise(tf32=True)
