"""Data in whatever form you have them, as splits and data sets.

    (images, labels)            tensors or arrays: bytes in either order of axes, floats in [0, 1] as (N, C, H, W);
                                grey images may be (N, H, W)
    a torch Dataset             items (image, label): a tensor, an array or a PIL image, and a number or a name
    a DataLoader                the same from its data set, in that order; of a stream, as it comes
    a Hugging Face split        a column of images and one of labels, in any format
    {"train": …, "test": …}     any of these, for training

Labels may be numbers or names. Images are held in memory: a folder or a CSV of files is streamed where it is large.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from ..errors import DataError, lacks_memory
from ..extensions import USER, Origin
from ..random import Key
from .datasets import DATASETS, dataset, folder_split
from .decode import Square, square
from .own import is_own, own_dataset
from .splits import Dataset, Split

__all__ = ["IN_MEMORY", "Given", "dataset_from", "split_from"]

IN_MEMORY = ("memory", "pictures", "files")  # what data sets are called to which no name leads again

_CHANNELS = (1, 3)
_IMAGES, _LABELS = ("image", "img", "pixel_values"), ("label", "labels", "fine_label", "class", "target")
SIDE = 256  # to which PIL images of several sizes are resized, unless you say otherwise


@dataclass(frozen=True, eq=False)
class Given:
    """Data in memory that are read already, and still used as they were given."""

    split: Split


def dataset_from(
    data: Any,
    root: Any = None,
    *,
    held_out: int = 0,
    seed: int = 0,
    resize: int | Square = 0,
    origin: Origin = USER,
    labels: bool = True,
) -> Dataset:
    """What `fit` trains and tests on. Without a test part, a fifth of the classes is held out for it.

    Args:
        data: a data set, a name, `module:thing`, a folder, a CSV, or any form above.
        root: of a name, where its files lie.
        held_out: number of training classes to test on instead.
        seed: by which classes are held out where there is no test part.
        resize: to which PIL images of several sizes are brought; 0 is 256.
        origin: who gave the name, if it is one.
        labels: whether they are needed; without, a folder may hold loose images.
    """
    if isinstance(data, Dataset):
        return data
    if is_own(data):
        return own_dataset(data, root, seed=seed, held_out=held_out, resize=resize, origin=origin)
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        loose = not labels and str(data) not in DATASETS and Path(data).expanduser().is_dir()
        return dataset(data, root, held_out=held_out, **({"labels": False} if loose else {}))
    if isinstance(data, Mapping) and not _is_hub(data):
        if set(data) != {"train", "test"}:
            raise DataError(f"a mapping needs train and test to be trained on, not {', '.join(map(str, data))}")
        train, test = (_part(data[part], part, resize) for part in ("train", "test"))
        return _named(*_aligned(train, test)).holding_out(held_out)
    whole = split_from(data, "images", resize=resize)
    used = [whole.classes[label] for label in torch.unique(whole.labels).tolist()]
    if len(used) < 4:
        raise DataError(
            f"these data have {len(used)} classes; it takes four to train on two and test on two others: "
            'give more, or {"train": …, "test": …}'
        )
    # Chosen by name, as in a folder.
    key = Key.of(seed)("held-out classes")
    held = sorted(used, key=lambda own: key(own).value)[: max(2, round(len(used) / 5))]
    tested = torch.isin(whole.labels, torch.tensor([whole.classes.index(name) for name in held]))
    note = f"{len(held)} of the {len(used)} classes are held out for test (seed {seed}): {', '.join(sorted(held)[:5])}."
    return _named(whole.keep(~tested), whole.keep(tested), note).holding_out(held_out)


def _named(train: Split, test: Split, *notes: str) -> Dataset:
    """Tensors are `memory`, and trained on as they are; PIL images are `pictures`, which the recipe crops."""
    files = train.paths is not None and test.paths is not None
    kind = "files" if files else "pictures" if "pictures" in (train.name, test.name) else "memory"
    train, test = replace(train, name=f"{kind}/train"), replace(test, name=f"{kind}/test")
    return Dataset(kind, train, test, notes, as_given=kind == "memory")


def _part(data: Any, name: str, resize: int | Square) -> Split:
    """One part of a mapping: a folder of class folders, or any form of images in memory."""
    if isinstance(data, Dataset):
        return data.train if name == "train" else data.test
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        return folder_split(data, name)[0]
    return split_from(data, name, resize=resize)


def _aligned(train: Split, test: Split) -> tuple[Split, Split]:
    """Both with one list of classes: each part numbers its own."""
    names = tuple(dict.fromkeys((*train.classes, *test.classes)))

    def over(split: Split) -> Split:
        table = torch.tensor([names.index(name) for name in split.classes])
        return replace(split, labels=table[split.labels], classes=names)

    return over(train), over(test)


def split_from(data: Any, name: str = "images", *, resize: int | Square = 0) -> Split:
    """Images and labels in any form above as one split.

    >>> split_from((torch.rand(4, 3, 8, 8), ["cat", "dog", "cat", "dog"])).classes
    ('cat', 'dog')
    """
    if isinstance(data, Split | Given):
        return data if isinstance(data, Split) else data.split
    try:
        return _split_from(data, name, resize)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:  # it may be anything
        if lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise DataError(f"{name} cannot be read as images with labels ({type(error).__name__}: {reason})") from error


def _split_from(data: Any, name: str, resize: int | Square) -> Split:
    if isinstance(data, tuple | list) and len(data) == 2 and not _is_item(data[0]):
        return in_memory(data[0], data[1], name)
    if isinstance(data, DataLoader):
        data = data.dataset if _in_order(data) else _unbatched(data)
    if _is_hub(data):
        return _gathered(_hub_items(data), name, _hub_names(data), resize)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes | Mapping):
        return _gathered((data[place] for place in range(len(data))), name, getattr(data, "classes", None), resize)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        return _gathered(iter(data), name, None, resize)
    raise DataError(
        f"cannot read images from {type(data).__name__}; give a data set, a split, a folder, (images, labels), "
        'a torch Dataset or DataLoader, or {"query": …, "gallery": …}'
    )


def _is_item(thing: Any) -> bool:
    """Whether it is one (image, label), as of a list of two of them."""
    return isinstance(thing, tuple | list) and len(thing) == 2 and not isinstance(thing[1], tuple | list)


def _in_order(loader: "DataLoader[Any]") -> bool:
    """Whether a loader gives all its data set, one item after another or shuffled: then the set itself is read."""
    plain = type(loader.sampler) in (SequentialSampler, RandomSampler) and loader.collate_fn is default_collate
    return plain and hasattr(loader.dataset, "__len__") and hasattr(loader.dataset, "__getitem__")


def in_memory(images: Any, labels: Any, name: str, names: Sequence[str] | None = None) -> Split:
    """(images, labels) as a split; `names` are those of numbered classes."""
    pixels = torch.as_tensor(images)
    pixels = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels  # grey, without an axis for it
    numbers, classes = _numbered(labels, names)
    if pixels.ndim != 4 or numbers.ndim != 1 or len(pixels) != len(numbers):
        raise DataError(
            f"images {tuple(pixels.shape)} and labels {tuple(numbers.shape)}: give (N, C, H, W) and one label for each"
        )
    if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
        raise DataError(f"images are {pixels.dtype}: give floats in [0, 1], or uint8")
    first, last = pixels.shape[1] in _CHANNELS, pixels.shape[3] in _CHANNELS
    if pixels.dtype == torch.uint8 and last:
        if first:
            raise DataError(f"images {tuple(pixels.shape)} could be NHWC or NCHW: give floats in [0, 1], always NCHW")
    else:
        pixels = pixels.permute(0, 2, 3, 1)
    if pixels.is_floating_point():
        pixels = pixels.float()
    return Split(name, numbers, classes, images=pixels.detach())


def _numbered(labels: Any, names: Sequence[str] | None) -> tuple[Tensor, tuple[str, ...]]:
    """Labels as 0 … C−1 and the names of the classes, in order of number or name."""
    listed = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if any(isinstance(label, str) for label in listed):
        if not all(isinstance(label, str) for label in listed):
            raise DataError("some labels are names and some are not: give all of them as names, or all as numbers")
        words = [str(label) for label in listed]
        table = {word: place for place, word in enumerate(sorted(set(words)))}
        return torch.tensor([table[word] for word in words], dtype=torch.int64), tuple(table)
    values, numbers = torch.unique(torch.as_tensor(labels).cpu(), return_inverse=True)
    known = values.tolist()
    named = isinstance(names, Sequence) and not isinstance(names, str)
    if names is not None and named and all(isinstance(value, int) and 0 <= value < len(names) for value in known):
        words = [str(names[value]) for value in known]
        # Two classes may have one name, as in ImageNet: a number tells them apart.
        return numbers, tuple(
            word if words.count(word) == 1 else f"{word} ({value})" for word, value in zip(words, known)
        )
    return numbers, tuple(str(value) for value in known)


def _gathered(items: Iterator[Any], name: str, names: Any, resize: int | Square) -> Split:
    """All (image, label) of a data set, in memory."""
    images: list[Any] = []
    labels: list[Any] = []
    side, pictures = resize, False
    for place, item in enumerate(items):
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(f"item {place} of {name} is a {type(item).__name__}: it has to be (image, label)")
        image = item[0]
        if hasattr(image, "getexif"):  # PIL: resized at once, since a photograph is large and its file open
            native = image.width if image.width == image.height else 0
            if not pictures:
                pictures, side = True, resize or native or SIDE
            elif not resize and native != side != SIDE:  # not all alike after all
                images, side = [_resized(each, SIDE) for each in images], SIDE
            image = _pixels(image, side)
        images.append(image)
        labels.append(item[1].item() if isinstance(item[1], Tensor) and item[1].ndim == 0 else item[1])
    if not images:
        raise DataError(f"{name} has no images; it needs at least two classes of them")
    if pictures:
        grey = all(each.shape[2] == 1 for each in images)
        whole = torch.stack([torch.from_numpy(each if grey else _rgb(each)) for each in images])
        return in_memory(whole, labels, "pictures", names)
    frames = [torch.as_tensor(image) for image in images]
    shapes = {tuple(frame.shape) for frame in frames}
    if len(shapes) > 1:
        some = ", ".join(map(str, sorted(shapes)[:3]))
        raise DataError(f"the images of {name} differ in shape ({some} …): resize them in the data set")
    return in_memory(torch.stack(frames), labels, name, names)


def _unbatched(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The items of the batches of a loader whose data set is a stream."""
    for batch in loader:
        if isinstance(batch, Mapping):  # of a Hugging Face split
            image, label = _columns(list(batch))
            yield from zip(batch[image], batch[label])
        else:
            yield from zip(batch[0], batch[1])


