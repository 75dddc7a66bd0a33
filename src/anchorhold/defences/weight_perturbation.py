"""Adversarial weight perturbation (AWP, Wu et al. 2020): train where a small change of the weights hurts most.

    min over θ of L(θ + v),   v = γ ‖w‖ g / ‖g‖ for each weight tensor w with its gradient g of L(θ).

The perturbed weights are other tensors, w + v, through which the gradient reaches w. The model's own weights are never
written, so there is nothing to restore, and the optimiser steps from where they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .step import Step

__all__ = ["with_perturbed_weights"]


class _Replaced(nn.Module):
    """A model that computes with other tensors in place of some of its own."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.tensors = model, tensors

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = functional_call(self.model, dict(self.tensors), (images,))
        return out


def with_perturbed_weights(step: Step, loss: Callable[[Step], Tensor], gamma: float) -> Step:
    """The same step, whose model has the weights w + v; `loss` is what training minimises in a step.

    Biases and the weights of normalisation layers, which have one dimension, stay as they are.
    """
    weights = {name: p for name, p in step.model.named_parameters() if p.requires_grad and p.ndim > 1}
    if not weights or not gamma:
        return step
    # This pass must not count in the running statistics of BatchNorm.
    aside: dict[str, Tensor] = {name: b.clone() for name, b in step.model.named_buffers()}
    # Nor in what a loss of yours or the defence remembers, or in the logs.
    kept = [(b, b.clone()) for b in step.companion.buffers()] if step.companion is not None else []
    apart: dict[str, Any] = {"graphed": None, "state": dict(step.state), "log": lambda name, value, weight=1.0: None}
    trial = replace(step, model=_Replaced(step.model, aside), **apart)
    gradients = torch.autograd.grad(loss(trial), list(weights.values()), allow_unused=True)
    for buffer, before in kept:
        buffer.copy_(before)
    step.ranks.summed(gradients)
    moved = {
        name: p + gamma * p.detach().norm() * g / g.norm().clamp(min=torch.finfo(g.dtype).tiny)
        for (name, p), g in zip(weights.items(), gradients)
        if g is not None
    }
    return replace(step, model=_Replaced(step.model, moved), graphed=None)
