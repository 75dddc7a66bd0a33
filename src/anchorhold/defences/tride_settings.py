"""Settings of CA-TRIDE; they load without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ..errors import check, nearest
from ..extensions import Named
from .choices import SAMPLER_NAMES, chosen
from .inner import Inner, Mining

__all__ = ["FormName", "Guide", "Phases", "TrideSettings"]

Phases = Literal["both", "cap", "anp"]
Guide = Literal["collapseness", "hardness"]
FormName = Literal["paper", "code"]


@dataclass(frozen=True, kw_only=True)
class TrideSettings(Inner, Mining):
    """CA-TRIDE in the tables of Tian et al. 2024; the defaults are the paper's for CUB.

    CA-CAP and CA-ANP are values of `phases`. Naive CAP, ANP and TRIDE use guide = hardness, with `stop`,
    `top_rank_term` and `top_rank_loss` off.
    """

    steps: int = 16
    sampler: Annotated[Named | str, "How triplets are drawn from a batch; semihard in the paper.", SAMPLER_NAMES] = (
        "semihard"
    )
    margin: Annotated[float, "Margin (γ) of the triplet loss."] = 0.2
    phases: Annotated[Phases, "Which attacks train the model; both alternates them by batch, CAP first."] = "both"
    guide: Annotated[Guide, "What the attacks raise; hardness is collapseness without attention."] = "collapseness"
    stop: Annotated[bool, "End an attack at its goal; if false, it takes all its steps."] = True
    attention: Annotated[float, "λ: how much more near pairs count in collapseness; 0 weighs all alike."] = 10.0
    adaptive: Annotated[
        float, "Added to λ for each unit of class entanglement above CUB's 0.787; 60 fits the paper's; 0 keeps λ."
    ] = 0.0
    weights_carry_gradient: Annotated[
        bool, "Pass gradients through the weights of collapseness, as the published code does."
    ] = False  # on, they move many pairs the wrong way
    top_rank_term: Annotated[bool, "Add the top-rank term Δ_TR to the attack of ANP."] = True
    top_rank_loss: Annotated[bool, "Add the top-rank loss L_TR to the training loss."] = True
    gamma: Annotated[float, "Weight of the top-rank loss L_TR."] = 0.5
    top_share: Annotated[float, "Share of the pairs that count as first ranks, N_v and P_v."] = 0.5
    ics: Annotated[float, "Weight (λ) of the intra-class structure term in batches whose anchors move."] = 0.0
    beta: Annotated[float, "Margin (β_TR) of the top-rank loss."] = 0.04
    window: Annotated[float, "How much farther than the positive a semihard negative may lie; shrinks by epoch."] = (
        0.2  # η_0
    )
    progressive: Annotated[bool, "Let the step size grow with the epoch, by n/N."] = True
    form: Annotated[FormName, "Formulas of the paper, or of its published code."] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("phases", Phases), ("guide", Guide), ("form", FormName)):
            word, words = getattr(self, name), get_args(kind)
            check(word in words, f"{name} {word!r}; {nearest(str(word), words)}")
        chosen(self, "sampler", SAMPLER_NAMES)
        self.check_mining(self.sampler)
        check(0 < self.top_share <= 1, f"top_share must be above 0 and at most 1, got {self.top_share}")
        check(self.adaptive >= 0, f"adaptive (λ per unit of entanglement) must be at least 0, got {self.adaptive}")
        check(self.ics >= 0, f"ics (λ) is the weight of a loss and must be at least 0, got {self.ics}")
        moves = self.phases != "cap"
        check(moves or not self.ics, "ICS needs an adversarial anchor; with phases = cap anchors stay clean")
        check(0 <= self.attention < math.inf, f"attention (λ) must be finite and not negative, got {self.attention}")
        check(min(self.margin, self.gamma, self.beta) >= 0, "margin, gamma and beta must not be negative")
        check(self.window > 0, f"the window must be above 0, got {self.window}")
        check(
            self.stop or self.form == "paper",
            "without stop the attack raises C without limit, but ANP in the code's form lowers it: use form = paper",
        )

    @property
    def unread(self) -> Mapping[str, str]:
        """Settings that are not read, and which setting would read them."""
        found: dict[str, str] = {}
        if self.guide == "hardness":
            weights = ("adaptive", "weights_carry_gradient")  # attention is that of the collapseness in the log
            found |= dict.fromkeys(weights, "it is of defence.guide = collapseness")
        if not self.top_rank_loss:
            found |= dict.fromkeys(("gamma", "beta"), "it is of defence.top_rank_loss")
        elif self.phases == "cap" and self.form == "paper":
            found |= dict.fromkeys(("gamma", "beta"), "in the paper's form it is of defence.phases = both or anp")
        if self.sampler != "semihard" and not isinstance(self.sampler, Named):
            found["window"] = "it is of defence.sampler = semihard"
        return found