def _is_hub(data: Any) -> bool:
    """Whether it is a split of Hugging Face's `datasets`, which need not be installed here."""
    return hasattr(data, "column_names") and hasattr(data, "features") and not isinstance(data, Mapping)


def _columns(columns: Sequence[str]) -> tuple[str, str]:
    """The columns of images and of labels."""
    found = [next((name for name in known if name in columns), None) for known in (_IMAGES, _LABELS)]
    if None in found:
        raise DataError(f"the columns are {', '.join(columns)}: name them image and label (rename_column)")
    return str(found[0]), str(found[1])


def _hub_items(data: Any) -> Iterator[tuple[Any, Any]]:
    """(image, label) of every row; a split that is streamed may tell its columns with its first row only."""
    rows = iter(data)
    first = next(rows, None)
    if first is None:
        return
    image, label = _columns(list(data.column_names or first))
    for row in chain((first,), rows):
        yield _decoded(row[image]), row[label]


def _hub_names(data: Any) -> Any:
    if not data.features:
        return None
    return getattr(data.features[_columns(list(data.features))[1]], "names", None)


def _decoded(image: Any) -> Any:
    """The image of a row: decoded already, or as {"bytes": …, "path": …}, the form of `Image(decode=False)`."""
    from PIL import Image

    if isinstance(image, Mapping) and {"bytes", "path"} <= set(image):
        return Image.open(image["path"] if image["bytes"] is None else BytesIO(image["bytes"]))
    return image


def _pixels(image: Any, side: int | Square) -> Any:
    """A PIL image as bytes (height, width, C); a grey one keeps its one channel."""
    grey = image.mode in ("1", "L")
    whole = square(image, side).copy()
    return whole[:, :, :1].copy() if grey else whole


def _rgb(pixels: Any) -> Any:
    return pixels.repeat(3, 2) if pixels.shape[2] == 1 else pixels


def _resized(pixels: Any, side: int) -> Any:
    from PIL import Image

    return _pixels(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels), side)
