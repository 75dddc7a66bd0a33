"""Attacks of yours: a goal as an object, or named as `module:thing`, wherever the name of an attack may stand.

Its first measure has the goal's own name, and is low where the attack succeeds; `RecallGoal` has one that is.
"""

import re
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

from ..errors import SettingsError, brief, check
from ..extensions import USER, imported, kind_of
from .goal import Goal
from .menu import ATTACKS, goal_named

__all__ = ["Maker", "maker_of"]

Maker = Callable[..., Goal]


def maker_of(attack: str | Goal) -> Maker:
    """What makes the goal for a protocol, with settings: of a name, of `module:thing`, or of an object."""
    if isinstance(attack, str) and ":" not in attack:
        return lambda protocol, **settings: goal_named(attack, protocol, **settings)
    thing: Any = imported(attack, USER) if isinstance(attack, str) else attack
    if isinstance(thing, Goal):
        return lambda protocol, **settings: _fresh(replace(thing, protocol=protocol, **settings))
    if isinstance(thing, type) and issubclass(thing, Goal) and is_dataclass(thing):
        return lambda protocol, **settings: _fresh(thing(protocol=protocol, **settings))
    raise SettingsError(
        f"{attack} is {kind_of(thing)}: an attack is a Goal, a class of one, or one of {', '.join(ATTACKS)}"
    )


def _fresh(goal: Goal) -> Goal:
    """The goal, if its name is not one of ours."""
    plain = re.fullmatch(r"\w[\w .:+@-]*", goal.name) is not None  # folders and columns have this name
    check(plain, f"the name of an attack is letters, digits and . : + @ -, not {brief(goal.name)}")
    check(goal.name not in (*ATTACKS, "recall"), f"{goal.name} is the name of an attack of ours: give yours another")
    return goal
