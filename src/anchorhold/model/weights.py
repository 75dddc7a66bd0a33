"""Weights come in: by name from timm, or from a file in whichever wrapping its authors gave it.

A pickle is read as data. Its tensors come out; whatever else it names becomes an inert stand-in, so nothing
in the file is imported or called, and checkpoints whose own libraries are not installed can be read as well.
"""

import collections
import hashlib
import json
import pickle
import re
import socket
import tarfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import AnchorholdError, ModelError
from .backbones import is_own

__all__ = ["EXPORT", "METADATA", "LoadReport", "digest", "load_weights", "read_tensors", "saved_config"]

EXPORT = "model.safetensors"  # a model's name in a run folder
METADATA = "anchorhold"  # the entry of our model files' metadata that holds settings and provenance

_NESTS = ("state_dict", "model", "model_state_dict", "net", "network", "model_ema", "state_dict_ema", "ema")
# The one that fits most, the first among equals: robust-models-transfer has module.attacker.model as a copy.
_PREFIXES = (
    "",
    "module.model.",
    "module.attacker.model.",
    "model.",
    "attacker.model.",
    "module.backbone.",
    "module.encoder.",
    "module.",
    "backbone.",
    "encoder.",
    "_orig_mod.",
)
_HEADS = ("fc.", "classifier.", "head.")
_NORMALISER = re.compile(r"(^|\.)normali[sz]er?\.")


@dataclass(frozen=True)
class LoadReport:
    """Where a backbone's weights came from: goes into run.json as it is."""

    source: str  # the file's name, or timm:NAME.TAG
    tensors: int  # copied into the backbone
    ignored: int  # of the file's tensors: heads, normalisers, second copies
    sha256: str | None = None  # of the file, first 16 digits

    def __str__(self) -> str:
        left = f", {self.ignored} others left out" if self.ignored else ""
        return f"{self.source}, {self.tensors} tensors of the backbone{left}"


def load_weights(module: nn.Module, source: str | Path, name: str) -> LoadReport:
    """Fill a backbone from "imagenet", "timm:NAME.TAG", a file or a run folder; a ModelError lists what is amiss."""
    if source == "imagenet" or str(source).startswith("timm:"):
        tag = _imagenet(name) if source == "imagenet" else str(source).removeprefix("timm:")
        label, mark = f"timm:{tag}", None
        tensors = _download(tag, module)
    else:
        path = _file(source)
        # Every run calls its model the same, so that its folder has to be named too.
        label = "/".join(path.resolve().parts[-2:]) if path.name == EXPORT else path.name
        saved = saved_config(path)
        if saved is not None and saved["backbone"].partition(".")[0] != name.partition(".")[0]:
            raise ModelError(
                f"{label} holds a {saved['backbone']}, not a {name}: set model.backbone={saved['backbone']}, "
                "or give other weights"
            )
        tensors = read_tensors(path)
        mark = digest(path)
    fitted = _fit(module, tensors, label, name)
    module.load_state_dict(fitted, strict=False)  # copies, and casts fp16 to the parameter's dtype
    return LoadReport(label, len(fitted), len(tensors) - len(fitted), mark)


def digest(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def saved_config(source: str | Path) -> dict[str, Any] | None:
    """The settings inside a model that Anchorhold saved (a file or a run folder); None for all other weights."""
    if source == "imagenet" or str(source).startswith("timm:"):
        return None
    try:
        with safetensors.safe_open(_file(source), "pt") as file:
            config: dict[str, Any] = json.loads((file.metadata() or {})[METADATA])["config"]
        return config if {"backbone", "channels", "mean", "std"} <= config.keys() else None
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError):
        return None  # not ours, or broken: `read_tensors` has the words for that


def _file(source: str | Path) -> Path:
    """Where the weights lie; in a run folder, the exported model."""
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / EXPORT).is_file():
            return path / EXPORT
        begun = (path / "run.json").is_file()
        todo = f"finish it: anchorhold resume {quote(str(source))}" if begun else "give a file or a finished run"
        raise ModelError(f"weights {str(source)!r}: there is no {EXPORT} in this folder; {todo}")
    if not path.is_file():
        raise ModelError(
            f"weights {str(source)!r}: no such file; give a file, a run folder, 'imagenet' or 'timm:NAME.TAG'"
        )
    return path


def _fit(module: nn.Module, tensors: Mapping[str, Tensor], label: str, name: str) -> dict[str, Tensor]:
    """The file's tensors under the backbone's names; a ModelError that lists what does not fit."""
    own: dict[str, Tensor] = module.state_dict()
    prefix = max(_PREFIXES, key=lambda p: sum(p + key in tensors for key in own))
    inside = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    missing = [key for key in own if key not in inside and not key.endswith("num_batches_tracked")]
    strange = [key for key in inside if key not in own and not key.startswith(_HEADS) and not _NORMALISER.search(key)]
    fitted = {key: t for key, t in inside.items() if key in own}
    shapes = [
        f"{key} {tuple(t.shape)} for {tuple(own[key].shape)}" for key, t in fitted.items() if t.shape != own[key].shape
    ]
    problems = [
        f"{len(names)} {what} ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})"
        for what, names in (("missing", missing), ("unexpected", strange), ("of another shape", shapes))
        if names
    ]
    if problems:
        raise ModelError(f"{label} does not fit {name}: {'; '.join(problems)}; name the backbone the weights are for")
    return fitted


