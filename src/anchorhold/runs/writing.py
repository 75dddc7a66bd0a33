"""Atomic writes: a file is written completely or not at all, and never through a symbolic link.

A file is written in a private folder beside it, `.NAME.RANDOM.anchorhold.part`, flushed to the disk and renamed. The
name of that folder cannot be guessed, and only its owner may enter it. A link at the path of the file is replaced,
not followed.
"""

import errno
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import AnchorholdError, RunError
from ..interface import resuming, worded
from .locks import PART, flocked, let_go

__all__ = ["RUN_FILES", "appended", "atomic", "csv_cell", "csv_text", "no_link", "refused"]

RUN_FILES = ("run.json", "metrics.jsonl", "last.safetensors", "model.safetensors")
_UMASK = os.umask(0)
os.umask(_UMASK)  # the umask can only be read by setting it

# Errors while a file is written: the reason, and what to do.
_FAILED = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("your disk quota is used up", "remove some of your files or ask for a larger quota"),
    errno.EFBIG: ("the file would be larger than the limit allows", "raise the limit (ulimit -f)"),
    errno.EIO: ("the disk reports an input/output error", "check the disk or choose another folder"),
}


@contextmanager
def atomic(path: Path, before: Path | None = None) -> Iterator[Path]:
    """A temporary path, renamed to `path` when the block succeeds and removed when it fails.

    A file that was at `path` is overwritten, or renamed to `before`.
    """
    room, lock = None, -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder, because libraries such as safetensors put their own temporary files beside the file.
        room = Path(tempfile.mkdtemp(PART, f".{path.name[:60]}.", path.parent))
        lock = os.open(room, os.O_RDONLY)
        flocked(lock)  # tells `tidy` that this folder is in use
        temporary = room / path.name
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_UMASK)  # safetensors creates files that only their owner may read
        if before is not None and path.exists():
            os.replace(path, before)
        os.replace(temporary, path)
    except Exception as error:
        reported = (
            None if isinstance(error, AnchorholdError) or _of_another(error, path, room) else refused(path, error)
        )
        if reported is None:
            raise
        raise reported from None
    finally:
        if room is not None:
            shutil.rmtree(room, ignore_errors=True)
        if lock >= 0:
            let_go(lock)


def _of_another(error: Exception, path: Path, room: Path | None) -> bool:
    """Whether an error is about a file unrelated to writing `path`, such as a missing image."""
    named = getattr(error, "filename", None)
    if not isinstance(named, str | os.PathLike):
        return False
    place = Path(named)
    return place not in (path, *path.parents) and (room is None or room not in (place, *place.parents))


def appended(path: Path, line: str) -> None:
    """Append a line to a file; a symbolic link is refused."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(file, "a", encoding="utf-8") as text:
            text.write(line)
    except OSError as error:
        raise refused(path, error) or error from None


def refused(path: Path, error: Exception) -> RunError | None:
    """A one-line error for a failed write to `path`; None if the error has another cause."""
    number = _errno(error)
    if number in _FAILED:
        reason, todo = _FAILED[number]
        resumable = path.name in RUN_FILES and (path.parent / "run.json").exists()
        again = worded(f"run `{resuming(path.parent)}`", f"call {resuming(path.parent)}") if resumable else "try again"
        return RunError(f"{reason}: {path} was not written, and its old version is intact; {todo}, then {again}")
    if isinstance(error, OSError) or number is not None:
        reason = f"{path.parent} is a file" if os.path.isfile(path.parent) else _reason(error)
        return RunError(f"cannot write {path}: {reason}; choose another folder")
    return None


def _errno(error: Exception) -> int | None:
    """The errno of an error; safetensors and others give it only as text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    number = re.search(r"\(os error (\d+)\)|\[Errno (\d+)\]", str(error))
    if number:
        return int(number[1] or number[2])
    return errno.ENOSPC if os.strerror(errno.ENOSPC) in str(error) else None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def csv_cell(text: str) -> str:
    """Text as a CSV cell, with an apostrophe before anything that a spreadsheet would run as a formula.

    `csv_text` removes the apostrophe again. Numbers stay unchanged.

    >>> csv_cell("=cmd()"), csv_cell("-0.5"), csv_cell("plain")
    ("'=cmd()", '-0.5', 'plain')
    """
    return f"'{text}" if _like_a_formula(text) else text


def csv_text(text: str) -> str:
    """The text that `csv_cell` was given.

    >>> [csv_text(csv_cell(text)) for text in ("=a", "'=a", "-1", "'a")]
    ['=a', "'=a", '-1', "'a"]
    """
    return text[1:] if text.startswith("'") and _like_a_formula(text[1:]) else text


def _like_a_formula(text: str) -> bool:
    bare = text.lstrip("'")  # text that already begins with apostrophes gets one more
    if not bare.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")):
        return False
    try:
        return bare != text or not math.isfinite(float(text))
    except ValueError:
        return True


def no_link(folder: Path) -> Path:
    """The same folder; a symbolic link is refused, because files are removed there."""
    if folder.is_symlink():
        raise RunError(
            f"{folder} is a symbolic link, and files would be removed behind it; "
            "remove the link, or choose another folder"
        )
    return folder
