"""What both pretrainings share: the features they train, and how these are evaluated.

A robust initialisation is a backbone whose pooled features change little when an image does. The embedding
head is not trained: a training that starts from these weights gets a new one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..data.images import Images
from ..defences.step import Step
from ..device import precise
from ..geometry import unit
from ..model.embedder import Embedder
from ..model.frozen import Embed, frozen
from ..perturb.ascend import ascend
from ..perturb.problem import Objective, Problem
from ..perturb.settings import Budget
from ..random import Key
from .settings import PretrainSettings

__all__ = ["Companion", "Measured", "Precision", "Through", "Unit", "measured"]

EVALUATED = 500  # held-out images at most in an evaluation
EVALUATION_STEPS = 20  # minimum steps of the attack in an evaluation: more than in training

Precision = Callable[[], AbstractContextManager[object]]


class Companion(nn.Module):
    """A module beside the model, trained or queried; it knows which images of the training split are held out."""

    held: Tensor

    def __init__(self, labels: Tensor, holdout: float) -> None:
        super().__init__()
        # A fixed key, not the run's: all runs on a data set are evaluated on the same images.
        draws = Key.of(0)("holdout").uniform(torch.arange(len(labels), device=labels.device))
        held = draws < holdout
        held[draws.argmin()] = True  # an evaluation needs at least one image
        self.register_buffer("held", held)

    def kept(self, step: Step) -> tuple[Tensor, Tensor]:
        """Images and labels of the batch, without held-out images."""
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
        """The network as it is now, in eval mode with BatchNorm folded, for `frozen`; `fast` compiles the features."""
        features = self.embedder.folded(fast, pooled=True)
        if features is None:
            return None
        tail = {name: t.detach() for name, t in (*self.tail.named_parameters(), *self.tail.named_buffers())}
        return lambda images: functional_call(self.tail, tail, (features(images),))


class Unit(nn.Module):
    """Scales pooled features to unit vectors, so that you can search by them without a head."""

    def forward(self, features: Tensor) -> Tensor:
        return unit(features)


@dataclass(frozen=True)
class Measured:
    """Some held-out images, and the network's outputs before and after the attack."""

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
    """Attack a keyed sample of the held-out images, with more steps than training; outputs are in full fp32.

    Args:
        network: what is attacked.
        held: which images of the training split are held out.
        images: the training split.
        goal: makes the objective for one batch from (images, labels).
        settings: norm, ε and steps of the attack in training.
        key: decides which images are taken, and where each attack starts.
        precision: the context in which the attack computes.
    """
    steps = max(EVALUATION_STEPS, 2 * settings.steps)
    budget = Budget(steps, 2.5 * settings.eps / steps, start="random", keep="best")
    ids = torch.nonzero(held).squeeze(1)
    ids = ids[key("held").bits(ids).argsort(stable=True)[:EVALUATED]].sort().values.cpu()
    with frozen(network) as embed:
        for part, views in zip(ids.split(128), images.plain(ids, 128)):
            here = part.to(views.device)
            labels = images.labels[here]
            with precision():
                found = ascend(
                    Problem(embed, goal(views, labels), settings.ball, budget, key), views[:, None], ids=here
                )
            with torch.no_grad(), precise():
                clean, attacked = embed(views), embed(found.images[:, 0])
            yield Measured(clean, attacked, views, labels)
