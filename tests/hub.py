"""A stand-in for Hugging Face's `datasets`, which is not installed: splits as they look from outside.

Rows, columns and slices, `features` with ClassLabel, formats, and a streamed split. Taken from the public behaviour of
datasets 2.x and 3.x.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image as Pictures


class ClassLabel:
    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.num_classes, self.dtype = list(names), len(names), "int64"

    def int2str(self, value: int) -> str:
        return self.names[value]


class Value:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class Image:
    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class HubSplit:
    """`datasets.Dataset`: a table with features."""

    def __init__(self, columns: Mapping[str, list[Any]], features: Mapping[str, Any], form: str | None = None) -> None:
        self._columns, self.features, self.format = dict(columns), dict(features), {"type": form}

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    @property
    def num_rows(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [self._formatted(each) for each in self._columns[key]]
        if isinstance(key, slice):
            return {name: [self._formatted(each) for each in values[key]] for name, values in self._columns.items()}
        if not 0 <= key < len(self):
            raise IndexError(f"Index {key} out of range for dataset of size {len(self)}.")
        return {name: self._formatted(values[key]) for name, values in self._columns.items()}

    def _formatted(self, value: Any) -> Any:
        form = self.format["type"]
        if form is None or isinstance(value, str | dict):
            return value
        array = np.array(value)
        if form == "numpy":
            return array if array.ndim else array[()]
        tensor = torch.from_numpy(array) if array.ndim else torch.tensor(array.item())
        return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1) if tensor.ndim == 3 else tensor

    def with_format(self, form: str | None) -> "HubSplit":
        return HubSplit(self._columns, self.features, form)

    def rename_column(self, old: str, new: str) -> "HubSplit":
        def names(table: Mapping[str, Any]) -> dict[str, Any]:
            return {new if name == old else name: value for name, value in table.items()}

        return HubSplit(names(self._columns), names(self.features), self.format["type"])

    def to_iterable_dataset(self) -> "HubStream":
        return HubStream(self)


class HubStream:
    """`datasets.IterableDataset`: no length, and perhaps no columns before the first row."""

    column_names: list[str] | None = None
    features: dict[str, Any] | None = None

    def __init__(self, split: HubSplit) -> None:
        self._split = split

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._split)


def hub_split(images: torch.Tensor, labels: Sequence[int], names: Sequence[str]) -> HubSplit:
    """Grey images (N, 1, H, W) of bytes as a split with a ClassLabel."""
    pictures = [Pictures.fromarray(image[0].numpy()) for image in images]
    return HubSplit(
        {"image": pictures, "label": [int(label) for label in labels]}, {"image": Image(), "label": ClassLabel(names)}
    )
