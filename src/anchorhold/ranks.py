"""Several processes that do one job together, started by torchrun; or one, which is then the whole.

    torchrun --nproc-per-node 4 -m anchorhold train cub --root CUB_200_2011 --recipe hm-lga --out runs/hm

Every rank sees the whole batch and computes its share of it; embeddings are put together again, so that mining, losses
and what a defence remembers are those of the whole batch on every rank. The number of ranks therefore changes how long
a step takes and nothing else, up to the order in which numbers are added.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import AnchorholdError, RunError

__all__ = ["Ranks", "joined", "local_rank", "neighbours", "started"]

T = TypeVar("T")

# Others may be busy for long, with a batch of a strong audit or a slow disk. If one dies, torchrun ends all.
PATIENCE = timedelta(hours=6)


def started() -> tuple[int, int]:
    """This process's rank, and how many there are, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Which of the processes on this machine it is: its GPU has that number."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def neighbours() -> int:
    """How many processes of this job share this machine's memory and processors."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def joined(device: torch.device) -> "Ranks":
    """The ranks of this job, connected: by NCCL where they compute on GPUs, by gloo on CPUs."""
    rank, size = started()
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        _told(lambda: dist.init_process_group(backend, timeout=PATIENCE))
    return Ranks(rank, size, device)


def _told(call: Callable[[], T]) -> T:
    """The result of a call to the others; one clear line where they do not answer."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise RunError(
            f"rank {started()[0]} lost the others: a process died or the network failed ({reason}); "
            "the same torchrun command with `resume` (or an audit or embed with the same --out) goes on"
        ) from None


@dataclass(frozen=True)
class Ranks:
    """Who takes part, and how what they have becomes one."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # where they exchange

    @property
    def first(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def splits(self, count: int) -> bool:
        """Whether `count` things are shared out; of fewer than two a rank every rank does them all.

        Live BatchNorm has no statistics of one image.
        """
        return self.size > 1 and count >= 2 * self.size

    def share(self, count: int) -> slice:
        """This rank's part of `count` things in order.

        >>> [Ranks(rank, 3).share(7) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
        """
        return self._shares(count)[self.rank] if self.splits(count) else slice(0, count)

    def gathered(self, mine: Tensor, count: int) -> Tensor:
        """The `count` rows of which `mine` are this rank's share. Gradients reach one's own rows.

        Every rank must compute the same from the result: then the gradients of weights, summed over ranks, are those of
        the whole batch.
        """
        if self.size == 1:
            return mine
        out: Tensor = _Gathered.apply(mine, self, count)
        return out

    def spread(self, items: Sequence[T], work: Callable[[Sequence[T]], Tensor], lengths: Sequence[int]) -> Tensor:
        """`work` on whole items, those of each rank at once, and the rows of all in their order.

        Item i gives lengths[i] rows whatever is done with it, so the result does not depend on the number of ranks.
        """
        if not 1 < self.size <= len(items):
            return work(items)
        mine = self._shares(len(items))
        counts = [sum(lengths[part]) for part in mine]
        return torch.cat(self._parts(work(items[mine[self.rank]]), counts))

    def summed(self, tensors: Iterable[Tensor | None]) -> None:
        """Every tensor becomes its sum over ranks, in place, in one message for each dtype."""
        if self.size == 1:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor is not None:
                groups.setdefault(tensor.dtype, []).append(tensor)
        for group in groups.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            _told(lambda flat=flat: dist.all_reduce(flat))  # type: ignore[misc]
            for tensor, total in zip(group, flat.split([tensor.numel() for tensor in group])):
                tensor.copy_(total.reshape(tensor.shape))

    def sums(self, count: int, *numbers: float) -> Sequence[Tensor | float]:
        """What the shares of `count` things gave, each number summed over ranks, left on the GPU."""
        return self._added(*numbers).unbind() if self.splits(count) else [float(number) for number in numbers]

    def any(self, truth: bool) -> bool:
        """Whether it is true on any rank."""
        return truth if self.size == 1 else bool(self._added(float(truth)).item())

    def _added(self, *numbers: float) -> Tensor:
        totals = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        _told(lambda: dist.all_reduce(totals))
        return totals

    def once(self, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, on every rank; an error that a user can mend too."""
        if self.size == 1:
            return work()
        done: T | AnchorholdError | None = None
        if self.first:
            try:
                done = work()
            except AnchorholdError as error:
                done = error
        done = self.agreed(done)
        if isinstance(done, AnchorholdError):
            raise done
        return done  # type: ignore[return-value]

    def agreed(self, thing: T) -> T:
        """The first rank's, on every rank."""
        if self.size == 1:
            return thing
        held: list[Any] = [thing]
        _told(lambda: dist.broadcast_object_list(held, 0, device=self.device))
        return held[0]  # type: ignore[no-any-return]

    def collected(self, thing: T) -> list[T]:
        """That of every rank, in their order, on every rank."""
        if self.size == 1:
            return [thing]
        held: list[Any] = [None] * self.size
        _told(lambda: dist.all_gather_object(held, thing))
        return held

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor becomes the first rank's, in place: what batches of its own leave behind, as live BatchNorm."""
        if self.size > 1:
            for tensor in tensors:
                _told(lambda tensor=tensor: dist.broadcast(tensor, 0))  # type: ignore[misc]

    def alike(self, what: str, thing: object) -> None:
        """Refuse to go on where a rank has another `thing` than the first: they would go different ways, unseen."""
        held = self.collected(thing)
        other = next((rank for rank, each in enumerate(held) if each != held[0]), None)
        if other is not None:
            raise RunError(
                f"rank {other} has other {what} than rank 0: all need the same code, weights, images and run folder, "
                "on a disk that all see"
            )

    def wait(self) -> None:
        """Until all are here."""
        self.any(False)

    def _shares(self, count: int) -> list[slice]:
        ends = [-(-count * rank // self.size) for rank in range(self.size + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def _parts(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The rows of every rank, of which there are `counts`; in one message, so padded to the longest."""
        sent = mine.new_zeros(max(counts), *mine.shape[1:])
        sent[: len(mine)] = mine
        parts = [torch.empty_like(sent) for _ in counts]
        _told(lambda: dist.all_gather(parts, sent))
        return [part[:count] for part, count in zip(parts, counts)]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, ranks: Ranks, count: int) -> Tensor:
        ctx.mine, ctx.copies = ranks.share(count), 1
        if not ranks.splits(count):  # every rank has them all, and sums the same gradient so many times
            ctx.copies = ranks.size
            return mine.view_as(mine)
        return torch.cat(ranks._parts(mine, [s.stop - s.start for s in ranks._shares(count)]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        return above[ctx.mine] / ctx.copies, None, None
