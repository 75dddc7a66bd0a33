"""Your own code, named as `module:thing`. This is the only module that imports code by name.

A name is trusted if you give it yourself: on the command line, in Python, or in a recipe file that you choose.
A record (run.json, index.json, audit.json, receipts.json) may come from anyone. A name found in a record is imported
only after you repeat it. `imported` therefore needs to know the origin of a name.
"""

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from .errors import AnchorholdError, ModelError, RunError, lacks_memory, nearest

__all__ = ["RECORD", "USER", "Origin", "code_named_in", "imported", "kind_of", "reason_of", "searched_here"]

# timm:NAME means weights, and open_clip:NAME and transformers:NAME mean models
_CODE = re.compile(r"(?!(?:timm|open_clip|transformers):)[^\W\d][\w./]*:[^\W\d][\w.]*")


@dataclass(frozen=True)
class Origin:
    """Where a name was read: in a `record`, with the names that the user repeated. An empty record means the user."""

    record: str = ""
    allowed: frozenset[str] = frozenset()
    repeat: str = ""  # the command that repeats a name, with {} for the name

    def check(self, name: str, loads: bool = False) -> None:
        """Refuse code that the user did not name; with `loads`, a model that would be downloaded or read."""
        if not self.record or name in self.allowed:
            return
        how = f"; if you trust it, name it yourself: {self.repeat.format(name)}" if self.repeat else ""
        if loads:
            raise RunError(f"{self.record} names the model {name}, and a model named in a file is not loaded{how}")
        raise RunError(f"{self.record} names the code {name}, and code named in a file is not run{how}")


USER = Origin()
RECORD = Origin("a record")  # an unknown record, of which the user repeated no name


def code_named_in(tree: Any) -> Iterator[str]:
    """Every `module:thing` among the values of settings.

    >>> list(code_named_in({"defence": {"name": "mine:idea"}, "model": {"weights": "timm:resnet18"}}))
    ['mine:idea']
    """
    if isinstance(tree, str):
        if _CODE.fullmatch(tree):
            yield tree
    elif isinstance(tree, Mapping | list | tuple):
        inside: Iterable[Any] = tree.values() if isinstance(tree, Mapping) else tree
        for value in inside:
            yield from code_named_in(value)


@contextmanager
def searched_here() -> Iterator[None]:
    """Search for modules in the current folder first, as `python -m` does."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def imported(spec: str, origin: Origin) -> Any:
    """The object `module:thing`, from the current folder or an installed package; `origin` says who named it."""
    origin.check(spec)
    place, _, name = spec.partition(":")
    if place.endswith(".py"):
        place = place.removesuffix(".py").replace("/", ".")
    with searched_here():
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(error.name + ".")):
                raise ModelError(
                    f"{spec}: no module {place!r} in this folder or installed; check the name, or install it"
                ) from None
            raise ModelError(f"{spec}: {place} needs {error.name!r}; install it") from error
        except (Exception, SystemExit) as error:  # user code may raise anything
            if isinstance(error, AnchorholdError) or lacks_memory(error):
                raise
            raise ModelError(f"{spec}: importing {place} fails ({reason_of(error)})") from error
        try:
            return attrgetter(name)(module)
        except AttributeError:
            names = [each for each, thing in vars(module).items() if callable(thing) and not each.startswith("_")]
            raise ModelError(f"{spec}: {place} has no {name!r}; {nearest(name, names)}") from None


def kind_of(thing: Any) -> str:
    """The name of an object's type with its article, e.g. "an int"."""
    name = type(thing).__name__
    return "None" if thing is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def reason_of(error: BaseException) -> str:
    """An exception from user code in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"
