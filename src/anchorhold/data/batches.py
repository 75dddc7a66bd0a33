"""Which images meet in a batch: the papers' pairs, or classes × instances.

An epoch is a list of id tensors, made at once from a key that already carries the epoch.
"""

import torch
from torch import Tensor

from ..errors import DataError, SettingsError
from ..random import Key

__all__ = ["class_batches", "pair_batches"]


def _members(labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids ordered by class; each class's first place in that order; its size; the class of each image."""
    if labels.numel() == 0:
        raise DataError("there are no images to make batches of; give a split that has some")
    _, places, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    return torch.argsort(places, stable=True), sizes.cumsum(0) - sizes, sizes, places


def pair_batches(labels: Tensor, pairs: int, key: Key, *, distinct: bool = False) -> list[Tensor]:
    """One epoch of the papers' SPC-2 pairs: every image once, each with a partner of its class.

    A batch is a flat list of ids a0, p0, a1, p1, …; the partner is uniform over the class, the image itself
    included unless `distinct` and the class has another, and the last batch may be short.

    >>> [len(batch) for batch in pair_batches(torch.tensor([0, 0, 1, 1, 1]), pairs=2, key=Key.of(0))]
    [4, 4, 2]
    """
    if pairs < 1:
        raise SettingsError(f"a batch of {pairs} pairs is none; ask for 1 or more")
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


def class_batches(labels: Tensor, classes: int, instances: int, key: Key) -> list[Tensor]:
    """One epoch of batches of `classes` distinct classes × `instances` images, those of a class side by side.

    The images of a class are distinct unless it has fewer, and then each comes as evenly often as can be.
    With `instances` even, positions 2i and 2i+1 are of one class: such a batch is a pair batch too.

    >>> labels = torch.tensor([5, 5, 5, 7, 7, 7, 9, 9, 9])
    >>> [labels[batch].tolist() for batch in class_batches(labels, classes=2, instances=2, key=Key.of(1))]
    [[7, 7, 5, 5], [7, 7, 9, 9]]
    """
    if classes < 1 or instances < 1:
        raise SettingsError(f"a batch of {classes} classes × {instances} images is none; ask for 1 or more of each")
    by_class, first, sizes, _ = _members(labels)
    if classes > len(sizes):
        raise SettingsError(f"a batch of {classes} classes needs as many, but there are {len(sizes)}; ask for fewer")
    device = labels.device
    count = max(1, len(labels) // (classes * instances))
    batches = []
    for number in range(count):
        scores = key("classes", number).bits(torch.arange(len(sizes), device=device))
        chosen = scores.argsort(stable=True)[:classes]
        size = sizes[chosen].unsqueeze(1)
        column = torch.arange(int(size.max()), device=device)
        # Short classes are padded with their last image, whose padded copies sort behind every real one.
        members = by_class[first[chosen].unsqueeze(1) + torch.minimum(column, size - 1)]
        draw = key("instances", number).bits(members.reshape(-1)).reshape(members.shape)
        draw = draw.masked_fill(column >= size, torch.iinfo(torch.int64).max)
        shuffled = members.gather(1, draw.argsort(dim=1, stable=True))
        batches.append(shuffled.gather(1, torch.arange(instances, device=device) % size).reshape(-1))
    return batches
