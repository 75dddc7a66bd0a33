"""What training minimises: the triplet loss and the contrastive loss; and losses of cosines to proxies of classes.

The first two take embeddings without normalisation (the recipes give unit vectors) and use unsquared distances. They
are not torch's, because torch refuses a margin of zero, which ICS needs. Without triplets each is 0, with a gradient
of 0.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .geometry import Distance, euclidean

__all__ = [
    "LOSSES",
    "contrastive",
    "contrastive_surrogate",
    "contrastive_terms",
    "divergence",
    "proxy_anchor",
    "proxy_softmax",
    "triplet",
    "triplet_surrogate",
]


def triplet(
    a: Tensor,
    p: Tensor,
    n: Tensor,
    margin: float = 0.2,
    distance: Distance = euclidean,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Triplet loss max(0, d(a, p) - d(a, n) + γ), Zhou & Patel 2022, eq. 1; the mean includes triplets at zero.

    >>> a, p, n = torch.tensor([[[0.0]], [[1.0]], [[3.0]]])
    >>> triplet(a, p, n, margin=2.5), triplet(a, p, n, margin=0)
    (tensor(0.5000), tensor(0.))
    """
    loss = torch.relu(distance(a, p) - distance(a, n) + margin)
    if reduction == "mean":
        return _mean(loss)
    return loss.sum() if reduction == "sum" else loss


def contrastive_terms(
    a: Tensor, p: Tensor, n: Tensor, margin: float = 1.0, distance: Distance = euclidean
) -> tuple[Tensor, Tensor]:
    """The two sides of the contrastive loss, ADML, eq. 3, for each pair: d(a, p) and max(0, α - d(a, n))."""
    return distance(a, p), torch.relu(margin - distance(a, n))


def contrastive(
    a: Tensor,
    p: Tensor,
    n: Tensor,
    margin: float = 1.0,
    distance: Distance = euclidean,
    reduction: Literal["active", "all"] = "active",
) -> Tensor:
    """Contrastive loss, ADML, eq. 3: matching pairs add their distance, others the shortfall to the margin.

    Two means are in use. `active`, RobRank's: mean d(a, p) + mean of α - d(a, n) over the pairs that are
    nearer than α, zero when none is. `all`, ADML's: one mean over all pairs, matching or not.

    >>> a, p, n = torch.tensor([[[0.0], [0.0]], [[0.5], [0.5]], [[0.6], [9.0]]])
    >>> contrastive(a, p, n), contrastive(a, p, n, reduction="all")
    (tensor(0.9000), tensor(0.3500))
    """
    pull, push = contrastive_terms(a, p, n, margin, distance)
    if reduction == "all":
        return _mean(torch.cat([pull, push]))
    return _mean(pull) + push.sum() / (push > 0).sum().clamp(min=1)


def contrastive_surrogate(distances: Tensor, same: Tensor, margin: float = 1.0) -> Tensor:
    """(U,) the contrastive loss of each sample against a whole set, ADML, eq. 7: (1/n) Σ_j l_c(x_i, x_j).

    `distances` (U, n) are those to every member of the set, and `same` (U, n) says which members share the class. The
    sum runs over the whole set, as the paper writes it: a sample that is in the set counts itself as a match.

    >>> contrastive_surrogate(torch.tensor([[0.0, 0.5, 0.7]]), torch.tensor([[True, True, False]]))
    tensor([0.2667])
    """
    return torch.where(same, distances, torch.relu(margin - distances)).mean(1)


def triplet_surrogate(distances: Tensor, same: Tensor, margin: float = 0.2, most: int | None = None) -> Tensor:
    """(U,) the triplet loss of each sample against a whole set, ADML, eq. 8: its mean over all matches and non-matches.

    Arguments as in `contrastive_surrogate`; it is 0 where one of the two is missing. `most` is the largest number of
    matches of a sample. Give it where it is known: to find it waits for the GPU.

    >>> triplet_surrogate(torch.tensor([[0.0, 0.5, 0.6]]), torch.tensor([[True, True, False]]))
    tensor([0.0500])
    """
    most = int(same.sum(1).max()) if most is None and same.numel() else most or 0
    # Matches come first, padded to one number: the memory is U × most × n, not U × n × n.
    matched, places = same.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    pull = distances.gather(1, places[:, :most])
    terms = torch.relu(pull[:, :, None] - distances[:, None, :] + margin)
    counts = matched[:, :most, None].bool() & ~same[:, None, :]
    return torch.where(counts, terms, 0).sum((1, 2)) / (same.sum(1) * (~same).sum(1)).clamp(min=1)


def proxy_softmax(cosines: Tensor, targets: Tensor, scale: float = 16.0, smoothing: float = 0.0) -> Tensor:
    """Normalised softmax, −log softmax_y(scale · cos) of each image: cosines (B, C) and classes (B,) to (B,).

    With smoothing s the target is 1 − s + s/C for the own class and s/C for each other one.

    >>> proxy_softmax(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), scale=1.0)
    tensor([0.3133])
    """
    return F.cross_entropy(scale * cosines, targets, reduction="none", label_smoothing=smoothing)


def proxy_anchor(cosines: Tensor, targets: Tensor, scale: float = 32.0, margin: float = 0.1) -> Tensor:
    """Proxy-Anchor loss (Kim et al. 2020, eq. 4) of a batch: cosines (B, C) and classes (B,) to one number.

    mean over classes in the batch of log(1 + Σ_own exp(−α (cos − δ)))
    + mean over all classes of log(1 + Σ_others exp(α (cos + δ))), where α is the scale and δ the margin.

    >>> proxy_anchor(torch.tensor([[0.5, -0.5]]), torch.tensor([0]), scale=1.0, margin=0.0)
    tensor(0.7111)
    """
    own = F.one_hot(targets, cosines.shape[1]).bool()
    pull = _softplus_sum(-scale * (cosines - margin), own)
    push = _softplus_sum(scale * (cosines + margin), ~own)
    there = own.any(0)
    return pull.sum() / there.sum().clamp(min=1) + push.mean()


def _softplus_sum(exponents: Tensor, chosen: Tensor) -> Tensor:
    """log(1 + Σ_b exp(x_bc)) over the chosen rows of each column; 0 where none is chosen."""
    kept = exponents.masked_fill(~chosen, -torch.inf)
    return torch.logsumexp(torch.cat([torch.zeros_like(kept[:1]), kept]), dim=0)


def divergence(logits: Tensor, others: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ_c p_c (log p_c − log q_c) of each row, p = softmax(logits), q = softmax(others): (B, C) to (B,).

    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    tensor([0.])
    """
    p, q = logits.log_softmax(1), others.log_softmax(1)
    return (p.exp() * (p - q)).sum(1)


def _mean(terms: Tensor) -> Tensor:
    """The mean; 0 for no terms, where torch's mean is NaN."""
    return terms.mean() if terms.numel() else terms.sum()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {"triplet": triplet, "contrastive": contrastive}
