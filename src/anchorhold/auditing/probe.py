"""A few samples of a scene, and what flags measure of them.

Most measurements are the share of samples with a result that a working attack cannot have. An attack that moves at
random fails on half of the samples, a working one on almost none. A quarter is 4 standard errors from a half at 64
samples. Only samples that can still get worse count: beyond the mean distance d̄ between two images a sample is already
lost.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..attacks.goal import Scene
from ..attacks.menu import ATTACKS
from ..attacks.run import Attack, Attacked
from ..config.settings import TrainSettings
from ..geometry import euclidean
from ..model.frozen import Embed, embed_all
from ..perturb.ball import Ball
from ..perturb.settings import Budget
from ..random import Key
from ..runs.health import RETRIEVES
from ..scores import Interval
from ..separation import Separation, separation

__all__ = ["FEW", "NOTHING", "QUARTER", "SEPARABLE", "Probe"]

QUARTER = 0.25  # share of samples: see above
UNLIKELY = 0.01  # probability that a working attack fails on as many samples
STILL = 1e-4  # a shift below this share of d̄ counts as none
FEW = 0.05  # a smaller share of samples cannot change a score by more than this
SEPARABLE = TrainSettings.collapse_separability  # below it training reports a collapse
NOTHING = 1e-3  # mean distance below which fp32 rounding decides which item is nearer


@dataclass(frozen=True)
class Probe:
    """A few samples of a scene, and the measurements of the flags, each made once."""

    embed: Embed
    images: Tensor  # (N, …)
    scene: Scene
    ids: Tensor  # (N,) their positions among the scene's queries
    ball: Ball
    budget: Budget
    key: Key
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # of scores in percent
    measured: Mapping[str, float] = field(default_factory=dict)  # scores of the audit, for messages
    strong: Mapping[str, Any] = field(default_factory=dict)  # the `doubts` of a strong audit
    differentiable: bool = True  # whether the model gives gradients
    queries: int = 0  # of each attack of the audit, where it took no gradients
    rejected: float = 0.0  # largest share of an attack's samples with a perturbed image without a finite embedding
    draws: int = 1  # of a random model, over which `embed` is the mean

    @cached_property
    def clean(self) -> Tensor:
        """(N, D) the embeddings of the images."""
        return embed_all(self.embed, [self.images])

    @cached_property
    def right(self) -> Tensor:
        """(N,) which samples have a right nearest neighbour, and could have a wrong one in this gallery."""
        answered = ATTACKS["margin"]("corrected").measure(self.scene, self.ids, None, self.clean)["margin"] > 0.5
        other = self.scene.labels[self.ids, None] != self.scene.gallery_labels
        return answered & other.any(1)

    @cached_property
    def apart(self) -> Separation:
        """Separability and mean distance of up to 256 queries in the gallery, and the R@1 of chance."""
        scene = self.scene
        chosen = self.key("pairs").permutation(len(scene.queries), scene.queries.device)[:256]
        return separation(
            scene.queries[chosen],
            scene.labels[chosen],
            scene.gallery,
            scene.gallery_labels,
            scene.own[chosen],
            self.key("chance"),
        )

    @property
    def collapsed(self) -> bool:
        """Whether distances do not separate the classes, and R@1 does not contradict it."""
        apart = self.apart
        if apart.distance.high < NOTHING:  # ties: one hub may answer all queries, mostly right if its class is large
            return not apart.skill.low > RETRIEVES
        return apart.separability.high < SEPARABLE and not apart.skill.value > RETRIEVES

    @cached_property
    def gradients(self) -> Tensor:
        """(R, P) input gradients of the margin at the clean images that are answered right."""
        images, ids = self.images[self.right].clone().requires_grad_(), self.ids[self.right]
        with torch.enable_grad():
            objective = ATTACKS["margin"]("corrected").objective(self.scene, ids, None)
            value = objective.value(self.embed(images)[:, None], torch.arange(len(ids), device=ids.device))
            (gradient,) = torch.autograd.grad(value.sum(), images)
        return gradient.flatten(1)

    def shifted(self, ball: Ball, budget: Budget) -> Attacked:
        """The samples after ES, each from the same tiny start."""
        attack = Attack(self.embed, self.scene, ATTACKS["ES"]("corrected"), ball, budget, self.key)
        return attack.run(self.images, self.ids)

    @cached_property
    def noisy(self) -> Tensor:
        """The samples with random noise of length ε."""
        x = self.images[:, None]
        random = self.key("noise").normal(self.ids, x.shape[1:], x.dtype).to(x.device)
        return self.ball.project(self.ball.step(x, random, self.ball.eps), x)[:, 0]

    @cached_property
    def pushed(self) -> Attacked:
        """The samples after ES at the budget."""
        return self.shifted(self.ball, self.budget)

    def shift(self, images: Tensor) -> Tensor:
        """(N,) the distance of these images from the clean embeddings."""
        return euclidean(embed_all(self.embed, [images]), self.scene.queries[self.ids]).double()

    def short_of(self, near: Tensor, far: Tensor, factor: float) -> float:
        """The share of samples with `near` (N,) below d̄ whose shift `far` is zero or below `factor` · `near`."""
        mean = self.apart.distance.value
        return float(((near < mean) & ~(far > factor * near + STILL * mean)).double().mean())

    def evident(self, share: float) -> bool:
        """Whether more than a quarter of the samples failed, and a working attack would hardly fail on as many.

        A working one fails on at most `FEW` of all samples. A quarter of 64 samples is evidence, of 1 it is none.
        """
        count = len(self.ids)
        failed = round(share * count)
        tail = sum(math.comb(count, k) * FEW**k * (1 - FEW) ** (count - k) for k in range(failed, count + 1))
        return share > QUARTER and tail < UNLIKELY
