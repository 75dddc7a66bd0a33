"""Anybody's model as attack code wants it: images in [0, 1] in, one fp32 unit vector for each of them out.

`wrap` adapts a module that is at hand, `load_model` finds one by what stands on the command line, and `chunked`
makes a batch fit into memory.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import AnchorholdError, ModelError, SettingsError
from ..geometry import unit as on_sphere
from ..settings import nearest
from .backbones import is_own
from .embedder import Embedder, load_embedder
from .frozen import Embed

__all__ = ["Victim", "chunked", "load_model", "wrap"]

Size = int | Sequence[int]

_KNOWN = ("embedding", "embeddings", "features", "image_embeds", "pooler_output")
_WEIGHTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".tar")
_BYTES = 8.0  # a pixel beyond this was meant as 0..255; images that were normalised already stay below 3


class Victim(nn.Module):
    """A module behind mean and std, size, choice of output and unit sphere; made by `wrap`.

    `notes` says in words what is done to images and embeddings on their way; those that depend on what the
    module returns are there after the first call.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        module: nn.Module,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        size: Size | None = None,
        output: int | str | None = None,
        unit: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ModelError(f"wrap takes an nn.Module and got {_kind(module)}: call it in the forward of one")
        statistics = _statistics(mean, std)
        self.module, self.output, self.unit = module, output, unit
        self.size = None if size is None else _sides(size)
        self.notes: list[str] = []
        for name, values in zip(("mean", "std"), statistics or (None, None)):
            self.register_buffer(name, None if values is None else torch.tensor(values).view(-1, 1, 1))
        if statistics:
            self._note(f"images are normalised inside, mean {statistics[0]} and std {statistics[1]}")
        dtype = _home(module)[1]
        if dtype in (torch.float16, torch.bfloat16):
            self._note(f"the model runs in {str(dtype).removeprefix('torch.')}, embeddings are fp32")
        self._note("embeddings are put on the unit sphere" if unit else "embeddings are compared as they come")

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (B, D) of images (B, C, H, W) in [0, 1], in fp32; a float64 model gives float64."""
        self._refuse(images)
        device, dtype = _home(self.module)
        x = images.to(device) if device else images
        x = x if x.dtype == torch.float64 else x.float()
        if self.size and self.size != tuple(x.shape[-2:]):
            self._note(f"images of {_by(x.shape[-2:])} pixels are resized to {_by(self.size)}")
            x = _resize(x, self.size)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean.to(x)) / self.std.to(x)
        out = self._flat(self._pick(self._call(x.to(dtype) if dtype else x)), len(images))
        out = out if out.dtype == torch.float64 else out.float()
        return on_sphere(out) if self.unit else out

    def _refuse(self, images: Tensor) -> None:
        channels = "C" if self.mean is None else len(self.mean)
        if not images.is_floating_point():
            raise ModelError(f"images are {images.dtype}: give floats in [0, 1], images.float() / 255 for bytes")
        if images.ndim != 4 or channels not in ("C", images.shape[1]):
            raise ModelError(f"expected images of shape (B, {channels}, H, W), got {tuple(images.shape)}")
        # Reading a number back waits for the GPU, which the steps of an attack should not have to.
        if (images.is_cuda and images.requires_grad) or torch.compiler.is_compiling() or not images.numel():
            return
        if (top := float(images.detach().amax())) > _BYTES:
            raise ModelError(f"images go up to {top:g}: give RGB in [0, 1], that is images / 255")

    def _call(self, x: Tensor) -> Any:
        try:
            return self.module(x)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise ModelError(
                f"the model fails on images of shape {tuple(x.shape)} ({_reason(error)}): "
                "give it the size and channels it is for, with `size` if need be"
            ) from error

    def _pick(self, out: Any) -> Tensor:
        """The one tensor of a module's output that is the embedding."""
        chosen = out
        if self.output is not None:
            chosen = _chosen(out, self.output)
        elif isinstance(out, tuple | list):
            chosen = next((part for part in out if isinstance(part, Tensor)), None)
            self._note(f"the first tensor of the {len(out)} outputs is the embedding")
        elif not isinstance(out, Tensor) and (named := _named(out)):
            tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
            likely = [name for name in _KNOWN if name in tensors] or list(tensors)
            if len(likely) != 1:
                shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in tensors.items())
                raise ModelError(f"the model returns {shapes or 'no tensor'}: choose one with output='NAME'")
            chosen = tensors[likely[0]]
            self._note(f"the output {likely[0]!r} is the embedding")
        if not isinstance(chosen, Tensor):
            what = f"{_kind(out)} without a tensor" if self.output is None else f"{_kind(chosen)} at {self.output!r}"
            raise ModelError(f"the model returns {what}: it has to give a tensor (B, D)")
        return chosen

    def _flat(self, out: Tensor, count: int) -> Tensor:
        shape = tuple(out.shape)
        if out.ndim == 4 and shape[2:] == (1, 1):
            out = out.flatten(1)
        elif out.ndim == 4:
            raise ModelError(f"the model returns feature maps {shape}: pool them to (B, D), as with .mean((2, 3))")
        if out.ndim != 2 or len(out) != count or not out.shape[1] or not out.is_floating_point():
            raise ModelError(
                f"the model returns {out.dtype} of shape {shape} for {count} images: it has to give (B, D)"
            )
        return out

    def _note(self, text: str) -> None:
        if not torch.compiler.is_compiling() and text not in self.notes:
            self.notes.append(text)


