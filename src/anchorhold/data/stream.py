"""Streaming of images that do not fit into memory: worker processes decode them in advance.

The workers write into shared memory, in parts of a few images. The result is deterministic: the frames and their order
are those of a resident store, for any number of workers.
"""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, RunError
from .decode import Bad, Square, fill, fill_shared, shape_of
from .workers import Shared, cores, enough_memory, hired

__all__ = ["StreamStore", "memory_left"]

PART = 8  # images per task of a worker
AHEAD = 4  # parts per worker that are decoded or waiting

Part = tuple[list[Path], int, "Future[Bad] | None"]  # files, place in shared memory (-1: none), pending result


@dataclass(frozen=True, eq=False)
class Crew:
    """Worker processes, their shared memory, and its free parts."""

    pool: ProcessPoolExecutor
    memory: Any
    free: list[int]


class StreamStore:
    """Frames of files, decoded by `workers` processes; only the next ones are in memory."""

    def __init__(self, paths: tuple[Path, ...], size: int | Square, device: torch.device, workers: int = 0) -> None:
        self.paths, self.size, self.device = paths, size, device
        self.workers = workers or cores()
        self.crew: Crew | None = None  # created at first use

    def frames(self, plan: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each 1-D tensor of ids its frames (n, H, W, C) on the device, in the plan's order."""
        batches = self._batches([ids.tolist() for ids in plan])
        # Assemble the next batch while this one is used, which costs nothing while a step waits for the GPU.
        behind = ThreadPoolExecutor(1)
        try:
            coming = behind.submit(next, batches, None)
            while (frames := coming.result()) is not None:
                coming = behind.submit(next, batches, None)
                yield frames.to(self.device, non_blocking=self.device.type == "cuda")
        finally:
            # Do not wait: a hanging disk must not block Ctrl-C. The single thread runs its tasks in order, so the
            # generator is not running when it is closed.
            with suppress(RuntimeError):  # the interpreter is already shutting down
                behind.submit(batches.close)
            behind.shutdown(wait=False)

    def _batches(self, batches: list[list[int]]) -> Generator[Tensor, None, None]:
        """The frames of each batch in host memory."""
        parts = iter([batch[at : at + PART] for batch in batches for at in range(0, len(batch), PART)])
        waiting: deque[Part] = deque()
        self.crew = crew = self.crew or _crew(self.workers, *shape_of(self.size))
        try:
            with enough_memory(self.workers):
                for batch in batches:
                    pin = self.device.type == "cuda"
                    shape = (len(batch), *shape_of(self.size), 3)
                    frames = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
                    rows, done = frames.numpy(), 0
                    while done < len(batch):
                        self._send(crew, parts, waiting)
                        done += self._take(crew, waiting.popleft(), rows[done:])
                    yield frames
        except RunError:
            self.crew = None
            raise
        finally:
            # After an early stop workers may still write to the waiting parts; free each when its worker is done.
            for _, place, future in waiting:
                if future is not None:
                    future.add_done_callback(lambda _, place=place: crew.free.append(place))  # type: ignore[misc]
                    future.cancel()

    def close(self) -> None:
        """End the workers; they also end with the store, and when this process dies."""
        if self.crew is not None:
            self.crew.pool.shutdown(wait=True, cancel_futures=True)
        self.crew = None

    def _send(self, crew: Crew, parts: Iterator[list[int]], waiting: deque[Part]) -> None:
        """Submit as many parts to the workers as there is room for."""
        while crew.free or not waiting:
            ids = next(parts, None)
            if ids is None:
                return
            paths = [self.paths[i] for i in ids]
            try:
                place = crew.free.pop()
            except IndexError:  # another, unfinished iteration over this store holds all the room
                waiting.append((paths, -1, None))
                return
            waiting.append((paths, place, crew.pool.submit(fill_shared, place, paths, self.size)))

    def _take(self, crew: Crew, part: Part, rows: Any) -> int:
        """Copy the images of a part to their rows, and return their number."""
        paths, place, future = part
        if future is None:
            bad = fill(rows, paths, self.size)
        else:
            bad = future.result()
            # With NumPy: torch would split this small copy among threads, for which the workers leave no cores.
            rows[: len(paths)] = crew.memory[place, : len(paths)]
            crew.free.append(place)
        if bad:
            row, reason = bad[0]
            raise DataError(
                f"cannot read {paths[row]}: {reason}; it was readable when the run began: repair it, then resume"
            )
        return len(paths)


def _crew(workers: int, height: int, width: int) -> Crew:
    room = Shared.of(AHEAD * workers, PART, height, width, 3)
    return Crew(hired(workers, room), room.rows, list(range(AHEAD * workers)))


def memory_left(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of host memory available now, according to the system and to every limit of a control group."""
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        left = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        left = _physical() // 2
    return max(min([left, *_allowed(proc, groups)]), 0)


def _physical() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # unknown
        return 2**33


def _allowed(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in each control group (version 2 or 1), from the process's own up to the root.

    A container may see its own group as the root, or get a path that it cannot see; missing groups are ignored. Cached
    files that can be dropped (inactive_file) do not count as used memory.
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
            except (OSError, ValueError):  # the group is missing or has no limit ("max")
                continue
            with suppress(OSError, ValueError):
                held = dict(line.split() for line in (root / level / "memory.stat").read_text().splitlines())
                used -= int(held.get(names[2], 0))
            yield limit - used
