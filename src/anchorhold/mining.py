"""Triplets from any embeddings and labels, in any order: for a training loop of yours.

Training in this package has batches in pair order, whose triplets `triplets.mine` draws. The samplers are the same.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .errors import DataError, check
from .geometry import distance_matrix, unit
from .random import Key
from .triplets import Sampler, Triplets, View, chances, draw

__all__ = ["mine", "mine_any", "numbered"]


def mine(
    embeddings: Tensor,
    labels: Tensor | Sequence[int] | Sequence[str],
    sampler: str | Sampler = "semihard",
    *,
    anchors: Literal["all", "half"] = "all",
    margin: float = 0.2,
    lower: float | None = None,
    upper: float | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw triplets from a batch: the positions (T,) of anchors, positives and negatives.

    An image whose class has no other image in the batch has no positive: it is never an anchor, and may be a negative.
    A batch of one class has no negative, and no triplets. A positive is never the anchor itself. The result fits
    `indices_tuple` of a loss of pytorch-metric-learning.

    Args:
        embeddings: (N, D), of any length; distances are between unit vectors.
        labels: (N,) numbers or names, in any order.
        sampler: random, semihard, softhard, distance, hardest, or yours. Yours is a function of a `triplets.View`.
            It returns two tables (anchors, N): the chance of each sample to be the positive, and the negative.
        anchors: all images that have a positive; or half of each class, at least one, as training in pairs does.
        margin: how far beyond the positive a semihard negative may lie.
        lower: distance sampler: nearer negatives count as if at this distance.
        upper: distance sampler: farther negatives are not drawn.
        seed: of the draws. Give another one in each step.

    >>> e = torch.eye(4)[[0, 1, 0, 1, 2]]
    >>> mine(e, ["cat", "dog", "cat", "dog", "owl"], "hardest")[:2]
    (tensor([0, 1, 2, 3]), tensor([2, 3, 0, 1]))
    """
    check(isinstance(embeddings, Tensor) and embeddings.ndim == 2, "embeddings must be a tensor (N, D)")
    numbers = numbered(labels).to(embeddings.device)
    if numbers.shape != (len(embeddings),):
        raise DataError(f"{len(embeddings)} embeddings and {len(numbers)} labels; give each embedding its label")
    check(anchors in ("all", "half"), f"anchors cannot be {anchors!r}; there are: all, half")
    key = Key.of(seed)("mine")
    found = mine_any(sampler, embeddings, numbers, key, half=anchors == "half", margin=margin, lower=lower, upper=upper)
    return found.anchor, found.positive, found.negative


def numbered(labels: Tensor | Sequence[int] | Sequence[str]) -> Tensor:
    """Labels as a tensor of numbers; names are numbered in the order of the alphabet."""
    if isinstance(labels, Tensor):
        return labels.detach().reshape(-1) if labels.ndim <= 1 else labels.detach()
    values = list(labels)
    names = [value for value in values if isinstance(value, str)]
    if values and len(names) == len(values):
        order = {name: number for number, name in enumerate(sorted(set(names)))}
        return torch.tensor([order[name] for name in names], dtype=torch.long)
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise DataError("labels must be all numbers or all names, one for each embedding") from None


@torch.no_grad()
def mine_any(
    sampler: str | Sampler,
    embeddings: Tensor,
    labels: Tensor,
    key: Key,
    *,
    half: bool = False,
    margin: float = 0.2,
    lower: float | None = None,
    upper: float | None = None,
) -> Triplets:
    """Triplets of a batch in any order; anchors draw by their position. See `mine`."""
    e, labels = unit(embeddings.detach()), labels.to(embeddings.device)
    same = labels.unsqueeze(1) == labels
    itself = torch.eye(len(e), dtype=torch.bool, device=e.device)
    others = same & ~itself
    able = others.any(1) & ~same.all(1)
    anchor = torch.nonzero(able & _first_half(labels, key("half")) if half else able).squeeze(1)
    if not len(anchor):
        return Triplets(anchor, anchor.clone(), anchor.clone())
    partners = draw(others[anchor], key("partner").uniform(anchor))
    distances = distance_matrix(e, e)[anchor]
    view = View(distances, same[anchor], partners, e.shape[1], margin, lower, upper, anchor)
    positives, negatives = chances(sampler, view)
    # Softhard may name the anchor itself, next to the rest of its class.
    positives = positives.masked_fill(itself[anchor], 0)
    bare = (positives.double().sum(1) <= 0).any()
    check(not bool(bare), f"the sampler {sampler} leaves an anchor no positive but itself: give another a chance")
    tables = (("positive", positives), ("negative", negatives))
    return Triplets(anchor, *(draw(table, key(part).uniform(anchor)) for part, table in tables))


def _first_half(labels: Tensor, key: Key) -> Tensor:
    """Which images are in the first half of their class, rounded up, in random order."""
    order = key.permutation(len(labels), labels.device)
    mixed = labels[order]
    equal = mixed.unsqueeze(1) == mixed
    rank = equal.tril(-1).sum(1)  # how many of its class come before it
    chosen = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    chosen[order] = 2 * rank < equal.sum(1)
    return chosen
