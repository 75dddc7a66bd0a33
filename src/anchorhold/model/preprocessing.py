"""Preprocessing of image files for a model; its record is saved with the model.

Decoding is the same as in training and audits: upright RGB, resized to a square, centre crop. For a model whose images
are not square and that has no record, files keep their proportions and get its shape. Torch is loaded when the
first image is prepared, so that records can be read without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.settings import LARGEST_SIDE
from ..errors import DataError, SettingsError
from ..interface import argument

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ..data.decode import Square
    from ..data.settings import DataSettings

__all__ = ["INTERPOLATION", "INTERPOLATIONS", "Preprocessing", "preprocessing_of", "record_of"]

INTERPOLATION = "bilinear"  # the usual
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos", "nearest")  # those of `data.settings`
_USUAL = 224  # side for models without a known size


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing of one model. Call it with a path or a PIL image.

    The model itself applies `mean` and `std`; the images that come out here are in [0, 1]. `assumed` means that the
    model has no record, and that the values follow from its size.
    """

    resize: int  # every file is resized to exactly this square
    crop: int = 0  # side of the centre crop; 0 does not crop
    interpolation: str = INTERPOLATION
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    assumed: bool = False
    in_memory: tuple[int, int] = (0, 0)  # resize and crop of a data set without files; 0 does nothing
    proportions: bool = False  # whether the shorter side is resized and the centre kept, as encoders have it
    shape: tuple[int, int] | None = None  # height and width that files get where the model's images are not square

    def __post_init__(self) -> None:
        if self.resize < 1 or self.crop < 0 or self.crop > self.resize:
            raise SettingsError(
                f"a crop of {self.crop} does not fit images of {self.resize}×{self.resize}; "
                f"{argument('crop')} must be at most {argument('resize')}"
            )

    def __call__(self, image: "str | Path | Image") -> "Tensor":
        """One image as float32 (C, H, W) in [0, 1], as in evaluations and audits."""
        import torch

        return self.views(torch.from_numpy(self.frame(image)).unsqueeze(0))[0]

    def __str__(self) -> str:
        if self.shape:
            size = "×".join(map(str, self.shape))
            return f"resize to cover {size} ({self.interpolation}), centre crop {size}"
        cut = f", centre crop {self.crop}×{self.crop}" if self.crop else ""
        whole = "resize the shorter side to {0}, centre {0}×{0}" if self.proportions else "resize to {0}×{0}"
        return f"{whole.format(self.resize)} ({self.interpolation}){cut}"

    @property
    def side(self) -> int:
        """The side of the resulting images."""
        return self.crop or self.resize

    @property
    def square(self) -> "int | Square":
        """How `data.decode` makes the frame."""
        from ..data.decode import Square, squared

        if self.shape:
            return Square(self.shape[0], self.interpolation, width=self.shape[1])
        return squared(self.resize, self.interpolation, self.proportions)

    @property
    def for_pictures(self) -> "int | Square":
        """What PIL images of a data set in memory are brought to."""
        return self.square if self.shape else self.resize

    def frame(self, image: "str | Path | Image") -> Any:
        """The image before the crop: a (resize, resize, 3) array of bytes, or (*shape, 3)."""
        from ..data.decode import pixels_of, square, why_unreadable

        if not isinstance(image, str | Path):
            return square(image, self.square).copy()
        try:
            return pixels_of(Path(image).expanduser(), self.square).copy()
        except Exception as error:  # Pillow may raise anything on a broken file
            raise DataError(f"cannot read {image}: {why_unreadable(error)}; give an image file") from None

    def views(self, frames: "Tensor") -> "Tensor":
        """Images (B, C, H, W) from the frames (B, …, 3) of files; a model of one channel gets grey images."""
        from ..data.store import centre_crop

        images = centre_crop(frames, self.crop or None)
        return images.mean(1, keepdim=True) if self.mean is not None and len(self.mean) == 1 else images

    def told(self, resize: int | None = None, crop: int | None = None) -> "Preprocessing":
        """The same with the user's resize and crop; without a record, resize is 256/224 of the crop.

        Both are squares, so they replace a shape.
        """
        if resize is None and crop is None:
            return self
        inner = (max(self.shape) if self.shape else self.crop) if crop is None else crop
        if resize is None:
            resize = _around(inner, self.side) if self.assumed else self.resize
        return replace(self, resize=resize, crop=inner, assumed=False, shape=None)

    def unusual(self) -> dict[str, Any]:
        """Interpolation and proportions for JSON, where they are not the usual ones."""
        if self.shape:
            return {"shape": "×".join(map(str, self.shape))}
        usual = self.interpolation == INTERPOLATION and not self.proportions
        return {} if usual else {"interpolation": self.interpolation, "proportions": self.proportions}

    def described(self) -> dict[str, Any]:
        """The values for JSON."""
        names = ("resize", "crop", "interpolation", "mean", "std", *(["proportions"] if self.proportions else []))
        names += ("shape",) if self.shape else ()
        return {name: asdict(self)[name] for name in names}

    @classmethod
    def for_size(
        cls, size: Sequence[int] | None, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> "Preprocessing":
        """The assumption for a model without a record: a crop of its size, with the papers' ratio 256 to 224.

        A size that is not square is no crop: files are resized to cover it, and their centre is kept.
        """
        side = max(size or (_USUAL,))
        if size and len(set(size)) > 1:
            return cls(side, mean=_tuple(mean), std=_tuple(std), assumed=True, shape=(size[0], size[1]))
        return cls(_around(side, side), side, mean=_tuple(mean), std=_tuple(std), assumed=True)

    @classmethod
    def recorded(
        cls, record: Mapping[str, Any], size: Sequence[int], mean: Sequence[float], std: Sequence[float]
    ) -> "Preprocessing":
        """The preprocessing of a record. With resize 0 (images in memory), files get the model's size."""
        resize, crop = record["resize"], record["crop"]
        if not resize and not crop and len(set(size)) > 1:
            made = cls.for_size(size, mean, std)
            return replace(made, interpolation=record["interpolation"], assumed=False)
        wide = resize or _around(crop, max(size))
        made = cls(wide, crop, record["interpolation"], _tuple(mean), _tuple(std), in_memory=(resize, crop))
        return replace(made, proportions=record.get("proportions", False))


def preprocessing_of(model: Any) -> Preprocessing:
    """A model's own preprocessing; for other modules, the assumption that follows from their size."""
    own = getattr(model, "preprocess", None)
    return own if isinstance(own, Preprocessing) else Preprocessing.for_size(getattr(model, "size", None))


def record_of(data: "DataSettings | Mapping[str, Any]") -> dict[str, Any]:
    """The settings that are saved with a model, checked: resize, crop, interpolation, and whether proportions stay."""
    known = data
    if not isinstance(known, Mapping):
        known = {"resize": known.resize, "crop": known.crop, "interpolation": known.interpolation}
        known |= {"proportions": True} if data.proportions else {}  # type: ignore[union-attr]
    record: dict[str, Any] = {"resize": 0, "crop": 0, "interpolation": INTERPOLATION} | dict(known)
    resize, crop = record["resize"], record["crop"]
    known_names = set(record) <= {"resize", "crop", "interpolation", "proportions"}
    whole = known_names and all(type(side) is int and 0 <= side <= LARGEST_SIDE for side in (resize, crop))
    whole = whole and record["interpolation"] in INTERPOLATIONS and type(record.get("proportions", False)) is bool
    if not whole or 0 < resize < crop:
        raise SettingsError(
            f"invalid preprocessing {record}: give whole numbers for resize and crop, crop at most resize, "
            f"interpolation one of {', '.join(INTERPOLATIONS)}, and proportions true or false"
        )
    return record


def _around(crop: int, side: int) -> int:
    """The resize for a crop, in the ratio 256 to 224; without a crop, the side itself."""
    return round(crop * 256 / 224) if crop else side


def _tuple(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)
