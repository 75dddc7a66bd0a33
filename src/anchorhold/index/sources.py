"""The images to embed: those below a folder, those in a CSV, or those in a tar.

A source is listed first, so that its defects are reported before hours of work. It is then read in the order of the
list. A tar is only read as a stream; it is never unpacked to disk.
"""

import csv
import hashlib
import io
import lzma
import os
import posixpath
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from ..console import shown
from ..data.layouts import EXTENSIONS, some
from ..errors import DataError

__all__ = ["Item", "Source", "digest_of", "problem_of", "shown", "source_at"]

_MOST = 2**27  # bytes of one image in a tar, which is read into memory: a small tar may unpack to any size
_HEADER = 2**20  # bytes of a long name or of extended headers in a tar, which are read into memory too
_PIECE = 2**18  # bytes that are read from a tar at once
_WORDS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
# TypeError: on a damaged gzip Python's own reader adds None to bytes.
_TORN = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, TypeError)


@dataclass(frozen=True, slots=True)
class Item:
    """One image: its id, its label (or ""), its size in bytes, and the reason if it is known to be unreadable.

    `stamp` changes when the image does: it is its modification time, and in a tar also its offset. `folder` is its
    class folder, for an image without a label, which follows from the id.
    """

    id: str
    label: str = ""
    size: int = 0
    stamp: str = ""
    problem: str = ""
    folder: str = ""

    @property
    def named(self) -> str:
        """Its label, given or by its folder."""
        return self.label or self.folder


@dataclass(frozen=True, eq=False)
class Source:
    """Images in a fixed order; `paths` are their files, or None for a tar. `notes` are sentences for the user."""

    place: Path
    items: tuple[Item, ...]
    paths: tuple[Path, ...] | None
    labelled: bool = False
    notes: tuple[str, ...] = ()

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Path | io.BytesIO | None]]:
        """The number of each wanted item and what to decode, in order; None if the item has a problem."""
        if self.paths is None:
            yield from self._stream(wanted)
            return
        for number, (item, path) in enumerate(zip(self.items, self.paths)):
            if wanted(number):
                yield number, None if item.problem else path

    def _stream(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, io.BytesIO | None]]:
        changed = DataError(f"{self.place} changed while it was read; start again when it is complete")
        numbers = iter(range(len(self.items)))
        with _opened(self.place) as tar:
            for name, member in _members(self.place, tar):
                if not _is_image(name, member):
                    continue
                number = next(numbers, None)
                if number is None or replace(self.items[number], problem="", folder="") != _packed(name, member):
                    raise changed
                if not wanted(number):
                    continue
                file = None if self.items[number].problem else tar.extractfile(member)
                yield number, None if file is None else _held(file)
        if next(numbers, None) is not None:
            raise changed


def source_at(place: str | Path) -> Source:
    """The images of a folder, of a .csv with a column `path` (and optionally `label`), or of a tar."""
    path = Path(place).expanduser()
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(str(path))} cannot be read ({reason}); give a folder, a .csv or a tar") from None
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise DataError(f"{shown(str(path))} is neither a folder nor a regular file; give a folder, a .csv or a tar")
    if stat.S_ISDIR(mode):
        found = _folder(path)
    elif path.suffix.lower() == ".csv":
        found = _listed(path)
    else:
        found = _tar(path)
    if not found.items:
        raise DataError(f"{path} has no images; image names end in {', '.join(sorted(EXTENSIONS))}")
    return found