# ---------------------------------------------------------------- by name


def _imagenet(name: str) -> str:
    """timm's name for ImageNet weights; for plain ResNets torchvision's V1, with which the papers start."""
    if is_own(name):
        raise ModelError(f"there are no ImageNet weights for {name!r}: leave weights out, or give a file")
    return f"{name}.tv_in1k" if re.fullmatch(r"resnet(18|34|50|101|152)", name) else name


def _download(tag: str, module: nn.Module) -> dict[str, Tensor]:
    import timm

    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    channels = first.in_channels if first else 3
    try:
        with _impatient():
            model = timm.create_model(tag, pretrained=True, num_classes=0, in_chans=channels)
    except Exception as error:  # whatever timm, the hub or the network may raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"could not get the weights {tag!r} ({reason}); give a weights file instead: weights='FILE'"
        ) from None
    state: dict[str, Tensor] = model.state_dict()
    return state


@contextmanager
def _impatient() -> Iterator[None]:
    """Without a way to the hub, look in the cache only: the hub's own retries take most of a minute."""
    try:
        from huggingface_hub import constants
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    try:
        constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme in urllib.request.getproxies():
        return True  # a proxy resolves the name for us, so nothing can be learnt here
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- from a file


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a torch checkpoint by name; nothing in the file is executed."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            start = file.read(9)
        # A safetensors file is eight bytes of length and then JSON, whatever it is called.
        if path.suffix == ".safetensors" or start[8:] == b"{":
            return dict(safetensors.torch.load_file(path))
        tensors = _state_dict(_read_pickle(path, zipped=start[:4] == b"PK\x03\x04"))
    except AnchorholdError:
        raise
    except Exception as error:  # a damaged file can make a reader raise anything
        reason = (str(error).splitlines() or [""])[0][:120]
        raise ModelError(
            f"{path} cannot be read as weights ({type(error).__name__}: {reason}): it may be truncated or of "
            "another kind; fetch it again, or save it as safetensors"
        ) from None
    if not tensors:
        raise ModelError(f"{path} holds no named tensors: save the model's state_dict(), not the model")
    return tensors


def _state_dict(found: Any, depth: int = 2) -> dict[str, Tensor]:
    """The state dict in a checkpoint, at the top or under one of the usual names."""
    if not isinstance(found, Mapping):
        return {}
    # Nests first: beside them the top level may hold tensors of its own, such as a step count.
    for nest in _NESTS if depth else ():
        if inner := _state_dict(found.get(nest), depth - 1):
            return inner
    return {key: t.detach() for key, t in found.items() if isinstance(key, str) and isinstance(t, Tensor)}


def _read_pickle(path: Path, zipped: bool) -> Any:
    # torch.load hands TorchScript to the JIT and unpacks tar files; both are refused before it sees them. The
    # archive's names are read with torch's own reader, so that the two cannot disagree.
    if zipped and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records():
        raise ModelError(f"{path} is a TorchScript archive, which is a program: save its state_dict() instead")
    if not zipped and tarfile.is_tarfile(path):
        raise ModelError(f"{path} is a tar archive: unpack it and give the weights file that is inside")
    return torch.load(path, map_location="cpu", pickle_module=_PICKLE, weights_only=False, mmap=False)


class _Inert:
    """Stands in for every class and function that a pickle names: takes anything, does nothing."""

    dump_patches = False  # torch.load may ask, and writes a file where it is true

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return object.__new__(_Inert)  # `cls` may be an instance: dill makes classes by calling functions

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> "_Inert":
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    extend = add = update = append

    def __getattr__(self, name: str) -> "_Inert":
        if name.startswith("__"):
            raise AttributeError(name)  # protocols are looked up this way; it has none
        return self


def _tensor(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    # `rest` is requires_grad, hooks and attributes: none of them is data.
    tensor: Tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)
    return tensor


def _parameter(data: Tensor, *rest: Any) -> Tensor:
    return data


def _subclass(build: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    return build(*args)


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler in Python, with the table above for its whole world.

    torch.load derives from it and adds the typed storages, which are names of dtypes.
    """

    def find_class(self, module: str, name: str) -> Any:
        return _HARMLESS.get((module, name), _Inert)

    def _ignore_state(self) -> None:
        # BUILD sets attributes on whatever lies on the stack, functions included; no tensor needs it.
        self.stack.pop()  # type: ignore[attr-defined]

    # EXT opcodes look classes up in a registry of the process rather than through find_class.
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: act
        for code, act in pickle._Unpickler.dispatch.items()
        if code not in (pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0])
    } | {pickle.BUILD[0]: _ignore_state}


_PICKLE = SimpleNamespace(
    __name__=__name__,
    Unpickler=_Unpickler,
    load=lambda file, **options: _Unpickler(file, **options).load(),
)
