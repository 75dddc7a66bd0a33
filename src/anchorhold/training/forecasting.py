"""What a training will take: counted from its settings and data, and measured in a few steps."""

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ..config.build import to_dict
from ..config.settings import Settings
from ..console import Report, Silent, duration
from ..data.images import bytes_held
from ..data.splits import Dataset, Split
from ..device import compiles, computer_of
from ..model.embedder import Embedder
from ..model.trainable import Trainable
from .measuring import Measured, measure
from .regimes import begins_with_features
from .suited import smaller_batch, steps_of

__all__ = ["LONG", "Forecast", "forecast", "say_if_long", "shorter"]

LONG = 300.0  # seconds: a longer training on a CPU is said beforehand
PROBE = 3.0  # seconds that finding this out may take
_SIGNS = 512  # images that are embedded after every epoch to notice a collapse
_CLIMB = 3  # forward passes that one step of an attack costs
_PIXELS = 1e8  # attacked or trained pixels below which a run takes a minute or two on any machine


@dataclass(frozen=True)
class Forecast:
    """What a training will take on this machine; str() gives it as text.

    Attacks count with all their steps. A run is shorter where triplets meet their goal early and are dropped.

    Attributes:
        name: of the data set.
        images: number of training images.
        classes: number of training classes.
        test_images: number of test images.
        batch_images: number of images in a batch.
        steps_per_epoch: batches in an epoch.
        epochs: of the whole run.
        optimiser_steps: of the whole run.
        image_steps: gradient steps of the inner attacks on one batch, at most.
        seconds_per_step: of training, attack included.
        evaluation_seconds: of all evaluations, which are part of `seconds`.
        seconds: of the whole run, after the images are read.
        step_bytes: memory of a step; None if it is not known.
        image_bytes: memory of the decoded images; 0 if they are read from disk again and again.
        device: the machine, in words.
        timed_images: images in the batches that were timed.
        fits: whether a batch fits into the GPU's memory.
        notes: what else you should know, as sentences.
        suggestions: what you could change if it takes too long or too much memory.
        settings: all settings of the training.
    """

    name: str
    images: int
    classes: int
    test_images: int
    batch_images: int
    steps_per_epoch: int
    epochs: int
    optimiser_steps: int
    image_steps: int
    seconds_per_step: float
    evaluation_seconds: float
    seconds: float
    step_bytes: int | None
    image_bytes: int
    device: str
    timed_images: int
    fits: bool
    notes: tuple[str, ...]
    suggestions: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def limit(self) -> str:
        """Said before times: attacks may end early."""
        return "up to " if self.image_steps else ""

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        part = self.timed_images < self.batch_images
        how = f"timed with {self.timed_images} of its {self.batch_images} images" if part else "timed"
        attack = f"up to {self.image_steps:,} image-steps of attack for each batch" if self.limit else "no attacks"
        held = f"{_size(self.image_bytes)} for all images" if self.image_bytes else "images are read from disk"
        step = "" if self.step_bytes is None else f"about {_size(self.step_bytes)} for a step, "
        lines = [
            f"data      {self.name}: {self.images:,} training images of {self.classes:,} classes, "
            f"{self.test_images:,} test images",
            f"batch     {self.batch_images:,} images, {_count(self.steps_per_epoch, 'step')} an epoch",
            f"training  {_count(self.epochs, 'epoch')}, {_count(self.optimiser_steps, 'optimiser step')}, {attack}",
            f"time      {self.limit}about {duration(self.seconds)} on {self.device}, after the images are read",
            f"          {_brief(self.seconds_per_step)} a step ({how}); evaluations take "
            f"{duration(self.evaluation_seconds)} of it",
            f"memory    {step}{held}",
        ]
        lines += [f"note      {text}" for text in self.notes]
        lines += [f"try       {text}" for text in self.suggestions]
        return "\n".join(lines)


def forecast(
    settings: Settings,
    model: Embedder | Trainable,
    data: Dataset,
    device: torch.device,
    budget: float,
    notes: tuple[str, ...] = (),
) -> Forecast:
    """Measure some steps, and count what the whole run will take."""
    measured = measure(settings, model, data, device, budget)
    batch, epochs, train = settings.batch, settings.train.epochs, data.train
    steps, images = steps_of(batch, train), _batch_images(settings, train)
    # The last batch of an epoch of pairs or images may be short.
    whole = {"pairs": 2 * len(train) / images, "images": len(train) / images, "classes": steps}[batch.kind]
    evaluation = measured.pass_seconds * _evaluated(settings, model, data)
    seconds = epochs * whole * measured.seconds + evaluation
    hints = (f"to make it shorter: {shorter(settings)}",) if device.type == "cpu" and seconds > LONG else ()
    return Forecast(
        name=data.name,
        images=len(train),
        classes=len(torch.unique(train.labels)),
        test_images=len(data.test),
        batch_images=images,
        steps_per_epoch=steps,
        epochs=epochs,
        optimiser_steps=round(steps * epochs * measured.optimiser_steps),
        image_steps=round(measured.image_steps),
        seconds_per_step=measured.seconds,
        evaluation_seconds=evaluation,
        seconds=seconds,
        step_bytes=measured.memory,
        image_bytes=sum(bytes_held(split, settings.data) for split in (train, data.test)),
        device=computer_of(device),
        timed_images=2 * measured.pairs,
        fits=measured.fits,
        notes=(*notes, *_notes(settings, device, steps * epochs)),
        suggestions=(*_suggestions(settings, data, measured), *hints),
        settings=to_dict(settings),
    )


