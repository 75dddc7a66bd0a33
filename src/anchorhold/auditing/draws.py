"""A model that gives other vectors each time: it is attacked and measured through the mean over its draws.

An attack that climbs one draw climbs its noise, and looks weak (Athalye et al., ICML 2018: expectation over
transformation). The mean over n draws has n times less variance. n follows from the measured noise: the error of the
mean is at most a twentieth of the distance between neighbours, with no more than 64 draws.

All numbers are those of a service that answers with this mean, as randomised smoothing does. Beside them stands the
clean R@1 of single answers. When an attack is over, its results are drawn anew: the worst of many noisy answers would
count as a success that nobody can repeat.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..geometry import distance_matrix
from ..model.frozen import Embed, embed_all
from ..random import Key

__all__ = ["MOST_DRAWS", "averaged", "draws_needed", "on_draws", "redrawn", "still"]

IMAGES, PILOT = 16, 8  # images and draws by which noise is measured
REPEAT = 1e-4  # of the vectors' length: rounding of a deterministic model stays below
SHARE = 0.05
LEAST_DRAWS, MOST_DRAWS = 4, 64


def draws_needed(embed: Embed, images: Tensor) -> int:
    """How many draws of the model its mean needs; 1 for a deterministic one."""
    images = images[:IMAGES]
    first, again = (embed_all(embed, [images]) for _ in range(2))
    size = torch.linalg.vector_norm(first, dim=1).mean().clamp(min=1e-12)
    if float(torch.linalg.vector_norm(first - again, dim=1).max() / size) <= REPEAT:
        return 1
    drawn = torch.stack([first, again, *(embed_all(embed, [images]) for _ in range(PILOT - 2))])
    noise = float((drawn - drawn.mean(0)).square().sum(2).sum() / (PILOT - 1) / len(images)) ** 0.5
    mean = drawn.mean(0)
    apart = distance_matrix(mean, mean).fill_diagonal_(torch.inf).amin(1)
    near = float(apart[apart.isfinite()].median()) if len(images) > 1 else float(size)
    wanted = math.inf if near <= 0 else (noise / (SHARE * near)) ** 2
    return int(min(max(math.ceil(min(wanted, MOST_DRAWS)), LEAST_DRAWS), MOST_DRAWS))


def averaged(embed: Embed, draws: int) -> Embed:
    """The mean of that many draws; of unit vectors, on the unit sphere again."""

    def run(images: Tensor) -> Tensor:
        total = embed(images)
        unit = torch.linalg.vector_norm(total.detach(), dim=1, keepdim=True)
        for _ in range(draws - 1):
            total = total + embed(images)
        mean = total / draws
        on_sphere = bool(((unit - 1).abs() < 1e-3).all())
        return mean / torch.linalg.vector_norm(mean, dim=1, keepdim=True).clamp(min=1e-12) if on_sphere else mean

    return run


def redrawn(key: Key, batch: int = 0) -> None:
    """Seed torch's generators for one batch, so that a resumed audit draws what one without a stop draws."""
    torch.manual_seed(key(batch).value & (2**63 - 1))


@contextmanager
def still(where: torch.device, seed: int) -> Iterator[None]:
    """A random model draws from torch: here the same each time, and your generators stay as they were."""
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def on_draws(draws: int) -> str:
    """What is said of a random model."""
    return f"the model is random: each embedding is the mean over {draws} draws"
