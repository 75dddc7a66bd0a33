"""What a run is made of: frozen dataclasses, and the errors that name the nearest right word.

`layers` makes them from recipes and `--set key=value`.
"""

import difflib
import math
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import SettingsError

__all__ = [
    "BatchSettings",
    "DataSettings",
    "ModelSettings",
    "OptimiserSettings",
    "Schedule",
    "Settings",
    "TrainSettings",
    "check",
    "falling",
    "nearest",
]

Schedule = Literal["constant", "linear", "cosine"]


def falling(schedule: Schedule, share: float) -> float:
    """What is left of a length of 1 that falls to 0, when this share of the way is done.

    >>> falling("linear", 0.25), falling("cosine", 0.5)
    (0.75, 0.5)
    """
    return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[schedule]


@dataclass(frozen=True)
class DataSettings:
    """Which images, and how they become squares."""

    name: str = "folder"  # cub, cars, sop, inshop, folder, csv, digits, gaussians
    root: str = ""  # where the set lies; digits and gaussians need none
    resize: int = 256  # every image is resized to exactly this square; 0 leaves it as it is
    crop: int = 224  # random crop in training, centre crop in test; 0 takes the whole square
    crop_least: float = 0.0  # above 0, training crops cover a random share of the square, at least this, and are scaled
    flip: bool = True  # horizontal flips in training
    on_bad_image: Literal["fail", "skip"] = "fail"
    held_out: int = 0  # so many training classes, the last ones, are tested on instead of the test split
    store: Literal["auto", "resident", "stream"] = "auto"  # auto: in memory, unless that takes half of what is left
    workers: int = 0  # processes that decode and stream; 0 is one for each core

    def __post_init__(self) -> None:
        _check_least("data", self, resize=0, crop=0, crop_least=0, workers=0, held_out=0)
        check(self.crop_least <= 1, f"data.crop_least is a share of the area, between 0 and 1, got {self.crop_least}")
        fits = not self.resize or self.crop <= self.resize
        check(fits, f"data.crop = {self.crop} does not fit into data.resize = {self.resize}; choose a smaller crop")


@dataclass(frozen=True)
class BatchSettings:
    """How images come together."""

    kind: Literal["pairs", "classes"] = "pairs"  # the papers' pairs, or P classes × K instances
    pairs: int = 112  # 56 on each of two GPUs in the published code of 001: 3,975 steps on CUB (docs/results.md)
    distinct: bool = False  # on, no pair is one image twice, as about one in sixty is on CUB in the published code
    classes: int = 28
    instances: int = 4
    mining_pairs: int = 56  # triplets are mined inside groups of this many pairs; 0 = the whole batch

    def __post_init__(self) -> None:
        _check_least("batch", self, pairs=1, classes=2, instances=2, mining_pairs=0)
        even = self.instances % 2 == 0
        check(even, f"batch.instances must be even, since images come in pairs, got {self.instances}")


@dataclass(frozen=True)
class ModelSettings:
    """The embedder."""

    backbone: str = "resnet18"
    dim: int = 512
    weights: str = "imagenet"  # a name, a file, or "" for none
    freeze_batchnorm: bool = True

    def __post_init__(self) -> None:
        _check_least("model", self, dim=0)


@dataclass(frozen=True)
class OptimiserSettings:
    """Adam with coupled L2 and a constant learning rate, as in the papers' code."""

    lr: float = 1e-5
    weight_decay: float = 4e-4
    schedule: Schedule = "constant"  # how lr falls, step by step

    def __post_init__(self) -> None:
        _check_least("optimiser", self, lr=0, weight_decay=0)
        check(self.lr > 0, "optimiser.lr must be above 0, got 0")
        words = typing.get_args(Schedule)
        check(self.schedule in words, f"optimiser.schedule {self.schedule!r}; {nearest(str(self.schedule), words)}")


@dataclass(frozen=True)
class TrainSettings:
    """How long, how often to look, and when to stop."""

    epochs: int = 75
    seed: int = 0
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # auto: bf16 on a GPU, fp32 elsewhere
    compile: Literal["auto", "on", "off"] = "auto"  # the ascent; auto: on a GPU in bf16, where the run is long enough
    canary_every: int = 500  # on a GPU, steps between two inner attacks that are made again in fp32; 0 is never
    evaluate_every: int = 5  # epochs between looks at the test split; the last epoch is always looked at
    attack_eps: float = 0.0  # above 0 each look is also taken under an attack on R@1 of this size
    attack_steps: int = 20
    attack_queries: int = 500
    benign: float = 0.0  # share of the batches that are left unperturbed
    ema: float = 0.0  # decay of a running mean of the weights, which is then what is looked at and exported; 0 is off
    checkpoint_seconds: float = 60.0
    on_collapse: Literal["stop", "warn"] = "stop"
    collapse_warmup: int = 2  # epochs before collapse is judged
    collapse_separability: float = 0.02  # clean random triplets below this are collapsed
    collapse_distance: float = 0.05  # so is a batch whose clean pairs are nearer than this on average

    def __post_init__(self) -> None:
        _check_least("train", self, epochs=1, seed=0, evaluate_every=1, checkpoint_seconds=0)
        _check_least("train", self, attack_eps=0, attack_steps=0, attack_queries=0, canary_every=0)
        _check_least("train", self, collapse_warmup=0, collapse_separability=0, collapse_distance=0, benign=0, ema=0)
        check(self.benign <= 1, f"train.benign is a share of the batches, between 0 and 1, got {self.benign}")
        check(self.ema < 1, f"train.ema is a decay below 1, such as 0.999, got {self.ema}")
        check(self.seed < 2**63, f"train.seed must be below 2**63, got {self.seed}")


@dataclass(frozen=True)
class Settings:
    """All of it. `defence` is the settings dataclass of the defence named there."""

    data: DataSettings = field(default_factory=DataSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    defence: Any = None
    recipe: str = ""


def check(condition: bool, message: str) -> None:
    """Refuse settings that make no sense, with the reason."""
    if not condition:
        raise SettingsError(message)


def _check_least(section: str, settings: object, **least: int) -> None:
    for name, low in least.items():
        value = getattr(settings, name)
        check(math.isfinite(value), f"{section}.{name} must be finite, got {value}")
        check(value >= low, f"{section}.{name} must be at least {low}, got {value}")


def nearest(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """The end of an error message: which of `words` was probably meant, or all there are.

    >>> nearest("softhrad", ["random", "softhard"])
    'did you mean softhard?'
    """
    words = sorted(words)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise or "there are: " + ", ".join(words)
