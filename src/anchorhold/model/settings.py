"""Settings of the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..errors import check, check_least, check_most

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
    train: Annotated[Literal["all", "head", "lora"], "What trains: all, the last layers, or also adapters."] = "all"
    head: Annotated[str, "Names of the last layers, such as fc or neck,fc; empty finds them."] = ""
    lora_rank: Annotated[int, "Rank of the adapters, for model.train=lora."] = 8
    lora_alpha: Annotated[float, "An adapter adds lora_alpha / lora_rank times its product."] = 16.0
    lora_dropout: Annotated[float, "Dropout before an adapter, in training."] = 0.0
    lora_targets: Annotated[str, "Names of layers with adapters, such as qkv,fc1; empty: linear and convolutions."] = ""

    def __post_init__(self) -> None:
        check_least("model", self, dim=0, lora_rank=1, lora_dropout=0)
        check_most("model", self, dim=LARGEST_DIM, lora_rank=4096, lora_alpha=10**6)
        check(self.lora_alpha > 0, f"model.lora_alpha must be above 0, got {self.lora_alpha}")
        check(self.lora_dropout < 1, f"model.lora_dropout is a share below 1, got {self.lora_dropout}")
        given = self.train != "all" or not self.head
        check(given, "model.head is for model.train = head or lora: set that too, or leave it out")
        check(
            self.train == "lora" or not self.lora_targets,
            "model.lora_targets is for model.train = lora: set that too, or leave it out",
        )
