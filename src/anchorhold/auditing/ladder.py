"""The ladder of ε: one batch of samples climbs it, and the rows of what each ε leaves.

All members attack at the audit's own ε first. From the results they go on to smaller ε, where an attack succeeded, and
to larger ones, where none did.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import euclidean
from ..model.frozen import Embed
from ..perturb.ball import Ball
from .ensemble import Contest, Surrogate, Task
from .members import BLACK, REVISION, SQUARE_QUERIES, WARM, Member
from .plan import AuditSettings
from .realisable import FILE_FORMS, JPEG_CHANNELS, levels_within
from .shards import REJECTED

__all__ = ["Counted", "Ensemble", "climb_ladder"]

LAYOUT = 2  # of the rows in a shard: rows of another layout are not read


class Counted:
    """A model that counts the images it embeds: without gradients each is a query, which may cost."""

    def __init__(self, embed: Embed) -> None:
        self.embed, self.images = embed, 0

    def __call__(self, images: Tensor) -> Tensor:
        self.images += len(images)
        return self.embed(images)


@dataclass(frozen=True)
class Ensemble:
    """The members, a second model to transfer from, and every ε, the smallest first."""

    members: tuple[Member, ...]
    surrogate: Surrogate | None
    ladder: tuple[float, ...]

    def against(self, task: Task, eps: float) -> "Ensemble":
        """The same for this goal: only a wrong neighbour is attacked at every ε, the others at the audit's own."""
        return self if task.name == "recall" else replace(self, ladder=(eps,))

    @property
    def said(self) -> str:
        """What the rows of a batch depend on, as recorded in their shard."""
        other = "" if self.surrogate is None else self.surrogate.weights
        names = [m.name for m in self.members]
        return f"{LAYOUT}.{REVISION} {names} {SQUARE_QUERIES} {list(self.ladder)} {other}"


def climb_ladder(contest: Contest, ensemble: Ensemble, settings: AuditSettings, kept: set[int]) -> dict[str, Tensor]:
    """All members at the audit's own ε, then at smaller and larger ones; returns the rows."""
    task, rows, ball = contest.task, {"ids": contest.ids}, settings.ball
    if contest.targets is not None:
        rows["targets"] = contest.targets
    rows |= {f"before/{name}": row for name, row in contest.initial.items()}
    rows |= _entered(contest, ensemble, settings, ball)
    rows |= _snapshot(contest, ball, kept)
    own = ensemble.ladder.index(ball.eps)
    held = rows[f"held/{task.main}"]
    # A sample that is beaten at an ε is beaten at every larger one. Where the attack found nothing, it is taken to find
    # nothing at smaller ε. So each sample is attacked until its level is known, and no further.
    smaller, beaten = _climb_on(contest, held, ensemble, settings, range(own - 1, -1, -1), _beaten)
    larger, _ = _climb_on(contest, held, ensemble, settings, range(own + 1, len(ensemble.ladder)), _holding)
    rows |= {name: rows[name] | row for name, row in beaten.items()}
    curve = {own: held, **smaller, **larger}
    rows |= {f"curve/{place}": row for place, row in curve.items()}
    rows |= {REJECTED: contest.rejected} if bool(contest.rejected.any()) else {}
    rows["queries"] = torch.tensor([contest.queries])
    return rows


