"""What an audit looks at: data in any of its forms become queries, a gallery, and who is whose own image."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attacks import Scene
from ..console import Report
from ..data.datasets import Dataset, Split, csv_split, dataset, folder_split
from ..errors import DataError
from ..monitors import Images, load_images
from ..random import Key
from ..ranks import Ranks
from ..settings import DataSettings

__all__ = ["Data", "Material", "prepare", "sample", "splits_of"]

Data = Dataset | Split | str | Path | tuple[Tensor, Tensor] | Mapping[str, Any]
"""A data set, a split, a folder, a CSV, (images, labels), or {"query": one of these, "gallery": another}."""

_CHANNELS = (1, 3)


@dataclass(frozen=True, eq=False)
class Material:
    """Queries and gallery, decoded, with labels that mean the same class on both sides."""

    query: Images
    gallery: Images
    labels: Tensor  # (Q,)
    gallery_labels: Tensor  # (G,)
    own: Tensor  # (Q,) the gallery id of each query's own image, -1 where it is not there
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether every image is a query against all others."""
        return self.query is self.gallery

    def side(self, name: Literal["query", "gallery"]) -> Images:
        """The images of one side."""
        return self.query if name == "query" else self.gallery

    def scene(self, queries: Tensor, gallery: Tensor) -> Scene:
        """What attacks look at, given the clean embeddings of both sides."""
        return Scene(gallery, self.gallery_labels, queries, self.labels, self.own)

    def describe(self) -> dict[str, Any]:
        """Names, sizes and fingerprints, and the squares that were made of files; no paths."""

        def side(images: Images) -> dict[str, Any]:
            known = {"name": images.split.name, "fingerprint": images.split.fingerprint()}
            # By default it is the model's size that says to which, and no setting.
            return known | ({"resize": images.resize, "crop": images.crop} if images.split.paths is not None else {})

        return {
            "query": side(self.query),
            "gallery": side(self.gallery),
            "images": [len(self.labels), len(self.gallery_labels)],
            "classes": len(torch.unique(self.gallery_labels)),
            "same": self.same,
        }


def prepare(
    data: Data,
    model: nn.Module,
    device: torch.device,
    report: Report,
    resize: int | None = None,
    crop: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    ranks: Ranks | None = None,
) -> Material:
    """Decode both sides; files become squares of `resize` and `crop`, by default those the model is for."""
    query, gallery, own, notes = splits_of(data)
    for role, split in (("query", query), ("gallery", gallery)):
        if not len(split):
            raise DataError(f"the {role} is empty; give at least one image")

    def load(split: Split) -> Images:
        wide, inner = _squares(split, model, resize, crop)
        wanted = DataSettings(resize=wide, crop=inner, flip=False, on_bad_image=on_bad_image)
        return load_images(split, wanted, device, report, ranks)

    searched = load(gallery)
    asked = searched if query is gallery else load(query)
    labels, gallery_labels = _aligned(asked.split, searched.split)
    if len(torch.unique(gallery_labels)) < 2:
        raise DataError(f"{searched.split.name} has one class only, so nothing to tell apart; give two or more")
    if own is None:
        own = torch.arange(len(labels)) if asked is searched else _same_files(asked.split, searched.split)
    elif own.shape != labels.shape or own.min() < -1 or own.max() >= len(gallery_labels):
        raise DataError(f"own has to give each of the {len(labels)} queries its gallery id, or -1")
    return Material(asked, searched, labels.to(device), gallery_labels.to(device), own.long().to(device), notes)


def splits_of(data: Data) -> tuple[Split, Split, Tensor | None, tuple[str, ...]]:
    """Query and gallery (one object where they are the same), `own` where it was given, and what to know."""
    if isinstance(data, Dataset):
        return data.query, data.gallery, None, data.notes
    if isinstance(data, Mapping):
        if not {"query", "gallery"} <= set(data) <= {"query", "gallery", "own"}:
            raise DataError(f"a mapping needs query and gallery (and perhaps own), not {', '.join(map(str, data))}")
        gallery, notes = _split(data["gallery"], "gallery")
        if data["query"] is data["gallery"]:
            return gallery, gallery, None, notes
        query, more = _split(data["query"], "query", asks=True)
        query, own = replace(query, asks=True), data.get("own")
        return query, gallery, None if own is None else torch.as_tensor(own), (*notes, *more)
    split, notes = _split(data, "images")
    return split.query, split.gallery, None, notes


