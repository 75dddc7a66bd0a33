"""Distances between classes and between images, and whether retrieval beats chance, with standard errors.

Separability is (mean d to other classes − mean d to the own class) / d̄ of clean pairs (Tian et al. 2024, section 4.4),
where d̄ is the mean distance of two images. From few images the estimate is poor. With 2 classes of 10 images its error
is about 0.1, five times the difference between a collapsed and a sound model. Every judgement therefore uses an
interval, not a number.

Errors of distances are jackknife errors: each image is left out once, as a query and as a gallery item, because all
pairs of one image are correlated. The error of R@1 is its spread over redrawn labels with fixed neighbours. That counts
a hub, which answers many queries, once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .geometry import distance_rows
from .random import Key

__all__ = ["Estimate", "Separation", "separation"]

ONE_SIDED = 1.645  # standard errors: half a 90 % interval, exceeded on each side in 1 of 20 cases
SHUFFLES = 200
_CELLS = 2**22  # query × gallery pairs at a time


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error."""

    value: float
    error: float

    @property
    def low(self) -> float:
        return self.value - ONE_SIDED * self.error

    @property
    def high(self) -> float:
        return self.value + ONE_SIDED * self.error


@dataclass(frozen=True)
class Separation:
    """The result of `separation`; NaN where no query has both a match and a non-match."""

    separability: Estimate
    distance: Estimate  # d̄
    skill: Estimate  # (R@1 − chance) / (1 − chance): 0 is chance, 1 is always right
    r1: float
    chance: float  # R@1 of a random list
    queries: int


@torch.no_grad()
def separation(
    queries: Tensor, labels: Tensor, gallery: Tensor, gallery_labels: Tensor, own: Tensor, key: Key
) -> Separation:
    """Measure queries (Q, D) against a gallery (G, D); `own` (Q,) is each query's own item there, or -1.

    >>> e, labels = torch.eye(4), torch.tensor([0, 0, 1, 1])
    >>> found = separation(e, labels, e, labels, torch.arange(4), Key.of(0))
    >>> found.separability.value, round(found.distance.value, 3), round(found.chance, 3)
    (0.0, 1.414, 0.333)
    """
    rows: list[Tensor] = []  # (q, 4): differences, mean distances, nearest items, shares of matches
    lacking = _Lacking.of(len(gallery), gallery.device)
    for part, d in distance_rows(queries, gallery, exclude=own, chunk=min(64, max(1, _CELLS // max(len(gallery), 1)))):
        known = d.isfinite()
        nearest = d.masked_fill_(~known, torch.inf).argmin(1)
        d = d.masked_fill_(~known, 0).double()
        match = (labels[part, None] == gallery_labels) & known
        other = known & ~match
        counts = [which.sum(1, keepdim=True).double() for which in (other, match, known)]
        sums = [(d * which).sum(1, keepdim=True) for which in (other, match, known)]
        difference = sums[0] / counts[0] - sums[1] / counts[1]
        mean = sums[2] / counts[2]
        # The same for each query with each gallery item left out.
        without = (sums[0] - d * other) / (counts[0] - other.double())
        without -= (sums[1] - d * match) / (counts[1] - match.double())
        lacking.add(without, (sums[2] - d) / (counts[2] - known.double()), own[part])
        rows.append(torch.cat([difference, mean, nearest[:, None].double(), counts[1] / counts[2]], 1))
    difference, mean, nearest, share = torch.cat(rows).unbind(1)
    separability, distance = lacking.estimates(difference, mean, own)
    return Separation(
        separability, distance, *_skill(labels, gallery_labels, own, nearest.long(), share, key), len(queries)
    )


@dataclass
class _Lacking:
    """Sums and counts of differences and mean distances over queries, with each gallery item left out."""

    differences: Tensor
    means: Tensor
    counts: Tensor  # of finite differences
    rows: Tensor  # of finite mean distances

    @classmethod
    def of(cls, size: int, device: torch.device) -> "_Lacking":
        return cls(*(torch.zeros(size, dtype=torch.float64, device=device) for _ in range(4)))

    def add(self, without: Tensor, mean_without: Tensor, own: Tensor) -> None:
        """Add some queries (q, G); a query is left out together with its own image."""
        mine = (own >= 0).nonzero().squeeze(1)
        without[mine, own[mine]] = torch.nan
        mean_without[mine, own[mine]] = torch.nan
        self.differences += without.nansum(0)
        self.counts += (~without.isnan()).sum(0)
        self.means += mean_without.nansum(0)
        self.rows += (~mean_without.isnan()).sum(0)

    def estimates(self, difference: Tensor, mean: Tensor, own: Tensor) -> tuple[Estimate, Estimate]:
        """Separability and d̄; queries that are not in the gallery are also left out one by one."""
        whole = mean.nanmean()
        value = difference.nanmean() / whole.clamp(min=1e-12)
        means = self.means / self.rows
        left = [(self.differences / self.counts / means.clamp(min=1e-12), means)]
        alone = own < 0
        if bool(alone.any()):
            count, total = (~difference.isnan()).sum(), difference.nansum()
            fewer = (mean.nansum() - mean) / (len(mean) - 1)
            rest = (total - difference.nan_to_num()) / (count - (~difference.isnan()).double())
            left.append(((rest / fewer.clamp(min=1e-12))[alone], fewer[alone]))
        errors = [sum(_jackknife(each[place]) for each in left) ** 0.5 for place in (0, 1)]
        return Estimate(float(value), errors[0]), Estimate(float(whole), errors[1])


def _jackknife(left: Tensor) -> float:
    """The variance of a statistic from its values with one unit left out."""
    left = left[left.isfinite()]
    return float((left - left.mean()).square().sum() * (len(left) - 1) / max(len(left), 1)) if len(left) > 1 else 0.0


def _skill(
    labels: Tensor, gallery_labels: Tensor, own: Tensor, nearest: Tensor, share: Tensor, key: Key
) -> tuple[Estimate, float, float]:
    """(R@1 − chance) / (1 − chance) with its error under random labels, R@1 and chance."""
    r1, chance = float((gallery_labels[nearest] == labels).double().mean()), float(share.nanmean())
    items = torch.cat([nearest, own[own >= 0]]).unique()  # labels of other items have no effect
    mixed, drawn = gallery_labels.clone(), []
    for places in (key.uniform(torch.arange(SHUFFLES), (len(items),)) * len(mixed)).long().to(mixed.device):
        mixed[items] = gallery_labels[places]
        asked = torch.where(own >= 0, mixed[own.clamp(min=0)], labels)
        drawn.append((mixed[nearest] == asked).double().mean())
    error = float(torch.stack(drawn).std())
    room = 1 - chance if chance < 1 else torch.nan  # undefined with one class
    return Estimate((r1 - chance) / room, error / room), r1, chance