def _climb_on(
    contest: Contest,
    held: Tensor,
    ensemble: Ensemble,
    settings: AuditSettings,
    places: Sequence[int],
    asks: Callable[[Contest], Tensor],
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Climb from the results of a contest along the ladder, each ε from the one before it.

    `held` is the contested measure at the audit's own ε. `asks` are the samples that are attacked at the next ε; the
    others keep their result. Returns the contested measure at each place, and which samples the members of each kind
    beat at one of them.
    """
    at, numbers = contest, torch.arange(len(contest.ids), device=contest.ids.device)
    now, levels = held, {}
    beaten: dict[str, Tensor] = {}
    for place in places:
        asked, now = asks(at), now.clone()
        found, clean = at.found()[asked], at.clean[asked]
        at, numbers, levels[place] = at.part(asked), numbers[asked], now
        if not len(numbers):
            continue
        here = replace(settings.ball, eps=ensemble.ladder[place])
        rows = _entered(at, ensemble, settings, here, here.project(found, clean))
        now[numbers] = at.answer()[1][contest.task.main]
        for name in (each for each in rows if each.startswith("beaten/")):
            beaten.setdefault(name, torch.zeros(len(contest.ids), dtype=torch.bool, device=now.device))
            beaten[name][numbers] |= rows[name]
        contest.rejected[numbers] |= at.rejected
        contest.steps += at.steps
        contest.queries += at.queries
    return levels, beaten


def _beaten(contest: Contest) -> Tensor:
    """Samples that fell to an attack: a smaller ε may be enough."""
    task, size = contest.task, len(contest.scene.gallery)
    return task.lost(contest.measures[task.main], size) & ~task.lost(contest.initial[task.main], size)


def _holding(contest: Contest) -> Tensor:
    """Samples that hold: a larger ε may beat them."""
    return ~contest.task.lost(contest.measures[contest.task.main], len(contest.scene.gallery))


def _entered(
    contest: Contest, ensemble: Ensemble, settings: AuditSettings, ball: Ball, starts: Tensor | None = None
) -> dict[str, Tensor]:
    """The standard attacks and all members at one ε, first from the results of another ε where they are given.

    Returns the contested measure after each, and which samples the members of each kind beat after all before them.
    """
    task, rows, budget = contest.task, {}, settings.budget
    white = settings.method == "pgd"  # without gradients a step has no length
    scale = ball.eps / settings.ball.eps if settings.ball.eps else 1.0
    contest.standard(ball, replace(budget, alpha=budget.alpha * scale) if white else budget, method=settings.find)
    rows["after/standard"] = contest.measures[task.main]
    if starts is not None:
        contest.enter(WARM if white else BLACK[0], ball, ensemble.surrogate, starts)
    for member in (each for each in ensemble.members if each.wants(task.goal)):
        before = contest.measures[task.main]
        contest.enter(member, ball, ensemble.surrogate)
        rows[f"after/{member.name}"] = now = contest.measures[task.main]
        gain, kind = (now - before).abs() > 0.05, f"beaten/{member.kind}"
        rows[kind] = gain | rows.get(kind, torch.zeros_like(gain))
    return rows


def _snapshot(contest: Contest, ball: Ball, kept: set[int]) -> dict[str, Tensor]:
    """Results at the audit's own ε: measures, the same as files, and receipts."""
    embeddings, measures = contest.answer()
    rows = {f"held/{name}": row for name, row in measures.items()}
    clean = contest.scene.clean(contest.task.goal.side)[contest.ids]
    rows["shift"] = euclidean(embeddings, clean).double()
    for form, change in FILE_FORMS.items():
        if form == "8 bits" or contest.images.shape[1] in JPEG_CHANNELS:
            after = contest.measure(contest.embedded(change(contest.images, contest.clean, ball)))
            rows |= {f"{form}/{name}": row for name, row in after.items()}
    picked = torch.tensor([place for place, number in enumerate(contest.ids.tolist()) if number in kept]).long()
    picked = picked.to(contest.ids.device)
    levels = levels_within(contest.images[picked], contest.clean[picked], ball)
    rows |= {"receipt/ids": contest.ids[picked], "receipt/images": levels}
    rows["receipt/measure"] = measures[contest.task.main][picked]
    if len(picked):  # stated measures are of the images in the files
        seen = contest.embedded(levels.to(contest.clean.dtype) / 255, picked)
        rows["receipt/measure"] = contest.measure(seen, picked)[contest.task.main]
    if contest.targets is not None:
        rows["receipt/targets"] = contest.targets[picked]
    return rows
