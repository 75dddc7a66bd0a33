"""From a recipe and overrides to `Settings`.

A recipe is a TOML file with the sections of `Settings`. `extends = "other"` names a base recipe, and
`[on.NAME.section]` holds values for one data set. Later values override earlier ones in this order: defaults, the base
recipes, their values for the data set, the recipe, its values for the data set, `--set`. An unknown key is an
error that names the closest known key.
"""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ..data.settings import DATASET_NAMES
from ..defences.settings import REFUSED
from ..errors import SettingsError, check, nearest
from ..extensions import USER, is_code
from ..interface import option
from ..runs.files import regular
from .build import build, section_of, sections_of
from .settings import DEFENCE_SETTINGS, Settings
from .unread import refuse_unread

__all__ = [
    "Layer",
    "layers_of",
    "nested",
    "parse_assignments",
    "recipe_names",
    "recipe_text",
    "settings_from",
    "toml",
    "usual_recipe",
]

USUAL = "robust"
_INSTEAD = {"clean": "beta", "beta": "clean"}
_OF_ATTACKS = ("clean", "beta", "beta_warm")
_READ = ("batch", "train", "defence")
PAIRED = "hm-lga"  # whose batches are pairs of a class, as most defences of your own need them


# Recipes ---------------------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    """The names of the built-in recipes."""
    files = resources.files("anchorhold").joinpath("config", "toml").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def usual_recipe(overrides: Mapping[str, Any] | None = None, defence: object = None) -> str:
    """The recipe of a training that names none; a `defence` of your own may also be in `overrides`, which are nested.

    >>> usual_recipe(), usual_recipe({"defence": {"name": "ideas:noise"}})
    ('robust', 'hm-lga')
    """
    section = (overrides or {}).get("defence", {})
    own = defence is not None or (isinstance(section, Mapping) and is_code(str(section.get("name", ""))))
    return PAIRED if own else USUAL


def recipe_text(name: str) -> str:
    """The TOML text of a recipe, given by name or by file path."""
    try:
        if name.endswith(".toml"):
            return regular(name).read_text(encoding="utf-8")
        return resources.files("anchorhold").joinpath("config", "toml", f"{name}.toml").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the name
        if name.endswith(".toml"):
            raise SettingsError(f"cannot read recipe {name}: {error}") from None
        raise SettingsError(f"no recipe {name!r}; {nearest(name, recipe_names())}") from None


def toml(text: str) -> dict[str, Any]:
    """Parse untrusted TOML; every defect is a ValueError."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _chain(name: str, seen: tuple[str, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """The recipe and all that it extends by name, the base first."""
    if name in seen:
        raise SettingsError(f"recipe {name} extends itself: {' → '.join((*seen, name))}")
    try:
        table = toml(recipe_text(name))
    except ValueError as error:
        raise SettingsError(f"recipe {name} is not valid TOML: {error}") from None
    table.pop("about", None)
    parent = table.pop("extends", None)
    if parent is None:
        return [(name, table)]
    check(isinstance(parent, str), f"recipe {name}: extends must name a recipe or a .toml file, got {parent!r}")
    if parent.endswith(".toml"):  # relative to the recipe file
        parent = str((Path(name).parent / parent).resolve())
    return [*_chain(parent, (*seen, name)), (name, table)]


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for thing in ("loss", "miner"):  # arguments belong to the thing they were given for
        if thing in above and above[thing] is not below.get(thing) and above[thing] != below.get(thing):
            below.pop(f"{thing}_args", None)
    for new, old in _INSTEAD.items():  # two names of one number: the later one replaces the earlier
        if new in above and old not in above:
            below.pop(old, None)
    if above.get("form") == "natural":  # nothing is attacked
        for key in _OF_ATTACKS:
            below.pop(key, None)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _lay_over(below[key], value)
        else:
            below[key] = dict(value) if isinstance(value, Mapping) else value


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """`["train.epochs=3"]` as a nested dict; `build` later converts the values from text.

    >>> parse_assignments(["defence.eps=8/255"])
    {'defence': {'eps': '8/255'}}
    """
    tree: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        *sections, name = key.strip().split(".")
        if not equals or not name or not all(sections):
            raise SettingsError(f"--set needs KEY=VALUE, e.g. train.epochs=3; got {text!r}")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
            if not isinstance(branch, dict):
                raise SettingsError(
                    f"--set {text}: another --set gives {section} itself a value; leave out one of them"
                )
        branch[name] = value.strip()
    return tree


def nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a nested dict; keys may have dots. A setting given twice is refused.

    >>> nested({"train.epochs": 3, "train": {"seed": 1}})
    {'train': {'epochs': 3, 'seed': 1}}
    """
    if not isinstance(overrides, Mapping):
        raise SettingsError(f'overrides must be a dict such as {{"train.epochs": 3}}, not {overrides!r}')
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
            check(key not in tree, f"overrides give {path}{key} twice; leave out one of them")
            tree[key] = value


