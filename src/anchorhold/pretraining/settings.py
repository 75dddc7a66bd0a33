"""Settings of each pretraining, as frozen dataclasses that load without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from ..defences.settings import Inner
from ..errors import check
from ..perturb.settings import Budget

__all__ = [
    "SETTINGS",
    "WITHOUT_LABELS",
    "ClassifySettings",
    "DistilLogitsSettings",
    "DistilSettings",
    "PretrainSettings",
]


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(Inner):
    """The attack of the robust ImageNet networks in the robust-init study: three steps of two thirds of ε."""

    eps: float = 4 / 255
    alpha: float = 8 / 765
    steps: int = 3
    start: Literal["zero", "random"] = "random"
    holdout: Annotated[float, "Share of the training images that are kept for evaluation and never trained on."] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.holdout < 1, f"defence.holdout is a share between 0 and 1, got {self.holdout}")


@dataclass(frozen=True, kw_only=True)
class ClassifySettings(PretrainSettings):
    """As the robust networks of the robust-init study in Linf; in L2 they have eps 3 and steps of 2."""


@dataclass(frozen=True, kw_only=True)
class DistilSettings(PretrainSettings):
    """Feature distillation: steps as for `classify`, with a smaller ε that does not destroy the features."""

    eps: float = 2 / 255
    alpha: float = 4 / 765

    @property
    def budget(self) -> Budget:
        # At the start the drift and its gradient are 0 at x. A start of zero would never move.
        return replace(super().budget, start="tiny" if self.start == "zero" else self.start)


@dataclass(frozen=True, kw_only=True)
class DistilLogitsSettings(DistilSettings):
    """Distillation of the network's own answers: with ε and steps of `classify`."""

    eps: float = 4 / 255
    alpha: float = 8 / 765
    temperature: Annotated[float, "Logits are divided by it: above 1, wrong classes count more."] = 1.0
    logits: Annotated[int, "Logits of the classifier in the weights, filled in; 0: the features are the logits."] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.temperature > 0, f"defence.temperature must be above 0, got {self.temperature}")
        check(self.logits >= 0, f"defence.logits must not be negative, got {self.logits}")


WITHOUT_LABELS = ("distil", "distil-logits")
"""Pretrainings that use no labels."""

SETTINGS: Mapping[str, type[PretrainSettings]] = {
    "classify": ClassifySettings,
    "distil": DistilSettings,
    "distil-logits": DistilLogitsSettings,
}
