"""Data sets: those of the papers by name, your own as folders or a CSV, and two that need no files."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import DataError, SettingsError, nearest
from ..interface import rooted, worded
from ..random import Key
from .beside import without_classes
from .layouts import entries, images_by_class, listed_images, loose_only, once, read_table, some
from .official import cars, cub, inshop, sop
from .own import is_own, own_dataset
from .splits import Dataset, Split, check_classes

__all__ = ["DATASETS", "Dataset", "Split", "csv_split", "dataset", "folder_split"]


def dataset(
    name: str | Path, root: str | Path | None = None, *, seed: int = 0, held_out: int = 0, **options: Any
) -> Dataset:
    """A data set by name, from a folder of class folders, or from a CSV with the columns path, label[, split].

    Args:
        name: digits, cub, cars, sop or another name; a folder; a CSV; or yours as `module:function`, which returns what
            `ah.fit` takes.
        root: the folder of a data set that is given by name.
        seed: which classes are held out for test, of a folder without train/ and test/.
        held_out: the last N training classes become the test split, and the real test split is not used.
        **options: of the data set, such as `side` of gaussians; `labels=False` of a folder allows loose images.

    >>> data = dataset("digits")
    >>> len(data.train), len(data.test), tuple(data.train.images.shape[1:])
    (901, 896, (8, 8, 1))
    """
    if not isinstance(name, str | Path):
        raise SettingsError(f"a data set must be one of {_menu()}, a folder or a CSV, not a {type(name).__name__}")
    name = str(name)
    if is_own(name):
        return own_dataset(name, root, seed=seed, held_out=held_out, options=options)
    if name not in DATASETS and root is None and Path(name).expanduser().is_dir():
        name, root = "folder", name
    if name not in DATASETS and root is None and name.endswith(".csv"):
        name, root = "csv", name
    if name not in DATASETS:
        choice = f"choose one of {_menu()}, or give a folder of class folders, a CSV or module:function"
        if Path(name).expanduser().is_file():
            raise SettingsError(f"{name} is a file but not a .csv; {choice}")
        raise SettingsError(f"no data set or folder {name!r}; {nearest(name, set(DATASETS) - set(_OWN), choice)}")
    if name in _FILELESS and root is not None:
        raise SettingsError(f"{name} needs no files; leave out {worded('--root', 'its root')}")
    loader = DATASETS[name]
    known = [each for each in inspect.signature(loader).parameters if each not in ("root", "seed")]
    for each in options:
        if each not in known:
            raise SettingsError(f"{name} has no option {each!r}; it has {', '.join(known) or 'none'}")
    loaded = loader(None if root is None else Path(root).expanduser(), seed, **options)
    return replace(loaded, root="" if root is None else str(root)).holding_out(held_out)


def _menu() -> str:
    return ", ".join(name for name in DATASETS if name not in _OWN)


# ---- folders of class folders ----------------------------------------------------------------------------


def _split_of(name: str, root: Path, by_class: Mapping[str, list[Path]], classes: Iterable[str]) -> Split:
    names = tuple(classes)
    labels = [label for label, own in enumerate(names) for _ in by_class.get(own, ())]
    paths = tuple(path for own in names for path in by_class.get(own, ()))
    return Split(name, torch.tensor(labels, dtype=torch.int64), names, paths, root=root)


def _singles(split: Split) -> list[str]:
    """A note on the classes that have a single image."""
    lonely = [split.classes[label] for label in (split.labels.bincount() == 1).nonzero().flatten().tolist()]
    if not lonely:
        return []
    have = "1 class has" if len(lonely) == 1 else f"{len(lonely)} classes have"
    return [f"{have} only one image in {split.name}, which no other image can match: {some(lonely)}."]


def folder_split(root: str | Path, name: str = "folder", asks: bool = False) -> tuple[Split, tuple[str, ...]]:
    """All images of a folder of class folders as one split, and notes; a split that only `asks` may have one class."""
    by_class, notes = images_by_class(Path(root).expanduser())
    split = _split_of(name, Path(root).expanduser(), by_class, sorted(by_class))
    if not asks:
        check_classes(split)
    return split, (*notes, *_singles(split))


def _held_out(root: Path, classes: list[str], seed: int, todo: str, lacking: str) -> tuple[list[str], str]:
    """The fifth of the classes that is held out for test, and a note about it."""
    if len(classes) < 4:
        raise DataError(
            f"{root} has {len(classes)} class{'es' * (len(classes) != 1)} ({some(classes) or 'none'}), but needs "
            f"four, two to train on and two to test on; {todo}"
        )
    # The choice depends on the names, so that a new class moves as few others as possible.
    key = Key.of(seed)("held-out classes")
    held = sorted(sorted(classes, key=lambda own: key(own).value)[: max(2, round(len(classes) / 5))])
    return held, (
        f"{root} has no {lacking}: {len(held)} of its {len(classes)} classes are held out for test "
        f"(seed {seed}): {some(held)}."
    )


def _folder(root: Path | None, seed: int, labels: bool = True) -> Dataset:
    """train/ and test/ if both exist; otherwise a fifth of the classes is held out for test.

    Without `labels` the folder may hold loose images instead.
    """
    if root is None:
        raise DataError(f"the data set folder needs {rooted('folder')}: give a folder of class folders")
    if not labels and loose_only(root):
        return without_classes(root)
    parts = {part: root / part for part in ("train", "test") if (root / part).is_dir()}
    if len(parts) == 2:
        (seen, notes), (unseen, more) = images_by_class(parts["train"]), images_by_class(parts["test"])
        classes = sorted(seen.keys() | unseen.keys())
        train = _split_of("folder/train", parts["train"], seen, classes)
        test = _split_of("folder/test", parts["test"], unseen, classes)
        return Dataset("folder", train, test, (*notes, *more, *_singles(train), *_singles(test)))
    for part, place in parts.items():
        # A single folder "train" with images is a class; with class folders it is half a data set.
        if any(entry.is_dir() for entry in entries(place).values()):
            lacking = "test" if part == "train" else "train"
            raise DataError(
                f"{root} has {part}/ but no {lacking}/; add {root / lacking}, or give {place} as the data set"
            )
    by_class, notes = images_by_class(root)
    classes = sorted(by_class)
    held, note = _held_out(root, classes, seed, "add class folders, or make train/ and test/", "train/ and test/")
    notes.append(note)
    seen, unseen = ({own: by_class[own] for own in classes if (own in held) == out} for out in (False, True))
    train = _split_of("folder/train", root, seen, classes)
    test = _split_of("folder/test", root, unseen, classes)
    return Dataset("folder", train, test, (*notes, *_singles(train), *_singles(test)))


# ---- a CSV -----------------------------------------------------------------------------------------------

_CSV = "give a CSV whose first line is path,label or path,label,split, with paths relative to its folder"
_PARTS = ("train", "test", "query", "gallery")


def _csv(root: Path | None, seed: int) -> Dataset:
    """A CSV of path, label and split (train and test, or train, query and gallery).

    Without a column split, a fifth of the classes is held out for test.
    """
    if root is None:
        raise DataError(f"the data set csv needs {rooted('csv')}; {_CSV}")
    whole, parts = _read_csv(root)
    notes = []
    if parts is None:
        used = [whole.classes[label] for label in torch.unique(whole.labels).tolist()]
        held, note = _held_out(root, used, seed, "list more, or add a column split", "column split")
        notes.append(note)
        parts = ["test" if whole.classes[label] in held else "train" for label in whole.labels.tolist()]
    if "train" not in parts:
        raise DataError(f"{root} has no row with the split train, so nothing to train on; mark some rows as train")
    train = torch.tensor([part == "train" for part in parts])
    splits = replace(whole.keep(train), name="csv/train", queries=None), replace(whole.keep(~train), name="csv/test")
    return Dataset("csv", *splits, (*notes, *_singles(splits[0]), *_singles(splits[1])))


def csv_split(root: str | Path, asks: bool = False) -> tuple[Split, tuple[str, ...]]:
    """The part of a CSV to evaluate: test, or query and gallery, or all rows without a column split; and notes.

    A split that only `asks` may have one class.
    """
    root = Path(root).expanduser()
    whole, parts = _read_csv(root)
    if parts is not None:
        whole = replace(whole.keep(torch.tensor([part != "train" for part in parts])), name="csv/test")
    if not asks:
        check_classes(whole.gallery)
    names = len(whole.classes)
    all_of_it = (
        f"all {names} classes of {root} are audited; "
        "to leave out training classes, add a column split with train and test"
    )
    return whole, (*(() if parts is not None else (all_of_it,)), *_singles(whole))


def _read_csv(path: Path) -> tuple[Split, list[str] | None]:
    """All images of a CSV, and the split of each if there is such a column."""
    rows = read_table(path, ("path", "label"), _CSV)
    names, labels = [row["path"] for _, row in rows], [row["label"] for _, row in rows]
    for number, row in rows:
        if empty := [column for column in ("path", "label") if not row[column]]:
            raise DataError(f"line {number} of {path} has no {empty[0]}; add it, or remove the line")
    if rows and all(map(_is_number, labels)) and not all(label.isdecimal() for label in labels):
        number, odd = next((n, row["label"]) for n, row in rows if not row["label"].isdecimal())
        raise DataError(
            f"labels in {path} are numbers, but {odd} in line {number} is not a whole number from 0; "
            "a label names a class: write whole numbers from 0, or names"
        )
    once(path, [(number, row["path"]) for number, row in rows])
    parts = [row["split"] for _, row in rows] if rows and "split" in rows[0][1] else None
    for (number, _), part in zip(rows, parts or ()):
        if part not in _PARTS:
            raise DataError(f"line {number} of {path} has the split {part!r}; write one of {', '.join(_PARTS)}")
    asks = None
    if parts is not None and {"query", "gallery"} & set(parts):
        if "test" in parts or not {"query", "gallery"} <= set(parts):
            raise DataError(
                f"{path} has the splits {some(sorted(set(parts)))}; use either test, or both query and gallery"
            )
        asks = torch.tensor([part == "query" for part in parts])
    base = path.parent
    paths = listed_images(base, names, f"correct {path}; its paths are relative to {base}", official=False)
    classes = sorted(set(labels))
    numbers = {label: number for number, label in enumerate(classes)}
    own = torch.tensor([numbers[label] for label in labels], dtype=torch.int64)
    inside = all(each.is_relative_to(base) for each in paths)
    return Split(path.stem, own, tuple(classes), paths, root=base if inside else None, queries=asks), parts


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---- sets that need no files -----------------------------------------------------------------------------


def _digits(root: Path | None, seed: int) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8×8 pixels: 0 … 4 train, 5 … 9 test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy((bunch.images * 255 / 16).round()).to(torch.uint8).unsqueeze(-1)
    labels = torch.from_numpy(bunch.target).long()
    whole = Split("digits", labels, tuple("0123456789"), images=images)
    train = replace(whole.keep(labels < 5), name="digits/train")
    return Dataset("digits", train, replace(whole.keep(labels >= 5), name="digits/test"))


def _gaussians(
    root: Path | None, seed: int, dimension: int = 64, train: int = 508, test: int = 516, sigma: float = 0.025
) -> Dataset:
    """ADML, eq. 20: classes a and b around 0.25 and 0.75 in k dimensions, with half of the points each."""
    if dimension < 1 or min(train, test) < 4 or sigma < 0:
        raise SettingsError(
            "gaussians needs dimension ≥ 1, train and test ≥ 4 and sigma ≥ 0, "
            f"got {dimension}, {train}, {test} and {sigma}"
        )

    def draw(name: str, count: int) -> Split:
        ids = torch.arange(count)
        labels = ids * 2 // count
        noise = Key.of(seed)("gaussians", name).normal(ids, (dimension,))
        points = (0.25 + 0.5 * labels.unsqueeze(1) + sigma * noise).clamp(0, 1).float()
        return Split(f"gaussians/{name}", labels, ("a", "b"), images=points.reshape(count, 1, dimension, 1))

    return Dataset("gaussians", draw("train", train), draw("test", test))


_FILELESS = ("digits", "gaussians")
_OWN = ("folder", "csv")  # of the user's files: given by their path
DATASETS: dict[str, Callable[..., Dataset]] = {
    "cub": cub,
    "cars": cars,
    "sop": sop,
    "inshop": inshop,
    "folder": _folder,
    "csv": _csv,
    "digits": _digits,
    "gaussians": _gaussians,
}
