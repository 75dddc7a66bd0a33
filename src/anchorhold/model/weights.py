"""Loading of weights: by name from timm or the Hugging Face Hub, or from a file in any of the usual layouts.

Pickles are read as data, without importing or calling anything in them; see `pickles`.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import AnchorholdError, ModelError, lacks_memory
from ..extensions import is_hub
from ..interface import resuming
from ..runs.fields import dig, parsed
from ..runs.files import regular
from ..runs.folder import EXPORT
from ..runs.sealed import Damaged, check_seal
from .backbones import is_own, sides_of
from .hub import Fetched, called, fetch, impatient
from .pickles import read_pickle

__all__ = [
    "METADATA",
    "LoadReport",
    "NoWeights",
    "Source",
    "check_model",
    "check_numbers",
    "digest",
    "file_of",
    "load_weights",
    "located",
    "name_in_timm",
    "prefix_of",
    "read_tensors",
    "saved_config",
]

METADATA = "anchorhold"  # the metadata entry of our model files, with settings and provenance

Source = str | Path | Fetched

_NESTS = ("state_dict", "model", "model_state_dict", "net", "network", "model_ema", "state_dict_ema", "ema")
# The prefix with the most matches wins, the first in a tie: robust-models-transfer has module.attacker.model as a copy.
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
_OFFLINE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout")  # of the hub
_HEADS = ("fc.", "classifier.", "head.")
_NORMALISER = re.compile(r"(^|\.)normali[sz]er?\.")


class NoWeights(ModelError):
    """Weights that cannot be had by their name. A caller that was given the name otherwise says how to give others."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; give a file, as in ah.Embedder(…, weights=FILE), or None")
        self.problem = problem

    def instead(self, file: str, none: str = "") -> ModelError:
        """The error that names another way: what gives a file, and what gives none, where a model may have none."""
        return ModelError(f"{self.problem}; give a file, as in {file}{f', or none with {none}' if none else ''}")


@dataclass(frozen=True)
class LoadReport:
    """The source of a backbone's weights; stored in run.json."""

    source: str  # file name, timm:NAME.TAG, or hf:owner/name@commit:file
    tensors: int  # copied into the backbone
    ignored: int  # other tensors of the file: heads, normalisers, second copies
    sha256: str | None = None  # of the file, the first 16 digits

    def __str__(self) -> str:
        left = f", {self.ignored} others ignored" if self.ignored else ""
        return f"{self.source}, {self.tensors} tensors of the backbone loaded{left}"


def located(source: Source) -> Source:
    """The source of weights, downloaded if it is hf:owner/name[@revision][:file]."""
    return fetch(source) if isinstance(source, str | Path) and is_hub(source) else source


def load_weights(module: nn.Module, source: Source, name: str) -> LoadReport:
    """Load a backbone by name, from the Hub, a file or a run folder; the error lists what does not fit."""
    source = located(source)
    if source == "imagenet" or str(source).startswith("timm:"):
        tag = name_in_timm(str(source), name)
        label, mark = f"timm:{tag}", None
        tensors = _download(tag, module)
    else:
        path = file_of(source)
        # All runs use the same file name for their model, so the label includes the folder.
        label = "/".join(path.resolve().parts[-2:]) if path.name == EXPORT else path.name
        label = source.name if isinstance(source, Fetched) else label
        saved = saved_config(path)
        if saved is not None and saved["backbone"].partition(".")[0] != name.partition(".")[0]:
            raise ModelError(
                f"{label} holds a {saved['backbone']}, not a {name}; set model.backbone to {saved['backbone']}, "
                "or give other weights"
            )
        with called(source):
            tensors = read_tensors(path)
        mark = source.sha256[:16] if isinstance(source, Fetched) else digest(path)
    fitted = _fit(module, tensors, label, name)
    check_numbers(fitted, label, module.state_dict())
    module.load_state_dict(fitted, strict=False)  # copies, and casts fp16 to the parameter's dtype
    return LoadReport(label, len(fitted), len(tensors) - len(fitted), mark)


def digest(path: Path) -> str:
    """The first 16 digits of a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def check_model(path: Path) -> None:
    """Refuse a model file that changed after it was saved: check its seal, and its digest if run.json has one."""
    try:
        check_seal(path)
        reason = "" if _exported(path) in (None, digest(path)) else "it is not the model that the run exported"
    except Damaged as error:
        reason = str(error)
    except OSError:
        return  # its reader reports it
    if reason:
        resumable = (path.parent / "last.safetensors").is_file() and (path.parent / "run.json").is_file()
        again = resuming(path.parent)
        todo = f", or run `{again}` to export it again from the checkpoint" if resumable else ""
        raise ModelError(f"{path} is damaged or was replaced ({reason}); restore it from a copy{todo}")


def _exported(path: Path) -> str | None:
    """The digest in run.json of the model beside it, if the run is done."""
    if path.name != EXPORT:
        return None
    try:
        info = parsed(regular(path.with_name("run.json")).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(dig(info, "export") or "") or None if dig(info, "status") == "done" else None


def saved_config(source: Source) -> dict[str, Any] | None:
    """The settings in a model that Anchorhold saved (a file or a run folder); None for all other weights."""
    if source == "imagenet" or str(source).startswith("timm:"):
        return None
    try:
        with safetensors.safe_open(file_of(source), "pt") as file:
            config = parsed((file.metadata() or {})[METADATA])["config"]
        kinds = {"backbone": str, "channels": int, "mean": list, "std": list}
        kinds |= {"size": list, "preprocessing": dict} if "preprocessing" in config else {}
        return config if all(isinstance(config[name], kind) for name, kind in kinds.items()) else None
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError):
        return None  # not our file, or damaged, which `read_tensors` reports


def file_of(source: Source) -> Path:
    """The path of the weights; in a run folder, that of the exported model."""
    if isinstance(source, Fetched):
        return source.path
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / EXPORT).is_file():
            return path / EXPORT
        begun = (path / "run.json").is_file()
        todo = f"finish the run: {resuming(source)}" if begun else "give a file or a finished run"
        raise ModelError(f"weights {str(source)!r}: no {EXPORT} in this folder; {todo}")
    if not path.is_file():
        raise ModelError(
            f"weights {str(source)!r}: no such file; give a file, a run folder, 'imagenet', 'timm:NAME.TAG' or "
            "'hf:owner/name'"
        )
    return path


def _fit(module: nn.Module, tensors: Mapping[str, Tensor], label: str, name: str) -> dict[str, Tensor]:
    """The file's tensors with the backbone's names; a ModelError lists what does not fit."""
    own: dict[str, Tensor] = module.state_dict()
    prefix = prefix_of(module, tensors)
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
        raise ModelError(
            f"{label} does not fit {name}: {'; '.join(problems)}; set model.backbone to the backbone of these weights"
        )
    return fitted


def prefix_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """What stands before the backbone's names in a file."""
    own = module.state_dict()
    return max(_PREFIXES, key=lambda p: sum(p + key in tensors for key in own))


