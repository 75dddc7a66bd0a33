"""One writer at a time in a folder; the system releases the lock when its holder dies.

The lock is `flock` on a small file in the folder, which also says which process holds it. It is removed at the end. A
file that a killed process left behind locks nothing.
"""

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from ..interface import option

if TYPE_CHECKING:
    from ..console import Report
    from ..distributed import Ranks

__all__ = ["LOCK", "PART", "flocked", "let_go", "one_writer", "tidy"]

LOCK = ".anchorhold-lock"
PART = ".anchorhold.part"  # suffix of folders with half-written files; plain .part belongs to other programs' downloads
_LONGEST = 4096  # bytes of a lock file that are read, since another program may have written it

_held: set[int] = set()


def _close_in_child() -> None:
    """Release the parent's locks in a forked worker, or they would outlive a killed parent."""
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def flocked(file: int) -> bool | None:
    """Lock this open file; False if another process holds it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, ENOTSUP, EINVAL, …: file systems differ
        return None
    _held.add(file)
    return True


def let_go(file: int) -> None:
    """Close a file, which releases its lock."""
    _held.discard(file)
    os.close(file)


@contextmanager
def one_writer(folder: str | Path, ranks: "Ranks", report: "Report") -> Iterator[None]:
    """Lock the folder for the block, creating it if needed; refuse one that another process holds.

    With several ranks the first takes the lock, and all fail together.
    """
    lock = _Lock(Path(folder))
    warning = ranks.once(lock.take)
    if warning:
        report.say(warning)
    try:
        yield
    finally:
        lock.release()


class _Lock:
    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / LOCK
        self.file: int | None = None
        self.made = False  # whether we created the folder, to remove it if it stays empty

    def take(self) -> str:
        """Lock the folder. Returns a warning if the file system has no locks, else ""."""
        self.made = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "it is a file" if self.folder.is_file() else error.strerror
            raise RunError(
                f"cannot create the folder {self.folder}: {reason}; choose another {option('out')}"
            ) from None
        while True:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if error.errno == errno.ENOENT:  # another process removed the empty folder it had created
                    self.folder.mkdir(parents=True, exist_ok=True)
                    continue
                if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise RunError(f"{self.path} is not a lock file of Anchorhold; remove it") from None
                return ""  # the folder is not writable, which the first write reports
            locked = flocked(file)
            if locked is None:
                let_go(file)
                return (
                    f"warning: this file system cannot lock {self.folder}; do not start a second job that writes there"
                )
            if not locked:
                holder = _holder(file)
                let_go(file)
                raise RunError(
                    f"{self.folder} is in use by {holder}; wait until it ends, or choose another {option('out')}"
                )
            if self._is_still(file):
                break
            let_go(file)  # its holder removed it between our open and our lock
        if not stat.S_ISREG(os.fstat(file).st_mode):
            let_go(file)
            raise RunError(f"{self.path} is not a lock file of Anchorhold; remove it")
        self.file = file
        tidy(self.folder)
        with suppress(OSError):  # a full disk loses the note, not the lock
            os.ftruncate(file, 0)
            os.write(file, json.dumps(_self()).encode())
        return ""

    def release(self) -> None:
        """Remove the lock file, and a created folder that stayed empty; release the lock only then."""
        if self.file is None:
            return
        with suppress(OSError):
            self.path.unlink()
        if self.made:
            with suppress(OSError):
                self.folder.rmdir()
        let_go(self.file)
        self.file = None

    def _is_still(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.lstat(self.path))
        except OSError:
            return False


def tidy(folder: Path) -> None:
    """Remove half-written files of killed processes from a folder; files still being written stay."""
    for left in folder.glob(f".*{PART}"):
        if left.is_symlink() or not left.is_dir():
            continue
        try:
            lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        if flocked(lock):
            shutil.rmtree(left, ignore_errors=True)
        let_go(lock)


def _self() -> dict[str, Any]:
    command = shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": command[:300]}


def _holder(file: int) -> str:
    """The process that holds a lock, as text; the content of the file is not trusted."""
    try:
        holder = json.loads(os.pread(file, _LONGEST, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
