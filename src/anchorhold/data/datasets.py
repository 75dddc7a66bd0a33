"""Which images, with which labels: CUB-200-2011, any folder of class folders, two sets without files."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError, SettingsError
from ..random import Key
from ..settings import nearest
from .layouts import CUB_SOURCE, cub_images, cub_list, entries, images_by_class, some

__all__ = ["DATASETS", "Dataset", "Split", "dataset", "folder_split"]

_CHANNELS = 4  # no image has more; a longer last axis is a width
_BYTES = 8.0  # a pixel beyond this was meant as 0..255; images that were normalised already stay below 3


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images, as files (`paths`) or in memory (`images`: NHWC, uint8 or float32 in [0, 1])."""

    name: str
    labels: Tensor
    classes: tuple[str, ...]
    paths: tuple[Path, ...] | None = None
    images: Tensor | None = None
    root: Path | None = None  # where `paths` start: names in messages and in the fingerprint are relative to it

    def __post_init__(self) -> None:
        if (self.paths is None) == (self.images is None):
            raise DataError(f"{self.name} needs either paths or images; give exactly one of them")
        if self.images is not None:
            _check_images(self.name, self.images)
        count = len(self.paths) if self.paths is not None else len(self.images)  # type: ignore[arg-type]
        if self.labels.dtype != torch.int64 or self.labels.shape != (count,):
            shape = tuple(self.labels.shape)
            raise DataError(
                f"{self.name} has {count} images but labels of shape {shape} and {self.labels.dtype}; "
                "give one int64 label per image"
            )
        if count and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(
                f"{self.name} has labels outside 0 … {len(self.classes) - 1}; name every class in `classes`"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def keep(self, chosen: Tensor) -> "Split":
        """The same split with only the images of a boolean mask or of a list of ids, in that order."""
        if chosen.dtype == torch.bool and chosen.shape != self.labels.shape:
            raise DataError(f"{self.name} has {len(self)} images but the mask {len(chosen)}; give one bool each")
        ids = (chosen.nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen).cpu()
        paths = None if self.paths is None else tuple(self.paths[i] for i in ids.tolist())
        images = None if self.images is None else self.images[ids.to(self.images.device)]
        return replace(self, labels=self.labels[ids.to(self.labels.device)], paths=paths, images=images)

    def sample(self, index: int) -> str:
        """What to call one image in a message."""
        if self.paths is None:
            return f"{self.name}[{index}]"
        path = self.paths[index]
        return (path.relative_to(self.root) if self.root is not None else path).as_posix()

    def fingerprint(self) -> str:
        """A short hash of the images and their classes; the same wherever the folder lies.

        Of files it takes relative names and sizes, not the bytes: a run must not wait for a second reading.
        """
        used, places = torch.unique(self.labels.cpu(), return_inverse=True)
        digest = hashlib.blake2b(digest_size=8)
        digest.update("\n".join(self.classes[label] for label in used.tolist()).encode("utf-8", "surrogateescape"))
        digest.update(places.numpy().astype("<i8").tobytes())
        if self.images is not None:
            digest.update(f"{tuple(self.images.shape)} {self.images.dtype}".encode())
            digest.update(self.images.cpu().contiguous().numpy().data)
        for index, path in enumerate(self.paths or ()):
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(f"{path} has gone or cannot be read ({error.strerror}); restore it") from error
            digest.update(f"\n{self.sample(index)} {size}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def _check_images(name: str, images: Tensor) -> None:
    """Refuse images in memory that are in another order, of another type or in another range."""
    shape = tuple(images.shape)
    if images.ndim != 4 or not 1 <= shape[3] <= _CHANNELS:
        first = images.ndim == 4 and 1 <= shape[1] <= _CHANNELS
        todo = "images.permute(0, 2, 3, 1) makes it so" if first else f"the last axis holds 1 … {_CHANNELS} channels"
        raise DataError(f"{name} has images of shape {shape}; give (N, height, width, channels): {todo}")
    if images.dtype not in (torch.uint8, torch.float32):
        todo = "images.float()" if images.is_floating_point() else "images.to(torch.uint8)"
        raise DataError(f"{name} has images of {images.dtype}; give uint8, or float32 in [0, 1]: {todo}")
    if images.dtype == torch.uint8 or not images.numel():
        return
    low, high = (end.item() for end in images.detach().aminmax())
    if not 0 <= low <= high <= 1:  # NaN is in no range
        if low >= 0 and high > _BYTES:
            todo = "divide by 255"
        elif low < 0:
            todo = "give them before mean and std are applied, and those to wrap(model, mean=…, std=…)"
        else:
            todo = "bring them into that range"
        raise DataError(f"{name} has pixels from {low:g} to {high:g}, not in [0, 1]: {todo}")


@dataclass(frozen=True, eq=False)
class Dataset:
    """A split to train on and a split to be scored on; `notes` are sentences the user should read."""

    name: str
    train: Split
    test: Split
    notes: tuple[str, ...] = ()
    root: str = ""  # as it was given, so that a run can find its images again

    def __post_init__(self) -> None:
        _check_classes(self.train)
        _check_classes(self.test)

    @property
    def query(self) -> Split:
        """What is searched for."""
        return self.test

    @property
    def gallery(self) -> Split:
        """What is searched through."""
        return self.test


def dataset(name: str, root: str | Path | None = None, *, seed: int = 0, **options: Any) -> Dataset:
    """The data set of that name, or a folder of class folders.

    >>> data = dataset("digits")
    >>> len(data.train), len(data.test), tuple(data.train.images.shape[1:])
    (901, 896, (8, 8, 1))
    """
    if name not in DATASETS and root is None and Path(name).expanduser().is_dir():
        name, root = "folder", name
    if name not in DATASETS:
        choice = f"choose one of {', '.join(DATASETS)}, or give a folder of class folders"
        raise SettingsError(f"there is no data set and no folder {name!r}; {nearest(name, DATASETS, choice)}")
    loader = DATASETS[name]
    known = [option for option in inspect.signature(loader).parameters if option not in ("root", "seed")]
    for option in options:
        if option not in known:
            raise SettingsError(f"{name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    loaded = loader(None if root is None else Path(root).expanduser(), seed, **options)
    return replace(loaded, root="" if root is None else str(root))


def _check_classes(split: Split) -> None:
    """Refuse a split in which nothing can be told apart."""
    classes = torch.unique(split.labels).tolist()
    if not classes:
        raise DataError(f"{split.name} has no images; it needs at least two classes of them")
    if len(classes) == 1:
        only = split.classes[classes[0]]
        raise DataError(f"{split.name} has one class only ({only}), so nothing to tell apart; it needs two or more")


# ---- CUB-200-2011 ----------------------------------------------------------------------------------------

_CUB_CLASSES = 200


def _cub(root: Path | None, seed: int) -> Dataset:
    """Classes 1 … 100 train, 101 … 200 test; label = class id - 1, in the order of images.txt."""
    if root is None:
        raise DataError(
            f"cub needs to know where it lies: give the folder CUB_200_2011 (--root on the command line); {CUB_SOURCE}"
        )
    inner = root / "CUB_200_2011"
    if not (root / "images.txt").is_file() and inner.is_dir():
        root = inner
    files = cub_list(root / "images.txt")
    marks = cub_list(root / "image_class_labels.txt")
    names = cub_list(root / "classes.txt")
    if odd := sorted(files.keys() ^ marks.keys()):
        raise DataError(
            f"images.txt and image_class_labels.txt in {root} disagree: {len(odd)} image ids are in one of "
            f"them only, the first is {odd[0]}; unpack the set again"
        )
    for image, mark in marks.items():
        if not mark.isdecimal() or int(mark) not in names or int(mark) > _CUB_CLASSES:
            raise DataError(
                f"image_class_labels.txt in {root} gives image {image} the class {mark}, which classes.txt "
                "does not name; unpack the set again"
            )
    paths = cub_images(root / "images", list(files.values()))
    labels = torch.tensor([int(marks[image]) - 1 for image in files], dtype=torch.int64)
    classes = tuple(names.get(number, "") for number in range(1, _CUB_CLASSES + 1))
    whole = Split("cub", labels, classes, paths, root=root / "images")
    first_half = labels < _CUB_CLASSES // 2
    train, test = (
        replace(whole.keep(mask), name=name) for name, mask in (("cub/train", first_half), ("cub/test", ~first_half))
    )
    return Dataset("cub", train, test)


# ---- folders of class folders ----------------------------------------------------------------------------


def _split_of(name: str, root: Path, by_class: Mapping[str, list[Path]], classes: Iterable[str]) -> Split:
    names = tuple(classes)
    labels = [label for label, own in enumerate(names) for _ in by_class.get(own, ())]
    paths = tuple(path for own in names for path in by_class.get(own, ()))
    return Split(name, torch.tensor(labels, dtype=torch.int64), names, paths, root=root)


def _singles(split: Split) -> list[str]:
    """A note on the classes that have nothing but one image."""
    lonely = [split.classes[label] for label in (split.labels.bincount() == 1).nonzero().flatten().tolist()]
    if not lonely:
        return []
    have = "1 class has" if len(lonely) == 1 else f"{len(lonely)} classes have"
    return [f"{have} one image only in {split.name}, which no other image can match: {some(lonely)}."]


def folder_split(root: str | Path, name: str = "folder") -> tuple[Split, tuple[str, ...]]:
    """All images of a folder of class folders as one split, and notes about it."""
    by_class, notes = images_by_class(Path(root).expanduser())
    split = _split_of(name, Path(root).expanduser(), by_class, sorted(by_class))
    _check_classes(split)
    return split, (*notes, *_singles(split))


def _folder(root: Path | None, seed: int) -> Dataset:
    """train/ and test/ where both exist; otherwise a fifth of the classes is held out for test."""
    if root is None:
        raise DataError("folder needs to know which: give a folder of class folders as root")
    parts = {part: root / part for part in ("train", "test") if (root / part).is_dir()}
    if len(parts) == 2:
        (seen, notes), (unseen, more) = images_by_class(parts["train"]), images_by_class(parts["test"])
        classes = sorted(seen.keys() | unseen.keys())
        train = _split_of("folder/train", parts["train"], seen, classes)
        test = _split_of("folder/test", parts["test"], unseen, classes)
        return Dataset("folder", train, test, (*notes, *more, *_singles(train), *_singles(test)))
    for part, place in parts.items():
        # A lone folder of images called "train" is a class; one of class folders is half a data set.
        if any(entry.is_dir() for entry in entries(place).values()):
            lacking = "test" if part == "train" else "train"
            raise DataError(f"{root} has {part}/ but no {lacking}/; add {root / lacking}, or give {place} as root")
    by_class, notes = images_by_class(root)
    if len(by_class) < 4:
        raise DataError(
            f"{root} has {len(by_class)} classes ({some(list(by_class)) or 'none'}); it takes four to "
            "train on two and test on two others: add class folders, or make train/ and test/"
        )
    # Chosen by name, so that a class that joins later moves as few others as possible.
    key = Key.of(seed)("held-out classes")
    held = sorted(sorted(by_class, key=lambda own: key(own).value)[: max(2, round(len(by_class) / 5))])
    notes.append(
        f"{root} has no train/ and test/: {len(held)} of its {len(by_class)} classes are held out for test "
        f"(seed {seed}): {some(held)}."
    )
    classes = sorted(by_class)
    seen, unseen = ({own: by_class[own] for own in classes if (own in held) == out} for out in (False, True))
    train = _split_of("folder/train", root, seen, classes)
    test = _split_of("folder/test", root, unseen, classes)
    return Dataset("folder", train, test, (*notes, *_singles(train), *_singles(test)))


# ---- sets that need no files -----------------------------------------------------------------------------


def _digits(root: Path | None, seed: int) -> Dataset:
    """scikit-learn's 1,797 handwritten digits of 8×8: 0 … 4 train, 5 … 9 test."""
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
    """Paper 003, Eq. 20: classes a and b around .25 and .75 in k dimensions, half of the points each."""
    if dimension < 1 or min(train, test) < 4 or sigma < 0:
        raise SettingsError(
            "gaussians takes dimension ≥ 1, train and test ≥ 4 and sigma ≥ 0, "
            f"not {dimension}, {train}, {test} and {sigma}"
        )

    def draw(name: str, count: int) -> Split:
        ids = torch.arange(count)
        labels = ids * 2 // count
        noise = Key.of(seed)("gaussians", name).normal(ids, (dimension,))
        points = (0.25 + 0.5 * labels.unsqueeze(1) + sigma * noise).clamp(0, 1).float()
        return Split(f"gaussians/{name}", labels, ("a", "b"), images=points.reshape(count, 1, dimension, 1))

    return Dataset("gaussians", draw("train", train), draw("test", test))


DATASETS: dict[str, Callable[..., Dataset]] = {
    "cub": _cub,
    "folder": _folder,
    "digits": _digits,
    "gaussians": _gaussians,
}
