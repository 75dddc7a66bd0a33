"""Settings that you gave and that a run would not read: refused, each with the reason.

Only what you set yourself counts (`--set`, `overrides`). What a recipe or a record has besides is left alone.
"""

from collections.abc import Collection, Iterator

from ..defences.settings import unread_by
from ..errors import check
from .settings import Settings

__all__ = ["refuse_unread"]

_SIZES = {"pairs": ("pairs", "distinct"), "classes": ("classes", "instances"), "images": ("images",)}
_EVALUATION = ("attack", "attack_steps", "attack_queries")


def refuse_unread(settings: Settings, given: Collection[str]) -> None:
    """Refuse a setting among `given`, such as train.attack_steps, that these settings do not read."""
    for key, reason in _unread(settings, given):
        check(key not in given, f"{key} has no effect: {reason}; set that too, or leave {key} out")


def _unread(settings: Settings, given: Collection[str]) -> Iterator[tuple[str, str]]:
    """The keys that are not read, and which setting would read them."""
    batch, train = settings.batch, settings.train
    if not any(f"batch.{name}" in given for name in _SIZES[batch.kind]):  # else sizes are given for several recipes
        for kind, names in _SIZES.items():
            if kind != batch.kind:
                yield from ((f"batch.{name}", f"it is of batch.kind = {kind}, not {batch.kind}") for name in names)
        if batch.kind == "images":
            yield "batch.mining_pairs", "triplets are mined with batch.kind = pairs or classes"
    if not train.attack_eps:
        yield from ((f"train.{name}", "evaluations attack with train.attack_eps above 0") for name in _EVALUATION)
    yield from ((f"defence.{name}", reason) for name, reason in unread_by(settings.defence).items())
