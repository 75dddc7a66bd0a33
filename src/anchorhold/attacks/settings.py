"""Default settings of attacks. Loads without torch, so that a page can show which settings differ."""

from collections.abc import Mapping
from typing import Any

__all__ = ["ATTACK_NAMES", "DEFECTS", "OPENING", "usual_settings"]

ATTACK_NAMES = (
    "CA+",
    "CA-",
    "QA+",
    "QA-",
    "SPQA+",
    "SPQA-",
    "TMA",
    "ES",
    "LTM",
    "GTM",
    "GTT",
    "nearest",
    "margin",
    "untargeted",
    "targeted",
)
DEFECTS: Mapping[str, tuple[str, ...]] = {
    "CA+": ("counts_self",),
    "CA-": ("counts_self",),
    "QA+": ("counts_self",),
    "QA-": ("counts_self",),
    "SPQA+": ("counts_self", "grows"),
    "SPQA-": ("counts_self", "grows"),
    "ES": ("one_step_early", "by_position"),
    "LTM": ("keeps_self", "by_position"),
    "GTM": ("as_coded", "by_position"),
    "GTT": ("by_position",),
}
"""The defects of the published evaluator, by attack: on in the published protocol, off in the corrected one."""

OPENING = {"published": "sum", "corrected": "tiny"}  # the first step of ES
_DEFAULTS = {"w": 1, "m": 1, "margin": 0.0, "distance": True, "by_position": False}
_DEFAULTS |= {"kept_items": 5, "weight": 1.0, "rate": 4e4}


def usual_settings(attack: str, protocol: str) -> dict[str, Any]:
    """The default settings of an attack.

    >>> usual_settings("CA+", "published")["counts_self"]
    True
    """
    wrong = dict.fromkeys(DEFECTS.get(attack, ()), protocol == "published")
    return {**_DEFAULTS, **wrong, "opening": OPENING.get(protocol)}
