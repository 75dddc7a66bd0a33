"""The state of a run during training: the model, and all that is trained, saved or counted with it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config.settings import Settings
from ..console import Report
from ..data.batches import class_batches, image_batches, pair_batches
from ..data.images import Images, load_images
from ..data.settings import BatchSettings
from ..data.splits import Dataset
from ..defences.choices import LossSettings
from ..defences.proxy import Proxies
from ..defences.settings import ProxySettings
from ..defences.step import Step
from ..device import compiles, computing, precise
from ..distributed import Ranks
from ..errors import SettingsError, check, lacks_memory
from ..extensions import reason_of
from ..model.average import Average
from ..model.embedder import Embedder
from ..model.fast.fold import foldable
from ..model.fast.graphs import Graphed
from ..model.frozen import frozen
from ..model.trainable import Trainable, check_modes
from ..model.tuning import Tuning
from ..model.wrap import fingerprint_of
from ..random import Key
from ..runs.fields import dig, number
from ..runs.folder import Run
from . import checkpoint
from .callbacks import Callbacks
from .checkpoint import Meters, Progress
from .regimes import Defending, regime_of
from .timing import Clock

__all__ = ["Trainer", "plan_batches"]

LOSS_RATE = 100  # learning rate of proxies, times the model's, as pytorch-metric-learning recommends


class Trainer:
    """A run that is ready to train, at the point where its last checkpoint left it. `loop.train` trains it."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        model: Embedder | Trainable,
        data: Dataset,
        device: torch.device,
        report: Report,
        ranks: Ranks,
        tuning: Tuning,
    ) -> None:
        """Load images, put the model on its device, and restore the last checkpoint.

        Args:
            run: the folder, locked by the caller.
            settings: of the whole run.
            model: what to train; a checkpoint overwrites its weights.
            data: the training and test splits.
            device: where to compute.
            report: receives progress and messages.
            ranks: the processes that share the work.
            tuning: what of the model trains; the caller ends it.
        """
        self.callbacks = Callbacks((), run, report)  # `fit` puts yours here
        self.run, self.settings, self.device, self.report, self.ranks = run, settings, device, report, ranks
        self.key = Key.of(settings.train.seed)
        for note in data.notes:
            report.say(note)
        self.images = load_images(data.train, settings.data, device, report, ranks)
        self.test = load_images(data.test, settings.data.at_test, device, report, ranks)

        self.model = _placed(model, device)
        if isinstance(model, Trainable):
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                check_modes(model, next(self.images.plain(torch.arange(2), 2)))
            for note in model.notes:
                report.say(f"your module: {note}")
        if settings.data.test_crop:
            _takes_test_images(self.model, self.test)
        self.tuning = tuning
        if settings.model.train != "all":
            report.say(tuning.begin(next(self.images.plain(torch.arange(2), 2)), settings.train.seed))
        self.precision = computing(settings.train.precision, device)
        self.regime = regime_of(settings)(settings, model, self.images, self.test, self.key, self.precision)
        self.parts: dict[str, nn.Module] = {"model": model}
        if self.regime.companion is not None:
            self.parts["companion"] = self.regime.companion
        self.optimiser = _optimiser(self.parts, settings, device)
        if ranks.size > 1 and isinstance(self.regime, Defending) and self.regime.companion is not None:
            # Every rank has the whole batch's gradient of a loss of yours, and the sum over ranks counts each of them.
            for parameter in self.regime.companion.parameters():
                parameter.register_hook(lambda gradient: gradient / ranks.size)
        self.average = Average(nn.ModuleDict(self.parts), settings.train.ema, settings.train.mean_from)
        self.state: dict[str, Tensor] = {}  # what the defence remembers between steps
        self.tensors = {"state": self.state, "ema": self.average.tensors}  # saved besides modules and optimiser

        restored = checkpoint.restore(run, self.parts, self.optimiser, self.tensors)
        if run.broken:
            report.say(run.broken)
        self.at = restored or Progress()
        self._check_ranks()
        self._drop_later_records()
        self.meters, self.clock = Meters(self.at.meters), Clock(self.at.seconds)
        self.finite = torch.ones((), dtype=torch.bool, device=device)  # whether every loss so far was
        if restored is None:
            self.save()  # a run can then always be resumed from its folder alone

        self.total = settings.train.epochs * len(self.plan(0))  # batches in the whole run
        self.fast = self._compiles()
        self.step = self._step_template()
        # Each rank passes its own share through live BatchNorm, so its statistics must be made the same again.
        live = [] if settings.model.freeze_batchnorm else self.parts.values()
        self.buffers = [buffer for part in live for buffer in part.buffers()]

    def plan(self, epoch: int) -> list[Tensor]:
        """The batches of an epoch, as positions in the training split."""
        return plan_batches(self.images.split.labels, self.settings.batch, self.key("batches", epoch))

    def save(self) -> None:
        """Write a checkpoint."""
        self.at.seconds, self.at.meters = self.clock.seconds(), self.meters.sums()
        checkpoint.save(self.run, self.parts, self.optimiser, self.tensors, self.at)
        self.clock.saved()

    def checkpoint_due(self) -> bool:
        return self.clock.since_checkpoint() >= self.settings.train.checkpoint_seconds

    def _check_ranks(self) -> None:
        """Refuse ranks that differ; once it returns, all have read the checkpoint that the first may replace."""
        if self.ranks.size > 1:
            self.ranks.alike("images", [each.split.fingerprint() for each in (self.images, self.test)])
            weights = [fingerprint_of(part) for part in self.parts.values()]
            self.ranks.alike("weights or another checkpoint", [*weights, self.at.step])

    def _drop_later_records(self) -> None:
        """Remove metrics and flags of epochs that come after the checkpoint: they will be written again."""
        self.run.cut_metrics(self.at.epoch)
        if self.run.writes and isinstance(flags := self.run.read_json().get("flags"), list):
            self.run.update_json(flags=[flag for flag in flags if (number(dig(flag, "epoch")) or 0) <= self.at.epoch])

    def _compiles(self) -> bool:
        """Whether inner attacks are compiled: only if the run is long enough to gain from it."""
        settings = self.settings
        # About a third of the images is dropped at once, and the passes of training count double.
        work = self.total * settings.batch.work * (5 + getattr(settings.defence, "steps", 0))
        what = "a module of your own" if isinstance(self.model, Trainable) else ""
        what = what or ("a model with adapters" if settings.model.train == "lora" else "")
        check(not what or settings.train.compile != "on", f"{what} is not compiled: leave train.compile at auto")
        able = compiles(settings.train.compile, settings.train.precision, self.device, work)
        if able and what:
            self.report.say(f"{what} is not compiled: each step takes longer here than that of an ah.Embedder")
        elif able and isinstance(self.model, Embedder) and not foldable(self.model.backbone):
            self.report.say("the backbone has no BatchNorm to fold: inner attacks are not compiled, training steps are")
        return able and not what

    def _step_template(self) -> partial[Step]:
        """`Step` with everything that does not change from batch to batch."""
        settings, companion = self.settings, self.regime.companion
        # Live BatchNorm changes from pass to pass. A companion may be trained through another pass than the model's;
        # proxies only read its embeddings.
        plain = settings.model.freeze_batchnorm and (companion is None or isinstance(companion, Proxies))
        return partial(
            Step,
            model=self.model,
            epochs=settings.train.epochs,
            log=self.meters.add,
            precision=self.precision,
            mining_pairs=settings.batch.mining_pairs,
            paired=settings.batch.kind != "images",
            companion=companion,
            fast=self.fast,
            graphed=Graphed(self.model, self.precision) if self.fast and plain else None,
            ranks=self.ranks,
        )


