"""Embedders and objectives whose best perturbation is known in closed form."""

from collections.abc import Callable

import torch
from torch import Tensor

from anchorhold.perturb.problem import Objective
from anchorhold.random import Key


def draw(*shape: int, name: str = "draw") -> Tensor:
    """Standard normal float64 numbers, the same on every machine."""
    return Key.of(0)(name).normal(torch.arange(shape[0]), shape[1:])


def linear_embedder(pixels: int, dim: int = 5) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """e(x) = W x and W (dim, pixels): not on the sphere, so that ⟨e, t⟩ is linear in x."""
    weight = draw(dim, pixels, name="linear")
    return lambda x: x.flatten(1) @ weight.T, weight


def towards(target: Tensor) -> Objective:
    """Climb ⟨e, t⟩ of the first view. Its maximum over the ball is ⟨Wx, t⟩ + ε‖Wᵀt‖₁ (Linf) or ε‖Wᵀt‖₂ (L2)."""
    return Objective(lambda e, positions: (e[:, 0] * target[positions]).sum(1))


def tanh_embedder(pixels: int, dim: int = 6) -> Callable[[Tensor], Tensor]:
    """A small smooth net onto the sphere."""
    first, second = draw(10, pixels, name="first"), draw(dim, 10, name="second")

    def embed(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(torch.tanh(x.flatten(1) @ first.T) @ second.T, dim=1)

    return embed
