"""Settings of each defence, as frozen dataclasses that load without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from ..errors import check, nearest
from ..extensions import Named
from ..perturb.settings import Budget
from .choices import LOSS_NAMES, SAMPLER_NAMES, LossSettings, chosen
from .inner import Inner
from .proxy_settings import ProxySettings

__all__ = [
    "REFUSED",
    "SETTINGS",
    "ActSettings",
    "AdmlSettings",
    "EstSettings",
    "FormName",
    "Guide",
    "HardnessSettings",
    "Inner",
    "LossSettings",
    "MadrySettings",
    "Members",
    "NaturalSettings",
    "Phases",
    "ProxySettings",
    "RestSettings",
    "SesSettings",
    "TradesSettings",
    "TrideSettings",
]

GRADUAL_NAMES = ("linear", "power", "sigmoid")
_SHIFTS = ("euclidean", "cosine")
_PULLS = ("squared", "cosine")

Members = Literal["all", "candidates", "anchors", "turns"]
Phases = Literal["both", "cap", "anp"]
Guide = Literal["collapseness", "hardness"]
FormName = Literal["paper", "code"]


@dataclass(frozen=True)
class NaturalSettings(LossSettings):
    """N/A[sampler] in the papers' tables; or any loss of yours on the clean batch."""

    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    loss: Annotated[Named | str, "Training loss; contrastive has a margin of 1 in the papers.", LOSS_NAMES] = "triplet"
    margin: Annotated[float, "Margin (γ) of the loss."] = 0.2

    def __post_init__(self) -> None:
        chosen(self, "sampler", SAMPLER_NAMES)
        chosen(self, "loss", LOSS_NAMES)
        super().__post_init__()
        self.unused("sampler", "margin")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")


@dataclass(frozen=True)
class HardnessSettings(LossSettings, Inner):
    """HM[source, destination] in the tables of Zhou & Patel 2022; the default is HM[S, LGA] with 8 steps."""

    source: Annotated[Named | str, "How the triplets to be perturbed are drawn.", SAMPLER_NAMES] = "softhard"
    destination: Annotated[
        float | Named | str,
        "Hardness to reach: a sampler's, a constant from -2 to 2 (2 is min-max), or lga.",
        (*SAMPLER_NAMES, "lga"),
    ] = "lga"
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    boost: Annotated[float, "ξ of g_B, 0.1 in the paper; 0 leaves the destination unchanged."] = 0.0
    rise: Annotated[float, "Added to the destination's hardness, or to the source's if both have one sampler."] = 0.0
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
    def onset(self) -> float:
        """u of g(·) and g_B; the margin, unless it is set."""
        return self.u or self.margin

    @property
    def raises(self) -> bool:
        """Whether anything is perturbed: with the source's own sampler, the destination is the source itself."""
        return not self.at_source or bool(self.boost or self.rise)

    @property
    def at_source(self) -> bool:
        """Whether source and destination are one sampler."""
        if isinstance(self.source, Named):
            return self.source.is_same(self.destination)
        return self.destination == self.source


@dataclass(frozen=True)
class ActSettings(Inner):
    """ACT[sampler] in the tables of Zhou & Patel 2022; the default is ACT[R] with 8 steps."""

    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    window: Annotated[float, "How far beyond the positive a semihard negative may lie."] = 1.0  # not γ

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen(self, "sampler", SAMPLER_NAMES)
        check(self.margin >= 0 and self.window > 0, "the margin must not be negative, and the window must be above 0")


@dataclass(frozen=True)
class EstSettings(Inner):
    """EST[sampler] of Zhou & Patel 2022, table 6; the default is EST[R] with 8 steps.

    The robust-init study uses start = random (A.7).
    """

    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    # The distance to climb. On the sphere 1 − cos = d²/2, so both have one direction. SES also adds it to its loss.
    shift: Annotated[Literal["euclidean", "cosine"], "Distance that the attack increases."] = "euclidean"

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen(self, "sampler", SAMPLER_NAMES)
        check(self.shift in _SHIFTS, f"no shift {self.shift!r}; {nearest(self.shift, _SHIFTS)}")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")


