"""Hardness H and collapseness C of the triplets of each sampler, with an untrained model.

Table 1 of hm (Zhou & Patel 2022): "statistics over 1000 mini-batches", of 112 images each. Its variance is that of
the batch means. It falls as 1 / triplets in a batch, so it depends on the batch size.
"""

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from ..config.recipes import settings_from
from ..config.settings import Settings
from ..console import Report, Silent
from ..data.images import Images, load_images
from ..data.splits import Dataset
from ..device import device_named
from ..errors import check
from ..geometry import euclidean
from ..interface import argument
from ..model.frozen import embed_all, frozen
from ..random import Key
from ..report.tables import Column, Table
from ..runs.fields import number
from ..triplets import SAMPLERS, collapseness, mine
from .preparing import build_model
from .trainer import plan_batches

__all__ = ["BATCHES", "sampler_hardness", "sampler_settings", "sampler_table"]

BATCHES, PAIRS = 1000, 56  # as in the table


def sampler_settings(changes: Mapping[str, Any]) -> Settings:
    """Settings of natural training with these changes; batches are those of the table unless you change them."""
    batch = changes.get("batch", {})
    # A `batch` that is not a section is refused later, where settings are built.
    table = {"batch": {"pairs": PAIRS, **batch}} if isinstance(batch, dict) else {}
    return settings_from("natural", {**changes, **table})


def sampler_hardness(
    data: Dataset,
    settings: Settings,
    batches: int = BATCHES,
    margin: float = 0.2,
    device: str = "auto",
    report: Report | None = None,
) -> dict[str, Tensor]:
    """Hardness H = d(a,p) − d(a,n) and collapseness C of each sampler's triplets, on clean augmented images.

    The model is the one with which a training by these settings begins.

    Args:
        data: its training split is used.
        settings: of the training.
        batches: number of batches; 0 is one epoch without its short last batch, whose mean varies more.
        margin: the window of the semihard sampler.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress and messages; None is silent.

    Returns:
        For each sampler (batches, 7): mean and variance of H, then C at λ = 10 in two forms. The first gives near
        pairs the largest weight (Tian et al. 2024, eq. 5), the second far pairs, as the published code does. Then
        shares of the triplets: with the anchor as its own positive, with H < −γ, and with both.
    """
    check(batches >= 0, f"{argument('batches')} must be at least 0, got {batches}; 0 is one epoch")
    check(margin > 0, f"{argument('margin')} must be above 0, got {margin}")
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
                itself, easy = chosen.positive == chosen.anchor, h < -settings.defence.margin
                shares = [each.double().mean() for each in (itself, easy, itself & easy)]
                rows.append(torch.stack([h.mean(), h.var(correction=0), *c, *shares]).cpu())
            advance(done, "")
    return {name: torch.stack(rows) for name, rows in found.items()}


def _batches(images: Images, settings: Settings, key: Key) -> Iterator[tuple[Tensor, Tensor, Key]]:
    """Ids, augmented images and a key for each batch, as training would see them."""
    for epoch in count():
        plan = _plan(images, settings, key("batches", epoch))
        keys = (key("augment", epoch, place) for place in range(len(plan)))
        for place, (ids, views) in enumerate(zip(plan, images.augmented(plan, keys))):
            yield ids, views, key("mine", epoch, place)


def _plan(images: Images, settings: Settings, key: Key) -> list[Tensor]:
    plan = plan_batches(images.split.labels, settings.batch, key)
    return [ids for ids in plan if len(ids) == len(plan[0])]


def sampler_table(found: Mapping[str, Tensor]) -> Table:
    """E[H], E[C] and two variances of H: of the batch means, as in the paper, and of the triplets in a batch.

    Then the share of triplets whose positive is the anchor itself: of all, and of those with H < −γ, which hardness
    manipulation attacks first.
    """
    columns = (
        Column("sampler", "sampler"),
        Column("mean", "E[H]", 4),
        Column("variance", "Var[H] of batch means", 6),
        Column("within", "Var[H] within a batch", 6),
        Column("c", "E[C]", 4),
        Column("c_coded", "E[C] as coded", 4),
        Column("own", "p = a, %", 1),
        Column("own_easy", "p = a, % of H < −γ", 1),
    )
    rows = tuple(
        (
            *(name, mean, number(rows[:, 0].var().item()) if len(rows) > 1 else None, *others),
            *(100 * own, 100 * both / easy if easy else None),
        )
        for name, rows, (mean, *others, own, easy, both) in (
            (name, rows, rows.mean(0).tolist()) for name, rows in found.items()
        )
    )
    many = len(next(iter(found.values())))
    of = f"{many:,} {'batches' if many > 1 else 'batch'}"
    notes = (
        f"H = d(a,p) − d(a,n) over {of}; the first variance is that of hm's table 1",
        "C is Tian et al. 2024's collapseness, λ = 10; as coded, far pairs weigh most",
        "p = a: the anchor is its own positive; hm attacks triplets with H < −γ first",
    )
    return Table(columns, rows, notes)