def say_if_long(
    settings: Settings, model: Embedder | Trainable, data: Dataset, device: torch.device, report: Report
) -> None:
    """On a CPU, say beforehand how long a long training will take, and what makes it shorter."""
    if device.type != "cpu" or not _large(settings, data):
        return
    try:
        found = forecast(settings, model, data, device, PROBE)
    except Exception:  # this is a courtesy: what is wrong, the training itself reports
        return
    if found.seconds <= LONG:
        return
    told = f"{found.steps_per_epoch * found.epochs:,} steps take {found.limit}about {duration(found.seconds)}"
    lines = (f"{told} on this CPU; you can stop and resume at any time", f"to make it shorter: {shorter(settings)}")
    if isinstance(report, Silent):  # hours without a word would surprise
        warnings.warn("; ".join(lines), stacklevel=3)
    for line in lines:
        report.say(line)


def _large(settings: Settings, data: Dataset) -> bool:
    """Whether a run may take more than a minute or two on a CPU, by the pixels that go through the model."""
    side = settings.data.crop or settings.data.resize
    sample = data.train.images
    pixels = side**2 if side or sample is None else sample.shape[1] * sample.shape[2]
    passes = 2 + getattr(settings.defence, "steps", 0)
    return 2 * len(data.train) * settings.train.epochs * passes * pixels > _PIXELS


def shorter(settings: Settings) -> str:
    """What makes a run of these settings shorter, by its keys."""
    steps, crop, epochs = getattr(settings.defence, "steps", 0), settings.data.crop, settings.train.epochs
    ways = []
    if crop >= 160:
        ways.append("data.resize=128 and data.crop=112 (a quarter of the time)")
    if steps >= 4:
        ways.append(f"defence.steps={steps // 2}")
    if epochs >= 10:
        ways.append(f"train.epochs={max(epochs // 3, 5)}")
    if settings.model.backbone not in ("small", "mlp"):
        ways.append("a smaller model.backbone")
    if steps:
        ways.append("the recipe natural (no attacks)")
    return ", ".join([*ways, "or a GPU"])


def _batch_images(settings: Settings, train: Split) -> int:
    batch = settings.batch
    if batch.kind == "images":
        return min(batch.images, len(train))
    return 2 * min(batch.pairs, len(train)) if batch.kind == "pairs" else batch.classes * batch.instances


def _evaluated(settings: Settings, model: nn.Module, data: Dataset) -> int:
    """Forward passes of all evaluations; the step of an attack counts as several."""
    train = settings.train
    times = -(-train.epochs // train.evaluate_every)
    features = times + 1 if begins_with_features(settings, model) else 0
    passes = (times + features) * len(data.test) + train.epochs * min(_SIGNS, 2 * len(data.train))
    if train.attack_eps > 0:
        queries = len(data.query) if not train.attack_queries else min(train.attack_queries, len(data.query))
        passes += times * queries * train.attack_steps * _CLIMB
    return passes


def _notes(settings: Settings, device: torch.device, steps: int) -> tuple[str, ...]:
    found = []
    work = steps * settings.batch.work * (5 + getattr(settings.defence, "steps", 0))
    if compiles(settings.train.compile, settings.train.precision, device, work):
        found.append("attacks will be compiled, which was not timed: steps will be faster, but for the first")
    return tuple(found)


def _suggestions(settings: Settings, data: Dataset, measured: Measured) -> tuple[str, ...]:
    found = []
    smaller = smaller_batch(settings.batch, data.train)
    if steps_of(settings.batch, data.train) == 1 and smaller != settings.batch:
        key, value = smaller.kind, getattr(smaller, smaller.kind)
        steps = steps_of(smaller, data.train)
        found.append(f"batch.{key}={value}: {steps} steps an epoch instead of 1")
    if not measured.fits:
        single = settings.batch.kind == "images"
        fitting = f"images={2 * measured.pairs}" if single else f"pairs={measured.pairs}"
        found.append(f"batch.{fitting}: a whole batch does not fit into the GPU's memory")
    return tuple(found)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _size(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _brief(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
