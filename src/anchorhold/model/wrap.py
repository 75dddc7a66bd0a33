"""Wraps any model for attacks: from images in [0, 1] to one fp32 unit vector each.

`load.load_model` finds a model by its name on the command line; `chunked` makes a batch fit into memory.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import AnchorholdError, ModelError, SettingsError, lacks_memory, nearest
from ..extensions import is_hub, kind_of, reason_of
from ..geometry import unit as on_sphere
from ..interface import argument, worded
from .before import Backward, Step, check_step, named, taken
from .code_hash import hash_of
from .embedder import Embedder
from .no_gradients import Function, check_function
from .preprocessing import Preprocessing, preprocessing_of

__all__ = ["Size", "Victim", "as_victim", "fingerprint_of", "hub_of", "unnormalised", "wrap"]

Size = int | Sequence[int]

_KNOWN = ("embedding", "embeddings", "features", "image_embeds", "pooler_output")
_BYTES = 8.0  # pixels above this are in 0..255; normalised images stay below 3


class Victim(nn.Module):
    """A module with mean and std, size, choice of output and unit sphere around it; made by `wrap`.

    `notes` describes what is done to images and embeddings. Notes on the module's output appear after the first call.
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
        gradients: bool = True,
        step: tuple[Step | None, Backward | None] = (None, None),
    ) -> None:
        super().__init__()
        check_function(module, True, False)
        check_step(*step, gradients)
        statistics = _statistics(mean, std)
        self.module, self.output, self.unit, self.gradients = module, output, unit, gradients
        self.before, self.backward = step
        self.size = None if size is None else _sides(size)
        self.notes: list[str] = []
        self.taken = ""  # which of several outputs is the vector, after the first call
        self._answered: Counter[tuple[int, ...]] = Counter()  # successful calls by image shape
        for name, values in zip(("mean", "std"), statistics or (None, None)):
            self.register_buffer(name, None if values is None else torch.tensor(values).view(-1, 1, 1))
        if statistics:
            self._note(f"the model normalises images with mean {statistics[0]} and std {statistics[1]}")
        dtype = _home(module)[1]
        if dtype in (torch.float16, torch.bfloat16):
            self._note(f"the model runs in {str(dtype).removeprefix('torch.')}; embeddings are fp32")
        self._note("embeddings are normalised to unit length" if unit else "embeddings are not normalised")
        for text in self.remarks:
            self._note(text)

    @property
    def remarks(self) -> tuple[str, ...]:
        """How attacks get their gradients, where that is not as usual."""
        if not self.gradients:
            return ("the model gives no gradients: attacks use its embeddings only",)
        if self.backward is None:
            return ()
        way = "the identity" if self.backward == "identity" else named(self.backward)
        return (f"gradients pass through {way} in place of {named(self.before)} (BPDA); embeddings do not",)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings (B, D) of images (B, C, H, W) in [0, 1], in fp32; a float64 model gives float64."""
        self._refuse(images)
        device, dtype = _home(self.module)
        x = images.to(device) if device else images
        x = x if x.dtype == torch.float64 else x.float()
        if self.before is not None:
            x = taken(self.before, self.backward, x)
        if self.size and self.size != tuple(x.shape[-2:]):
            self._note(f"images of {_by(x.shape[-2:])} pixels are resized to {_by(self.size)}")
            x = _resize(x, self.size)
        if self.mean is not None and self.std is not None:
            x = (x - self.mean.to(x)) / self.std.to(x)
        out = self._flat(self._pick(self._call(x.to(dtype) if dtype else x)), len(images))
        out = out if out.dtype == torch.float64 else out.float()
        return on_sphere(out) if self.unit else out

    @property
    def preprocess(self) -> Preprocessing:
        """The preprocessing of files: for `size` if given, else the module's own, else for 224."""
        if self.size is None and isinstance(self.module, Embedder | Victim):
            return preprocessing_of(self.module)
        statistics = [None if values is None else values.flatten().tolist() for values in (self.mean, self.std)]
        return Preprocessing.for_size(self.size, *statistics)

    def _refuse(self, images: Tensor) -> None:
        channels = "C" if self.mean is None else len(self.mean)
        if not images.is_floating_point():
            raise ModelError(f"images are {images.dtype}; give floats in [0, 1], for bytes images.float() / 255")
        if images.ndim != 4 or channels not in ("C", images.shape[1]):
            raise ModelError(f"expected images of shape (B, {channels}, H, W), got {tuple(images.shape)}")
        # Reading a number waits for the GPU, which would slow down the steps of an attack.
        if (images.is_cuda and images.requires_grad) or torch.compiler.is_compiling() or not images.numel():
            return
        if (top := float(images.detach().amax())) > _BYTES:
            raise ModelError(f"images have values up to {top:g}; give RGB in [0, 1], i.e. images / 255")

    def _call(self, x: Tensor) -> Any:
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.gradients):
                out = self.module(x)
        except (Exception, SystemExit) as error:  # user code may raise anything
            if isinstance(error, AnchorholdError) or lacks_memory(error):
                raise
            raise ModelError(self._failure(x, error)) from error
        if not torch.compiler.is_compiling():
            self._answered[x.shape[1:]] += 1
        return out

    def _failure(self, x: Tensor, error: BaseException) -> str:
        """The message for an error in the module; it suggests a wrong size only if no such images worked before."""
        call = f"call {self._answered.total() + 1:,}, on images of shape {tuple(x.shape)}"
        if isinstance(error, SystemExit):
            return f"the model calls sys.exit({error.code!r}) at {call}; remove that"
        if self._answered[x.shape[1:]]:
            return f"the model fails at {call} ({reason_of(error)}); earlier calls worked, so check its code"
        other = ", or use ah.wrap(…, arrays=True) if it needs NumPy arrays" if isinstance(self.module, Function) else ""
        return (
            f"the model fails on images of shape {tuple(x.shape)} ({reason_of(error)}); "
            f"give images of its size and channels, or set {argument('size')}{other}"
        )

    def _pick(self, out: Any) -> Tensor:
        """The tensor of a module's output that is the embedding."""
        chosen = out
        if self.output is not None:
            chosen = _chosen(out, self.output)
            self._take(f"output {self.output!r}")
        elif isinstance(out, tuple | list):
            chosen = next((part for part in out if isinstance(part, Tensor)), None)
            self._note(f"the first tensor of the {len(out)} outputs is the embedding")
            self._take(f"first of {len(out)} outputs")
        elif not isinstance(out, Tensor) and (named := _named(out)):
            tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
            likely = [name for name in _KNOWN if name in tensors] or list(tensors)
            if len(likely) != 1:
                shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in tensors.items())
                raise ModelError(
                    f"the model returns {shapes or 'no tensor'}; "
                    + worded("return ah.wrap(net, output='NAME') from your function", "use ah.wrap(net, output='NAME')")
                )
            chosen = tensors[likely[0]]
            self._note(f"the output {likely[0]!r} is the embedding")
            self._take(f"output {likely[0]!r}")
        if not isinstance(chosen, Tensor):
            what = (
                f"{kind_of(out)} without a tensor" if self.output is None else f"{kind_of(chosen)} at {self.output!r}"
            )
            raise ModelError(f"the model returns {what}; it must return a tensor (B, D)")
        return chosen

    def _flat(self, out: Tensor, count: int) -> Tensor:
        shape = tuple(out.shape)
        if out.ndim == 4 and shape[2:] == (1, 1):
            out = out.flatten(1)
        elif out.ndim == 4:
            raise ModelError(f"the model returns feature maps {shape}; pool them to (B, D), e.g. with .mean((2, 3))")
        if out.ndim != 2 or len(out) != count or not out.shape[1] or not out.is_floating_point():
            raise ModelError(
                f"the model returns {out.dtype} of shape {shape} for a batch of {count}; it must return floats (B, D)"
            )
        return out

    def _take(self, text: str) -> None:
        if not torch.compiler.is_compiling():
            self.taken = text

    def _note(self, text: str) -> None:
        if not torch.compiler.is_compiling() and text not in self.notes:
            self.notes.append(text)


