"""Settings from nested dicts and back; each value is converted to its type."""

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from ..defences.own import own_defence, settings_type
from ..defences.settings import REFUSED
from ..errors import SettingsError, brief, check, nearest
from ..extensions import RECORD, Named, Origin, code_named_in, is_code, named, names_code
from .numbers import parse_number
from .settings import DEFENCE_SETTINGS, Settings
from .synonyms import meant

__all__ = ["build", "dotted", "section_of", "sections_of", "to_dict"]

T = TypeVar("T")
_KINDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
_LARGEST = 10**6  # far above any useful ε, margin, weight or number of steps of a defence


def section_of(value: Any, path: str, key: str) -> Mapping[str, Any]:
    """`value`, if it is a section; `key` is an example of its keys, for the error message."""
    if not isinstance(value, Mapping):
        raise SettingsError(f"{path} is a section; set one of its keys, such as {path}.{key}")
    return value


def build(tree: Mapping[str, Any], origin: Origin = RECORD) -> Settings:
    """Settings from a nested dict, with each value converted to its type; the inverse of `to_dict`.

    `origin` says who wrote it: code that a record names is refused unless the user repeated the name.
    """
    tree = dict(section_of(tree, "settings", "train"))
    data = tree.get("data")
    files = {"recipe": "", "data": {**data, "root": "", "beside": ""} if isinstance(data, Mapping) else data}
    for code in code_named_in({**tree, **files}):  # values that name a file do not name code
        origin.check(code)
    chosen = dict(section_of(tree.pop("defence", {}), "defence", "name"))
    name = str(chosen.pop("name", "natural"))
    kind_of_defence = _defence_settings(name, origin)
    for key, reason in REFUSED.get(name, {}).items():
        check(key not in chosen, f"leave out defence.{key} with defence.name={name}: {reason}")
    if origin.record and name == "proxy" and chosen.get("form") != "minmax" and chosen.get("clean") == 0:
        del chosen["clean"]  # 0 meant "not set" in older records
    kinds = {f.name: f.type for f in dataclasses.fields(Settings) if f.name != "defence_name"}
    known = (set(dotted(Settings())) - {"defence_name"}) | {f"defence.{key}" for key in dotted(kind_of_defence())}
    known |= {"defence.name"}
    defence = _build(kind_of_defence, chosen, "defence.", known, origin)
    values: dict[str, Any] = {"defence_name": name, "defence": defence}
    for key, value in tree.items():
        if key not in kinds:
            raise SettingsError(_unknown(str(key), value, known | set(kinds)))
        kind = typing.cast(type, kinds[key])
        values[key] = str(value) if key == "recipe" else _build(kind, value, f"{key}.", known, origin)
    return Settings(**values)


def _unknown(key: str, value: Any, known: Iterable[str]) -> str:
    """The message for an unknown section or a key without one."""
    if isinstance(value, Mapping) and value:  # an unknown section: what is meant is its key
        inside = f"{key}.{next(iter(value))}"
        return f"no setting {inside}; {meant(inside, known)}"
    return f"no setting {key!r}; {meant(key, known)}"


def _defence_settings(name: str, origin: Origin) -> type[Any]:
    """The settings dataclass of a defence by its name, or by `module:thing`."""
    if is_code(name):
        return settings_type(own_defence(name, origin), name)
    if name not in DEFENCE_SETTINGS:
        raise SettingsError(f"no defence {name!r}; {nearest(name, DEFENCE_SETTINGS)}, or module:function of yours")
    return DEFENCE_SETTINGS[name]


def to_dict(settings: Settings) -> dict[str, Any]:
    """The nested dict that `build` reads and run.json stores."""
    tree = dataclasses.asdict(settings)
    name = tree.pop("defence_name") or _name_by_type(settings)
    return tree | {"defence": {"name": name, **dataclasses.asdict(settings.defence)}}


def _name_by_type(settings: Settings) -> str:
    """The defence of settings that were put together by hand: ours with settings of this type."""
    names = [name for name, kind in DEFENCE_SETTINGS.items() if type(settings.defence) is kind]
    check(len(names) == 1, f"{type(settings.defence).__name__} belongs to no single defence: set defence_name")
    return names[0]


