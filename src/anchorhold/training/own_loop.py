"""The adversarial batch for a training loop of yours, plain or Lightning.

    state = {}
    for images, labels in loader:
        batch = ah.adversary(model, images, labels, "hm-lga", state=state)
        loss = my_loss(model(batch.images), batch.labels)
        optimiser.zero_grad(); loss.backward(); optimiser.step()

A defence runs its step up to the loss, on a `Step` that keeps the images that it would train on. Gradients are of
images only: the model's `.grad`, modes and buffers stay as they were.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config.recipes import recipe_names, settings_from
from ..config.settings import Settings
from ..defences.choices import LossSettings
from ..defences.menu import DEFENCES, Defence, defence_named
from ..defences.own import name_of
from ..defences.settings import ProxySettings
from ..defences.step import Batch, Step
from ..defences.training_loss import TrainingLoss, is_yours, training_loss
from ..errors import DataError, SettingsError, check, nearest
from ..extensions import is_code
from ..mining import mine_any, numbered
from ..model.frozen import frozen
from ..model.wrap import as_victim
from ..perturb.settings import Threat
from ..pretraining.menu import PRETRAININGS
from ..random import Key
from ..triplets import Anchors, Sampler, Triplets
from ..triplets import mine as mine_pairs
from .preparing import against
from .regimes import defence_name

__all__ = ["AdversarialBatch", "adversary"]

STEP = "step"  # in `state`: how many batches there were


@dataclass(frozen=True)
class AdversarialBatch:
    """What a defence would train on in this step: what `adversary` returns.

    Args:
        images: (N, C, H, W) in [0, 1], perturbed.
        labels: (N,) of these images.
        origins: (N,) which image of your batch each one comes from.
        triplets: positions (T,) in `images` of anchors, positives and negatives; None where the defence has none.
        loss: the defence's own loss of this batch, without gradient.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    >>> batch = adversary(net, torch.rand(6, 3, 2, 2), [0, 0, 1, 1, 2, 2], "hm-lga", state={}, steps=1)
    >>> batch.images.shape[1:], len(batch.images) == len(batch.labels) == len(batch.origins)
    (torch.Size([3, 2, 2]), True)
    """

    images: Tensor
    labels: Tensor
    origins: Tensor
    triplets: tuple[Tensor, Tensor, Tensor] | None
    loss: Tensor


def adversary(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | Sequence[int] | Sequence[str],
    defence: str | Callable[..., Any] = "hm-lga",
    *,
    threat: Threat | str | None = None,
    state: dict[str, Tensor] | None = None,
    seed: int = 0,
    epoch: int = 0,
    epochs: int = 1,
    **settings: Any,
) -> AdversarialBatch:
    """The images that a defence would train on in this step, with their labels: for a training loop of yours.

    For hardness manipulation, ACT and CA-TRIDE these are triplets, (a, p, n) one after the other; ICS adds the clean
    anchor and positive to each. Defences that move single images (est, madry) give your batch in its order. Defences
    that also train on clean images (ses, trades, adml) give those first. Images that no defence can pair, because
    their class has one image in the batch, serve as negatives only.

    Args:
        model: any module from images in [0, 1] to vectors. Attacks go by unit vectors, whatever the module returns.
        images: (B, C, H, W) in [0, 1], on the model's device.
        labels: (B,) numbers or names, in any order.
        defence: the name of a recipe or of a defence, `module:function`, or a function `defence(step, settings)`.
        threat: how far images may change, `ah.Threat(eps=0.5, norm="l2")`, instead of the defence's own.
        state: what the defence remembers from step to step, such as LGA's previous loss. Give an empty dict once, and
            the same dict in every step; save it with your checkpoint. Without it, every call is a first step.
        seed: of random starts and of mining; with `state`, each step draws anew.
        epoch: of your loop; CA-TRIDE's attack grows with epoch / epochs.
        epochs: of your loop.
        **settings: settings of the defence, such as eps=8/255, steps=8, sampler=my_sampler.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    >>> batch = adversary(net, torch.rand(4, 3, 2, 2), [0, 1, 1, 0], "madry", eps=0.1, alpha=0.1, steps=1)
    >>> batch.images.shape, batch.labels
    (torch.Size([4, 3, 2, 2]), tensor([0, 1, 1, 0]))
    """
    chosen = _settings(defence, settings)
    chosen = chosen if threat is None else against(threat, chosen)
    check(
        not isinstance(chosen.defence, ProxySettings),
        "the defence proxy trains proxies of its own, which your loop would not: choose madry with loss=MyLoss(…)",
    )
    victim, numbers = as_victim(model), _checked(images, labels)
    memory = {} if state is None else state
    count = int(memory.get(STEP, torch.tensor(0)))
    key = Key.of(seed)("adversary", count)
    step = _Watched(
        model=victim,
        batch=Batch(images.detach(), numbers, torch.arange(len(images), device=images.device)),
        epoch=epoch,
        epochs=epochs,
        key=key,
        state=memory,
        companion=_loss(chosen.defence, victim, images, key),
    )
    run: Defence = defence_named(defence_name(chosen))
    before = set(memory)
    loss = next(iter(run(step, chosen.defence)), None)
    if loss is None or not step.found:
        raise SettingsError("the defence trains on no image of this batch: give one with two images of a class or more")
    if state is None and set(memory) - before:
        told = ", ".join(sorted(set(memory) - before))
        advice = "give state={} once, and the same dict in every step"
        warnings.warn(f"the defence remembers {told} from step to step: {advice}", stacklevel=2)
    memory[STEP] = torch.tensor(count + 1)
    return step.result(loss.detach())


def _settings(defence: str | Callable[..., Any], changes: dict[str, Any]) -> Settings:
    """The settings of a recipe, or of a defence by its name, with `changes` to the defence's own."""
    check("name" not in changes, "name the defence as `defence`: leave `name` out")
    name = defence if isinstance(defence, str) else name_of(defence)
    check(name not in ("natural", *PRETRAININGS), f"{name} gives no adversarial batch: choose a defence that perturbs")
    if name in recipe_names() or name.endswith(".toml"):
        return settings_from(name, {"defence": changes})
    known = {*recipe_names(), *DEFENCES} - {"base", "natural", *PRETRAININGS}
    check(name in DEFENCES or is_code(name), f"no defence or recipe {name!r}; {nearest(name, known)}")
    return settings_from("", {"defence": {**changes, "name": name}})


