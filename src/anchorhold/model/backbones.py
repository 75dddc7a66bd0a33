"""Backbones: networks from images to pooled features.

Our own nets are for small images and quick runs; every other name is timm's. Ours have no BatchNorm, and their
gradients are deterministic on a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, lacks_memory, nearest

__all__ = ["backbone", "is_own", "sides_of", "usual_size"]

Size = tuple[int, int]  # height, width


class _Quadrants(nn.Module):
    """Mean over each quarter of the map: (B, C, H, W) -> (B, 4C) for any H, W ≥ 1."""

    # The windows of AdaptiveAvgPool2d(2), whose CUDA gradient uses atomics and is not deterministic.
    def forward(self, maps: Tensor) -> Tensor:
        height, width = (maps.shape[-2] + 1) // 2, (maps.shape[-1] + 1) // 2
        rows, columns = (slice(height), slice(-height, None)), (slice(width), slice(-width, None))
        return torch.cat([maps[..., r, c].mean((-2, -1)) for r in rows for c in columns], dim=1)


class _Flat(nn.Module):
    """(B, C, H, W) -> (B, features), with a clear error for images of another size."""

    def __init__(self, features: int, size: Size) -> None:
        super().__init__()
        self.features, self.size = features, size

    def forward(self, maps: Tensor) -> Tensor:
        flat = maps.flatten(1)
        if flat.shape[1] != self.features:
            raise ModelError(
                f"this backbone was built for images of {self.size[0]}×{self.size[1]} pixels and got another size; "
                "resize the images, or build it with their size"
            )
        return flat


def _small(channels: int, size: Size) -> tuple[nn.Module, int]:
    """Three convolutions for images from 8×8 to 28×28: a step in milliseconds on a CPU."""
    net = nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        _Quadrants(),
        nn.Linear(256, 128),
        nn.ReLU(),
    )
    return net, 128


def _c2f2(channels: int, size: Size) -> tuple[nn.Module, int]:
    """C2F2 of the papers (two convolutions, two linear layers, for 28×28); the last layer is the embedder's head."""
    pixels = (size[0] // 4) * (size[1] // 4)
    net = nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        _Flat(64 * pixels, size),
        nn.Linear(64 * pixels, 1024),
        nn.ReLU(),
    )
    return net, 1024


def _mlp(channels: int, size: Size) -> tuple[nn.Module, int]:
    """Two hidden layers on the raw pixels: the fastest net, for tests and toy data."""
    inputs = channels * size[0] * size[1]
    net = nn.Sequential(
        _Flat(inputs, size),
        nn.Linear(inputs, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
    )
    return net, 128


_OWN: dict[str, Callable[[int, Size], tuple[nn.Module, int]]] = {"small": _small, "c2f2": _c2f2, "mlp": _mlp}


def is_own(name: str) -> bool:
    """Whether a backbone is our own; such backbones have no pretrained weights."""
    return name in _OWN


def usual_size(name: str) -> int:
    """The usual image side of a backbone: 28 for our own nets, 224 for timm's.

    >>> usual_size("c2f2"), usual_size("resnet18")
    (28, 224)
    """
    return 28 if name in _OWN else 224


def sides_of(net: Any) -> tuple[int, int] | None:
    """The one size (height, width) of images that a timm net takes, such as a ViT's; None where any will do."""
    patches = getattr(net, "patch_embed", None)
    sides = getattr(patches, "img_size", None)
    if sides is None or not getattr(patches, "strict_img_size", True):
        return None
    return int(sides[0]), int(sides[1])


def backbone(name: str, channels: int = 3, size: Size | None = None) -> tuple[nn.Module, int]:
    """A module from images to pooled features (B, F), and F; "c2f2", "mlp" and ViTs use `size`.

    >>> net, features = backbone("small", channels=1)
    >>> net(torch.zeros(2, 1, 8, 8)).shape == (2, features)
    True
    """
    if name in _OWN:
        return _OWN[name](channels, size or (usual_size(name),) * 2)

    import timm  # takes a second to import, and our own nets do not need it

    if not timm.is_model(name):
        names = [*_OWN, *timm.list_models()]
        raise ModelError(f"no backbone {name!r}; {nearest(name, names, 'timm.list_models() lists them')}")
    net: Any = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels)
    if size is not None and tuple(size) != sides_of(net) and dict(net.default_cfg or {}).get("fixed_input_size"):
        net = _resized(net, name, channels, size)
    # num_features is of the last feature map; some nets (MobileNetV3, VGG) have a layer after pooling.
    return net, int(getattr(net, "head_hidden_size", None) or net.num_features)


def _resized(net: Any, name: str, channels: int, size: Size) -> Any:
    """A timm net that is for images of one size, made for another; it is tried once."""
    import timm

    usual, sides = sides_of(net), tuple(size)
    try:
        if usual is not None:
            net = timm.create_model(name, pretrained=False, num_classes=0, in_chans=channels, img_size=sides)
        with torch.no_grad():
            net.eval()(torch.zeros(1, channels, *sides))
    except Exception as error:  # each net has its own way to say so
        if lacks_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{name} cannot take images of {sides[0]}×{sides[1]} ({reason}): choose another size or backbone"
        ) from None
    return net.train()
