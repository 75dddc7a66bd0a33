"""Windows at random places of images, one per image, as Square moves them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..random import Key

__all__ = ["Windows"]


@dataclass(frozen=True, eq=False)
class Windows:
    """A window of the same size in each of N images of one size."""

    top: Tensor  # (N, 1)
    left: Tensor  # (N, 1)
    size: tuple[int, int]  # height and width of a window
    image: tuple[int, int]  # of an image

    @classmethod
    def drawn(
        cls, key: Key, query: int, ids: Tensor, image: tuple[int, int], size: tuple[int, int], name: str = ""
    ) -> "Windows":
        """Windows at uniform places; a size beyond the image is that of the image. `name` tells two draws apart."""
        (tall, wide), (height, width) = (max(1, min(one, most)) for one, most in zip(size, image)), image
        top = key(f"{name}top", query).integers(ids, height - tall + 1)[:, None]
        left = key(f"{name}left", query).integers(ids, width - wide + 1)[:, None]
        return cls(top, left, (tall, wide), image)

    def inside(self) -> Tensor:
        """(N, H, W) which pixels lie in the window."""
        (down, across), (tall, wide) = self._offsets(), self.size
        return ((down >= 0) & (down < tall))[:, :, None] & ((across >= 0) & (across < wide))[:, None]

    def placed(self, pattern: Tensor) -> Tensor:
        """(N, H, W) a pattern (N, tall, wide) at the window's place, and 0 elsewhere."""
        (down, across), (tall, wide) = self._offsets(), self.size
        rows = torch.arange(len(pattern), device=pattern.device)[:, None, None]
        spread = pattern[rows, down.clamp(0, tall - 1)[:, :, None], across.clamp(0, wide - 1)[:, None]]
        return spread * self.inside()

    def _offsets(self) -> tuple[Tensor, Tensor]:
        """(N, H) and (N, W) the distance of each row and column from the window's first."""
        row, column = (torch.arange(side, device=self.top.device) for side in self.image)
        return row - self.top, column - self.left
