"""`Attack(…).run(…)` in one call, as the tests of attacks write it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anchorhold.attacks.goal import Goal, Scene
from anchorhold.attacks.run import BALL, PGD, Attack, Attacked
from anchorhold.model.frozen import Embed
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key

__all__ = ["attack", "running"]


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
    starts: Tensor | None = None,
    **how: Any,
) -> Attacked:
    """Perturb samples of a scene; `how` has the other fields of `Attack`."""
    made = Attack(embed, scene, goal, ball, budget, key or Key.of(0), **how)
    return made.run(images, ids, batch, targets=targets, starts=starts)


def running(run: Callable[..., Any]) -> type[Attack]:
    """An `Attack` with another `run`, to put into a module that is tested."""
    return type("Attack", (Attack,), {"run": run})
