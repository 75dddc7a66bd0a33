"""Settings of data and batches."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from ..errors import check, check_least, check_most

__all__ = ["DATASET_NAMES", "LARGEST_SIDE", "WHOLE", "BatchSettings", "DataSettings"]


DATASET_NAMES = ("cub", "cars", "sop", "inshop", "folder", "csv", "digits", "gaussians")  # of datasets.DATASETS
LARGEST_SIDE = 16_384  # pixels
WHOLE = {  # images of the official data sets: training and test, or training, queries and gallery
    "cub": (5864, 5924),
    "cars": (8054, 8131),
    "sop": (59551, 60502),
    "inshop": (25882, 14218, 12612),
}


@dataclass(frozen=True)
class DataSettings:
    """The data set, and how its images are resized and cropped."""

    name: Annotated[str, "Data set; folder and csv are your own.", DATASET_NAMES] = "folder"
    root: Annotated[str, "Folder of the data set, or the CSV; digits and gaussians need none."] = ""
    resize: Annotated[int, "Resize every image to exactly this square, in pixels; 0 does not resize."] = 256
    crop: Annotated[int, "Side of the square crop: random in training, centred in test; 0 does not crop."] = 224
    test_crop: Annotated[int, "Side of the centre crop of test images, e.g. 256; 0: as data.crop."] = 0
    crop_least: Annotated[float, "Above 0, training crops cover a random share of the image, at least this."] = 0.0
    interpolation: Annotated[Literal["bilinear", "bicubic", "lanczos", "nearest"], "Interpolation of that resize."] = (
        "bilinear"
    )
    proportions: Annotated[bool, "Resize the shorter side and keep the centre, so that nothing is distorted."] = False
    flip: Annotated[bool, "Mirror half of the training images."] = True
    jitter: Annotated[float, "Above 0, brightness, contrast and saturation in training vary by up to this share."] = 0.0
    on_bad_image: Annotated[Literal["fail", "skip"], "What to do with an unreadable image."] = "fail"
    beside: Annotated[
        str, "Folders of more images without labels, separated by commas; for distil and distil-logits."
    ] = ""
    held_out: Annotated[int, "Evaluate on the last N training classes instead of the test split."] = 0
    store: Annotated[
        Literal["auto", "resident", "stream"],
        "Keep images in memory or read them again; auto streams what fills half of it.",
    ] = "auto"
    workers: Annotated[int, "Processes that decode images; 0 is one per core."] = 0

    def __post_init__(self) -> None:
        check_least("data", self, resize=0, crop=0, test_crop=0, crop_least=0, workers=0, held_out=0, jitter=0)
        check_most("data", self, jitter=1)
        check_most("data", self, resize=LARGEST_SIDE, workers=1024, held_out=10**6)
        check_most("data", self, crop=LARGEST_SIDE, test_crop=LARGEST_SIDE)
        check(
            self.crop_least <= 1,
            f"data.crop_least is a share of the area and must be between 0 and 1, got {self.crop_least}",
        )
        fits = not self.resize or self.crop <= self.resize
        check(fits, f"data.crop = {self.crop} is larger than data.resize = {self.resize}; set a smaller crop")
        fits = not self.resize or self.test_crop <= self.resize
        check(fits, f"data.test_crop = {self.test_crop} is larger than data.resize = {self.resize}; set a smaller one")

    @property
    def at_test(self) -> "DataSettings":
        """How test images are prepared, and the files that the trained model gets: with their own crop."""
        return replace(self, crop=self.test_crop, test_crop=0) if self.test_crop else self


@dataclass(frozen=True)
class BatchSettings:
    """How batches are composed."""

    kind: Annotated[
        Literal["pairs", "classes", "images"],
        "A batch is drawn as pairs of one class, as classes × instances, or as single images.",
    ] = "pairs"
    # 56 on each of two GPUs in the code of Zhou & Patel 2022: 3,975 steps on CUB
    pairs: Annotated[int, "Pairs in a batch, which has twice as many images."] = 112
    # In the published code about one pair in sixty is the same image twice on CUB.
    distinct: Annotated[bool, "Never pair an image with itself, where its class has others."] = False
    classes: Annotated[int, "Classes in a batch of the kind classes."] = 28
    instances: Annotated[int, "Images of each class in a batch of the kind classes; an even number."] = 4
    images: Annotated[int, "Images in a batch of the kind images, for losses that need no pairs."] = 112
    mining_pairs: Annotated[int, "Mine triplets inside groups of N pairs; 0 is the whole batch."] = 56

    def __post_init__(self) -> None:
        check_least("batch", self, pairs=1, classes=2, instances=2, mining_pairs=0, images=2)
        check_most("batch", self, pairs=2**16, classes=2**16, instances=2**16, mining_pairs=2**16, images=2**17)
        even = self.instances % 2 == 0
        check(even, f"batch.instances must be even, because images come in pairs, got {self.instances}")

    @property
    def work(self) -> float:
        """The pairs by which the length of a step is judged before it is known."""
        return self.images / 2 if self.kind == "images" else self.pairs
