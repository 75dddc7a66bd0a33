"""Image folders and lists on disk: class folders, text lists, CSV tables, listed files."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError
from ..runs.files import regular

__all__ = [
    "entries",
    "images_below",
    "images_by_class",
    "listed_images",
    "loose_only",
    "once",
    "read_lines",
    "read_table",
    "some",
]

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def some(names: Sequence[str], most: int = 8) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


# ---- folders ---------------------------------------------------------------------------------------------


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); give a folder that you may read") from error


def entries(folder: Path) -> dict[str, os.DirEntry[str]]:
    """The entries of a folder by name, without hidden ones."""
    try:
        with os.scandir(folder) as scan:
            return {entry.name: entry for entry in scan if not entry.name.startswith(".")}
    except OSError as error:
        raise DataError(f"{folder} cannot be read as a folder ({error.strerror}); give a folder of images") from error


def images_below(folder: str) -> list[Path]:
    """Every image in a folder and below it, sorted; linked folders are skipped, to avoid loops."""
    found: list[str] = []
    for place, inner, files in os.walk(folder, onerror=_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [os.path.join(place, name) for name in files if _is_image(name)]
    return [Path(name) for name in sorted(found)]


def loose_only(root: Path) -> bool:
    """Whether a folder has images and no folders."""
    inside = entries(root)
    return any(_is_image(name) for name in inside) and not any(entry.is_dir() for entry in inside.values())


def images_by_class(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The images of each class folder, and notes on what was left out."""
    inside = dict(sorted(entries(root).items()))
    folders = [name for name, entry in inside.items() if entry.is_dir(follow_symlinks=False)]
    linked = [name for name, entry in inside.items() if entry.is_symlink() and entry.is_dir()]
    loose = [name for name, entry in inside.items() if _is_image(name) and not entry.is_dir()]
    if loose and not folders:
        raise DataError(
            f"{root} holds {len(loose)} image{'s' * (len(loose) > 1)} but no class folders; "
            "put the images of each class into a folder of its own"
        )
    classes = {name: images_below(inside[name].path) for name in folders}
    empty = [name for name, images in classes.items() if not images]
    notes = []
    if loose:
        have = "1 image" if len(loose) == 1 else f"{len(loose)} images"
        notes.append(f"left out {have} of {root} outside the class folders.")
    if empty:
        have = "1 folder" if len(empty) == 1 else f"{len(empty)} folders"
        notes.append(f"left out {have} of {root} without images: {some(empty)}.")
    if linked:
        have = "1 linked folder" if len(linked) == 1 else f"{len(linked)} linked folders"
        notes.append(f"left out {have} of {root}: {some(linked)}.")
    return {name: images for name, images in classes.items() if images}, notes


# ---- lists -----------------------------------------------------------------------------------------------


def read_lines(path: Path, todo: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers; `todo` ends the error message."""
    try:
        lines = regular(path).read_text("utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {todo}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error}); {todo}") from error
    return [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def read_table(path: Path, columns: Sequence[str], todo: str) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV with a header, with their line numbers; it must have these columns."""
    try:
        with open(regular(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {todo}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a CSV ({error}); {todo}") from error
    if lacking := [name for name in columns if name not in header]:
        raise DataError(f"{path} has no column {lacking[0]}; its first line is {','.join(header)!r}; {todo}")
    if twice := [name for name in columns if header.count(name) > 1]:
        raise DataError(f"{path} has two columns {twice[0]}; keep one")
    for number, row in rows:
        if len(row) != len(header):
            raise DataError(
                f"line {number} of {path} has {len(row)} field{'s' * (len(row) != 1)}, but its header has "
                f"{len(header)}; correct that line"
            )
    return [(number, dict(zip(header, (field.strip() for field in row)))) for number, row in rows]


def once(path: Path, names: Sequence[tuple[int, str]]) -> None:
    """Refuse a list that names an image twice, which would give the image two ids."""
    seen: dict[str, int] = {}
    for number, name in names:
        first = seen.setdefault(os.path.normpath(name), number)
        if first != number:
            raise DataError(f"line {number} of {path} repeats {name} from line {first}; list each image once")


def listed_images(base: Path, names: Sequence[str], todo: str, official: bool = True) -> tuple[Path, ...]:
    """The listed files below `base`; an error names the first that is missing.

    Official lists must stay inside `base`. If a file of an official list has another image format, that file is used.
    """
    # By folder (name or stem -> name): one scan of each is far faster than checking every file.
    stems: dict[str, dict[str, str]] = {}
    found, missing = [], []
    for name in names:
        folder, _, file = name.rpartition("/")
        if official and (name.startswith("/") or ".." in folder.split("/")):
            raise DataError(f"a list names {name}, which is outside {base}; {todo}")
        if folder not in stems:
            present = sorted(entries(base / folder)) if (base / folder).is_dir() else []
            images = [entry for entry in present if official and _is_image(entry)]
            stems[folder] = {os.path.splitext(entry)[0]: entry for entry in images} | {e: e for e in present}
        actual = stems[folder].get(file) or (stems[folder].get(os.path.splitext(file)[0]) if official else None)
        if actual is None:
            missing.append(base / name)
        else:
            found.append(base / folder / actual)
    if missing:
        raise DataError(
            f"{len(missing)} of {len(names)} listed images {'is' if len(missing) == 1 else 'are'} missing, "
            f"the first is {missing[0]}; {todo}"
        )
    return tuple(found)
