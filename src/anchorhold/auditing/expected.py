"""How long an audit will take on a CPU, said before its attacks: one gradient step of a few images is timed."""

import time
import warnings
from collections.abc import Sequence

import torch

from ..console import Silent, duration
from ..interface import worded
from ..model.frozen import embed_all
from ..model.no_gradients import gives_gradients
from ..perturb.settings import VALUES_ONLY
from .ensemble import queries_at_most, standing, steps_at_most, strengthened
from .flags import image_steps_at_most
from .members import SQUARE_QUERIES
from .plan import AttackRun
from .subject import Subject

__all__ = ["LONG", "say_if_long"]

LONG = 300.0  # seconds: a longer audit is said beforehand
_PIXELS = 1e8  # attacked pixels below which an audit takes a minute or two on any machine
_IMAGES = 4
FEW = 20  # attacked images: a smaller sample says nothing


def say_if_long(subject: Subject, runs: Sequence[AttackRun], checked: bool) -> None:
    """On a CPU, say how long the attacks will take at most, and what makes them shorter; nothing for short audits.

    `checked`: whether the sanity checks of the flags follow.
    """
    if subject.scene.gallery.device.type != "cpu":
        return
    images = next(subject.material.query.plain(subject.attacked["query"][:_IMAGES], _IMAGES))
    work = _image_steps(subject, runs)
    count, settings = len(subject.attacked["query"]), subject.settings
    if checked and work and settings.method == "pgd":
        work += image_steps_at_most(settings.ball, settings.budget, count)
    if gives_gradients(subject.model) and work * images.shape[-1] * images.shape[-2] < _PIXELS:
        return
    try:
        seconds = work * _seconds(subject, images) / subject.shards.ranks.size
    except Exception:  # this is a courtesy: what is wrong, the attack itself reports
        return
    if seconds > LONG:
        ways = [f"fewer images (limit, now {count:,})"] if count > FEW else []
        ways += [f"fewer steps (now {settings.budget.steps})"] if settings.method in ("pgd", *VALUES_ONLY) else []
        attacks = len({run.attack for run in runs})
        ways += [f"fewer attacks (now {attacks})"] if attacks > 1 else []
        ways += ["strength standard"] if settings.strength == "strong" else []
        ways += [_shorter_curve(len(settings.epsilons))] if settings.epsilons else []
        what = "queries" if settings.method in VALUES_ONLY else "image-steps"
        lines = (
            f"{work:,} {what} take up to about {duration(seconds)} on this CPU",
            f"to make it shorter: {', '.join([*ways, 'smaller images'])}, or a GPU",
        )
        if isinstance(subject.report, Silent) and subject.shards.ranks.first:  # hours without a word would surprise
            warnings.warn("; ".join(lines), stacklevel=6)
        for line in lines:
            subject.report.say(line)


def _shorter_curve(points: int) -> str:
    """The curve takes most of an audit."""
    fewer = f"fewer ε in the curve (now {points}), or " if points > 1 else ""
    return f"{fewer}no curve ({worded('--curve none', 'epsilons=()')})"


def _image_steps(subject: Subject, runs: Sequence[AttackRun]) -> int:
    """Image-steps that are left, at most; those of saved batches are done."""
    settings, shards = subject.settings, subject.shards
    work = 0
    for run in runs:
        ids = subject.attacked[run.goals[0].side]
        batches = subject.batches(ids)
        if shards.whole(run.label, run.made_by) is None:
            kept = shards.kept(run.label, len(batches), run.made_by)
            work += settings.budget.steps * sum(len(part) for at, part in enumerate(batches) if at not in kept)
    for task, levels in strengthened(settings, runs):
        # A query of Square is a forward pass, about a third of a step.
        steps = steps_at_most(task, levels, settings.budget.steps) + levels * SQUARE_QUERIES // 3
        first = settings.budget.steps * len(task.first)
        if settings.method in VALUES_ONLY:
            steps = queries_at_most(task, levels, settings.budget.steps)
        ids = subject.attacked[task.goal.side]
        right = standing(task, subject.scene, ids, subject.key)
        work += steps * right + first * (len(ids) - right)
    return work


def _seconds(subject: Subject, images: torch.Tensor) -> float:
    """Seconds of one gradient step of one image, or of one query where no gradients are taken."""
    images = images.to(subject.scene.gallery.dtype)
    if subject.settings.method in VALUES_ONLY:
        begun = time.monotonic()
        with torch.random.fork_rng([]), subject.precision():
            embed_all(subject.embed, [images])
        return (time.monotonic() - begun) / len(images)
    for _ in range(2):  # the first is slower, and no measure
        begun = time.monotonic()
        x = images.clone().requires_grad_()
        with torch.random.fork_rng([]), torch.enable_grad(), subject.precision():
            torch.autograd.grad(subject.embed(x).square().sum(), x)
    return (time.monotonic() - begun) / len(images)
