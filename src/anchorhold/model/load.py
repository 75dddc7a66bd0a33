"""Models by name: a run folder, a weights file, a name on the Hugging Face Hub, your own function, or a timm name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from ..errors import AnchorholdError, ModelError, lacks_memory, nearest
from ..extensions import USER, Origin, imported, is_hub, kind_of, reason_of, searched_here
from .backbones import is_own
from .embedder import Embedder, load_embedder
from .hub import called, fetch
from .trainable import Trainable, load_trainable
from .wrap import Size, Victim, wrap

__all__ = ["load", "load_model"]

_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")


def load(
    path: str | Path, device: str | torch.device = "cpu", *, module: nn.Module | None = None
) -> Embedder | Trainable:
    """A trained model, from its file, its run folder or the Hugging Face Hub, in eval mode.

    Args:
        path: a .safetensors file, a finished run folder, or hf:owner/name[@revision][:file] on the Hub.
        device: where the model is put.
        module: your own module, where one was trained: a file holds its weights, and never code.
    """
    found = fetch(path) if is_hub(path) else None
    place = path if found is None else found.path
    with called(found):
        model = load_embedder(place, device) if module is None else load_trainable(place, module, device)
    model.hub = "" if found is None else found.name
    return model


def load_model(
    spec: str,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: Size | None = None,
    device: str | torch.device | None = None,
    origin: Origin = USER,
) -> nn.Module:
    """Load the model that a command line names; it maps images in [0, 1] to unit vectors.

        runs/hm, model.safetensors    a run folder, or a model that Anchorhold saved
        hf:owner/name                 such a model on the Hugging Face Hub; @revision and :file may follow
        module:function=FILE          your module, with the weights that a training gave it
        resnet18=FILE                 weights from a file for a backbone: pooled features without a head
        module:function               what your function returns; the current folder is searched too
        resnet18                      a timm name, with its pretrained weights: pooled features without a head

    Saved models have their own mean, std and size. The defaults are ImageNet's for a weights file, those of its
    training for a timm name, and none for your own module. FILE may be hf:owner/name too. `origin` says who gave the
    name: a function that only a record names is not called, and a file that only a record names is not downloaded.
    """
    model = _find(spec, mean, std, size, origin)
    return model if device is None else model.to(device)


def _find(
    spec: str, mean: Sequence[float] | None, std: Sequence[float] | None, size: Size | None, origin: Origin
) -> nn.Module:
    name, _, file = spec.partition("=")
    path = Path(spec).expanduser()
    if is_hub(spec) or is_hub(file):
        origin.check_download(spec)
    if is_hub(spec):
        model = _from_hub(spec)
    elif path.exists():
        model = _saved(path)
    elif file and ":" in name:
        model = load(file, module=_made(name, origin))
    elif file:
        return Embedder(name, 0, file, mean=mean, std=std, size=size)
    elif ":" in spec.removeprefix("timm:"):
        model = _made(spec, origin)
        if not isinstance(model, Embedder | Victim):
            return wrap(model, mean=mean, std=std, size=size)
    else:
        return _pretrained(spec.removeprefix("timm:"), mean, std, size)
    if mean is not None or std is not None:
        raise ModelError(f"{spec} has its own mean and std; leave out --mean and --std")
    return model if size is None else wrap(model, size=size)


def _from_hub(spec: str) -> nn.Module:
    found = fetch(spec)
    with called(found):
        model = _saved(found.path)
    model.hub = found.name
    return model


def _saved(path: Path) -> Embedder:
    """An embedder from a run folder or file; bare weights are refused."""
    if path.is_file():
        try:
            with safetensors.safe_open(path, "pt") as file:
                ours = "anchorhold" in (file.metadata() or {})
        except (safetensors.SafetensorError, OSError):
            ours = path.suffix == ".safetensors"  # damaged, which load_embedder reports
        if not ours:
            raise ModelError(f"{path} holds only weights; name their backbone, as in resnet18={path}")
    return load_embedder(path)


def _pretrained(name: str, mean: Sequence[float] | None, std: Sequence[float] | None, size: Size | None) -> nn.Module:
    import timm  # takes a second to import

    try:
        known: Any = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag in NAME.TAG
        known = None
    if not known and not is_own(name):
        names = () if "/" in name or Path(name).suffix in _WEIGHTS else (*timm.list_models(), *timm.list_pretrained())
        raise ModelError(
            f"no model {name!r}: no such folder or file, and no such timm name; "
            + nearest(name, names, "give a run folder, BACKBONE=FILE, hf:owner/name, module:function or a timm name")
        )
    if known:
        mean, std = (known.mean, known.std) if mean is std is None else (mean, std)
        size = size or known.input_size[-2:]
    return Embedder(name, 0, "imagenet", mean=mean, std=std, size=size)


def _made(spec: str, origin: Origin) -> nn.Module:
    """What `module:function` returns, or the nn.Module that it names."""
    function = imported(spec, origin)
    if isinstance(function, nn.Module):
        return function
    if not callable(function):
        raise ModelError(f"{spec} is {kind_of(function)}; name a function that returns an nn.Module")
    try:
        with searched_here():  # the function may import more
            model = function()
    except (Exception, SystemExit) as error:
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise ModelError(f"{spec} fails ({reason_of(error)})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returns {kind_of(model)}; it must return an nn.Module")
    return model
