"""The embedder: normalisation, backbone, one linear head, projection to the unit sphere."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ..data.settings import LARGEST_SIDE
from ..data.trained import TrainedOn
from ..errors import ModelError, RunError, SettingsError, brief
from ..interface import worded
from ..runs.fields import dig, field, number, parsed
from ..runs.folder import EXPORT, Run
from ..runs.sealed import save_sealed
from ..runs.writing import atomic
from .backbones import backbone as build_backbone
from .backbones import usual_size
from .fast.compiled import compiled
from .fast.fold import Folded, foldable, folded
from .frozen import Embed
from .preprocessing import Preprocessing, record_of
from .settings import LARGEST_DIM
from .sharing import OnHub
from .weights import METADATA, LoadReport, Source, check_model, check_numbers, load_weights, located, saved_config

__all__ = ["Embedder", "embedder_from", "freeze_statistics", "load_embedder", "save"]

_CHANNELS = 1024  # the most that an image may have
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Embedder(OnHub, nn.Module):
    """Images in [0, 1] to unit vectors: (B, C, H, W) -> (B, dim).

    The model applies mean and std itself, so that perturbations are measured in pixels. If you give neither `size` nor
    `preprocessing`, and `weights` is a model that Anchorhold saved, both are taken from it.

    Args:
        backbone: a name of timm, or small or mlp for tiny images.
        dim: the length of the vectors; 0 or None omits the head.
        weights: a name ("imagenet", "timm:NAME.TAG", "hf:owner/name@revision:file"), a file or a run folder.
        mean: one number per channel, for pixels in [0, 1]; by default ImageNet's.
        std: one number per channel, as `mean`.
        channels: of the images: 3, or 1 for grey.
        size: the side, or (height, width), of its images; the default is the backbone's usual one (28 or 224).
        freeze_batchnorm: whether BatchNorm keeps its running statistics in training, as in the papers.
        seed: of the random weights.
        preprocessing: how files become images, {"resize": 256, "crop": 224}; training sets it.

    >>> model = Embedder("small", dim=16, channels=1)
    >>> model(torch.rand(2, 1, 8, 8)).norm(dim=1).allclose(torch.ones(2))
    True
    """

    mean: Tensor
    std: Tensor
    preset = ""  # timm:NAME, if that is how it was named

    def __init__(
        self,
        backbone: str = "resnet18",
        dim: int | None = 512,
        weights: Source | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        channels: int = 3,
        size: int | Sequence[int] | None = None,
        freeze_batchnorm: bool = True,
        seed: int = 0,
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        weights = None if weights is None else located(weights)  # one download, and one commit
        saved = None if weights is None else saved_config(weights)
        if size is None and preprocessing is None and saved is not None and "preprocessing" in saved:
            size, preprocessing = saved["size"], saved["preprocessing"]
        sides = tuple(size or (usual_size(backbone),) * 2) if isinstance(size, Sequence | None) else (size, size)
        whole = all(isinstance(number, Integral) for number in (channels, dim or 0, *sides))
        if not whole or channels < 1 or (dim or 0) < 0 or len(sides) != 2 or min(sides) < 1:
            raise SettingsError(
                f"channels ({channels!r}), dim ({dim!r}) and size ({size!r}) must be positive whole numbers"
            )
        if max(sides) > LARGEST_SIDE or (dim or 0) > LARGEST_DIM or channels > _CHANNELS:
            raise SettingsError(
                f"channels ({channels}), dim ({dim}) and size ({size}) may be at most {_CHANNELS:,}, "
                f"{LARGEST_DIM:,} and {LARGEST_SIDE:,}"
            )
        if saved is not None and saved["channels"] == channels:
            mean, std = (_agreed(what, given, saved, weights) for what, given in (("mean", mean), ("std", std)))
        mean = _per_channel("mean", mean, _IMAGENET_MEAN if channels == 3 else (0.0,) * channels, channels)
        std = _per_channel("std", std, _IMAGENET_STD if channels == 3 else (1.0,) * channels, channels)
        if not all(0 < each < math.inf for each in std):
            raise SettingsError(f"std must be positive in every channel, got {list(std)}")
        self.size = (int(sides[0]), int(sides[1]))
        self.config: dict[str, Any] = {
            "backbone": backbone,
            "dim": int(dim or 0),
            "mean": mean,
            "std": std,
            "channels": int(channels),
            "size": list(self.size),
            "freeze_batchnorm": freeze_batchnorm,
            "seed": seed,
        }
        if preprocessing is not None:
            self.config["preprocessing"] = record_of(preprocessing)
        self.trained_on: TrainedOn | None = None
        self.still: tuple[nn.Module, ...] = ()  # BatchNorm outside of the part that trains, set by `tuning`
        # Not torch.manual_seed, which would also reseed every GPU; fork_rng does not restore those here.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            self.backbone, features = build_backbone(backbone, channels, self.size)
            self.head = nn.Linear(features, dim) if dim else nn.Identity()
            self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
            self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.dim = dim or features
        self.width = features  # of the backbone's pooled features
        self.weights_report: LoadReport | None = None
        self.source = weights  # where the weights came from, for what else lies there; not saved
        if weights is not None:
            self.weights_report = load_weights(self.backbone, weights, backbone)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors (B, dim), in fp32 even under autocast; float64 stays float64."""
        return self._embed(images, lambda x: self.head(self.backbone(x)))

    def folded(self, fast: bool = False, pooled: bool = False) -> Embed | None:
        """A snapshot of this embedder in eval mode with BatchNorm folded, for `frozen`; None without BatchNorm.

        With `fast` it is compiled for the GPU and used under autocast to bf16. With `pooled` it returns `features`.
        """
        if not foldable(self.backbone):
            return None
        kept: list[tuple[Folded, dict[str, Tensor]]] = []

        def numbers() -> tuple[Folded, dict[str, Tensor]]:
            backbone = folded(self.backbone)
            assert backbone is not None
            return backbone, {} if pooled else {name: p.detach() for name, p in self.head.named_parameters()}

        def plain(images: Tensor) -> Tensor:
            kept[:] = kept or [numbers()]
            backbone, head = kept[0]
            if pooled:
                return self.features(images, backbone)
            return self._embed(images, lambda x: functional_call(self.head, head, (backbone(x),)))

        if not fast or not self.mean.is_cuda:
            kept.append(numbers())
            return plain

        def parts() -> tuple[Folded, dict[str, Tensor]]:
            backbone, head = numbers()
            return backbone, {n: p.to(torch.bfloat16) for n, p in head.items()} | {"mean": self.mean, "std": self.std}

        program = compiled(self, parts, unit=not pooled)

        def run(images: Tensor) -> Tensor:
            half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
            return program(images) if half and images.dtype == torch.float32 else plain(images)

        return run

    def features(self, images: Tensor, network: Embed | None = None) -> Tensor:
        """The backbone's pooled features (B, width), before the head; `network` may replace the backbone."""
        if images.ndim != 4 or images.shape[1] != len(self.mean) or not images.is_floating_point():
            raise ModelError(
                f"expected float images in [0, 1] of shape (B, {len(self.mean)}, H, W), "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        out: Tensor = (network or self.backbone)((images - self.mean) / self.std)
        # A norm in half precision has an error of about 0.1 %.
        return out.float() if out.dtype in (torch.float16, torch.bfloat16) else out

    def _embed(self, images: Tensor, network: Embed) -> Tensor:
        return F.normalize(self.features(images, network), dim=1)

    @property
    def preprocess(self) -> Preprocessing:
        """The preprocessing of files for this model: `model(model.preprocess("cat.jpg")[None])`."""
        mean, std, record = self.config["mean"], self.config["std"], self.config.get("preprocessing")
        if record is None:
            return Preprocessing.for_size(self.size, mean, std)
        return Preprocessing.recorded(record, self.size, mean, std)

    def train(self, mode: bool = True) -> "Embedder":
        """As in any module, but frozen BatchNorm keeps its running statistics; its weight and bias are trained."""
        super().train(mode)
        if self.config["freeze_batchnorm"]:
            freeze_statistics(self)
        for module in self.still:
            module.eval()
        return self

    def save(self, path: str | Path) -> Path:
        """Write settings and weights as one safetensors file; in a folder it is model.safetensors."""
        return save(self, path)


def freeze_statistics(model: nn.Module) -> None:
    """Let BatchNorm keep its running statistics while the rest of a model trains."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def save(model: Embedder, path: str | Path) -> Path:
    """Write an embedder as one safetensors file, atomically, and return its path."""
    path = Path(path)
    if path.is_dir():
        path = path / EXPORT
    report = asdict(model.weights_report) if model.weights_report else None
    seen = model.trained_on.record() if model.trained_on else None
    about = {"config": model.config, "weights": report, "trained_on": seen}
    # Copies, because safetensors refuses tensors that share memory, such as tied weights.
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in model.state_dict().items()}
    with atomic(path) as temporary:
        save_sealed(tensors, temporary, METADATA, about)
    return path


def load_embedder(path: str | Path, device: str | torch.device = "cpu") -> Embedder:
    """Load an embedder from a file that `save` wrote, or from its run folder, in eval mode."""
    path = Path(path)
    if path.is_dir():
        path = path / EXPORT
    if not path.is_file():
        raise ModelError(f"no model at {path}; give a .safetensors file or a finished run folder")
    check_model(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get(METADATA)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is not a complete safetensors file ({error}); save or copy it again") from None
    if about is None:
        raise ModelError(
            f"{path} was not saved by Anchorhold; load bare weights with "
            + worded(f"BACKBONE={path}", "ah.Embedder(backbone, weights=FILE)")
        )
    try:
        known = parsed(about)
        if "module" in (config := field(known, "config", dict, path, _VERSION)):
            preset = config.get("preset")
            name, whose = (preset, preset) if isinstance(preset, str) else ("module:function", "a module of yours")
            module = f"ah.load({preset!r})" if isinstance(preset, str) else "…"
            raise ModelError(
                f"{path} holds the weights of {whose}: give it too, as in "
                + worded(f"{name}={path}", f"ah.load({str(path)!r}, module={module})")
            )
        model = embedder_from(field(known, "config", dict, path, _VERSION), path)
        check_numbers(tensors, str(path), model.state_dict())
        model.weights_report = LoadReport(**known["weights"]) if known["weights"] else None
        model.trained_on = TrainedOn.read(known.get("trained_on"))
        model.to(tensors["mean"].dtype).load_state_dict(tensors)  # copied out of the file's memory map
    except RunError as error:
        raise ModelError(str(error)) from None
    except (KeyError, TypeError, ValueError, RuntimeError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path} does not fit this version of Anchorhold ({reason}); {_VERSION}") from None
    if path.name == EXPORT:
        model.trained_on = model.trained_on or TrainedOn.beside(path.parent)
        model.config |= _preprocessing_beside(path.parent) if "preprocessing" not in model.config else {}
    return model.to(device).eval()


def _preprocessing_beside(folder: Path) -> dict[str, Any]:
    """The preprocessing from run.json in the same folder, for older models without their own record."""
    with suppress(RunError, SettingsError):
        data = dig(Run(folder).read_json(), "settings", "data")
        if not isinstance(data, Mapping):
            return {}
        return {"preprocessing": record_of({name: data[name] for name in ("resize", "crop") if name in data})}
    return {}


_VERSION = "use the version that saved it"
_KINDS: dict[str, type] = {"backbone": str, "mean": list, "std": list, "size": list}
_KINDS |= {"dim": int, "channels": int, "seed": int, "freeze_batchnorm": bool, "preprocessing": dict}


def embedder_from(config: Mapping[str, Any], where: object) -> Embedder:
    """Build the embedder that a file's settings describe, without its weights; `where` names the file in errors."""
    if strange := sorted(set(map(str, config)) - set(_KINDS)):  # e.g. `weights`, which would be read or downloaded
        raise ModelError(f"{where} has unknown settings ({', '.join(strange)[:80]}); {_VERSION}")
    for name, kind in _KINDS.items():
        if name in config and not (name == "size" and config[name] is None):
            field(config, name, kind, where, _VERSION)
    try:
        return Embedder(**config)
    except (TypeError, RuntimeError, MemoryError) as error:  # settings of another version, or too large a model
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{where} does not describe a model of this version ({reason}); {_VERSION}") from None


def _per_channel(what: str, given: Sequence[float] | None, usual: Sequence[float], channels: int) -> list[float]:
    values = [number(value) for value in (usual if given is None else given)]
    if None in values:
        raise SettingsError(f"{what} must be numbers, got {brief(given)}")
    if len(values) != channels:
        raise SettingsError(f"{what} needs one value per channel ({channels}), got {len(values)}")
    return [float(value) for value in values if value is not None]


def _agreed(
    what: str, given: Sequence[float] | None, saved: Mapping[str, Any], weights: Source | None
) -> Sequence[float]:
    """The mean or std that a saved model was trained with; a different one is refused."""
    own: Sequence[float] = saved[what]
    if given is not None and list(given) != list(own):
        raise ModelError(f"{weights} was trained with {what} {list(own)}, not {list(given)}; leave out {what}")
    return own
