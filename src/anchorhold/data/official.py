"""The papers' data sets in their official layouts: CUB-200-2011, Cars-196, Stanford Online Products, In-Shop.

If a list, an image or a class differs from the official version, the error names it and the download page. An
incomplete set is read with a note, because its scores cannot be compared with published ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..interface import argument, rooted
from ..runs.files import regular
from .layouts import listed_images, once, read_lines, read_table
from .settings import WHOLE
from .splits import Dataset, Split

__all__ = ["cars", "cub", "inshop", "sop"]

_AGAIN = "unpack the data set again"


def _home(root: Path | None, name: str, inner: str, file: str, source: str) -> Path:
    """The folder that has `file`: the given one, or the folder `inner` in it."""
    if root is None:
        raise DataError(f"{name} needs {rooted(name)}: give the folder {inner}; {source}")
    return root / inner if not (root / file).is_file() and (root / inner).is_dir() else root


def _halves(whole: Split, train: Tensor) -> tuple[Split, Split]:
    return (
        replace(whole.keep(train), name=f"{whole.name}/train"),
        replace(whole.keep(~train), name=f"{whole.name}/test"),
    )


def _compared(data: Dataset) -> Dataset:
    """The data set, with a note if the numbers of images are not the official ones."""
    official = WHOLE[data.name]
    sides = [data.train, data.test] if len(official) == 2 else [data.train, data.query, data.gallery]
    if (here := [len(side) for side in sides]) == list(official):
        return data
    words = [", ".join(f"{side.name} {n:,}" for side, n in zip(sides, numbers)) for numbers in (here, official)]
    return replace(data, notes=(*data.notes, f"incomplete data set: {words[0]} images; the whole has {words[1]}."))


def _whole(text: str) -> int | None:
    """A whole number from a list; None for any other text and for numbers that are too long."""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def _number(text: Any, most: int, where: str) -> int:
    """A class id from 1 to `most`."""
    if not 1 <= (_whole(str(text)) or 0) <= most:
        raise DataError(f"{where} gives an image the class {text}, outside 1 … {most}; {_AGAIN}")
    return int(text)


# ---- CUB-200-2011 ----------------------------------------------------------------------------------------

_CUB_CLASSES = 200
_CUB_SOURCE = "download the data set from Caltech's page of CUB-200-2011 (Caltech-UCSD Birds)"


def cub(root: Path | None, seed: int) -> Dataset:
    """Classes 1 … 100 train, 101 … 200 test; label = class id - 1, in the order of images.txt."""
    root = _home(root, "cub", "CUB_200_2011", "images.txt", _CUB_SOURCE)
    files = _cub_list(root / "images.txt")
    marks = _cub_list(root / "image_class_labels.txt")
    names = _cub_list(root / "classes.txt")
    if odd := sorted(files.keys() ^ marks.keys()):
        raise DataError(
            f"images.txt and image_class_labels.txt in {root} disagree: {len(odd)} image "
            f"{'id is' if len(odd) == 1 else 'ids are'} in only one of them, the first is {odd[0]}; {_AGAIN}"
        )
    for image, mark in marks.items():
        if _whole(mark) not in names or int(mark) > _CUB_CLASSES:
            raise DataError(
                f"image_class_labels.txt in {root} gives image {image} the class {mark}, which is not in "
                f"classes.txt; {_AGAIN}"
            )
    once(root / "images.txt", list(files.items()))
    paths = listed_images(root / "images", list(files.values()), f"{_AGAIN}, or {_CUB_SOURCE}")
    labels = torch.tensor([int(marks[image]) - 1 for image in files], dtype=torch.int64)
    classes = tuple(names.get(number, "") for number in range(1, _CUB_CLASSES + 1))
    whole = Split("cub", labels, classes, paths, root=root / "images")
    return _compared(Dataset("cub", *_halves(whole, labels < _CUB_CLASSES // 2)))


def _cub_list(path: Path) -> dict[int, str]:
    """The lines "id value" of a list of CUB."""
    found: dict[int, str] = {}
    for number, line in read_lines(path, f"give the unpacked CUB_200_2011 as {argument('root')}, or {_CUB_SOURCE}"):
        index, _, value = line.partition(" ")
        if _whole(index) is None or not value or int(index) in found:
            raise DataError(f"line {number} of {path} is {line!r}, not a new id and a value; {_AGAIN}")
        found[int(index)] = value.strip()
    return found


# ---- Cars-196 --------------------------------------------------------------------------------------------

_CARS_CLASSES = 196
_CARS_SOURCE = (
    "download the data set from Stanford's page of Cars-196 (Krause et al. 2013): car_ims.tgz, cars_annos.mat"
)


def cars(root: Path | None, seed: int) -> Dataset:
    """Classes 1 … 98 train, 99 … 196 test; label = class id, in the order of the images' names."""
    root = _home(root, "cars", "cars196", "cars_annos.mat", _CARS_SOURCE)
    path = root / "cars_annos.mat"
    if not path.is_file():
        path = root / "cars_annos.csv"
    if not path.is_file():
        raise DataError(f"{root} has neither cars_annos.mat nor cars_annos.csv; {_CARS_SOURCE}")
    rows, names = _cars_mat(path) if path.suffix == ".mat" else _cars_csv(path)
    once(path, [(number, name) for number, (name, _) in enumerate(rows, start=1)])
    rows = sorted(rows)
    paths = listed_images(root, [name for name, _ in rows], f"{_AGAIN}, or {_CARS_SOURCE}")
    labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
    classes = tuple(names.get(number, "") for number in range(_CARS_CLASSES + 1))  # class ids start at 1
    whole = Split("cars", labels, classes, paths, root=root)
    return _compared(Dataset("cars", *_halves(whole, labels <= _CARS_CLASSES // 2)))


def _cars_mat(path: Path) -> tuple[list[tuple[str, int]], dict[int, str]]:
    """(image, class) of every annotation, and the names of the classes."""
    from scipy.io import loadmat  # type: ignore[import-untyped]

    try:
        found = loadmat(regular(path), variable_names=["annotations", "class_names"])
        images, marks = (found["annotations"][field].ravel() for field in ("relative_im_path", "class"))
        rows = [
            (str(image.item()), _number(mark.item(), _CARS_CLASSES, str(path))) for image, mark in zip(images, marks)
        ]
        names = {number: str(name.item()) for number, name in enumerate(found["class_names"].ravel(), start=1)}
    except DataError:
        raise
    except Exception as error:  # scipy may raise anything on a broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} cannot be read as Cars' annotations ({reason}); {_CARS_SOURCE}") from error
    return rows, names


def _cars_csv(path: Path) -> tuple[list[tuple[str, int]], dict[int, str]]:
    table = read_table(path, ("relative_im_path", "class", "class_name"), _CARS_SOURCE)
    marks = [_number(row["class"], _CARS_CLASSES, f"line {number} of {path}") for number, row in table]
    names = {mark: row["class_name"] for mark, (_, row) in zip(marks, table)}
    return [(row["relative_im_path"], mark) for mark, (_, row) in zip(marks, table)], names


# ---- Stanford Online Products ----------------------------------------------------------------------------

_SOP_CLASSES = 22634
_SOP_SOURCE = "download the data set from Stanford's page of Online Products (Song et al. 2016)"
_SOP_HEAD = ["image_id", "class_id", "super_class_id", "path"]


def sop(root: Path | None, seed: int) -> Dataset:
    """Ebay_train.txt and Ebay_test.txt, with disjoint classes; label = class id."""
    root = _home(root, "sop", "Stanford_Online_Products", "Ebay_train.txt", _SOP_SOURCE)
    lists = {part: _sop_list(root / f"Ebay_{part}.txt") for part in ("train", "test")}
    classes = [""] * (_SOP_CLASSES + 1)  # class ids start at 1
    for rows in lists.values():
        for name, label in rows:
            classes[label] = f"{label} {name.partition('/')[0].removesuffix('_final')}"
    train, test = (
        Split(
            f"sop/{part}",
            torch.tensor([label for _, label in rows], dtype=torch.int64),
            tuple(classes),
            listed_images(root, [name for name, _ in rows], f"{_AGAIN}, or {_SOP_SOURCE}"),
            root=root,
        )
        for part, rows in lists.items()
    )
    if both := sorted(set(train.labels.tolist()) & set(test.labels.tolist())):
        raise DataError(f"class {both[0]} is in both lists of {root}, but train and test must be disjoint; {_AGAIN}")
    return _compared(Dataset("sop", train, test))


def _sop_list(path: Path) -> list[tuple[str, int]]:
    """(image, class) of every line of a list."""
    lines = read_lines(path, f"give the unpacked Stanford_Online_Products as {argument('root')}, or {_SOP_SOURCE}")
    if not lines or lines[0][1].split() != _SOP_HEAD:
        raise DataError(f"{path} does not begin with {' '.join(_SOP_HEAD)!r}; {_AGAIN}")
    rows, ids = [], set()
    for number, line in lines[1:]:
        image, label, _, name = _fields(path, number, line, 4)
        if image in ids:
            raise DataError(f"line {number} of {path} repeats the image id {image}; {_AGAIN}")
        ids.add(image)
        rows.append((name, _number(label, _SOP_CLASSES, f"line {number} of {path}")))
    once(path, [(number, name) for (number, _), (name, _) in zip(lines[1:], rows)])
    return rows


def _fields(path: Path, number: int, line: str, count: int) -> Sequence[str]:
    fields = line.split()
    if len(fields) != count:
        raise DataError(f"line {number} of {path} is {line!r}, not {count} fields; {_AGAIN}")
    return fields


# ---- In-Shop ---------------------------------------------------------------------------------------------

_SHOP_LIST = "list_eval_partition.txt"
_SHOP_SOURCE = (
    "download the data set from the page of DeepFashion's In-shop Clothes Retrieval benchmark (Liu et al. 2016)"
)
_SHOP_HEAD = ["image_name", "item_id", "evaluation_status"]


def inshop(root: Path | None, seed: int) -> Dataset:
    """list_eval_partition.txt: a training split, and a test split of queries and gallery; items are classes."""
    root = _home(root, "inshop", "In-shop Clothes Retrieval Benchmark", _SHOP_LIST, _SHOP_SOURCE)
    path = root / "Eval" / _SHOP_LIST if (root / "Eval" / _SHOP_LIST).is_file() else root / _SHOP_LIST
    rows = _shop_list(path)
    base = root / "Img" if (root / "Img").is_dir() else root
    paths = listed_images(base, [name for name, _, _ in rows], f"{_AGAIN}, or {_SHOP_SOURCE}")
    items = sorted({item for _, item, _ in rows})
    numbers = {item: number for number, item in enumerate(items)}
    labels = torch.tensor([numbers[item] for _, item, _ in rows], dtype=torch.int64)
    asks, trains = (
        torch.tensor([status == own for _, _, status in rows], dtype=torch.bool) for own in ("query", "train")
    )
    train, test = _halves(Split("inshop", labels, tuple(items), paths, root=base, queries=asks), trains)
    return _compared(Dataset("inshop", replace(train, queries=None), test))


def _shop_list(path: Path) -> list[tuple[str, str, str]]:
    """(image, item, status) of every line; the first line is their number."""
    lines = read_lines(path, f"give the folder that has Eval/{_SHOP_LIST} as {argument('root')}, or {_SHOP_SOURCE}")
    if len(lines) < 2 or _whole(lines[0][1]) is None or lines[1][1].split() != _SHOP_HEAD:
        raise DataError(f"{path} does not begin with a number and {' '.join(_SHOP_HEAD)!r}; {_AGAIN}")
    if int(lines[0][1]) != len(lines) - 2:
        raise DataError(f"{path} announces {lines[0][1]} images but lists {len(lines) - 2}; {_AGAIN}")
    rows = []
    for number, line in lines[2:]:
        name, item, status = _fields(path, number, line, 3)
        if status not in ("train", "query", "gallery"):
            raise DataError(f"line {number} of {path} has the status {status}, not train, query or gallery; {_AGAIN}")
        rows.append((name, item, status))
    once(path, [(number, name) for (number, _), (name, _, _) in zip(lines[2:], rows)])
    return rows
