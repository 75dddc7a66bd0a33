"""Free adversarial training with hardness manipulation: the pass of each training step also serves the attack.

Zhou & Patel 2022 (after equation 5) note that one Δr = sign(∂H/∂r) raises hardness and loss alike, and leave it for the
future to reuse training's gradients as Shafahi et al. 2019 do ("Adversarial training for free"). A batch is replayed m
times:

    for replay 1 … m:  train with L_T(a + r_a, p + r_p, n + r_n),
                       r ← Proj(r + α · Δr) of triplets with H < H_D; the others stay.

The first replay is clean, unless it starts at random or carries on the perturbation of the batch before. LGA follows
the loss of the replay before.

With `reuse = loss` Δr is what the training step has computed, at no cost. But a triplet with H ≤ −γ has no loss: its
gradient is zero, and it stays clean even below its destination.
With ICS or a loss of yours, it is the gradient of all that trains. With `reuse = hardness` Δr is taken from H in the
same forward pass, by a second backward pass.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import AnchorholdError, check
from ..triplets import hardness
from .hardness import ALL, destination_of, embedded, log_change, loss_of, source_of, whose_turn
from .settings import FreeSettings
from .step import Step, changed

__all__ = ["free_hardness_manipulation"]

CARRIED = "perturbation"  # in the state


def free_hardness_manipulation(step: Step, settings: FreeSettings) -> Iterator[Tensor]:
    """Replay the batch m times; each replay trains on the images as the gradients of those before have moved them."""
    step, members, memory = whose_turn(step, settings)
    step.graphed = None  # a CUDA graph of the model has no gradients of its images
    with step.frozen() as embed:
        source = source_of(step, settings, embed)
    clean, replays = step.batch.images[source.triplets], max(settings.steps, 1)
    carries = f"{CARRIED}{memory.removeprefix('previous_loss')}" if settings.carry and _attacks(settings) else ""
    moved, work = _begin(step, settings, clean[:, members], carries), clean.new_zeros(())
    for replay in range(replays):
        last = replay == replays - 1
        goal = destination_of(step, settings, source, memory)
        moved = moved.detach().requires_grad_()
        units = clean.clone()
        units[:, members] = moved
        after = embedded(step, settings, units, source.triplets)
        check(after.requires_grad, "free training moves images by its own steps: choose hm-lga in a loop of yours")
        loss = loss_of(step, settings, after, source.triplets, memory)
        height = hardness(*after[:, ALL].unbind(1))
        below = height.detach() < goal
        gradient, climbs = None, _attacks(settings) and bool(carries or not last)
        if climbs and settings.reuse == "hardness":
            (gradient,) = torch.autograd.grad(height.sum(), moved, retain_graph=True)
        if replay == 0:
            step.log("active_first", below.double().mean())
        if last:
            step.log("active_last", below.double().mean())
            log_change(step, source, after, members, changed(clean, units.detach()))
        del after, units, height  # or their graph would outlive the optimiser step
        yield loss
        if climbs:
            gradient = _of_unfinished(step, moved.grad if gradient is None else gradient, below)
            moved = settings.ball.step(moved.detach(), gradient, settings.alpha)
            moved = settings.ball.project(moved, clean[:, members])
            work = work + gradient.flatten(1).any(1).sum() * gradient.shape[1]
    step.log("image_steps", work)  # passes whose gradient moved an image; training made them too
    if carries:
        step.state[carries] = _kept(step.state.get(carries), moved.detach() - clean[:, members])


def _attacks(settings: FreeSettings) -> bool:
    """Whether images move at all: not in a benign batch, nor where the destination is the source."""
    return settings.raises and settings.steps > 0


def _begin(step: Step, settings: FreeSettings, clean: Tensor, carries: str) -> Tensor:
    """Where the images (U, V, …) of the first replay are: clean, at random, or moved as the batch before was."""
    before = step.state.get(carries)
    if before is not None:
        start = clean.clone()
        start[: len(before)] += before[: len(clean)].to(clean)
        return settings.ball.project(start, clean)
    if settings.start == "random" and settings.raises:
        return settings.ball.start(clean, step.key("start")("start", 0), torch.arange(len(clean), device=clean.device))
    return clean


def _of_unfinished(step: Step, gradient: Tensor | None, below: Tensor) -> Tensor:
    """The gradient of triplets below their destination; zero for the others."""
    if gradient is None:
        raise AnchorholdError("free training needs loss.backward() of each loss before the next: train with ah.fit")
    step.ranks.summed([gradient])  # each rank has that of its own images
    return torch.where(below.reshape(-1, *[1] * (gradient.ndim - 1)), gradient, 0)


def _kept(before: Tensor | None, now: Tensor) -> Tensor:
    """The perturbation for the next batch: a short batch leaves what the rows after it had."""
    if before is None or len(before) <= len(now):
        return now
    return torch.cat([now, before[len(now) :].to(now)])
