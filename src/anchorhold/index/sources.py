"""Which images there are to embed: those below a folder, those a CSV names, those in a tar.

A source is listed first, so that what is wrong with it is said before hours are spent, and read afterwards, in the
order of the list. A tar is only ever read as a stream; nothing of it is written anywhere.
"""

import csv
import hashlib
import io
import lzma
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..data.layouts import EXTENSIONS, some
from ..errors import DataError

__all__ = ["Item", "Source", "digest_of", "problem_of", "shown", "source_at"]

_MOST = 2**30  # bytes of one image in a tar, which is read whole: a small tar may unpack without end
_TORN = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True, slots=True)
class Item:
    """One image: what it is called, its label (or ""), its bytes, and why it cannot be read where that is known.

    `stamp` changes where the image does: when it was written, and in a tar also where it begins.
    """

    id: str
    label: str = ""
    size: int = 0
    stamp: str = ""
    problem: str = ""


@dataclass(frozen=True, eq=False)
class Source:
    """Images in a fixed order; `paths` are their files, None in a tar. `notes` are sentences for the user."""

    place: Path
    items: tuple[Item, ...]
    paths: tuple[Path, ...] | None
    labelled: bool = False
    notes: tuple[str, ...] = ()

    def read(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Path | io.BytesIO | None]]:
        """The number of each wanted item and what to decode, in order; None where the item has a problem."""
        if self.paths is None:
            yield from self._stream(wanted)
            return
        for number, (item, path) in enumerate(zip(self.items, self.paths)):
            if wanted(number):
                yield number, None if item.problem else path

    def _stream(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, io.BytesIO | None]]:
        changed = DataError(f"{self.place} was changed while it was read; start again when it is complete")
        numbers = iter(range(len(self.items)))
        with _opened(self.place) as tar:
            for name, member in _members(self.place, tar):
                if not _is_image(name, member):
                    continue
                number = next(numbers, None)
                if number is None or replace(self.items[number], problem="") != _packed(name, member):
                    raise changed
                if not wanted(number):
                    continue
                file = None if self.items[number].problem else tar.extractfile(member)
                yield number, None if file is None else io.BytesIO(file.read())
        if next(numbers, None) is not None:
            raise changed


def source_at(place: str | Path) -> Source:
    """What SOURCE means: a folder, a .csv with a column `path` (and perhaps `label`), or a tar."""
    path = Path(place).expanduser()
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{shown(str(path))} cannot be read ({reason}); give a folder, a .csv or a tar") from None
    if stat.S_ISDIR(mode):
        found = _folder(path)
    elif path.suffix.lower() == ".csv":
        found = _listed(path)
    else:
        found = _tar(path)
    if not found.items:
        raise DataError(f"{path} has no images; their names end in {', '.join(sorted(EXTENSIONS))}")
    return found


def problem_of(path: Path) -> tuple[int, str, str]:
    """How many bytes a file has, its stamp, and why it is no image; a pipe, for one, would be read for ever."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        return 0, "", getattr(error, "strerror", None) or str(error)
    if not stat.S_ISREG(found.st_mode):
        return 0, "", "not a file"
    return found.st_size, str(found.st_mtime_ns), "" if found.st_size else "the file is empty"


def digest_of(items: Sequence[Item]) -> str:
    """A short hash of what the items are called, how long they are and when they were written; no bytes are read."""
    digest = hashlib.blake2b(digest_size=8)
    for item in items:
        digest.update(f"{item.id}\0{item.label}\0{item.size}\0{item.stamp}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def shown(name: str) -> str:
    """A name as it can be printed: on one line, and without bytes that no terminal takes.

    >>> print(shown("a\\nb é"))
    a\\nb é
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def _item(name: str, label: str, path: Path) -> Item:
    return Item(name, label, *problem_of(path))


# ---- a folder --------------------------------------------------------------------------------------------


def _folder(root: Path) -> Source:
    """Every image below `root`, sorted by name; linked folders are not entered, so no loop can hang it."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); give a folder you may read") from error

    names: list[str] = []
    linked: list[str] = []
    for place, inner, files in os.walk(root, onerror=unreadable):
        below = os.path.relpath(place, root)
        inner[:] = [name for name in inner if not name.startswith(".")]
        linked += [_joined(below, name) for name in inner if os.path.islink(os.path.join(place, name))]
        names += [_joined(below, name) for name in files if _named_as_image(name)]
        # os.walk takes a link that leads nowhere, such as to itself, for a file; called as an image it is a bad one.
        linked += [_joined(below, name) for name in files if not _named_as_image(name) and _dangles(place, name)]
    names.sort()
    notes = (f"{len(linked)} links are not followed: {shown(some(sorted(linked)))}.",) if linked else ()
    paths = tuple(root / name for name in names)
    return Source(root, tuple(_item(name, "", path) for name, path in zip(names, paths)), paths, notes=notes)


def _joined(folder: str, name: str) -> str:
    return name if folder == "." else f"{folder.replace(os.sep, '/')}/{name}"


def _dangles(place: str, name: str) -> bool:
    path = os.path.join(place, name)
    return os.path.islink(path) and not os.path.exists(path)


def _named_as_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


# ---- a CSV -----------------------------------------------------------------------------------------------


def _listed(table: Path) -> Source:
    """The images that a CSV names, in its order; paths are relative to the folder it lies in."""
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
                    "its first line has to name the columns: path, or path,label"
                )
            rows.fieldnames = columns
            for row in rows:
                written = (row["path"] or "").strip()
                if not written or None in row:
                    raise DataError(f"line {rows.line_num} of {table} is not path[,label]; mend or remove it")
                name = posixpath.normpath(written)
                if name in lines:
                    raise DataError(
                        f"{table} names {shown(name)} twice, on lines {lines[name]} and {rows.line_num}; keep one"
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
    """The images in a tar, in its order; a name that leads out of it or stands there twice is refused."""
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
                raise DataError(f"{path} has {shown(name)} twice; pack it again with one of them")
            seen.add(name)
            problem = "" if 0 < member.size <= _MOST else "larger than 1 GiB" if member.size else "the file is empty"
            items.append(replace(_packed(name, member), problem=problem))
    notes = (f"{len(links)} links in {path.name} are not followed: {shown(some(links))}.",) if links else ()
    return Source(path, tuple(items), None, notes=notes)


class _Strict(tarfile.TarInfo):
    """A header, or an error: tarfile itself takes a damaged or missing one in the middle for the end."""

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
            raise DataError(
                f"{path} holds {shown(member.name)}, which leads out of its folder; nothing was read, do not trust it"
            )
        yield name, member
        tar.members = []  # type: ignore[attr-defined]  # a stream never goes back, and a million of them are a gigabyte


def _packed(name: str, member: tarfile.TarInfo) -> Item:
    return Item(name, "", member.size, f"{member.mtime}@{member.offset}")


def _is_image(name: str, member: tarfile.TarInfo) -> bool:
    *folders, last = name.split("/")
    return member.isreg() and _named_as_image(last) and not any(part.startswith(".") for part in folders)
