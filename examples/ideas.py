"""Four ideas of your own in one file: a data set, a sampler, a defence and an attack. No line of the package changes.

anchorhold train ideas:numerals --recipe ideas.toml --out runs/mine
anchorhold audit runs/mine --data ideas:numerals --attacks ES,ideas:Centre --eps 0.1 --alpha 0.03
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import anchorhold as ah
from anchorhold import losses
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.recall import RecallGoal
from anchorhold.defences.settings import Inner
from anchorhold.defences.step import Step
from anchorhold.geometry import cosine
from anchorhold.triplets import View


def numerals() -> dict[str, tuple[Tensor, list[str]]]:  # a data set: a function that returns what ah.fit takes
    digits = load_digits()
    images, names = torch.from_numpy(digits.images).float()[:, None] / 16, [f"a {label}" for label in digits.target]
    parts = {"train": digits.target < 5, "test": digits.target >= 5}
    return {part: (images[mask], [name for name, own in zip(names, mask) if own]) for part, mask in parts.items()}


def near(view: View) -> tuple[Tensor, Tensor]:  # a sampler: chances (B, N); defence.sampler=ideas:near
    return view.partner, (-4 * view.distances).exp().masked_fill(view.same, 0)


@dataclass(frozen=True)
class PullSettings(Inner):  # ε, α and steps of the inner attack, and what is yours
    margin: float = 0.2


def pull(step: Step, settings: PullSettings) -> Iterator[Tensor]:  # a defence: each `yield loss` is a step
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        t = step.mine("random", clean, settings.margin)
        p, n = clean[t.positive], clean[t.negative]
        towards = ah.Objective(lambda e, at: cosine(e[:, 0], p[at]) - cosine(e[:, 0], n[at]))  # distances
        moved = step.perturb(embed, images[t.anchor, None], towards, settings)[:, 0]
    e, anchors = step.embed(torch.cat([images, moved])).split([len(images), len(moved)])
    yield losses.triplet(anchors, e[t.positive], e[t.negative], settings.margin)


@dataclass(frozen=True, kw_only=True)
class Centre(RecallGoal):  # an attack: move a query to the middle of the gallery, where all look alike
    name: ClassVar[str] = "centre"
    kept: ClassVar[str | None] = "centre"  # what is measured: R@1, as in every RecallGoal

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> ah.Objective:
        middle = scene.gallery.mean(0)
        return ah.Objective(lambda e, positions: -cosine(e[:, 0], middle))
