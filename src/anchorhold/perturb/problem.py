"""The input of the ascent: an objective of the embeddings, a ball around the images, a budget and a key.

A *unit* is a group of V views that is attacked together: one image in an attack, the three of a triplet in hardness
manipulation. Images are (U, V, C, H, W), their embeddings (U, V, D).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..distributed import Ranks
from ..errors import SettingsError, check
from ..model.frozen import Embed
from ..random import Key
from .ball import Ball
from .settings import Budget

__all__ = ["Ascent", "Objective", "Problem", "Value", "Watch", "check_queries", "check_units", "refuse_watch"]

Value = Callable[[Tensor, Tensor], Tensor]  # embeddings (U', V, D) of some units and their positions (U',) to a number
Watch = Callable[[int, Tensor, Tensor], None]  # step, images (U', V', …) it starts from, their positions (U',)


@dataclass(frozen=True)
class Objective:
    """The function to climb.

    Each callable takes the embeddings (U', V, D) of some units and their positions (U',) in the original batch.
    Finished units are dropped, so look your constants up by position.

    Args:
        value: one number per unit, or one scalar where the objective couples the units.
        done: which units met their goal and have zero gradient; one boolean where units are coupled.
        first: replaces `value` in the first step from a zero start, where `value` is stationary.
        coupled: whether the value of a unit depends on the others.
        top: the maximum of `value`, instead of `done`: units there are finished, and nothing is computed twice.

    >>> objective = Objective(lambda e, at: e[:, 0, 0].clamp(max=1), top=1.0)
    >>> objective.met(torch.tensor([[[0.5]], [[2.0]]]), torch.arange(2))
    tensor([False,  True])
    """

    value: Value
    done: Value | None = None
    first: Value | None = None
    coupled: bool = False
    top: float | None = None

    def __post_init__(self) -> None:
        check(self.done is None or self.top is None, "give `done` or `top`, not both")

    @property
    def goal(self) -> Value | None:
        """Which units are finished, by `done` or at `top`; None where the objective has no end."""
        value, top = self.value, self.top  # not self: the closure would keep the objective and its tensors alive
        return self.done if top is None else lambda e, positions: value(e, positions) >= top

    def met(self, embeddings: Tensor, positions: Tensor, value: Tensor | None = None) -> Tensor | None:
        """(U',) which units are finished; None where the objective has no goal. Give `value` where it is known."""
        goal = self.goal
        if goal is None:
            return None
        if value is not None and self.top is not None:
            done = value.detach() >= self.top
        else:
            done = goal(embeddings.detach(), positions)
        check(
            done.ndim == 0 or not self.coupled,
            "a coupled objective has one end for the batch: `done` must give one boolean",
        )
        return done.expand(len(positions))

    def shared(self, ranks: Ranks, count: int) -> "Objective":
        """The same for this rank's share of `count` units; positions count from its first.

        Where units are coupled, every rank gathers all embeddings and takes the gradient of its own units.
        """
        if not ranks.splits(count):
            return self
        first = ranks.share(count).start

        def of(goal: Value | None) -> Value | None:
            if goal is None:
                return None
            if self.coupled:
                return lambda e, at: goal(ranks.gathered(e, count), torch.arange(count, device=at.device))
            return lambda e, at: goal(e, at + first)

        value = of(self.value)
        assert value is not None
        return Objective(value, of(self.done), of(self.first), self.coupled, self.top)


@dataclass(frozen=True, eq=False)
class Problem:
    """Climb `objective` inside `ball` with `budget`.

    Args:
        embed: from images (B, C, H, W) to vectors (B, D).
        objective: the function to climb.
        ball: where a perturbed image may lie.
        budget: how many steps, and of which kind.
        key: determines all random draws, `anchorhold.random.Key.of(seed)`; needed for random starts.
        moves: which views of a unit may move; None is all of them.

    >>> problem = Problem(torch.nn.Flatten(), Objective(lambda e, at: e.sum((1, 2))), Ball(0.1), moves=(True, False))
    >>> problem.moving(2)
    ([0], [1])
    """

    embed: Embed
    objective: Objective
    ball: Ball
    budget: Budget = field(default_factory=Budget)
    key: Key | None = None
    moves: tuple[bool, ...] | None = None

    def moving(self, views: int) -> tuple[list[int], list[int]]:
        """Which views move, and which stay fixed."""
        moves = self.moves or (True,) * views
        check(
            len(moves) == views and any(moves),
            f"{views} views and moves = {moves}: give one boolean per view, one or more True",
        )
        return [v for v, moved in enumerate(moves) if moved], [v for v, moved in enumerate(moves) if not moved]

    def drawn(self, purpose: str) -> Key:
        """The key, which `purpose` requires."""
        if self.key is None:
            raise SettingsError(f"{purpose} need a key")
        return self.key


@dataclass(frozen=True)
class Ascent:
    """The perturbed units and what they cost: what `ascend` returns.

    Args:
        images: (U, V, …); fixed views are unchanged.
        value: (U,) the objective reached, where it was measured (best iterate or restarts).
        image_steps: forward and backward passes of one image.
        active: unfinished units at each step of the first start.
        queries: forward passes of a method without gradients.

    >>> found = Ascent(torch.zeros(2, 1, 3, 8, 8), None, image_steps=3, active=[2, 1])
    >>> len(found.images), found.active
    (2, [2, 1])
    """

    images: Tensor
    value: Tensor | None
    image_steps: int
    active: list[int] = field(default_factory=list)
    queries: int = 0


def refuse_watch(watch: Watch | None, method: str) -> None:
    """Refuse a watcher: the step before the last is not the one before the result."""
    check(watch is None, f"{method} keeps its best iterate, so the step before the last cannot be measured: use PGD")


def check_queries(
    method: str,
    problem: Problem,
    images: Tensor,
    ids: Tensor | None,
    embedded: Tensor | None,
    starts: Tensor | None,
    watch: Watch | None,
) -> None:
    """Refuse what a method without gradients cannot use: NES and Square start at the clean image of one view."""
    problem.budget.read_by(method, "steps", "start")
    check(problem.budget.start != "random", f"{method} starts at the clean image: leave start out")
    refuse_watch(watch, method)
    check_units(images, ids, embedded, starts)
    check(images.ndim == 5 and images.shape[1] == 1, f"{method} attacks images (U, 1, C, H, W), one view per unit")
    check(not problem.objective.coupled, f"{method} compares values per unit, and a coupled objective has none")
    problem.ball.admit(images)


def check_units(images: Tensor, ids: Tensor | None, embedded: Tensor | None, starts: Tensor | None) -> None:
    """Refuse ids, embeddings and starts that do not match the units."""
    units = len(images)
    if ids is not None:
        check(ids.shape == (units,), f"{units} units but ids of shape {tuple(ids.shape)}; give one id per unit")
    if embedded is not None:
        fits = embedded.ndim == 3 and embedded.shape[:2] == images.shape[:2]
        check(fits, f"embedded has shape {tuple(embedded.shape)}; give (units, views, dimension)")
    if starts is not None:
        check(starts.shape == images.shape, f"starts have shape {tuple(starts.shape)}, images {tuple(images.shape)}")
