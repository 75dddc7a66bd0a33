"""What is looked at while a model trains: signs of collapse, retrieval on the test split, and under attack."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .attacks.recall import Gallery, attack_recall
from .console import Report
from .data.batches import pair_batches
from .data.datasets import Split
from .data.store import ResidentStore, Store, centre_crop, crop_flip, decode, readable, resident
from .data.stream import StreamStore, memory_left
from .geometry import distance_matrix, euclidean
from .metrics import evaluate
from .model.frozen import Embed, embed_all, frozen
from .perturb.ascend import Budget
from .perturb.ball import Ball
from .random import Key
from .ranks import Ranks, neighbours
from .settings import DataSettings, TrainSettings
from .triplets import collapseness, hardness, mine

__all__ = ["Images", "load_images", "look", "recall_under_attack", "retrieval", "signs_of_collapse"]


@dataclass(frozen=True)
class Images:
    """A split with its decoded images, and how they are cropped."""

    split: Split
    store: Store
    labels: Tensor  # on the device
    crop: int | None
    flip: bool
    crop_least: float = 0.0
    resize: int | None = None  # the side to which files were brought
    ranks: Ranks = field(default_factory=Ranks)

    def augmented(self, plan: list[Tensor], keys: Iterator[Key]) -> Iterator[Tensor]:
        """Training views of the planned ids: random crop and flip, keyed by the place in the batch."""
        for frames, key in zip(self._frames(plan), keys):
            slots = torch.arange(len(frames))
            yield crop_flip(frames, self.crop, key, slots, flip=self.flip, least=self.crop_least)

    def _frames(self, plan: list[Tensor]) -> Iterator[Tensor]:
        """The frames of whole batches; what is read from files every rank reads a share of."""
        if self.ranks.size == 1 or isinstance(self.store, ResidentStore):
            yield from self.store.frames(plan)
            return
        shares = [ids[self.ranks.share(len(ids))] for ids in plan]
        for ids, frames in zip(plan, self.store.frames(shares)):
            yield self.ranks.gathered(frames, len(ids))

    def embedded(self, embed: Embed, batch: int = 256) -> Tensor:
        """Embeddings of all test views, in fp32; whole batches go to ranks."""
        parts = list(torch.arange(len(self.labels)).split(batch))

        def work(mine: Sequence[Tensor]) -> Tensor:
            return embed_all(embed, self.plain(torch.cat(list(mine)), batch))

        return self.ranks.spread(parts, work, [len(part) for part in parts])

    def plain(self, ids: Tensor | None = None, batch: int = 256) -> Iterator[Tensor]:
        """Test views in order, in batches."""
        ids = torch.arange(len(self.labels)) if ids is None else ids
        for frames in self.store.frames(list(ids.split(batch))):
            yield centre_crop(frames, self.crop)


def load_images(
    split: Split,
    settings: DataSettings,
    device: torch.device,
    report: Report,
    ranks: Ranks | None = None,
) -> Images:
    """A split in the device's memory, in the host's where it does not fit, or read again at every need.

    Files are decoded once beforehand in any case, so that a bad one is met now and not hours later.
    """
    ranks = ranks or Ranks()
    # What one rank reads a share of, all do; and those before us may have filled the memory.
    size, streams = settings.resize or None, ranks.any(_streams(split, settings))
    with report.task(f"{'checking' if streams else 'decoding'} {split.name}", len(split)) as advance:
        how: dict[str, Any] = {
            "workers": settings.workers or None,
            "on_bad_image": settings.on_bad_image,
            "progress": lambda done, total: advance(done, ""),
        }
        store: Store
        if streams:
            kept, skipped = readable(split, size, **how)
            store = StreamStore(kept.paths or (), settings.resize, device, settings.workers)
            place = f"streamed by {store.workers} processes"
        else:
            decoded = decode(split, size, **how)
            kept, skipped, store = decoded.split, decoded.skipped, resident(decoded.images, device)
            place = f"held in {'GPU' if store.images.is_cuda else 'host'} memory"
    if skipped:
        report.say(f"skipped {len(skipped)} unreadable images of {split.name}; first: {skipped[0]}")
    if split.paths is not None:
        report.say(f"{split.name}: {len(kept):,} images, {_bytes(kept, settings) / 1e9:.1f} GB, {place}")
    labels = kept.labels.to(device)
    crop = settings.crop or None
    return Images(kept, store, labels, crop, settings.flip, settings.crop_least, size, ranks)


def _bytes(split: Split, settings: DataSettings) -> int:
    return len(split) * settings.resize**2 * 3


def _streams(split: Split, settings: DataSettings) -> bool:
    """Whether the images are read again at every need: on request, or where they would fill half of what is left."""
    if split.paths is None or settings.store == "resident":
        return False
    return settings.store == "stream" or _bytes(split, settings) * neighbours() > memory_left() // 2


def signs_of_collapse(model: nn.Module, images: Images, key: Key) -> dict[str, float]:
    """What tells a collapse, on clean random triplets of one batch that is the same in every epoch.

    `separability` is (mean d(a,n) − mean d(a,p)) / d̄ (002 section 4.4), d̄ (`mean_distance`) the mean distance over
    all pairs of the batch: near 0, or with d̄ near 0, the model has collapsed. Beside them the triplets' hardness,
    mean and variance, their collapseness C (002 equation 5), the mean cosine of clean pairs, which ICS raises, and the
    mean distances within classes and between them, an image and itself apart (002 table 5).
    """
    (ids, *_) = pair_batches(images.split.labels, 256, key)
    with frozen(model) as embed:
        e = embed_all(embed, images.plain(ids))
    chosen = mine("random", e, images.labels[ids.to(e.device)], key)
    a, p, n = e[chosen.anchor], e[chosen.positive], e[chosen.negative]
    h, pairs = hardness(a, p, n), len(e) * (len(e) - 1)
    distances, labels, ids = distance_matrix(e, e), images.labels[ids.to(e.device)], ids.to(e.device)
    mean, same, itself = distances.sum() / pairs, labels[:, None] == labels, ids[:, None] == ids
    signs = {
        "separability": -h.mean() / mean.clamp(min=1e-12),
        "mean_distance": mean,
        "hardness": h.mean(),
        "hardness_variance": h.var(correction=0),
        "collapseness": collapseness(euclidean(a, p), euclidean(a, n)),
        "mean_cosine": (e.sum(0).square().sum() - e.square().sum()) / pairs,
    }
    for name, pick in (("intra_distance", same & ~itself), ("inter_distance", ~same)):
        if pick.any():  # a set may have classes of one image
            signs[name] = distances[pick].mean()
    return {name: sign.item() for name, sign in signs.items()}


def look(
    model: nn.Module,
    test: Images,
    train: TrainSettings,
    key: Key,
    precision: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Retrieval on the test split and, on request, under attack."""
    found, gallery = retrieval(model, test)
    if train.attack_eps > 0:
        steps = train.attack_steps
        budget = Budget(steps, 2.5 * train.attack_eps / max(steps, 1), start="random", keep="best")
        ball = Ball(train.attack_eps)
        found["r1_attacked"] = recall_under_attack(
            model, test, gallery, ball, budget, key, train.attack_queries, precision()
        )
    return found


