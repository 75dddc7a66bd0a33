"""What the two ways to make a robust initialisation (paper 000) share: the features they train and how they are judged.

A robust initialisation is a backbone whose pooled features move little when an image does. The embedding head is
left alone: whoever starts from these weights gets a new one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..geometry import unit
from ..model.embedder import Embedder
from ..model.frozen import Embed, frozen, precise
from ..monitors import Images
from ..perturb.ascend import Budget, Objective, ascend
from ..random import Key
from ..settings import check
from .step import Inner, Step

__all__ = ["Companion", "Measured", "Precision", "PretrainSettings", "Through", "Unit", "measured"]

LOOKED_AT = 500  # held-out images at most in a look
LOOK_STEPS = 20  # of the attack in a look, at least: more than training takes

Precision = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class PretrainSettings(Inner):
    """The attack is that of the robust ImageNet networks 000 starts from: three steps of two thirds of ε."""

    eps: float = 4 / 255
    alpha: float = 8 / 765
    steps: int = 3
    start: Literal["zero", "random"] = "random"
    holdout: float = 0.1  # share of the training images that are never trained on, to look at

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.holdout < 1, f"defence.holdout is a share between 0 and 1, got {self.holdout}")


class Companion(nn.Module):
    """What is trained or asked besides the model; it knows which images of the training split are held out."""

    held: Tensor

    def __init__(self, labels: Tensor, holdout: float) -> None:
        super().__init__()
        # A key of its own, not the run's: all runs on a data set are judged by the same images.
        draws = Key.of(0)("holdout").uniform(torch.arange(len(labels), device=labels.device))
        held = draws < holdout
        held[draws.argmin()] = True  # a look needs something to look at
        self.register_buffer("held", held)

    def kept(self, step: Step) -> tuple[Tensor, Tensor]:
        """Images and labels of the batch without those that are held out."""
        kept = ~self.held[step.batch.ids]
        return step.batch.images[kept], step.batch.labels[kept]


class Through(nn.Module):
    """An embedder's pooled features and what comes after them, as one module for `Step.embed` and `frozen`."""

    def __init__(self, embedder: nn.Module, tail: nn.Module | None = None) -> None:
        super().__init__()
        assert isinstance(embedder, Embedder)
        self.embedder, self.tail = embedder, tail or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.tail(self.embedder.features(images))
        return out

    def folded(self, fast: bool = False) -> Embed | None:
        """The same as it is now, in eval mode, with BatchNorm folded: for `frozen`; `fast`, the features compiled."""
        features = self.embedder.folded(fast, pooled=True)
        if features is None:
            return None
        tail = {name: t.detach() for name, t in (*self.tail.named_parameters(), *self.tail.named_buffers())}
        return lambda images: functional_call(self.tail, tail, (features(images),))


class Unit(nn.Module):
    """Unit vectors: pooled features as they would be searched by, without a head."""

    def forward(self, features: Tensor) -> Tensor:
        return unit(features)


@dataclass(frozen=True)
class Measured:
    """Some held-out images, and what a network makes of them before and after the attack."""

    clean: Tensor
    attacked: Tensor
    views: Tensor
    labels: Tensor


def measured(
    network: Through,
    held: Tensor,
    images: Images,
    goal: Callable[[Tensor, Tensor], Objective],
    settings: PretrainSettings,
    key: Key,
    precision: Precision,
) -> Iterator[Measured]:
    """Attack a keyed sample of the held-out images, harder than training does; measured in full fp32.

    `goal(views, labels)` is the objective for one batch of them.
    """
    steps = max(LOOK_STEPS, 2 * settings.steps)
    budget = Budget(steps, 2.5 * settings.eps / steps, start="random", keep="best")
    ids = torch.nonzero(held).squeeze(1)
    ids = ids[key("held").bits(ids).argsort(stable=True)[:LOOKED_AT]].sort().values.cpu()
    with frozen(network) as embed:
        for part, views in zip(ids.split(128), images.plain(ids, 128)):
            here = part.to(views.device)
            labels = images.labels[here]
            with precision():
                found = ascend(embed, views[:, None], goal(views, labels), settings.ball, budget, key=key, ids=here)
            with torch.no_grad(), precise():
                clean, attacked = embed(views), embed(found.images[:, 0])
            yield Measured(clean, attacked, views, labels)