def wrap(
    module: nn.Module,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: Size | None = None,
    output: int | str | None = None,
    unit: bool = True,
    device: str | torch.device | None = None,
) -> Victim:
    """Any module as one from images in [0, 1] to unit vectors, which can be attacked and audited.

    `mean` and `std` (one number a channel, for pixels in [0, 1]) are applied inside, and images of another size
    are brought to `size`. `output` is the place or the name of the embedding where the module returns several
    tensors. Parameters stay the module's own; `device` moves them.

    >>> theirs = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    >>> wrap(theirs, mean=[0.5] * 3, std=[0.5] * 3, size=2)(torch.rand(5, 3, 8, 8)).shape
    torch.Size([5, 4])
    """
    victim = Victim(module, mean, std, size, output, unit)
    return victim.to(device or _home(module)[0] or "cpu")


def _home(module: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
    """Where a module's first floating tensor lives and in which precision; None where it has none."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if tensor.is_floating_point():
                return tensor.device, tensor.dtype
    return None, None


def _statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    if mean is None and std is None:
        return None
    if mean is None or std is None or len(mean) != len(std) or not len(mean):
        raise SettingsError(f"mean ({mean}) and std ({std}) go together, one number for each channel")
    if max(mean) > 1 or min(std) <= 0:
        raise SettingsError(f"mean {list(mean)} and std {list(std)} have to be for pixels in [0, 1]: divide by 255")
    return tuple(map(float, mean)), tuple(map(float, std))


def _sides(size: Size) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1:
        raise SettingsError(f"size is a side or (height, width) in pixels, not {size}")
    return sides[0], sides[1]


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear, over the whole footprint of a pixel when shrinking: F.interpolate(…, antialias=True).

    As two matrix products, whose gradient is the same at every run; that of F.interpolate is not on a GPU.
    """
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = (_weights(*ends).to(images) for ends in zip(images.shape[-2:], size))
        return rows @ images @ columns.mT


@lru_cache(maxsize=16)
def _weights(before: int, after: int) -> Tensor:
    eye = torch.eye(before, dtype=torch.float64)[None, None]
    return F.interpolate(eye, (after, before), mode="bilinear", antialias=True)[0, 0]


def _named(out: Any) -> dict[str, Any]:
    """The parts of an output that have names: of a mapping, a named tuple, a data class or a plain object."""
    if isinstance(out, Mapping):
        return {str(name): part for name, part in out.items()}
    return dict(out._asdict()) if hasattr(out, "_asdict") else dict(getattr(out, "__dict__", {}))


def _chosen(out: Any, output: int | str) -> Any:
    if isinstance(out, Tensor):
        raise ModelError(f"the model returns one tensor {tuple(out.shape)}: leave output={output!r} out")
    if isinstance(output, int):
        parts = list(out) if isinstance(out, tuple | list) else []
        if -len(parts) <= output < len(parts):
            return parts[output]
        raise ModelError(f"there is no output {output}: the model returns {_kind(out)} of {len(parts)} numbered parts")
    named = _named(out)
    if output in named:
        return named[output]
    hint = nearest(output, named) if named else "choose by number, or leave it out"
    raise ModelError(f"there is no output {output!r}: the model returns {_kind(out)}; {hint}")


def _kind(thing: Any) -> str:
    name = type(thing).__name__
    return "None" if thing is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _by(sides: Sequence[int]) -> str:
    return "×".join(map(str, sides))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:160]}"


