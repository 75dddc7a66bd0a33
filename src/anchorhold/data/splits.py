"""What a data set is: labelled images in splits, and which of them are asked and which searched."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError

__all__ = ["Dataset", "Split", "check_classes"]

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
    queries: Tensor | None = None  # a mask of those that only ask, the others are the gallery; None: each asks all
    asks: bool = False  # it is only asked of a gallery that lies elsewhere, so one class is enough

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
        if self.queries is not None and (self.queries.dtype != torch.bool or self.queries.shape != (count,)):
            raise DataError(f"queries of {self.name} are a mask; give one bool for each of its {count} images")

    def __len__(self) -> int:
        return len(self.labels)

    def keep(self, chosen: Tensor) -> "Split":
        """The same split with only the images of a boolean mask or of a list of ids, in that order."""
        if chosen.dtype == torch.bool and chosen.shape != self.labels.shape:
            raise DataError(f"{self.name} has {len(self)} images but the mask {len(chosen)}; give one bool each")
        ids = (chosen.nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen).cpu()
        paths = None if self.paths is None else tuple(self.paths[i] for i in ids.tolist())
        images = None if self.images is None else self.images[ids.to(self.images.device)]
        queries = None if self.queries is None else self.queries[ids]
        labels = self.labels[ids.to(self.labels.device)]
        return replace(self, labels=labels, paths=paths, images=images, queries=queries)

    @property
    def query(self) -> "Split":
        """What is searched for: the split itself where every image asks all the others."""
        return self if self.queries is None else self._side("query", self.queries)

    @property
    def gallery(self) -> "Split":
        """What is searched through."""
        return self if self.queries is None else self._side("gallery", ~self.queries)

    def _side(self, name: str, mask: Tensor) -> "Split":
        asks = name == "query"
        return replace(self.keep(mask), name=f"{self.name.removesuffix('/test')}/{name}", queries=None, asks=asks)

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
        if self.queries is not None:
            digest.update(self.queries.numpy().tobytes())
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
    held_out: int = 0  # so many classes of the training split are the test split, and the real one is not touched

    def __post_init__(self) -> None:
        check_classes(self.train)
        check_classes(self.test.gallery)
        if not len(self.query):
            raise DataError(f"{self.query.name} has no images; it needs at least one")

    def holding_out(self, classes: int) -> "Dataset":
        """The last so many training classes as test split: settings are chosen on them, and not on the real one."""
        if not classes:
            return self
        if self.held_out:
            raise DataError(f"{self.held_out} classes of {self.name} are held out already; ask for all of them at once")
        used = torch.unique(self.train.labels)
        if classes < 2 or len(used) - classes < 2:
            raise DataError(
                f"{self.train.name} has {len(used)} classes: of those {classes} cannot be held out; "
                "leave two to train on, and two to test on"
            )
        held = torch.isin(self.train.labels, used[-classes:])
        seen = replace(self.train.keep(~held), name=f"{self.train.name}, first {len(used) - classes} classes")
        unseen = replace(self.train.keep(held), name=f"{self.train.name}, last {classes} classes")
        note = f"{classes} of the training classes are held out, to be tested on instead of the test split."
        return replace(self, train=seen, test=unseen, notes=(*self.notes, note), held_out=classes)

    @property
    def query(self) -> Split:
        """What is searched for."""
        return self.test.query

    @property
    def gallery(self) -> Split:
        """What is searched through."""
        return self.test.gallery


def check_classes(split: Split) -> None:
    """Refuse a split in which nothing can be told apart."""
    classes = torch.unique(split.labels).tolist()
    if not classes:
        raise DataError(f"{split.name} has no images; it needs at least two classes of them")
    if len(classes) == 1:
        only = split.classes[classes[0]]
        raise DataError(f"{split.name} has one class only ({only}), so nothing to tell apart; it needs two or more")
