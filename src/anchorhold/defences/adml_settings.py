"""Settings of adversarial deep metric learning. This file loads without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ..errors import check, nearest
from ..extensions import Named
from ..perturb.settings import Budget
from .choices import LOSS_NAMES, SAMPLER_NAMES, chosen
from .inner import Inner, check_cuts

__all__ = ["AdmlSettings"]


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
    objective: Annotated[
        Literal["distances", "loss", "surrogate"],
        "What the attack climbs: distances, the hinged loss, or the surrogate loss of the whole batch.",
    ] = "distances"  # equation 14; equation 11; equations 7, 8 and 12, and then the surrogate trains too
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
            ("objective", ("distances", "loss", "surrogate")),
        ):
            word = getattr(self, name)
            check(word in known, f"no {name} {word!r}; {nearest(str(word), known)}")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")
        check(0 <= self.attack_rate <= 1, f"attack_rate is a probability, between 0 and 1, got {self.attack_rate}")
        check(self.formulation in (1, 2, 3), f"no formulation {self.formulation}; there are: 1, 2, 3")
        check(self.weight >= 0, f"weight (λ) is the weight of a loss and must be at least 0, got {self.weight}")
        check_cuts(self.lower, self.upper)
        check(
            self.formulation != 1 or self.perturb == "positive",
            f"formulation 1 perturbs every image: leave perturb = {self.perturb} out, or take formulation 2 or 3",
        )
        check(
            self.loss == "contrastive" or self.reduction == "all",
            f"reduction = {self.reduction} is a mean of the contrastive loss: leave it out, or set loss to contrastive",
        )

        self._check_objective()

    def _check_objective(self) -> None:
        """Refuse settings that the chosen objective does not use."""
        check(
            self.objective != "loss" or self.formulation == 1,
            "objective = loss is of formulation 1, all images at once: set formulation to 1, or objective to surrogate",
        )
        if self.objective == "surrogate":
            plain = AdmlSettings()
            for name in ("perturb", "reduction", "sampler", "lower", "upper"):
                value = getattr(self, name)
                check(
                    value == getattr(plain, name),
                    f"objective = surrogate perturbs each sample against the whole batch, so {name} = {value} has no "
                    "effect: leave it out",
                )

    @property
    def unread(self) -> Mapping[str, str]:
        """Settings that are not read, and which setting would read them."""
        return {} if self.formulation == 3 else {"weight": "it is of defence.formulation = 3"}

    @property
    def draws_triplets(self) -> str:
        """What draws triplets from pairs of a class; "" where nothing does."""
        return "" if self.objective == "surrogate" else "the tuples of this defence"

    @property
    def attacks(self) -> bool:
        return super().attacks and self.attack_rate > 0

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.alpha or 2 * self.eps / max(self.steps, 1), start=self.start)
