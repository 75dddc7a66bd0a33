"""Device and precision of a run."""

import os
import platform
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from .distributed import local_rank, neighbours, started
from .errors import ModelError, RunError
from .interface import argument, option

__all__ = ["compiles", "computer_of", "computing", "device_named", "living_on", "precise", "repeatable"]

PAYS = 1_000_000  # image-steps from which compiling the attack steps saves time (docs/guides/speed.md)


def device_named(name: str) -> torch.device:
    """The device for auto, cpu, cuda or cuda:N; auto is the GPU if there is one."""
    if started()[1] > 1 and name != "cpu" and torch.cuda.is_available():
        if name not in ("auto", "cuda"):
            raise RunError(f"torchrun gives each rank its own GPU; leave out {option('device', name)}")
        if local_rank() >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise RunError(f"{neighbours()} ranks but {gpus} GPU{'s' * (gpus != 1)} here; start one rank per GPU")
        name = f"cuda:{local_rank()}"
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"no device {name!r}; {argument('device')} takes auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise RunError(f"{name} is not supported; {argument('device')} takes auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RunError(
            f"this CUDA device is not available; `anchorhold doctor` lists devices; or use {option('device', 'cpu')}"
        )
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current one
    return device


def computer_of(device: torch.device) -> str:
    """A device as text, such as `cuda: NVIDIA H200`."""
    threads = torch.get_num_threads()  # affects how sums are rounded on a CPU
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    )
    return f"{device.type}: {kind}"


def computing(name: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """The context in which training and attack steps compute; measurements use `precise` (fp32 without TF32).

    auto is bf16 on a GPU and fp32 elsewhere.
    """
    if name not in ("auto", "fp32", "tf32", "bf16"):
        raise RunError(f"no precision {name!r}; choose auto, fp32, tf32 or bf16")
    if device.type != "cuda" and name == "bf16":
        raise RunError("precision bf16 needs a GPU; use auto or fp32")
    if device.type != "cuda":
        return nullcontext
    if name in ("auto", "bf16"):
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return lambda: precise(tf32=name == "tf32")


def compiles(wanted: str, precision: str, device: torch.device, image_steps: float) -> bool:
    """Whether to compile the attack steps: `wanted` is auto, on or off; `image_steps` is the expected work."""
    if wanted not in ("auto", "on", "off"):
        raise RunError(f"{argument('compile')} must be auto, on or off, not {wanted!r}")
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
    """Use only deterministic cuDNN kernels: a repeated batch must give the same rows."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def living_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Move the model to a device for the block, then back."""
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(homes) > 1:
        raise ModelError(f"the model is on {len(homes)} devices; move it to one with .to(device)")
    model.to(device)
    try:
        yield
    finally:
        for home in homes:
            model.to(home)


def _compiler() -> bool:
    """Whether GPU programs can be compiled: this needs Triton, and a C compiler for its launchers."""
    names = (os.environ.get("CC", "cc"), "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(name) for name in names)


def _precisions() -> list[Any]:
    """The torch settings for the precision of fp32 arithmetic, on GPUs and on CPUs."""
    backends: Any = torch.backends
    return [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    # The old setters of torch (up to about 2.11) warn in favour of the new ones; `precise` must use both.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)
        yield


def _readable(read: Callable[[], Any]) -> Any:
    # The old getters raise after a precision was set through the new ones; then there is nothing to restore.
    try:
        return read()
    except RuntimeError:
        return None


@contextmanager
def precise(tf32: bool = False) -> Iterator[None]:
    """Full fp32 for the block: no autocast, and TF32 only on request. The settings are restored afterwards.

    torch has an old interface (`set_float32_matmul_precision`, `cudnn.allow_tf32`) and a new one
    (`fp32_precision`). The old getters raise while the two disagree, so both are set.
    """
    places = _precisions()
    before = [place.fp32_precision for place in places]
    with _quiet():
        matmul = _readable(torch.get_float32_matmul_precision)
        cudnn = _readable(lambda: torch.backends.cudnn.allow_tf32)
    try:
        with _quiet():
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
        for place in places:
            place.fp32_precision = "tf32" if tf32 and "mkldnn" not in str(place) else "ieee"
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        with _quiet():
            if matmul is not None:
                torch.set_float32_matmul_precision(matmul)
            if cudnn is not None:
                torch.backends.cudnn.allow_tf32 = cudnn
        for place, value in zip(places, before):
            place.fp32_precision = value
