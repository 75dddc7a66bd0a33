"""All settings of a run as one frozen dataclass; `recipes` builds it."""

import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from ..data.settings import BatchSettings, DataSettings
from ..defences.settings import SETTINGS as DEFENCES
from ..errors import check, check_least, check_most, nearest
from ..model.settings import ModelSettings
from ..pretraining.settings import SETTINGS as PRETRAININGS
from ..schedules import Schedule

__all__ = [
    "DEFENCE_SETTINGS",
    "OptimiserSettings",
    "Settings",
    "TrainSettings",
]


@dataclass(frozen=True)
class OptimiserSettings:
    """Adam with coupled L2; by default the learning rate is constant, as in the papers' code."""

    lr: float = 1e-5
    weight_decay: float = 4e-4
    schedule: Schedule = "constant"  # how lr decreases from step to step

    def __post_init__(self) -> None:
        check_least("optimiser", self, lr=0, weight_decay=0)
        check(self.lr > 0, "optimiser.lr must be above 0, got 0")
        check_most("optimiser", self, lr=100, weight_decay=100)
        words = typing.get_args(Schedule)
        check(self.schedule in words, f"optimiser.schedule {self.schedule!r}; {nearest(str(self.schedule), words)}")


@dataclass(frozen=True)
class TrainSettings:
    """Length of training, evaluation, and when to stop."""

    epochs: int = 75
    seed: int = 0
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # auto: bf16 on a GPU, fp32 elsewhere
    compile: Literal["auto", "on", "off"] = "auto"  # inner attacks; auto: on a GPU in bf16, if the run is long enough
    canary_every: int = 500  # on a GPU, repeat an inner attack in fp32 every N steps to check it; 0 is never
    evaluate_every: int = 5  # evaluate on the test split every N epochs, and after the last
    attack_eps: float = 0.0  # above 0, each evaluation also attacks R@1 with this ε
    attack_steps: int = 20
    attack_queries: int = 500
    benign: float = 0.0  # share of the batches that stay unperturbed
    ema: float = 0.0  # decay of a running mean of the weights, which is evaluated and exported instead; 0 is off
    checkpoint_seconds: float = 60.0
    on_collapse: Literal["stop", "warn"] = "stop"
    collapse_warmup: int = 2  # epochs before the check for collapse begins
    collapse_separability: float = 0.02  # below this separability of clean random triplets, the model has collapsed
    collapse_distance: float = 0.05  # below this mean distance of clean pairs, too

    def __post_init__(self) -> None:
        check_least("train", self, epochs=1, seed=0, evaluate_every=1, checkpoint_seconds=0)
        check_least("train", self, attack_eps=0, attack_steps=0, attack_queries=0, canary_every=0)
        check_least("train", self, collapse_warmup=0, collapse_separability=0, collapse_distance=0, benign=0, ema=0)
        check(self.benign <= 1, f"train.benign is a share of the batches, between 0 and 1, got {self.benign}")
        check(self.ema < 1, f"train.ema is a decay below 1, such as 0.999, got {self.ema}")
        check_most("train", self, epochs=10**6, evaluate_every=10**6, collapse_warmup=10**6, checkpoint_seconds=10**9)
        check_most("train", self, attack_eps=1, attack_steps=10**4, attack_queries=10**7, canary_every=10**9)
        check(self.seed < 2**63, f"train.seed must be below 2**63, got {self.seed}")


@dataclass(frozen=True)
class Settings:
    """All settings of a run. `defence` is the settings dataclass of the chosen defence."""

    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    defence: Any = None
    recipe: str = ""
    defence_name: str = ""  # of `defence`; several defences may have settings of one kind


DEFENCE_SETTINGS: dict[str, type[Any]] = {**DEFENCES, **PRETRAININGS}
"""The settings dataclass of every defence and pretraining, by the name that `defence.name` takes."""
