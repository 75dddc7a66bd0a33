"""Settings that several defences share: the attack inside a training step, and how triplets are mined."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import check
from ..extensions import Named
from ..perturb.settings import Budget, check_l2, check_radius

if TYPE_CHECKING:
    from ..perturb.ball import Ball

__all__ = ["Inner", "Mining", "check_cuts"]


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
    def attacks(self) -> bool:
        """Whether these settings mean to perturb anything at all."""
        return self.eps > 0 and self.steps > 0

    @property
    def ball(self) -> "Ball":
        """Where a perturbed image may lie."""
        from ..perturb.ball import Ball  # here, so that settings load without torch

        return Ball(self.eps, self.norm)

    @property
    def budget(self) -> Budget:
        """Steps, their length and their start."""
        return Budget(self.steps, self.alpha, start=self.start)


@dataclass(frozen=True, kw_only=True)
class Mining:
    """How samplers draw triplets; the defaults are the papers' code."""

    lower: Annotated[
        float, "Distance sampler: nearer negatives are weighted as if at this distance; 0 is no cut-off."
    ] = 0.0
    upper: Annotated[float, "Distance sampler: negatives beyond this distance are not drawn; 0 is no cut-off."] = 0.0
    own_positive: Annotated[
        bool, "Softhard may draw the anchor as its own positive, as the papers' code does; Roth et al. 2020 do not."
    ] = True

    @property
    def draws_triplets(self) -> str:
        """What draws triplets from pairs of a class; "" where nothing does: a loss of yours takes whole batches."""
        return "" if isinstance(getattr(self, "loss", None), Named) else "the triplets of this defence"

    def check_mining(self, *samplers: object) -> None:
        """Refuse settings that none of the chosen samplers reads."""
        check_cuts(self.lower, self.upper)
        yours = any(isinstance(each, Named) for each in samplers)
        check(
            yours or "distance" in samplers or not (self.lower or self.upper),
            "defence.lower and defence.upper are cut-offs of the distance sampler: choose it, or leave them out",
        )
        check(
            yours or "softhard" in samplers or self.own_positive,
            "defence.own_positive is of the softhard sampler: choose it, or leave own_positive out",
        )

    @property
    def mining(self) -> Mapping[str, Any]:
        """The arguments of `Step.mine` that are set."""
        cuts = {"lower": self.lower, "upper": self.upper}
        return {name: cut for name, cut in cuts.items() if cut} | ({} if self.own_positive else {"own_positive": False})


def check_cuts(lower: float, upper: float) -> None:
    """Refuse cut-offs between which no distance lies."""
    check(
        lower >= 0 and (upper == 0 or lower < upper),
        f"negatives lie from lower = {lower} to upper = {upper}: upper must be larger, or 0 (no cut-off)",
    )
