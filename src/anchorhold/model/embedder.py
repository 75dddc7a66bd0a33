"""Images become unit vectors: normalisation, backbone, one linear head, the unit sphere."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
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
from .compiled import compiled
from .fold import Folded, foldable, folded
from .frozen import Embed, embed_all, frozen
from .weights import EXPORT, METADATA, LoadReport, load_weights, saved_config

__all__ = ["Embedder", "embed_all", "frozen", "load_embedder", "save"]

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        sides = tuple(size or (usual_size(backbone),) * 2) if isinstance(size, Sequence | None) else (size, size)
        whole = all(isinstance(number, Integral) for number in (channels, dim or 0, *sides))
        if not whole or channels < 1 or (dim or 0) < 0 or len(sides) != 2 or min(sides) < 1:
            raise SettingsError(
                f"channels ({channels!r}), dim ({dim!r}) and size ({size!r}) have to be positive whole numbers"
            )
        saved = None if weights is None else saved_config(weights)
        if saved is not None and saved["channels"] == channels:
            mean, std = (_agreed(what, given, saved, weights) for what, given in (("mean", mean), ("std", std)))
        mean = _per_channel("mean", mean, _IMAGENET_MEAN if channels == 3 else (0.0,) * channels, channels)
        std = _per_channel("std", std, _IMAGENET_STD if channels == 3 else (1.0,) * channels, channels)
        if min(std) <= 0:
            raise SettingsError(f"std has to be positive in every channel, not {list(std)}")
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
        # torch.manual_seed would reseed every GPU as well, and fork_rng does not bring those back unasked.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            self.backbone, features = build_backbone(backbone, channels, self.size)
            self.head = nn.Linear(features, dim) if dim else nn.Identity()
            self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
            self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.dim = dim or features
        self.width = features  # of the backbone's pooled features
        self.weights_report: LoadReport | None = None
        if weights is not None:
            self.weights_report = load_weights(self.backbone, weights, backbone)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors (B, dim), in fp32 also under autocast; float64 stays float64."""
        return self._embed(images, lambda x: self.head(self.backbone(x)))

    def folded(self, fast: bool = False, pooled: bool = False) -> Embed | None:
        """This embedder as it is now, in eval mode, with BatchNorm folded: for `frozen`. None without BatchNorm.

        With `fast` it is compiled for the GPU, and used wherever autocast asks for bf16; `pooled` are its `features`.
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
        """The backbone's pooled features (B, width), before the head; `network` stands in for the backbone."""
        if images.ndim != 4 or images.shape[1] != len(self.mean) or not images.is_floating_point():
            raise ModelError(
                f"expected float images in [0, 1] of shape (B, {len(self.mean)}, H, W), "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        out: Tensor = (network or self.backbone)((images - self.mean) / self.std)
        # A norm in half precision is off by a per mille.
        return out.float() if out.dtype in (torch.float16, torch.bfloat16) else out

    def _embed(self, images: Tensor, network: Embed) -> Tensor:
        return F.normalize(self.features(images, network), dim=1)

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
        path = path / EXPORT
    report = asdict(model.weights_report) if model.weights_report else None
    about = json.dumps({"config": model.config, "weights": report})
    # Copies: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in model.state_dict().items()}
    with atomic(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, {METADATA: about})
    return path


def load_embedder(path: str | Path, device: str | torch.device = "cpu") -> Embedder:
    """The embedder that `save` wrote, from the file or from the run folder that holds it, in eval mode."""
    path = Path(path)
    if path.is_dir():
        path = path / EXPORT
    if not path.is_file():
        raise ModelError(f"there is no model at {path}: give a .safetensors file or a finished run folder")
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get(METADATA)
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


def _agreed(
    what: str, given: Sequence[float] | None, saved: Mapping[str, Any], weights: str | Path | None
) -> Sequence[float]:
    """The mean or std that a model of ours was trained with; another one would be another network."""
    own: Sequence[float] = saved[what]
    if given is not None and [float(value) for value in given] != list(own):
        raise ModelError(f"{weights} was trained with {what} {list(own)}, not {list(given)}: leave {what} out")
    return own
