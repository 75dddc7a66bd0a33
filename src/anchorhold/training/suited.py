"""Batches that suit a small data set of yours: some ten steps an epoch, where the papers' batches give one or two."""

from collections.abc import Collection
from dataclasses import replace

import torch

from ..config.settings import Settings
from ..data.settings import DATASET_NAMES, BatchSettings
from ..data.splits import Split

__all__ = ["STEPS", "smaller_batch", "steps_of", "suited"]

STEPS = 10  # an epoch should have at least this many
_LEAST = 8  # pairs: a smaller batch has hardly any triplets to choose from
_OWN = ("folder", "csv")  # of the named data sets those of yours; the others have the papers' batches


def suited(settings: Settings, name: str, train: Split, fixed: Collection[str] = ()) -> tuple[Settings, str]:
    """The settings with a batch for `train` where it is small, and a note; "" where nothing changed.

    `name` is that of the data set: those of the papers keep their batches. `fixed` are keys that the user set.
    """
    if name in DATASET_NAMES and name not in _OWN:
        return settings, ""
    before = settings.batch
    after = smaller_batch(before, train)
    sizes = ("classes", "instances") if before.kind == "classes" else (before.kind,)
    if after == before or any(f"batch.{size}" in fixed for size in sizes):
        return settings, ""
    key, old, new = f"batch.{sizes[0]}", getattr(before, sizes[0]), getattr(after, sizes[0])
    note = (
        f"{key} = {new} instead of {old}, for {steps_of(after, train)} steps an epoch with {len(train):,} training "
        f"images; set {key} to choose it yourself"
    )
    return replace(settings, batch=after), note


def steps_of(batch: BatchSettings, train: Split) -> int:
    """The batches of an epoch."""
    if batch.kind == "pairs":
        return -(-len(train) // batch.pairs)
    if batch.kind == "images":  # a single image that is left over joins the batch before it
        return max(1, -(-(len(train) - 1) // batch.images))
    return max(1, len(train) // (batch.classes * batch.instances))


def smaller_batch(batch: BatchSettings, train: Split) -> BatchSettings:
    """The batch that gives about STEPS steps an epoch, or the same one if it does; it is never a larger one."""
    if batch.kind == "pairs":
        if steps_of(batch, train) >= STEPS:
            return batch
        few = len(train) // STEPS
        return replace(batch, pairs=min(batch.pairs, max(_LEAST, few - few % 4)))
    if batch.kind == "images":
        few = max(2 * _LEAST, len(train) // STEPS // 4 * 4)
        return batch if steps_of(batch, train) >= STEPS else replace(batch, images=min(batch.images, few))
    there = len(torch.unique(train.labels))  # a batch cannot have more classes than the data
    if steps_of(batch, train) >= STEPS and batch.classes <= there:
        return batch
    few = max(len(train) // (STEPS * batch.instances), -(-2 * _LEAST // batch.instances))
    return replace(batch, classes=max(2, min(batch.classes, there, few)))
