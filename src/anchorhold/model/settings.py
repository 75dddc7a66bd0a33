"""Settings of the model."""

from dataclasses import dataclass
from typing import Annotated

from ..errors import check_least, check_most

__all__ = ["LARGEST_DIM", "ModelSettings"]


LARGEST_DIM = 65_536  # dimensions of an embedding


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the embedder."""

    backbone: Annotated[str, "Network, by its timm name; small and mlp are ours."] = "resnet18"
    dim: Annotated[int, "Dimensions of an embedding; 0 leaves out the head, so the features are the embedding."] = 512
    weights: Annotated[
        str, "Initial weights: imagenet, timm:NAME, hf:owner/name, a file, a run folder; empty for none."
    ] = "imagenet"
    freeze_batchnorm: Annotated[bool, "Keep the running statistics of BatchNorm as they are."] = True

    def __post_init__(self) -> None:
        check_least("model", self, dim=0)
        check_most("model", self, dim=LARGEST_DIM)
