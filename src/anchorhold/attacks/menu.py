"""The attacks by name, and what a protocol means for each.

`ATTACKS[name](protocol, **settings)` makes a goal. Both protocols make the same perturbations for CA, QA, GTT,
TMA, `nearest`, `margin` and 003's label attacks and differ in what they count (from TMA on, in nothing). ES, LTM and
GTM have runs of their own; ES shares the published one when made with `opening="sum"`. `Goal.run` says so to programs.
Whom an attack aims at is never the sample found by position, in either protocol: with exact duplicates print is
undefined there (an unstable sort), and only so can runs be shared. Published R@1 and retain@4 do look by position.
"""

from collections.abc import Callable
from typing import Any

from ..settings import check, nearest
from .goal import Goal, ProtocolName
from .label import LabelAttack
from .mismatch import MismatchAttack
from .ranking import CandidateAttack, QueryAttack
from .recall import (
    EmbeddingShift,
    GreedyMisranking,
    GreedyTranslocation,
    LearningToMisrank,
    MarginAttack,
    NearestAttack,
)

__all__ = ["ATTACKS", "goal_named"]


def _maker(kind: Callable[..., Goal], *defects: str, **settings: Any) -> Callable[..., Goal]:
    """A factory whose goals have these defects in the published protocol only."""

    def make(protocol: ProtocolName, **changes: Any) -> Goal:
        check(protocol in ("published", "corrected"), f"protocol {protocol!r}; there are: published, corrected")
        wrong = dict.fromkeys(defects, True) if protocol == "published" else {}
        return kind(protocol=protocol, **(wrong | settings | changes))

    return make


def _shift(protocol: ProtocolName, **changes: Any) -> Goal:
    make = _maker(EmbeddingShift, "one_step_early", "by_position")
    return make(protocol, **({"opening": "sum" if protocol == "published" else "tiny"} | changes))


ATTACKS: dict[str, Callable[..., Goal]] = {
    "CA+": _maker(CandidateAttack, "counts_self", raised=True),
    "CA-": _maker(CandidateAttack, "counts_self", raised=False),
    "QA+": _maker(QueryAttack, "counts_self", raised=True),
    "QA-": _maker(QueryAttack, "counts_self", raised=False),
    "TMA": _maker(MismatchAttack),
    "ES": _shift,
    "LTM": _maker(LearningToMisrank, "keeps_self", "by_position"),
    "GTM": _maker(GreedyMisranking, "as_coded", "by_position"),
    "GTT": _maker(GreedyTranslocation, "by_position"),
    "nearest": _maker(NearestAttack),
    "margin": _maker(MarginAttack),
    "untargeted": _maker(LabelAttack, targeted=False),
    "targeted": _maker(LabelAttack, targeted=True),
}


def goal_named(name: str, protocol: ProtocolName, **settings: Any) -> Goal:
    """The goal of that name; a name that does not exist is an error that says which ones do.

    >>> goal_named("CA+", "published").run == goal_named("CA+", "corrected").run
    True
    """
    check(name in ATTACKS, f"no attack is called {name!r}; {nearest(name, ATTACKS)}")
    return ATTACKS[name](protocol, **settings)