def wrap(
    module: nn.Module | Callable[..., Any],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: Size | None = None,
    output: int | str | None = None,
    unit: bool = True,
    device: str | torch.device | None = None,
    gradients: bool = True,
    arrays: bool = False,
    before: Step | None = None,
    backward: Backward | None = None,
) -> Victim:
    """Wrap any module so that it can be attacked and audited: from images in [0, 1] to unit vectors.

    Parameters are shared with the module.

    Args:
        module: the module, or with `gradients=False` any function from images to vectors.
        mean: one number per channel, for pixels in [0, 1]; the wrapper subtracts it.
        std: one number per channel; the wrapper divides by it.
        size: the side, or (height, width), that images are resized to.
        output: the position or name of the embedding, where the module returns several tensors.
        unit: whether vectors are scaled to length 1.
        device: moves the module there.
        gradients: False for a remote service or an ONNX session. Attacks then use values only.
        arrays: with `gradients=False`, the function gets NumPy arrays instead of tensors on the CPU.
        before: a step from images to images of the same shape, before everything else, such as JPEG.
        backward: what gradients pass through in place of `before`: "identity", or a differentiable function of the
            images (BPDA).

    >>> theirs = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    >>> wrap(theirs, mean=[0.5] * 3, std=[0.5] * 3, size=2)(torch.rand(5, 3, 8, 8)).shape
    torch.Size([5, 4])
    >>> wrap(lambda x: x.mean((2, 3)), gradients=False, arrays=True)(torch.rand(5, 3, 8, 8)).shape
    torch.Size([5, 3])
    """
    check_function(module, gradients, arrays)
    inner = module if isinstance(module, nn.Module) else Function(module, arrays)
    victim = Victim(inner, mean, std, size, output, unit, gradients, (before, backward))
    return victim.to(device or _home(inner)[0] or "cpu")