def plan_batches(labels: Tensor, batch: BatchSettings, key: Key) -> list[Tensor]:
    """One epoch as batches of positions in a split with these labels, by pairs, by classes or by images."""
    if batch.kind == "images":
        return image_batches(labels, batch.images, key)
    if batch.kind == "classes":
        return class_batches(labels, batch.classes, batch.instances, key)
    return pair_batches(labels, batch.pairs, key, distinct=batch.distinct)


def _placed(model: Embedder | Trainable, device: torch.device) -> Embedder | Trainable:
    """The same model on its device, in the memory layout that is fast there."""
    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    return model


def _takes_test_images(model: Embedder | Trainable, test: Images) -> None:
    """Refuse test images of a size that the model does not take, before it is trained."""
    views = next(test.plain(torch.arange(1), 1))
    try:
        with frozen(model) as embed, torch.no_grad(), precise():
            embed(views)
    except Exception as error:  # a module may raise anything
        if lacks_memory(error):
            raise
        side = "×".join(map(str, views.shape[2:]))
        raise SettingsError(
            f"the model takes no images of {side} ({reason_of(error)}): leave out data.test_crop"
        ) from error


def _optimiser(parts: dict[str, nn.Module], settings: Settings, device: torch.device) -> torch.optim.Adam:
    groups: list[dict[str, Any]] = []
    for name, part in parts.items():
        base = settings.optimiser.lr
        if name == "companion" and isinstance(settings.defence, LossSettings):
            base = settings.defence.loss_lr or LOSS_RATE * base
        if name == "companion" and isinstance(settings.defence, ProxySettings):
            base = settings.defence.loss_lr or settings.defence.proxy_lr
        params = [p for p in part.parameters() if p.requires_grad]
        if groups and groups[0]["base_lr"] == base:
            groups[0]["params"] += params
        elif params or not groups:
            groups.append({"params": params, "lr": base, "base_lr": base})
    kind = torch.optim.AdamW if settings.optimiser.name == "adamw" else torch.optim.Adam
    return kind(
        groups,
        lr=settings.optimiser.lr,
        fused=device.type == "cuda",
        weight_decay=settings.optimiser.weight_decay,
    )
