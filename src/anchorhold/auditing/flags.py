"""Reasons not to trust a robustness score.

A model can seem robust because attacks cannot climb. Its gradients may be masked, its images may have another range
than the attack assumes, or it may answer every query alike. `examine` probes a few samples and returns a `Flag` for
each problem. `docs/audit/flags.md` says for every flag when it is raised, what it means and what to do.

Each flag is a function of a `Probe`: one measurement, one `if`, one sentence. `probe.py` says what is measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..attacks.menu import ATTACKS
from ..attacks.run import Attack, fgsm
from ..config.settings import TrainSettings
from ..errors import DataError
from ..model.frozen import connected, embed_all
from ..perturb.ball import Ball
from ..perturb.settings import Budget
from .probe import FEW, NOTHING, QUARTER, SEPARABLE, Probe
from .realisable import in_8_bits

__all__ = ["FLAGS", "Flag", "Probe", "examine", "image_steps_at_most"]

SAMPLES = 64  # samples that are probed
MOST_STEPS = 32  # longer budgets are probed with this many steps, and with four times as many
UNBOUNDED_STEPS = 100  # steps of the attack without a limit on ε

CHANGED = 0.25  # relative change of a shift that rounding may cause; half a level is 1/16 of ε = 8/255
REPEAT = 1e-4  # distance between two embeddings of one image; another order of fp32 sums stays below 1e-5
NARROW = TrainSettings.collapse_distance  # mean distance below which training reports a collapse
LITTLE = 0.2  # skill (0: chance, 1: always right) below which there is little to attack
HALF_WIDTH = 5.0  # points; 1,000 queries stay below 3.2 whatever the model, 64 reach 12
OVERSTATED = 5.0  # points; published defences differ by a few
TOP_PERCENT = 200  # size of a gallery whose top 1 % holds two candidates


@dataclass(frozen=True)
class Flag:
    """One reason not to trust a score: the measured `value`, and the `threshold` that it violates."""

    name: str
    message: str
    value: float
    threshold: float

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


# ---------------------------------------------------------------- the flags, in the order of docs/audit/flags.md


def image_range(probe: Probe) -> Flag | None:
    """Pixels outside [0, 1]."""
    low, high = float(probe.images.min()), float(probe.images.max())
    outside = max(-low, high - 1)
    if not outside <= 0:
        guess = "bytes" if high > 8 else "images that are already normalised" if low < -0.2 else "another range"
        said = f"pixels range from {low:.3g} to {high:.3g}, probably {guess}: ε has no meaning outside [0, 1]"
        return Flag("image-range", said, outside, 0.0)
    return None


def not_deterministic(probe: Probe) -> Flag | None:
    """Two embeddings of the same image differ."""
    again = embed_all(probe.embed, [probe.images])
    scale = torch.linalg.vector_norm(probe.clean, dim=1).mean().clamp(min=1e-12)
    apart = float(torch.linalg.vector_norm(again - probe.clean, dim=1).max() / scale)
    if apart > REPEAT or probe.draws > 1:
        said = f"two embeddings of the same image are {apart:.2g} apart: the model changes while it is attacked"
        said += f"; all numbers are of means over {probe.draws} draws" if probe.draws > 1 else ""
        return Flag("not-deterministic", said, apart, REPEAT)
    return None


def nan_embeddings(probe: Probe) -> Flag | None:
    """Embeddings of the samples or of the scene are not finite, or of perturbed images in the audit."""
    everything = (probe.clean, probe.scene.queries, probe.scene.gallery)
    broken = max(float((~e.isfinite().all(1)).double().mean()) for e in everything)
    if broken > 0:
        said = f"{broken:.1%} of the embeddings contain NaN or infinity: ranks and scores have no meaning"
        return Flag("nan-embeddings", said, broken, 0.0)
    if probe.differentiable:  # a function without gradients is refused where it gives NaN
        broken = float((~embed_all(probe.embed, [probe.noisy]).isfinite().all(1)).double().mean())
    if (broken := max(broken, probe.rejected)) > 0:
        said = f"changed images of {broken:.1%} of the samples have embeddings with NaN or infinity"
        said += ": they count as failed attacks, so the model may be less robust than its numbers"
        return Flag("nan-embeddings", said, broken, 0.0)
    return None


def zero_gradient(probe: Probe) -> Flag | None:
    """Input gradients are zero, have the same (or opposite) signs for all samples, or are not finite."""
    broken = float((~probe.gradients.isfinite()).any(1).double().mean()) if len(probe.gradients) else 0.0
    if broken > 0:
        said = f"gradients are not finite for {broken:.0%} of the queries, and count as zero there: "
        said += "look for the root, norm or logarithm of 0 in the model, or use ah.wrap(…, gradients=False)"
        return Flag("zero-gradient", said, broken, 0.0)
    signs = probe.gradients.sign()
    alive = signs[signs.abs().sum(1) > 0]
    alike = len(alive) >= 8 and bool(((alive * alive[0]).sum(1).abs() == alive[0].abs().sum()).all())
    blind = 0.0 if not len(signs) else 1.0 if alike else 1 - len(alive) / len(signs)
    if blind > FEW:
        advice = (
            "name the step that hides them with ah.wrap(…, before=…, backward=…), or use ah.wrap(…, gradients=False)"
        )
        said = f"{blind:.0%} of the input gradients are zero or the same for every image: {advice}"
        return Flag("zero-gradient", said, blind, FEW)
    return None


def no_gradients(probe: Probe) -> Flag | None:
    """The attacks of the audit took no gradients."""
    if probe.queries > 0:
        said = f"attacked without gradients, {probe.queries:,} queries each: an attacker who has them may do better"
        return Flag("no-gradients", said, float(probe.queries), 0.0)
    return None


def steps_do_not_hurt(probe: Probe) -> Flag | None:
    """ES with four times the steps moves samples less far than with a single step, or not at all."""
    once = probe.shifted(probe.ball, fgsm(probe.ball)).measures["ES:D"]
    longer = replace(probe.budget, steps=4 * probe.budget.steps, alpha=min(probe.budget.alpha, probe.ball.eps / 4))
    # 0.98, not 1: for a linear model with embeddings on a circle one step of ε is already optimal.
    short = probe.short_of(once, probe.shifted(probe.ball, longer).measures["ES:D"], 0.98)
    if probe.evident(short):
        few = f"{longer.steps} steps move {short:.0%} of the queries"
        said = f"{few} no farther than 1 step: the attack makes no progress"
        return Flag("steps-do-not-hurt", said, short, QUARTER)
    return None


def eps_does_not_hurt(probe: Probe) -> Flag | None:
    """ES with four times the ε moves samples hardly farther."""
    times = min(4.0, _whole(probe) / probe.ball.eps)
    wider = replace(probe.ball, eps=times * probe.ball.eps), replace(probe.budget, alpha=times * probe.budget.alpha)
    short = probe.short_of(probe.pushed.measures["ES:D"], probe.shifted(*wider).measures["ES:D"], 1.05)
    if times > 2 and probe.evident(short):
        said = f"{times:.2g} times the ε moves {short:.0%} of the queries no farther: ε is not what limits attacks"
        return Flag("eps-does-not-hurt", said, short, QUARTER)
    return None


def unbounded_attack_fails(probe: Probe) -> Flag | None:
    """Samples stay right although any image in [0, 1] is allowed."""
    # Starts next to the clean image: a random image is mostly wrong already and does not test gradients.
    anything, budget = Ball(1.0), Budget(UNBOUNDED_STEPS, 0.1, start="tiny", schedule="linear")
    goal, right = ATTACKS["margin"]("corrected"), probe.right
    attack = Attack(probe.embed, probe.scene, goal, anything, budget, probe.key)
    done = attack.run(probe.images, probe.ids)
    kept = float(done.measures["margin"][right].sum() / right.sum().clamp(min=1))
    if kept > FEW:
        said = f"{kept:.0%} of the right answers survive an attack that may make any image: the attack fails"
        return Flag("unbounded-attack-fails", said, kept, FEW)
    return None


def noise_as_strong(probe: Probe) -> Flag | None:
    """Random noise of length ε moves samples as far as ES."""
    as_far = probe.short_of(probe.shift(probe.noisy), probe.pushed.measures["ES:D"], 1.0)
    if probe.evident(as_far):
        said = f"random noise moves {as_far:.0%} of the queries as far as the attack: its gradients are useless"
        return Flag("noise-as-strong", said, as_far, QUARTER)
    return None


def collapse(probe: Probe) -> Flag | None:
    """Clean images are as near to other classes as to their own."""
    if probe.collapsed:
        apart = probe.apart
        separability = apart.separability.high if apart.distance.high >= NOTHING else 0.0
        here = f", this one {probe.measured['ERS']:.1f}" if "ERS" in probe.measured else ""
        said = (
            f"separability of random pairs is at most {separability:.3f} (mean distance {apart.distance.value:.2g}): "
            f"there is nothing to attack, and a collapsed model scores ERS 29.7{here}"
        )
        return Flag("collapse", said, separability, SEPARABLE)
    return None


def near_chance(probe: Probe) -> Flag | None:
    """R@1 is hardly above that of a random list, or there are too few queries to tell."""
    apart = probe.apart
    if probe.collapsed or not apart.skill.value < 1:
        return None
    said = f"R@1 is {100 * apart.r1:.1f} on {apart.queries} queries, and {100 * apart.chance:.1f} by chance"
    if apart.skill.high < LITTLE:
        return Flag(
            "near-chance", f"{said}: there is little to attack, and scores mean little", apart.skill.high, LITTLE
        )
    if apart.skill.low <= 0:
        told = "too few to tell whether the model retrieves, or has collapsed"
        return Flag("near-chance", f"{said}: {told}", apart.skill.low, 0.0)
    return None


def narrow(probe: Probe) -> Flag | None:
    """All embeddings lie in a small part of the sphere, where nothing can move far."""
    mean = probe.apart.distance
    if mean.high < NARROW and not probe.collapsed:
        said = (
            f"the mean distance of random pairs is {mean.value:.2g}: ES:D and TMA assume the whole sphere, so they and "
            "ERS cannot be compared with other models; R@1, ranks and ARS can"
        )
        return Flag("narrow", said, mean.high, NARROW)
    return None


def few_samples(probe: Probe) -> Flag | None:
    """The interval of a score is wide."""
    widths = {name: (given.high - given.low) / 2 for name, given in probe.intervals.items()}
    name, width = max(widths.items(), key=lambda item: item[1] if item[1] == item[1] else torch.inf, default=("", 0.0))
    if not width <= HALF_WIDTH:
        said = f"{name} is known only to ±{width:.1f} points: smaller differences are chance"
        return Flag("few-samples", said, width, HALF_WIDTH)
    return None


def small_gallery(probe: Probe) -> Flag | None:
    """The top 1 % of the gallery is fewer than two candidates."""
    size = len(probe.scene.gallery)
    if size < TOP_PERCENT:
        said = f"the gallery has {size} images: the top 1 %, where CA- and QA- draw targets, is fewer than 2 of them"
        return Flag("small-gallery", said, float(size), float(TOP_PERCENT))
    return None


def not_8_bit(probe: Probe) -> Flag | None:
    """Perturbations have another effect once the image is saved in 8 bits."""
    before = probe.pushed.measures["ES:D"]
    after = probe.shift(in_8_bits(probe.pushed.images))
    changed = float(((after - before).abs() > CHANGED * before).double().mean())
    if probe.evident(changed):
        said = (
            f"rounded to 8 bits, {changed:.0%} of the attacked images change their effect: such small changes are lost"
        )
        return Flag("not-8-bit", said, changed, QUARTER)
    return None


def black_box_beats_white_box(probe: Probe) -> Flag | None:
    """Samples withstand all gradient attacks and fall to Square, which uses no gradients."""
    share = probe.strong.get("black", 0.0) / 100
    if share > FEW:
        said = f"{share:.0%} of the queries survived all gradient attacks, but not Square: gradients are masked"
        return Flag("black-box-beats-white-box", said, share, FEW)
    return None


def transfer_beats_white_box(probe: Probe) -> Flag | None:
    """Samples withstand the model's own gradients and fall to those of another model."""
    share = probe.strong.get("transfer", 0.0) / 100
    if share > FEW:
        said = f"{share:.0%} of the queries survived its own gradients, but not another model's: its own mislead"
        return Flag("transfer-beats-white-box", said, share, FEW)
    return None


