"""The input of a defence: one training step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ..device import precise
from ..distributed import Ranks
from ..errors import check
from ..geometry import distance_matrix, euclidean
from ..model.fast.graphs import Graphed
from ..model.frozen import Embed, frozen
from ..perturb.ascend import ascend
from ..perturb.problem import Objective, Problem
from ..random import Key
from ..triplets import Anchors, Sampler, Triplets, mine
from .settings import Inner

__all__ = ["Batch", "Log", "Step", "changed"]


class Log(Protocol):
    """Adds a value to the epoch's mean of that name, with a weight."""

    def __call__(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0, /) -> None: ...


def changed(before: Tensor, after: Tensor) -> Tensor:
    """Which units (U,) of images (U, …) an attack changed: those with any changed pixel."""
    return (before != after).flatten(1).any(1)


@dataclass(frozen=True)
class Batch:
    """Images in pair order: positions 2i and 2i+1 share a class. With batch.kind = images they are in any order.

    Attributes:
        images: (B, C, H, W) in [0, 1], augmented.
        labels: (B,) the classes.
        ids: (B,) which samples of the training split.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor


@dataclass(kw_only=True)
class Step:
    """One batch, and the tools of a defence. Each `yield loss` of the defence is one optimiser step.

    Attributes:
        model: the model in training.
        batch: images, labels and ids.
        epoch: from 0.
        epochs: of the whole training.
        progress: finished share of the training, for schedules; 1 where it is not known.
        key: of random draws, already specific to this step.
        state: kept for the whole run, and saved in the checkpoint.
        log: `step.log(name, value)` adds a column to metrics.jsonl.
        precision: a context for forward passes in the run's precision.
        mining_pairs: triplets are mined inside groups of N pairs; 0 is the whole batch.
        paired: whether the batch is in pair order, as triplets need it.
        companion: a second module: what a pretraining trains or queries, or a loss of yours.
        fast: whether the frozen view is compiled.
        canary: whether this step's inner attack is repeated in fp32, to compare.
        graphed: the model's forward pass as a CUDA graph, which holds one result at a time.
        ranks: the ranks that share this step.
    """

    model: nn.Module
    batch: Batch
    epoch: int
    epochs: int
    progress: float = 1.0
    key: Key
    state: dict[str, Tensor]
    log: Log = lambda name, value, weight=1.0: None
    precision: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    mining_pairs: int = 0
    paired: bool = True
    companion: nn.Module | None = None
    fast: bool = False
    canary: bool = False
    graphed: Graphed | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def trains_on(self, origins: Tensor) -> None:
        """Say which images of the batch the images come from that are embedded next, to train on them.

        `origins` are positions (N,), or (T, V) for triplets whose first three views are anchor, positive and negative.
        Training does not need it: `ah.adversary` gives each image its label by it. A defence that does not say it
        embeds as many images as the batch has, in its order.
        """

    def embed(self, images: Tensor) -> Tensor:
        """Unit vectors with gradient to the weights, in the run's precision."""
        once, self.graphed = self.graphed, None
        mine = images[self.ranks.share(len(images))]
        if once is not None:
            out = once(mine)
        else:
            with self.precision():
                out = self.model(mine)
        return self.ranks.gathered(out, len(images))

    def see(self, network: Embed, images: Tensor) -> Tensor:
        """A network's outputs for the images, without gradient."""
        with torch.no_grad():
            return self.ranks.gathered(network(images[self.ranks.share(len(images))]), len(images))

    @contextmanager
    def frozen(self) -> Iterator[Embed]:
        """The frozen view of the model that attacks climb, in the run's precision."""
        with frozen(self.model, self.fast) as view:

            def embed(images: Tensor) -> Tensor:
                if images.is_cuda and images.ndim == 4:
                    images = images.contiguous(memory_format=torch.channels_last)
                with self.precision():
                    return view(images)

            yield embed

    def mine(
        self,
        sampler: str | Sampler,
        embeddings: Tensor,
        margin: float,
        purpose: str = "source",
        *,
        lower: float | None = None,
        upper: float | None = None,
        own_positive: bool = True,
        anchors: Anchors = "even",
    ) -> Triplets:
        """Triplets of this batch, mined in groups that do not depend on the number of ranks."""
        check(self.paired, "this defence draws triplets from pairs of a class: set batch.kind to pairs or classes")
        return mine(
            sampler,
            embeddings,
            self.batch.labels,
            self.key(purpose),
            group=self.mining_pairs,
            margin=margin,
            lower=lower,
            upper=upper,
            own_positive=own_positive,
            anchors=anchors,
        )

    def also_as(self, ending: str) -> "Step":
        """The same step, which also logs everything under a name with this ending."""

        def log(name: str, value: Tensor | float, weight: Tensor | float = 1.0, /) -> None:
            self.log(name, value, weight)
            self.log(f"{name}_{ending}", value, weight)

        return replace(self, log=log)

    def anchors_turn(self) -> bool:
        """False, True, False, …, batch by batch: for defences that alternate between candidates and anchors."""
        anchors = bool(self.state.get("anchors_next", False))
        self.state["anchors_next"] = torch.tensor(not anchors)
        return anchors

    def perturb(
        self,
        embed: Embed,
        units: Tensor,
        objective: Objective,
        inner: Inner,
        moves: tuple[bool, ...] | None = None,
        embedded: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Tensor:
        """The units (U, V, C, H, W) after the inner attack; its cost is logged. With ε = 0 no step is taken."""
        budget = inner.budget if inner.eps else replace(inner.budget, steps=0)
        key, count = self.key("start"), len(units)
        mine = self.ranks.share(count)
        objective = objective.shared(self.ranks, count)
        ids = torch.arange(count, device=units.device) if ids is None else ids
        own, ids, known = units[mine], ids[mine], None if embedded is None else embedded[mine]
        ascent = ascend(Problem(embed, objective, inner.ball, budget, key, moves), own, ids=ids, embedded=known)
        work, *active = self.ranks.sums(count, ascent.image_steps, *ascent.active[:1], *ascent.active[-1:])
        self.log("image_steps", work)
        for name, left in zip(("active_first", "active_last"), active):
            self.log(name, left / max(count, 1))
        if self.canary:
            self.log("canary_gap", self._gap(own, ascent.images, objective, inner, moves, ids))
        return self.ranks.gathered(ascent.images, count)

    def _gap(
        self,
        units: Tensor,
        found: Tensor,
        objective: Objective,
        inner: Inner,
        moves: tuple[bool, ...] | None,
        ids: Tensor | None,
    ) -> Tensor:
        """Shortfall of `found` against an fp32 attack without dropping, as a share of its gain; 0 without a gain."""
        positions = torch.arange(len(units), device=units.device)
        with frozen(self.model) as embed, precise():
            budget = replace(inner.budget, drop=False)
            slow = ascend(Problem(embed, objective, inner.ball, budget, self.key("start"), moves), units, ids=ids)
            heights = []
            for images in (units, found, slow.images):
                with torch.no_grad():
                    e = embed(images.flatten(0, 1)).unflatten(0, images.shape[:2])
                    heights.append(objective.value(e, positions).mean().double())
        before, fast, best = heights
        return torch.where(best > before, (best - fast) / (best - before).clamp(min=1e-12), torch.zeros_like(best))

    def log_shift(self, clean: Tensor, moved: Tensor, members: int, batch: Tensor, perturbed: Tensor) -> None:
        """Log how far embeddings moved, in units of d̄: the mean over all units, and over those that the attack changed.

        Figure 5 of CA-TRIDE shows the second. Triplets at their goal stay clean and would hide how far others move.

        Args:
            clean: (U, …, D) the members that may move, before the attack.
            moved: the same after it.
            members: how many of a triplet these are.
            batch: (B, D) the clean batch. Its mean distance d̄ over all pairs sets the scale.
            perturbed: (U,) which units changed (`changed`). An epoch's mean weighs steps by their share.
        """
        with torch.no_grad():
            spread = distance_matrix(batch, batch).sum() / max(len(batch) * (len(batch) - 1), 1)
            shift = euclidean(clean, moved.detach()).unsqueeze(1) / spread.clamp(min=1e-12)
            units, touched = shift.flatten(1).mean(1), perturbed.sum()
            of_touched = torch.where(perturbed, units, 0).sum() / touched.clamp(min=1)
        means: list[tuple[str, Tensor, Tensor | float]]
        means = [("all", shift.mean(), 1.0), ("perturbed", of_touched, touched / max(len(units), 1))]
        for whose, mean, weight in means:
            self.log(f"shift_{whose}", mean, weight)
            self.log(f"shift_overall_{whose}", members * mean, weight)