def problem_of(path: Path) -> tuple[int, str, str]:
    """Size and stamp of a file, and the reason if it is no regular file; reading a pipe might never end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        return 0, "", getattr(error, "strerror", None) or str(error)
    if not stat.S_ISREG(found.st_mode):
        return 0, "", "not a file"
    return found.st_size, str(found.st_mtime_ns), "" if found.st_size else "the file is empty"


def digest_of(items: Sequence[Item]) -> str:
    """A short hash of the ids, given labels, sizes and stamps of items; file contents are not read."""
    digest = hashlib.blake2b(digest_size=8)
    for item in items:
        digest.update(f"{item.id}\0{item.label}\0{item.size}\0{item.stamp}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _item(name: str, label: str, path: Path) -> Item:
    return Item(name, label, *problem_of(path))


# ---- a folder --------------------------------------------------------------------------------------------


def _folder(root: Path) -> Source:
    """Every image below `root`, sorted by name; linked folders are skipped, to avoid loops."""

    def unreadable(error: OSError) -> None:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}); give a folder that you may read"
        ) from error

    names: list[str] = []
    linked: list[str] = []
    for place, inner, files in os.walk(root, onerror=unreadable):
        below = os.path.relpath(place, root)
        inner[:] = [name for name in inner if not name.startswith(".")]
        linked += [_joined(below, name) for name in inner if os.path.islink(os.path.join(place, name))]
        names += [_joined(below, name) for name in files if _named_as_image(name)]
        # os.walk lists a dangling link as a file; with the name of an image it counts as a bad image.
        linked += [_joined(below, name) for name in files if not _named_as_image(name) and _dangles(place, name)]
    names.sort()
    count = "1 link" if len(linked) == 1 else f"{len(linked)} links"
    notes = (f"left out {count}: {shown(some(sorted(linked)))}.",) if linked else ()
    paths, folders = tuple(root / name for name in names), _classes(names)
    items = tuple(replace(_item(name, "", path), folder=own) for name, path, own in zip(names, paths, folders))
    return Source(root, items, paths, labelled=any(folders), notes=notes)


def _classes(names: Sequence[str], packed: bool = False) -> list[str]:
    """The class folder of each image, as training reads a folder; "" for all where it is not one of class folders.

    A folder of class folders has two at least, and no images beside them. They may lie in train/ and test/, and a tar
    may have all of it in one folder.
    """
    parts = [name.split("/") for name in names]
    if packed and len({part[0] for part in parts}) == 1 and all(len(part) > 2 for part in parts):
        parts = [part[1:] for part in parts]
    if {part[0] for part in parts if len(part) > 1} == {"train", "test"}:
        parts = [part[1:] for part in parts]
    flat = any(len(part) == 1 for part in parts) or len({part[0] for part in parts}) < 2
    return ["" if flat else part[0] for part in parts]


def _joined(folder: str, name: str) -> str:
    return name if folder == "." else f"{folder.replace(os.sep, '/')}/{name}"


def _dangles(place: str, name: str) -> bool:
    path = os.path.join(place, name)
    return os.path.islink(path) and not os.path.exists(path)


def _named_as_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


# ---- a CSV -----------------------------------------------------------------------------------------------


def _listed(table: Path) -> Source:
    """The images that a CSV lists, in its order; paths are relative to the folder of the CSV."""
    items: list[Item] = []
    paths: list[Path] = []
    lines: dict[str, int] = {}
    try:
        with open(table, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            columns = [name.strip() for name in rows.fieldnames or ()]
            if "path" not in columns or len(set(columns)) < len(columns):
                raise DataError(
                    f"{table} begins with {shown(','.join(columns)) or 'nothing'}; "
                    "its first line must name the columns: path, or path,label"
                )
            rows.fieldnames = columns
            for row in rows:
                written = (row["path"] or "").strip()
                if not written or None in row:
                    raise DataError(f"line {rows.line_num} of {table} is not path[,label]; correct or remove it")
                name = posixpath.normpath(written)
                if name in lines:
                    raise DataError(
                        f"{table} lists {shown(name)} twice, on lines {lines[name]} and {rows.line_num}; keep one"
                    )
                lines[name] = rows.line_num
                paths.append(table.parent / written)
                items.append(_item(name, (row.get("label") or "").strip(), paths[-1]))
    except UnicodeDecodeError:
        raise DataError(f"{table} is not UTF-8; save it as CSV in UTF-8") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{table} cannot be read ({error}); save it as CSV in UTF-8") from None
    return Source(table, tuple(items), tuple(paths), labelled="label" in columns)


# ---- a tar -----------------------------------------------------------------------------------------------


def _tar(path: Path) -> Source:
    """The images in a tar, in its order; duplicate names and names outside the tar are refused."""
    items: list[Item] = []
    seen: set[str] = set()
    links: list[str] = []
    with _opened(path) as tar:
        for name, member in _members(path, tar):
            if member.issym() or member.islnk():
                links.append(name)
            if not _is_image(name, member):
                continue
            if name in seen:
                raise DataError(f"{path} contains {shown(name)} twice; pack it again with only one")
            seen.add(name)
            items.append(replace(_packed(name, member), problem=_size_problem(member.size)))
    count = "1 link" if len(links) == 1 else f"{len(links)} links"
    notes = (f"left out {count} in {path.name}: {shown(some(links))}.",) if links else ()
    folders = _classes([item.id for item in items], packed=True)
    items = [replace(item, folder=own) for item, own in zip(items, folders)]
    return Source(path, tuple(items), None, labelled=any(folders), notes=notes)


def _size_problem(size: int) -> str:
    if size > _MOST:
        return f"larger than {_MOST >> 20} MiB, too large to read from a tar: unpack the tar into a folder"
    return "" if size else "the file is empty"


def _held(file: IO[bytes]) -> io.BytesIO:
    """A member in memory, copied piece by piece; tarfile alone would need three times the memory."""
    held = io.BytesIO()
    shutil.copyfileobj(file, held, _PIECE)
    held.seek(0)
    return held


class _Strict(tarfile.TarInfo):
    """A header that raises an error if damaged; tarfile itself treats a damaged header as the end."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _WORDS and self.size > _HEADER:
            raise tarfile.ReadError(f"it has a name or header of {self.size:,} bytes, which is too long")
        return super()._proc_member(tarfile_)  # type: ignore[misc,no-any-return]

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> "_Strict":
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the zeros at the true end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"it is damaged or cut off: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path, "r|*", tarinfo=_Strict) as tar:
            yield tar
    except _TORN as error:
        reason = (str(error) or "it is cut off").splitlines()[0].rstrip(":")
        raise DataError(f"{path} cannot be read as a tar ({reason}); give a folder, a .csv or a whole tar") from None


def _members(path: Path, tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for member in tar:
        name = posixpath.normpath(member.name)
        if name.startswith("/") or ".." in name.split("/"):
            raise DataError(f"{path} contains {shown(member.name)}, which is outside its folder; do not trust this tar")
        yield name, member
        tar.members = []  # type: ignore[attr-defined]  # a stream never goes back, and a million members take a gigabyte


def _packed(name: str, member: tarfile.TarInfo) -> Item:
    return Item(name, "", member.size, f"{member.mtime}@{member.offset}")


def _is_image(name: str, member: tarfile.TarInfo) -> bool:
    *folders, last = name.split("/")
    return member.isreg() and _named_as_image(last) and not any(part.startswith(".") for part in folders)
