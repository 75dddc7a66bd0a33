"""Methods to find perturbations, by name. All take the arguments of `ascend`, so any objective runs with each of them.

    problem = Problem(embed, objective, Ball(8 / 255), Budget(1000), Key.of(0))
    found = METHODS["square"](problem, images[:, None])

A method uses an argument or refuses it. All read the key, ids, embedded, starts and the steps of the budget:

| | pgd | apgd | cw | square, nes |
|---|---|---|---|---|
| watch | read | refused | refused | refused |
| start | read | read | zero and tiny are the same | zero and tiny are the same, random is refused |
| restarts, drop | read | read | refused | refused |
| alpha, schedule | read | refused | refused | refused |
| keep | read | best | best | best |
| rule | read | apgd | refused | refused |

Square and NES use values only, no gradients: their steps are queries.
"""

from dataclasses import replace
from typing import Protocol

from torch import Tensor

from .ascend import ascend
from .cw import carlini_wagner
from .nes import nes
from .problem import Ascent, Problem, Watch
from .square import square

__all__ = ["METHODS", "Method", "apgd"]


class Method(Protocol):
    """A way to find perturbations of images (U, 1, …) that solve a problem."""

    def __call__(
        self,
        problem: Problem,
        images: Tensor,
        /,
        *,
        ids: Tensor | None = None,
        embedded: Tensor | None = None,
        starts: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Ascent: ...


def apgd(
    problem: Problem,
    images: Tensor,
    *,
    ids: Tensor | None = None,
    embedded: Tensor | None = None,
    starts: Tensor | None = None,
    watch: Watch | None = None,
) -> Ascent:
    """`ascend` with the rule of APGD, which keeps its best iterate."""
    way = replace(problem, budget=replace(problem.budget, rule="apgd", keep="best"))
    return ascend(way, images, ids=ids, embedded=embedded, starts=starts, watch=watch)


METHODS: dict[str, Method] = {"pgd": ascend, "apgd": apgd, "cw": carlini_wagner, "square": square, "nes": nes}
