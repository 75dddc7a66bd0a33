"""All settings of a run as one frozen dataclass; `recipes` builds it."""

import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ..data.settings import BatchSettings, DataSettings
from ..defences.settings import SETTINGS as DEFENCES
from ..errors import check, check_least, check_most, nearest
from ..model.settings import ModelSettings
from ..pretraining.settings import SETTINGS as PRETRAININGS
from ..schedules import LearningSchedule

__all__ = [
    "DEFENCE_SETTINGS",
    "AttackName",
    "OptimiserSettings",
    "Settings",
    "TrainSettings",
]

AttackName = Literal["margin", "nearest"]


@dataclass(frozen=True)
class OptimiserSettings:
    """Adam or AdamW; by default the learning rate is constant, as in the papers' code."""

    lr: Annotated[float, "Learning rate."] = 1e-5
    weight_decay: Annotated[float, "Weight decay: as L2 in the gradient; with adamw apart from it."] = 4e-4
    schedule: Annotated[LearningSchedule, "How the learning rate changes from step to step; one-cycle rises first."] = (
        "constant"
    )
    name: Annotated[Literal["adam", "adamw"], "Adam, or AdamW, which keeps weight decay out of its moments."] = "adam"

    def __post_init__(self) -> None:
        check_least("optimiser", self, lr=0, weight_decay=0)
        check(self.lr > 0, "optimiser.lr must be above 0, got 0")
        check_most("optimiser", self, lr=100, weight_decay=100)
        words = typing.get_args(LearningSchedule)
        check(self.schedule in words, f"optimiser.schedule {self.schedule!r}; {nearest(str(self.schedule), words)}")
        known = ("adam", "adamw")
        check(self.name in known, f"optimiser.name {self.name!r}; {nearest(str(self.name), known)}")


@dataclass(frozen=True)
class TrainSettings:
    """Length of training, evaluation, and when to stop."""

    epochs: Annotated[int, "Passes over the training images."] = 75
    seed: Annotated[int, "Seed of every random draw."] = 0
    precision: Annotated[
        Literal["auto", "fp32", "tf32", "bf16"], "Precision of training; auto is bf16 on a GPU and fp32 elsewhere."
    ] = "auto"
    compile: Annotated[
        Literal["auto", "on", "off"], "Compile inner attacks; auto does so on a GPU in bf16 for long runs."
    ] = "auto"
    canary_every: Annotated[
        int, "fp32 check: on a GPU, repeat an attack of training in fp32 every N steps; 0 is never."
    ] = 500
    evaluate_every: Annotated[int, "Evaluate on the test split every N epochs, and after the last."] = 5
    attack_eps: Annotated[float, "Above 0, each evaluation also measures R@1 under an attack with this ε."] = 0.0
    attack: Annotated[AttackName, "The attack in evaluations: margin, or nearest, which is ADML's algorithm 1."] = (
        "margin"
    )
    attack_steps: Annotated[int, "Steps of the attack in evaluations."] = 20
    attack_queries: Annotated[int, "Queries that evaluations attack; 0 is all."] = 500
    benign: Annotated[float, "Share of the batches that are not attacked."] = 0.0
    ema: Annotated[float, "Decay of a mean of the weights, which is evaluated and exported instead; 0 is off."] = 0.0
    mean_from: Annotated[
        float, "Above 0, the plain mean of the weights from this share of the training on; instead of train.ema."
    ] = 0.0
    checkpoint_seconds: Annotated[float, "Seconds between checkpoints."] = 60.0
    on_collapse: Annotated[Literal["stop", "warn"], "What to do when all embeddings become alike."] = "stop"
    collapse_warmup: Annotated[int, "Epochs that are not checked for collapse, at the start."] = 2
    collapse_separability: Annotated[
        float, "Training stops if the separability of clean triplets stays below this."
    ] = 0.02
    collapse_distance: Annotated[float, "Training stops if the mean distance of clean pairs stays below this."] = 0.05

    def __post_init__(self) -> None:
        check_least("train", self, epochs=1, seed=0, evaluate_every=1, checkpoint_seconds=0)
        check_least("train", self, attack_eps=0, attack_steps=0, attack_queries=0, canary_every=0)
        check_least("train", self, collapse_warmup=0, collapse_separability=0, collapse_distance=0, benign=0, ema=0)
        words = typing.get_args(AttackName)
        check(self.attack in words, f"train.attack {self.attack!r}; {nearest(str(self.attack), words)}")
        check(self.benign <= 1, f"train.benign is a share of the batches, between 0 and 1, got {self.benign}")
        check(self.ema < 1, f"train.ema is a decay below 1, such as 0.999, got {self.ema}")
        check(0 <= self.mean_from < 1, f"train.mean_from is a share below 1, such as 0.5, got {self.mean_from}")
        check(not (self.ema and self.mean_from), "train.ema and train.mean_from are two means: leave one of them out")
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

    def __post_init__(self) -> None:
        wants = getattr(self.defence, "draws_triplets", "") if self.batch.kind == "images" else ""
        check(not wants, f"batch.kind = images has no pairs for {wants}: set batch.kind to pairs or classes")


DEFENCE_SETTINGS: dict[str, type[Any]] = {**DEFENCES, **PRETRAININGS}
"""The settings dataclass of every defence and pretraining, by the name that `defence.name` takes."""