@dataclass(frozen=True)
class SesSettings(EstSettings):
    """SES[sampler]: the loss on clean images plus the weighted shift."""

    weight: Annotated[float, "Weight of the embedding shift in the loss."] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.weight >= 0, f"the weight of the shift must not be negative, got {self.weight}")


@dataclass(frozen=True)
class RestSettings(EstSettings):
    """REST[sampler]: EST with clean anchors."""

    window: Annotated[float, "How far beyond the positive a semihard negative may lie."] = 1.0  # not γ

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.window > 0, f"the window must be above 0, got {self.window}")


@dataclass(frozen=True, kw_only=True)
class TrideSettings(Inner):
    """CA-TRIDE in the tables of Tian et al. 2024; the defaults are the paper's for CUB.

    CA-CAP and CA-ANP are values of `phases`. Naive CAP, ANP and TRIDE use guide = hardness, with `stop`,
    `top_rank_term` and `top_rank_loss` off.
    """

    steps: int = 16
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    phases: Annotated[Phases, "Which attacks train the model; both alternates them by batch, CAP first."] = "both"
    guide: Annotated[Guide, "What the attacks raise; hardness is collapseness without attention."] = "collapseness"
    stop: Annotated[bool, "End an attack at its goal; if false, it takes all its steps."] = True
    attention: Annotated[float, "λ: how much more near pairs count in collapseness; 0 weighs all alike."] = 10.0
    weights_carry_gradient: Annotated[
        bool, "Pass gradients through the weights of collapseness, as the published code does."
    ] = False  # on, they move many pairs the wrong way
    top_rank_term: Annotated[bool, "Add the top-rank term Δ_TR to the attack of ANP."] = True
    top_rank_loss: Annotated[bool, "Add the top-rank loss L_TR to the training loss."] = True
    gamma: Annotated[float, "Weight of the top-rank loss L_TR."] = 0.5
    beta: Annotated[float, "Margin (β_TR) of the top-rank loss."] = 0.04
    window: Annotated[float, "How far beyond the positive a semihard negative may lie; shrinks by epoch."] = 0.2  # η_0
    progressive: Annotated[bool, "Let the step size grow with the epoch, by n/N."] = True
    form: Annotated[FormName, "Formulas of the paper, or of its published code."] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("phases", Phases), ("guide", Guide), ("form", FormName)):
            word, words = getattr(self, name), get_args(kind)
            check(word in words, f"{name} {word!r}; {nearest(str(word), words)}")
        check(0 <= self.attention < math.inf, f"attention (λ) must be finite and not negative, got {self.attention}")
        check(min(self.margin, self.gamma, self.beta) >= 0, "margin, gamma and beta must not be negative")
        check(self.window > 0, f"the window must be above 0, got {self.window}")
        check(
            self.stop or self.form == "paper",
            "without stop the attack raises C without limit, but ANP in the code's form lowers it: use form = paper",
        )


@dataclass(frozen=True)
class AdmlSettings(Inner):
    """The robust rows of ADML's tables; the default is the triplet loss on CUB."""

    eps: float = 0.01
    alpha: Annotated[float, "Step size (α); 0 means 2ε/steps, which can cross the whole ball."] = 0.0  # as in the paper
    steps: int = 5
    start: Literal["zero", "random"] = "random"
    loss: Annotated[Literal["triplet", "contrastive"], "Training loss."] = "triplet"
    margin: Annotated[float, "Margin of the loss; the paper has 1 for the contrastive loss."] = 0.2
    reduction: Annotated[
        Literal["all", "active"], "Mean of the contrastive loss: over all pairs, or over active ones as in RobRank."
    ] = "all"
    perturb: Annotated[Literal["positive", "negative", "anchor"], "Which image of a tuple is perturbed."] = "positive"
    attack_rate: Annotated[float, "Probability that a tuple is perturbed, drawn for each."] = 0.5
    formulation: Annotated[int, "Training objective of the paper: formulation 1, 2 or 3.", (1, 2, 3)] = 2
    weight: Annotated[float, "Weight (λ) of the embedding shift in formulation 3."] = 1.0  # the paper gives no value
    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "distance"
    lower: Annotated[float, "Nearer negatives are weighted as if at this distance; 0 is no cut-off."] = (
        0.5  # RobRank: 0
    )
    upper: Annotated[float, "Negatives beyond this distance are not drawn; 0 is no cut-off."] = 1.4

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen(self, "sampler", SAMPLER_NAMES)
        for name, known in (
            ("loss", LOSS_NAMES),
            ("perturb", ("positive", "negative", "anchor")),
            ("reduction", ("all", "active")),
        ):
            word = getattr(self, name)
            check(word in known, f"no {name} {word!r}; {nearest(str(word), known)}")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")
        check(0 <= self.attack_rate <= 1, f"attack_rate is a probability, between 0 and 1, got {self.attack_rate}")
        check(self.formulation in (1, 2, 3), f"no formulation {self.formulation}; there are: 1, 2, 3")
        check(self.weight >= 0, f"weight (λ) is the weight of a loss and must be at least 0, got {self.weight}")
        check(
            self.lower >= 0 and (self.upper == 0 or self.lower < self.upper),
            f"negatives lie from lower = {self.lower} to upper = {self.upper}: upper must be larger, or 0 (no cut-off)",
        )
        check(
            self.formulation != 1 or self.perturb == "positive",
            f"formulation 1 perturbs every image: leave perturb = {self.perturb} out, or take formulation 2 or 3",
        )
        check(
            self.loss == "contrastive" or self.reduction == "all",
            f"reduction = {self.reduction} is a mean of the contrastive loss: leave it out, or set loss to contrastive",
        )

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.alpha or 2 * self.eps / max(self.steps, 1), start=self.start)


