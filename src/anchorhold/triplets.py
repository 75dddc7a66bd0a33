"""Triplet samplers for a batch: random, semihard, softhard, distance-weighted, hardest.

A batch is ordered in pairs: positions 2i and 2i+1 share a class and are each other's partner. The anchors are the
even positions, or all of them (ADML), and every sampler gives each anchor one triplet.

A sampler does not draw. From the distances between anchors and batch (a `View`) it computes the chance of each sample
to become the positive and the negative: two (B, N) tables, booleans where the choice is uniform. One function draws
from the tables of all samplers, by inverse CDF with one keyed number per anchor. Draws therefore do not depend on how
the work is split. `candidates` shows what a sampler could draw. A sampler of yours is a function of the same kind,
`sampler(view) -> (positives, negatives)`, and may stand wherever the name of one of ours may.

No sampler fails on a batch without suitable samples: it takes any negative, and if there is none, any sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .errors import AnchorholdError, DataError, SettingsError, check, lacks_memory, nearest
from .extensions import USER, Named, kind_of, named, reason_of
from .geometry import distance_matrix, euclidean, unit
from .random import Key

__all__ = [
    "SAMPLERS",
    "Anchors",
    "Sampler",
    "Triplets",
    "View",
    "candidates",
    "chances",
    "collapseness",
    "distance_weights",
    "draw",
    "hardness",
    "mine",
]


Anchors = Literal["even", "all"]


@dataclass(frozen=True)
class Triplets:
    """Positions in the batch of B anchors, positives and negatives, each (B,)."""

    anchor: Tensor
    positive: Tensor
    negative: Tensor

    def __len__(self) -> int:
        return len(self.anchor)


def hardness(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """How hard each triplet is: H(a, p, n) = d(a, p) - d(a, n), Zhou & Patel 2022, eq. 2; in [-2, 2].

    >>> a, p, n = torch.tensor([[0.0], [3.0], [5.0]])
    >>> hardness(a, p, n)
    tensor(-2.)
    """
    return euclidean(a, p) - euclidean(a, n)


def collapseness(
    positive: Tensor, negative: Tensor, attention: float = 10.0, *, far: bool = False, carry: bool = False
) -> Tensor:
    """How near a batch is to collapse: C = d_ω(A, P) − d_ω(A, N), Tian et al. 2024, eqs. 5 to 7; `attention` is its λ.

    `positive` and `negative` (B,) are d(a_i, p_i) and d(a_i, n_i). d_ω is their mean weighted by exp(−λ(d − min d)),
    so near pairs count most. With `far` the weights are exp(λ(d − max d)), as in the published code. With λ = 0 it is
    the mean hardness. The weights are constants unless they `carry` a gradient.

    >>> collapseness(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]), attention=0)
    tensor(0.5000)
    """
    d = torch.stack([positive, negative])
    weights = torch.softmax((attention if far else -attention) * (d if carry else d.detach()), 1)
    to_positives, to_negatives = (weights * d).sum(1).unbind()
    return to_positives - to_negatives


@dataclass(frozen=True)
class View:
    """The input of a sampler: B anchors against the N samples of their group.

    Attributes:
        distances: (B, N) Euclidean, between unit embeddings.
        same: (B, N) which samples share the anchor's label, the anchor itself included.
        partners: (B,) each anchor's partner.
        dimension: of the embeddings.
        margin: semihard's window.
        lower: of the distance-weighted sampler: smaller distances are raised to this.
        upper: of the distance-weighted sampler: farther samples are not drawn.
        anchors: (B,) each anchor's own position; None where the anchors are not of the group.
        own_positive: of softhard: whether an anchor may be its own positive.
    """

    distances: Tensor
    same: Tensor
    partners: Tensor
    dimension: int
    margin: float = 0.2
    lower: float | None = None
    upper: float | None = None
    anchors: Tensor | None = None
    own_positive: bool = True

    @property
    def partner(self) -> Tensor:
        """(B, N), True only at the partner."""
        return torch.zeros_like(self.same).scatter_(1, self.partners.unsqueeze(1), True)

    @property
    def positives(self) -> Tensor:
        """(B, N), every sample of the anchor's label; the anchor itself only with `own_positive`."""
        if self.own_positive or self.anchors is None:
            return self.same
        return self.same.scatter(1, self.anchors.unsqueeze(1), False)

    @property
    def any_negative(self) -> Tensor:
        """(B, N), every sample of another label; every sample where there is none."""
        return _first(~self.same, torch.ones_like(self.same))


