"""The loss that trains: the triplet or contrastive loss of mined triplets, or a loss of yours over the whole batch.

A loss of yours is called as loss(embeddings, labels), and with a miner as loss(embeddings, labels, miner(embeddings,
labels)). This is how losses and miners of pytorch-metric-learning are called. Labels are 0 … C−1, the classes of the
training split in their order. Its parameters (proxies) are trained, saved and resumed with the model, as the
companion of the run. What it draws at random depends on the run's seed and the step alone.
"""

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import losses
from ..errors import AnchorholdError, ModelError, SettingsError, check, lacks_memory, nearest
from ..extensions import Named, kind_of, reason_of
from ..geometry import unit
from ..random import Key
from .choices import LossSettings
from .step import Step

__all__ = ["TrainingLoss", "batch_loss", "is_yours", "loss_of_yours", "training_loss"]

TRIED = 8  # embeddings in the trial of a loss


class TrainingLoss(nn.Module):
    """A loss of yours with its miner. Its parameters are trained along with the model."""

    classes: Tensor | None

    def __init__(self, loss: Any, miner: Any, names: tuple[str, str], classes: Tensor | None) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner
        self._teacher: tuple[nn.Module | None] = (None,)  # in a tuple, so that it is neither trained nor saved
        self.name, self.miner_name = names
        self.register_buffer("classes", classes)

    def forward(self, embeddings: Tensor, labels: Tensor, key: Key, mined: bool = True) -> Tensor:
        """One number for the embeddings (B, D) and their labels (B,); `mined` says whether the miner chooses."""
        targets = labels if self.classes is None else torch.searchsorted(self.classes, labels)
        more = []
        with drawn_by(key, embeddings.device):
            if self.miner is not None and mined:
                with _told(self.miner_name, "miner(embeddings, labels)"):
                    more = [self.miner(embeddings, targets)]
            with _told(self.name, "loss(embeddings, labels, indices)" if more else "loss(embeddings, labels)"):
                found = self.loss(embeddings, targets, *more)
        return self._number(found, embeddings)

    @property
    def teacher(self) -> nn.Module | None:
        """A frozen model that stands beside the loss, for the defence `proxy`."""
        return self._teacher[0]

    def beside(self, teacher: nn.Module | None) -> "TrainingLoss":
        """The same loss with a teacher."""
        self._teacher = (teacher,)
        return self

    def frozen(self) -> Callable[[Tensor, Tensor, Key], Tensor]:
        """The loss over all pairs as attacks climb it: its parameters are constants, and its buffers stay."""
        state = {name: p.detach() for name, p in self.named_parameters()}
        state |= {name: b.clone() for name, b in self.named_buffers()}
        return lambda e, labels, key: functional_call(self, state, (e, labels, key, False))

    def _number(self, found: Any, embeddings: Tensor) -> Tensor:
        if not isinstance(found, Tensor) or found.numel() != 1:
            told = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
            raise ModelError(f"{self.name} returns {told} for a batch: a loss is one number, such as a mean")
        if embeddings.requires_grad and not found.requires_grad:
            raise ModelError(f"{self.name} returns a number without a gradient: compute it from the embeddings")
        return found.reshape(())


@contextmanager
def drawn_by(key: Key, device: torch.device) -> Iterator[None]:
    """What torch, NumPy and `random` draw in the block depends on the key alone. Your generators stay as they were."""
    # NumPy's global generator is the one that losses and miners draw from.
    seed, before = key.value, (np.random.get_state(), random.getstate())  # noqa: NPY002
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(before[0])  # noqa: NPY002
            random.setstate(before[1])


@contextmanager
def _told(name: str, call: str) -> Iterator[None]:
    """An exception of user code as one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise ModelError(f"{name} fails ({reason_of(error)}); it is called as {call}") from error


# The loss of a step ----------------------------------------------------------------------------------------------


def is_yours(settings: LossSettings) -> bool:
    """Whether the settings name a loss of yours."""
    return isinstance(getattr(settings, "loss", None), Named)


def loss_of_yours(step: Step, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss of yours that the run trains by."""
    assert isinstance(step.companion, TrainingLoss)
    out: Tensor = step.companion(embeddings, labels, step.key("loss"))
    return out


def batch_loss(step: Step, settings: Any, embeddings: Tensor) -> Tensor:
    """The loss of the batch's embeddings (B, D): yours, or ours on triplets that are mined on them."""
    if is_yours(settings):
        return loss_of_yours(step, embeddings, step.batch.labels)
    chosen = step.mine(settings.sampler, embeddings.detach(), settings.margin, **settings.mining)
    a, p, n = (embeddings[index] for index in (chosen.anchor, chosen.positive, chosen.negative))
    return losses.LOSSES[settings.loss](a, p, n, settings.margin)


# From settings to a loss -----------------------------------------------------------------------------------------


