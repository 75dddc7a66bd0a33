"""Settings of a defence in which a thing of yours may stand: a sampler, a loss, a miner, a gradual function.

    defence.loss = "pytorch_metric_learning.losses:MultiSimilarityLoss"
    defence.loss_args = { alpha = 2, beta = 50 }

Such a setting holds a name of ours, or a `Named`. `config.build` imports what a user names. In Python an object may
stand there. This file loads without torch; yours may load what it likes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any

from ..errors import check, nearest
from ..extensions import USER, Named, is_code, named

__all__ = ["LOSS_NAMES", "SAMPLER_NAMES", "LossSettings", "chosen"]

SAMPLER_NAMES = ("random", "semihard", "softhard", "distance", "hardest")  # of triplets.SAMPLERS
LOSS_NAMES = ("triplet", "contrastive")


def chosen(settings: Any, setting: str, names: Iterable[str], what: str = "") -> None:
    """Refuse a name that is neither one of ours nor yours; an object of yours gets the name that a record has."""
    value = getattr(settings, setting)
    if not isinstance(value, str):
        check(callable(value), f"defence.{setting} is a name or a function, not {value!r}")
        object.__setattr__(settings, setting, named(value, USER))  # as a frozen dataclass sets its own fields
        return
    if isinstance(value, Named):
        check(callable(value.thing), f"defence.{setting} = {value}: it cannot be called; name a function or a class")
        return
    # `build` imports code, with a check of who named it. Settings that are put together by hand take the thing itself.
    check(not is_code(value), f"defence.{setting} = {value} names code: give the object itself, or use overrides")
    known = tuple(names)
    check(value in known, f"no {what or setting} {value!r}; {nearest(value, known)}, or module:thing of yours")


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """A training loss of yours, or of pytorch-metric-learning; extends the settings of defences that take one.

    The class that extends it has the field `loss`. These fields have an effect only if that is a loss of yours.
    """

    loss_args: Annotated[Mapping[str, Any], "Arguments of a loss of yours; num_classes is filled in."] = field(
        default_factory=dict
    )
    loss_lr: Annotated[float, "Learning rate of the loss's own parameters; 0 is 100 times optimiser.lr."] = 0.0
    # indices = miner(embeddings, labels)
    miner: Annotated[Named | str, "Chooses pairs or triplets for a loss of yours: module:thing."] = ""
    miner_args: Annotated[Mapping[str, Any], "Arguments of the miner."] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loss = getattr(self, "loss")  # noqa: B009 (a field of the class that extends this one)
        check(self.loss_lr >= 0, f"defence.loss_lr must not be negative, got {self.loss_lr}")
        if self.miner:
            chosen(self, "miner", ())
            check(
                isinstance(loss, Named),
                f"defence.miner chooses for a loss of yours, and {loss} has samplers: set defence.loss, or "
                "leave the miner out",
            )
        for args, owner in (("loss_args", loss), ("miner_args", self.miner)):
            given, of = getattr(self, args), args.removesuffix("_args")
            if not isinstance(owner, Named):
                check(not given, f"defence.{args} are for a {of} of yours: set defence.{of} to module:thing")
            else:
                check(not (owner.made and given), f"defence.{of} is an object already: leave defence.{args} out")
        check(isinstance(loss, Named) or not self.loss_lr, "defence.loss_lr is for the parameters of a loss of yours")

    def unused(self, *names: str) -> None:
        """Refuse settings of our losses next to a loss of yours, which would not read them."""
        if not isinstance(getattr(self, "loss"), Named):  # noqa: B009
            return
        for each in fields(self):
            if each.name in names and each.default is not MISSING and getattr(self, each.name) != each.default:
                check(
                    False,
                    f"a loss of yours does not read defence.{each.name}: leave it out, or set "
                    f"defence.loss_args.{each.name} if the loss takes it",
                )
