"""Several processes (ranks) that torchrun starts for one job; or a single process.

    torchrun --nproc-per-node 4 -m anchorhold train cub --root CUB_200_2011 --recipe hm-lga --out runs/hm

Every rank sees the whole batch and embeds its share. The embeddings are gathered, so mining, losses and the state of a
defence are those of the whole batch on every rank. The number of ranks therefore changes only the speed, and the order
in which numbers are added. In float64 this is invisible. In fp32 an attack with signed steps turns rounding errors into
different pixels after some steps, and the weights diverge; results/notes/scale.md has measurements.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import AnchorholdError, RunError, from_environment
from .interface import option

__all__ = ["Ranks", "joined", "local_rank", "neighbours", "started"]

T = TypeVar("T")

# Other ranks may be busy for long, with a batch of a strong audit or a slow disk. If one dies, torchrun ends all.
PATIENCE = timedelta(hours=6)


def started() -> tuple[int, int]:
    """This process's rank and the number of ranks, as set by torchrun; (0, 1) without it."""
    rank, size = from_environment("RANK", 0, 0), from_environment("WORLD_SIZE", 1, 1)
    if rank >= size:
        raise RunError(f"RANK is {rank} of WORLD_SIZE {size}: start with torchrun, or unset both")
    return rank, size


def local_rank() -> int:
    """The rank among the processes on this machine, which is also the number of its GPU."""
    return from_environment("LOCAL_RANK", 0, 0)


def neighbours() -> int:
    """The number of processes of this job on this machine, which share its memory and processors."""
    return from_environment("LOCAL_WORLD_SIZE", 1, 1)


def joined(device: torch.device) -> "Ranks":
    """Connect the ranks of this job: by NCCL on GPUs, by gloo on CPUs."""
    rank, size = started()
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        _communicate(lambda: dist.init_process_group(backend, timeout=PATIENCE))
    return Ranks(rank, size, device)


def _communicate(call: Callable[[], T]) -> T:
    """The result of a call to the other ranks; a one-line error if they do not answer."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200]
        raise RunError(
            f"rank {started()[0]} lost the other ranks: a process died or the network failed ({reason}); "
            f"to resume, start torchrun again with `resume` (or audit or embed with the same {option('out')})"
        ) from None


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job, and how they exchange and combine results."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None  # on which they exchange tensors

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and reports progress."""
        return self.rank == 0

    def splits(self, count: int) -> bool:
        """Whether `count` items are divided among the ranks; with fewer than two per rank, every rank does them all.

        The reason: live BatchNorm has no statistics of a single image.
        """
        return self.size > 1 and count >= 2 * self.size

    def share(self, count: int) -> slice:
        """This rank's part of `count` items in order.

        >>> [Ranks(rank, 3).share(7) for rank in range(3)]
        [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
        """
        return self._shares(count)[self.rank] if self.splits(count) else slice(0, count)

    def gathered(self, mine: Tensor, count: int) -> Tensor:
        """All `count` rows, of which `mine` are this rank's share. Gradients reach only the own rows.

        Every rank must compute the same from the result. The gradients of the weights, summed over ranks, are then
        those of the whole batch.
        """
        if self.size == 1:
            return mine
        out: Tensor = _Gathered.apply(mine, self, count)
        return out

    def spread(self, items: Sequence[T], work: Callable[[Sequence[T]], Tensor], lengths: Sequence[int]) -> Tensor:
        """Run `work` on this rank's items, and return the rows of all ranks in order.

        Item i gives lengths[i] rows. Items are never split, so the result does not depend on the number of ranks.
        """
        if not 1 < self.size <= len(items):
            return work(items)
        mine = self._shares(len(items))
        counts = [sum(lengths[part]) for part in mine]
        return torch.cat(self._parts(work(items[mine[self.rank]]), counts))

    def summed(self, tensors: Iterable[Tensor | None]) -> None:
        """Replace every tensor by its sum over ranks, in one message for each dtype."""
        if self.size == 1:
            return
        groups: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor is not None:
                groups.setdefault(tensor.dtype, []).append(tensor)
        for group in groups.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            _communicate(lambda flat=flat: dist.all_reduce(flat))  # type: ignore[misc]
            for tensor, total in zip(group, flat.split([tensor.numel() for tensor in group])):
                tensor.copy_(total.reshape(tensor.shape))

    def sums(self, count: int, *numbers: float) -> Sequence[Tensor | float]:
        """Sum the numbers that each rank computed from its share of `count` items; the result stays on the GPU."""
        return self._added(*numbers).unbind() if self.splits(count) else [float(number) for number in numbers]

    def any(self, truth: bool) -> bool:
        """Whether `truth` is true on any rank."""
        return truth if self.size == 1 else bool(self._added(float(truth)).item())

    def _added(self, *numbers: float) -> Tensor:
        totals = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        _communicate(lambda: dist.all_reduce(totals))
        return totals

    def once(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank; every rank gets its result, or its AnchorholdError."""
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
        """The first rank's `thing`, on every rank."""
        if self.size == 1:
            return thing
        held: list[Any] = [thing]
        _communicate(lambda: dist.broadcast_object_list(held, 0, device=self.device))
        return held[0]  # type: ignore[no-any-return]

    def collected(self, thing: T) -> list[T]:
        """The `thing` of every rank, in order, on every rank."""
        if self.size == 1:
            return [thing]
        held: list[Any] = [None] * self.size
        _communicate(lambda: dist.all_gather_object(held, thing))
        return held

    def same(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's tensors to all ranks, in place; for live BatchNorm, whose statistics diverge."""
        if self.size > 1:
            for tensor in tensors:
                _communicate(lambda tensor=tensor: dist.broadcast(tensor, 0))  # type: ignore[misc]

    def alike(self, what: str, thing: object) -> None:
        """Refuse to continue if `thing` differs between ranks: their results would silently diverge."""
        held = self.collected(thing)
        other = next((rank for rank, each in enumerate(held) if each != held[0]), None)
        if other is not None:
            raise RunError(
                f"rank {other} has other {what} than rank 0: give all ranks the same code, weights, images and run "
                "folder, on a shared disk"
            )

    def wait(self) -> None:
        """Wait until all ranks have arrived here."""
        self.any(False)

    def _shares(self, count: int) -> list[slice]:
        ends = [-(-count * rank // self.size) for rank in range(self.size + 1)]
        return [slice(a, b) for a, b in pairwise(ends)]

    def _parts(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The rows of every rank (`counts` of them), exchanged in one message and therefore padded to the longest."""
        sent = mine.new_zeros(max(counts), *mine.shape[1:])
        sent[: len(mine)] = mine
        parts = [torch.empty_like(sent) for _ in counts]
        _communicate(lambda: dist.all_gather(parts, sent))
        return [part[:count] for part, count in zip(parts, counts)]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, ranks: Ranks, count: int) -> Tensor:
        ctx.mine, ctx.copies = ranks.share(count), 1
        if not ranks.splits(count):  # every rank has all rows, so the sum over ranks counts the gradient `size` times
            ctx.copies = ranks.size
            return mine.view_as(mine)
        return torch.cat(ranks._parts(mine, [s.stop - s.start for s in ranks._shares(count)]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        return above[ctx.mine] / ctx.copies, None, None
