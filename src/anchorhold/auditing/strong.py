"""The strong audit: the ensemble on every goal, in fixed batches, and its results.

A wrong neighbour is attacked at several ε, all other goals at the audit's own. Each ε starts from the results of the
one before, and R@1 can only fall as ε grows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..attacks.goal import Goal
from ..attacks.menu import ATTACKS
from ..columns import ERS_COLUMNS, in_units, rises
from ..perturb.settings import VALUES_ONLY
from ..scores import ers
from .curves import curve_of
from .doubts import doubts_of, overstated
from .ensemble import Contest, Surrogate, Task, queries_at_most, standing, steps_at_most
from .ladder import Counted, Ensemble, climb_ladder
from .members import MEMBERS, SQUARE_QUERIES, Member
from .outcomes import Outcome, RunRows
from .realisable import FILE_FORMS
from .receipts import Receipts, receipted
from .shards import REJECTED, Shard, joined_rows
from .subject import Subject

__all__ = [
    "Strong",
    "additions",
    "strengthen",
]


@dataclass(frozen=True, eq=False)
class Strong:
    """The results of the ensemble: rows like those of a standard run, and facts about them."""

    runs: tuple[RunRows, ...]
    curve: dict[str, Any] | None
    curve_rows: dict[str, Tensor]
    about: dict[str, Any]
    doubts: dict[str, float]
    receipts: dict[str, dict[str, Tensor]]


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
    blind = subject.settings.method in VALUES_ONLY
    white, usual = subject.settings.method == "pgd", subject.settings.budget.steps
    steps = queries = 0
    for task in chosen:
        ids = attacked[task.goal.side]
        count, right = len(ids), standing(task, subject.scene, ids, subject.key)
        if blind:
            queries += right * queries_at_most(task, levels[task.name], usual)
            queries += (count - right) * queries_at_most(task, 0, usual)
        else:
            queries += right * SQUARE_QUERIES * len(black) * levels[task.name]
            steps += white * right * steps_at_most(task, levels[task.name], usual, surrogate is not None)
            steps += white * (count - right) * usual * len(task.first)
    taken = f"{steps:,} image-steps and " if steps else ""
    subject.report.say(f"strong attack: up to {taken}{queries:,} queries of {' and '.join(black)}")
    for task in chosen:
        label = f"{task.name}.strong"
        known = _contested(subject, ensemble.against(task, eps), task, label)
        repeats = standard if subject.draws == 1 else ()  # a random model answers anew: nothing is repeated
        runs.append(_run_rows(task, label, known, repeats))
        whole[task.name] = known.rows
        if subject.draws == 1:  # nobody can measure the same answer of a random model again
            kept = {n.removeprefix("receipt/"): r for n, r in known.rows.items() if n.startswith("receipt/")}
            receipts[task.name] = kept
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
            "image_steps": 0 if blind else sum(run.image_steps for run in runs),
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
    blind = subject.settings.method in VALUES_ONLY
    made = f"{ensemble.said} {task.goal.run} {[goal.run for goal in task.first]}"
    known = shards.whole(label, made)
    if known is not None:
        return known
    batches, shown = subject.batches(ids), set(receipted(ids))
    kept = shards.kept(label, len(batches), made)
    done = sum(len(batches[index]) for index in kept)
    with subject.report.task(f"{task.name} (strong)", len(ids), done) as advance:

        def climbed(part: Tensor, images: Tensor) -> tuple[dict[str, Tensor], int]:
            nonlocal done
            with subject.precision():
                subject.redraw(label, int(part[0]))
                pixels = images.to(scene.gallery.dtype)
                embed = Counted(subject.embed)
                contest = Contest(task, embed, pixels, scene, part, subject.key, subject.draws > 1)
                rows = climb_ladder(contest, ensemble, subject.settings, shown)
                if blind:
                    rows["queries"] = torch.tensor([embed.images])
            done += len(part) * shards.ranks.size
            advance(min(done, len(ids)), "")
            return rows, embed.images if blind else contest.steps

        parts = shards.each(label, batches, made, kept, subject.material.side(task.goal.side), climbed)
    every = Shard(joined_rows(parts), sum(each.seconds for each in parts), sum(each.image_steps for each in parts))
    return shards.keep(label, None, every, made)


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
        # Several starts of a standard run may have found more; a random model answers anew.
        if eps >= subject.settings.ball.eps and subject.draws == 1:
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
        "receipts": Receipts(about, strong.receipts, how) if strong.receipts else None,
    }


def _code(goal: Goal) -> str:
    """Where an attack of the user's comes from, for the person who verifies it; nothing is imported by this name."""
    return f"{type(goal).__module__}:{type(goal).__qualname__}"
