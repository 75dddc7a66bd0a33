"""From a recipe and what is laid over it to `Settings`, and back to a dict.

A recipe is a TOML file with the sections of `Settings`. It may say `extends = "other"`, and `[on.NAME.section]`
holds values for one data set. Values are laid over each other in this order: defaults, the recipes it extends,
their values for the data set, the recipe, its values for the data set, `--set`. A key that does not exist is
an error that names the nearest one that does.
"""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import SettingsError
from .settings import Settings, check, nearest

__all__ = [
    "build",
    "nested",
    "parse_assignments",
    "recipe_names",
    "recipe_text",
    "settings_from",
    "to_dict",
]

T = TypeVar("T")

# Recipes ---------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """The recipes that come with Anchorhold."""
    files = resources.files("anchorhold").joinpath("recipes").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def recipe_text(name: str) -> str:
    """The TOML of a recipe, by name or by the path of a file."""
    try:
        if name.endswith(".toml"):
            return Path(name).read_text(encoding="utf-8")
        return resources.files("anchorhold").joinpath("recipes", f"{name}.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if name.endswith(".toml"):
            raise SettingsError(f"cannot read recipe {name}: {error}") from None
        raise SettingsError(f"no recipe {name!r}; {nearest(name, recipe_names())}") from None


def _chain(name: str, seen: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The recipe and all it extends, the farthest first."""
    if name in seen:
        raise SettingsError(f"recipe {name} extends itself: {' → '.join((*seen, name))}")
    try:
        table = tomllib.loads(recipe_text(name))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"recipe {name} is not valid TOML: {error}") from None
    table.pop("about", None)
    parent = table.pop("extends", None)
    if parent is None:
        return [table]
    check(isinstance(parent, str), f"recipe {name}: extends wants the name of a recipe or a .toml file, got {parent!r}")
    if parent.endswith(".toml"):  # from where the file lies that says so
        parent = str((Path(name).parent / parent).resolve())
    return [*_chain(parent, (*seen, name)), table]


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = dict(value) if isinstance(value, Mapping) else value


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`["train.epochs=3"]` as a nested dict; values stay text until they meet their type.

    >>> parse_assignments(["defence.eps=8/255"])
    {'defence': {'eps': '8/255'}}
    """
    tree: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or not name or not all(sections):
            raise SettingsError(f"--set wants key=value, such as train.epochs=3; got {text!r}")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise SettingsError(f"--set {text}: {section} has a value already")
        branch[name] = value.strip()
    return tree


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a nested dict, also where keys have dots; what is said twice is refused.

    >>> nested({"train.epochs": 3, "train": {"seed": 1}})
    {'train': {'epochs': 3, 'seed': 1}}
    """
    if not isinstance(overrides, Mapping):
        raise SettingsError(f'overrides is a dict such as {{"train.epochs": 3}}, not {overrides!r}')
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        *sections, name = str(key).split(".")
        branch = {name: nested(value) if isinstance(value, Mapping) else value}
        for section in reversed(sections):
            branch = {section: branch}
        _join(tree, branch)
    return tree


def _join(tree: dict[str, Any], more: Mapping[str, Any], path: str = "") -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _join(tree[key], value, f"{path}{key}.")
        else:
            check(key not in tree, f"overrides say {path}{key} twice: leave one of them out")
            tree[key] = value


def settings_from(recipe: str = "", overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a recipe with `overrides` on top: {"train": {"epochs": 3}}, or {"train.epochs": 3}."""
    overrides = nested(overrides or {})
    layers = _chain(recipe) if recipe else []
    tree: dict[str, Any] = {}
    names = (_table(layer.get("data", {}), "data", "name").get("name") for layer in (overrides, *reversed(layers)))
    data_name = str(next(filter(None, names), ""))
    for layer in layers:
        per_set = _table(layer.pop("on", {}), "on", "digits.train")
        _check_per_set(per_set, data_name)
        _lay_over(tree, layer)
        _lay_over(tree, per_set.get(data_name, {}))
    below = tree.get("defence", {})
    if isinstance(below, dict) and isinstance(overrides.get("defence"), dict):
        _check_other_defence(recipe, below, overrides["defence"])
    _lay_over(tree, overrides)
    tree.setdefault("recipe", recipe)
    return build(tree)


def _check_other_defence(recipe: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> None:
    """Refuse another defence over a recipe whose settings it does not have, which the user never said."""
    from .defences import DEFENCES

    name = str(above.get("name"))
    if name == below.get("name") or name not in DEFENCES:
        return
    if any(key in DEFENCES[name].refused for key in (*below, *above)):
        return  # `build` gives the reason
    own = {"name", *(f.name for f in dataclasses.fields(DEFENCES[name].settings))}
    alien = [key for key in below if key not in own and key not in above]
    if alien:
        fit = [each for each in recipe_names() if _defence_of(each) == name]
        choice = f"--recipe {' or '.join(fit)}" if fit else f'a recipe of your own, with [defence] name = "{name}"'
        raise SettingsError(
            f"recipe {recipe} sets defence.{alien[0]}, which defence.name={name} does not have: choose {choice}"
        )


def _defence_of(recipe: str) -> str | None:
    names = [layer.get("defence", {}).get("name") for layer in _chain(recipe)]
    return next(filter(None, reversed(names)), None)


def _table(value: Any, path: str, key: str) -> Mapping[str, Any]:
    """`value`, if it is a section; `key` is one that it could have."""
    if not isinstance(value, Mapping):
        raise SettingsError(f"{path} is a section; set one of its keys, such as {path}.{key}")
    return value


def _check_per_set(tables: Mapping[str, Any], own: str) -> None:
    """Refuse what is no setting of any defence or data set (`own` may be the caller's), used now or not."""
    from .data.datasets import DATASETS
    from .defences import DEFENCES

    known = _sections(*(defence.settings for defence in DEFENCES.values()))
    for name, table in tables.items():
        if name not in (*DATASETS, own):
            raise SettingsError(f"no data set {name!r} for on.{name}; {nearest(name, DATASETS)}")
        for section, values in _table(table, f"on.{name}", "train").items():
            if section not in known:
                raise SettingsError(f"no section on.{name}.{section}; {nearest(section, known)}")
            for key in _table(values, f"on.{name}.{section}", known[section][0]):
                if key not in known[section]:
                    raise SettingsError(f"no setting on.{name}.{section}.{key}; {nearest(key, known[section])}")


# Dicts and dataclasses -------------------------------------------------------------------------------------


def build(tree: Mapping[str, Any]) -> Settings:
    """Settings from a nested dict, each value brought to its type; what `to_dict` wrote comes back equal."""
    from .defences import DEFENCES

    tree = dict(tree)
    chosen = dict(_table(tree.pop("defence", {}), "defence", "name"))
    name = str(chosen.pop("name", "natural"))
    if name not in DEFENCES:
        raise SettingsError(f"no defence {name!r}; {nearest(name, DEFENCES)}")
    for key, reason in DEFENCES[name].refused.items():
        check(key not in chosen, f"defence.{key} makes no sense with defence.name={name}: {reason}")
    kinds = {f.name: f.type for f in dataclasses.fields(Settings)}
    known = set(_dotted(Settings())) | {f"defence.{key}" for key in _dotted(DEFENCES[name].settings())}
    known |= {"defence.name"}
    values: dict[str, Any] = {"defence": _build(DEFENCES[name].settings, chosen, "defence.", known)}
    for key, value in tree.items():
        if key not in kinds:
            raise SettingsError(f"no setting {key!r}; {nearest(str(key), known | set(kinds))}")
        kind = kinds[key]
        values[key] = _build(typing.cast(type, kind), value, f"{key}.", known) if key != "recipe" else str(value)
    return Settings(**values)


def to_dict(settings: Settings) -> dict[str, Any]:
    """The nested dict that `build` and run.json take."""
    from .defences import DEFENCES

    tree = dataclasses.asdict(settings)
    name = next(n for n, d in DEFENCES.items() if type(settings.defence) is d.settings)
    return tree | {"defence": {"name": name, **dataclasses.asdict(settings.defence)}}


def _dotted(settings: Any) -> Iterator[str]:
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            yield from (f"{f.name}.{rest}" for rest in _dotted(value))
        else:
            yield f.name


def _sections(*defences: type[Any]) -> dict[str, list[str]]:
    """The keys of every section, with those of these defences."""
    kinds = [(f.name, f.type) for f in dataclasses.fields(Settings)]
    keys = {name: [f.name for f in dataclasses.fields(kind)] for name, kind in kinds if dataclasses.is_dataclass(kind)}
    return keys | {"defence": ["name", *(f.name for kind in defences for f in dataclasses.fields(kind))]}


def _build(cls: type[T], values: Any, path: str, known: Iterable[str]) -> T:
    hints = typing.get_type_hints(cls)
    for key in _table(values, path[:-1], next(iter(hints))):
        if key not in hints:
            raise SettingsError(f"no setting {path}{key}; {nearest(f'{path}{key}', known)}")
    try:
        return cls(**{key: _coerce(value, hints[key], path + key) for key, value in values.items()})
    except SettingsError as error:
        raise SettingsError(str(error)) from None


def _coerce(value: Any, kind: Any, path: str) -> Any:
    """`value` as `kind`; text is read as the command line writes it, and 8/255 is a number."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        options = typing.get_args(kind)
        if value not in options:
            raise SettingsError(f"{path} = {value!r}; {nearest(str(value), map(str, options))}")
        return value
    if origin in (types.UnionType, typing.Union):
        for option in typing.get_args(kind):
            try:
                return _coerce(value, option, path)
            except SettingsError:
                continue
        raise SettingsError(f"{path} cannot be {value!r}")
    if kind is bool:
        table = {"true": True, "false": False, "1": True, "0": False}
        if str(value).lower() in table:
            return table[str(value).lower()]
    elif kind in (int, float) and not isinstance(value, bool):
        try:
            number = Fraction(value.replace(" ", "")) if isinstance(value, str) else value
            if math.isfinite(number) and (kind is float or number == int(number)):
                return kind(number)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError):
            pass
    elif kind is str and isinstance(value, str):
        return value
    raise SettingsError(f"{path} wants {'a number' if kind is float else kind.__name__}, got {value!r}")
