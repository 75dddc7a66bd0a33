"""How hard the triplets of each sampler are, and their C, with a model that has not been trained (001 table 1)."""

from collections.abc import Iterator, Mapping
from itertools import count, islice

import torch
from torch import Tensor

from ..console import Report, Silent
from ..data.batches import class_batches, pair_batches
from ..data.datasets import Dataset
from ..device import device_named
from ..geometry import euclidean
from ..model.frozen import embed_all, frozen
from ..monitors import Images, load_images
from ..random import Key
from ..settings import Settings, check
from ..training import build_model
from ..triplets import SAMPLERS, collapseness, mine
from .collect import number
from .tables import Column, Table

__all__ = ["sampler_hardness", "sampler_table"]


def sampler_hardness(
    data: Dataset,
    settings: Settings,
    batches: int = 0,
    margin: float = 0.2,
    device: str = "auto",
    report: Report | None = None,
) -> dict[str, Tensor]:
    """(batches, 4) for each sampler: of each batch of clean training views mean and variance of H = d(a,p) − d(a,n),
    and its collapseness C at λ = 10, near pairs weighing most (002 equation 5) and far ones, as published code has it.

    The model is the one with which a training with these settings begins. `batches` 0 is one epoch; the short batch
    at its end is left out, since the mean of few triplets varies more.
    """
    check(batches >= 0, f"batches must not be negative, got {batches}; 0 is one epoch")
    check(margin > 0, f"the margin is semihard's window and must be above 0, got {margin}")
    report, where, key = report or Silent(), device_named(device), Key.of(settings.train.seed)
    model = build_model(settings, data).to(where)
    images = load_images(data.train, settings.data, where, report)
    total = batches or len(_plan(images, settings, key("batches", 0)))
    found: dict[str, list[Tensor]] = {name: [] for name in SAMPLERS}
    with frozen(model) as embed, report.task("embedding batches", total) as advance:
        for done, (ids, views, own) in enumerate(islice(_batches(images, settings, key), total), 1):
            e, labels = embed_all(embed, [views]), images.labels[ids.to(where)]
            for name, rows in found.items():
                chosen = mine(name, e, labels, own, group=settings.batch.mining_pairs, margin=margin)
                anchor, *others = e[torch.stack([chosen.anchor, chosen.positive, chosen.negative])].double()
                positive, negative = (euclidean(anchor, other) for other in others)
                h, c = positive - negative, [collapseness(positive, negative, far=far) for far in (False, True)]
                rows.append(torch.stack([h.mean(), h.var(correction=0), *c]).cpu())
            advance(done, "")
    return {name: torch.stack(rows) for name, rows in found.items()}


def _batches(images: Images, settings: Settings, key: Key) -> Iterator[tuple[Tensor, Tensor, Key]]:
    """Ids and augmented images of batch after batch, as training would see them, with a key for the draws of each."""
    for epoch in count():
        plan = _plan(images, settings, key("batches", epoch))
        keys = (key("augment", epoch, place) for place in range(len(plan)))
        for place, (ids, views) in enumerate(zip(plan, images.augmented(plan, keys))):
            yield ids, views, key("mine", epoch, place)


def _plan(images: Images, settings: Settings, key: Key) -> list[Tensor]:
    b = settings.batch
    if b.kind == "classes":
        return class_batches(images.split.labels, b.classes, b.instances, key)
    plan = pair_batches(images.split.labels, b.pairs, key, distinct=b.distinct)
    return [ids for ids in plan if len(ids) == len(plan[0])]


def sampler_table(found: Mapping[str, Tensor]) -> Table:
    """E[H], its variance twice: of the means of the batches, as print has it, and of the triplets in a batch; E[C]."""
    columns = (
        Column("sampler", "sampler"),
        Column("mean", "E[H]", 4),
        Column("variance", "Var[H] of batch means", 6),
        Column("within", "Var[H] within a batch", 6),
        Column("c", "E[C]", 4),
        Column("c_coded", "E[C] as coded", 4),
    )
    rows = tuple(
        (name, mean, number(rows[:, 0].var().item()) if len(rows) > 1 else None, *others)
        for name, rows, (mean, *others) in ((name, rows, rows.mean(0).tolist()) for name, rows in found.items())
    )
    many = len(next(iter(found.values())))
    of = f"{many:,} {'batches' if many > 1 else 'batch'}"
    notes = (
        f"H = d(a,p) − d(a,n) over {of}; 001 table 1 prints the first variance",
        "C is 002's collapseness, λ = 10; as coded, far pairs weigh most",
    )
    return Table(columns, rows, notes)