def training_loss(
    settings: Any, like: Tensor, labels: Tensor | None, key: Key, tried: bool = True
) -> TrainingLoss | None:
    """The loss of yours that settings name, made, tried and on its device; None where the loss is ours.

    Args:
        settings: of the defence.
        like: some embeddings (B, D) of the model, for their length, device and dtype.
        labels: of the training split; None where the labels of batches are 0 … C−1 already.
        key: decides how proxies begin.
        tried: whether a copy is called on a few random vectors, so that wrong use is told before training.
    """
    if not isinstance(settings, LossSettings) or not is_yours(settings):
        return None
    classes = None if labels is None else torch.unique(labels)
    known: dict[str, Any] = {"embedding_size": like.shape[1]}
    if classes is not None:
        known["num_classes"] = len(classes)
    name: Named = settings.loss  # type: ignore[attr-defined]
    with drawn_by(key("begin"), torch.device("cpu")):
        loss = _made(name, settings.loss_args, known, "loss")
        miner = None
        if isinstance(settings.miner, Named):
            miner = _made(settings.miner, settings.miner_args, known, "miner")
    made = TrainingLoss(loss, miner, (str(name), str(settings.miner)), classes).to(like.device, like.dtype)
    if tried:
        _try(made, like, key("trial"))
    return made


def _made(name: Named, args: Mapping[str, Any], known: Mapping[str, Any], what: str) -> Any:
    """A class is made with its arguments, a function gets them at every call, an object is ready."""
    thing = name.thing
    given = {key: _argument(value, f"defence.{what}_args.{key}") for key, value in args.items()}
    if not isinstance(thing, type):
        check(inspect.isroutine(thing) or not args, f"{name} is made already: leave defence.{what}_args out")
        return partial(thing, **given) if given else thing
    return _called(thing, name, {**_asked(thing, known), **given}, f"defence.{what}_args")


def _argument(value: Any, path: str) -> Any:
    """An argument as your code gets it: `module:Class` is made, also from a table {class = …, …} with its own."""
    if isinstance(value, Named):
        return _called(value.thing, value, {}, path) if isinstance(value.thing, type) else value.thing
    if isinstance(value, Mapping):
        inside = {key: _argument(each, f"{path}.{key}") for key, each in value.items() if key != "class"}
        if "class" not in value:
            return inside
        name = value["class"]
        check(
            isinstance(name, Named) and isinstance(name.thing, type), f"{path}.class must be module:Class, got {name!r}"
        )
        return _called(name.thing, name, inside, path)
    return [_argument(each, path) for each in value] if isinstance(value, list) else value


def _called(kind: type, name: str, args: Mapping[str, Any], path: str) -> Any:
    try:
        return kind(**args)
    except Exception as error:  # user code may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        takes = _parameters(kind)
        odd = next((key for key in args if takes and key not in takes), None)
        if odd is not None:
            raise SettingsError(f"{path}: {name} takes no {odd!r}; {nearest(odd, takes)}") from error
        raise SettingsError(f"{path} do not fit {name} ({reason_of(error)})") from error


def _parameters(kind: type, required: bool = False) -> set[str]:
    """The named arguments of a class and of those that it extends; or only those without a default."""
    found: set[str] = set()
    for each in kind.__mro__:
        begin = vars(each).get("__init__")
        if begin is not None and each not in (object, nn.Module):
            for p in list(inspect.signature(begin).parameters.values())[1:]:
                by_name = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
                found |= {p.name} if by_name and (p.default is p.empty or not required) else set()
    return found


def _asked(kind: type, known: Mapping[str, Any]) -> dict[str, Any]:
    """What we know and the class cannot be made without: num_classes, embedding_size."""
    asked = _parameters(kind, required=True)
    return {name: value for name, value in known.items() if name in asked}


def _try(made: TrainingLoss, like: Tensor, key: Key) -> None:
    """Call copies of the loss on a few random vectors.

    A loss whose next value is another one after it was saved and loaded again could not be resumed: it is refused.
    """
    try:
        used, again = copy.deepcopy(made), copy.deepcopy(made)
    except Exception:  # not every object can be copied; its first step shows what is wrong then
        return
    ids = torch.arange(TRIED, device=like.device)
    labels = ids // 2 % 2
    labels = labels if made.classes is None else made.classes[labels % len(made.classes)]

    def called(loss: TrainingLoss, call: int) -> Tensor:
        vectors = unit(key("vectors", call).normal(ids, (like.shape[1],), like.dtype))
        return loss(vectors.requires_grad_(), labels, key("draws", call))  # type: ignore[no-any-return]

    values = [called(used, 0)]
    again.load_state_dict(used.state_dict())
    values += [called(used, 1), called(again, 1)]
    finite = all(bool(value.isfinite()) for value in values)
    check(finite, f"{made.name} is NaN or infinite on random unit vectors: check its arguments")
    if not torch.equal(values[1], values[2]):
        raise ModelError(
            f"{made.name} remembers earlier batches outside of its buffers, so a run could not be resumed; "
            "register what it remembers as buffers, or choose another loss"
        )
