"""The strong audit: the ensemble on every goal, in fixed batches, and its results.

A wrong neighbour is attacked at several ε, all other goals at the audit's own. Each ε starts from the results of the
one before, and R@1 can only fall as ε grows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attacks.goal import Goal
from ..attacks.menu import ATTACKS
from ..columns import ERS_COLUMNS, in_units, rises
from ..geometry import euclidean
from ..perturb.ball import Ball
from ..scores import ers
from .curves import curve_of
from .doubts import doubts_of, overstated
from .ensemble import Contest, Surrogate, Task, steps_at_most
from .members import BLACK, MEMBERS, SQUARE_QUERIES, WARM, Member
from .outcomes import Outcome, RunRows
from .plan import AuditSettings
from .realisable import FILE_FORMS, JPEG_CHANNELS, levels_within
from .receipts import Receipts, receipted
from .shards import REJECTED, Shard, joined_rows
from .subject import Subject

__all__ = [
    "Strong",
    "additions",
    "strengthen",
]


LAYOUT = 2  # of the rows in a shard: rows of another layout are not read


@dataclass(frozen=True, eq=False)
class Strong:
    """The results of the ensemble: rows like those of a standard run, and facts about them."""

    runs: tuple[RunRows, ...]
    curve: dict[str, Any] | None
    curve_rows: dict[str, Tensor]
    about: dict[str, Any]
    doubts: dict[str, float]
    receipts: dict[str, dict[str, Tensor]]


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
        return f"{LAYOUT} {[m.name for m in self.members]} {SQUARE_QUERIES} {list(self.ladder)} {other}"


def strengthen(
    subject: Subject,
    chosen: Sequence[Task],
    standard: Sequence[RunRows],
    *,
    members: Sequence[Member] = MEMBERS,
    surrogate: Surrogate | None = None,
    epsilons: Sequence[float] = (),
) -> Strong:
    """The ensemble on every goal, batch by batch; batches with a shard are not repeated."""
    members = [m for m in members if surrogate is not None or m.kind != "transfer"]
    attacked, eps = subject.attacked, subject.settings.ball.eps
    ensemble = Ensemble(tuple(members), surrogate, tuple(sorted({*epsilons, eps})))
    runs, whole, receipts = [], {}, {}
    levels = {task.name: len(ensemble.against(task, eps).ladder) for task in chosen}
    black = [m.name for m in members if m.kind == "black"]
    white, usual = subject.settings.method == "pgd", subject.settings.budget.steps
    steps = queries = 0
    for task in chosen:
        count = len(attacked[task.goal.side])
        queries += SQUARE_QUERIES * len(black) * levels[task.name] * count
        steps += white * count * steps_at_most(task, levels[task.name], usual, surrogate is not None)
    subject.report.say(f"strong: up to {steps:,} image-steps and {queries:,} queries of {' and '.join(black)}")
    for task in chosen:
        label = f"{task.name}.strong"
        known = _contested(subject, ensemble.against(task, eps), task, label)
        runs.append(_run_rows(task, label, known, standard))
        whole[task.name] = known.rows
        receipts[task.name] = {n.removeprefix("receipt/"): r for n, r in known.rows.items() if n.startswith("receipt/")}
    doubts = doubts_of(chosen, whole, members)
    files = {form: _columns(chosen, whole, f"{form}/") for form in FILE_FORMS}
    curve: dict[str, Any] | None = None
    curve_rows: dict[str, Tensor] = {}
    if epsilons:
        task, own = next((task, run) for task, run in zip(chosen, runs) if task.name == "recall")
        curve, curve_rows = _curve(subject, task, whole, ensemble, own)
        curve["doubts"] = doubts
    return Strong(
        tuple(runs),
        curve,
        curve_rows,
        {
            "members": [m.name for m in members],
            "surrogate": None if surrogate is None else surrogate.weights,
            "square_queries": SQUARE_QUERIES,
            "image_steps": sum(run.image_steps for run in runs),
            "queries": int(sum(rows["queries"].sum() for rows in whole.values())),
            "after": {task.name: _after(task, whole[task.name], members) for task in chosen},
            "realisable": {form: each for form, each in files.items() if each["columns"]},
        },
        doubts,
        receipts,
    )


def _contested(subject: Subject, ensemble: Ensemble, task: Task, label: str) -> Shard:
    """All rows of one goal; batches without a shard are computed, each by one rank."""
    ids, shards, scene = subject.attacked[task.goal.side], subject.shards, subject.scene
    made = f"{ensemble.said} {task.goal.run} {[goal.run for goal in task.first]}"
    known = shards.whole(label, made)
    if known is not None:
        return known
    batches, shown = ids.split(subject.settings.batch), set(receipted(ids))
    kept = shards.kept(label, len(batches), made)
    done = sum(len(batches[index]) for index in kept)
    with subject.report.task(f"{task.name} (strong)", len(ids), done) as advance:

        def climbed(part: Tensor, images: Tensor) -> tuple[dict[str, Tensor], int]:
            nonlocal done
            with subject.precision():
                contest = Contest(task, subject.embed, images.to(scene.gallery.dtype), scene, part, subject.key)
                rows = _climb_ladder(contest, ensemble, subject.settings, shown)
            done += len(part) * shards.ranks.size
            advance(min(done, len(ids)), "")
            return rows, contest.steps

        parts = shards.each(label, batches, made, kept, subject.material.side(task.goal.side), climbed)
    every = Shard(joined_rows(parts), sum(each.seconds for each in parts), sum(each.image_steps for each in parts))
    return shards.keep(label, None, every, made)


def _climb_ladder(contest: Contest, ensemble: Ensemble, settings: AuditSettings, kept: set[int]) -> dict[str, Tensor]:
    """All members at the audit's own ε, then at smaller and larger ones; returns the rows."""
    task, rows, ball = contest.task, {"ids": contest.ids}, settings.ball
    if contest.targets is not None:
        rows["targets"] = contest.targets
    rows |= {f"before/{name}": row for name, row in contest.initial.items()}
    rows |= _entered(contest, ensemble, settings, ball)
    rows |= _snapshot(contest, ball, kept)
    own = ensemble.ladder.index(ball.eps)
    # A sample that is beaten at an ε is beaten at every larger one. Where the attack found nothing, it is taken to find
    # nothing at smaller ε. So each sample is attacked until its level is known, and no further.
    smaller, beaten = _climb_on(contest, ensemble, settings, range(own - 1, -1, -1), _beaten)
    larger, _ = _climb_on(contest, ensemble, settings, range(own + 1, len(ensemble.ladder)), _holding)
    rows |= {name: rows[name] | row for name, row in beaten.items()}
    curve = {own: contest.measures[task.main], **smaller, **larger}
    rows |= {f"curve/{place}": row for place, row in curve.items()}
    rows |= {REJECTED: contest.rejected} if bool(contest.rejected.any()) else {}
    rows["queries"] = torch.tensor([contest.queries])
    return rows