Sampler = Callable[[View], tuple[Tensor, Tensor]]  # chances (B, N) of the positives and of the negatives


def _first(*choices: Tensor) -> Tensor:
    """For each row, the first of these masks that is not empty; else the last one."""
    result = choices[-1]
    for choice in reversed(choices[:-1]):
        result = torch.where(choice.any(1, keepdim=True), choice, result)
    return result


def random(view: View) -> tuple[Tensor, Tensor]:
    """The partner, and any sample of another label."""
    return view.partner, view.any_negative


def semihard(view: View) -> tuple[Tensor, Tensor]:
    """The partner, and a negative beyond it but within the margin.

    d(a, p)² < d(a, n)² and d(a, p) - d(a, n) + m > 0
    """
    d = view.distances
    positive = d.gather(1, view.partners.unsqueeze(1))
    beyond = positive.square() < d.square()
    within = positive - d + view.margin > 0
    return view.partner, _first(~view.same & beyond & within, view.any_negative)


def softhard(view: View) -> tuple[Tensor, Tensor]:
    """A negative nearer than the farthest positive, and a positive farther than the nearest negative.

    All samples of the anchor's label count, including the anchor. Where no positive is far enough, the anchor itself
    may be drawn, as in the published code; without `own_positive` never, as in that of Roth et al. 2020.
    """
    squared = view.distances.square()
    farthest_positive = squared.masked_fill(~view.same, -torch.inf).amax(1, keepdim=True)
    nearest_negative = squared.masked_fill(view.same, torch.inf).amin(1, keepdim=True)
    far = _first(view.positives & (squared > nearest_negative), view.positives)
    positives = torch.where(view.same.all(1, keepdim=True), view.partner, far)
    return positives, _first(~view.same & (squared < farthest_positive), view.any_negative)


def distance(view: View) -> tuple[Tensor, Tensor]:
    """The partner, and a negative with chance inverse to how common its distance is (`distance_weights`)."""
    return view.partner, distance_weights(view.distances, view.same, view.dimension, view.lower, view.upper)


def hardest(view: View) -> tuple[Tensor, Tensor]:
    """The partner, and the nearest negative that is not at distance zero."""
    apart = ~view.same & (view.distances > 0)
    closest = view.distances.masked_fill(~apart, torch.inf).argmin(1, keepdim=True)
    only = torch.zeros_like(apart).scatter_(1, closest, True)
    return view.partner, _first(only & apart, view.any_negative)


SAMPLERS: dict[str, Sampler] = {
    "random": random,
    "semihard": semihard,
    "softhard": softhard,
    "distance": distance,
    "hardest": hardest,
}


