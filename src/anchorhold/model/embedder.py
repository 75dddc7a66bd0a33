"""Images become unit vectors: normalisation, backbone, one linear head, the unit sphere."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ModelError, SettingsError
from ..record import atomic
from .backbones import backbone as build_backbone
from .backbones import usual_size
from .fold import folded
from .frozen import Embed, embed_all, frozen
from .weights import LoadReport, load_weights

__all__ = ["Embedder", "embed_all", "frozen", "load_embedder", "save"]

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_METADATA = "anchorhold"  # the entry of a safetensors file's metadata that holds settings and provenance
_EXPORT = "model.safetensors"  # the model's name in a run folder


class Embedder(nn.Module):
    """Images in [0, 1] to unit vectors: (B, C, H, W) -> (B, dim).

    Mean and std live here, so that perturbations are measured in pixels. `dim` 0 or None leaves the head out.
    `size` is the side, or (height, width), of the images the model is for; None takes the backbone's usual one
    (28 or 224).

    >>> model = Embedder("small", dim=16, channels=1)
    >>> model(torch.rand(2, 1, 8, 8)).norm(dim=1).allclose(torch.ones(2))
    True
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: str = "resnet18",
        dim: int | None = 512,
        weights: str | Path | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        channels: int = 3,
        size: int | Sequence[int] | None = None,
        freeze_batchnorm: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sides = (size, size) if isinstance(size, int) else tuple(size or (usual_size(backbone),) * 2)
        if channels < 1 or (dim or 0) < 0 or len(sides) != 2 or min(sides) < 1:
            raise SettingsError(f"channels ({channels}), dim ({dim}) and size ({size}) have to be positive")
        mean = _per_channel("mean", mean, _IMAGENET_MEAN if channels == 3 else (0.0,) * channels, channels)
        std = _per_channel("std", std, _IMAGENET_STD if channels == 3 else (1.0,) * channels, channels)
        if min(std) <= 0:
            raise SettingsError(f"std has to be positive in every channel, not {list(std)}")
        self.size = (sides[0], sides[1])
        self.config: dict[str, Any] = {
            "backbone": backbone,
            "dim": dim or 0,
            "mean": mean,
            "std": std,
            "channels": channels,
            "size": list(self.size),
            "freeze_batchnorm": freeze_batchnorm,
            "seed": seed,
        }
        # torch.manual_seed would reseed every GPU as well, and fork_rng does not bring those back unasked.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            self.backbone, features = build_backbone(backbone, channels, self.size)
            self.head = nn.Linear(features, dim) if dim else nn.Identity()
            self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
            self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.dim = dim or features
        self.weights_report: LoadReport | None = None
        if weights is not None:
            self.weights_report = load_weights(self.backbone, weights, backbone)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors (B, dim), in fp32 also under autocast; float64 stays float64."""
        return self._embed(images, lambda x: self.head(self.backbone(x)))

    def folded(self) -> Embed | None:
        """This embedder as it is now, in eval mode, with BatchNorm folded: for `frozen`. None without BatchNorm."""
        backbone = folded(self.backbone)
        if backbone is None:
            return None
        head = {name: p.detach() for name, p in self.head.named_parameters()}
        return lambda images: self._embed(images, lambda x: functional_call(self.head, head, (backbone(x),)))

    def _embed(self, images: Tensor, network: Embed) -> Tensor:
        if images.ndim != 4 or images.shape[1] != len(self.mean) or not images.is_floating_point():
            raise ModelError(
                f"expected float images in [0, 1] of shape (B, {len(self.mean)}, H, W), "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        out = network((images - self.mean) / self.std)
        if out.dtype in (torch.float16, torch.bfloat16):
            out = out.float()  # a norm in half precision is off by a per mille
        return F.normalize(out, dim=1)

    def train(self, mode: bool = True) -> "Embedder":
        """Like any module's, but frozen BatchNorm keeps its running statistics; its weight and bias train."""
        super().train(mode)
        if self.config["freeze_batchnorm"]:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def save(self, path: str | Path) -> Path:
        """Write settings and weights as one safetensors file; into a folder, as model.safetensors."""
        return save(self, path)


def save(model: Embedder, path: str | Path) -> Path:
    """Write an embedder as one safetensors file, whole or not at all, and say where it is."""
    path = Path(path)
    if path.is_dir():
        path = path / _EXPORT
    report = asdict(model.weights_report) if model.weights_report else None
    about = json.dumps({"config": model.config, "weights": report})
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in model.state_dict().items()}
    with atomic(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, {_METADATA: about})
    return path


def load_embedder(path: str | Path, device: str | torch.device = "cpu") -> Embedder:
    """The embedder that `save` wrote, from the file or from the run folder that holds it, in eval mode."""
    path = Path(path)
    if path.is_dir():
        path = path / _EXPORT
    if not path.is_file():
        raise ModelError(f"there is no model at {path}: give a .safetensors file or a finished run folder")
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get(_METADATA)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is no whole safetensors file ({error}): save or copy it again") from None
    if about is None:
        raise ModelError(f"{path} was not saved by Anchorhold: load bare weights with Embedder(backbone, weights=FILE)")
    try:
        known = json.loads(about)
        model = Embedder(**known["config"])
        model.weights_report = LoadReport(**known["weights"]) if known["weights"] else None
        model.to(tensors["mean"].dtype).load_state_dict(tensors)  # copied out of the file's memory map
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{path} does not fit this version of Anchorhold ({reason}): use the version that saved it"
        ) from None
    return model.to(device).eval()


def _per_channel(what: str, given: Sequence[float] | None, usual: Sequence[float], channels: int) -> list[float]:
    values = [float(value) for value in (usual if given is None else given)]
    if len(values) != channels:
        raise SettingsError(f"{what} has {len(values)} values for {channels} channels: give one for each")
    return values
