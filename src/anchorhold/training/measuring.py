"""How long a training step takes here: a few real steps, on a few real images, with a copy of the model.

Nothing is written, and the model, its gradients and torch's random numbers stay as they were. Where a whole batch would
take too long, a part of it is timed: on a CPU the time grows with the number of images. Attacks take all their steps:
in training, triplets that meet their goal are dropped, fewer of them later in training.
"""

import copy
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..config.settings import Settings
from ..console import Silent
from ..data.batches import pair_batches
from ..data.splits import Dataset, Split
from ..defences.settings import Inner
from ..defences.step import Batch, Step
from ..device import precise
from ..distributed import Ranks
from ..errors import ModelError, lacks_memory
from ..extensions import Named, reason_of
from ..model.embedder import Embedder
from ..model.trainable import Trainable
from ..model.tuning import Tuning
from ..random import Key
from ..runs.folder import Run
from .loop import train_step
from .trainer import Trainer, plan_batches

__all__ = ["Measured", "measure"]

_FIRST = 2  # pairs of the first steps
_IMAGES = 16  # that are read; larger batches repeat them
_PASS = {"cpu": 16, "cuda": 256}  # images of the timed forward pass


@dataclass(frozen=True)
class Measured:
    """What a step costs on this machine."""

    pairs: int  # in the largest batch that was timed
    seconds: float  # of a step with a whole batch
    optimiser_steps: float  # for each batch
    image_steps: float  # of the inner attacks, at most, for each whole batch
    pass_seconds: float  # of the forward pass of one image
    memory: int | None  # bytes that a step needs besides the images; None where the system does not tell
    fits: bool = True  # whether a whole batch fits into the GPU's memory


def measure(
    settings: Settings, model: Embedder | Trainable, data: Dataset, device: torch.device, budget: float
) -> Measured:
    """Time steps of growing batches for about `budget` seconds; one step with two pairs is always taken."""
    try:
        model, settings = copy.deepcopy(model), _with_copies(settings)
    except Exception as error:  # a module of the user may refuse in any way
        if lacks_memory(error):
            raise
        raise ModelError(f"the model cannot be copied, so no step can be timed ({reason_of(error)})") from error
    cards = [device] if device.type == "cuda" else []
    whole = _pairs(settings, data.train)
    with torch.random.fork_rng(cards):
        trial = _Trial(settings, model, data, device)
        if device.type == "cuda":
            return _on_gpu(trial, whole)
        with _highest() as highest:
            before = highest()
            found = _growing(trial, whole, budget)
            peak = highest()
        if before is None or peak is None:
            return found
        fixed = trial.fixed  # what does not grow with the batch
        grown = max(peak - before - fixed, 0) * whole / found.pairs
        return replace(found, memory=round(fixed + grown))


def _with_copies(settings: Settings) -> Settings:
    """The settings with copies of the objects in them: the parameters of a loss must not be trained by a trial."""
    own = {f.name: getattr(settings.defence, f.name) for f in fields(settings.defence)}
    made = {name: each for name, each in own.items() if isinstance(each, Named) and each.made}
    copies = {name: Named(str(each), copy.deepcopy(each.thing)) for name, each in made.items()}
    return replace(settings, defence=replace(settings.defence, **copies)) if copies else settings


def _growing(trial: "_Trial", whole: int, budget: float) -> Measured:
    """Batches of 2, 8, 32 … pairs, as long as the next one still fits the time."""
    begun = time.monotonic()
    size = min(_FIRST, whole)
    first = trial.step(size)
    if first > budget / 3:  # it is somewhat slower than others, but there is no time for them
        return trial.measured(size, whole, first * whole / size)
    known: list[tuple[int, float]] = []
    while True:
        # Two steps: CA-TRIDE alternates between two attacks.
        known.append((size, sum(trial.step(size) for _ in range(2)) / 2))
        larger = min(4 * size, whole)
        left = budget - (time.monotonic() - begun)
        if larger == size or 2 * known[-1][1] * larger / size > left:
            return trial.measured(size, whole, _extended(known, whole))
        size = larger


def _extended(known: list[tuple[int, float]], whole: int) -> float:
    """Seconds of a step with `whole` pairs, from the two largest that were timed: some of the time is the same for all.

    >>> _extended([(2, 1.0), (8, 4.0)], 28)
    14.0
    """
    size, seconds = known[-1]
    most = seconds / size
    slope = most if len(known) < 2 else (seconds - known[-2][1]) / (size - known[-2][0])
    return seconds + min(max(slope, most / 4), most) * (whole - size)  # times vary: the slope of two is not sure


def _on_gpu(trial: "_Trial", whole: int) -> Measured:
    """Whole batches, since the peak of the memory matters; half of it where it does not fit."""
    size, device = whole, trial.device
    while True:
        try:
            trial.step(size)  # kernels are chosen and loaded in the first one
            torch.cuda.reset_peak_memory_stats(device)
            seconds = sum(trial.step(size) for _ in range(2)) / 2 * whole / size
            memory = round(torch.cuda.max_memory_allocated(device) * whole / size)
            return replace(trial.measured(size, whole, seconds), memory=memory, fits=size == whole)
        except RuntimeError as error:
            if not lacks_memory(error) or size <= _FIRST:
                raise
        torch.cuda.empty_cache()  # not before: the error keeps the tensors of its frames
        size //= 2


