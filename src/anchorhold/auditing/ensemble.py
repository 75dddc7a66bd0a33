"""The ensemble of the strong audit: for each goal fixed attacks in order, for each sample the worst that any did.

Goals are a wrong nearest neighbour (one goal behind ES:R, LTM, GTM, nearest and margin), CA±, QA±, TMA, the distance
of ES, GTT and the label attacks. Every goal starts with its standard runs, in the corrected protocol and on their
targets; then `MEMBERS` attack, in order, the samples that are not lost yet. A sample keeps the worst of what was found,
so that the strong audit can never leave more than the standard one. Nothing is to be chosen.

    pgd         3 random starts of 50 steps, ε/4 falling linearly to 0, best iterate, the goal's objective
    apgd        100 steps from a random start, the goal's objective (for a wrong neighbour: `margin`)
    apgd-free   the same on the objective free of scale (`attacks.scale_free`)
    cw          C&W in its Linf form, 50 iterations
    transfer    apgd-free on a second model, where one is given, through all its steps; measured on this one
    square      1,000 queries without gradients, on the objective free of scale

A sample that withstands all costs at most 400 image-steps and 1,000 queries a goal beyond its standard runs (500 with a
second model): over the eight goals behind ERS 3,500 image-steps and 8,000 forward passes, so for 1,000 queries 3.5
million image-steps and 8 million queries. A natural model is left with TMA and ES only, which have no end.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..attacks import Attacked, Goal, Scene, attack, goal_named
from ..attacks.run import Climbed
from ..attacks.scale_free import scale_free, without_end
from ..model.frozen import Embed, embed_all, precise
from ..perturb.ascend import Budget, ascend
from ..perturb.ball import Ball
from ..perturb.methods import METHODS, Find, apgd
from ..perturb.minnorm import CW_STEPS
from ..random import Key
from .sweep import AttackRun

__all__ = [
    "FALLS",
    "MEMBERS",
    "SQUARE_QUERIES",
    "STEPS",
    "WARM",
    "Contest",
    "Member",
    "Surrogate",
    "Task",
    "for_queries",
    "tasks",
]

SQUARE_QUERIES = 1000
STEPS = 400  # image-steps of a sample that withstands all members by gradients, for one goal
RECALL = ("ES", "LTM", "GTM", "nearest", "margin")  # attacks that want a wrong nearest neighbour
FALLS = ("CA-", "QA-", "TMA", "ES:D")  # measures that an attacker wants high
_NEAR = 1e-9


@dataclass(frozen=True)
class Member:
    """One method of the ensemble."""

    name: str
    kind: Literal["white", "transfer", "black"]
    find: Find
    budget: Callable[[float], Budget]  # of ε
    objective: Climbed | None = None


_ADAPTIVE = Budget(100, start="random", keep="best", rule="apgd")
MEMBERS = (
    Member(
        "pgd",
        "white",
        ascend,
        lambda eps: Budget(50, eps / 4, start="random", restarts=3, keep="best", schedule="linear"),
    ),
    Member("apgd", "white", apgd, lambda eps: _ADAPTIVE),
    Member("apgd-free", "white", apgd, lambda eps: _ADAPTIVE, scale_free),
    Member("cw", "white", METHODS["cw"], lambda eps: Budget(CW_STEPS)),
    Member("transfer", "transfer", apgd, lambda eps: _ADAPTIVE, without_end),
    Member("square", "black", METHODS["square"], lambda eps: Budget(SQUARE_QUERIES), scale_free),
)
WARM = Member("warm", "white", apgd, lambda eps: _ADAPTIVE)  # from what a smaller ε found


@dataclass(frozen=True)
class Task:
    """One goal of the ensemble, its standard runs, and the columns it gives."""

    name: str
    goal: Goal
    first: tuple[Goal, ...]
    columns: dict[str, str]  # column of the table: measure of the goal

    @property
    def main(self) -> str:
        """The measure that is contested."""
        return next(iter(self.columns.values()))

    def hurt(self, now: Tensor, before: Tensor) -> Tensor:
        """Where the attacker does better than before."""
        return now > before if self.main in FALLS else now < before

    def lost(self, now: Tensor, gallery: int) -> Tensor:
        """Where nothing is left to gain: a wrong answer, rank 0, or the last rank N−1."""
        if self.main in ("CA-", "QA-"):
            return now >= 1 - 1.5 / gallery
        return torch.zeros_like(now, dtype=torch.bool) if self.main in FALLS else now <= _NEAR


@dataclass(frozen=True)
class Surrogate:
    """A second model, whose perturbations are tried on the first."""

    embed: Embed
    scene: Scene
    weights: str  # a hash of them


def tasks(runs: Iterable[AttackRun]) -> list[Task]:
    """The goals behind these standard runs; of those only the corrected ones take part."""
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


class Contest:
    """One batch of samples, and the worst image that was found for each."""

    def __init__(self, task: Task, embed: Embed, images: Tensor, scene: Scene, ids: Tensor, key: Key) -> None:
        self.task, self.embed, self.scene, self.key = task, embed, scene, key
        self.clean, self.images, self.ids = images, images.clone(), ids.to(scene.gallery.device)
        self.latest = images  # what was offered last: where nobody is worse off, it still leads somewhere
        self.targets = task.goal.targets(scene, self.ids, key)
        self.embeddings = scene.clean(task.goal.side)[self.ids].clone()
        self.measures = self.initial = self.measure(self.embeddings)
        self.steps = self.queries = 0

    def measure(self, embeddings: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        at = slice(None) if rows is None else rows
        aims = None if self.targets is None else self.targets[at]
        with precise():
            return self.task.goal.measure(self.scene, self.ids[at], aims, embeddings, embeddings)

    def offer(self, images: Tensor, rows: Tensor) -> None:
        """Whoever is worse off with these images keeps them."""
        embeddings = embed_all(self.embed, [images])
        self.latest = self.latest.index_copy(0, rows, images)
        now = self.measure(embeddings, rows)
        worse = self.task.hurt(now[self.task.main], self.measures[self.task.main][rows])
        at = rows[worse]
        self.images[at], self.embeddings[at] = images[worse], embeddings[worse]
        self.measures = {name: row.index_copy(0, at, now[name][worse]) for name, row in self.measures.items()}

    def found(self) -> Tensor:
        """Where a larger ε may start: the worst image of each sample, or, while none hurt it, the last tried."""
        moved = (self.images != self.clean).flatten(1).any(1)
        return torch.where(moved.reshape(-1, *(1,) * (self.images.ndim - 1)), self.images, self.latest)

    def left(self) -> Tensor:
        """Rows that are not lost yet, and that aim at somebody."""
        over = self.task.lost(self.measures[self.task.main], len(self.scene.gallery))
        if self.targets is not None:
            over |= (self.targets.reshape(len(over), -1) < 0).any(1)
        return torch.nonzero(~over).squeeze(1)

    def standard(self, ball: Ball, budget: Budget, starts: Tensor | None = None) -> None:
        """The runs of the standard audit, on the whole batch as there; from `starts` instead where they are given."""
        rows = torch.arange(len(self.ids), device=self.ids.device)
        for goal in self.task.first:
            done = attack(
                self.embed,
                self.clean,
                self.scene,
                goal,
                self.ids,
                ball,
                budget,
                self.key,
                len(self.ids),
                targets=goal.targets(self.scene, self.ids, self.key),
                starts=starts,
            )
            self.steps += done.image_steps
            self.offer(done.images, rows)

    def enter(self, member: Member, ball: Ball, surrogate: Surrogate | None, starts: Tensor | None = None) -> None:
        """One member against whoever is left; whom its precision only seemed to beat, once more in fp32 from there."""
        rows = self.left()
        if not len(rows):
            return
        black, foreign = member.kind == "black", surrogate if member.kind == "transfer" else None
        with for_queries(self.embed, self.clean[rows], ball.eps) if black else nullcontext():
            done = self._climb(member, ball, rows, foreign, None if starts is None else starts[rows])
            coarse = torch.is_autocast_enabled(self.clean.device.type) or (black and self.clean.is_cuda)
            met = self._met(member, done.images, rows) if coarse and foreign is None else None
        self.offer(done.images, rows)
        if met is None:
            return
        again = met & torch.isin(rows, self.left())
        if bool(again.any()):
            with precise():
                done = self._climb(member, ball, rows[again], None, done.images[again])
            self.offer(done.images, rows[again])

    def _climb(
        self, member: Member, ball: Ball, rows: Tensor, foreign: Surrogate | None, starts: Tensor | None
    ) -> Attacked:
        done = attack(
            self.embed if foreign is None else foreign.embed,
            self.clean[rows],
            self.scene if foreign is None else foreign.scene,
            self.task.goal,
            self.ids[rows],
            ball,
            member.budget(ball.eps),
            self.key("strong", member.name),
            len(rows),
            targets=None if self.targets is None else self.targets[rows],
            find=member.find,
            objective=member.objective,
            starts=starts,
        )
        self.steps += done.image_steps
        self.queries += done.queries
        return done

    @torch.no_grad()
    def _met(self, member: Member, images: Tensor, rows: Tensor) -> Tensor | None:
        """Who met the goal by the member's own objective, in the precision it climbs in; None where there is no end."""
        goal, aims = self.task.goal, None if self.targets is None else self.targets[rows]
        make = goal.objective if member.objective is None else partial(member.objective, goal)
        objective = make(self.scene, self.ids[rows], aims)
        return objective.met(self.embed(images)[:, None], torch.arange(len(rows), device=rows.device))


def _half() -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.float16)


def for_queries(
    embed: Embed, images: Tensor, eps: float, half: Callable[[], AbstractContextManager[object]] | None = None
) -> AbstractContextManager[object]:
    """The precision of Square, which compares values that differ by less than bf16 can hold: fp16 on a GPU.

    fp16 has as many digits as TF32's inputs, and is faster, but ends at 65,504. Where an embedding is not finite in it,
    at the images or at the ends of the ball around them, or where the ascent is in fp32, TF32 is taken.
    """
    half = half or (_half if images.is_cuda and torch.is_autocast_enabled("cuda") else None)
    if half is not None:
        with torch.no_grad(), half():
            ends = (embed((images + shift).clamp(0, 1)) for shift in (0.0, -eps, eps))
            if all(bool(e.isfinite().all()) for e in ends):
                return half()
    return precise(tf32=True)
