"""The attacks by name, and what a protocol means for each.

`ATTACKS[name](protocol, **settings)` makes a goal. For CA, QA and GTT both protocols make the same perturbations and
differ in what they count. For TMA, `nearest`, `margin` and ADML's label attacks they are identical. SPQA, ES,
LTM and GTM have one run per protocol; ES shares the published one when made with `opening="sum"`. `Goal.run` tells
programs. Targets are never found by position, in either protocol. With exact duplicates the published evaluator is
undefined there (an unstable sort), and runs could not be shared. Published R@1 and retain@4 do identify images by
position.
"""

from collections.abc import Callable
from typing import Any

from ..errors import check, nearest
from ..interface import argument
from .goal import Goal, ProtocolName
from .label import LabelAttack
from .mismatch import MismatchAttack
from .preserving import PreservingQueryAttack
from .ranking import CandidateAttack, QueryAttack
from .recall import (
    EmbeddingShift,
    GreedyMisranking,
    GreedyTranslocation,
    LearningToMisrank,
    MarginAttack,
    NearestAttack,
)
from .settings import DEFECTS, OPENING

__all__ = ["ATTACKS", "check_protocol", "goal_named"]


def check_protocol(protocol: str, named: str) -> None:
    """Refuse a protocol that does not exist; `named` is the argument that gave it."""
    known = ("published", "corrected")
    check(protocol in known, f"{named} cannot be {protocol!r}; there are: {', '.join(known)}")


def _maker(name: str, kind: Callable[..., Goal], **settings: Any) -> Callable[..., Goal]:
    """A factory of goals; in the published protocol they have the defects of `DEFECTS`."""

    def make(protocol: ProtocolName, **changes: Any) -> Goal:
        check_protocol(protocol, argument("protocol"))
        wrong = dict.fromkeys(DEFECTS.get(name, ()), True) if protocol == "published" else {}
        return kind(protocol=protocol, **(wrong | settings | changes))

    return make


def _shift(protocol: ProtocolName, **changes: Any) -> Goal:
    return _maker("ES", EmbeddingShift)(protocol, **({"opening": OPENING.get(protocol)} | changes))


ATTACKS: dict[str, Callable[..., Goal]] = {
    "CA+": _maker("CA+", CandidateAttack, raised=True),
    "CA-": _maker("CA-", CandidateAttack, raised=False),
    "QA+": _maker("QA+", QueryAttack, raised=True),
    "QA-": _maker("QA-", QueryAttack, raised=False),
    "SPQA+": _maker("SPQA+", PreservingQueryAttack, raised=True),
    "SPQA-": _maker("SPQA-", PreservingQueryAttack, raised=False),
    "TMA": _maker("TMA", MismatchAttack),
    "ES": _shift,
    "LTM": _maker("LTM", LearningToMisrank),
    "GTM": _maker("GTM", GreedyMisranking),
    "GTT": _maker("GTT", GreedyTranslocation),
    "nearest": _maker("nearest", NearestAttack),
    "margin": _maker("margin", MarginAttack),
    "untargeted": _maker("untargeted", LabelAttack, targeted=False),
    "targeted": _maker("targeted", LabelAttack, targeted=True),
}


def goal_named(name: str, protocol: ProtocolName, **settings: Any) -> Goal:
    """The goal of that name; for an unknown name the error lists the known ones.

    >>> goal_named("CA+", "published").run == goal_named("CA+", "corrected").run
    True
    """
    check(name in ATTACKS, f"no attack is called {name!r}; {nearest(name, ATTACKS)}")
    return ATTACKS[name](protocol, **settings)