class _Longest(Step):
    """A step whose attacks take all their steps, at the full ε."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"progress": 1.0})

    def perturb(self, embed: Any, units: Tensor, objective: Any, inner: Any, *more: Any, **named: Any) -> Tensor:
        return super().perturb(embed, units, objective, cast(Inner, _Undropped(inner)), *more, **named)


class _Undropped:
    """Settings of an attack that drops no unit."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.budget = replace(inner.budget, drop=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Trial:
    """A run of a few images that no folder belongs to."""

    def __init__(self, settings: Settings, model: Embedder | Trainable, data: Dataset, device: torch.device) -> None:
        key = Key.of(settings.train.seed)
        few = data.train.keep(_some(data.train, plan_batches(data.train.labels, settings.batch, key("batches", 0))[0]))
        # Compilation takes longer than the time that is given here.
        train = replace(settings.train, compile="off", canary_every=0, benign=0.0)
        classes = min(settings.batch.classes, len(few.labels.unique()))  # a few images have fewer than a batch
        batch = replace(settings.batch, classes=classes)
        settings = replace(settings, train=train, batch=batch, data=replace(settings.data, store="resident"))
        nowhere = Run(Path(os.devnull) / "run", writes=False)
        sample = Dataset(data.name, few, few)
        self.trainer = Trainer(
            nowhere, settings, model, sample, device, Silent(), Ranks(), Tuning(model, settings.model)
        )
        self.device, self.key, self.yielded, self.taken = device, key, 0, 0
        self.pairs = pair_batches(self.trainer.images.split.labels, len(few), key)[0].reshape(-1, 2)
        regime: Any = self.trainer.regime
        losses = regime.losses

        def counted(*given: Any) -> Iterator[Tensor]:
            for loss in losses(*given):
                self.yielded += 1
                yield loss

        regime.losses = counted
        self.trainer.step = cast("partial[Step]", partial(_Longest, **self.trainer.step.keywords))
        self.trainer.model.train()

    @property
    def fixed(self) -> int:
        """Bytes of gradients and of Adam's two moments."""
        parts = self.trainer.parts.values()
        trained = [p for part in parts for p in part.parameters() if p.requires_grad]
        return 3 * sum(p.numel() * p.element_size() for p in trained)

    def step(self, pairs: int) -> float:
        """Take one step with a batch of that many pairs; the seconds that it took."""
        trainer, place = self.trainer, self.taken
        rows = torch.arange(pairs) % len(self.pairs)
        ids = self.pairs[rows].reshape(-1)
        views = next(trainer.images.augmented([ids], iter([self.key("measure", place)])))
        here = ids.to(self.device)
        trainer.meters.reset()
        self.yielded = 0
        self._wait()
        begun = time.monotonic()
        train_step(trainer, Batch(images=views, labels=trainer.images.labels[here], ids=here))
        self._wait()
        self.taken += 1
        return time.monotonic() - begun

    def measured(self, size: int, whole: int, seconds: float) -> Measured:
        """What the last step and a forward pass tell; a whole batch takes these seconds."""
        work = self.trainer.meters.total("image_steps") * whole / size
        return Measured(size, seconds, max(self.yielded, 1), work, self._pass(), None)

    def _pass(self) -> float:
        images, count = self.trainer.images, _PASS.get(self.device.type, 16)
        ids = torch.arange(count) % len(images.labels)
        views = next(images.plain(ids, count))
        self.trainer.model.eval()
        with torch.no_grad(), precise():
            self.trainer.model(views)
            self._wait()
            begun = time.monotonic()
            self.trainer.model(views)
            self._wait()
        return (time.monotonic() - begun) / count

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _pairs(settings: Settings, train: Split) -> int:
    """Pairs in a batch of the run; a data set may be smaller than its batch."""
    batch = settings.batch
    if batch.kind == "images":
        return max(min(batch.images, len(train)) // 2, 1)
    return min(batch.pairs, len(train)) if batch.kind == "pairs" else batch.classes * batch.instances // 2


def _some(train: Split, first: Tensor) -> Tensor:
    """Some images of a batch (pairs of one class, or any), of two classes at least."""
    pairs = first.cpu()[: len(first) // 2 * 2].reshape(-1, 2)
    spread = torch.linspace(0, len(pairs) - 1, min(len(pairs), _IMAGES // 2)).round().long()
    chosen = pairs[spread].reshape(-1)
    labels = train.labels.cpu()
    other = (labels != labels[chosen[0]]).nonzero().flatten()[:2]
    few: Tensor = torch.unique(torch.cat([chosen, other]))
    return few


@contextmanager
def _highest() -> Iterator[Any]:
    """A function that tells the most memory this process has had since the block began; None if it cannot be known."""
    ended, most = threading.Event(), _resident()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.02):
            most = _larger(most, _resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: _larger(most, _resident())
    finally:
        ended.set()
        thread.join()


def _larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def _resident() -> int | None:
    """Bytes of memory that this process has now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):  # not Linux
        return None
