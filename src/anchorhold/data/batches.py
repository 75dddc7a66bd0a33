"""The images of each batch: the papers' pairs, classes × instances, or single images.

An epoch is a list of id tensors, drawn at once from a key that includes the epoch.
"""

import torch
from torch import Tensor

from ..errors import DataError, SettingsError
from ..random import Key

__all__ = ["class_batches", "image_batches", "pair_batches"]


def _members(labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids ordered by class; the first place of each class in that order; its size; the class of each image."""
    if labels.numel() == 0:
        raise DataError("the split has no images to make batches of; give one that has")
    _, places, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    return torch.argsort(places, stable=True), sizes.cumsum(0) - sizes, sizes, places


def pair_batches(labels: Tensor, pairs: int, key: Key, *, distinct: bool = False) -> list[Tensor]:
    """One epoch of the papers' SPC-2 pairs: every image once, each with a partner of its class.

    A batch is a flat list of ids a0, p0, a1, p1, …; the last batch may be short. The partner is drawn uniformly from
    the class. It may be the image itself, unless `distinct` is set and the class has other images.

    >>> [len(batch) for batch in pair_batches(torch.tensor([0, 0, 1, 1, 1]), pairs=2, key=Key.of(0))]
    [4, 4, 2]
    """
    if pairs < 1:
        raise SettingsError(f"a batch needs at least 1 pair, got {pairs}")
    by_class, first, sizes, places = _members(labels)
    ids = torch.arange(len(labels), device=labels.device)
    first, sizes = first[places], sizes[places]
    if distinct:
        itself = torch.empty_like(by_class).scatter_(0, by_class, ids) - first
        among = (itself + 1 + key("partner").integers(ids, (sizes - 1).clamp(min=1))) % sizes
    else:
        among = key("partner").integers(ids, sizes)
    partner = by_class[first + among]
    anchor = key("order").permutation(len(labels), labels.device)
    epoch = torch.stack([anchor, partner[anchor]], dim=1).reshape(-1)
    return list(torch.split(epoch, 2 * pairs))


def image_batches(labels: Tensor, images: int, key: Key) -> list[Tensor]:
    """One epoch of single images in random order, every image once; for losses that need no pairs.

    The last batch may be short. A single image that would be left over joins the batch before it, since live BatchNorm
    has no statistics of one image.

    >>> [len(batch) for batch in image_batches(torch.zeros(9), images=4, key=Key.of(0))]
    [4, 5]
    """
    if images < 1:
        raise SettingsError(f"a batch needs at least 1 image, got {images}")
    if labels.numel() == 0:
        raise DataError("the split has no images to make batches of; give one that has")
    batches = list(torch.split(key("order").permutation(len(labels), labels.device), images))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def class_batches(labels: Tensor, classes: int, instances: int, key: Key) -> list[Tensor]:
    """One epoch of batches of `classes` distinct classes × `instances` images; images of a class are adjacent.

    The images of a class are distinct if it has enough; otherwise they repeat as evenly as possible. If `instances` is
    even, positions 2i and 2i+1 have the same class, so the batch is also a batch of pairs.

    >>> labels = torch.tensor([5, 5, 5, 7, 7, 7, 9, 9, 9])
    >>> [labels[batch].tolist() for batch in class_batches(labels, classes=2, instances=2, key=Key.of(1))]
    [[7, 7, 5, 5], [7, 7, 9, 9]]
    """
    if classes < 1 or instances < 1:
        raise SettingsError(f"a batch needs at least 1 class and 1 image of each, got {classes} × {instances}")
    by_class, first, sizes, _ = _members(labels)
    if classes > len(sizes):
        there = "1 class" if len(sizes) == 1 else f"{len(sizes)} classes"
        raise SettingsError(f"the split has {there}, too few for batches of {classes}; set a smaller batch.classes")
    device = labels.device
    count = max(1, len(labels) // (classes * instances))
    batches = []
    for number in range(count):
        scores = key("classes", number).bits(torch.arange(len(sizes), device=device))
        chosen = scores.argsort(stable=True)[:classes]
        size = sizes[chosen].unsqueeze(1)
        column = torch.arange(int(size.max()), device=device)
        # Small classes are padded with their last image; the padded copies sort behind all others.
        members = by_class[first[chosen].unsqueeze(1) + torch.minimum(column, size - 1)]
        draw = key("instances", number).bits(members.reshape(-1)).reshape(members.shape)
        draw = draw.masked_fill(column >= size, torch.iinfo(torch.int64).max)
        shuffled = members.gather(1, draw.argsort(dim=1, stable=True))
        batches.append(shuffled.gather(1, torch.arange(instances, device=device) % size).reshape(-1))
    return batches