def as_victim(model: nn.Module) -> nn.Module:
    """The model as a map from images in [0, 1] to unit vectors; a bare module is wrapped without mean and std."""
    if isinstance(model, str | Path):
        raise ModelError(f"{str(model)!r} is the name of a model; load it first with ah.load({str(model)!r})")
    if not isinstance(model, nn.Module):
        advice = "; or, if it gives no gradients, use ah.wrap(function, gradients=False)" if callable(model) else ""
        raise ModelError(
            f"a model must be an nn.Module, not {kind_of(model)}; call it in the forward of an nn.Module{advice}"
        )
    ours = isinstance(model, Embedder) and model.mean.dtype in (torch.float32, torch.float64)
    return model if ours or isinstance(model, Victim) else wrap(model)


def unnormalised(model: nn.Module) -> tuple[str, ...]:
    """A remark where nothing here or inside says a mean and std; the module itself may still normalise.

    >>> unnormalised(wrap(nn.Flatten()))
    ('the model gets pixels from 0 to 1, without mean and std; give them if it expects normalised images',)
    >>> unnormalised(wrap(nn.Flatten(), mean=[0.5], std=[0.5]))
    ()
    """
    inside = model
    while isinstance(inside, Victim) and inside.mean is None:
        inside = inside.module
    if isinstance(inside, Embedder | Victim):
        return ()
    return ("the model gets pixels from 0 to 1, without mean and std; give them if it expects normalised images",)


def fingerprint_of(model: nn.Module) -> str:
    """A hash of a model's class, its weights and its `wrap` options; equal hashes mean comparable results."""
    inner = model.module if isinstance(model, Victim) else model
    digest = hashlib.blake2b(type(inner).__name__.encode(), digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):  # mean and std are among them
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(model, Victim):
        around = {"size": (model.size, None), "output": (model.output, None), "unit": (model.unit, True)}
        # Only non-default options, so that the hash of a plain wrap never changes.
        unusual = {name: value for name, (value, usual) in around.items() if value != usual}
        if model.before is not None:
            unusual |= {"before": hash_of(model.before)}
            unusual |= {} if model.backward is None else {"backward": hash_of(model.backward)}
        if isinstance(inner, Victim) and inner.before is not None:  # wrapped twice
            unusual |= {"inside": fingerprint_of(inner)}
        unusual |= {"function": inner.code} if isinstance(inner, Function) else {}
        digest.update(json.dumps(unusual).encode() if unusual else b"")
    return digest.hexdigest()


def hub_of(model: nn.Module) -> dict[str, str]:
    """For a record: {"hub": hf:owner/name@commit:file} of a model from the Hub, else nothing."""
    inner = model.module if isinstance(model, Victim) else model
    name = getattr(model, "hub", "") or getattr(inner, "hub", "")
    return {"hub": str(name)} if is_hub(name) else {}


def _home(module: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
    """Device and dtype of a module's first floating tensor; None if it has none."""
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
        both = f"{argument('mean')} and {argument('std')}"
        got = [f"{argument(name)} has {len(each or ())}" for name, each in (("mean", mean), ("std", std))]
        raise SettingsError(f"give both {both}, with one number per channel; {', '.join(got)}")
    if max(mean) > 1 or min(std) <= 0:
        raise SettingsError(f"mean {list(mean)} and std {list(std)} must be for pixels in [0, 1]; divide them by 255")
    return tuple(map(float, mean)), tuple(map(float, std))


def _sides(size: Size) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1:
        raise SettingsError(f"size must be a side or (height, width) in pixels, got {size}")
    return sides[0], sides[1]


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear resize with antialiasing, as F.interpolate(…, antialias=True).

    Computed as two matrix products, whose gradient is deterministic; that of F.interpolate is not on a GPU.
    """
    with torch.autocast(images.device.type, enabled=False):
        rows, columns = (_weights(*ends).to(images) for ends in zip(images.shape[-2:], size))
        return rows @ images @ columns.mT


@lru_cache(maxsize=16)
def _weights(before: int, after: int) -> Tensor:
    eye = torch.eye(before, dtype=torch.float64)[None, None]
    return F.interpolate(eye, (after, before), mode="bilinear", antialias=True)[0, 0]


def _named(out: Any) -> dict[str, Any]:
    """The named parts of an output that is a mapping, a named tuple, a dataclass or a plain object."""
    if isinstance(out, Mapping):
        return {str(name): part for name, part in out.items()}
    return dict(out._asdict()) if hasattr(out, "_asdict") else dict(getattr(out, "__dict__", {}))


def _chosen(out: Any, output: int | str) -> Any:
    if isinstance(out, Tensor):
        raise ModelError(f"the model returns one tensor {tuple(out.shape)}; leave output {output!r} out")
    if isinstance(output, int):
        parts = list(out) if isinstance(out, tuple | list) else []
        if -len(parts) <= output < len(parts):
            return parts[output]
        raise ModelError(f"no output {output}: the model returns {kind_of(out)} with {len(parts)} numbered parts")
    named = _named(out)
    if output in named:
        return named[output]
    hint = nearest(output, named) if named else "choose by number, or leave it out"
    raise ModelError(f"no output {output!r}: the model returns {kind_of(out)}; {hint}")


def _by(sides: Sequence[int]) -> str:
    return "×".join(map(str, sides))
