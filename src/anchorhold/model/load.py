"""Models by name: a run folder, a weights file, one on the Hugging Face Hub, your function, an encoder, a timm name."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from ..errors import AnchorholdError, ModelError, check, lacks_memory, nearest
from ..extensions import USER, Origin, imported, is_hub, kind_of, reason_of, searched_here
from ..interface import option, worded
from .backbones import is_own
from .embedder import Embedder, load_embedder
from .encoders import encoder_named, is_encoder
from .hub import called, fetch
from .preprocessing import INTERPOLATIONS
from .trainable import Trainable, load_trainable
from .weights import NoWeights
from .wrap import Size, Victim, wrap

__all__ = ["load", "load_model"]

_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")


def load(path: str | Path, device: str | torch.device = "cpu", *, module: nn.Module | None = None) -> Embedder | Victim:
    """A trained model, from its file, its run folder or the Hugging Face Hub, in eval mode; or an encoder by its name.

    Args:
        path: a .safetensors file, a finished run folder, or hf:owner/name[@revision][:file] on the Hub. Or an encoder:
            open_clip:NAME/TAG, transformers:OWNER/NAME or timm:NAME, with its own weights and preprocessing.
        device: where the model is put.
        module: your own module, where one was trained: a file holds its weights, and never code.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     load(Embedder("small", 8, channels=1, size=8).save(f"{place}/m.safetensors")).config["dim"]
    8
    """
    named = isinstance(path, str) and (is_encoder(path) or path.startswith("timm:")) and not Path(path).exists()
    if named and module is None:
        encoder: Embedder | Victim = load_model(str(path), device=device).eval()  # type: ignore[assignment]
        return encoder
    found = fetch(path) if is_hub(path) else None
    place = path if found is None else found.path
    with called(found):
        model: Embedder | Trainable
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
        open_clip:NAME/TAG            an encoder of open_clip, its image tower alone
        transformers:OWNER/NAME       CLIP, SigLIP or DINOv2, from the Hub or a folder
        timm:resnet18                 a timm name, with its pretrained weights: pooled features without a head
        resnet18                      the same, with the preprocessing of the papers instead of its own

    Saved models have their own mean, std and size. The defaults are ImageNet's for a weights file, those of its
    training for a timm name, and none for your own module. FILE may be hf:owner/name too. `origin` says who gave the
    name. What only a record names is not called or loaded; of weights, only timm's own names are fetched.
    """
    model = _find(spec, mean, std, size, origin)
    return model if device is None else model.to(device)


def _find(
    spec: str, mean: Sequence[float] | None, std: Sequence[float] | None, size: Size | None, origin: Origin
) -> nn.Module:
    name, _, file = spec.partition("=")
    path = Path(spec).expanduser()
    if "://" in spec:
        raise ModelError(f"{spec} is an address, not a model; download the file first, or use hf:owner/name")
    if is_hub(spec) or is_hub(file):
        origin.check_download(spec)
    if is_hub(spec):
        model = _from_hub(spec)
    elif path.exists():
        model = _saved(path)
    elif is_encoder(name):
        model = encoder_named(name if file else spec, origin)
        model = load_trainable(file, model) if file else model
        check(size is None, f"{name} has its own size; leave out {option('size')}")
    elif file and ":" in name:
        model = load(file, module=_made(name, origin))
    elif file:
        return Embedder(name, 0, file, mean=mean, std=std, size=size)
    elif ":" in spec.removeprefix("timm:"):
        model = _made(spec, origin)
        if not isinstance(model, Embedder | Victim):
            return wrap(model, mean=mean, std=std, size=size)
    else:
        return _pretrained(spec, mean, std, size)
    if mean is not None or std is not None:
        raise ModelError(f"{spec} has its own mean and std; leave out {option('mean')} and {option('std')}")
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


def _pretrained(spec: str, mean: Sequence[float] | None, std: Sequence[float] | None, size: Size | None) -> nn.Module:
    import timm  # takes a second to import

    name = spec.removeprefix("timm:")
    try:
        known: Any = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag in NAME.TAG
        known = None
    if not known and not is_own(name):
        names = () if "/" in name or Path(name).suffix in _WEIGHTS else (*timm.list_models(), *timm.list_pretrained())
        runs = [str(file.parent) for place in ("*", "runs/*") for file in Path().glob(f"{place}/model.safetensors")]
        advice = "give a run folder, BACKBONE=FILE, hf:owner/name, module:function or a timm name"
        raise ModelError(
            f"no model {name!r}: no such folder or file, and no such timm name; "
            + nearest(name, runs, nearest(name, names, advice, like=0.7))
        )
    if known:
        mean, std = (known.mean, known.std) if mean is std is None else (mean, std)
        size = size or known.input_size[-2:]
    way = _own_way(known, size) if known and name != spec else None
    try:
        model = Embedder(name, 0, "imagenet", mean=mean, std=std, size=size, preprocessing=way)
    except NoWeights as error:
        raise error.instead(worded(f"{name}=FILE", f"ah.Embedder({name!r}, weights=FILE)")) from None
    model.preset = spec if way else ""
    return model


def _own_way(known: Any, size: Size | None) -> dict[str, Any] | None:
    """How timm prepares files for a net; None where that is not possible here, as for sizes that are not square."""
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    interpolation = str(known.interpolation or "bicubic")
    if len(set(sides)) != 1 or known.crop_mode == "border" or interpolation not in INTERPOLATIONS:
        return None
    side = int(sides[0])
    resize = math.floor(side / (known.crop_pct or 0.875))
    squashed = known.crop_mode == "squash"
    way: dict[str, Any] = {"resize": resize, "crop": side, "interpolation": interpolation}
    return way if squashed else way | {"proportions": True}


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
