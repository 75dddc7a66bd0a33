"""The input of an audit: data in any form become queries, a gallery, and each query's own image in it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..attacks.goal import Scene
from ..console import Report
from ..data.adapters import split_from
from ..data.datasets import csv_split, dataset, folder_split
from ..data.decode import Square, shape_of
from ..data.images import Images, load_images
from ..data.settings import DataSettings
from ..data.splits import Dataset, Split
from ..distributed import Ranks
from ..errors import DataError
from ..interface import option
from ..model.preprocessing import Preprocessing, preprocessing_of
from ..random import Key

__all__ = ["Data", "Material", "prepare", "sample", "splits_of"]

Data = Any
"""A data set, a split, a folder, a CSV, a form of `data.adapters`, or {"query": one of these, "gallery": another}."""


@dataclass(frozen=True, eq=False)
class Material:
    """Queries and gallery, decoded, with labels that mean the same class on both sides."""

    query: Images
    gallery: Images
    labels: Tensor  # (Q,)
    gallery_labels: Tensor  # (G,)
    own: Tensor  # (Q,) the gallery id of each query's own image, -1 where it is not there
    notes: tuple[str, ...] = ()
    part: str = ""  # which part of the data this is, in words
    remarks: tuple[str, ...] = ()  # notes on that part for the result, without paths

    @property
    def same(self) -> bool:
        """Whether every image is a query against all others."""
        return self.query is self.gallery

    def side(self, name: Literal["query", "gallery"]) -> Images:
        """The images of one side."""
        return self.query if name == "query" else self.gallery

    def scene(self, queries: Tensor, gallery: Tensor) -> Scene:
        """The scene of the attacks, from the clean embeddings of both sides."""
        return Scene(gallery, self.gallery_labels, queries, self.labels, self.own)

    def describe(self) -> dict[str, Any]:
        """Names, sizes, fingerprints, and how files were resized and cropped; no paths."""

        def side(images: Images) -> dict[str, Any]:
            split = images.split
            known: dict[str, Any] = {"name": split.name, "fingerprint": split.fingerprint()}
            if split.paths is not None:  # older runs and audits identify files by their lengths
                known["lengths"] = split.lengths_fingerprint()
            # By default the model determines these, and no setting.
            made = split.paths is not None or bool(images.resize or images.crop)
            how: dict[str, Any] = {}
            if isinstance(images.square, Square):
                how = {"interpolation": images.square.interpolation, "proportions": images.square.proportions}
                how |= {"shape": list(shape_of(images.square))} if images.square.width else {}
            return known | ({"resize": images.resize, "crop": images.crop, **how} if made else {})

        return {
            "query": side(self.query),
            "gallery": side(self.gallery),
            "images": [len(self.labels), len(self.gallery_labels)],
            "classes": len(torch.unique(self.gallery_labels)),
            "same": self.same,
            "part": self.part,
        }


def prepare(
    data: Data,
    model: nn.Module,
    device: torch.device,
    report: Report,
    resize: int | None = None,
    crop: int | None = None,
    on_bad_image: Literal["fail", "skip"] | None = None,
    ranks: Ranks | None = None,
) -> Material:
    """Decode both sides. Files get the model's preprocessing; `resize` and `crop` override it.

    `on_bad_image` is None where the caller's interface has no such argument, and unreadable images are errors.
    """
    way = preprocessing_of(model)
    query, gallery, own, notes = splits_of(data, way.told(resize, crop).square)
    for role, split in (("query", query), ("gallery", gallery)):
        if not len(split):
            raise DataError(f"the {role} is empty; give at least one image")

    if gallery.paths is not None and way.told(resize, crop).assumed:
        notes = (*notes, f"the model does not record its preprocessing; its input size suggests: {way}")

    def load(role: str, split: Split) -> Images:
        given = data.get(role, data.get("test")) if isinstance(data, Mapping) else data
        wide, inner = _squares(split, not isinstance(given, Dataset | Split | str | Path), way, resize, crop)
        files = split.paths is not None or split.name == "pictures"
        how = way.told(resize, crop).square if files else None
        frame = how if isinstance(how, Square) and how.width else None
        wanted = DataSettings(
            resize=wide,
            crop=inner,
            interpolation=way.interpolation,  # type: ignore[arg-type]  # checked with its record
            proportions=way.proportions,
            flip=False,
            on_bad_image=on_bad_image or "fail",
        )
        skipping = option("on_bad_image", "skip") if on_bad_image else ""
        return load_images(split, wanted, device, report, ranks, skipping, frame)

    searched = load("gallery", gallery)
    asked = searched if query is gallery else load("query", query)
    labels, gallery_labels = _aligned(asked.split, searched.split)
    if len(torch.unique(gallery_labels)) < 2:
        raise DataError(f"{searched.split.name} has only one class; give two or more")
    if own is None:
        own = torch.arange(len(labels)) if asked is searched else _same_files(asked.split, searched.split)
    elif own.shape != labels.shape or own.min() < -1 or own.max() >= len(gallery_labels):
        raise DataError(f"own must give each of the {len(labels)} queries its gallery id, or -1")
    return Material(asked, searched, labels.to(device), gallery_labels.to(device), own.long().to(device), notes)


def splits_of(data: Data, resize: int | Square = 0) -> tuple[Split, Split, Tensor | None, tuple[str, ...]]:
    """Query and gallery (one object where they are the same), `own` where given, and notes."""
    if isinstance(data, Dataset):
        return data.query, data.gallery, None, data.notes
    if isinstance(data, Mapping):
        if set(data) == {"train", "test"}:
            return splits_of(data["test"], resize)
        if not {"query", "gallery"} <= set(data) <= {"query", "gallery", "own"}:
            raise DataError(f"a mapping needs query and gallery (and perhaps own), not {', '.join(map(str, data))}")
        gallery, notes = _split(data["gallery"], "gallery", resize=resize)
        if data["query"] is data["gallery"]:
            return gallery, gallery, None, notes
        query, more = _split(data["query"], "query", asks=True, resize=resize)
        query, own = replace(query, asks=True), data.get("own")
        return query, gallery, None if own is None else torch.as_tensor(own), (*notes, *more)
    split, notes = _split(data, "images", resize=resize)
    return split.query, split.gallery, None, notes


def _split(data: Any, name: str, asks: bool = False, resize: int | Square = 0) -> tuple[Split, tuple[str, ...]]:
    if isinstance(data, Split):
        return data, ()
    if isinstance(data, Dataset):
        return data.test, data.notes
    if isinstance(data, str | Path):
        root = Path(data).expanduser()
        if root.suffix == ".csv":
            return csv_split(root, asks)
        if not root.is_dir():
            known = dataset(str(data))  # a known name; otherwise an error that lists the names
            return known.test, known.notes
        if all((root / part).is_dir() for part in ("train", "test")):
            return folder_split(root / "test", f"{root.resolve().name}/test", asks)
        split, notes = folder_split(root, root.resolve().name, asks)
        whole = f"all {len(split.classes)} classes of {split.name} are audited"
        return split, (*notes, f"{whole}; to leave out training classes, make folders train/ and test/ in it")
    return split_from(data, name, resize=resize), ()


def _squares(split: Split, as_given: bool, way: Preprocessing, resize: int | None, crop: int | None) -> tuple[int, int]:
    """The sizes for resizing and centre crop; 0: none.

    Images in memory are prepared as in training where they are a data set. Tensors are used unchanged.
    """
    if split.paths is not None or split.name == "pictures":
        wanted = way.told(resize, crop)
        return wanted.resize, wanted.crop
    known = (0, 0) if as_given else way.in_memory
    return known[0] if resize is None else resize, known[1] if crop is None else crop


def _aligned(query: Split, gallery: Split) -> tuple[Tensor, Tensor]:
    """Labels of both sides matched by class name: two folders number their classes independently."""
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
    """Sorted ids of `limit` images (0: all), in proportion to the classes, at least one of each class if possible.

    >>> sample(torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 2]), 5, Key.of(0)).shape
    torch.Size([5])
    """
    labels = labels.cpu()
    total = len(labels)
    if not 0 < limit < total:
        return torch.arange(total)
    mixed = key.permutation(total)
    by_class = mixed[labels[mixed].argsort(stable=True)]  # by class, in random order within each
    _, place, sizes = torch.unique(labels[by_class], return_inverse=True, return_counts=True)
    nth = torch.arange(total) - (sizes.cumsum(0) - sizes)[place]
    # The n-th of a class of size s has priority n/s: first one of every class, then in proportion to size.
    due = nth.double() / sizes[place]
    chance = key("tie").uniform(by_class)
    order = chance.argsort()
    order = order[due[order].argsort(stable=True)]
    return by_class[order[:limit]].sort().values
