"""The ensemble of the strong audit: for each goal a fixed order of attacks, for each sample the worst result.

The goals are a wrong nearest neighbour (one goal for ES:R, LTM, GTM, nearest and margin), CA±, QA±, TMA, the distance
of ES, GTT and the label attacks. Every goal starts with its standard runs, in the corrected protocol and with their
targets. Then `MEMBERS` attack, in order, the samples that still withstand. Each sample keeps its worst result, so the
strong audit never reports more robustness than the standard one. There are no settings.

    pgd         3 random starts of 50 steps, ε/4 falling linearly to 0, best iterate, the goal's objective
                (a wrong neighbour has the next three instead)
    starts      5 short climbs of APGD, 25 steps each, over five objectives (`attacks.class_losses`); every second one
                starts in a random direction of the embedding
    adam        6 random starts of 50 steps of Adam, over three objectives
    momentum    3 random starts of 100 steps of momentum PGD, over two objectives
    apgd        100 steps from a random start, the goal's objective (for a wrong neighbour: `margin`)
    apgd-free   the same on the scale-free objective (`attacks.scale_free`); not for a wrong neighbour
    cw          C&W in its Linf form, 50 iterations; not for a wrong neighbour
    transfer    apgd-free on a second model, if given, without early stop; measured on this one
    square      1,000 queries without gradients, on the scale-free objective

Why a wrong neighbour has members of its own: the nearest items change from step to step, so its gradient jumps. Signed
steps from many starts miss what means of gradients find, and more steps from one start find little more. `apgd-free`
and `cw` found next to nothing after these, on masked models too (results/strong/members.json).

A sample that withstands all costs at most 400 image-steps and 1,000 queries per goal beyond its standard runs, for a
wrong neighbour 829, and 100 more with a second model. Over the eight goals behind ERS that is 3,950 steps and 8,000
forward passes with the standard runs. On a natural model most samples fall early, and only TMA and ES, which have no
end, take the full cost.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..attacks.class_losses import DIVERSE_STEPS, cross_entropy, diverse_starts, dlr, has_class_losses, soft_margin
from ..attacks.goal import Goal, Scene
from ..attacks.menu import goal_named
from ..attacks.run import Attacked, Climbed, attack
from ..attacks.scale_free import scale_free, without_end
from ..device import precise
from ..model.frozen import Embed, embed_all
from ..perturb.ascend import ascend
from ..perturb.ball import Ball
from ..perturb.cw import CW_STEPS
from ..perturb.methods import METHODS, Method, apgd
from ..perturb.problem import Objective, Problem
from ..perturb.settings import Budget
from ..random import Key
from .plan import AttackRun, AuditSettings

__all__ = [
    "BLACK",
    "FALLS",
    "MEMBERS",
    "SQUARE_QUERIES",
    "WARM",
    "Contest",
    "Member",
    "Surrogate",
    "Task",
    "for_queries",
    "most_steps",
    "strengthened",
    "tasks",
]

SQUARE_QUERIES = 1000
RECALL = ("ES", "LTM", "GTM", "nearest", "margin")  # attacks whose goal is a wrong nearest neighbour
FALLS = ("CA-", "QA-", "TMA", "ES:D")  # measures that the attacker raises
_NEAR = 1e-9


@dataclass(frozen=True)
class Member:
    """One method of the ensemble."""

    name: str
    kind: Literal["white", "transfer", "black"]
    find: Method
    budget: Callable[[float], Budget]  # from ε
    objectives: tuple[Climbed | None, ...] = (None,)  # None is the goal's own; one after the other, round by round
    rounds: int = 1
    diverse: bool = False  # every second round starts in a random direction of the embedding
    wants: Callable[[Goal], bool] = lambda goal: True  # the goals that it attacks

    def image_steps(self, goal: Goal) -> int:
        """The most image-steps of a sample; black-box members take queries instead."""
        if self.kind != "white" or not self.wants(goal):
            return 0
        budget = self.budget(1.0)
        return self.rounds * budget.steps * budget.restarts + self.diverse * DIVERSE_STEPS * (self.rounds // 2)


def _other_goals(goal: Goal) -> bool:
    return not has_class_losses(goal)


_ADAPTIVE = Budget(100, start="random", keep="best", rule="apgd")
MEMBERS = (
    Member(
        "pgd",
        "white",
        ascend,
        lambda eps: Budget(50, eps / 4, start="random", restarts=3, keep="best", schedule="linear"),
        wants=_other_goals,
    ),
    Member(
        "starts",
        "white",
        apgd,
        lambda eps: replace(_ADAPTIVE, steps=25),
        (cross_entropy(1.0), None, cross_entropy(0.1), dlr, soft_margin(0.03)),
        rounds=5,
        diverse=True,
        wants=has_class_losses,
    ),
    Member(
        "adam",
        "white",
        ascend,
        lambda eps: Budget(50, eps / 4, start="random", keep="best", schedule="linear", rule="adam"),
        (None, cross_entropy(1.0), soft_margin(0.03)),
        rounds=6,
        wants=has_class_losses,
    ),
    Member(
        "momentum",
        "white",
        ascend,
        lambda eps: Budget(100, eps / 5, start="random", keep="best", schedule="linear", rule="momentum"),
        (None, cross_entropy(1.0), None),
        rounds=3,
        wants=has_class_losses,
    ),
    Member("apgd", "white", apgd, lambda eps: _ADAPTIVE),
    Member("apgd-free", "white", apgd, lambda eps: _ADAPTIVE, (scale_free,), wants=_other_goals),
    Member("cw", "white", METHODS["cw"], lambda eps: Budget(CW_STEPS), wants=_other_goals),
    Member("transfer", "transfer", apgd, lambda eps: _ADAPTIVE, (without_end,)),
    Member("square", "black", METHODS["square"], lambda eps: Budget(SQUARE_QUERIES), (scale_free,)),
)
BLACK = (  # all members where no gradients may be taken
    MEMBERS[-1],
    Member("nes", "black", METHODS["nes"], lambda eps: Budget(SQUARE_QUERIES), (scale_free,)),
)
WARM = Member("warm", "white", apgd, lambda eps: _ADAPTIVE)  # starts from the result of a smaller ε


def most_steps(goal: Goal) -> int:
    """The image-steps of a sample that withstands all gradient members."""
    return sum(member.image_steps(goal) for member in MEMBERS)


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
        return now > before if self.main in FALLS else now < before

    def lost(self, now: Tensor, gallery: int) -> Tensor:
        """Where the attack is complete: a wrong answer, rank 0, or the last rank N−1."""
        if self.main in ("CA-", "QA-"):
            return now >= 1 - 1.5 / gallery
        return torch.zeros_like(now, dtype=torch.bool) if self.main in FALLS else now <= _NEAR


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


class Contest:
    """One batch of samples, and the worst image found for each."""

    def __init__(self, task: Task, embed: Embed, images: Tensor, scene: Scene, ids: Tensor, key: Key) -> None:
        self.task, self.embed, self.scene, self.key = task, embed, scene, key
        self.clean, self.images, self.ids = images, images.clone(), ids.to(scene.gallery.device)
        self.latest = images  # the last images tried: a start for a larger ε where nothing hurt yet
        self.targets = task.goal.targets(scene, self.ids, key)
        self.embeddings = scene.clean(task.goal.side)[self.ids].clone()
        self.measures = self.initial = self.measure(self.embeddings)
        self.steps = self.queries = 0

    def part(self, which: Tensor) -> "Contest":
        """These samples (a mask) once more, from their clean images."""
        return Contest(self.task, self.embed, self.clean[which], self.scene, self.ids[which], self.key)

    def measure(self, embeddings: Tensor, rows: Tensor | None = None) -> dict[str, Tensor]:
        at = slice(None) if rows is None else rows
        aims = None if self.targets is None else self.targets[at]
        with precise():
            return self.task.goal.measure(self.scene, self.ids[at], aims, embeddings, embeddings)

    def offer(self, images: Tensor, rows: Tensor) -> None:
        """Keep these images for the samples where they are worse for the model."""
        embeddings = embed_all(self.embed, [images])
        self.latest = self.latest.index_copy(0, rows, images)
        now = self.measure(embeddings, rows)
        worse = self.task.hurt(now[self.task.main], self.measures[self.task.main][rows])
        at = rows[worse]
        self.images[at], self.embeddings[at] = images[worse], embeddings[worse]
        self.measures = {name: row.index_copy(0, at, now[name][worse]) for name, row in self.measures.items()}

    def found(self) -> Tensor:
        """Starts for a larger ε: the worst image of each sample, or the last one tried where none hurt."""
        moved = (self.images != self.clean).flatten(1).any(1)
        return torch.where(moved.reshape(-1, *(1,) * (self.images.ndim - 1)), self.images, self.latest)

    def left(self) -> Tensor:
        """Rows that still withstand and have a target."""
        over = self.task.lost(self.measures[self.task.main], len(self.scene.gallery))
        if self.targets is not None:
            over |= (self.targets.reshape(len(over), -1) < 0).any(1)
        return torch.nonzero(~over).squeeze(1)

    def standard(self, ball: Ball, budget: Budget, starts: Tensor | None = None, method: Method = ascend) -> None:
        """The runs of the standard audit on the whole batch, from `starts` where given."""
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
                method=method,
                starts=starts,
            )
            self.steps += done.image_steps
            self.queries += done.queries
            self.offer(done.images, rows)

    def enter(self, member: Member, ball: Ball, surrogate: Surrogate | None, starts: Tensor | None = None) -> None:
        """Attack the remaining samples, in all rounds of a member."""
        for turn in range(member.rounds if member.wants(self.task.goal) else 0):
            rows = self.left()
            if len(rows):
                self._round(member, turn, ball, rows, surrogate, starts)

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
        done = attack(
            self.embed if foreign is None else foreign.embed,
            self.clean[rows],
            self.scene if foreign is None else foreign.scene,
            self.task.goal,
            self.ids[rows],
            ball,
            member.budget(ball.eps),
            self._key(member, turn),
            len(rows),
            targets=None if self.targets is None else self.targets[rows],
            method=member.find,
            objective=member.objectives[turn % len(member.objectives)],
            starts=starts,
        )
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