def _split(data: Any, name: str, asks: bool = False) -> tuple[Split, tuple[str, ...]]:
    if isinstance(data, Split):
        return data, ()
    if isinstance(data, Dataset):
        return data.test, data.notes
    if isinstance(data, str | Path):
        root = Path(data).expanduser()
        if root.suffix == ".csv":
            return csv_split(root, asks)
        if not root.is_dir():
            known = dataset(str(data))  # a name, or one line that says which names there are
            return known.test, known.notes
        if all((root / part).is_dir() for part in ("train", "test")):
            return folder_split(root / "test", f"{root.resolve().name}/test", asks)
        split, notes = folder_split(root, root.resolve().name, asks)
        whole = f"all {len(split.classes)} classes of {split.name} are audited, also any that the model was trained on"
        return split, (*notes, f"{whole}; to leave those out, make folders train/ and test/ inside")
    if isinstance(data, tuple | list) and len(data) == 2:
        return _in_memory(torch.as_tensor(data[0]), torch.as_tensor(data[1]), name), ()
    raise DataError(
        f"cannot read images from {type(data).__name__}; give a data set, a split, a folder, (images, labels), "
        'or {"query": …, "gallery": …}'
    )


def _in_memory(images: Tensor, labels: Tensor, name: str) -> Split:
    """(images, labels) as a split: bytes in either order of axes, floats as (N, C, H, W)."""
    if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"images {tuple(images.shape)} and labels {tuple(labels.shape)}: give (N, C, H, W) and one label for each"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise DataError(f"images are {images.dtype}: give floats in [0, 1], or uint8")
    first, last = images.shape[1] in _CHANNELS, images.shape[3] in _CHANNELS
    if images.dtype == torch.uint8 and last:
        if first:
            raise DataError(f"images {tuple(images.shape)} could be NHWC or NCHW: give floats in [0, 1], always NCHW")
    else:
        images = images.permute(0, 2, 3, 1)
    if images.is_floating_point():
        images = images.float()
    values, numbers = torch.unique(labels.cpu(), return_inverse=True)
    return Split(name, numbers, tuple(str(value) for value in values.tolist()), images=images.detach())


def _squares(split: Split, model: nn.Module, resize: int | None, crop: int | None) -> tuple[int, int]:
    """To which square files are resized, and what is cut out of its middle; 0: nothing is done."""
    if split.paths is None:
        return resize or 0, crop or 0
    size = getattr(model, "size", None) or (224, 224)
    inner = max(size) if crop is None else crop
    # The papers' 256 for 224, at any size.
    return (round(inner * 256 / 224) if inner else max(size)) if resize is None else resize, inner


def _aligned(query: Split, gallery: Split) -> tuple[Tensor, Tensor]:
    """Labels of both sides by the names of their classes: two folders number theirs independently."""
    if query.classes == gallery.classes:
        return query.labels, gallery.labels
    names = {name: number for number, name in enumerate(dict.fromkeys((*gallery.classes, *query.classes)))}

    def numbered(split: Split) -> Tensor:
        table = torch.tensor([names[name] for name in split.classes])
        return table[split.labels.cpu()]

    return numbered(query), numbered(gallery)


def _same_files(query: Split, gallery: Split) -> Tensor:
    """The gallery id of each query's own file; images in memory have no identity, so theirs is -1."""
    if query.paths is None or gallery.paths is None:
        return torch.full((len(query),), -1)
    places = {path.resolve(): number for number, path in enumerate(gallery.paths)}
    return torch.tensor([places.get(path.resolve(), -1) for path in query.paths])


def sample(labels: Tensor, limit: int, key: Key) -> Tensor:
    """Sorted ids of `limit` images (0: all), in proportion to the classes but at least one of each if they fit.

    >>> sample(torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 2]), 5, Key.of(0)).shape
    torch.Size([5])
    """
    labels = labels.cpu()
    total = len(labels)
    if not 0 < limit < total:
        return torch.arange(total)
    mixed = key.permutation(total)
    by_class = mixed[labels[mixed].argsort(stable=True)]  # class by class, at random within
    _, place, sizes = torch.unique(labels[by_class], return_inverse=True, return_counts=True)
    nth = torch.arange(total) - (sizes.cumsum(0) - sizes)[place]
    # The n-th of a class of s is due at n/s: the first of every class at once, then in proportion to its size.
    due = nth.double() / sizes[place]
    chance = key("tie").uniform(by_class)
    order = chance.argsort()
    order = order[due[order].argsort(stable=True)]
    return by_class[order[:limit]].sort().values