@dataclass(frozen=True)
class MadrySettings(LossSettings, Inner):
    """Min-max training over any loss (Madry et al. 2018): the attack climbs the loss that trains.

    The recipe `minmax` is another one: HM[S, 2], which climbs the hardness of single triplets.
    """

    start: Literal["zero", "random"] = "random"
    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    loss: Annotated[Named | str, "Training loss, which the attack climbs.", LOSS_NAMES] = "triplet"
    margin: Annotated[float, "Margin (γ) of the loss."] = 0.2

    def __post_init__(self) -> None:
        Inner.__post_init__(self)
        chosen(self, "sampler", SAMPLER_NAMES)
        chosen(self, "loss", LOSS_NAMES)
        LossSettings.__post_init__(self)
        self.unused("sampler", "margin")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")


@dataclass(frozen=True)
class TradesSettings(MadrySettings):
    """The loss on clean images, and β times how far the attack moves their embeddings (after Zhang et al. 2019)."""

    beta: Annotated[float, "Weight (β) of the distance between clean and adversarial embeddings."] = 1.0
    # ‖e − e'‖² is 2 (1 − cos) on the sphere.
    shift: Annotated[Literal["squared", "cosine"], "Which distance the attack climbs and training reduces."] = "squared"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.beta >= 0, f"beta is the weight of a loss and must be at least 0, got {self.beta}")
        check(self.shift in _PULLS, f"no shift {self.shift!r}; {nearest(self.shift, _PULLS)}")


SETTINGS: Mapping[str, type[Any]] = {
    "natural": NaturalSettings,
    "madry": MadrySettings,
    "trades": TradesSettings,
    "proxy": ProxySettings,
    "hardness": HardnessSettings,
    "act": ActSettings,
    "est": EstSettings,
    "ses": SesSettings,
    "rest": RestSettings,
    "tride": TrideSettings,
    "adml": AdmlSettings,
}

_NO_DESTINATION = {"boost": "g_B raises a destination hardness, which only defence.name=hardness has"}
_CLEAN_ANCHOR = _NO_DESTINATION | {"ics": "ICS needs an adversarial anchor; here the anchor stays clean"}
_NO_ICS = _NO_DESTINATION | {"ics": "ICS belongs to hardness manipulation, defence.name=hardness"}

REFUSED: Mapping[str, Mapping[str, str]] = {
    "natural": _CLEAN_ANCHOR,
    "madry": _NO_ICS,
    "trades": _NO_ICS,
    "proxy": _NO_ICS,
    "act": _CLEAN_ANCHOR,
    "est": _NO_ICS,
    "ses": _NO_ICS,
    "rest": _CLEAN_ANCHOR,
    "tride": _NO_ICS,
    "adml": _NO_ICS,
}
"""Settings of other defences that each defence refuses, with the reason."""
