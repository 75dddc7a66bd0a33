"""Processes that decode images: threads would wait for each other, since Python lets one of them run at a time."""

import mmap
import os
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from typing import Any

from ..errors import RunError
from ..ranks import neighbours
from .decode import begin

__all__ = ["START", "Shared", "cores", "died", "hired"]

# Linux's fork is quick and asks nothing of the user's script; elsewhere a fork beside threads is not safe.
START = "fork" if sys.platform == "linux" else "spawn"


def cores() -> int:
    """How many processors this process may use, its neighbours of the same job apart."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // neighbours(), 1)


@dataclass(frozen=True, eq=False)
class Shared:
    """Bytes that this process and its workers have in common."""

    memory: Any
    shape: tuple[int, ...]

    @classmethod
    def of(cls, *shape: int) -> "Shared":
        """Room for that many, not in /dev/shm, which containers keep small.

        Who does not branch off is handed a file that has no name any more.
        """
        room = prod(shape)
        return cls(mmap.mmap(-1, room) if START == "fork" else get_context(START).RawArray("B", room), shape)

    @property
    def rows(self) -> Any:
        """The bytes as an array."""
        import numpy as np

        return np.frombuffer(self.memory, np.uint8).reshape(self.shape)


def hired(workers: int, room: Shared | None) -> ProcessPoolExecutor:
    """Workers that write what they decode to `room`; without one they only look whether files can be read."""
    from PIL import Image

    Image.init()  # what is loaded before the workers branch off they need not load
    place = None if room is None else (room.memory, room.shape)
    pool = ProcessPoolExecutor(workers, get_context(START), begin, (place, os.getpid()))
    try:
        with warnings.catch_warnings():  # from 3.12 on Python warns of forks beside threads; these take no lock
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(workers):  # forks all branch off at the first, others one at a time
                pool.submit(os.getpid)
    except OSError:  # no memory for one more: those that there are would be waited for at the end, and wait themselves
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise died(workers) from None
    return pool


def died(workers: int) -> RunError:
    """What to say of a worker that is gone."""
    guard = "" if START == "fork" else ", or for want of `if __name__ == '__main__':` around what a script does"
    return RunError(
        f"a process that reads images died, most often for want of memory{guard}; free some, or in training "
        f"take less: --set data.workers={max(workers // 2, 1)} or --set data.store=stream"
    )
