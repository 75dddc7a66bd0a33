"""The input of the flags: the attacked model, and the results of the audit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..console import duration
from ..model.no_gradients import gives_gradients
from ..perturb.settings import VALUES_ONLY, Threat
from ..scores import Interval
from . import flags
from .result import Audit
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
    with subject.precision():
        probe = flags.Probe(
            subject.embed,
            images,
            subject.scene,
            ids,
            settings.ball,
            budget,
            subject.key("flags"),
            intervals=spans,
            measured=values,
            strong=doubts,
            differentiable=climbs,
            queries=settings.steps if settings.method in VALUES_ONLY else 0,
            draws=subject.about["model"].get("draws", 1),
        )
        return flags.examine(probe)
