"""The one loop that finds perturbations.

A *unit* is what is attacked together and has V views: one image in an attack, the three of a triplet in hardness
manipulation. The loop climbs an objective of the units' embeddings by steepest steps inside a ball. It takes
gradients with respect to images only and never touches a parameter's `.grad`.

A unit whose goal is met has, under a hinged separable objective and momentum-free steps, exactly zero gradient
and cannot move again. It leaves the batch, and the result is the same as if it had stayed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import SettingsError
from ..random import Key
from ..ranks import Ranks
from ..settings import Schedule, check, falling, nearest
from .ball import Ball, Region
from .gradient import Climb, adapt

__all__ = ["Ascent", "Budget", "Objective", "Watch", "ascend"]

TINY = 1e-3  # share of the ball that a tiny start may cover

Goal = Callable[[Tensor, Tensor], Tensor]
Watch = Callable[[int, Tensor, Tensor], None]  # step, images (U', V', …) it starts from, their positions (U',)
Start = Literal["zero", "random", "tiny"]
Keep = Literal["last", "best"]
Rule = Literal["steepest", "apgd"]


@dataclass(frozen=True)
class Objective:
    """What is climbed. Each function takes the embeddings (U', V, D) of some units and their positions (U',) in
    the original batch; constants are looked up by position, never assumed aligned."""

    value: Goal  # one number a unit, or one scalar where the objective couples the units
    # Hinged: which units met their goal, so have zero gradient; where units are coupled, one truth for all of them.
    # Where `value` has an end, `top` says it all: who is there is done, and nothing is computed twice.
    done: Goal | None = None
    first: Goal | None = None  # climbed in the first step from a zero start where `value` is stationary there
    coupled: bool = False
    top: float | None = None

    def __post_init__(self) -> None:
        check(self.done is None or self.top is None, "an objective is done at its top, or by `done`: give one of them")

    @property
    def goal(self) -> Goal | None:
        """Which units are done, by `done` or at `top`; None where the objective has no end."""
        value, top = self.value, self.top  # and not self, which would keep itself and all its tensors alive
        return self.done if top is None else lambda e, positions: value(e, positions) >= top

    def met(self, embeddings: Tensor, positions: Tensor, value: Tensor | None = None) -> Tensor | None:
        """(U',) which units are done; None where the objective has no goal. `value` is theirs where it is known."""
        goal = self.goal
        if goal is None:
            return None
        if value is not None and self.top is not None:
            done = value.detach() >= self.top
        else:
            done = goal(embeddings.detach(), positions)
        check(
            done.ndim == 0 or not self.coupled, "a coupled objective ends for the whole batch: `done` gives one truth"
        )
        return done.expand(len(positions))

    def shared(self, ranks: Ranks, count: int) -> "Objective":
        """The same for this rank's share of `count` units, whose positions are counted from its first.

        Where units are coupled, every rank sees them all, and its gradient is of its own.
        """
        if not ranks.splits(count):
            return self
        first = ranks.share(count).start

        def of(goal: Goal | None) -> Goal | None:
            if goal is None:
                return None
            if self.coupled:
                return lambda e, at: goal(ranks.gathered(e, count), torch.arange(count, device=at.device))
            return lambda e, at: goal(e, at + first)

        value = of(self.value)
        assert value is not None
        return Objective(value, of(self.done), of(self.first), self.coupled, self.top)


@dataclass(frozen=True)
class Budget:
    """How much work is spent on a unit, and how."""

    steps: int = 8
    alpha: float = 1 / 255  # length of a step
    start: Start = "zero"  # tiny: random, so near that only stationarity is left
    restarts: int = 1  # later ones start at random and run for units that have not met their goal
    keep: Keep = "last"
    schedule: Schedule = "constant"  # how alpha falls over the steps
    drop: bool = True  # let units that are done leave; off only to show that it changes nothing
    rule: Rule = "steepest"  # apgd finds its own step length, so has no use for alpha and schedule; see `gradient`

    def __post_init__(self) -> None:
        check(self.steps >= 0, f"steps must not be negative, got {self.steps}")
        check(isinstance(self.alpha, Real), f"alpha is a number such as 1 / 255, not {self.alpha!r}")
        check(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")
        check(self.restarts >= 1, f"restarts must be at least 1, got {self.restarts}")
        for name, kind in (("start", Start), ("keep", Keep), ("schedule", Schedule), ("rule", Rule)):
            word, words = getattr(self, name), get_args(kind)
            check(word in words, f"{name} {word!r}; {nearest(str(word), words)}")
        check(self.rule == "steepest" or self.keep == "best", "APGD keeps its best iterate: say keep = best")

    @property
    def weighs(self) -> bool:
        """Whether iterates are compared, so that the last one must be measured too."""
        return self.keep == "best" or self.restarts > 1

    def length(self, step: int) -> float:
        """The length of a step; linear and cosine fall from alpha towards 0."""
        return self.alpha * falling(self.schedule, step / max(self.steps, 1))


@dataclass(frozen=True)
class Ascent:
    """The perturbed units and what it took."""

    images: Tensor  # (U, V, …), views that do not move as they were
    value: Tensor | None  # (U,) reached objective, where it was measured (best iterate or restarts)
    image_steps: int  # images that went forward and back, summed over steps
    active: list[int] = field(
        default_factory=list
    )  # units that had not met their goal, at each step of the first start
    queries: int = 0  # images that went forward only, of a method without gradients


def ascend(
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    objective: Objective,
    ball: Ball,
    budget: Budget,
    moves: tuple[bool, ...] | None = None,
    *,
    key: Key | None = None,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    batch: int | None = None,
    watch: Watch | None = None,
    starts: Tensor | None = None,
) -> Ascent:
    """Climb `objective` from `images` (U, V, …) inside `ball`; `moves` says which views may move.

    `key` and `ids` (U,) determine random starts. `embedded` (U, V, D) are the embeddings of `images` where they
    are known: units that are done at a zero start then never enter the loop. `batch` units are attacked at a
    time; with a separable objective that changes nothing but memory. `watch` is shown the images that each step
    starts from: the moving views of the units that have not left. The first start is at `starts`, of the
    shape of `images`, where they are given.
    """
    units, views = images.shape[:2]
    moves = moves or (True,) * views
    check(len(moves) == views and any(moves), f"{views} views and moves = {moves}: say for each, and move one")
    if objective.coupled and (batch or units) < units:
        raise SettingsError("a coupled objective sees the whole batch at once; leave `batch` out")
    if objective.coupled and (budget.keep == "best" or budget.restarts > 1):
        raise SettingsError("a coupled objective has no value per unit: keep = last and one start")
    if key is None and (budget.start != "zero" or budget.restarts > 1):
        raise SettingsError("random starts need a key")
    if budget.rule == "apgd" and budget.start == "zero" and objective.first is not None and starts is None:
        raise SettingsError("this objective is stationary at the clean image: let APGD start at random")
    ball.admit(images)
    positions = torch.arange(units, device=images.device)
    ids = positions if ids is None else ids
    check(ids.shape == (units,), f"{units} units but ids of shape {tuple(ids.shape)}; give one id a unit")
    size = batch or max(units, 1)
    parts = [
        _attack(
            embed,
            images[s],
            objective,
            ball,
            budget,
            moves,
            positions[s],
            ids[s],
            key,
            None if embedded is None else embedded[s],
            watch,
            None if starts is None else starts[s],
        )
        for s in (slice(i, i + size) for i in range(0, units, size))
    ]
    if not parts:
        return Ascent(images.clone(), None, 0, [0] * budget.steps)
    values = [part.value for part in parts if part.value is not None]
    return Ascent(
        torch.cat([part.images for part in parts]),
        torch.cat(values) if values else None,
        sum(part.image_steps for part in parts),
        [sum(counts) for counts in zip(*(part.active for part in parts))],
    )


def _attack(
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    objective: Objective,
    ball: Ball,
    budget: Budget,
    moves: tuple[bool, ...],
    positions: Tensor,
    ids: Tensor,
    key: Key | None,
    embedded: Tensor | None,
    watch: Watch | None,
    starts: Tensor | None,
) -> Ascent:
    """All starts of one batch of units; a later start is for survivors and replaces what it beats."""
    moving = [v for v, moved in enumerate(moves) if moved]
    resting = [v for v, moved in enumerate(moves) if not moved]
    clean = images[:, moving]
    with torch.no_grad():
        rest = _views(embed, images[:, resting]) if resting else None

    def embed_units(x: Tensor, rows: Tensor) -> Tensor:
        moved = _views(embed, x)
        if rest is None:
            return moved
        everything = moved.new_empty(len(x), len(moves), moved.shape[-1])
        everything[:, moving] = moved
        everything[:, resting] = rest[rows].to(moved.dtype)
        return everything

    best = clean.clone()
    level = torch.full((len(clean),), -torch.inf, device=clean.device, dtype=torch.float64)
    met = torch.zeros(len(clean), dtype=torch.bool, device=clean.device)
    work = 0
    active: list[int] = []
    for attempt in range(budget.restarts):
        rows = torch.nonzero(~met).squeeze(1) if attempt else torch.arange(len(clean), device=clean.device)
        if not len(rows):
            break
        given = starts is not None and attempt == 0
        clean_start = attempt == 0 and budget.start == "zero" and not given
        first = objective.first if clean_start else None
        origin = clean[rows]
        if given and starts is not None:
            x = ball.project(starts[:, moving][rows], origin)
        elif budget.start != "zero" or attempt > 0:
            assert key is not None
            x = ball.start(origin, key("start", attempt), ids[rows])
            if budget.start == "tiny" and attempt == 0:
                x = ball.project(origin + TINY * (x - origin), origin)
        else:
            x = origin.clone()
        known = embedded is not None and clean_start and budget.drop and not budget.weighs
        over = objective.met(embedded, positions) if known and embedded is not None else None
        if budget.rule == "apgd":
            climb = adapt(
                embed_units, _laid(x), _laid(origin), objective, ball, budget.steps, rows, positions, budget.drop
            )
        else:
            climb = _climb(embed_units, x, origin, objective, ball, budget, first, rows, positions, over, watch)
        work += climb.work
        active = active or climb.active
        if budget.restarts == 1:
            best, level = climb.x, climb.level
        else:
            better = (climb.level > level[rows]) | climb.met
            best[rows[better]], level[rows[better]] = climb.x[better], climb.level[better]
            met[rows[climb.met]] = True
    result = images.clone()
    result[:, moving] = best
    return Ascent(result, level if budget.weighs else None, work, active)


def _climb(
    embed_units: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    origin: Tensor,
    objective: Objective,
    ball: Ball,
    budget: Budget,
    first: Goal | None,
    rows: Tensor,
    positions: Tensor,
    over: Tensor | None,
    watch: Watch | None,
) -> Climb:
    """Walk from x for `budget.steps` steps; with `budget.weighs`, look once more at where the last one led.

    Only who is left is carried along. With units that leave, a step learns from the GPU how many those are; they are
    known after its forward pass, so that the backward pass hides the waiting and what follows from it.
    """
    met = torch.zeros(len(x), dtype=torch.bool, device=x.device) if over is None else over.clone()
    level = torch.full((len(x),), -torch.inf, device=x.device, dtype=torch.float64)
    best = budget.keep == "best"
    x = _laid(x)
    out = Climb(x.clone() if best else x, level, met)
    active, here, region = torch.arange(len(x), device=x.device), x, Region(ball, _laid(origin))
    if over is not None:
        active = torch.nonzero(~met).squeeze(1)
        here, region = here[active], region.rows(active)
    for step in range(budget.steps + budget.weighs):
        looking = step == budget.steps
        if not len(active):
            out.active += [] if looking else [0]
            continue
        here = here.detach().requires_grad_(not looking)
        own = rows[active]
        where = positions[own]
        if watch is not None and not looking:
            # The start is where the last step will be written to.
            watch(step, here.detach() if step else here.detach().clone(), where)
        opening = first is not None and step == 0 and not looking
        with torch.set_grad_enabled(not looking):
            embeddings = embed_units(here, own)
            value = first(embeddings, where) if first is not None and opening else objective.value(embeddings, where)
        check(
            objective.coupled or value.shape == active.shape,
            f"the objective gave {tuple(value.shape)} for {len(active)} units; give one number each, or coupled=True",
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
        if looking:
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
    if not best and budget.steps:  # without a step, that is where they are
        out.x[active] = here.detach()
    return out


def _those_left(done: Tensor) -> Callable[[], Tensor]:
    """Asks a GPU for the units that are not done; the answer waits until it is there, and for nothing that came after.

    On a GPU the answer lies in the host's memory.
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


def _views(embed: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Embeddings (U, V, D) of images (U, V, …)."""
    embeddings = embed(images.flatten(0, 1))
    return embeddings.reshape(*images.shape[:2], embeddings.shape[-1])


def _laid(images: Tensor) -> Tensor:
    """On a GPU, images whose channels lie together: convolutions then take and give them without a copy."""
    if not images.is_cuda or images.ndim != 5:
        return images
    return images.movedim(2, -1).contiguous().movedim(-1, 2)
