"""Which part of the data is attacked: the classes that the model has not seen in training.

Training splits a folder or a CSV without splits: a fifth of the classes is for the test. A model stores the
fingerprints of its training data, so that an audit of the same folder takes the same test classes. `in_memory` has the
same rule for images in memory.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from ..data.adapters import IN_MEMORY
from ..data.datasets import DATASETS, csv_split, dataset
from ..data.decode import Square
from ..data.own import is_own
from ..data.splits import Dataset
from ..data.trained import TrainedOn
from ..errors import DataError, check
from ..interface import argument, option, worded
from ..model.wrap import Victim
from .in_memory import Classes, Part, part_in_memory

__all__ = ["Classes", "Part", "audited_data", "part_of"]

_UNNAMED = ("folder", "csv")  # every folder has this name; fingerprints tell them apart


def audited_data(name: str, root: Path | None = None, held_out: int = 0) -> Dataset | str:
    """What to audit, from its name on the command line: a loaded data set, or the path of a folder or CSV.

    A path stays a path, so that `part_of` can leave out the classes that the model was trained on. With `root` or
    `held_out` the data set is loaded and its test split is audited.
    """
    unsplit = name not in DATASETS and (Path(name).is_dir() or name.endswith(".csv"))
    return name if unsplit and root is None and not held_out else dataset(name, root, held_out=held_out)


def part_of(data: Any, models: Iterable[nn.Module], classes: Classes = "unseen", side: int | Square = 0) -> Part:
    """What an audit of these models attacks of `data`.

    Of a folder, a CSV or images in memory that are not split: the classes that the model was not trained on, where
    its record tells which these are. All classes where it does not, or where `classes` is "all". A data set is used
    unchanged: its test split is attacked. PIL images are brought to `side`.
    """
    check(classes in ("unseen", "all"), f"{argument('classes')} cannot be {classes!r}; there are: unseen, all")
    known = [trained for trained in map(_trained_on, models) if trained is not None]
    data = dataset(data) if is_own(data) or (isinstance(data, str) and data in DATASETS) else data
    place = Path(data).expanduser() if isinstance(data, str | Path) else None
    if place is not None and _whole(place):
        name = place.resolve().name
        own = next((own for own in (_cut_as(place, trained) for trained in known) if own is not None), None)
        if own is None:
            return Part(data, f"all classes of {name}", _changed(place, known), "which may include training classes")
        if classes == "all":
            return Part(data, f"all classes of {name}, including those that the model was trained on")
        return Part(own, f"the classes of {name} that the model was not trained on", _on_held_out(own, known))
    check(
        classes == "unseen" or not isinstance(data, Dataset | str | Path),
        f"{option('classes', 'all')} is for data without splits; these data have a test split, which is attacked",
    )
    if isinstance(data, Dataset):
        held = f"the last {data.held_out} training classes" if data.held_out else "the test split"
        name = Path(data.root).resolve().name if data.name in _UNNAMED and data.root else data.name
        return Part(data, f"{held} of {name}", _on_held_out(data, known))
    if place is not None:
        return Part(data, f"the test images of {place.name}")
    return part_in_memory(data, known, classes, side)


def _trained_on(model: nn.Module) -> TrainedOn | None:
    inner = model.module if isinstance(model, Victim) else model
    found = getattr(model, "trained_on", None) or getattr(inner, "trained_on", None)
    return found if isinstance(found, TrainedOn) else None


def _whole(place: Path) -> bool:
    """Whether it is a folder or a CSV without splits."""
    if place.suffix == ".csv":
        try:
            return csv_split(place)[0].name != "csv/test"
        except DataError:  # the audit itself reports it
            return False
    return place.is_dir() and not all((place / part).is_dir() for part in ("train", "test"))


def _cut_as(place: Path, trained: TrainedOn) -> Dataset | None:
    """The folder or CSV as training split it; None where the model was trained on other data."""
    kind = "csv" if place.suffix == ".csv" else "folder"
    if trained.name not in ("", kind):
        return None
    try:
        own = dataset(kind, place)
        return own if own.holding_out(trained.held_out).test.has_fingerprint(trained.test) else None
    except DataError:  # too small to be trained on
        return None


def _changed(place: Path, known: Iterable[TrainedOn]) -> tuple[str, ...]:
    """A note where a model was trained on another folder of this kind, or on this one before it changed."""
    kind = "csv" if place.suffix == ".csv" else "folder"
    if all(trained.name != kind for trained in known):
        return ()
    return ("the model was trained on another folder, or this one has changed: it may have seen classes attacked here",)


def _on_held_out(data: Dataset, known: Iterable[TrainedOn]) -> tuple[str, ...]:
    """Notes on held-out classes: the model was trained on them, or the test split is audited instead."""
    notes = []
    for trained in known:
        if not _same(data, trained):
            continue
        if trained.held_out < data.held_out:
            on = f"with only {trained.held_out} classes held out" if trained.held_out else "without holding out classes"
            notes.append(f"the model was trained {on}: it has seen classes that are attacked here")
        elif trained.held_out and not data.held_out:
            notes.append(
                f"this audits the test split, not the {trained.held_out} classes that training held out; "
                "for those: " + worded(f"--held-out {trained.held_out}", f"ah.dataset(…, held_out={trained.held_out})")
            )
    return tuple(dict.fromkeys(notes))


def _same(data: Dataset, trained: TrainedOn) -> bool:
    """Whether the model was trained on this data set, as far as its record tells."""
    if data.name in (*_UNNAMED, *IN_MEMORY) and not data.held_out:
        try:
            return data.holding_out(trained.held_out).test.has_fingerprint(trained.test)
        except DataError:
            return False
    return data.name == trained.name