def _loss(settings: Any, model: nn.Module, images: Tensor, key: Key) -> TrainingLoss | None:
    """The loss of yours that a defence climbs or computes. Proxies have to be given: your loop trains them."""
    if not isinstance(settings, LossSettings) or not is_yours(settings):
        return None
    with frozen(model) as embed, torch.no_grad():
        made = training_loss(settings, embed(images[:2]), None, key("loss"), tried=False)
    ready = made is None or settings.loss.made or not list(made.parameters())  # type: ignore[attr-defined]
    check(ready, "this loss has parameters of its own, which your loop trains: give the object, loss=MyLoss(…)")
    return made


def _checked(images: Tensor, labels: Tensor | Sequence[int] | Sequence[str]) -> Tensor:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        raise DataError("images must be a tensor of floats (B, C, H, W) in [0, 1]")
    numbers = numbered(labels).to(images.device)
    if numbers.shape != (len(images),):
        raise DataError(f"{len(images)} images and labels of shape {tuple(numbers.shape)}; give each image its label")
    return numbers


@dataclass(kw_only=True)
class _Watched(Step):
    """A step that keeps what is embedded to train on, and embeds without a trace in the model."""

    found: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # images and where they come from
    told: list[Tensor] = field(default_factory=list)

    def trains_on(self, origins: Tensor) -> None:
        self.told.append(origins)

    def embed(self, images: Tensor) -> Tensor:
        self.found.append((images.detach(), self.told.pop() if self.told else None))
        with frozen(self.model) as view, torch.no_grad():
            return view(images)

    def mine(
        self,
        sampler: str | Sampler,
        embeddings: Tensor,
        margin: float,
        purpose: str = "source",
        *,
        lower: float | None = None,
        upper: float | None = None,
        own_positive: bool = True,
        anchors: Anchors = "even",
    ) -> Triplets:
        """As in training where your batch is in pairs; else the same sampler, in any order."""
        labels, key = self.batch.labels, self.key(purpose)
        if len(labels) % 2 == 0 and torch.equal(labels[0::2], labels[1::2]):
            cuts: dict[str, Any] = {"margin": margin, "lower": lower, "upper": upper}
            return mine_pairs(sampler, embeddings, labels, key, **cuts, own_positive=own_positive, anchors=anchors)
        half = anchors == "even"  # and never with an anchor as its own positive
        found = mine_any(sampler, embeddings, labels, key, half=half, margin=margin, lower=lower, upper=upper)
        if not len(found):
            raise DataError("the batch gives no triplet: it needs two classes, and two images of one of them")
        return found

    def result(self, loss: Tensor) -> AdversarialBatch:
        """What was embedded last before the loss."""
        images, origins = self.found[-1]
        if origins is None:
            check(
                len(images) == len(self.batch.labels),
                f"the defence embeds {len(images)} images of a batch of {len(self.batch.labels)} and does not say "
                "which: call step.trains_on(positions) before step.embed",
            )
            origins = torch.arange(len(images))
        origins = origins.to(images.device)
        triplets = None
        if origins.ndim == 2:
            places = torch.arange(origins.numel(), device=images.device).view(origins.shape)
            triplets = (places[:, 0], places[:, 1], places[:, 2])
            origins = origins.flatten()
        return AdversarialBatch(images, self.batch.labels[origins], origins, triplets, loss)
