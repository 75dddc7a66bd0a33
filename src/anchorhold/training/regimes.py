"""The two regimes of training: a defence is evaluated by the model's embeddings, a pretraining by its features.

The loop is the same for both. Everything in which they differ is here: the losses, what is trained beside the
model, what is evaluated, and what counts as failure.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config.build import to_dict
from ..config.settings import Settings
from ..console import Report
from ..data.images import Images
from ..defences.choices import LossSettings
from ..defences.menu import Defence, defence_named
from ..defences.proxy import Proxies
from ..defences.settings import ProxySettings
from ..defences.teacher import teacher_for
from ..defences.training_loss import is_yours, training_loss
from ..device import precise
from ..distributed import Ranks
from ..errors import check
from ..model.embedder import Embedder
from ..model.frozen import frozen
from ..model.trainable import Trainable
from ..pretraining.features import Precision, Through, Unit
from ..pretraining.menu import PRETRAININGS
from ..random import Key
from ..runs.fields import dig, number
from ..runs.folder import Run
from .checkpoint import Progress
from .evaluation import attention_of, evaluate_model, retrieval, signs_of_collapse
from .safety import judge_collapse, judge_features

__all__ = ["Defending", "Pretraining", "Regime", "begins_with_features", "regime_of"]


@dataclass(eq=False)
class Regime(ABC):
    """What a run trains by, and how its model is evaluated and judged; the fields stay the same for the whole run."""

    settings: Settings
    model: Embedder | Trainable  # on its device already
    images: Images  # the training split
    test: Images
    key: Key  # the run's; each evaluation derives its own
    precision: Precision  # the context in which attacks compute
    losses: Defence = field(init=False)  # each loss that it yields is one optimiser step
    companion: nn.Module | None = field(init=False, default=None)  # trained and saved along with the model
    _start: float | None = field(init=False, default=None)  # R@1 of the features before training, if they are watched

    @property
    def name(self) -> str:
        """The name of the defence or pretraining."""
        return defence_name(self.settings)

    def begin(self, run: Run, at: Progress, ranks: Ranks, note: Callable[[str], None]) -> None:
        """Prepare a session before its first step; `note` shows a text beside the progress bar."""
        return  # a defence needs nothing

    def signs(self) -> dict[str, float]:
        """Numbers that are measured after every epoch."""
        return {}

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Numbers that are measured every `train.evaluate_every` epochs."""

    @abstractmethod
    def judge(self, run: Run, at: Progress, row: Mapping[str, Any], report: Report) -> None:
        """Stop the run, or warn, if the numbers of an epoch (`row`) show that training has failed."""

    def _features(self) -> Through:
        """The pooled features as unit vectors."""
        return Through(self.model, Unit())

    def _begin_features(self, run: Run, at: Progress, ranks: Ranks, note: Callable[[str], None]) -> None:
        """Note R@1 of the features before the first step; a resumed run reads it from run.json."""
        if at.step == 0 and self.test.split.labelled:
            note("evaluating the features before training")
            found, _ = retrieval(self._features(), self.test)
            run.update_json(start=_of_features(found))
        self._start = number(dig(ranks.once(run.read_json), "start", "features_r1"))


@dataclass(eq=False)
class Defending(Regime):
    """Train by a defence: retrieval goes by embeddings, and a collapse ends the run.

    Class proxies that begin with weights are also watched for lost features: R@1 of the pooled features.

    A loss of yours is the companion, or the proxies of classes. It takes the embeddings of the whole batch, on every
    rank.
    """

    def __post_init__(self) -> None:
        self.losses = defence_named(self.name)
        chosen, labels, key = self.settings.defence, self.images.labels, self.key("loss")
        if isinstance(chosen, ProxySettings):
            images, like = next(self.images.plain(torch.arange(2), 2)), self._like()
            with torch.no_grad(), precise():
                teacher = teacher_for(chosen, images, like)
            made = training_loss(chosen, like, labels, key)
            self.companion = made.beside(teacher) if made else Proxies(like, labels, key("begin"), teacher)
        elif isinstance(chosen, LossSettings) and is_yours(chosen):
            self.companion = training_loss(chosen, self._like(), labels, key)

    def _like(self) -> Tensor:
        """Some embeddings of the model, for their length, device and dtype."""
        first = next(self.images.plain(torch.arange(2), 2))
        with frozen(self.model) as embed, torch.no_grad(), precise():
            return embed(first)

    def begin(self, run: Run, at: Progress, ranks: Ranks, note: Callable[[str], None]) -> None:
        if at.step == 0:  # an older run that is resumed may have begun with another λ
            run.update_json(attention=attention_of(self.settings))
        watched = dig(ranks.once(run.read_json), "start", "features_r1") is not None  # by the part before a resume
        if watched or begins_with_features(self.settings, self.model):
            self._begin_features(run, at, ranks, note)

    def signs(self) -> dict[str, float]:
        return signs_of_collapse(self.model, self.images, self.key("collapse"), attention_of(self.settings))

    def evaluate(self) -> dict[str, float]:
        row = evaluate_model(self.model, self.test, self.settings.train, self.key("look"), self.precision)
        if self._start is None:
            return row
        found, _ = retrieval(self._features(), self.test)
        return row | _of_features(found)

    def judge(self, run: Run, at: Progress, row: Mapping[str, Any], report: Report) -> None:
        judge_features(run, self._start, row, report)  # first: a collapse ends the run
        judge_collapse(run, self.settings, at, row, report)


@dataclass(eq=False)
class Pretraining(Regime):
    """Train by a pretraining: retrieval goes by pooled features, and lost features are flagged.

    The head is not trained, so its embeddings show no collapse.
    """

    def __post_init__(self) -> None:
        check(
            isinstance(self.model, Embedder),
            f"{self.name} trains the features of an Embedder, and a module of your own does not say which those are",
        )
        whole = self.settings.model.train == "all"
        check(whole, f"{self.name} trains the whole backbone: leave model.train at all")
        self._entry = PRETRAININGS[self.name]
        self.losses = self._entry.run
        made = self._entry.companion(self.model, self.images.labels, self.settings.defence)
        self.companion = made.to(self.images.labels.device)

    def begin(self, run: Run, at: Progress, ranks: Ranks, note: Callable[[str], None]) -> None:
        self._begin_features(run, at, ranks, note)

    def evaluate(self) -> dict[str, float]:
        settings, key = self.settings, self.key("look")
        row = self._entry.measure(self.model, self.companion, self.images, settings.defence, key, self.precision)
        if not self.test.split.labelled:
            return row
        found = evaluate_model(self._features(), self.test, settings.train, key, self.precision)
        return row | _of_features(found)

    def judge(self, run: Run, at: Progress, row: Mapping[str, Any], report: Report) -> None:
        judge_features(run, self._start, row, report)


def begins_with_features(settings: Settings, model: nn.Module) -> bool:
    """Whether a defence is watched for lost features: class proxies that change a backbone with weights to lose."""
    starts = isinstance(model, Embedder) and model.weights_report is not None
    return starts and isinstance(settings.defence, ProxySettings) and settings.model.train != "head"


def _of_features(found: Mapping[str, float]) -> dict[str, float]:
    return {f"features_{name}": value for name, value in found.items()}


def regime_of(settings: Settings) -> type[Regime]:
    """The regime for the defence or pretraining that the settings name."""
    return Pretraining if defence_name(settings) in PRETRAININGS else Defending


def defence_name(settings: Settings) -> str:
    return str(to_dict(settings)["defence"]["name"])