def retrieval(model: nn.Module, images: Images) -> tuple[dict[str, float], Gallery]:
    """R@1, R@2 and mAP@R of a split in percent, its queries against its gallery, and the gallery's embeddings."""
    with frozen(model) as embed:
        gallery = Gallery(images.embedded(embed), images.labels)
    asks = images.split.queries
    if asks is None:
        metrics = evaluate(gallery.embeddings, gallery.labels)
    else:
        asks = asks.to(images.labels.device)
        queries, gallery = (Gallery(gallery.embeddings[side], gallery.labels[side]) for side in (asks, ~asks))
        metrics = evaluate(
            queries.embeddings, queries.labels, gallery=gallery.embeddings, gallery_labels=gallery.labels
        )
    return {"r1": 100 * metrics.r1, "r2": 100 * metrics.r2, "map_r": 100 * metrics.map_r}, gallery


def recall_under_attack(
    model: nn.Module,
    images: Images,
    gallery: Gallery,
    ball: Ball,
    budget: Budget,
    key: Key,
    queries: int = 0,
    precision: AbstractContextManager[object] | None = None,
) -> float:
    """R@1 in percent when each query is perturbed; a keyed sample of `queries` of them, 0 for all."""
    asks = images.split.queries
    able = torch.arange(len(images.labels)) if asks is None else asks.nonzero().squeeze(1)
    chosen = able[key("queries").permutation(len(able))[: queries or len(able)]].sort().values
    parts = list(chosen.split(256))

    def survivors(mine: Sequence[Tensor]) -> Tensor:
        kept = []
        for ids, views in zip(mine, images.plain(torch.cat(list(mine)))):
            here = ids.to(views.device)
            own = here if asks is None else torch.full_like(here, -1)  # a query of its own is not in the gallery
            kept.append(attack_recall(embed, views, images.labels[here], own, gallery, ball, budget, key, ids=here))
        return torch.cat(kept).long()

    with frozen(model) as embed, precision or nullcontext():
        kept = images.ranks.spread(parts, survivors, [len(part) for part in parts])
    return 100 * int(kept.sum()) / len(chosen)
