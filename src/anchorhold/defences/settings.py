"""Settings of each defence, as frozen dataclasses that load without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..errors import check, nearest
from ..extensions import Named
from .adml_settings import AdmlSettings
from .choices import LOSS_NAMES, SAMPLER_NAMES, LossSettings, chosen
from .hardness_settings import FreeSettings, HardnessSettings, Members
from .inner import Inner, Mining
from .proxy_settings import ProxySettings
from .tride_settings import FormName, Guide, Phases, TrideSettings

if TYPE_CHECKING:
    from ..perturb.ball import Ball

__all__ = [
    "REFUSED",
    "SETTINGS",
    "ActSettings",
    "AdmlSettings",
    "EstSettings",
    "FormName",
    "FreeSettings",
    "Guide",
    "HardnessSettings",
    "Inner",
    "LossSettings",
    "MadrySettings",
    "Members",
    "Mining",
    "NaturalSettings",
    "Phases",
    "ProxySettings",
    "RestSettings",
    "SesSettings",
    "ShiftSettings",
    "TradesSettings",
    "TrideSettings",
    "unread_by",
]

_SHIFTS = ("euclidean", "cosine")
_PULLS = ("squared", "cosine")


@dataclass(frozen=True)
class NaturalSettings(LossSettings, Mining):
    """N/A[sampler] in the papers' tables; or any loss of yours on the clean batch."""

    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    loss: Annotated[Named | str, "Training loss; contrastive has a margin of 1 in the papers.", LOSS_NAMES] = "triplet"
    margin: Annotated[float, "Margin (γ) of the loss."] = 0.2

    def __post_init__(self) -> None:
        chosen(self, "sampler", SAMPLER_NAMES)
        chosen(self, "loss", LOSS_NAMES)
        super().__post_init__()
        self.unused("sampler", "margin", "lower", "upper", "own_positive")
        self.check_mining(self.sampler)
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")


@dataclass(frozen=True)
class ActSettings(Inner, Mining):
    """ACT[sampler] in the tables of Zhou & Patel 2022; the default is ACT[R] with 8 steps."""

    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    window: Annotated[float, "How much farther than the positive a semihard negative may lie."] = 1.0  # not γ

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen(self, "sampler", SAMPLER_NAMES)
        self.check_mining(self.sampler)
        check(self.margin >= 0 and self.window > 0, "the margin must not be negative, and the window must be above 0")


@dataclass(frozen=True)
class ShiftSettings(Inner, Mining):
    """What EST, SES and REST share: the attack that moves images away from their own embeddings."""

    sampler: Annotated[Named | str, "How triplets are drawn from a batch.", SAMPLER_NAMES] = "random"
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    # The distance to climb. On the sphere 1 − cos = d²/2, so both have one direction. SES also adds it to its loss.
    shift: Annotated[Literal["euclidean", "cosine"], "Distance that the attack increases."] = "euclidean"
    signed: Annotated[
        bool, "L2: signed steps, and a random start in the box of side 2ε, as the equations of robust-init have it."
    ] = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen(self, "sampler", SAMPLER_NAMES)
        self.check_mining(self.sampler)
        check(self.shift in _SHIFTS, f"no shift {self.shift!r}; {nearest(self.shift, _SHIFTS)}")
        check(
            not self.signed or self.norm == "l2", "defence.signed is for L2, since Linf has signed steps: leave it out"
        )
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")

    @property
    def ball(self) -> "Ball":
        return replace(super().ball, signed=self.signed)


@dataclass(frozen=True)
class EstSettings(ShiftSettings):
    """EST[sampler] of Zhou & Patel 2022, table 6; the default is EST[R] with 8 steps.

    The robust-init study uses start = random (A.7).
    """

    ics: Annotated[float, "Weight (λ) of the intra-class structure term; 0 leaves it out."] = field(
        default=0.0, kw_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.ics >= 0, f"ics (λ) is the weight of a loss and must be at least 0, got {self.ics}")


@dataclass(frozen=True)
class SesSettings(EstSettings):
    """SES[sampler]: the loss on clean images plus the weighted shift."""

    weight: Annotated[float, "Weight of the embedding shift in the loss."] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.weight >= 0, f"the weight of the shift must not be negative, got {self.weight}")


@dataclass(frozen=True)
class RestSettings(ShiftSettings):
    """REST[sampler]: EST with clean anchors."""

    window: Annotated[float, "How much farther than the positive a semihard negative may lie."] = 1.0  # not γ

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.window > 0, f"the window must be above 0, got {self.window}")


@dataclass(frozen=True)
class MadrySettings(LossSettings, Inner, Mining):
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
        self.unused("sampler", "margin", "lower", "upper", "own_positive")
        self.check_mining(self.sampler)
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


def unread_by(settings: object) -> Mapping[str, str]:
    """The settings of a defence that it does not read with these values, and which setting would read them."""
    found: Mapping[str, str] = getattr(settings, "unread", {})
    return found


SETTINGS: Mapping[str, type[Any]] = {
    "natural": NaturalSettings,
    "madry": MadrySettings,
    "trades": TradesSettings,
    "proxy": ProxySettings,
    "hardness": HardnessSettings,
    "free": FreeSettings,
    "act": ActSettings,
    "est": EstSettings,
    "ses": SesSettings,
    "rest": RestSettings,
    "tride": TrideSettings,
    "adml": AdmlSettings,
}

_NO_DESTINATION = {"boost": "g_B raises a destination hardness, which only defence.name=hardness and free have"}
_CLEAN_ANCHOR = _NO_DESTINATION | {"ics": "ICS needs an adversarial anchor; here the anchor stays clean"}
_NO_ICS = _NO_DESTINATION | {"ics": "ICS is a term of defence.name=hardness, free, est, ses and tride"}

REFUSED: Mapping[str, Mapping[str, str]] = {
    "natural": _CLEAN_ANCHOR,
    "madry": _NO_ICS,
    "trades": _NO_ICS,
    "proxy": _NO_ICS,
    "act": _CLEAN_ANCHOR,
    "est": _NO_DESTINATION,
    "ses": _NO_DESTINATION,
    "rest": _CLEAN_ANCHOR,
    "tride": _NO_DESTINATION,
    "adml": _NO_ICS,
}
"""Settings of other defences that each defence refuses, with the reason."""
