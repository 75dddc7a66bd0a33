"""What a defence sees of one training step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..model.frozen import Embed, frozen
from ..random import Key
from ..triplets import Triplets, mine

__all__ = ["Batch", "Step"]


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

    def embed(self, images: Tensor) -> Tensor:
        """Unit vectors with gradient to the weights, in the run's precision."""
        with self.precision():
            out: Tensor = self.model(images)
        return out

    @contextmanager
    def frozen(self) -> Iterator[Embed]:
        """The frozen view of the model that attacks climb, in the run's precision."""
        with frozen(self.model) as view:

            def embed(images: Tensor) -> Tensor:
                if images.is_cuda and images.ndim == 4:
                    images = images.contiguous(memory_format=torch.channels_last)
                with self.precision():
                    return view(images)

            yield embed

    def mine(self, sampler: str, embeddings: Tensor, margin: float, purpose: str = "source") -> Triplets:
        """Triplets of this batch, inside groups that do not depend on how the batch is spread."""
        return mine(sampler, embeddings, self.batch.labels, self.key(purpose), group=self.mining_pairs, margin=margin)
