"""Reasons not to trust a robustness score.

A model can look robust because attacks cannot climb: its gradients are masked, its images are not what an attack
takes them for, or it answers every query alike. `examine` tries a few samples and returns a `Flag` for each reason
it finds. `docs/flags.md` says for every flag when it is raised, what it means and what to do.

Each flag is a function of a `Probe`: one measurement, one `if`, one sentence. Most measurements are the share of
samples on which something happens that cannot happen to an attack that works. One that only stumbles about loses
to a coin on half of the samples, one that works on next to none; a quarter is 4 standard errors from a half at
64 samples. Only samples with room count: whatever is farther from its clean embedding than the mean distance
between two images (d̄) is lost already, and nothing has to hurt it more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .attacks import ATTACKS, Attacked, Scene, attack, fgsm
from .errors import DataError
from .geometry import distance_rows, euclidean
from .model.frozen import Embed, connected, embed_all
from .perturb.ascend import Budget
from .perturb.ball import Ball
from .random import Key
from .scores import Interval
from .settings import TrainSettings

__all__ = ["FLAGS", "Flag", "Probe", "examine", "image_steps_at_most"]

SAMPLES = 64  # samples that are probed
MOST_STEPS = 32  # of an attack with a longer budget only so many steps are tried, and four times so many
UNBOUNDED_STEPS = 100  # of the attack that may draw any image

QUARTER = 0.25  # share of samples: see above
STILL = 1e-4  # shift, in parts of d̄, that is none
CHANGED = 0.25  # share of a shift by which rounding may change it; half a bit is 1/16 of ε = 8/255
FEW = 0.05  # share of samples that cannot move a score by more than this
REPEAT = 1e-4  # distance between two embeddings of one image; fp32 kernels that add in another order stay below 1e-5
SEPARABLE = TrainSettings.collapse_separability  # below which training calls a model collapsed
NOTHING = 1e-3  # mean distance below which fp32 rounding decides who is nearer
NARROW = TrainSettings.collapse_distance  # mean distance below which training says so too
HALF_WIDTH = 5.0  # points; 1,000 queries stay below 3.2 whatever the model, 64 reach 12
OVERSTATED = 5.0  # points; defences in print differ by a few
TOP_PERCENT = 200  # gallery whose first percent holds two candidates


@dataclass(frozen=True)
class Flag:
    """One reason not to trust a score: `value` was measured, and `threshold` is what it should have kept to."""

    name: str
    message: str
    value: float
    threshold: float

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


@dataclass(frozen=True)
class Probe:
    """A few samples of a scene, and what flags measure of them; each measurement is made once."""

    embed: Embed
    images: Tensor  # (N, …)
    scene: Scene
    ids: Tensor  # (N,) their numbers among the scene's queries
    ball: Ball
    budget: Budget
    key: Key
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # of scores in percent
    measured: Mapping[str, float] = field(default_factory=dict)  # scores of the audit, to be named in messages
    strong: Mapping[str, Any] = field(default_factory=dict)  # of a strong audit: `auditing.strong`'s doubts

    @cached_property
    def clean(self) -> Tensor:
        """(N, D) the embeddings of the images."""
        return embed_all(self.embed, [self.images])

    @cached_property
    def right(self) -> Tensor:
        """(N,) whose nearest neighbour is right, and could be wrong: the gallery has another class."""
        answered = ATTACKS["margin"]("corrected").measure(self.scene, self.ids, None, self.clean)["margin"] > 0.5
        other = self.scene.labels[self.ids, None] != self.scene.gallery_labels
        return answered & other.any(1)

    @cached_property
    def distances(self) -> tuple[float, float]:
        """Separability (mean d to other classes − mean d to the own class) / d̄ of random pairs, and d̄.

        Of up to 256 queries against the whole gallery, own images apart; NaN where no query has both kinds.
        """
        chosen = self.key("pairs").permutation(len(self.scene.queries), self.scene.queries.device)[:256]
        parts = []
        own = self.scene.own[chosen]
        for rows, d in distance_rows(self.scene.queries[chosen], self.scene.gallery, exclude=own, chunk=64):
            known, d = d.isfinite(), d.nan_to_num(posinf=0.0).double()
            match = (self.scene.labels[chosen[rows], None] == self.scene.gallery_labels) & known
            means = [(d * which).sum(1) / which.sum(1) for which in (match, ~match & known, known)]
            parts.append(torch.stack(means, 1))
        same, other, every = torch.cat(parts).unbind(1)
        mean = float(every.nanmean())
        return float((other - same).nanmean()) / max(mean, 1e-12), mean

    @cached_property
    def gradients(self) -> Tensor:
        """(R, P) input gradients of the margin at those of the clean images that are right."""
        images, ids = self.images[self.right].clone().requires_grad_(), self.ids[self.right]
        with torch.enable_grad():
            objective = ATTACKS["margin"]("corrected").objective(self.scene, ids, None)
            value = objective.value(self.embed(images)[:, None], torch.arange(len(ids), device=ids.device))
            (gradient,) = torch.autograd.grad(value.sum(), images)
        return gradient.flatten(1)

    def shifted(self, ball: Ball, budget: Budget) -> Attacked:
        """The samples after ES, each from the same tiny start."""
        return attack(self.embed, self.images, self.scene, ATTACKS["ES"]("corrected"), self.ids, ball, budget, self.key)

    @cached_property
    def pushed(self) -> Attacked:
        """The samples after ES at the budget."""
        return self.shifted(self.ball, self.budget)

    def shift(self, images: Tensor) -> Tensor:
        """(N,) how far these images are from the clean embeddings."""
        return euclidean(embed_all(self.embed, [images]), self.scene.queries[self.ids]).double()

    def short_of(self, near: Tensor, far: Tensor, factor: float) -> float:
        """The share of samples with room at shift `near` (N,) whose shift `far` is nil or below `factor` times that."""
        mean = self.distances[1]
        return float(((near < mean) & ~(far > factor * near + STILL * mean)).double().mean())


# ---------------------------------------------------------------- the flags, in the order of docs/flags.md


def image_range(probe: Probe) -> Flag | None:
    """Pixels outside [0, 1]."""
    low, high = float(probe.images.min()), float(probe.images.max())
    outside = max(-low, high - 1)
    if not outside <= 0:
        guess = "bytes" if high > 8 else "images that are normalised already" if low < -0.2 else "another range"
        said = f"pixels go from {low:.3g} to {high:.3g}, which looks like {guess}: ε means nothing outside [0, 1]"
        return Flag("image-range", said, outside, 0.0)
    return None


def not_deterministic(probe: Probe) -> Flag | None:
    """Two embeddings of the same images that differ."""
    again = embed_all(probe.embed, [probe.images])
    scale = torch.linalg.vector_norm(probe.clean, dim=1).mean().clamp(min=1e-12)
    apart = float(torch.linalg.vector_norm(again - probe.clean, dim=1).max() / scale)
    if apart > REPEAT:
        said = f"the same image was embedded twice, {apart:.2g} apart: attacks climb a model that is gone a step later"
        return Flag("not-deterministic", said, apart, REPEAT)
    return None


def nan_embeddings(probe: Probe) -> Flag | None:
    """Embeddings that are not finite, of the samples or in the scene."""
    everything = (probe.clean, probe.scene.queries, probe.scene.gallery)
    broken = max(float((~e.isfinite().all(1)).double().mean()) for e in everything)
    if broken > 0:
        said = f"{broken:.1%} of the embeddings hold NaN or infinity: their ranks, and all scores, mean nothing"
        return Flag("nan-embeddings", said, broken, 0.0)
    return None


def zero_gradient(probe: Probe) -> Flag | None:
    """Input gradients that are exactly zero, or whose signs are the same (or opposite) for all samples."""
    signs = probe.gradients.sign()
    alive = signs[signs.abs().sum(1) > 0]
    alike = len(alive) >= 8 and bool(((alive * alive[0]).sum(1).abs() == alive[0].abs().sum()).all())
    blind = 0.0 if not len(signs) else 1.0 if alike else 1 - len(alive) / len(signs)
    if blind > FEW:
        said = f"{blind:.0%} of the input gradients are zero or the same for every image: attacks do not see the model"
        return Flag("zero-gradient", said, blind, FEW)
    return None


def steps_do_not_hurt(probe: Probe) -> Flag | None:
    """ES in four times the steps that goes less far than in a single one, or nowhere."""
    once = probe.shifted(probe.ball, fgsm(probe.ball)).measures["ES:D"]
    longer = replace(probe.budget, steps=4 * probe.budget.steps, alpha=min(probe.budget.alpha, probe.ball.eps / 4))
    # Less, not no more: where a model is linear and its sphere a circle, one step of ε is the best there is.
    short = probe.short_of(once, probe.shifted(probe.ball, longer).measures["ES:D"], 0.98)
    if short > QUARTER:
        said = f"{longer.steps} steps move {short:.0%} of the samples less than 1 step, or not: attacks do not climb"
        return Flag("steps-do-not-hurt", said, short, QUARTER)
    return None


def eps_does_not_hurt(probe: Probe) -> Flag | None:
    """ES with four times the ε that goes hardly farther."""
    times = min(4.0, _whole(probe) / probe.ball.eps)
    wider = replace(probe.ball, eps=times * probe.ball.eps), replace(probe.budget, alpha=times * probe.budget.alpha)
    short = probe.short_of(probe.pushed.measures["ES:D"], probe.shifted(*wider).measures["ES:D"], 1.05)
    if times > 2 and short > QUARTER:
        said = f"{times:.2g} times the ε moves {short:.0%} of the samples no farther: it is not ε that stops attacks"
        return Flag("eps-does-not-hurt", said, short, QUARTER)
    return None


def unbounded_attack_fails(probe: Probe) -> Flag | None:
    """Samples that stay right though any image in [0, 1] is allowed."""
    # From next to the clean image: a random one is mostly wrong already, and shows nothing about gradients.
    anything, budget = Ball(1.0), Budget(UNBOUNDED_STEPS, 0.1, start="tiny", schedule="linear")
    goal, right = ATTACKS["margin"]("corrected"), probe.right
    done = attack(probe.embed, probe.images, probe.scene, goal, probe.ids, anything, budget, probe.key)
    kept = float(done.measures["margin"][right].sum() / right.sum().clamp(min=1))
    if kept > FEW:
        said = f"{kept:.0%} of the right answers survive an attack that may draw any image: it fails, not the ε"
        return Flag("unbounded-attack-fails", said, kept, FEW)
    return None


def noise_as_strong(probe: Probe) -> Flag | None:
    """Random directions of length ε that move a sample as far as ES does."""
    x = probe.images[:, None]
    random = probe.key("noise").normal(probe.ids, x.shape[1:], x.dtype).to(x.device)
    noisy = probe.ball.project(probe.ball.step(x, random, probe.ball.eps), x)[:, 0]
    as_far = probe.short_of(probe.shift(noisy), probe.pushed.measures["ES:D"], 1.0)
    if as_far > QUARTER:
        said = f"random noise moves {as_far:.0%} of the samples as far as the attack: its gradients lead nowhere"
        return Flag("noise-as-strong", said, as_far, QUARTER)
    return None


def collapse(probe: Probe) -> Flag | None:
    """Clean images that are as near to other classes as to their own."""
    separability, mean = probe.distances
    separability = separability if mean >= NOTHING else 0.0
    if separability < SEPARABLE:
        here = f", this one {probe.measured['ERS']:.1f}" if "ERS" in probe.measured else ""
        said = (
            f"separability of random pairs is {separability:.3f} (mean distance {mean:.2g}): "
            f"nothing is left to attack, and a collapsed model scores ERS 29.7{here}"
        )
        return Flag("collapse", said, separability, SEPARABLE)
    return None


def narrow(probe: Probe) -> Flag | None:
    """Embeddings that share a small cap of the sphere, where nothing can move far or point elsewhere."""
    _, mean = probe.distances
    if NOTHING <= mean < NARROW:
        said = (
            f"the mean distance of random pairs is {mean:.2g}: ES:D and TMA are measured against the whole sphere, so "
            "they and ERS cannot be compared with those of other models; R@1, ranks and ARS can"
        )
        return Flag("narrow", said, mean, NARROW)
    return None


def few_samples(probe: Probe) -> Flag | None:
    """A score whose interval is wide."""
    widths = {name: (given.high - given.low) / 2 for name, given in probe.intervals.items()}
    name, width = max(widths.items(), key=lambda item: item[1] if item[1] == item[1] else torch.inf, default=("", 0.0))
    if not width <= HALF_WIDTH:
        said = f"{name} is known to ±{width:.1f} points only: differences below that are chance"
        return Flag("few-samples", said, width, HALF_WIDTH)
    return None


def small_gallery(probe: Probe) -> Flag | None:
    """A gallery whose first percent is fewer than two candidates."""
    size = len(probe.scene.gallery)
    if size < TOP_PERCENT:
        said = f"the gallery has {size} images: the first percent, where CA- and QA- aim, is fewer than 2 of them"
        return Flag("small-gallery", said, float(size), float(TOP_PERCENT))
    return None


def not_8_bit(probe: Probe) -> Flag | None:
    """Perturbations that do another thing once their image is saved in 8 bits."""
    before = probe.pushed.measures["ES:D"]
    after = probe.shift((probe.pushed.images * 255).round() / 255)
    changed = float(((after - before).abs() > CHANGED * before).double().mean())
    if changed > QUARTER:
        said = f"rounded to 8 bits, {changed:.0%} of the attacked images act otherwise: no file holds what was scored"
        return Flag("not-8-bit", said, changed, QUARTER)
    return None


def black_box_beats_white_box(probe: Probe) -> Flag | None:
    """Samples that withstood all gradients and not Square, which has none."""
    share = probe.strong.get("black", 0.0) / 100
    if share > FEW:
        said = f"{share:.0%} of the samples withstood all attacks by gradients and fell to Square: gradients are masked"
        return Flag("black-box-beats-white-box", said, share, FEW)
    return None


def transfer_beats_white_box(probe: Probe) -> Flag | None:
    """Samples that withstood the model's own gradients and not another model's."""
    share = probe.strong.get("transfer", 0.0) / 100
    if share > FEW:
        said = f"{share:.0%} of the samples withstood the model's gradients and fell to another model's: they mislead"
        return Flag("transfer-beats-white-box", said, share, FEW)
    return None


def strong_below_standard(probe: Probe) -> Flag | None:
    """A strong audit that leaves far less than the standard one."""
    standard, strong = probe.strong.get("standard", 0.0), probe.strong.get("strong", 0.0)
    apart = round(abs(standard - strong), 6)  # both are rounded: what is left is not to be decided by the last bit
    if apart > OVERSTATED:
        what = probe.strong.get("what", "ERS")
        said = f"{what} is {strong:.1f} under strong attacks and {standard:.1f} under standard ones"
        return Flag("strong-below-standard", f"{said}: those overstate by {apart:.1f} points", apart, OVERSTATED)
    return None


FLAGS: dict[str, Callable[[Probe], Flag | None]] = {
    "image-range": image_range,
    "not-deterministic": not_deterministic,
    "nan-embeddings": nan_embeddings,
    "zero-gradient": zero_gradient,
    "steps-do-not-hurt": steps_do_not_hurt,
    "eps-does-not-hurt": eps_does_not_hurt,
    "unbounded-attack-fails": unbounded_attack_fails,
    "noise-as-strong": noise_as_strong,
    "collapse": collapse,
    "narrow": narrow,
    "few-samples": few_samples,
    "small-gallery": small_gallery,
    "not-8-bit": not_8_bit,
    "black-box-beats-white-box": black_box_beats_white_box,
    "transfer-beats-white-box": transfer_beats_white_box,
    "strong-below-standard": strong_below_standard,
}
_BEFORE = ("image-range", "nan-embeddings")  # where one of these is raised, nothing that is attacked means anything
_STRONG = ("black-box-beats-white-box", "transfer-beats-white-box", "strong-below-standard")
# These attack nothing.
_ALWAYS = (*_BEFORE, "not-deterministic", "collapse", "narrow", "few-samples", "small-gallery", *_STRONG)


def examine(
    embed: Embed,
    images: Tensor,
    scene: Scene,
    ids: Tensor,
    ball: Ball,
    budget: Budget,
    key: Key,
    *,
    intervals: Mapping[str, Interval] | None = None,
    measured: Mapping[str, float] | None = None,
    strong: Mapping[str, Any] | None = None,
    samples: int = SAMPLES,
) -> list[Flag]:
    """The flags that `images` (N, …), the queries `ids` (N,) of the scene, raise, in the order of docs/flags.md.

    At most `samples` of them are probed, drawn by `key`. `intervals` are those of the scores in percent, `measured`
    scores to be named (a message about collapse repeats "ERS"), `strong` what a strong audit found out about its own
    attacks. Where images or embeddings are unusable, or the attack may not move at all, flags that attack are left out.
    """
    if not len(images) or len(images) != len(ids):
        raise DataError(
            f"{len(images)} images and {len(ids)} ids; give at least one image, and each one's query number"
        )
    images = images if images.dtype == torch.float64 else images.float()
    chosen = key("samples").permutation(len(images))[:samples].sort().values
    probe = Probe(
        connected(embed),
        images[chosen.to(images.device)],
        scene,
        ids[chosen.to(ids.device)].to(scene.queries.device),
        ball,
        Budget(min(budget.steps, MOST_STEPS), budget.alpha, schedule=budget.schedule),
        key("checks"),
        intervals or {},
        measured or {},
        strong or {},
    )
    unusable = any(FLAGS[name](probe) for name in _BEFORE)
    attackable = not unusable and _attacks(ball, budget)
    flags = [raised(probe) for name, raised in FLAGS.items() if attackable or name in _ALWAYS]
    return [flag for flag in flags if flag is not None]


def image_steps_at_most(ball: Ball, budget: Budget, count: int) -> int:
    """What `examine` may cost with so many images: ES in one step, in four times the budget's and twice in as many."""
    if not _attacks(ball, budget):
        return 0
    return min(count, SAMPLES) * (1 + 6 * min(budget.steps, MOST_STEPS) + UNBOUNDED_STEPS)


def _attacks(ball: Ball, budget: Budget) -> bool:
    """Whether an attack may move at all."""
    return min(ball.eps, budget.steps, budget.alpha) > 0


def _whole(probe: Probe) -> float:
    """The ε that reaches from any image to any other."""
    pixels = probe.images[0].numel()
    return (probe.ball.high - probe.ball.low) * (1.0 if probe.ball.norm == "linf" else pixels**0.5)
