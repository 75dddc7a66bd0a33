"""A split with its decoded images, in memory or streamed, cropped for training or for test."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..console import Report
from ..distributed import Ranks, neighbours
from ..interface import setting
from ..random import Key
from .colour import jittered
from .decode import Square, squared
from .settings import DataSettings
from .splits import Split
from .store import ResidentStore, Store, centre_crop, crop_flip, decode, readable, resident
from .stream import StreamStore, memory_left

__all__ = ["Images", "bytes_held", "load_images"]


@dataclass(frozen=True)
class Images:
    """A split with its decoded images, and how they are cropped."""

    split: Split
    store: Store
    labels: Tensor  # on the device
    crop: int | None
    flip: bool
    crop_least: float = 0.0
    resize: int | None = None  # the side to which files were resized
    ranks: Ranks = field(default_factory=Ranks)
    square: int | Square | None = None  # how that was done
    jitter: float = 0.0

    def augmented(self, plan: list[Tensor], keys: Iterator[Key]) -> Iterator[Tensor]:
        """Augmented training images of the planned ids: random crop, flip and colours, keyed by the batch position."""
        for frames, key in zip(self._frames(plan), keys):
            slots = torch.arange(len(frames))
            views = crop_flip(frames, self.crop, key, slots, flip=self.flip, least=self.crop_least)
            yield jittered(views, self.jitter, key("colour"), slots) if self.jitter else views

    def _frames(self, plan: list[Tensor]) -> Iterator[Tensor]:
        """The frames of whole batches; of streamed files each rank reads its share."""
        if self.ranks.size == 1 or isinstance(self.store, ResidentStore):
            yield from self.store.frames(plan)
            return
        shares = [ids[self.ranks.share(len(ids))] for ids in plan]
        for ids, frames in zip(plan, self.store.frames(shares)):
            yield self.ranks.gathered(frames, len(ids))

    def plain(self, ids: Tensor | None = None, batch: int = 256) -> Iterator[Tensor]:
        """Centre-cropped test images in order, in batches."""
        ids = torch.arange(len(self.labels)) if ids is None else ids
        for frames in self.store.frames(list(ids.split(batch))):
            yield centre_crop(frames, self.crop)


def load_images(
    split: Split,
    settings: DataSettings,
    device: torch.device,
    report: Report,
    ranks: Ranks | None = None,
    skipping: str | None = None,
    frame: Square | None = None,
) -> Images:
    """Load a split into GPU memory, else into host memory if it does not fit, else stream it from disk.

    All files are decoded once at the start in every case, so that a bad one is found now and not hours later.
    `skipping` is how the caller's interface skips those; by default the setting of a training.
    `frame` replaces the square of the settings, for a model whose images are not square; `resize` is its longer side.
    """
    ranks = ranks or Ranks()
    # All ranks must stream if one does; the ranks before this one may have filled the memory.
    side, streams = settings.resize or None, ranks.any(_streams(split, settings))
    size = frame or (None if side is None else squared(side, settings.interpolation, settings.proportions))
    with report.task(f"{'checking' if streams else 'decoding'} {split.name}", len(split)) as advance:
        how: dict[str, Any] = {
            "workers": settings.workers or None,
            "on_bad_image": settings.on_bad_image,
            "skipping": setting("data.on_bad_image", "skip") if skipping is None else skipping,
            "progress": lambda done, total: advance(done, ""),
        }
        store: Store
        if streams:
            kept, skipped = readable(split, size, **how)
            store = StreamStore(kept.paths or (), size or 0, device, settings.workers)
            place = f"streamed by {store.workers} processes"
        else:
            decoded = decode(split, size, **how)
            kept, skipped, store = decoded.split, decoded.skipped, resident(decoded.images, device)
            place = f"held in {'GPU' if store.images.is_cuda else 'host'} memory"
    if skipped:
        count = f"{len(skipped)} unreadable image{'s' * (len(skipped) > 1)}"
        report.say(f"skipped {count} of {split.name}; the first: {skipped[0]}")
    if split.paths is not None:
        report.say(f"{split.name}: {len(kept):,} images, {_bytes(kept, settings) / 1e9:.1f} GB, {place}")
    labels = kept.labels.to(device)
    crop = settings.crop or None
    return Images(kept, store, labels, crop, settings.flip, settings.crop_least, side, ranks, size, settings.jitter)


def _bytes(split: Split, settings: DataSettings) -> int:
    return len(split) * settings.resize**2 * 3


def bytes_held(split: Split, settings: DataSettings) -> int:
    """Bytes of memory that the decoded images of a split will take; 0 if they are streamed."""
    if split.images is not None:
        return split.images.nbytes
    return 0 if _streams(split, settings) else _bytes(split, settings)


def _streams(split: Split, settings: DataSettings) -> bool:
    """Whether to stream the images: on request, or if they would fill more than half of the free memory."""
    if split.paths is None or settings.store == "resident":
        return False
    return settings.store == "stream" or _bytes(split, settings) * neighbours() > memory_left() // 2
