"""Data sets of yours: a function that is named as `module:thing` wherever the name of a data set may stand.

It returns what `fit` takes: (images, labels), a torch Dataset, {"train": …, "test": …}, a folder, an `ah.Dataset`.

    def birds(root=None, seed=0):  # both are optional: --root, and the seed of the split
        return images, names
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import AnchorholdError, DataError, SettingsError, lacks_memory
from ..extensions import USER, Origin, imported, kind_of, names_code, reason_of, searched_here
from .decode import Square
from .splits import Dataset

__all__ = ["is_own", "own_dataset"]


def is_own(name: Any) -> bool:
    """Whether a name of data is `module:thing`, and no file or folder."""
    return isinstance(name, str) and names_code(name) and not Path(name).expanduser().exists()


def own_dataset(
    name: str,
    root: str | Path | None = None,
    *,
    seed: int = 0,
    held_out: int = 0,
    resize: int | Square = 0,
    origin: Origin = USER,
    options: Mapping[str, Any] | None = None,
) -> Dataset:
    """The data set that `module:thing` names, here or installed.

    Args:
        name: of a function that returns data, or of the data themselves.
        root: given to the function, where it takes one.
        seed: given to the function, where it takes one; the one by which classes are held out for test.
        held_out: the number of training classes that replace the test split.
        resize: to which PIL images of several sizes are brought; 0 is 256.
        origin: who named it.
        options: more arguments of the function.
    """
    from .adapters import dataset_from  # it takes names too

    found = imported(name, origin)
    if callable(found):
        found = _called(name, found, {} if root is None else {"root": root}, seed, options or {})
    elif root is not None or options:
        raise SettingsError(f"{name} is {kind_of(found)} and no function; leave out the root and options")
    if is_own(found):
        raise DataError(f"{name} returns the name {found}; return the data")
    data = dataset_from(found, seed=seed, resize=resize)
    thing = name.rpartition(":")[2]
    train, test = (
        replace(split, name=f"{thing}/{part}") for part, split in (("train", data.train), ("test", data.test))
    )
    # A data set of yours with its images in memory is trained on as it is, like tensors.
    as_given = data.as_given or (isinstance(found, Dataset) and train.images is not None)
    where = "" if root is None else str(root)
    return replace(data, name=name, train=train, test=test, root=where, as_given=as_given).holding_out(held_out)


def _called(name: str, function: Any, root: Mapping[str, Any], seed: int, options: Mapping[str, Any]) -> Any:
    """What the function returns; it is given the arguments that it has."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function in C
        known = {}  # type: ignore[assignment]
    for option in (*root, *options):
        if option not in known:
            raise SettingsError(f"{name} has no argument {option!r}; it has {', '.join(known) or 'none'}")
    given = {**root, **options} | ({"seed": seed} if "seed" in known else {})
    try:
        with searched_here():  # the function may import more
            found = function(**given)
    except (Exception, SystemExit) as error:  # user code may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise DataError(f"{name} fails ({reason_of(error)})") from error
    if found is None:
        raise DataError(f"{name} returns None; return what ah.fit takes, such as (images, labels)")
    return found
