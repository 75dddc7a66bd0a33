"""Processes that a test starts, waits for and kills."""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def forked(work: Callable[[], object]) -> int:
    """A fork that does `work`; its number.

    It ends with the work, whatever happens: a fork that went back to pytest would report tests of its own.
    """
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


@contextmanager
def spawned(work: Callable[..., object], *given: Any, until: Path) -> Iterator[int]:
    """A new process that does `work`, once it has made the file `until`; its number. It is killed at the end.

    For work with threads, which a fork does not have.
    """
    process = get_context("spawn").Process(target=work, args=given)
    process.start()
    try:
        end = time.monotonic() + 300  # it imports torch, on a machine that may be busy
        while not until.exists():
            assert process.is_alive(), f"it ended before its time: {process.exitcode}"
            assert time.monotonic() < end, f"no {until} after 300 s"
            time.sleep(0.02)
        assert process.pid
        yield process.pid
    finally:
        process.kill()
        process.join()


def killed(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
