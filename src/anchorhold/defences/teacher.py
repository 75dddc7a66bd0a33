"""A frozen teacher t holds clean embeddings in place while a model learns to resist.

    min_θ L(θ)   subject to   gap(θ) = mean(1 − cos(f_θ(x), t(x))) ≤ `drift`

by dual ascent: training minimises L + μ · (gap − drift). After each step μ ← max(0, μ + `drift_rate` · (gap − drift)).
μ begins at 1. It grows while embeddings are too far from the teacher's, and falls to 0 where they are near enough.
"""

from pathlib import Path

import torch
from torch import Tensor

from ..errors import ModelError, check
from ..geometry import cosine
from ..interface import worded
from ..model.embedder import Embedder, load_embedder
from ..model.wrap import fingerprint_of
from .proxy_settings import ProxySettings
from .step import Step

__all__ = ["held", "teacher_for", "teacher_of"]

MULTIPLIER = "drift_multiplier"


def teacher_of(settings: ProxySettings, device: torch.device | str = "cpu") -> Embedder:
    """The teacher that the settings name, frozen, from its run folder or file; another one than recorded is refused."""
    check(
        not settings.teacher_hash or Path(settings.teacher).exists(),
        f"no teacher at {settings.teacher}; if it has moved, give its new place: "
        + worded("--teacher PLACE", 'own={"teacher": PLACE}'),
    )
    teacher = load_embedder(settings.teacher, device).requires_grad_(False)
    if settings.teacher_hash and fingerprint_of(teacher) != settings.teacher_hash:
        raise ModelError(
            f"{settings.teacher} is not the teacher that this run began with ({settings.teacher_hash}); "
            "put that one back, or train again"
        )
    return teacher


def teacher_for(settings: ProxySettings, images: Tensor, like: Tensor) -> Embedder | None:
    """The teacher on the device of the embeddings `like` (B, D) of `images`, if there is one; it must have length D."""
    if not settings.teacher:
        return None
    teacher = teacher_of(settings, like.device).to(like.dtype)
    width = teacher(images).shape[1]
    check(
        width == like.shape[1],
        f"the teacher {settings.teacher} has embeddings of {width}, and the model of {like.shape[1]}: "
        f"set model.dim={width}, or start from the teacher itself",
    )
    return teacher


def held(step: Step, settings: ProxySettings, loss: Tensor, clean: Tensor, taught: Tensor) -> Tensor:
    """The loss with the constraint on clean embeddings (B, D) near the `taught` ones; μ is updated in the state."""
    gap = cosine(clean, taught).mean()
    beyond = gap - settings.drift
    multiplier = step.state.get(MULTIPLIER, torch.ones((), dtype=torch.float64)).to(gap)
    step.state[MULTIPLIER] = (multiplier + settings.drift_rate * beyond.detach()).clamp(min=0)
    step.log("drift", gap.detach())
    step.log(MULTIPLIER, multiplier)
    return loss + multiplier * beyond
