"""Images that do not fit into memory: worker processes decode them ahead of need.

The workers write into memory that they share with the reader, and each part of it holds a few images. Nothing random
happens here: the frames are those of a store that holds them all, in the same order, whatever the number of workers.
"""

import mmap
import os
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, RunError
from .store import _pixels, _reason

__all__ = ["StreamStore", "cores", "memory_left"]

PART = 8  # images that a worker takes at once
AHEAD = 4  # parts for each worker, decoded or waiting for it

Part = tuple[list[Path], int, "Future[str] | None"]  # the files, their place in the memory (none: -1), who is at it

_shared: Any = None  # in a worker: the memory it writes to, (parts, PART, size, size, 3); never set in the reader


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
        batches = [ids.tolist() for ids in plan]
        parts = iter([batch[at : at + PART] for batch in batches for at in range(0, len(batch), PART)])
        waiting: deque[Part] = deque()
        self.crew = crew = self.crew or _hired(self.workers, self.size)
        pin = self.device.type == "cuda"
        try:
            for batch in batches:
                frames = torch.empty((len(batch), self.size, self.size, 3), dtype=torch.uint8, pin_memory=pin)
                done = 0
                while done < len(batch):
                    self._send(crew, parts, waiting)
                    done += self._take(crew, waiting.popleft(), frames[done:])
                yield frames.to(self.device, non_blocking=pin)
        except BrokenProcessPool:
            self.crew = None
            raise RunError(
                "a process that reads images died, most often for want of memory; "
                f"try again with --set data.workers={max(self.workers // 2, 1)}"
            ) from None
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
            if not crew.free:  # another reader of this store stopped half way and holds all the room
                waiting.append((paths, -1, None))
                return
            place = crew.free.pop()
            waiting.append((paths, place, crew.pool.submit(_decode, place, paths, self.size)))

    def _take(self, crew: Crew, part: Part, rows: Tensor) -> int:
        """Copy a part's images to where they belong, and say how many they are."""
        paths, place, future = part
        if future is None:
            bad = _fill(rows.numpy(), paths, self.size)
        else:
            bad = future.result()
            rows[: len(paths)] = torch.from_numpy(crew.memory[place, : len(paths)])
            crew.free.append(place)
        if bad:
            raise DataError(f"{bad}; it could be read when the run began: mend it, then go on")
        return len(paths)


def _hired(workers: int, size: int) -> Crew:
    import numpy as np
    from PIL import Image

    Image.init()  # what is loaded before the workers branch off they need not load
    count = AHEAD * workers
    # Not in /dev/shm, which containers keep small: memory that a process and its forks have in common.
    memory = np.frombuffer(mmap.mmap(-1, count * PART * size * size * 3), np.uint8)
    memory = memory.reshape(count, PART, size, size, 3)
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (memory, os.getpid()))
    with warnings.catch_warnings():  # from 3.12 on Python warns of forks beside threads; these take no lock
        warnings.simplefilter("ignore", DeprecationWarning)
        pool.submit(os.getpid)  # all of them branch off at the first
    return Crew(pool, memory, list(range(count)))


def _begin(memory: Any, reader: int) -> None:
    """What a worker does first."""
    global _shared
    _shared = memory
    # Ctrl-C goes to every process of a terminal; the reader ends its step and then its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def _watch(reader: int) -> None:
    """End with the reader, however it ends: a worker that waits for work would wait for ever."""
    while os.getppid() == reader:
        time.sleep(1)
    os._exit(1)


def _decode(place: int, paths: list[Path], size: int) -> str:
    return _fill(_shared[place], paths, size)


def _fill(rows: Any, paths: list[Path], size: int) -> str:
    """Put the images into their rows; what is wrong with the first bad one."""
    for row, path in enumerate(paths):
        try:
            rows[row] = _pixels(path, size)
        except Exception as error:  # what a broken file makes Pillow raise is without end
            return f"cannot read {path}: {_reason(error)}"
    return ""


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_left() -> int:
    """Bytes of host memory that could be used now, by the system's account and by that of the container."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        left = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit
        return left
    return min(left, max(limit - used + int(held.get("inactive_file", 0)), 0))