def strong_below_standard(probe: Probe) -> Flag | None:
    """The strong audit reports far less robustness than the standard one."""
    standard, strong = probe.strong.get("standard", 0.0), probe.strong.get("strong", 0.0)
    apart = round(abs(standard - strong), 6)  # both are rounded, so drop the floating-point error of the difference
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
    "no-gradients": no_gradients,
    "steps-do-not-hurt": steps_do_not_hurt,
    "eps-does-not-hurt": eps_does_not_hurt,
    "unbounded-attack-fails": unbounded_attack_fails,
    "noise-as-strong": noise_as_strong,
    "collapse": collapse,
    "near-chance": near_chance,
    "narrow": narrow,
    "few-samples": few_samples,
    "small-gallery": small_gallery,
    "not-8-bit": not_8_bit,
    "black-box-beats-white-box": black_box_beats_white_box,
    "transfer-beats-white-box": transfer_beats_white_box,
    "strong-below-standard": strong_below_standard,
}
_BEFORE = ("image-range", "nan-embeddings")  # with one of these, results of attacks have no meaning
_STRONG = ("black-box-beats-white-box", "transfer-beats-white-box", "strong-below-standard")
# These flags run no attack.
_ALWAYS = (
    *(*_BEFORE, "not-deterministic", "no-gradients", "collapse", "near-chance", "narrow"),
    *("few-samples", "small-gallery", *_STRONG),
)


