"""The classifier at the end of the network that an embedder's weights come from; the embedder itself leaves it out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ModelError, RunError
from ..interface import Placeholder, setting
from ..runs.folder import EXPORT, Run
from .embedder import Embedder
from .hub import called, impatient
from .weights import check_numbers, file_of, name_in_timm, prefix_of, read_tensors, saved_config, why_not_downloaded

__all__ = ["Linear", "classifier_of"]

_HEADS = ("fc", "classifier", "head", "head.fc")  # of torchvision and timm
_OWN = ("ema.companion.linear", "companion.linear")  # in a checkpoint of `classify` or `distil-logits`


class Linear(NamedTuple):
    """Weight (C, F) and bias (C,) of a classifier over F features."""

    weight: Tensor
    bias: Tensor


def classifier_of(model: Embedder) -> Linear | None:
    """The classifier of the weights that a model began with; None if they have none, or if there were no weights.

    It is read from the file, from the checkpoint of a run by `classify` or `distil-logits`, or from timm.
    """
    source = model.source
    if source is None:
        return None
    if source == "imagenet" or str(source).startswith("timm:"):
        return _from_timm(name_in_timm(str(source), model.config["backbone"]), model)
    path = file_of(source)
    if saved_config(path) is not None:  # ours: its `head` makes embeddings
        tensors, names = _checkpoint(path), list(_OWN)
    else:
        with called(source):
            tensors = read_tensors(path)
        prefix = prefix_of(model.backbone, tensors)
        names = [f"{prefix}{head}" for head in _HEADS]
    for name in names:
        weight = tensors.get(f"{name}.weight")
        if weight is not None and weight.ndim == 2 and weight.shape[1] == model.width:
            found = _linear(weight, tensors.get(f"{name}.bias"), model)
            check_numbers(found._asdict(), path.name, {})
            return found
    return None


def _checkpoint(path: Path) -> Mapping[str, Tensor]:
    """The tensors of the checkpoint beside an exported model; none if the file lies elsewhere."""
    if path.name != EXPORT or not (path.parent / "run.json").is_file():
        return {}
    try:
        loaded = Run(path.parent, writes=False).load()
    except RunError as error:
        raise ModelError(f"the classifier of {path.parent} is in its checkpoint: {error}") from None
    return {} if loaded is None else loaded[0]


def _from_timm(tag: str, model: Embedder) -> Linear | None:
    import timm

    try:
        with impatient():
            whole: Any = timm.create_model(tag, pretrained=True)
    except Exception as error:  # timm, the hub or the network may raise anything
        raise ModelError(
            f"could not download the classifier of {tag!r} ({why_not_downloaded(error)}); give a file with "
            f"{setting('model.weights', Placeholder('FILE'))}"
        ) from None
    last: nn.Module = whole.get_classifier()
    if not isinstance(last, nn.Linear) or last.in_features != model.width:
        return None
    return _linear(last.weight.detach(), last.bias, model)


def _linear(weight: Tensor, bias: Tensor | None, model: Embedder) -> Linear:
    """Both in the model's dtype and on its device."""
    bias = torch.zeros(len(weight)) if bias is None else bias.detach()
    return Linear(weight.to(model.mean), bias.to(model.mean))
