"""Settings of the attack inside a training step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from ..errors import check
from ..perturb.settings import Budget, check_l2, check_radius

if TYPE_CHECKING:
    from ..perturb.ball import Ball

__all__ = ["Inner"]


@dataclass(frozen=True, kw_only=True)
class Inner:
    """The attack inside a training step; settings of defences extend it. The defaults are the papers', for 224 px."""

    eps: Annotated[float, "Maximum change of a pixel (ε) in training; with norm l2, of the image."] = 8 / 255
    alpha: Annotated[float, "Step size (α) of the inner attack."] = 1 / 255
    steps: Annotated[int, "Steps (η) of the inner attack."] = 8
    norm: Annotated[Literal["linf", "l2"], "Norm in which ε is measured."] = "linf"
    start: Annotated[
        Literal["zero", "random"], "Where the inner attack starts: at the clean image, or at a random change of it."
    ] = "zero"

    def __post_init__(self) -> None:
        check(self.eps >= 0 and self.steps >= 0 and self.alpha >= 0, "eps, alpha and steps must not be negative")
        check(self.steps <= 10_000, f"defence.steps must be at most 10,000, got {self.steps}")
        check_radius(self.eps, self.norm)
        check_l2(self.eps, self.norm)

    @property
    def ball(self) -> "Ball":
        from ..perturb.ball import Ball  # here, so that settings load without torch

        return Ball(self.eps, self.norm)

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.alpha, start=self.start)