def distance_weights(
    distances: Tensor, same: Tensor, dimension: int, lower: float | None = None, upper: float | None = None
) -> Tensor:
    """The chance (B, N) of each sample to be drawn as negative; rows sum to 1.

    On the unit sphere in D dimensions most distances are near √2. Weighting by the inverse of that density,

        log w(d) = (2 - D) ln d - (D - 3)/2 · ln(1 - d²/4),

    draws all distances alike (Wu et al. 2017). They use cut-offs: nearer than `lower` (0.5) counts as `lower`,
    farther than `upper` (1.4) is not drawn. RobRank has no cut-offs, which is the default here. At D = 512 it almost
    always draws the nearest negative. The weight is infinite at distance 2, and at 0 without `lower`. With `upper`,
    negatives of infinite weight share the draw, the limit of a `lower` that falls to 0. An anchor without a negative
    nearer than `upper` draws from all its negatives. Without `upper`, an anchor with a negative of infinite weight, or
    without negatives, draws from the whole batch, as in RobRank.

    >>> distance_weights(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([[True, False, False]]), 512)
    tensor([[0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    d = distances.double().clamp(max=2)  # double, since exponents reach thousands; clamped, since rounding may exceed 2
    if lower is not None:
        d = d.clamp(min=lower)
    drawable = ~same if upper is None else ~same & (d < upper)
    # xlogy: 0 · ln 0 is 0 here. Distance 0 has a finite weight at D = 2, distance 2 at D = 3.
    log_w = torch.xlogy(2.0 - dimension, d) - torch.special.xlog1py((dimension - 3) / 2, -d.square() / 4)
    log_w = log_w.masked_fill(~drawable, -torch.inf)
    most = log_w.amax(1, keepdim=True)
    # Next to an infinite weight finite ones vanish, and infinite ones are equal. ∞ - ∞ would be NaN.
    w = torch.where(log_w == most, 1.0, (log_w - most).exp()) * drawable
    everything = torch.ones_like(same)
    if upper is None:
        w, rest = torch.where(most.isfinite(), w, 0.0), everything
    else:
        rest = _first(~same, everything)
    w = torch.where(w.sum(1, keepdim=True) > 0, w, rest.double())
    return w / w.sum(1, keepdim=True)


@torch.no_grad()
def mine(
    name: str | Sampler,
    embeddings: Tensor,
    labels: Tensor,
    key: Key,
    *,
    group: int = 0,
    margin: float = 0.2,
    lower: float | None = None,
    upper: float | None = None,
    own_positive: bool = True,
    ids: Tensor | None = None,
    anchors: Anchors = "even",
) -> Triplets:
    """One triplet per pair of the batch, or two, mined inside groups of `group` consecutive pairs (0: all in one).

    `ids` are the pairs' numbers in the global batch (0, 1, 2, … by default). A group mined alone gives the same
    triplets as in the whole batch. Positions in the result refer to this batch. With all samples as `anchors`, those of
    pair i draw by 2i and 2i+1.

    >>> e = torch.eye(4)[[0, 0, 1, 1]]
    >>> mine("random", e, torch.tensor([5, 5, 7, 7]), Key.of(0)).positive
    tensor([1, 3])
    """
    pairs, stride = _pairs(embeddings, labels), _stride(anchors)
    if ids is None:
        ids = torch.arange(pairs)  # a few draws are faster on the CPU, with the same result
    if group < 0 or len(ids) != pairs:
        raise DataError(f"{len(ids)} ids for {pairs} pairs in groups of {group}; give one id a pair, group at least 0")
    found: list[Tensor] = []
    for start in range(0, pairs, group or max(pairs, 1)):
        stop = min(start + group, pairs) if group else pairs
        members = slice(2 * start, 2 * stop)
        chances = _chances(name, embeddings[members], labels[members], margin, lower, upper, own_positive, stride)
        own = ids[start:stop]
        if anchors == "all":
            own = torch.stack([2 * own, 2 * own + 1], dim=1).flatten()
        parts = zip(("positive", "negative"), chances)
        drawn = [draw(table, key(part).uniform(own).to(table.device)) for part, table in parts]
        found.append(torch.stack(drawn) + 2 * start)
    positive, negative = torch.cat(found, 1) if found else torch.empty(2, 0, dtype=torch.long)
    return Triplets(torch.arange(0, 2 * pairs, stride, device=embeddings.device), positive, negative)


@torch.no_grad()
def candidates(
    name: str | Sampler,
    embeddings: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    lower: float | None = None,
    upper: float | None = None,
    own_positive: bool = True,
    anchors: Anchors = "even",
) -> tuple[Tensor, Tensor]:
    """Which samples the sampler could draw as positive and as negative: two masks (B, N) over one group."""
    _pairs(embeddings, labels)
    positives, negatives = _chances(name, embeddings, labels, margin, lower, upper, own_positive, _stride(anchors))
    return positives > 0, negatives > 0


def _pairs(embeddings: Tensor, labels: Tensor) -> int:
    if len(embeddings) % 2 or len(embeddings) != len(labels):
        raise DataError(
            f"{len(embeddings)} embeddings and {len(labels)} labels are not a batch of pairs; "
            "give an even number, each with its label"
        )
    # Labels on a GPU are not checked: that would wait for it.
    if not labels.is_cuda and not torch.equal(labels[0::2], labels[1::2]):
        raise DataError("positions 2i and 2i+1 of the batch must share a label; order the batch in pairs")
    return len(labels) // 2


def _stride(anchors: Anchors) -> int:
    """The distance between two anchors in the batch."""
    check(anchors in ("even", "all"), f"anchors cannot be {anchors!r}; there are: even, all")
    return 1 if anchors == "all" else 2


def _chances(
    name: str | Sampler,
    embeddings: Tensor,
    labels: Tensor,
    margin: float,
    lower: float | None,
    upper: float | None,
    own_positive: bool,
    stride: int,
) -> tuple[Tensor, Tensor]:
    e, labels = unit(embeddings.detach()), labels.to(embeddings.device)
    own = torch.arange(0, len(e), stride, device=e.device)
    view = View(
        # All rows first, then those of the anchors, so that each anchor's distance to itself is exactly zero.
        distances=distance_matrix(e, e)[::stride],
        same=labels[::stride].unsqueeze(1) == labels,
        partners=own ^ 1,
        dimension=e.shape[1],
        margin=margin,
        lower=lower,
        upper=upper,
        anchors=own,
        own_positive=own_positive,
    )
    return chances(name, view)


def chances(sampler: str | Sampler, view: View) -> tuple[Tensor, Tensor]:
    """The tables (B, N) of a sampler of ours, by its name, or of yours, whose tables are checked."""
    if isinstance(sampler, str) and not isinstance(sampler, Named):
        if sampler not in SAMPLERS:
            raise SettingsError(f"no sampler {sampler!r}; {nearest(sampler, SAMPLERS)}")
        return SAMPLERS[sampler](view)
    yours = named(sampler, USER)
    try:
        tables = yours.thing(view)
    except Exception as error:  # user code may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise SettingsError(f"the sampler {yours} fails ({reason_of(error)})") from error
    two = isinstance(tables, tuple | list) and len(tables) == 2
    check(two, f"the sampler {yours} returns {kind_of(tables)}; return two tables of chances, (positives, negatives)")
    positives, negatives = tables
    for what, table in (("positive", positives), ("negative", negatives)):
        told = tuple(table.shape) if isinstance(table, Tensor) else kind_of(table)
        wanted = tuple(view.same.shape)
        check(told == wanted, f"the sampler {yours} returns {told} for {what}s; return a table of chances {wanted}")
        weights = table.detach().double()
        sound = bool((weights >= 0).all() & weights.isfinite().all())
        check(sound, f"the sampler {yours} returns a chance below 0, NaN or infinite")
        empty = (weights.sum(1) <= 0).nonzero()
        check(not len(empty), f"the sampler {yours} leaves an anchor without a {what}: give some sample a chance")
    return positives.to(view.same.device), negatives.to(view.same.device)


def draw(chances: Tensor, uniform: Tensor) -> Tensor:
    """One column per row by inverse CDF; columns without weight are never drawn."""
    cdf = chances.double().cumsum(1)
    total = cdf[:, -1:]
    # Stay below the total: uniform < 1, but the product may round up to it.
    reach = torch.minimum(uniform.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, reach, right=True).squeeze(1)