def dotted(settings: Any) -> Iterator[str]:
    """The names of all settings, with dots: train.epochs."""
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            yield from (f"{f.name}.{rest}" for rest in dotted(value))
        else:
            yield f.name


def sections_of(*defences: type[Any]) -> dict[str, list[str]]:
    """The keys of every section; the section defence has the keys of all these defences."""
    kinds = [(f.name, f.type) for f in dataclasses.fields(Settings)]
    keys = {name: [f.name for f in dataclasses.fields(kind)] for name, kind in kinds if dataclasses.is_dataclass(kind)}
    return keys | {"defence": ["name", *(f.name for kind in defences for f in dataclasses.fields(kind))]}


def _build(cls: type[T], values: Any, path: str, known: Iterable[str], origin: Origin) -> T:
    hints = typing.get_type_hints(cls)
    for key in section_of(values, path[:-1], next(iter(hints))):
        if key not in hints:
            raise SettingsError(f"no setting {path}{key}; {meant(f'{path}{key}', known)}")
    try:
        made = {key: _coerce(value, hints[key], path + key, origin) for key, value in values.items()}
        for key, value in made.items() if path == "defence." else ():
            absurd = isinstance(value, int | float) and not abs(value) <= _LARGEST
            check(not absurd, f"{path}{key} must be at most {_LARGEST:,}, got {value}")
        return cls(**made)
    except SettingsError as error:
        raise SettingsError(str(error)) from None


def _coerce(value: Any, kind: Any, path: str, origin: Origin) -> Any:
    """`value` converted to `kind`; text is read as on the command line, where 8/255 is a number."""
    outer = typing.get_origin(kind)
    if outer is Mapping:
        return _table(value, path, origin)
    if kind is Named and (is_code(value) if isinstance(value, str) else callable(value)):
        return named(value, origin, path)
    if outer is Literal:
        options = typing.get_args(kind)
        if value not in options:
            raise SettingsError(f"{path} = {brief(value)}; {nearest(str(value), map(str, options))}")
        return value
    if outer in (types.UnionType, typing.Union):
        for option in typing.get_args(kind):
            try:
                return _coerce(value, option, path, origin)
            except SettingsError:
                continue
        raise SettingsError(f"{path} cannot be {brief(value)}")
    if kind is bool:
        table = {"true": True, "false": False, "1": True, "0": False}
        if str(value).lower() in table:
            return table[str(value).lower()]
    elif kind in (int, float) and not isinstance(value, bool):
        try:
            number = parse_number(value) if isinstance(value, str) else value
            if math.isfinite(number) and (kind is float or number == int(number)):
                return kind(number)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            pass
    elif kind is str and isinstance(value, str):
        return value
    raise SettingsError(f"{path} must be {_KINDS.get(kind, kind.__name__)}, got {brief(value)}")


def _table(values: Any, path: str, origin: Origin) -> dict[str, Any]:
    """The arguments of a thing of yours: free keys; text is a number, true, false, code, or stays text."""
    return {str(key): _free(value, f"{path}.{key}", origin) for key, value in section_of(values, path, "KEY").items()}


def _free(value: Any, path: str, origin: Origin) -> Any:
    if isinstance(value, Mapping):
        return _table(value, path, origin)
    if isinstance(value, list | tuple):
        return [_free(each, path, origin) for each in value]
    if value is None or isinstance(value, bool | int | float | Named):
        check(not isinstance(value, float) or math.isfinite(value), f"{path} must be finite, got {value}")
        return value
    if not isinstance(value, str):
        return named(value, origin)
    text = value.strip()
    if re.fullmatch(r"[+-]?\d{1,18}", text):  # 2 is a whole number here, 2.0 is not: your signature tells them apart
        return int(text)
    with contextlib.suppress(SettingsError):
        return _coerce(text, float, path, origin)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return named(value, origin, path) if names_code(value) else value