def check_numbers(tensors: Mapping[str, Tensor], label: str, own: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not finite real numbers; integer tensors must have the dtype of the model's `own`."""
    for name, tensor in tensors.items():
        if name in own and not own[name].is_floating_point() and tensor.dtype == own[name].dtype:
            continue  # e.g. a count of batches or a table of positions
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise ModelError(f"{label}: {name} holds {tensor.dtype}, not real numbers; save the weights as float32")
        if tensor.is_floating_point() and not bool(tensor.to(torch.float32).isfinite().all()):
            raise ModelError(
                f"{label}: {name} holds NaN or infinity, so the model is unusable; train or download another"
            )
        if not tensor.is_floating_point():
            raise ModelError(f"{label}: {name} holds whole numbers ({tensor.dtype}); save the weights as float32")


# ---------------------------------------------------------------- by name


def name_in_timm(source: str, name: str) -> str:
    """timm's name for timm:NAME and imagenet; for plain ResNets torchvision's V1, from which the papers start."""
    if source != "imagenet":
        return source.removeprefix("timm:")
    if is_own(name):
        raise NoWeights(f"no ImageNet weights exist for {name!r}")
    return f"{name}.tv_in1k" if re.fullmatch(r"resnet(18|34|50|101|152)", name) else name


def why_not_downloaded(error: Exception) -> str:
    """What went wrong with a download, in a few words: the hub's own are many, and about its cache."""
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _OFFLINE:
        return "check your connection"
    return (str(error).splitlines() or [type(error).__name__])[0]


def _download(tag: str, module: nn.Module) -> dict[str, Tensor]:
    import timm

    # timm also accepts `hf-hub:owner/name` and `local-dir:`, which an untrusted settings file must not choose.
    if not re.fullmatch(r"\w+(\.\w+)?", tag):
        raise ModelError(f"timm:{tag} is not a timm name; give timm:NAME or timm:NAME.TAG, or a weights file")
    first = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    channels = first.in_channels if first else 3
    try:
        with impatient():
            # timm resamples the positions of a ViT that is made for images of another size.
            sides: dict[str, Any] = {} if (own := sides_of(module)) is None else {"img_size": own}
            model = timm.create_model(tag, pretrained=True, num_classes=0, in_chans=channels, **sides)
    except Exception as error:  # timm, the hub or the network may raise anything
        raise NoWeights(f"could not download the weights {tag!r} ({why_not_downloaded(error)})") from None
    state: dict[str, Tensor] = model.state_dict()
    return state


# ---------------------------------------------------------------- from a file


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or a torch checkpoint, by name; nothing in the file is executed."""
    path = Path(path)
    try:
        with open(regular(path), "rb") as file:
            start = file.read(9)
        # A safetensors file is eight bytes of length followed by JSON, whatever its name.
        if path.suffix == ".safetensors" or start[8:] == b"{":
            check_model(path)
            return dict(safetensors.torch.load_file(path))
        tensors = _state_dict(read_pickle(path, zipped=start[:4] == b"PK\x03\x04"))
    except Exception as error:  # a reader may raise anything on a damaged file
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [""])[0][:120]
        raise ModelError(
            f"{path} cannot be read as weights ({type(error).__name__}: {reason}); it may be truncated or of "
            "another kind: download it again, or save it as safetensors"
        ) from None
    if not tensors:
        raise ModelError(f"{path} holds no named tensors; save the model's state_dict(), not the model")
    # A tensor with stride 0 takes no room in the file, but its full size in computations.
    size = path.stat().st_size
    if swollen := [name for name, t in tensors.items() if t.numel() * t.element_size() > size]:
        raise ModelError(f"{path} has {size:,} bytes, but its tensor {swollen[0]} claims more; do not trust this file")
    return tensors


def _state_dict(found: Any, depth: int = 2) -> dict[str, Tensor]:
    """The state dict in a checkpoint, at the top or under one of the usual names."""
    if not isinstance(found, Mapping):
        return {}
    # Nested dicts first, because the top level may hold other tensors, such as a step count.
    for nest in _NESTS if depth else ():
        if inner := _state_dict(found.get(nest), depth - 1):
            return inner
    return {key: t.detach() for key, t in found.items() if isinstance(key, str) and isinstance(t, Tensor)}