class Layer(NamedTuple):
    """Values of a recipe, or those that it has for one data set."""

    recipe: str
    data: str
    values: Mapping[str, Any]


def layers_of(recipe: str, overrides: Mapping[str, Any]) -> list[Layer]:
    """The layers of a recipe, the lowest first; `overrides`, which are nested, may name the data set."""
    chain = _chain(recipe) if recipe else []
    tables = (overrides, *(table for _, table in reversed(chain)))
    names = (section_of(table.get("data", {}), "data", "name").get("name") for table in tables)
    data_name, found = str(next(filter(None, names), "")), []
    for name, table in chain:
        per_set = section_of(table.pop("on", {}), "on", "digits.train")
        _check_per_set(per_set, data_name)
        found += [Layer(name, "", table), Layer(name, data_name, per_set.get(data_name, {}))]
    return found


def settings_from(recipe: str = "", overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a recipe with `overrides`, such as {"train": {"epochs": 3}} or {"train.epochs": 3}."""
    overrides = nested(overrides or {})
    tree: dict[str, Any] = {}
    for layer in layers_of(recipe, overrides):
        _lay_over(tree, layer.values)
    below = tree.get("defence", {})
    if isinstance(below, dict) and isinstance(overrides.get("defence"), dict):
        _check_other_defence(recipe, below, overrides["defence"])
        other = str(overrides["defence"].get("name", ""))
        if is_code(other) and other != below.get("name"):  # yours has its own settings, and none of the recipe's
            tree["defence"] = {}
    _lay_over(tree, overrides)
    _check_one_number(overrides.get("defence"), tree.get("defence"))
    tree.setdefault("recipe", recipe)
    settings = build(tree, USER)
    refuse_unread(settings, [f"{name}.{key}" for name, table in overrides.items() if name in _READ for key in table])
    return settings


def _check_one_number(given: Any, defence: Any) -> None:
    """Refuse overrides with both names of one number. A file may have both, as a resolved recipe has."""
    if isinstance(given, Mapping) and isinstance(defence, Mapping) and defence.get("form") == "trades":
        twice = given.get("clean", "auto") != "auto" and "beta" in given
        check(not twice, "defence.clean sets β already: leave defence.beta out, or defence.clean")


def _check_other_defence(recipe: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> None:
    """Refuse to change a recipe's defence if the recipe sets keys that the new defence does not have."""
    name = str(above.get("name"))
    if name == below.get("name") or name not in DEFENCE_SETTINGS:
        return
    if any(key in REFUSED.get(name, {}) for key in (*below, *above)):
        return  # `build` reports the reason
    own = {"name", *(f.name for f in dataclasses.fields(DEFENCE_SETTINGS[name]))}
    alien = [key for key in below if key not in own and key not in above]
    if alien:
        fit = [each for each in recipe_names() if _defence_of(each) == name]
        choice = (
            " or ".join(option("recipe", each) for each in fit)
            if fit
            else f'a recipe of your own, with [defence] name = "{name}"'
        )
        raise SettingsError(
            f"recipe {recipe} sets defence.{alien[0]}, which defence.name={name} does not have: choose {choice}"
        )


def _defence_of(recipe: str) -> str | None:
    names = [table.get("defence", {}).get("name") for _, table in _chain(recipe)]
    return next(filter(None, reversed(names)), None)


def _check_per_set(tables: Mapping[str, Any], own: str) -> None:
    """Refuse unknown data sets and settings under `on`, whether used now or not; `own` may be a name of your own."""
    known = sections_of(*DEFENCE_SETTINGS.values())
    for name, table in tables.items():
        if name not in (*DATASET_NAMES, own):
            raise SettingsError(f"no data set {name!r} for on.{name}; {nearest(name, DATASET_NAMES)}")
        for section, values in section_of(table, f"on.{name}", "train").items():
            if section not in known:
                raise SettingsError(f"no section on.{name}.{section}; {nearest(section, known)}")
            for key in section_of(values, f"on.{name}.{section}", known[section][0]):
                if key not in known[section]:
                    raise SettingsError(f"no setting on.{name}.{section}.{key}; {nearest(key, known[section])}")
