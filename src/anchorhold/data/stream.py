"""Images that do not fit into memory: worker processes decode them ahead of need.

The workers write into memory that they share with the reader, and each part of it holds a few images. Nothing random
happens here: the frames are those of a store that holds them all, in the same order, whatever the number of workers.
"""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from .decode import Bad, fill, fill_shared
from .workers import Shared, cores, died, hired

__all__ = ["StreamStore", "memory_left"]

PART = 8  # images that a worker takes at once
AHEAD = 4  # parts for each worker, decoded or waiting for it

Part = tuple[list[Path], int, "Future[Bad] | None"]  # the files, their place in the memory (none: -1), who is at it


@dataclass(frozen=True, eq=False)
class Crew:
    """Worker processes, the memory that they write to, and which parts of it are free."""

    pool: ProcessPoolExecutor
    memory: Any
    free: list[int]


class StreamStore:
    """The frames of files, decoded by `workers` processes; nothing but what comes next is in memory."""

    def __init__(self, paths: tuple[Path, ...], size: int, device: torch.device, workers: int = 0) -> None:
        self.paths, self.size, self.device = paths, size, device
        self.workers = workers or cores()
        self.crew: Crew | None = None  # made when first needed

    def frames(self, plan: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each 1-D tensor of ids its frames (n, H, W, C) on the device, in the plan's order."""
        batches = self._batches([ids.tolist() for ids in plan])
        # The next batch is put together while this one is used: a step that waits for a GPU leaves the time for it.
        behind = ThreadPoolExecutor(1)
        try:
            coming = behind.submit(next, batches, None)
            while (frames := coming.result()) is not None:
                coming = behind.submit(next, batches, None)
                yield frames.to(self.device, non_blocking=self.device.type == "cuda")
        finally:
            # Without waiting: a file on a disk that does not answer must not keep Ctrl-C from being heard. The one
            # thread takes things in turn, so that what is closed does not run.
            with suppress(RuntimeError):  # the interpreter ends already, and the thread with it
                behind.submit(batches.close)
            behind.shutdown(wait=False)

    def _batches(self, batches: list[list[int]]) -> Generator[Tensor, None, None]:
        """The frames of each batch in the host's memory."""
        parts = iter([batch[at : at + PART] for batch in batches for at in range(0, len(batch), PART)])
        waiting: deque[Part] = deque()
        self.crew = crew = self.crew or _crew(self.workers, self.size)
        try:
            for batch in batches:
                pin = self.device.type == "cuda"
                frames = torch.empty((len(batch), self.size, self.size, 3), dtype=torch.uint8, pin_memory=pin)
                rows, done = frames.numpy(), 0
                while done < len(batch):
                    self._send(crew, parts, waiting)
                    done += self._take(crew, waiting.popleft(), rows[done:])
                yield frames
        except BrokenProcessPool:
            self.crew = None
            raise died(self.workers) from None
        finally:
            # Who stops early leaves parts behind, and a worker may be writing to them still.
            for _, place, future in waiting:
                if future is not None:
                    future.add_done_callback(lambda _, place=place: crew.free.append(place))  # type: ignore[misc]
                    future.cancel()

    def close(self) -> None:
        """End the workers; they also end with the store, and when the reader dies."""
        if self.crew is not None:
            self.crew.pool.shutdown(wait=True, cancel_futures=True)
        self.crew = None

    def _send(self, crew: Crew, parts: Iterator[list[int]], waiting: deque[Part]) -> None:
        """Give the workers all that there is room for."""
        while crew.free or not waiting:
            ids = next(parts, None)
            if ids is None:
                return
            paths = [self.paths[i] for i in ids]
            try:
                place = crew.free.pop()
            except IndexError:  # another reader of this store stopped half way and holds all the room
                waiting.append((paths, -1, None))
                return
            waiting.append((paths, place, crew.pool.submit(fill_shared, place, paths, self.size)))

    def _take(self, crew: Crew, part: Part, rows: Any) -> int:
        """Copy a part's images to where they belong, and say how many they are."""
        paths, place, future = part
        if future is None:
            bad = fill(rows, paths, self.size)
        else:
            bad = future.result()
            # By NumPy: torch would share so small a copy among threads, which the workers keep from running.
            rows[: len(paths)] = crew.memory[place, : len(paths)]
            crew.free.append(place)
        if bad:
            row, reason = bad[0]
            raise DataError(
                f"cannot read {paths[row]}: {reason}; it could be read when the run began: mend it, then go on"
            )
        return len(paths)


def _crew(workers: int, size: int) -> Crew:
    room = Shared.of(AHEAD * workers, PART, size, size, 3)
    return Crew(hired(workers, room), room.rows, list(range(AHEAD * workers)))


def memory_left(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory that could be used now: by the system's account, and by each limit that we live under."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        left = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        left = _physical() // 2
    return max(min([left, *_allowed(proc, groups)]), 0)


def _physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # nobody says
        return 2**33


def _allowed(proc: Path, groups: Path) -> Iterator[int]:
    """What each control group leaves, from the process's own up to the root, of version 2 and of version 1.

    A container may see its own group as the root, or be told a path that it cannot see: what is not there limits
    nothing. Files that were read and can be dropped (inactive_file) are no use of memory.
    """
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    paths = {kind: path for _, kinds, path in (line for line in lines if len(line) == 3) for kind in kinds.split(",")}
    for root, kind, names in (
        (groups, "", ("memory.max", "memory.current", "inactive_file")),
        (groups / "memory", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ):
        own = PurePosixPath(paths.get(kind, "").lstrip("/"))
        for level in (PurePosixPath(),) if ".." in own.parts else (own, *own.parents):
            try:
                limit, used = (int((root / level / name).read_text()) for name in names[:2])
            except (OSError, ValueError):  # no such group, or one without a limit ("max")
                continue
            with suppress(OSError, ValueError):
                held = dict(line.split() for line in (root / level / "memory.stat").read_text().splitlines())
                used -= int(held.get(names[2], 0))
            yield limit - used
