"""Settings of the defence with one learned proxy for each class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ..errors import check, nearest
from ..extensions import Named
from ..perturb.settings import Budget
from ..schedules import grown
from .choices import SAMPLER_NAMES, LossSettings, chosen
from .inner import Inner

__all__ = ["ProxySettings"]

_LOSSES = ("softmax", "proxy-anchor")
_WORDS = {"form": ("natural", "minmax", "trades"), "triplet_attack": ("form", "hm")}


@dataclass(frozen=True, kw_only=True)
class _Now(Inner):
    """The attack of one step, with the ε of that step: the checks are for what a user sets."""

    stationary: bool = False  # whether its objective is stationary at x: a start of zero would never move

    def __post_init__(self) -> None:
        return

    @property
    def budget(self) -> Budget:
        return Budget(self.steps, self.alpha, start="tiny" if self.stationary else self.start)


@dataclass(frozen=True, kw_only=True)
class ProxySettings(LossSettings, Inner):
    """A classifier by the cosine to one learned proxy for each class; the embeddings serve retrieval.

    A loss of yours brings its own proxies, or none. The attack takes `steps` steps of 2.5 ε / steps from a random
    start. ε grows over the first half of the training.
    """

    alpha: Annotated[float, "Step size (α) at the full ε; 0 means 2.5 ε/steps."] = 0.0
    steps: int = 5
    start: Literal["zero", "random"] = "random"
    form: Annotated[
        Literal["natural", "minmax", "trades"],
        "What trains: clean images, perturbed ones, or clean ones and the divergence from perturbed ones.",
    ] = "minmax"
    loss: Annotated[Named | str, "Loss of the cosines of embeddings and proxies.", _LOSSES] = "softmax"
    scale: Annotated[float, "Factor of cosines in the softmax; α of Proxy-Anchor, 32 in its paper."] = 16.0
    margin: Annotated[float, "Margin (δ) of Proxy-Anchor."] = 0.1
    smoothing: Annotated[float, "Label smoothing of the softmax, a share of the target."] = 0.0
    proxy_lr: Annotated[float, "Learning rate of the proxies, or of a loss of yours without loss_lr."] = 1e-2
    warm: Annotated[float, "Share of the training over which ε grows from 0."] = 0.5
    clean: Annotated[
        float | Literal["auto"],
        "Share of the clean loss; with form = trades it sets β = (1 − clean) / clean, and auto leaves β to beta.",
    ] = "auto"
    beta: Annotated[float, "Weight (β) of the divergence, with form = trades and no defence.clean."] = 4.0
    beta_warm: Annotated[float, "Share of the training over which β grows from 0."] = 0.0
    cutmix: Annotated[float, "Share of the images with a rectangle of another one in them, in training."] = 0.0
    triplets: Annotated[float, "Weight of a triplet loss beside the proxies; its batches are pairs or classes."] = 0.0
    triplet_margin: Annotated[float, "Margin (γ) of that triplet loss."] = 0.2
    triplet_attack: Annotated[
        Literal["form", "hm"], "Its images: those of the form, or triplets perturbed by HM[sampler, LGA]."
    ] = "form"
    sampler: Annotated[Named | str, "How its triplets are drawn from a batch.", SAMPLER_NAMES] = "softhard"
    teacher: Annotated[str, "A run folder or model: clean embeddings are held near those of this frozen teacher."] = ""
    drift: Annotated[float, "How far clean embeddings may be from the teacher's: the mean of 1 − cos."] = 0.1
    drift_rate: Annotated[float, "How fast the weight of that constraint grows while they are farther."] = 0.1
    teacher_hash: Annotated[str, "Fingerprint of the teacher's weights, filled in."] = ""
    awp: Annotated[float, "Size (γ) of the adversarial weight perturbation, such as 0.005; 0 is off."] = 0.0
    awp_from: Annotated[int, "Finished epochs after which weights are perturbed."] = 0

    def __post_init__(self) -> None:
        Inner.__post_init__(self)
        chosen(self, "loss", _LOSSES)
        chosen(self, "sampler", SAMPLER_NAMES)
        LossSettings.__post_init__(self)
        self.unused("scale", "margin", "smoothing", "cutmix")
        for name, words in _WORDS.items():
            word = getattr(self, name)
            check(word in words, f"no defence.{name} {word!r}; {nearest(str(word), words)}")
        check(self.scale > 0, f"defence.scale must be above 0, got {self.scale}")
        check(self.proxy_lr > 0, f"defence.proxy_lr must be above 0, got {self.proxy_lr}")
        for name in ("margin", "beta", "awp", "awp_from", "triplets", "triplet_margin", "drift", "drift_rate"):
            check(getattr(self, name) >= 0, f"defence.{name} must not be negative, got {getattr(self, name)}")
        for name in ("warm", "clean", "beta_warm", "cutmix"):
            share = getattr(self, name)
            fits = share == "auto" if isinstance(share, str) else 0 <= share <= 1
            check(fits, f"defence.{name} is a share between 0 and 1, got {share}")
        check(0 <= self.smoothing < 1, f"defence.smoothing is a share below 1, got {self.smoothing}")
        check(
            not (self.cutmix and self.triplets),
            "defence.cutmix gives images two classes, and defence.triplets needs one: leave one of them out",
        )
        self._check_used()

    @property
    def attacks(self) -> bool:
        return super().attacks and (self.raises or self.hardens)

    def _check_used(self) -> None:
        """Refuse settings that this form or loss does not read."""
        for names, read, reader in (
            (("beta", "beta_warm"), self.form == "trades", "form = trades"),
            (("margin",), self.loss == "proxy-anchor", "loss = proxy-anchor"),
            (("smoothing", "cutmix"), self.loss == "softmax", "loss = softmax"),  # Proxy-Anchor has no soft targets
            (("triplet_margin", "triplet_attack", "sampler"), self.triplets > 0, "triplets"),
            (("drift", "drift_rate"), bool(self.teacher), "teacher"),
            (("awp_from",), self.awp > 0, "awp"),
        ):
            for name in names:
                left = getattr(self, name) == getattr(type(self), name)
                check(read or left, f"defence.{name} is of defence.{reader}: set that too, or leave it out")
        self._check_clean()
        check(
            not self.hardens or self.triplet_margin > 0,
            "defence.triplet_margin must be above 0 with triplet_attack = hm, since LGA scales with it",
        )

    def _check_clean(self) -> None:
        """Refuse a share of the clean loss that the form does not have."""
        if isinstance(self.clean, str):
            return
        check(
            self.form != "natural" or self.clean == 1,
            "defence.clean is of defence.form = minmax or trades: set that too, or leave it out",
        )
        if self.form == "trades":
            check(
                self.clean > 0,
                "defence.clean = 0 would leave TRADES without a clean loss: set a small share such as 0.05, or set "
                "defence.beta instead",
            )
            check(
                self.beta == type(self).beta,
                f"defence.clean sets β already: leave defence.beta out, or set defence.clean={1 / (1 + self.beta):.3g} "
                f"for β = {self.beta:g}",
            )

    @property
    def unread(self) -> Mapping[str, str]:
        """Settings that are not read, and which setting would read them."""
        found: dict[str, str] = {}
        if self.form == "natural" and not self.hardens:
            names = ("eps", "alpha", "steps", "norm", "start", "warm")
            found |= dict.fromkeys(names, "defence.form = minmax or trades attacks, and natural does not")
        if isinstance(self.loss, Named) and self.loss_lr:
            found["proxy_lr"] = "defence.loss_lr is the rate of a loss of yours"
        return found

    @property
    def draws_triplets(self) -> str:
        """What draws triplets from pairs of a class; "" where nothing does."""
        return f"defence.triplets = {self.triplets:g}" if self.triplets else ""

    @property
    def share(self) -> float:
        """The share of the clean loss, c: `clean` where it is set, else 1, 0 or 1 / (1 + β) by the form."""
        if not isinstance(self.clean, str):
            return self.clean
        return {"natural": 1.0, "minmax": 0.0, "trades": 1 / (1 + self.beta)}[self.form]

    @property
    def raises(self) -> bool:
        """Whether anything is perturbed; β = 0 is not clean = 1, since its images are moved and measured."""
        return self.form != "natural" and self.clean != 1

    @property
    def hardens(self) -> bool:
        """Whether triplets are perturbed by hardness manipulation, besides what the form perturbs."""
        return self.triplets > 0 and self.triplet_attack == "hm"

    @property
    def budget(self) -> Budget:
        return self.at(1.0).budget

    def at(self, progress: float) -> _Now:
        """The attack when this share of the training is done; a step keeps its share of ε."""
        factor = grown(progress, self.warm)
        alpha = self.alpha or 2.5 * self.eps / max(self.steps, 1)
        still = self.form == "trades" and self.start == "zero"  # the divergence is 0 at x, and so is its gradient
        return _Now(
            eps=factor * self.eps,
            alpha=factor * alpha,
            steps=self.steps,
            norm=self.norm,
            start=self.start,
            stationary=still,
        )

    def beta_at(self, progress: float) -> float:
        """β when this share of the training is done."""
        beta = self.beta if isinstance(self.clean, str) else (1 - self.clean) / self.clean
        return beta * grown(progress, self.beta_warm)
