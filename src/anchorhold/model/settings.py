"""Settings of the model."""

from dataclasses import dataclass

from ..errors import check_least, check_most

__all__ = ["LARGEST_DIM", "ModelSettings"]


LARGEST_DIM = 65_536  # dimensions of an embedding


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the embedder."""

    backbone: str = "resnet18"
    dim: int = 512
    weights: str = "imagenet"  # imagenet, timm:NAME.TAG, hf:owner/name:file, a file, a run folder, or "" for none
    freeze_batchnorm: bool = True

    def __post_init__(self) -> None:
        check_least("model", self, dim=0)
        check_most("model", self, dim=LARGEST_DIM)
