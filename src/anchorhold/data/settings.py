"""Settings of data and batches."""

from dataclasses import dataclass
from typing import Literal

from ..errors import check, check_least, check_most

__all__ = ["DATASET_NAMES", "LARGEST_SIDE", "BatchSettings", "DataSettings"]


DATASET_NAMES = ("cub", "cars", "sop", "inshop", "folder", "csv", "digits", "gaussians")  # of datasets.DATASETS
LARGEST_SIDE = 16_384  # pixels


@dataclass(frozen=True)
class DataSettings:
    """The data set, and how its images are resized and cropped."""

    name: str = "folder"  # cub, cars, sop, inshop, folder, csv, digits, gaussians
    root: str = ""  # folder of the data set; digits and gaussians need none
    resize: int = 256  # resize every image to exactly this square; 0 does not resize
    crop: int = 224  # random crop in training, centre crop in test; 0 does not crop
    crop_least: float = (
        0.0  # above 0, training crops cover a random share of the square, at least this, and are rescaled
    )
    interpolation: Literal["bilinear", "bicubic", "lanczos", "nearest"] = "bilinear"  # of that resize
    proportions: bool = False  # if true, resize the shorter side and keep the centre, so that nothing is distorted
    flip: bool = True  # horizontal flips in training
    on_bad_image: Literal["fail", "skip"] = "fail"
    held_out: int = 0  # evaluate on the last N training classes instead of the test split
    store: Literal["auto", "resident", "stream"] = "auto"  # auto: resident, unless that takes half of the free memory
    workers: int = 0  # processes that decode images; 0 is one per core

    def __post_init__(self) -> None:
        check_least("data", self, resize=0, crop=0, crop_least=0, workers=0, held_out=0)
        check_most("data", self, resize=LARGEST_SIDE, workers=1024, held_out=10**6)
        check_most("data", self, crop=LARGEST_SIDE)
        check(
            self.crop_least <= 1,
            f"data.crop_least is a share of the area and must be between 0 and 1, got {self.crop_least}",
        )
        fits = not self.resize or self.crop <= self.resize
        check(fits, f"data.crop = {self.crop} is larger than data.resize = {self.resize}; set a smaller crop")


@dataclass(frozen=True)
class BatchSettings:
    """How batches are composed."""

    kind: Literal["pairs", "classes"] = "pairs"  # the papers' pairs, or P classes × K instances
    pairs: int = 112  # 56 on each of two GPUs in the code of Zhou & Patel 2022: 3,975 steps on CUB
    distinct: bool = (
        False  # if true, no pair is the same image twice; in the published code about one in sixty is on CUB
    )
    classes: int = 28
    instances: int = 4
    mining_pairs: int = 56  # mine triplets inside groups of N pairs; 0 is the whole batch

    def __post_init__(self) -> None:
        check_least("batch", self, pairs=1, classes=2, instances=2, mining_pairs=0)
        check_most("batch", self, pairs=2**16, classes=2**16, instances=2**16, mining_pairs=2**16)
        even = self.instances % 2 == 0
        check(even, f"batch.instances must be even, because images come in pairs, got {self.instances}")
