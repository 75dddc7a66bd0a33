"""What a defence sees of one training step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..geometry import distance_matrix, euclidean
from ..model.frozen import Embed, frozen, precise
from ..model.graphed import Graphed
from ..perturb.ascend import Budget, Objective, ascend
from ..perturb.ball import Ball
from ..random import Key
from ..ranks import Ranks
from ..settings import check
from ..triplets import Anchors, Triplets, mine

__all__ = ["Batch", "Inner", "Step"]


@dataclass(frozen=True, kw_only=True)
class Inner:
    """The attack inside a training step; the defences' settings extend it. The defaults are the papers' for 224 px."""

    eps: float = 8 / 255
    alpha: float = 1 / 255
    steps: int = 8
    norm: Literal["linf", "l2"] = "linf"
    start: Literal["zero", "random"] = "zero"

    def __post_init__(self) -> None:
        check(self.eps >= 0 and self.steps >= 0 and self.alpha >= 0, "eps, alpha and steps must not be negative")
        _ = self.ball  # which refuses what no image could be perturbed by

    @property
    def ball(self) -> Ball:
        return Ball(self.eps, self.norm)

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.alpha, start=self.start)


@dataclass(frozen=True)
class Batch:
    """Images in pair order: positions 2i and 2i+1 share a class."""

    images: Tensor  # (B, C, H, W) in [0,1], augmented
    labels: Tensor  # (B,)
    ids: Tensor  # (B,) which samples of the training split


@dataclass
class Step:
    """One batch on its way through a defence. Each `yield loss` of the defence is one optimiser step."""

    model: nn.Module
    batch: Batch
    epoch: int
    epochs: int
    key: Key  # folded with the step already
    state: dict[str, Tensor]  # lives as long as the run; saved in the checkpoint
    log: Callable[[str, Tensor | float], None] = lambda name, value: None
    precision: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)
    mining_pairs: int = 0
    companion: nn.Module | None = None  # what a defence trains or asks besides the model (`Defence.companion`)
    fast: bool = False  # whether the frozen view is compiled
    canary: bool = False  # whether this step's inner attack is made again, slowly, to be compared
    graphed: Graphed | None = None  # the model's forward pass in a form that holds one result at a time
    ranks: Ranks = field(default_factory=Ranks)  # who computes this step together

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
        """What a network makes of the images, without gradient."""
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
        sampler: str,
        embeddings: Tensor,
        margin: float,
        purpose: str = "source",
        *,
        lower: float | None = None,
        upper: float | None = None,
        anchors: Anchors = "even",
    ) -> Triplets:
        """Triplets of this batch, inside groups that do not depend on how the batch is spread."""
        return mine(
            sampler,
            embeddings,
            self.batch.labels,
            self.key(purpose),
            group=self.mining_pairs,
            margin=margin,
            lower=lower,
            upper=upper,
            anchors=anchors,
        )

    def also_as(self, ending: str) -> "Step":
        """The same step, which logs everything a second time under a name with this ending."""

        def log(name: str, value: Tensor | float) -> None:
            self.log(name, value)
            self.log(f"{name}_{ending}", value)

        return replace(self, log=log)

    def anchors_turn(self) -> bool:
        """False, True, False, …, batch by batch: for defences that perturb candidates and anchors in turn."""
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
        """The units (U, V, C, H, W) where the inner attack leaves them; what it took goes into the log."""
        key, count = self.key("start"), len(units)
        mine = self.ranks.share(count)
        objective = objective.shared(self.ranks, count)
        ids = torch.arange(count, device=units.device) if ids is None else ids
        own, ids, known = units[mine], ids[mine], None if embedded is None else embedded[mine]
        ascent = ascend(embed, own, objective, inner.ball, inner.budget, moves, key=key, ids=ids, embedded=known)
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
        """The share of the climb of an ascent in fp32, with nobody leaving, that `found` lacks; 0 where both rest."""
        positions = torch.arange(len(units), device=units.device)
        with frozen(self.model) as embed, precise():
            budget = replace(inner.budget, drop=False)
            slow = ascend(embed, units, objective, inner.ball, budget, moves, key=self.key("start"), ids=ids)
            heights = []
            for images in (units, found, slow.images):
                with torch.no_grad():
                    e = embed(images.flatten(0, 1)).unflatten(0, images.shape[:2])
                    heights.append(objective.value(e, positions).mean().double())
        before, fast, best = heights
        return torch.where(best > before, (best - fast) / (best - before).clamp(min=1e-12), torch.zeros_like(best))

    def log_shift(self, clean: Tensor, moved: Tensor, members: int, batch: Tensor) -> None:
        """How far perturbations moved embeddings (002 figure 5): the mean over all that were perturbed, by d̄.

        `clean` and `moved` (…, D) are the perturbed members before and after, `members` how many of a triplet those
        are, and `batch` (B, D) the clean batch, whose mean distance d̄ over all pairs takes out how wide the space is.
        """
        with torch.no_grad():
            spread = distance_matrix(batch, batch).sum() / max(len(batch) * (len(batch) - 1), 1)
            shift = euclidean(clean, moved.detach()).mean() / spread.clamp(min=1e-12)
        self.log("shift", shift)
        self.log("shift_overall", members * shift)
