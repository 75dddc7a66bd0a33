"""From files to frames on the device: decode once, keep the bytes, crop and flip on the model's device."""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import DataError, SettingsError
from ..interface import argument
from ..random import Key
from .decode import Square, fill, fill_shared, shape_of, square
from .splits import Split
from .workers import START, Shared, cores, enough_memory, hired

__all__ = ["Decoded", "ResidentStore", "Store", "centre_crop", "crop_flip", "decode", "readable", "resident"]

_RATIO = 4 / 3  # largest aspect ratio of a crop of random size (Szegedy et al. 2015)
_TRIES = 10  # number of draws of such a crop
_CHUNK = 16  # images per task: enough to hide the queue, few enough for a smooth progress bar
_MANY = 256  # images from which processes are faster than threads


@dataclass(frozen=True, eq=False)
class Decoded:
    """Images (N, H, W, C), their split, and "name: reason" for each skipped image."""

    images: Tensor
    split: Split
    skipped: tuple[str, ...] = ()


def decode(
    split: Split,
    size: int | Square | None,
    *,
    workers: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    skipping: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """All images of a split as one tensor; files become RGB bytes of exactly size × size.

    Images in memory stay unchanged, except that bytes of another size are resized. `skipping` is how the caller's
    interface skips unreadable images, for the error; "" where it cannot.
    """
    if on_bad_image not in ("fail", "skip"):
        raise SettingsError(f"{argument('on_bad_image')} is {on_bad_image!r}; choose fail or skip")
    if split.paths is None:
        assert split.images is not None
        _check_size(split, size)
        return Decoded(_resized(split.images, size), split)
    size = _check_size(split, size)
    shape, workers = (len(split), *shape_of(size), 3), workers or cores()
    with enough_memory(workers):
        shared = Shared.of(*shape) if _by_processes(workers, len(split)) else None
        images = torch.from_numpy(shared.rows) if shared else torch.empty(shape, dtype=torch.uint8)
    good, skipped = _read_all(split, size, shared or images.numpy(), workers, on_bad_image, skipping, progress)
    return Decoded(images, split) if good is None else Decoded(_compacted(images, good), split.keep(good), skipped)


def readable(
    split: Split,
    size: int | Square | None,
    *,
    workers: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    skipping: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Split, tuple[str, ...]]:
    """The split without unreadable files, and what was skipped; no image is kept in memory."""
    size = _check_size(split, size)
    good, skipped = _read_all(split, size, None, workers or cores(), on_bad_image, skipping, progress)
    return (split if good is None else split.keep(good)), skipped


def _check_size(split: Split, size: int | Square | None) -> int | Square:
    if size is not None and min(shape_of(size)) < 1:
        raise SettingsError(f"the image size must be at least 1, got {min(shape_of(size))}")
    if size is None and split.paths is not None:
        raise SettingsError(
            f"{split.name} has files of any size; set data.resize to the size they should have, e.g. 256"
        )
    return size or 0


def _read_all(
    split: Split,
    size: int | Square,
    room: Any,
    workers: int,
    on_bad_image: str,
    skipping: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Decode every file, into `room` if given. Returns a mask of the good ones (None: all), and the skipped ones."""
    paths, total, bad = split.paths or (), len(split), dict[int, str]()
    starts = range(0, total, _CHUNK)
    slices = [slice(start, min(start + _CHUNK, total)) for start in starts]
    pool: Executor
    if _by_processes(workers, total):
        pool, work = hired(workers, room), fill_shared
    else:
        pool, work = (
            ThreadPoolExecutor(workers),
            lambda place, *rest: fill(None if room is None else room[place], *rest),
        )
    try:
        with enough_memory(workers):
            # In order, so that an error always names the same image.
            found = pool.map(work, slices, [list(paths[each]) for each in slices], repeat(size))
            for start, part in zip(starts, found):
                if part and on_bad_image == "fail":
                    raise _unreadable(paths[start + part[0][0]], part[0][1], skipping)
                bad.update((start + row, reason) for row, reason in part)
                if progress is not None:
                    progress(min(start + _CHUNK, total), total)
    finally:
        pool.shutdown(cancel_futures=True)
    skipped = tuple(f"{split.sample(index)}: {reason}" for index, reason in bad.items())
    good = torch.ones(total, dtype=torch.bool)
    good[list(bad)] = False
    left = len(torch.unique(split.labels[good]))
    if left < (1 if split.asks else 2):  # queries may all be of one class
        images = "1 unreadable image" if len(bad) == 1 else f"{len(bad)} unreadable images"
        cause = f" after skipping {images}, the first {skipped[0]}" if bad else ""
        raise DataError(
            f"{split.name} has {left} class{'es' * (left != 1)} left{cause}; "
            f"it needs at least {'one' if split.asks else 'two'}"
        )
    return (good if bad else None), skipped


def _by_processes(workers: int, images: int) -> bool:
    """Whether processes decode the images, if they are cheap and there are many images; otherwise threads do."""
    # A daemonic process may not start processes of its own.
    return START == "fork" and workers > 1 and images >= _MANY and not current_process().daemon


def _unreadable(path: Path, reason: str, skipping: str) -> DataError:
    otherwise = f", or skip such images with {skipping}" if skipping else ""
    return DataError(f"cannot read {path}: {reason}; repair or remove it{otherwise}")


def _compacted(images: Tensor, good: Tensor) -> Tensor:
    """The rows of a mask, moved to the front one by one, since a second tensor might not fit into memory."""
    kept = good.nonzero().squeeze(1).tolist()
    for place, row in enumerate(kept):
        if place < row:
            images[place] = images[row]
    return images[: len(kept)]


def _resized(images: Tensor, size: int | Square | None) -> Tensor:
    """Byte images resized to the size; floats are points, not pictures, and stay unchanged."""
    if size is None or images.dtype != torch.uint8 or images.shape[1:3] == shape_of(size):
        return images
    if isinstance(size, Square):  # as a file of these pixels
        return torch.stack([_as_picture(frame, size) for frame in images])
    parts = [
        functional.interpolate(
            part.permute(0, 3, 1, 2).float(),
            (size, size),
            mode="bilinear",
            antialias=True,
            align_corners=False,
        )
        for part in torch.split(images, 1024)
    ]
    return torch.cat([part.round_().clamp_(0, 255).to(torch.uint8) for part in parts]).permute(0, 2, 3, 1).contiguous()


def _as_picture(frame: Tensor, size: Square) -> Tensor:
    """A frame of bytes (H, W, C) resized by Pillow; a grey one stays grey."""
    from PIL import Image

    grey = frame.shape[2] == 1
    pixels = square(Image.fromarray((frame[..., 0] if grey else frame).numpy()), size)
    return torch.from_numpy(pixels[..., :1].copy() if grey else pixels.copy())


class Store(Protocol):
    """A source of frames."""

    def frames(self, plan: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each 1-D tensor of ids its frames (n, H, W, C) on the device, in the plan's order."""
        ...


@dataclass(frozen=True, eq=False)
class ResidentStore:
    """All frames in memory; frames in host memory are copied to the device batch by batch."""

    images: Tensor
    device: torch.device

    def frames(self, plan: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each 1-D tensor of ids its frames (n, H, W, C) on the device, in the plan's order."""
        for ids in plan:
            ids = ids.to(self.images.device)
            if self.images.device == self.device:
                yield self.images.index_select(0, ids)
            else:
                # For an asynchronous copy only the gathered batch must be pinned, not the whole set.
                pin = self.device.type == "cuda"
                batch = torch.empty((len(ids), *self.images.shape[1:]), dtype=self.images.dtype, pin_memory=pin)
                torch.index_select(self.images, 0, ids, out=batch)
                yield batch.to(self.device, non_blocking=pin)


def resident(images: Tensor, device: torch.device | str) -> ResidentStore:
    """The frames on the device, or in host memory if they do not fit."""
    device = torch.device(device)
    try:
        if device.type == "cuda" and torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info(device)
            if images.nbytes > free // 2:  # leave room for the model and its gradients
                return ResidentStore(images.cpu(), device)
        held = images.to(device)
    except torch.cuda.OutOfMemoryError:
        held = images.cpu()
        return ResidentStore(held, device)
    return ResidentStore(held, held.device)  # held.device is "cuda:0" for "cuda"


def _unit(frames: Tensor) -> Tensor:
    """NHWC frames as NCHW float32 in [0, 1]; the memory stays NHWC (channels last)."""
    if frames.dtype == torch.uint8:
        # Divide by a tensor: for a plain number CUDA multiplies by the inverse, which is one bit off.
        frames = frames.float().div_(torch.full((), 255.0, device=frames.device))
    return frames.float().permute(0, 3, 1, 2)


def _check(frames: Tensor, size: int) -> None:
    height, width = frames.shape[1:3]
    if not 1 <= size <= min(height, width):
        raise SettingsError(
            f"a crop of {size} does not fit frames of {height}×{width}; choose 1 … {min(height, width)}"
        )


def crop_flip(
    frames: Tensor, size: int | None, key: Key, slots: Tensor, *, flip: bool = True, least: float = 0.0
) -> Tensor:
    """A random crop of each frame, mirrored half of the time; row i depends only on `key` and `slots[i]`.

    (B, H, W, C) becomes (B, C, size, size), float32 in [0, 1], channels last. Without a size nothing is cropped. With
    `least` above 0 the crop covers a random share of the frame, from `least` to 1. It is then scaled to `size`, or to
    the size of the frame if that is None.
    """
    count, height, width = frames.shape[:3]
    if len(slots) != count:
        raise SettingsError(f"got {count} frames but {len(slots)} slots; give one slot per frame")
    if size is not None:
        _check(frames, size)
    tall, wide = (size, size) if size is not None else (height, width)
    device = frames.device  # draws are made on the slots' device: so few are faster on a CPU
    mirrored = (key("flip").uniform(slots) < 0.5).to(device)
    if least > 0:
        top, left, high, broad = (part.to(device) for part in _boxes(height, width, least, key, slots))
        down, across = _taps(tall, top, high, height), _taps(wide, left, broad, width)
        if flip:
            across = torch.where(mirrored.reshape(-1, 1, 1), across.flip(1), across)
        part = torch.einsum("byh,bchw->bcyw", down, _unit(frames))
        scaled = torch.einsum("bxw,bcyw->bcyx", across, part)
        return scaled.clamp(0, 1).contiguous(memory_format=torch.channels_last)
    top, left = (key("top").integers(slots, height - tall + 1), key("left").integers(slots, width - wide + 1))
    row = top.to(device).unsqueeze(1) + torch.arange(tall, device=device)
    column = left.to(device).unsqueeze(1) + torch.arange(wide, device=device)
    if flip:
        column = torch.where(mirrored.unsqueeze(1), column.flip(1), column)
    batch = torch.arange(count, device=device).reshape(-1, 1, 1)
    return _unit(frames[batch, row.unsqueeze(2), column.unsqueeze(1)])


def _boxes(height: int, width: int, least: float, key: Key, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width (B,) of crops with random area and aspect ratio; the whole frame if none fits.

    The area is uniform, from `least` to 1 of the frame's. The logarithm of the aspect ratio, relative to the frame's,
    is uniform. The first of `_TRIES` draws that fits is used.
    """
    if least > 1:
        raise SettingsError(f"data.crop_least must be at most 1, got {least}")
    area = least + (1 - least) * key("area").uniform(slots, (_TRIES,))
    ratio = torch.exp((2 * key("ratio").uniform(slots, (_TRIES,)) - 1) * math.log(_RATIO))
    high, broad = (
        (n * s.sqrt()).round().long().clamp(min=1) for n, s in ((height, area / ratio), (width, area * ratio))
    )
    fits = (high <= height) & (broad <= width)
    first = fits.long().argmax(1, keepdim=True)
    none = ~fits.any(1)
    high, broad = (n.gather(1, first).squeeze(1) for n in (high, broad))
    high, broad = high.masked_fill(none, height), broad.masked_fill(none, width)
    return key("top").integers(slots, height - high + 1), key("left").integers(slots, width - broad + 1), high, broad


def _taps(out: int, start: Tensor, extent: Tensor, length: int) -> Tensor:
    """Weights (B, out, length) that scale [start, start + extent) of a line to `out` pixels, bilinear with antialias.

    Each output pixel is weighted by a triangle around its place in the crop, at least one input pixel wide.
    """
    start, extent = start.reshape(-1, 1, 1), extent.reshape(-1, 1, 1)
    places = torch.arange(max(out, length), device=start.device) + 0.5
    scale = extent / out
    here = places[:length] - start
    weights = (1 - (here - scale * places[:out, None]).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((here > 0) & (here < extent))
    return weights / weights.sum(2, keepdim=True)


def centre_crop(frames: Tensor, size: int | None) -> Tensor:
    """The centre of each frame, in the format of `crop_flip`."""
    if size is None:
        return _unit(frames)
    _check(frames, size)
    top, left = round((frames.shape[1] - size) / 2), round((frames.shape[2] - size) / 2)
    return _unit(frames[:, top : top + size, left : left + size].contiguous())
