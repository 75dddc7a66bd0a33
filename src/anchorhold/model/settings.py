"""Settings of the model."""

from dataclasses import dataclass
from typing import Literal

from ..errors import check, check_least, check_most

__all__ = ["LARGEST_DIM", "ModelSettings"]


LARGEST_DIM = 65_536  # dimensions of an embedding


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the embedder."""

    backbone: str = "resnet18"
    dim: int = 512
    weights: str = "imagenet"  # imagenet, timm:NAME.TAG, a file, a run folder, or "" for none
    freeze_batchnorm: bool = True
    train: Literal["all", "head", "lora"] = "all"  # everything, the last layers, or adapters and the last layers
    head: str = ""  # names of the last layers, as in fc or neck,fc; empty finds them
    lora_rank: int = 8  # of the adapters; lora_* are for train = lora
    lora_alpha: float = 16.0  # an adapter adds lora_alpha / lora_rank times its product
    lora_dropout: float = 0.0  # before an adapter, in training
    lora_targets: str = ""  # names of the layers with adapters, as in qkv,fc1; empty: all linear and convolutional ones

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
