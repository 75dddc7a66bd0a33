"""Checks files before they are opened: reading a pipe or a device might never end."""

import errno
import os
import stat
from pathlib import Path

__all__ = ["regular"]

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def regular(path: str | Path) -> Path:
    """The path of a regular file or of a link to one; an OSError for anything else, and for a missing file.

    >>> regular(os.devnull)
    Traceback (most recent call last):
    ...
    OSError: [Errno 22] it is a device and not a regular file: '/dev/null'
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind == stat.S_IFREG:
        return Path(path)
    what = f"it is {_KINDS.get(kind, 'something else')} and not a regular file"
    raise OSError(errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL, what, str(path))
