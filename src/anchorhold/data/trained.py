"""The data that a model was trained on; the record is saved with the model, so that an audit can leave them out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from ..errors import RunError
from ..extensions import names_code
from .adapters import IN_MEMORY
from .splits import Dataset

__all__ = ["TrainedOn", "mark"]

MOST = 10_000  # classes whose names are remembered


def mark(name: str) -> str:
    """A short hash of the name of a class."""
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


@dataclass(frozen=True)
class TrainedOn:
    """The name of a data set and the fingerprints of its splits; it contains no paths and no class names."""

    name: str  # cub, folder, csv, …
    train: str
    test: str
    held_out: int = 0  # number of training classes that replaced the test split
    classes: tuple[str, ...] = ()  # hashes of the names of the training classes, where no file holds the data

    @classmethod
    def of(cls, data: Dataset) -> "TrainedOn":
        """The record of a training on `data`."""
        train = data.train
        names = (
            [train.classes[label] for label in torch.unique(train.labels).tolist()] if cls._unnamed(data.name) else []
        )
        marks = tuple(mark(name) for name in names) if len(names) <= MOST else ()
        return cls(data.name, train.fingerprint(), data.test.fingerprint(), data.held_out, marks)

    @staticmethod
    def _unnamed(name: str) -> bool:
        return name in IN_MEMORY or names_code(name)

    @property
    def unnamed(self) -> bool:
        """Whether the data were in memory, or came from code of the user's."""
        return self._unnamed(self.name)

    def record(self) -> dict[str, Any]:
        """What a model file holds; `read` reads it."""
        whole = asdict(self)
        return whole if self.classes else {name: value for name, value in whole.items() if name != "classes"}

    @classmethod
    def read(cls, record: Any) -> "TrainedOn | None":
        """The record in a model file; None if there is none."""
        if record is None:
            return None
        own = cls(**{**record, "classes": tuple(record.get("classes", ()))})
        if not all(isinstance(each, str) for each in own.classes):
            raise TypeError("the record of its training classes has values of the wrong type")
        if not all(isinstance(each, str) for each in (own.name, own.train, own.test)) or type(own.held_out) is not int:
            raise TypeError("the record of its training data has values of the wrong type")
        return own

    @classmethod
    def beside(cls, folder: Path) -> "TrainedOn | None":
        """The record from run.json in the same folder, for older models without their own."""
        from ..runs.folder import Run

        try:
            info = Run(folder).read_json()
        except RunError:  # not a run folder, or one of another version
            return None
        data, settings = _part(info, "data"), _part(_part(info, "settings"), "data")
        name, held_out = data.get("name") or settings.get("name"), settings.get("held_out")
        name, train, test = (str(each or "") for each in (name, data.get("train"), data.get("test")))
        return cls(name, train, test, held_out if type(held_out) is int else 0)


def _part(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, Mapping) else {}
