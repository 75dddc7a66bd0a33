"""Data sets and splits: labelled images, divided into queries and gallery."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..console import shown
from ..display import html_table
from ..errors import DataError
from ..interface import worded
from .contents import hashes

__all__ = ["Dataset", "Split", "by_lengths", "check_classes"]

_CHANNELS = 4  # at most; a longer last axis must be a width
_CONTENTS = "contents:"  # prefix of fingerprints by file contents; older ones are by file lengths
_BYTES = 8.0  # pixels above this are in 0..255; normalised images stay below 3


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled images, as files or in memory.

    Args:
        name: in messages.
        labels: (N,) int64, positions in `classes`.
        classes: the name of each class.
        paths: the files; give these or `images`.
        images: (N, H, W, C), uint8 or float32 in [0, 1].
        root: names in messages and in the fingerprint are relative to it.
        queries: (N,) mask of the queries, the others are the gallery; None: every image is both.
        asks: it only has queries for a gallery elsewhere, so one class is enough.
        roots: of files that do not lie in `root`, for their names.
        labelled: whether the labels mean something; if not, only a training without labels can use it.

    >>> Split("mine", torch.tensor([0, 0, 1]), ("cat", "dog"), images=torch.rand(3, 8, 8, 3))
    <Split mine: 3 images of 2 classes, 8×8×3 float32>
    """

    name: str
    labels: Tensor
    classes: tuple[str, ...]
    paths: tuple[Path, ...] | None = None
    images: Tensor | None = None
    root: Path | None = None
    queries: Tensor | None = None
    asks: bool = False
    roots: tuple[Path, ...] = ()
    labelled: bool = True

    def __post_init__(self) -> None:
        if (self.paths is None) == (self.images is None):
            raise DataError(f"{self.name} needs either paths or images; give exactly one")
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
                f"{self.name} has labels outside 0 … {len(self.classes) - 1}; list every class in `classes`"
            )
        if self.queries is not None and (self.queries.dtype != torch.bool or self.queries.shape != (count,)):
            raise DataError(f"queries of {self.name} must be a mask; give one bool for each of its {count} images")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"<Split {shown(self.name)}: {', '.join(self._told())}>"

    def _repr_html_(self) -> str:
        return html_table(f"Split {self.name}", (), (), subtitle=", ".join(self._told()))

    def _told(self) -> list[str]:
        """Images, classes and kind, in a few words."""
        classes = len(torch.unique(self.labels))
        told = [f"{len(self):,} images of {classes:,} class{'es' * (classes != 1)}"]
        told += [f"{int(self.queries.sum()):,} of them queries"] if self.queries is not None else []
        if self.images is None:
            return [*told, "files"]
        return [*told, f"{'×'.join(map(str, self.images.shape[1:]))} {str(self.images.dtype).removeprefix('torch.')}"]

    def keep(self, chosen: Tensor) -> "Split":
        """The same split with only the images of a boolean mask or of a list of ids, in that order."""
        if chosen.dtype == torch.bool and chosen.shape != self.labels.shape:
            raise DataError(
                f"{self.name} has {len(self)} images but the mask has {len(chosen)} entries; give one bool per image"
            )
        ids = (chosen.nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen).cpu()
        paths = None if self.paths is None else tuple(self.paths[i] for i in ids.tolist())
        images = None if self.images is None else self.images[ids.to(self.images.device)]
        queries = None if self.queries is None else self.queries[ids]
        labels = self.labels[ids.to(self.labels.device)]
        return replace(self, labels=labels, paths=paths, images=images, queries=queries)

    @property
    def query(self) -> "Split":
        """The queries: the split itself if every image is a query."""
        return self if self.queries is None else self._side("query", self.queries)

    @property
    def gallery(self) -> "Split":
        """The images that are searched."""
        return self if self.queries is None else self._side("gallery", ~self.queries)

    def _side(self, name: str, mask: Tensor) -> "Split":
        asks = name == "query"
        return replace(self.keep(mask), name=f"{self.name.removesuffix('/test')}/{name}", queries=None, asks=asks)

    def sample(self, index: int) -> str:
        """The name of one image in messages."""
        if self.paths is None:
            return f"{self.name}[{index}]"
        path = self.paths[index]
        if self.root is None or (self.roots and not path.is_relative_to(self.root)):
            base = next((base for base in self.roots if path.is_relative_to(base)), None)
            return path.as_posix() if base is None else f"beside/{path.relative_to(base).as_posix()}"
        return path.relative_to(self.root).as_posix()

    def fingerprint(self, progress: Callable[[int, int], None] | None = None) -> str:
        """A short hash of the images and their classes, independent of the location of the folder.

        Files enter with their relative names and contents. They are read once: `contents` caches their hashes.
        """
        if self.paths is None:
            return self._digest(8)
        try:
            return _CONTENTS + self._digest(16, hashes(self.paths, progress))
        except OSError as error:
            raise _gone(error) from error

    def lengths_fingerprint(self) -> str:
        """The older kind of fingerprint, by names and lengths of files instead of contents."""
        try:
            return self._digest(8, [str(path.stat().st_size) for path in self.paths or ()])
        except OSError as error:
            raise _gone(error) from error

    def has_fingerprint(self, known: object) -> bool:
        """Whether a fingerprint of either kind belongs to this split."""
        if by_lengths(self, known):
            return self.lengths_fingerprint() == known
        return self.fingerprint() == known

    def _digest(self, size: int, files: Sequence[str] = ()) -> str:
        used, places = torch.unique(self.labels.cpu(), return_inverse=True)
        digest = hashlib.blake2b(digest_size=size)
        digest.update("\n".join(self.classes[label] for label in used.tolist()).encode("utf-8", "surrogateescape"))
        digest.update(places.numpy().astype("<i8").tobytes())
        if self.queries is not None:
            digest.update(self.queries.numpy().tobytes())
        if self.images is not None:
            digest.update(f"{tuple(self.images.shape)} {self.images.dtype}".encode())
            digest.update(self.images.cpu().contiguous().numpy().data)
        for index, mark in enumerate(files):
            digest.update(f"\n{self.sample(index)} {mark}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def by_lengths(split: Split, known: object) -> bool:
    """Whether a fingerprint is of the older kind, by lengths of files."""
    return split.paths is not None and not str(known).startswith(_CONTENTS)


def _gone(error: OSError) -> DataError:
    return DataError(f"{error.filename} is missing or cannot be read ({error.strerror}); restore it")


def _check_images(name: str, images: Tensor) -> None:
    """Refuse images in memory with the wrong axes, type or range."""
    shape = tuple(images.shape)
    if images.ndim != 4 or not 1 <= shape[3] <= _CHANNELS:
        first = images.ndim == 4 and 1 <= shape[1] <= _CHANNELS
        todo = "use images.permute(0, 2, 3, 1)" if first else f"the last axis holds 1 … {_CHANNELS} channels"
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
            where = worded("with --mean and --std", "to ah.wrap(model, mean=…, std=…)")
            todo = f"give them without normalisation, and give mean and std {where}"
        else:
            todo = "scale them to that range"
        raise DataError(f"{name} has pixels from {low:g} to {high:g}, not in [0, 1]: {todo}")


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training split and a test split: what `dataset` returns.

    Args:
        name: of the data set.
        train: the images to train on.
        test: the images to search and to attack; its classes are usually others.
        notes: sentences for the user.
        root: the folder as given, so that a run can find its images again.
        held_out: the number of training classes that replace the test split.
        as_given: `fit` trains on the images as they are, whatever the recipe says of resize and crop.

    >>> from anchorhold import dataset
    >>> data = dataset("digits").holding_out(2)
    >>> data.held_out, len(data.train), len(data.test)
    (2, 537, 364)
    """

    name: str
    train: Split
    test: Split
    notes: tuple[str, ...] = ()
    root: str = ""
    held_out: int = 0
    as_given: bool = False

    def __post_init__(self) -> None:
        check_classes(self.train)
        check_classes(self.test.gallery)
        if not len(self.query):
            raise DataError(f"{self.query.name} has no images; add at least one")

    def holding_out(self, classes: int) -> "Dataset":
        """The same data with the last N training classes as test split, for choosing settings without the real one."""
        if not classes:
            return self
        if self.held_out:
            raise DataError(f"{self.held_out} classes of {self.name} are already held out; give the total number once")
        used = torch.unique(self.train.labels)
        if classes < 2 or len(used) - classes < 2:
            raise DataError(
                f"cannot hold out {classes} of the {len(used)} classes of {self.train.name}; "
                "leave at least two to train on, and hold out at least two"
            )
        held = torch.isin(self.train.labels, used[-classes:])
        seen = replace(self.train.keep(~held), name=f"{self.train.name}, first {len(used) - classes} classes")
        unseen = replace(self.train.keep(held), name=f"{self.train.name}, last {classes} classes")
        note = f"evaluating on {classes} held-out training classes instead of the test split."
        return replace(self, train=seen, test=unseen, notes=(*self.notes, note), held_out=classes)

    def __repr__(self) -> str:
        train, test = (", ".join(split._told()) for split in (self.train, self.test))
        held = f", {self.held_out} classes held out" if self.held_out else ""
        return f"<Dataset {shown(self.name)}{held}: train {train};\n test {test}>"

    def _repr_html_(self) -> str:
        parts = (("train", self.train), ("test", self.test))
        rows = [[part, f"{len(split):,}", len(torch.unique(split.labels)), *split._told()[1:]] for part, split in parts]
        wide = max(map(len, rows))
        filled = [[*row, *[""] * (wide - len(row))] for row in rows]
        return html_table(f"Dataset {self.name}", ["part", "images", "classes", *[""] * (wide - 3)], filled, self.notes)

    @property
    def query(self) -> Split:
        """The queries of the test split."""
        return self.test.query

    @property
    def gallery(self) -> Split:
        """The gallery of the test split."""
        return self.test.gallery


def check_classes(split: Split) -> None:
    """Refuse a split with fewer than two classes."""
    classes = torch.unique(split.labels).tolist()
    if not classes:
        raise DataError(f"{split.name} has no images; give at least two classes")
    if len(classes) == 1:
        only = split.classes[classes[0]]
        raise DataError(f"{split.name} has only one class ({only}); give at least two")
