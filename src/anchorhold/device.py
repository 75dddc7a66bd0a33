"""Where a run computes, and how precisely."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import nn

from .errors import ModelError, RunError
from .model.frozen import precise
from .ranks import local_rank, neighbours, started

__all__ = ["compiles", "computing", "device_named", "living_on", "repeatable"]

PAYS = 1_000_000  # image-steps from which compiling the ascent costs less than it saves (docs/speed.md)


def device_named(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N; auto is the GPU where there is one."""
    if started()[1] > 1 and name != "cpu" and torch.cuda.is_available():
        if name not in ("auto", "cuda"):
            raise RunError(f"each rank takes a GPU of its own: leave out --device {name}")
        if local_rank() >= torch.cuda.device_count():
            raise RunError(f"{neighbours()} ranks here, but {torch.cuda.device_count()} GPUs; start as many ranks")
        name = f"cuda:{local_rank()}"
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"no device is called {name!r}; --device takes auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise RunError(f"{name} is not supported; --device takes auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError("no CUDA device is available here; `anchorhold doctor` says what is; use --device cpu")
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current one
    return device


def computing(name: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """The context in which training and ascent compute; measurements have their own (fp32 without TF32).

    auto is bf16 on a GPU and fp32 elsewhere.
    """
    if name not in ("auto", "fp32", "tf32", "bf16"):
        raise RunError(f"no precision is called {name!r}; there are auto, fp32, tf32 and bf16")
    if device.type != "cuda" and name == "bf16":
        raise RunError("precision bf16 needs a GPU; use auto or fp32")
    if device.type != "cuda":
        return nullcontext
    if name in ("auto", "bf16"):
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return lambda: precise(tf32=name == "tf32")


def compiles(wanted: str, precision: str, device: torch.device, image_steps: float) -> bool:
    """Whether the ascent is compiled: `wanted` is auto, on or off, and `image_steps` what the work is about to take."""
    if wanted not in ("auto", "on", "off"):
        raise RunError(f"compile is auto, on or off, not {wanted!r}")
    able = device.type == "cuda" and precision in ("auto", "bf16")
    if wanted == "on" and not able:
        raise RunError("compiling needs a GPU and bf16; leave compile at auto")
    if able and wanted != "off" and not _compiler():
        able = False
        if wanted == "on":
            raise RunError("compiling needs Triton and a C compiler; install them, or leave compile at auto")
    return able and (wanted == "on" or (wanted == "auto" and image_steps >= PAYS))


@contextmanager
def repeatable() -> Iterator[None]:
    """cuDNN's kernels that add in a fixed order: a batch that is done again must give the same rows."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def living_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device, and afterwards where it was."""
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(homes) > 1:
        raise ModelError(f"the model lies on {len(homes)} devices: bring it to one with .to(device)")
    model.to(device)
    try:
        yield
    finally:
        for home in homes:
            model.to(home)


def _compiler() -> bool:
    """Whether there is what programs for a GPU are made with: Triton, and a C compiler for what launches them."""
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(name) for name in names)
