"""Models by what stands on the command line: a run folder, a weights file, a function of yours, a timm name."""

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from ..errors import AnchorholdError, ModelError
from ..settings import nearest
from .backbones import is_own
from .embedder import Embedder, load_embedder
from .victim import Size, Victim, kind_of, reason_of, wrap

__all__ = ["load_model"]

_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")


def load_model(
    spec: str,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: Size | None = None,
    device: str | torch.device | None = None,
) -> nn.Module:
    """The model that a command line means, from images in [0, 1] to unit vectors.

        runs/hm, model.safetensors    a run folder, or a model that Anchorhold saved
        resnet18=FILE                 weights from a file for a backbone: pooled features without a head
        module:function               what a function of yours returns; also looked for in the current folder
        resnet18                      a timm name, with its pretrained weights: pooled features without a head

    Models of the first kind know their mean, std and size. For a weights file ImageNet's are the default, for a
    timm name those it was trained with, for your own module none.
    """
    model = _find(spec, mean, std, size)
    return model if device is None else model.to(device)


def _find(spec: str, mean: Sequence[float] | None, std: Sequence[float] | None, size: Size | None) -> nn.Module:
    name, _, file = spec.partition("=")
    path = Path(spec).expanduser()
    if path.exists():
        model = _saved(path)
    elif file:
        return Embedder(name, 0, file, mean=mean, std=std, size=size)
    elif ":" in spec.removeprefix("timm:"):
        model = _made(spec)
        if not isinstance(model, Embedder | Victim):
            return wrap(model, mean=mean, std=std, size=size)
    else:
        return _pretrained(spec.removeprefix("timm:"), mean, std, size)
    if mean is not None or std is not None:
        raise ModelError(f"{spec} has its mean and std inside: leave them out")
    return model if size is None else wrap(model, size=size)


def _saved(path: Path) -> nn.Module:
    """An embedder from a run folder or file; bare weights are not one."""
    if path.is_file():
        try:
            with safetensors.safe_open(path, "pt") as file:
                ours = "anchorhold" in (file.metadata() or {})
        except (safetensors.SafetensorError, OSError):
            ours = path.suffix == ".safetensors"  # damaged: load_embedder has the words for it
        if not ours:
            raise ModelError(f"{path} holds weights only: say for which backbone, as in resnet18={path}")
    return load_embedder(path)


def _pretrained(name: str, mean: Sequence[float] | None, std: Sequence[float] | None, size: Size | None) -> nn.Module:
    import timm  # a second to import

    try:
        known: Any = timm.get_pretrained_cfg(name)
    except RuntimeError:  # NAME.TAG with a tag that NAME does not have
        known = None
    if not known and not is_own(name):
        names = () if "/" in name or Path(name).suffix in _WEIGHTS else (*timm.list_models(), *timm.list_pretrained())
        raise ModelError(
            f"there is no model {name!r}: no such folder or file, and no such timm name; "
            + nearest(name, names, "give a run folder, BACKBONE=FILE, module:function or a timm name")
        )
    if known:
        mean, std = (known.mean, known.std) if mean is std is None else (mean, std)
        size = size or known.input_size[-2:]
    return Embedder(name, 0, "imagenet", mean=mean, std=std, size=size)


@contextmanager
def _from_here() -> Iterator[None]:
    """The current folder first among the places where modules are looked for, as with `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _made(spec: str) -> nn.Module:
    """What `module:function` returns, or the module that stands there."""
    place, _, name = spec.partition(":")
    if place.endswith(".py"):
        place = place.removesuffix(".py").replace("/", ".")
    with _from_here():
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name and (place == error.name or place.startswith(error.name + ".")):
                raise ModelError(f"{spec}: there is no module {place!r}, here or installed") from None
            raise ModelError(f"{spec}: {place} needs {error.name!r}, which is not installed") from error
        except AnchorholdError:
            raise
        except Exception as error:  # it is their code
            raise ModelError(f"{spec}: importing {place} fails ({reason_of(error)})") from error
        try:
            function = attrgetter(name)(module)
        except AttributeError:
            names = [each for each, thing in vars(module).items() if callable(thing) and not each.startswith("_")]
            raise ModelError(f"{spec}: {place} has no {name!r}; {nearest(name, names)}") from None
        if isinstance(function, nn.Module):
            return function
        if not callable(function):
            raise ModelError(f"{spec} is {kind_of(function)}: name a function that returns an nn.Module")
        try:
            model = function()
        except AnchorholdError:
            raise
        except Exception as error:
            raise ModelError(f"{spec} fails ({reason_of(error)})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returns {kind_of(model)}: it has to return an nn.Module")
    return model
