"""From files to frames on the device: decode once, hold the bytes, crop and flip where the model is."""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import DataError, SettingsError
from ..random import Key
from .decode import fill, fill_shared
from .splits import Split
from .workers import START, Shared, cores, died, hired

__all__ = ["Decoded", "ResidentStore", "Store", "centre_crop", "crop_flip", "decode", "readable", "resident"]

_RATIO = 4 / 3  # how much wider than high, or higher than wide, a crop of random size may be (Szegedy et al. 2015)
_TRIES = 10  # draws of such a crop until one fits its frame
_CHUNK = 16  # images that are taken at once: enough to hide the queue, few enough for a smooth progress bar
_MANY = 256  # images from which processes pay


@dataclass(frozen=True, eq=False)
class Decoded:
    """Images (N, H, W, C), the split they belong to, and "name: reason" for each that was skipped."""

    images: Tensor
    split: Split
    skipped: tuple[str, ...] = ()


def decode(
    split: Split,
    size: int | None,
    *,
    workers: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """All images of a split as one tensor, files as RGB bytes squeezed to exactly size × size.

    Images that are in memory come back as they are, or resized where they are bytes of another size.
    """
    if on_bad_image not in ("fail", "skip"):
        raise SettingsError(f"on_bad_image is {on_bad_image!r}; choose fail or skip")
    if split.paths is None:
        assert split.images is not None
        _check_size(split, size)
        return Decoded(_resized(split.images, size), split)
    size = _check_size(split, size)
    shape, workers = (len(split), size, size, 3), workers or cores()
    shared = Shared.of(*shape) if _by_processes(workers, len(split)) else None
    images = torch.from_numpy(shared.rows) if shared else torch.empty(shape, dtype=torch.uint8)
    good, skipped = _read_all(split, size, shared or images.numpy(), workers, on_bad_image, progress)
    return Decoded(images, split) if good is None else Decoded(_compacted(images, good), split.keep(good), skipped)


def readable(
    split: Split,
    size: int | None,
    *,
    workers: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Split, tuple[str, ...]]:
    """What `decode` would leave of a split of files, and what it would skip, with no image kept in memory."""
    size = _check_size(split, size)
    good, skipped = _read_all(split, size, None, workers or cores(), on_bad_image, progress)
    return (split if good is None else split.keep(good)), skipped


def _check_size(split: Split, size: int | None) -> int:
    if size is not None and size < 1:
        raise SettingsError(f"images of size {size} do not exist; ask for 1 or more")
    if size is None and split.paths is not None:
        raise SettingsError(f"{split.name} is files of any size; say to which size they are resized, such as 256")
    return size or 0


def _read_all(
    split: Split,
    size: int,
    room: Any,
    workers: int,
    on_bad_image: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Read every file, into `room` if given: a mask of the good ones (None: all), and why the others are not."""
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
        # In order, so that the image an error names does not depend on who was first.
        found = pool.map(work, slices, [list(paths[each]) for each in slices], repeat(size))
        for start, part in zip(starts, found):
            if part and on_bad_image == "fail":
                raise _unreadable(paths[start + part[0][0]], part[0][1])
            bad.update((start + row, reason) for row, reason in part)
            if progress is not None:
                progress(min(start + _CHUNK, total), total)
    except BrokenProcessPool:
        raise died(workers) from None
    finally:
        pool.shutdown(cancel_futures=True)
    skipped = tuple(f"{split.sample(index)}: {reason}" for index, reason in bad.items())
    good = torch.ones(total, dtype=torch.bool)
    good[list(bad)] = False
    left = len(torch.unique(split.labels[good]))
    if left < (1 if split.asks else 2):  # queries of one class may be asked of a gallery of many
        cause = f" after {len(bad)} unreadable images were skipped, the first {skipped[0]}" if bad else ""
        raise DataError(
            f"{split.name} has {left} classes left{cause}; it needs at least {'one' if split.asks else 'two'}"
        )
    return (good if bad else None), skipped


def _by_processes(workers: int, images: int) -> bool:
    """Whether processes read them: where those are cheap and there is much to do; else threads do."""
    # A process of a pool may have no processes of its own.
    return START == "fork" and workers > 1 and images >= _MANY and not current_process().daemon


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(
        f"cannot read {path}: {reason}; mend or remove it, or go on without such images by --on-bad-image skip"
    )


def _compacted(images: Tensor, good: Tensor) -> Tensor:
    """The rows of a mask moved to the front, one by one: a second tensor could be more than there is room for."""
    kept = good.nonzero().squeeze(1).tolist()
    for place, row in enumerate(kept):
        if place < row:
            images[place] = images[row]
    return images[: len(kept)]


def _resized(images: Tensor, size: int | None) -> Tensor:
    """Bytes in memory at size × size; floats are points, not pictures, and stay."""
    if size is None or images.dtype != torch.uint8 or images.shape[1:3] == (size, size):
        return images
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


class Store(Protocol):
    """Where frames come from, whatever holds them."""

    def frames(self, plan: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each 1-D tensor of ids its frames (n, H, W, C) on the device, in the plan's order."""
        ...


@dataclass(frozen=True, eq=False)
class ResidentStore:
    """All frames in memory; those that do not lie on the device are copied to it batch by batch."""

    images: Tensor
    device: torch.device

    def frames(self, plan: Iterable[Tensor]) -> Iterator[Tensor]:
        """For each 1-D tensor of ids its frames (n, H, W, C) on the device, in the plan's order."""
        for ids in plan:
            ids = ids.to(self.images.device)
            if self.images.device == self.device:
                yield self.images.index_select(0, ids)
            else:
                # The gathered batch is what must be pinned for a copy that does not wait, not the whole set.
                pin = self.device.type == "cuda"
                batch = torch.empty((len(ids), *self.images.shape[1:]), dtype=self.images.dtype, pin_memory=pin)
                torch.index_select(self.images, 0, ids, out=batch)
                yield batch.to(self.device, non_blocking=pin)


def resident(images: Tensor, device: torch.device | str) -> ResidentStore:
    """The frames on the device, or in host memory where the device has no room for them."""
    device = torch.device(device)
    try:
        if device.type == "cuda" and torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info(device)
            if images.nbytes > free // 2:  # the model and its gradients want room too
                return ResidentStore(images.cpu(), device)
        held = images.to(device)
    except torch.cuda.OutOfMemoryError:
        held = images.cpu()
        return ResidentStore(held, device)
    return ResidentStore(held, held.device)  # "cuda" has become "cuda:0" here


def _unit(frames: Tensor) -> Tensor:
    """NHWC frames as NCHW float32 in [0, 1] whose memory stays NHWC (channels last)."""
    if frames.dtype == torch.uint8:
        # By a tensor on the device: CUDA multiplies where the divisor is a plain number, one bit off.
        frames = frames.float().div_(torch.full((), 255.0, device=frames.device))
    return frames.float().permute(0, 3, 1, 2)


def _check(frames: Tensor, size: int) -> None:
    height, width = frames.shape[1:3]
    if not 1 <= size <= min(height, width):
        raise SettingsError(
            f"a crop of {size} does not fit frames of {height}×{width}; ask for 1 … {min(height, width)}"
        )


def crop_flip(
    frames: Tensor, size: int | None, key: Key, slots: Tensor, *, flip: bool = True, least: float = 0.0
) -> Tensor:
    """A random crop of each frame, mirrored half of the time; row i depends on `key` and `slots[i]` alone.

    (B, H, W, C) becomes (B, C, size, size), float32 in [0, 1], channels last; no size, no crop. With `least` above 0
    the crop covers a random share of the frame, from `least` to all of it, and is scaled to that size (or, without
    one, to the frame's).
    """
    count, height, width = frames.shape[:3]
    if len(slots) != count:
        raise SettingsError(f"{count} frames came with {len(slots)} slots; give one for each")
    if size is not None:
        _check(frames, size)
    tall, wide = (size, size) if size is not None else (height, width)
    device = frames.device  # the draws are made where the slots are: a few are faster without a GPU
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
    """Top, left, height and width (B,) of crops with random area and proportions, the whole frame where none fits.

    The area is uniform, from `least` to 1 of the frame's, and the proportions, relative to the frame's, are uniform in
    their logarithm; of `_TRIES` such pairs the first that fits is taken.
    """
    if least > 1:
        raise SettingsError(f"a crop covers a share of its frame, at most 1, not {least}")
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

    A triangle around each output pixel's place in the crop, as wide as an output pixel where that is more than one.
    """
    start, extent = start.reshape(-1, 1, 1), extent.reshape(-1, 1, 1)
    places = torch.arange(max(out, length), device=start.device) + 0.5
    scale = extent / out
    here = places[:length] - start
    weights = (1 - (here - scale * places[:out, None]).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((here > 0) & (here < extent))
    return weights / weights.sum(2, keepdim=True)


def centre_crop(frames: Tensor, size: int | None) -> Tensor:
    """The middle of each frame, in the same format as `crop_flip` gives."""
    if size is None:
        return _unit(frames)
    _check(frames, size)
    top, left = round((frames.shape[1] - size) / 2), round((frames.shape[2] - size) / 2)
    return _unit(frames[:, top : top + size, left : left + size].contiguous())
