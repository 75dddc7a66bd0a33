"""How a perturbation is found, by name: every method takes what `ascend` takes, so any objective runs with all of them.

found = METHODS["square"](embed, images[:, None], objective, Ball(8 / 255), Budget(1000), key=Key.of(0))
"""

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ..random import Key
from .ascend import Ascent, Budget, Objective, Watch, ascend
from .ball import Ball
from .minnorm import carlini_wagner
from .square import square

__all__ = ["METHODS", "Find", "apgd"]


class Find(Protocol):
    """A way to find perturbations of images (U, 1, …) that climb an objective within a ball."""

    def __call__(
        self,
        embed: "_Embed",
        images: Tensor,
        objective: Objective,
        ball: Ball,
        budget: Budget,
        /,
        *,
        key: Key | None = None,
        ids: Tensor | None = None,
        embedded: Tensor | None = None,
        watch: Watch | None = None,
        starts: Tensor | None = None,
    ) -> Ascent: ...


class _Embed(Protocol):
    def __call__(self, images: Tensor, /) -> Tensor: ...


def apgd(
    embed: _Embed,
    images: Tensor,
    objective: Objective,
    ball: Ball,
    budget: Budget,
    *,
    key: Key | None = None,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    watch: Watch | None = None,
    starts: Tensor | None = None,
) -> Ascent:
    """`ascend` by the rule of APGD, with its best iterate."""
    budget = replace(budget, rule="apgd", keep="best")
    return ascend(embed, images, objective, ball, budget, key=key, ids=ids, starts=starts)


METHODS: dict[str, Find] = {"pgd": ascend, "apgd": apgd, "cw": carlini_wagner, "square": square}
