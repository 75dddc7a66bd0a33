"""Processes that decode images; threads would block each other, because Python runs one at a time."""

import mmap
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from multiprocessing import get_context
from typing import Any

from ..distributed import neighbours
from ..errors import RunError, lacks_memory
from ..interface import setting
from .decode import begin

__all__ = ["START", "Shared", "cores", "enough_memory", "hired"]

# On Linux fork is fast and needs nothing from the user's script; elsewhere it is not safe beside threads.
START = "fork" if sys.platform == "linux" else "spawn"


def cores() -> int:
    """The number of processors for this process; those of the machine are shared by all ranks on it."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // neighbours(), 1)


@dataclass(frozen=True, eq=False)
class Shared:
    """Memory shared by this process and its workers."""

    memory: Any
    shape: tuple[int, ...]

    @classmethod
    def of(cls, *shape: int) -> "Shared":
        """Shared memory of this shape; not in /dev/shm, which is small in containers.

        Workers that are not forked inherit an unlinked temporary file instead.
        """
        room = prod(shape)
        return cls(mmap.mmap(-1, room) if START == "fork" else get_context(START).RawArray("B", room), shape)

    @property
    def rows(self) -> Any:
        """The memory as an array of bytes."""
        import numpy as np

        return np.frombuffer(self.memory, np.uint8).reshape(self.shape)


def hired(workers: int, room: Shared | None) -> ProcessPoolExecutor:
    """A pool of workers that decode into `room`; without it they only check that files can be read."""
    from PIL import Image

    Image.init()  # loaded once, before the workers are forked
    place = None if room is None else (room.memory, room.shape)
    pool = ProcessPoolExecutor(workers, get_context(START), begin, (place, os.getpid()))
    try:
        with warnings.catch_warnings():  # Python 3.12 warns about forks beside threads; these take no lock
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(workers):  # forked workers all start at the first task, others one per task
                pool.submit(os.getpid)
    except OSError:  # no memory for another one: end the started ones, or the exit would wait for them for ever
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise died(workers) from None
    return pool


@contextmanager
def enough_memory(workers: int) -> Iterator[None]:
    """A one-line error if this process or a worker runs out of memory in the block."""
    try:
        yield
    except BrokenProcessPool:
        raise died(workers) from None
    except Exception as error:
        if not lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [""])[0]
        cause = f" ({reason})" if reason else ""
        raise RunError(f"out of memory while reading images{cause}; {_less(workers)}") from error


def _less(workers: int) -> str:
    fewer = max(workers // 2, 1)
    return f"free some memory; in training, try {setting('data.workers', fewer)} or {setting('data.store', 'stream')}"


def died(workers: int) -> RunError:
    """The error for a worker that died."""
    guard = "" if START == "fork" else ", or because your script lacks `if __name__ == '__main__':`"
    return RunError(f"a process that reads images died, most likely out of memory{guard}; {_less(workers)}")
