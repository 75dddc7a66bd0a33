"""Images without labels: folders beside a data set, and a folder that has no class folders at all.

Only a training that uses no labels can take them. They lie in one class of their own, which no test image has.
"""

from dataclasses import replace
from pathlib import Path

import torch

from ..errors import DataError, check
from .layouts import images_below
from .splits import Dataset, Split

__all__ = ["UNLABELLED", "with_folders", "without_classes", "without_folders"]

UNLABELLED = "images without labels"  # a class
_FEW = 4  # images that stand for a test split


def with_folders(data: Dataset, folders: str) -> Dataset:
    """The data with all images in and below these folders, separated by commas, in the training split."""
    places = [Path(each.strip()).expanduser() for each in folders.split(",") if each.strip()]
    if not places:
        return data
    train = data.train
    check(
        train.paths is not None,
        f"data.beside adds files, but the images of {data.name} are in memory: give a folder of images as the data set",
    )
    assert train.paths is not None
    known, found = {path.resolve() for path in train.paths}, list[Path]()
    for place in places:
        images = images_below(str(place))
        if not images:
            raise DataError(f"data.beside: {place} has no images; give a folder of images")
        found += [path for path in images if path.resolve() not in known]
        known.update(path.resolve() for path in images)
    label = len(train.classes)
    whole = replace(
        train,
        labels=torch.cat([train.labels, torch.full((len(found),), label)]),
        classes=(*train.classes, UNLABELLED),
        paths=(*train.paths, *found),
        roots=tuple(places),
    )
    note = f"{len(found):,} images without labels are added to the {len(train):,} of {train.name}."
    return replace(data, train=whole, notes=(*data.notes, note))


def without_folders(data: Dataset) -> Dataset:
    """The data without the images of folders beside it."""
    train = data.train
    if not train.roots:
        return data
    own = replace(train.keep(train.labels < len(train.classes) - 1), classes=train.classes[:-1], roots=())
    return replace(data, train=own)


def without_classes(root: Path) -> Dataset:
    """A folder of loose images as a data set without labels; the test split only stands for one."""
    images = images_below(str(root))
    if len(images) < _FEW:
        raise DataError(f"{root} has {len(images)} images; give at least {_FEW}")
    labels = torch.arange(len(images)) % 2  # two classes that mean nothing, since a split has two
    train = Split("folder/train", labels, ("a", "b"), tuple(images), root=root, labelled=False)
    test = replace(train.keep(torch.arange(_FEW)), name="folder/test")
    note = f"{root} has no class folders, so retrieval is not measured."
    return Dataset("folder", train, test, (note,))
