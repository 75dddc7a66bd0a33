"""Every setting with its type, default and meaning, and where the values of a recipe come from.

The meaning stands beside the type, as in `epochs: Annotated[int, "Passes over the training images."] = 75`. Choices
that the type does not name come after it. A class that only changes a default inherits the meaning.
"""

import dataclasses
import fnmatch
import inspect
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from ..data.settings import DATASET_NAMES
from ..defences.own import own_defence, settings_type
from ..defences.settings import Inner
from ..errors import SettingsError, check, nearest
from ..extensions import USER, Named, is_code
from .build import to_dict
from .recipes import Layer, layers_of, nested, recipe_names, settings_from
from .settings import DEFENCE_SETTINGS, Settings
from .synonyms import meant

__all__ = ["Setting", "list_settings", "named_data", "origins", "resolved", "set_by_user", "written"]

CODE = "module:thing"  # the choice of a thing of yours
SET = "set"  # the origin of overrides
_KINDS: dict[Any, str] = {float: "number", int: "whole number", bool: "true or false", str: "text", Named: "text"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: what it is, and the value that a run without overrides has."""

    key: str  # as in --set, such as train.epochs
    kind: str
    choices: tuple[Any, ...]  # empty where any value of its kind will do
    default: Any
    meaning: str
    defences: tuple[str, ...] = ()  # of a key of the section defence: those that have it with this default
    value: Any = None  # in a recipe, where one is given; else the default
    origin: str = "default"  # of the value: default, a recipe, "RECIPE on DATA", row or set

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def allowed(self) -> str:
        """Its type as text, with the choices spelled out."""
        words = " | ".join(map(str, self.choices))
        numbers = self.kind.removesuffix(" or text") if self.kind != "text" else ""
        if not words or all(isinstance(each, int) for each in self.choices):
            return words or self.kind
        return f"{numbers}, or {words}" if numbers else words

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return dataclasses.asdict(self) | {"type": self.allowed}


def list_settings(pattern: str = "", *, recipe: str = "", defence: str = "", data: str = "") -> list[Setting]:
    """Every setting with its type, default and meaning, in the order of its section.

    Without a recipe or a defence those of all defences are listed; what the attacks of several share comes once.

    Args:
        pattern: only settings whose key or meaning has this text; `*` stands for anything.
        recipe: a name or a TOML file: only its defence, with the recipe's values.
        defence: a name or `module:thing`: only this defence.
        data: the data set, for the values that a recipe has for it.

    >>> [(each.key, each.default) for each in list_settings("optimiser.*")][:2]
    [('optimiser.lr', 1e-05), ('optimiser.weight_decay', 0.0004)]
    """
    check(not (recipe and defence), "a recipe has its own defence: give either a recipe or a defence")
    if recipe:
        found = resolved(recipe, named_data(data))
    else:
        check(not data, "values for a data set are a recipe's: give a recipe too")
        found = [*_shared(), *(_of_defence(defence) if defence else _of_all_defences())]
    if not pattern:
        return found
    kept = [each for each in found if _matches(each, pattern)]
    if not kept:
        raise SettingsError(f"no setting has {pattern!r} in its key or meaning; {_meant(pattern, found)}")
    return kept


def resolved(recipe: str, overrides: Mapping[str, Any] | None = None, named: str = SET) -> list[Setting]:
    """Every setting with the value of a run by this recipe, and its origin; `named` is that of the overrides."""
    settings = settings_from(recipe, overrides)
    where = origins(recipe, overrides or {}, named)
    tree = to_dict(settings)
    name = tree["defence"]["name"]
    found = []
    for each in (*_shared(), *_of_defence(name)):
        section, _, key = each.key.partition(".")
        found.append(dataclasses.replace(each, value=tree[section][key], origin=where.get(each.key, "default")))
    return found


def named_data(data: str) -> dict[str, Any]:
    """The override that chooses a data set; "" chooses none."""
    known = not data or data in DATASET_NAMES or is_code(data)
    check(known, f"no data set {data!r}; {nearest(data, DATASET_NAMES)}")
    return {"data": {"name": data}} if data else {}


def origins(recipe: str, overrides: Mapping[str, Any], named: str = SET) -> dict[str, str]:
    """Where each key that is not at its default got its value."""
    return {key: _origin(layer, named) for key, layer in _last(recipe, nested(overrides)).items()}


def set_by_user(recipe: str, overrides: Mapping[str, Any]) -> frozenset[str]:
    """The keys that the user set: in overrides, or in a recipe file of their own."""
    last, ours = _last(recipe, nested(overrides)), recipe_names()
    return frozenset(key for key, layer in last.items() if layer is None or layer.recipe not in ours)


def _last(recipe: str, overrides: Mapping[str, Any]) -> dict[str, Layer | None]:
    """The layer that sets each key last; None is the overrides."""
    found: dict[str, Layer | None] = {}
    for layer in layers_of(recipe, overrides):
        found |= dict.fromkeys(_leaves(layer.values), layer)
    if is_code(str(overrides.get("defence", {}).get("name", ""))):  # yours has none of the recipe's
        found = {key: layer for key, layer in found.items() if not key.startswith("defence.")}
    return found | dict.fromkeys(_leaves(overrides))


def _leaves(tree: Mapping[str, Any]) -> Iterator[str]:
    for section, values in tree.items():
        yield from (f"{section}.{key}" for key in values) if isinstance(values, Mapping) else (section,)


def _origin(layer: Layer | None, named: str) -> str:
    return named if layer is None else f"{layer.recipe} on {layer.data}" if layer.data else layer.recipe


# The list ----------------------------------------------------------------------------------------------------


def _shared() -> list[Setting]:
    """The settings outside the section defence."""
    kinds = [(f.name, f.type) for f in dataclasses.fields(Settings) if dataclasses.is_dataclass(f.type)]
    return [each for name, kind in kinds for each in _of(typing.cast(type, kind), name)]


def _of_defence(name: str) -> list[Setting]:
    if is_code(name):
        kind = settings_type(own_defence(name, USER), name)
    elif name in DEFENCE_SETTINGS:
        kind = DEFENCE_SETTINGS[name]
    else:
        raise SettingsError(f"no defence {name!r}; {nearest(name, DEFENCE_SETTINGS)}, or module:function of yours")
    return [_choice(name), *(dataclasses.replace(each, defences=(name,)) for each in _of(kind, "defence"))]


def _of_all_defences() -> list[Setting]:
    """The settings of all defences; one that several have with the same default comes once."""
    alike: dict[str, tuple[Setting, list[str]]] = {}
    for name, kind in DEFENCE_SETTINGS.items():
        for each in _of(kind, "defence"):
            alike.setdefault(repr(each), (each, []))[1].append(name)
    found = [dataclasses.replace(each, defences=tuple(names)) for each, names in alike.values()]
    # What all attacks share comes first.
    keys = dict.fromkeys([*(each.key for each in _of(Inner, "defence")), *(each.key for each in found)])
    return [_choice("natural"), *(each for key in keys for each in found if each.key == key)]


def _choice(default: str) -> Setting:
    meaning = "Defence or pretraining to train by; module:function is one of yours."
    return Setting("defence.name", "text", tuple(DEFENCE_SETTINGS), default, meaning, value=default)


def _of(kind: type[Any], section: str) -> list[Setting]:
    """The settings of a dataclass."""
    hints = typing.get_type_hints(kind)
    found = []
    for f in dataclasses.fields(kind):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        about = _about(kind, f.name)
        told = tuple(about[1]) if len(about) > 1 else _literals(hints[f.name])
        told += (CODE,) if told and Named in typing.get_args(hints[f.name]) else ()
        text = about[0] if about and isinstance(about[0], str) else ""
        key = f"{section}.{f.name}"
        found.append(Setting(key, _kind(hints[f.name]), told, default, text, value=default))
    return found


def _about(kind: type[Any], name: str) -> tuple[Any, ...]:
    """What stands beside the type: in the class itself, or in the nearest base that says something."""
    for each in kind.__mro__:
        if name in inspect.get_annotations(each):
            hint = typing.get_type_hints(each, include_extras=True)[name]
            if metadata := getattr(hint, "__metadata__", ()):
                return tuple(metadata)
    return ()


def _literals(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return tuple(word for option in typing.get_args(hint) for word in _literals(option))
    return ()


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "text"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_kind(option) for option in typing.get_args(hint)))
    if typing.get_origin(hint) is Mapping:
        return "table"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


# Patterns and values -----------------------------------------------------------------------------------------


def _matches(each: Setting, pattern: str) -> bool:
    wanted, places = pattern.lower(), (each.key.lower(), each.meaning.lower())
    if "*" in wanted or "?" in wanted:
        return fnmatch.fnmatchcase(places[0], wanted)
    return any(wanted in place for place in places)


def _meant(pattern: str, found: Iterable[Setting]) -> str:
    return meant(pattern, {each.key for each in found})


def written(value: Any) -> str:
    """A value as a recipe has it; a number such as 8/255 as a fraction in quotes.

    >>> written(8 / 255), written(0.2), written("linf"), written(True)
    ('"8/255"', '0.2', '"linf"', 'true')
    """
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and len(repr(value)) > 8:
        for below in (255, 765):
            if round(value * below) / below == value:
                return f'"{round(value * below)}/{below}"'
    return repr(value)
