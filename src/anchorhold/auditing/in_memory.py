"""Which of the images in memory are attacked: the classes that the model has not seen, where its record tells.

Training holds out a fifth of the classes of data without a test part. A model keeps the fingerprints of both parts and
a hash of the name of each training class. So an audit knows what was trained on in three ways, in this order:

    the same data        the fingerprint of what training holds out of them is the model's
    one of their parts   the fingerprint is that of the test part, or of the training part
    names of classes     of other images, a class with the name of a training class was trained on

Numbers are no names: class 3 of other data may be another class. Where none of this tells, a note says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..data.adapters import Given, dataset_from, split_from
from ..data.decode import Square
from ..data.splits import Split
from ..data.trained import TrainedOn, mark
from ..errors import DataError

__all__ = ["Classes", "Part", "part_in_memory"]

Classes = Literal["unseen", "all"]

GIVEN = "the images that were given"
UNKNOWN = "the record of the model does not tell whether classes attacked here were trained on: some may be"


@dataclass(frozen=True, eq=False)
class Part:
    """The attacked data, a short description of them, notes, and a caveat of the description. None contains a path."""

    data: Any
    said: str
    notes: tuple[str, ...] = ()
    caveat: str = ""

    @property
    def recorded(self) -> str:
        """The description with its caveat, for a result; what is said beforehand does not repeat the caveat."""
        return f"{self.said}, {self.caveat}" if self.caveat else self.said


def part_in_memory(data: Any, known: Iterable[TrainedOn], classes: Classes, side: int | Square) -> Part:
    """What an audit attacks of data that are neither a data set nor files; `known` are the records of the models."""
    records = list(known)
    if not records:
        return Part(data, GIVEN)
    if isinstance(data, Mapping):
        if set(data) != {"train", "test"} or isinstance(data["test"], str) or hasattr(data["test"], "__fspath__"):
            return Part(data, GIVEN, (UNKNOWN,) if any(each.unnamed for each in records) else ())
        data, own = data["test"], True  # called a test by the user, so nothing is left out of it
    else:
        own = False
    whole = split_from(data, "images", resize=side)
    kept: Any = data if isinstance(data, Split) else Given(whole)  # read once: it may be a stream
    for trained in records:
        if whole.has_fingerprint(trained.test):
            return Part(kept, f"{GIVEN}, on which training tested the model")
        if whole.has_fingerprint(trained.train):
            return Part(kept, GIVEN, ("the model was trained on the images attacked here: give others",))
    cut = (
        None if own else next(filter(lambda held: held is not None, (_held_out(data, whole, t) for t in records)), None)
    )
    if cut is not None:
        return _unseen(kept, whole, cut, classes, "")
    if own or (isinstance(data, Split) and not any(trained.unnamed for trained in records)):
        return Part(kept, GIVEN)
    return _by_name(kept, whole, records, classes)


def _held_out(data: Any, whole: Split, trained: TrainedOn) -> Tensor | None:
    """Which images training held out of these data, as a mask; None where it was trained on others."""
    if not trained.unnamed or whole.queries is not None:
        return None
    # PIL images may have been resized in training; how, its record does not tell.
    for each in (whole, *(() if isinstance(data, Split | Given) or whole.name != "pictures" else (data,))):
        try:
            found = dataset_from(each).holding_out(trained.held_out)
        except DataError:  # too few classes, or a stream that is read already
            continue
        if found.test.has_fingerprint(trained.test):
            held = {found.test.classes[label] for label in torch.unique(found.test.labels).tolist()}
            return torch.tensor([whole.classes[label] in held for label in whole.labels.tolist()])
    return None


def _by_name(kept: Any, whole: Split, records: list[TrainedOn], classes: Classes) -> Part:
    """Leave out the classes that have the name of a training class."""
    used = [whole.classes[label] for label in torch.unique(whole.labels).tolist()]
    if all(name.lstrip("-").isdecimal() for name in used) or not all(trained.classes for trained in records):
        return Part(kept, GIVEN, (UNKNOWN,))
    marks = {each for trained in records for each in trained.classes}
    seen = {name for name in used if mark(name) in marks}
    if not seen:
        return Part(kept, f"{GIVEN}, none of whose classes has the name of a training class")
    if len(used) - len(seen) < 2:
        note = f"{len(seen)} of the {len(used)} classes attacked here have names of training classes"
        return Part(kept, GIVEN, (f"{note}; too few others are left to leave these out",))
    fresh = torch.tensor([whole.classes[label] not in seen for label in whole.labels.tolist()])
    return _unseen(kept, whole, fresh, classes, ", by their names")


def _unseen(kept: Any, whole: Split, fresh: Tensor, classes: Classes, how: str) -> Part:
    """The images of the mask, or all where these were asked for."""
    count, left = len(torch.unique(whole.labels)), len(torch.unique(whole.labels[fresh]))
    if classes == "all":
        return Part(kept, f"all {count} classes that were given, including those that the model was trained on")
    part = whole.keep(fresh)
    said = f"the {left} of {count} classes that were given that the model was not trained on{how}"
    return Part(part if isinstance(kept, Split) else Given(part), said)