def examine(probe: Probe, samples: int = SAMPLES) -> list[Flag]:
    """The flags that the images of a probe raise, in the order of docs/audit/flags.md.

    At most `samples` of them are probed, drawn by its key. Flags that attack are skipped where images or embeddings are
    unusable, or where the budget allows no change.
    """
    images, ids, budget = probe.images, probe.ids, probe.budget
    if not len(images) or len(images) != len(ids):
        raise DataError(
            f"{len(images)} images and {len(ids)} ids; give at least one image, and each one's query number"
        )
    images = images if images.dtype == torch.float64 else images.float()
    chosen = probe.key("samples").permutation(len(images))[:samples].sort().values
    probe = replace(
        probe,
        embed=connected(probe.embed),
        images=images[chosen.to(images.device)],
        ids=ids[chosen.to(ids.device)].to(probe.scene.queries.device),
        budget=Budget(min(budget.steps, MOST_STEPS), budget.alpha, schedule=budget.schedule),
        key=probe.key("checks"),
    )
    unusable = any(FLAGS[name](probe) for name in _BEFORE)
    attackable = probe.differentiable and not unusable and _attacks(probe.ball, budget)
    flags = [raised(probe) for name, raised in FLAGS.items() if attackable or name in _ALWAYS]
    return [flag for flag in flags if flag is not None]


def image_steps_at_most(ball: Ball, budget: Budget, count: int) -> int:
    """The maximum cost of `examine` in image-steps: ES in 1 step, in 4 times the budget's, and twice in these."""
    if not _attacks(ball, budget):
        return 0
    return min(count, SAMPLES) * (1 + 6 * min(budget.steps, MOST_STEPS) + UNBOUNDED_STEPS)


def _attacks(ball: Ball, budget: Budget) -> bool:
    """Whether the budget allows any change."""
    return min(ball.eps, budget.steps, budget.alpha) > 0


def _whole(probe: Probe) -> float:
    """The ε that reaches from any image to any other."""
    pixels = probe.images[0].numel()
    return (probe.ball.high - probe.ball.low) * (1.0 if probe.ball.norm == "linf" else pixels**0.5)
