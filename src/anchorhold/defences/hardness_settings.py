"""Settings of hardness manipulation and of its free variant; they load without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ..errors import check, nearest
from ..extensions import Named
from .choices import SAMPLER_NAMES, LossSettings, chosen
from .inner import Inner, Mining

__all__ = ["FreeSettings", "HardnessSettings", "Members"]

GRADUAL_NAMES = ("linear", "power", "sigmoid")
_REUSED = ("hardness", "loss")
Members = Literal["all", "candidates", "anchors", "turns"]


@dataclass(frozen=True)
class HardnessSettings(LossSettings, Inner, Mining):
    """HM[source, destination] in the tables of Zhou & Patel 2022; the default is HM[S, LGA] with 8 steps."""

    source: Annotated[Named | str, "How the triplets to be perturbed are drawn.", SAMPLER_NAMES] = "softhard"
    destination: Annotated[
        float | Named | str,
        "Hardness to reach: a sampler's, a constant from -2 to 2 (2 is min-max), or lga.",
        (*SAMPLER_NAMES, "lga"),
    ] = "lga"
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    boost: Annotated[float, "ξ of g_B, 0.1 in the paper; 0 leaves the destination unchanged."] = 0.0
    rise: Annotated[float, "How much harder than the destination's triplets the goal is."] = 0.0
    ics: Annotated[float, "Weight (λ) of the intra-class structure term, 0.5 in the paper; 0 leaves it out."] = 0.0
    members: Annotated[Members, "Which images of a triplet move; turns alternates candidates and anchors."] = "all"
    loss: Annotated[
        Named | str, "Training loss of the perturbed triplets; lga goes by the triplet loss.", ("triplet",)
    ] = "triplet"
    gradual: Annotated[Named | str, "Shape of the gradual function of lga.", GRADUAL_NAMES] = "linear"
    u: Annotated[float, "Previous loss at which gradual functions begin to rise; 0 is the margin."] = 0.0
    power: Annotated[float, "Exponent of the power shape."] = 2.0
    slope: Annotated[float, "Steepness of the sigmoid shape."] = 10.0

    def __post_init__(self) -> None:
        Inner.__post_init__(self)
        chosen(self, "loss", ("triplet",))
        LossSettings.__post_init__(self)
        self._check_gradual()
        chosen(self, "source", SAMPLER_NAMES, "sampler")
        if isinstance(self.destination, str) or callable(self.destination):
            chosen(self, "destination", [*SAMPLER_NAMES, "lga"])
        else:
            check(
                -2 <= self.destination <= 2,
                f"hardness lies in [-2, 2]: destination = {self.destination} is outside",
            )
        self.check_mining(self.source, self.destination)
        check(self.margin > 0, f"the margin must be above 0, since LGA scales with it; got {self.margin}")
        check(self.boost >= 0, f"boost (ξ of g_B) must be at least 0, got {self.boost}")
        check(
            not self.boost or self.destination != "lga",
            f"boost = {self.boost} (ξ of g_B) raises a fixed destination, and lga is gradual already: "
            "set destination to a sampler or a constant, or boost to 0",
        )
        check(self.ics >= 0, f"ics (λ) is the weight of a loss and must be at least 0, got {self.ics}")
        check(0 <= self.rise <= 4, f"rise is added to a hardness in [-2, 2]: it must be in [0, 4], got {self.rise}")
        check(
            not self.rise or self.destination in SAMPLER_NAMES or isinstance(self.destination, Named),
            f"rise = {self.rise} is added to the hardness of a sampler's triplets: set destination to a sampler",
        )
        words = get_args(Members)
        check(self.members in words, f"members {self.members!r}; {nearest(str(self.members), words)}")
        check(
            not self.ics or self.members in ("all", "anchors"),
            f"ICS needs an adversarial anchor in every batch; with members = {self.members} some stay clean",
        )
        check(
            self.raises or self.members == "all",
            f"members = {self.members} has no effect where the destination is the source: set rise or boost",
        )

    def _check_gradual(self) -> None:
        chosen(self, "gradual", GRADUAL_NAMES, "gradual function")
        gradual, own = str(self.gradual), isinstance(self.gradual, Named)
        check(
            self.destination == "lga" or gradual == "linear",
            f"defence.gradual = {gradual} shapes the gradual adversary: set defence.destination to lga",
        )
        check(self.u >= 0, f"u is a loss and must be at least 0 (0 is the margin), got {self.u}")
        check(not (own and self.u), "a gradual function of yours does not read defence.u: leave it out")
        check(self.power > 0 and self.slope > 0, "power and slope of a gradual function must be above 0")
        for name, shape, usual in (("power", "power", 2.0), ("slope", "sigmoid", 10.0)):
            used = gradual == shape or getattr(self, name) == usual
            check(used, f"defence.{name} is of defence.gradual = {shape}: leave it out")

    @property
    def unread(self) -> Mapping[str, str]:
        """Settings that are not read, and which setting would read them."""
        shapes = self.boost or self.destination == "lga"
        return {} if shapes else {"u": "it is of defence.destination = lga, or of defence.boost"}

    @property
    def draws_triplets(self) -> str:
        """What draws triplets from pairs of a class, also where a loss of yours trains on them."""
        return "the triplets of this defence"

    @property
    def onset(self) -> float:
        """u of g(·) and g_B; the margin, unless it is set."""
        return self.u or self.margin

    @property
    def raises(self) -> bool:
        """Whether anything is perturbed: with the source's own sampler, the destination is the source itself."""
        return not self.at_source or bool(self.boost or self.rise)

    @property
    def attacks(self) -> bool:
        return super().attacks and self.raises

    @property
    def at_source(self) -> bool:
        """Whether source and destination are one sampler."""
        if isinstance(self.source, Named):
            return self.source.is_same(self.destination)
        return self.destination == self.source


@dataclass(frozen=True, kw_only=True)
class FreeSettings(HardnessSettings):
    """Free adversarial training with HM[source, destination], which Zhou & Patel 2022 leave for the future.

    A batch is replayed m times, and the pass of each training step also serves the attack (Shafahi et al. 2019).
    """

    alpha: float = 8 / 765  # three steps cross the ball; Shafahi et al. take ε, which overshoots H_D
    steps: Annotated[int, "Replays (m) of a batch; each is one optimiser step, whose gradient moves the images."] = 4
    reuse: Annotated[
        Literal["hardness", "loss"],
        "Gradient that moves images: of H, one more backward pass, or of the training loss, zero where H ≤ -γ.",
    ] = "hardness"
    carry: Annotated[
        bool, "Begin a batch with the perturbation of the one before, as Shafahi et al. do; checkpoints hold it."
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.reuse in _REUSED, f"no gradient {self.reuse!r} to reuse; {nearest(str(self.reuse), _REUSED)}")
        check(
            self.steps != 1 or self.carry or self.start == "random",
            "with steps = 1 a batch is not replayed and stays clean: set steps to 2 or more, start to random, or carry",
        )
