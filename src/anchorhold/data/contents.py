"""Hashes of file contents, cached: each file is read once, and again only after a change.

Hashes are kept in the user's cache folder ($ANCHORHOLD_CACHE, or anchorhold/ in $XDG_CACHE_HOME or ~/.cache), one
JSON file for each folder of images. A hash is valid while length, times and inode of its file stay the same. Several
processes may write the cache: its files are replaced atomically, and lost hashes are computed again.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ..errors import AnchorholdError
from ..runs.writing import atomic
from .workers import cores

__all__ = ["hashes"]

_DIGITS = 32  # of the SHA-256 that are kept
_SETTLED = 2 * 10**9  # ns: a younger file could change again without a new time stamp

_read: dict[str, tuple[str, str]] = {}  # path: stamp and hash, for this process


def hashes(paths: Sequence[Path], progress: Callable[[int, int], None] | None = None) -> list[str]:
    """A hash of each file's contents; an unreadable file gives its length instead, a missing one an OSError.

    `progress` is called with the number of finished files and the total.
    """
    names = [os.path.abspath(path) for path in paths]
    stamps = [_stamp(name) for name in names]
    place = _place(names)
    if any(_read.get(name, ("",))[0] != stamp for name, stamp in zip(names, stamps)):
        _read.update(_kept(place))
    todo = [at for at, name in enumerate(names) if _read.get(name, ("",))[0] != stamps[at]]
    done = len(names) - len(todo)
    found = {at: _read[name][1] for at, name in enumerate(names) if _read.get(name, ("",))[0] == stamps[at]}
    with ThreadPoolExecutor(cores()) as pool:
        for at, mark in zip(todo, pool.map(lambda at: _hash(names[at], stamps[at]), todo)):
            found[at] = mark
            done += 1
            if progress is not None and done % 64 == 0:
                progress(done, len(names))
    if todo:
        _keep(place, names)
    return [found[at] for at in range(len(names))]


def _stamp(name: str) -> str:
    """A text that changes whenever the file changes; a fixed text if it is not a regular file."""
    found = os.stat(name)
    if not stat.S_ISREG(found.st_mode):
        return "not a file"
    return f"{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _hash(name: str, stamp: str) -> str:
    if stamp == "not a file":  # reading a pipe would block
        return stamp
    begun = time.time_ns()
    try:
        with open(name, "rb") as file:
            mark = hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
        if _stamp(name) == stamp and begun - int(stamp.split()[2]) > _SETTLED:  # ctime: set by every change
            _read[name] = stamp, mark
    except PermissionError:  # decoding handles it as a bad image
        return f"closed {stamp.split()[0]}"
    return mark


# ---- on the disk -----------------------------------------------------------------------------------------


def _place(names: Sequence[str]) -> Path | None:
    """The cache file for these files; None if there is no home folder."""
    if not names:
        return None
    around = os.path.commonpath([os.path.dirname(name) for name in names])
    own, usual = os.environ.get("ANCHORHOLD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(own) if own else (Path(usual) if usual else Path.home() / ".cache") / "anchorhold"
    except RuntimeError:
        return None
    key = hashlib.sha256(around.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGITS]
    return folder / "contents" / f"{key}.json"


def _kept(place: Path | None) -> dict[str, tuple[str, str]]:
    """The valid entries of the cache; damaged ones are ignored."""
    try:
        known = json.loads(place.read_text(encoding="utf-8")) if place and place.is_file() else {}
        return {
            name: (entry[0], entry[1])
            for name, entry in known.items()
            if isinstance(entry, list) and list(map(type, entry)) == [str, str] and len(entry[1]) == _DIGITS
        }
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _keep(place: Path | None, names: Sequence[str]) -> None:
    """Add the known hashes of these files to the cache; write errors are ignored."""
    own = {name: _read[name] for name in names if name in _read}
    if place is None or not own:
        return
    with suppress(OSError, AnchorholdError), atomic(place) as temporary:
        temporary.write_text(json.dumps(_kept(place) | own), encoding="utf-8")
