"""Where a perturbed image may lie: within ε of the clean one, and within the range of pixels."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import DataError
from ..random import Key
from .settings import check_radius

__all__ = ["Ball", "Region"]

RANGE_SLACK = 1e-5  # resizing may round a pixel this far out of its range


@dataclass(frozen=True)
class Ball:
    """{x : ‖x − clean‖ ≤ ε, low ≤ x ≤ high}, for each image of a (units, views, …) tensor on its own.

    Args:
        eps: the radius: the maximum change of a pixel (Linf) or of the whole image (L2).
        norm: linf or l2.
        low: the lowest value of a pixel.
        high: the highest value of a pixel.
        signed: L2 with steps along signs and starts in the box of side 2ε (eqs. 6 and 7 of robust-init).

    >>> Ball(0.1).project(torch.tensor([[[0.9, 0.2]]]), torch.tensor([[[0.5, 0.15]]]))
    tensor([[[0.6000, 0.2000]]])
    """

    eps: float
    norm: Literal["linf", "l2"] = "linf"
    low: float = 0.0
    high: float = 1.0
    signed: bool = False

    def __post_init__(self) -> None:
        check_radius(self.eps, self.norm, self.low, self.high)

    def admit(self, images: Tensor) -> None:
        """Refuse images that the range would clamp. Images on a GPU are not checked: that would wait for it."""
        if images.is_cuda or not images.numel():
            return
        low, high = (end.item() for end in images.detach().aminmax())
        if not self.low - RANGE_SLACK <= low <= high <= self.high + RANGE_SLACK:
            raise DataError(
                f"images hold pixels from {low:g} to {high:g}, not in [{self.low:g}, {self.high:g}]; "
                "bring them into that range, or set low and high to theirs"
            )

    def project(self, x: Tensor, clean: Tensor) -> Tensor:
        """The nearest point of the ball (Linf); for L2 a point of it on the way to the centre."""
        if self.norm == "linf":
            x = torch.minimum(torch.maximum(x, clean - self.eps), clean + self.eps)
        else:
            shift = x - clean
            x = clean + shift * (self.eps / _length(shift).clamp(min=self.eps or 1.0))
        # Clean images lie in the range, so clamping moves towards them and never out of the ball.
        return x.clamp(self.low, self.high)

    def step(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        """The steepest step of length `size` in this norm. A zero gradient moves nothing.

        Nor does a gradient that is not a number: the pixel (signs), or the image (L2), where it is, stays.
        """
        if self.norm == "linf" or self.signed:
            return x + size * gradient.sign()  # the sign of NaN is 0
        direction = size * gradient / _length(gradient).clamp(min=torch.finfo(gradient.dtype).tiny)
        return x + direction.nan_to_num_(nan=0.0)

    def start(self, clean: Tensor, key: Key, ids: Tensor) -> Tensor:
        """A random point of the ball for each image, uniform by volume; if `signed`, one of the box, projected."""
        shape = clean.shape[1:]
        if self.norm == "linf" or self.signed:
            shift = (2 * key.uniform(ids, shape, clean.dtype) - 1) * self.eps
        else:
            direction = key("direction").normal(ids, shape, clean.dtype)
            pixels = direction[0, 0].numel() if len(direction) else 1
            radius = key("radius").uniform(ids, (shape[0],)).pow(1 / pixels).to(clean.dtype)
            shift = direction / _length(direction) * self.eps * radius.reshape(*radius.shape, *[1] * (len(shape) - 1))
        return self.project(clean + shift, clean)


def _length(x: Tensor) -> Tensor:
    """L2 norm of each image of a (units, views, …) tensor, shaped to broadcast."""
    length: Tensor = torch.linalg.vector_norm(x.flatten(2), dim=2)
    return length.reshape(*x.shape[:2], *[1] * (x.ndim - 2))


class Region:
    """A ball around some clean images, with its bounds computed once. A move passes over the pixels three times."""

    def __init__(self, ball: Ball, clean: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> None:
        self.ball, self.clean, self.ends = ball, clean, ends
        if ball.norm == "linf" and ends is None:
            # Both ends are clamped to both limits: rounding may put a clean pixel outside of the range.
            low, high = ((clean + shift).clamp(ball.low, ball.high) for shift in (-ball.eps, ball.eps))
            self.ends = low, high

    def rows(self, index: Tensor) -> "Region":
        """The region of some of the images."""
        ends = None if self.ends is None else (self.ends[0][index], self.ends[1][index])
        return Region(self.ball, self.clean[index] if ends is None else self.clean, ends)

    def along(self, x: Tensor, direction: Tensor, size: float) -> Tensor:
        """`project` of x + size · direction, for directions in units of a pixel (Linf)."""
        assert self.ends is not None
        return torch.clamp(x + size * direction, *self.ends)

    def move(self, x: Tensor, gradient: Tensor, size: float) -> Tensor:
        """`project` of `step`."""
        if self.ends is None:
            return self.ball.project(self.ball.step(x, gradient, size), self.clean)
        moved = gradient.sign()
        torch.add(x, moved, alpha=size, out=moved)
        return torch.clamp(moved, *self.ends, out=moved)