def _climb_on(
    contest: Contest,
    ensemble: Ensemble,
    settings: AuditSettings,
    places: Sequence[int],
    asks: Callable[[Contest], Tensor],
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Climb from the results of a contest along the ladder, each ε from the one before it.

    `asks` are the samples that are attacked at the next ε; the others keep their result. Returns the contested measure
    at each place, and which samples the members of each kind beat at one of them.
    """
    at, numbers = contest, torch.arange(len(contest.ids), device=contest.ids.device)
    now, levels = contest.measures[contest.task.main], {}
    beaten: dict[str, Tensor] = {}
    for place in places:
        asked, now = asks(at), now.clone()
        found, clean = at.found()[asked], at.clean[asked]
        at, numbers, levels[place] = at.part(asked), numbers[asked], now
        if not len(numbers):
            continue
        here = replace(settings.ball, eps=ensemble.ladder[place])
        rows = _entered(at, ensemble, settings, here, here.project(found, clean))
        now[numbers] = at.measures[contest.task.main]
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
    rows = {f"held/{name}": row for name, row in contest.measures.items()}
    clean = contest.scene.clean(contest.task.goal.side)[contest.ids]
    rows["shift"] = euclidean(contest.embeddings, clean).double()
    for form, change in FILE_FORMS.items():
        if form == "8 bits" or contest.images.shape[1] in JPEG_CHANNELS:
            after = contest.measure(contest.embedded(change(contest.images, contest.clean, ball)))
            rows |= {f"{form}/{name}": row for name, row in after.items()}
    picked = torch.tensor([place for place, number in enumerate(contest.ids.tolist()) if number in kept]).long()
    picked = picked.to(contest.ids.device)
    levels = levels_within(contest.images[picked], contest.clean[picked], ball)
    rows |= {"receipt/ids": contest.ids[picked], "receipt/images": levels}
    rows["receipt/measure"] = contest.measures[contest.task.main][picked]
    if len(picked):  # stated measures are of the images in the files
        seen = contest.embedded(levels.to(contest.clean.dtype) / 255, picked)
        rows["receipt/measure"] = contest.measure(seen, picked)[contest.task.main]
    if contest.targets is not None:
        rows["receipt/targets"] = contest.targets[picked]
    return rows


# ---------------------------------------------------------------- results


def _run_rows(task: Task, label: str, shard: Shard, standard: Sequence[RunRows]) -> RunRows:
    rows, held = shard.rows, {}
    for column, measure in task.columns.items():
        worst = rows[f"held/{measure}"]
        for run in standard:  # repeated runs are equal; if a device computes differently, the worse one counts
            known = run.measures.get("corrected", {}).get(column)
            if known is not None:
                worst = torch.maximum(worst, known) if rises(column) else torch.minimum(worst, known)
        held[column] = worst
    before = {column: rows[f"before/{measure}"] for column, measure in task.columns.items()}
    return RunRows(
        label=label,
        attack=task.name,
        goals={"strong": {}},
        side=task.goal.side,
        ids=rows["ids"],
        targets=rows.get("targets"),
        shift=rows["shift"],
        measures={"strong": held},
        initial={"strong": before},
        examples={},
        seconds=shard.seconds,
        image_steps=shard.image_steps,
        rejected=int(rows[REJECTED].sum()) if REJECTED in rows else 0,
    )


def _columns(chosen: Sequence[Task], whole: Mapping[str, Mapping[str, Tensor]], head: str) -> dict[str, Any]:
    """Means of every column under `head` of the rows, and ERS where all its columns exist."""
    values = {}
    for task in chosen:
        for column, measure in task.columns.items():
            row = whole[task.name].get(head + measure)
            if row is not None:
                values[column] = in_units(column) * float(row.nanmean())
    score = ers({name: values[name] for name in ERS_COLUMNS}) if set(ERS_COLUMNS) <= set(values) else None
    return {"columns": values, "ers": score}


def _after(task: Task, rows: Mapping[str, Tensor], members: Sequence[Member]) -> dict[str, float]:
    """The contested measure after the standard runs and after each member, in the units of the table."""
    names = ["standard", *(m.name for m in members if m.wants(task.goal))]
    return {name: in_units(task.main) * float(rows[f"after/{name}"].nanmean()) for name in names}


def _curve(
    subject: Subject, task: Task, whole: Mapping[str, Mapping[str, Tensor]], ensemble: Ensemble, own: RunRows
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """R@1 at every ε, the clean value first, and the rows behind it. `own` has the worst at the audit's ε."""
    rows = whole[task.name]
    heads = [f"before/{task.main}", *(f"curve/{place}" for place in range(len(ensemble.ladder)))]
    kept, ids = torch.stack([rows[head] for head in heads]), rows["ids"]
    worst = next(iter(own.measures["strong"].values())).to(kept)
    for place, eps in enumerate(ensemble.ladder, 1):
        if eps >= subject.settings.ball.eps:  # several starts of a standard run may have found more
            kept[place] = torch.minimum(kept[place], worst)
    curve = curve_of(
        task,
        ensemble.members,
        kept,
        ensemble.ladder,
        subject.scene.labels.cpu()[ids.cpu()],
        key=subject.key,
        resamples=subject.settings.resamples,
    )
    return curve, {"ids": ids, "R@1": kept}


def additions(
    strong: Strong,
    outcomes: Mapping[str, Outcome],
    settings: Mapping[str, Any],
    chosen: Sequence[Task],
    model: Mapping[str, Any],
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields it adds to an Audit: a curve, facts about the ensemble, and receipts."""
    shown = {"curve": strong.curve, "curve_rows": strong.curve_rows}
    if settings["strength"] != "strong":
        return shown
    about = {"model": model["weights"], "data": data}
    about |= {name: settings[name] for name in ("eps", "norm", "seed", "limit", "resize", "crop")}
    how = {
        task.name: {
            "attack": "margin" if task.name == "recall" else task.name,
            "measure": task.main,
            "settings": {name: value for name, value in asdict(task.goal).items() if name != "protocol"},
        }
        | ({} if task.name == "recall" or task.name in ATTACKS else {"code": _code(task.goal)})
        for task in chosen
    }
    return {
        **shown,
        "strong": strong.about | {"doubts": strong.doubts | overstated(outcomes)},
        "receipts": Receipts(about, strong.receipts, how),
    }


def _code(goal: Goal) -> str:
    """Where an attack of the user's comes from, for the person who verifies it; nothing is imported by this name."""
    return f"{type(goal).__module__}:{type(goal).__qualname__}"