# ---------------------------------------------------------------- memory


def chunked(embed: Embed, batch: int) -> Embed:
    """The same embeddings, at most `batch` images at a time, and half as many whenever GPU memory runs out.

    Gradients reach the images and nothing else, as through a frozen view. A batch that was split keeps no
    activations: each part is embedded again when its gradient is wanted.

    >>> chunked(lambda x: 2 * x.flatten(1), 2)(torch.ones(5, 1, 1, 1)).sum()
    tensor(10.)
    """
    if batch < 1:
        raise SettingsError(f"batch is {batch}: embed at least one image at a time")
    parts = _Parts(batch)

    def run(images: Tensor) -> Tensor:
        if len(images) <= parts.limit:
            try:
                return embed(images)
            except torch.OutOfMemoryError:
                pass  # what the attempt held is free again only outside of this clause
            parts.shrink(len(images))
        out: Tensor = _Split.apply(images, embed, parts)
        return out

    return run


class _Parts:
    """How many images fit; remembered from one call to the next."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def each(self, count: int, act: Callable[[slice], Tensor]) -> Tensor:
        """`act` on all of `count` images, part by part."""
        done: list[Tensor] = []
        start = 0
        while start < count:
            rows = slice(start, min(start + self.limit, count))
            try:
                done.append(act(rows))
                start = rows.stop
                continue
            except torch.OutOfMemoryError:
                pass
            self.shrink(rows.stop - rows.start)
        return torch.cat(done)

    def shrink(self, tried: int) -> None:
        if tried == 1:
            raise ModelError("one image alone does not fit into GPU memory: free some, or take smaller images")
        self.limit = tried // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, embed: Embed, parts: _Parts) -> Tensor:
        kind = images.device.type
        ctx.save_for_backward(images)
        ctx.embed, ctx.parts = embed, parts
        ctx.cast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}
        ctx.cast["enabled"] = torch.is_autocast_enabled(kind)
        return parts.each(len(images), lambda rows: embed(images[rows]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None]:
        (images,) = ctx.saved_tensors

        def gradient(rows: slice) -> Tensor:
            here = images[rows].detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(**ctx.cast):
                out = ctx.embed(here)
            found: Tensor = torch.autograd.grad(out, here, above[rows])[0]
            return found

        return ctx.parts.each(len(images), gradient), None, None


# ---------------------------------------------------------------- by name


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
            raise ModelError(f"{spec}: importing {place} fails ({_reason(error)})") from error
        try:
            function = attrgetter(name)(module)
        except AttributeError:
            names = [each for each, thing in vars(module).items() if callable(thing) and not each.startswith("_")]
            raise ModelError(f"{spec}: {place} has no {name!r}; {nearest(name, names)}") from None
        if isinstance(function, nn.Module):
            return function
        if not callable(function):
            raise ModelError(f"{spec} is {_kind(function)}: name a function that returns an nn.Module")
        try:
            model = function()
        except AnchorholdError:
            raise
        except Exception as error:
            raise ModelError(f"{spec} fails ({_reason(error)})") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} returns {_kind(model)}: it has to return an nn.Module")
    return model
