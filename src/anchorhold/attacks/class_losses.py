"""Objectives over classes for a wrong nearest neighbour, and starts that differ in the embedding.

`margin` follows the nearest match and the nearest non-match alone, which change from step to step: single climbs end in
local maxima. These objectives see more of the list. d is a distance and σ its spread over the list; d_k is the smallest
d of class k, and y is the query's class:

    cross-entropy    −log softmax_y of −d_k / (τ σ)                                over all classes k
    dlr              (d_y − min over k ≠ y of d_k) / (third smallest d_k − smallest)   (Croce and Hein, ICML 2020);
                     without the divisor where there are two classes
    soft margin      softmin over matches of d − softmin over non-matches of d, at temperature τ σ

All end where the goal's own objective ends.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import distance_matrix
from ..perturb.ascend import ascend
from ..perturb.problem import Objective, Problem
from ..perturb.settings import Budget
from ..random import Key
from .goal import Goal, Scene, aimed
from .label import LabelAttack
from .recall import MarginAttack
from .run import Climbed
from .scale_free import spread

__all__ = ["DIVERSE_STEPS", "cross_entropy", "diverse_starts", "dlr", "has_class_losses", "soft_margin"]

DIVERSE_STEPS = 2  # of the ball's full radius (Tashiro et al., NeurIPS 2020)

FAR = 1e3  # in units of σ

Value = Callable[[Scene, Tensor, Tensor, Tensor, Tensor], Tensor]  # scene, d (N, G), σ (N,), labels (N,), classes


def has_class_losses(goal: Goal) -> bool:
    """Whether a goal is a wrong nearest neighbour, so that these objectives are about it."""
    if isinstance(goal, LabelAttack):
        return not goal.targeted
    return isinstance(goal, MarginAttack)


def cross_entropy(temperature: float) -> Climbed:
    """Cross-entropy over the nearest item of each class."""

    def value(scene: Scene, d: Tensor, sigma: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
        near = _nearest_of_classes(scene, d, classes)
        scores = -near / (temperature * sigma)[:, None]
        return F.cross_entropy(scores, _places(labels, classes), reduction="none")

    return _climbed(value)


def dlr(goal: Goal, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """The difference of logits ratio over the nearest item of each class; with two classes the margin of these.

    The ratio of two is ±1 wherever the query lies, so it has no gradient.
    """

    def value(scene: Scene, d: Tensor, sigma: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
        near = _nearest_of_classes(scene, d, classes)
        own = _places(labels, classes)[:, None]
        others = near.scatter(1, own, torch.inf).amin(1)
        margin = near.gather(1, own)[:, 0] - others
        if len(classes) < 3:
            return margin
        order = near.topk(3, dim=1, largest=False).values
        return margin / (order[:, -1] - order[:, 0]).clamp(min=torch.finfo(d.dtype).tiny)

    return _climbed(value)(goal, scene, ids, targets)


def soft_margin(temperature: float) -> Climbed:
    """The margin with soft minima, which several near items share."""

    def value(scene: Scene, d: Tensor, sigma: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
        match = labels[:, None] == scene.gallery_labels
        scores = -d / (temperature * sigma)[:, None]
        inside, outside = scores.masked_fill(~match, -torch.inf), scores.masked_fill(match, -torch.inf)
        return outside.logsumexp(1) - inside.logsumexp(1)

    return _climbed(value)


def _climbed(value: Value) -> Climbed:
    """The objective with that value of the list, where the query's own image never counts; it ends as the goal does."""

    def climbed(goal: Goal, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        labels = aimed(targets) if isinstance(goal, LabelAttack) else scene.labels[ids]
        own, classes = scene.own[ids], scene.gallery_labels.unique()
        items = torch.arange(len(scene.gallery), device=scene.gallery.device)

        def of(e: Tensor, positions: Tensor) -> Tensor:
            d = distance_matrix(e[:, 0], scene.gallery)
            sigma = spread(d)
            # The query's own image: far away rather than infinite, since an infinite score has a gradient that is not a
            # number. σ is taken before: that item would make it many times larger, and every temperature with it.
            away = d.detach().amax(1, keepdim=True) + FAR * sigma[:, None]
            d = torch.where(own[positions, None] == items, away, d)
            return value(scene, d, sigma, labels[positions], classes)

        return Objective(of, goal.objective(scene, ids, targets).goal)

    return climbed


def _places(labels: Tensor, classes: Tensor) -> Tensor:
    """Where labels stand among the classes; queries of other classes are wrong already, and never climbed."""
    return torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)


def _nearest_of_classes(scene: Scene, d: Tensor, classes: Tensor) -> Tensor:
    """(N, K) the smallest distance of each class."""
    which = torch.searchsorted(classes, scene.gallery_labels).expand_as(d)
    return d.new_full((len(d), len(classes)), torch.inf).scatter_reduce(1, which, d, "amin", include_self=False)


def diverse_starts(problem: Problem, images: Tensor, ids: Tensor, key: Key) -> Tensor:
    """Starts (U, 1, …) in random directions of the embedding: uniform in the ball, then two steps along w · e.

    Uniform noise hardly moves an embedding, so climbs from it often end in one place (Tashiro et al., NeurIPS 2020).
    """
    begun = problem.ball.start(images, key("uniform"), ids)
    with torch.no_grad():
        dim = problem.embed(images[:1, 0]).shape[1]
    way = key("direction").normal(ids, (dim,)).to(images)
    aside = Objective(lambda e, positions: (e[:, 0].to(way.dtype) * way[positions]).sum(1))
    budget = Budget(DIVERSE_STEPS, problem.ball.eps)
    return ascend(Problem(problem.embed, aside, problem.ball, budget), images, ids=ids, starts=begun).images
