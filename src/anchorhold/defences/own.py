"""Defences of yours: a function that is named as `module:thing` wherever the name of a defence may stand.

It is a generator `defence(step, settings)`, and says by the type of its second argument which settings it has:

    @dataclass(frozen=True)
    class NoiseSettings:
        size: float = 0.05

    def noise(step: Step, settings: NoiseSettings) -> Iterator[Tensor]: ...

This file loads without torch; yours may load what it likes.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..errors import SettingsError, check
from ..extensions import USER, Origin, imported, kind_of, named

__all__ = ["OWN", "given_again", "name_of", "own_defence", "settings_type"]

OWN: dict[str, Callable[..., Any]] = {}
"""The defences of yours that this process knows, by name."""


def own_defence(name: str, origin: Origin) -> Callable[..., Any]:
    """The defence that `module:thing` names, here or installed; `origin` says who named it."""
    if name not in OWN:
        found = imported(name, origin)
        settings_type(found, name)
        OWN[name] = found
    else:
        origin.check(name)
    return OWN[name]


def name_of(defence: Callable[..., Any]) -> str:
    """A defence by the name under which a record has it, and known by it from now on."""
    function = inspect.unwrap(defence.func if isinstance(defence, partial) else defence)
    place = function if inspect.isroutine(function) else type(function)
    name = f"{place.__module__}:{place.__qualname__}"
    settings_type(defence, name)
    OWN[name] = defence
    return name


def given_again(place: object, tree: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings recorded in `place`, with objects of yours where the record has only their names."""

    def put(recorded: Any, given: Any, path: str) -> Any:
        if isinstance(given, Mapping) and isinstance(recorded, Mapping):
            return {**recorded, **{key: put(recorded.get(key), each, f"{path}.{key}") for key, each in given.items()}}
        if path == "defence.teacher":  # it may have moved: its hash tells whether it is the same
            return str(given)
        name = str(named(given, USER))
        check(recorded == name, f"{place} has {path} = {recorded!r}, not {name!r}: give what it began with")
        return given

    return {**tree, "defence": put(tree.get("defence"), dict(own), "defence")}


def settings_type(defence: Any, name: str) -> type[Any]:
    """The settings dataclass of a defence: the type of its second argument."""
    wanted = f"{name} has to be a function defence(step, settings: Settings) with a frozen dataclass for settings"
    if not callable(defence):
        raise SettingsError(f"{wanted}; it is {kind_of(defence)}")
    names = list(inspect.signature(defence).parameters)
    whole = defence.func if isinstance(defence, partial) else defence
    function = whole if inspect.isroutine(whole) else type(whole).__call__
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise SettingsError(f"{wanted}; its types cannot be read ({error})") from None
    kind = hints.get(names[1]) if len(names) >= 2 else None
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise SettingsError(f"{wanted}; the type of its second argument is {kind!r}")
    return kind
