"""The input of the flags: the attacked model, and the results of the audit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..columns import NOT_PERCENT, radius
from ..console import duration
from ..model.frozen import Embed
from ..model.no_gradients import gives_gradients
from ..perturb.settings import VALUES_ONLY, Threat
from ..scores import Interval
from . import flags
from .result import Audit
from .shards import REJECTED
from .subject import Subject

__all__ = ["Evidence", "flags_of"]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The input of `examine`, while the frozen view of the model is open."""

    subject: Subject
    audit: Audit  # complete except for the flags

    def images(self, count: int = 64) -> tuple[Tensor, Tensor]:
        """Evenly spaced attacked queries, and their ids."""
        ids = self.subject.attacked["query"]
        places = torch.linspace(0, len(ids) - 1, min(count, len(ids))).round().long()
        (pixels,) = self.subject.material.query.plain(ids[places], batch=len(places))
        return pixels, ids[places]


def flags_of(evidence: Evidence) -> list[flags.Flag]:
    """The flags of some attacked queries, with the budget of the audit."""
    images, ids = evidence.images()
    subject = evidence.subject
    settings, last = subject.settings, list(evidence.audit.protocols.values())[-1]
    known = {name: score for name, score in (("ERS", last.ers), ("ARS", last.ars.get("measured"))) if score is not None}
    spans = {
        name: Interval(score.low, score.high, 0.95, settings.resamples)
        for name, score in known.items()
        if score.low is not None and score.high is not None
    }
    values = {name: score.value for name, score in known.items()}
    doubts = (evidence.audit.strong or evidence.audit.curve or {}).get("doubts", {})
    # The checks climb by PGD, whatever the method of the audit was.
    usual = settings.method == "pgd" or not settings.steps
    budget = settings.budget if usual else Threat(settings.eps, settings.norm, alpha=None).budget
    cost, runs = flags.image_steps_at_most(settings.ball, budget, len(images)), evidence.audit.runs
    climbs = gives_gradients(subject.model)
    if climbs and cost and (spent := sum(run.image_steps for run in runs)):
        # With few queries the checks are most of the work, so say beforehand how long they take.
        took = duration(cost * sum(run.seconds for run in runs) / spent)
        subject.report.say(f"running sanity checks: up to {cost:,} image-steps, about {took}")
    subject.redraw("flags")
    with subject.precision(), _counted(subject, cost if climbs else 0) as embed:
        probe = flags.Probe(
            embed,
            images,
            subject.scene,
            ids,
            settings.ball,
            budget,
            subject.key("flags"),
            intervals=spans if known else dict(_without_scores(evidence.audit)),
            measured=values,
            strong=doubts,
            differentiable=climbs,
            queries=settings.steps if settings.method in VALUES_ONLY else 0,
            rejected=_rejected(evidence.audit, doubts),
            draws=subject.draws,
        )
        return flags.examine(probe)


@contextmanager
def _counted(subject: Subject, cost: int) -> Iterator[Embed]:
    """The model, with a progress bar of its gradient steps; `cost` is their largest number."""
    if not cost:
        yield subject.embed
        return
    done = 0
    with subject.report.task("sanity checks", cost) as advance:

        def embed(images: Tensor) -> Tensor:
            nonlocal done
            if images.requires_grad:
                done = min(done + len(images), cost - 1)  # finished images skip steps, so only the end is the end
                advance(done, "")
            return subject.embed(images)

        yield embed
        advance(cost, "")


def _rejected(audit: Audit, doubts: Mapping[str, Any]) -> float:
    """The largest share of an attack's samples that had a perturbed image whose embedding is not finite."""
    shares = [run.rejected / max(len(run.ids), 1) for run in audit.runs]
    return max([*shares, float(doubts.get(REJECTED, 0.0)) / 100])


def _without_scores(audit: Audit) -> Iterator[tuple[str, Interval]]:
    """The intervals of an audit without ERS and ARS: of R@1 at every ε, or else of each column in percent."""
    if audit.curve is not None and "R@1" in audit.curve.get("intervals", {}):
        for eps, (low, high) in zip(audit.curve["eps"], audit.curve["intervals"]["R@1"]):
            name = f"R@1 at {radius(eps, audit.settings.get('norm', 'linf'))}" if eps else "clean R@1"
            yield name, Interval(low, high, 0.95, audit.curve["queries"])
        return
    samples = min((len(run.ids) for run in audit.runs), default=1)
    for name, column in list(audit.protocols.values())[-1].columns.items():
        if name not in NOT_PERCENT and column.low is not None and column.high is not None:
            yield name, Interval(column.low, column.high, 0.95, samples)
