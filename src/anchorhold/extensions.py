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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from .errors import AnchorholdError, ModelError, RunError, lacks_memory, nearest

__all__ = [
    "RECORD",
    "USER",
    "Named",
    "Origin",
    "code_named_in",
    "imported",
    "is_code",
    "is_hub",
    "kind_of",
    "named",
    "names_code",
    "reason_of",
    "searched_here",
]

_OBJECT = "(...)"  # ends the name of an object, which no name can bring back

# timm:NAME and hf:owner/name mean weights, and open_clip:NAME and transformers:NAME mean models
_CODE = re.compile(r"(?!(?:timm|hf|open_clip|transformers):)[^\W\d][\w./]*:[^\W\d][\w.]*")


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

    def check_download(self, name: str) -> None:
        """Refuse a name on the Hub that the user did not give: what a record names is not downloaded."""
        if not self.record or name in self.allowed:
            return
        how = f"; if you trust it, name it yourself: {self.repeat.format(name)}" if self.repeat else ""
        raise RunError(f"{self.record} names the download {name}, and what a file names is not downloaded{how}")


USER = Origin()
RECORD = Origin("a record")  # an unknown record, of which the user repeated no name


def is_hub(name: object) -> bool:
    """Whether a name is one on the Hugging Face Hub, hf:owner/name.

    >>> is_hub("hf:owner/name"), is_hub("module:thing")
    (True, False)
    """
    return isinstance(name, str | os.PathLike) and str(name).startswith("hf:")


def names_code(text: str) -> bool:
    """Whether a text has the form `module:thing`.

    >>> names_code("mine:birds"), names_code("folder"), names_code("timm:resnet18")
    (True, False, False)
    """
    return _CODE.fullmatch(text) is not None


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


class Named(str):
    """A name in settings, with the thing of yours that it names. Records hold the text alone.

    `module:thing` is the name of code. `module:Class(...)` stands for an object that was given in Python, which has to
    be given again.
    """

    thing: Any

    def __new__(cls, name: str, thing: Any) -> "Named":
        made = super().__new__(cls, name)
        made.thing = thing
        return made

    def __deepcopy__(self, memo: Any) -> "Named":
        return self  # `asdict` copies settings, and a copy of a loss would not be the one that trains

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def is_same(self, other: object) -> bool:
        """Whether both are one thing; two objects may have one name."""
        return isinstance(other, Named) and self.thing is other.thing

    @property
    def made(self) -> bool:
        """Whether it is an object that was given, not code that a name finds again."""
        return self.endswith(_OBJECT)


def is_code(name: str) -> bool:
    """Whether a name is one of code.

    >>> is_code("mine:noise"), is_code("hardness")
    (True, False)
    """
    return ":" in name


def named(thing: Any, origin: Origin, what: str = "") -> Named:
    """Your thing under the name that a record has: by `module:thing`, or an object; `what` is the setting it is for."""
    if isinstance(thing, Named):
        return thing
    if not isinstance(thing, str):
        return Named(_name_of(thing), thing)
    if thing.endswith(_OBJECT):
        key = what.removeprefix("defence.") or "loss"
        raise RunError(f"{what} was given as an object, {thing}: give it again with ah.resume(…, own={{{key!r}: …}})")
    return Named(thing, imported(thing, origin))


def _name_of(thing: Any) -> str:
    """`module:thing` where that name finds this very thing again, else the name of its kind as an object's."""
    place, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if isinstance(place, str) and isinstance(name, str):
        with suppress(AttributeError):
            if place in sys.modules and attrgetter(name)(sys.modules[place]) is thing:
                return f"{place}:{name}"
        return f"{place}:{name}{_OBJECT}"  # a lambda, or a function inside of another
    kind = type(thing)
    return f"{kind.__module__}:{kind.__qualname__}{_OBJECT}"


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
