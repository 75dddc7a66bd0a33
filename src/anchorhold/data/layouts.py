"""How image sets lie on disk: CUB's numbered lists, and folders of class folders."""

import os
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError

__all__ = ["CUB_SOURCE", "cub_images", "cub_list", "entries", "images_by_class", "some"]

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
CUB_SOURCE = "the set is to be had from Caltech's page of CUB-200-2011 (Caltech-UCSD Birds)"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def _unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}); give a folder you may read") from error


def entries(folder: Path) -> dict[str, os.DirEntry[str]]:
    """What lies in a folder, by name; hidden things do not count."""
    try:
        with os.scandir(folder) as scan:
            return {entry.name: entry for entry in scan if not entry.name.startswith(".")}
    except OSError as error:
        raise DataError(f"{folder} cannot be read as a folder ({error.strerror}); give a folder of images") from error


def _images_below(folder: str) -> list[Path]:
    """Every image in a folder and below it, sorted; linked folders are not entered, so no loop hangs it."""
    found: list[str] = []
    for place, inner, files in os.walk(folder, onerror=_unreadable):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [os.path.join(place, name) for name in files if _is_image(name)]
    return [Path(name) for name in sorted(found)]


def images_by_class(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    """The images of each class folder, and notes on what was left out."""
    inside = dict(sorted(entries(root).items()))
    folders = [name for name, entry in inside.items() if entry.is_dir(follow_symlinks=False)]
    linked = [name for name, entry in inside.items() if entry.is_symlink() and entry.is_dir()]
    loose = [name for name, entry in inside.items() if _is_image(name) and not entry.is_dir()]
    if loose and not folders:
        raise DataError(
            f"{root} holds {len(loose)} images but no class folders; "
            "put the images of each class in a folder of its own"
        )
    classes = {name: _images_below(inside[name].path) for name in folders}
    empty = [name for name, images in classes.items() if not images]
    notes = []
    if loose:
        notes.append(f"{len(loose)} images in {root} lie beside the class folders and are left out.")
    if empty:
        notes.append(f"{len(empty)} folders in {root} hold no images and are left out: {some(empty)}.")
    if linked:
        notes.append(f"{len(linked)} linked folders in {root} are not followed: {some(linked)}.")
    return {name: images for name, images in classes.items() if images}, notes


def cub_list(path: Path) -> dict[int, str]:
    """The lines "id value" of one of CUB's lists."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; give the unpacked CUB_200_2011 as root, {CUB_SOURCE}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); unpack the set again") from error
    found: dict[int, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        index, _, value = line.strip().partition(" ")
        if not index.isdecimal() or not value or int(index) in found:
            raise DataError(f"line {number} of {path} is {line!r}, not a new number and a value; unpack the set again")
        found[int(index)] = value.strip()
    return found


def cub_images(base: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """The listed files below `base`; where only the image format differs, the file that is there."""
    # By folder, since one scan of each is far quicker than a look at every file: name or stem -> name.
    stems: dict[str, dict[str, str]] = {}
    found, missing = [], []
    for name in names:
        folder, _, file = name.rpartition("/")
        if folder not in stems:
            present = sorted(entries(base / folder)) if (base / folder).is_dir() else []
            images = [entry for entry in present if _is_image(entry)]
            stems[folder] = {os.path.splitext(entry)[0]: entry for entry in images} | {e: e for e in present}
        actual = stems[folder].get(file) or stems[folder].get(os.path.splitext(file)[0])
        if actual is None:
            missing.append(base / name)
        else:
            found.append(base / folder / actual)
    if missing:
        raise DataError(
            f"{len(missing)} of the {len(names)} listed images are missing, the first is {missing[0]}; "
            f"unpack the set again, {CUB_SOURCE}"
        )
    return tuple(found)
