"""The data that a model was trained on; the record is saved with the model, so that an audit can leave them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RunError
from .splits import Dataset

__all__ = ["TrainedOn"]


@dataclass(frozen=True)
class TrainedOn:
    """The name of a data set and the fingerprints of its splits; it contains no paths and no class names."""

    name: str  # cub, folder, csv, …
    train: str
    test: str
    held_out: int = 0  # number of training classes that replaced the test split

    @classmethod
    def of(cls, data: Dataset) -> "TrainedOn":
        """The record of a training on `data`."""
        return cls(data.name, data.train.fingerprint(), data.test.fingerprint(), data.held_out)

    @classmethod
    def read(cls, record: Any) -> "TrainedOn | None":
        """The record in a model file; None if there is none."""
        if record is None:
            return None
        own = cls(**record)
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
