"""The strong audit: the ensemble on every goal, in fixed batches, and its results.

Over several ε, the results of a smaller ε are kept, and one more attack starts from them. Curves can only fall.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..attacks.goal import Goal
from ..attacks.menu import ATTACKS
from ..columns import ERS_COLUMNS, NOT_PERCENT, in_units
from ..geometry import euclidean
from ..model.frozen import embed_all
from ..perturb.ball import Ball
from ..scores import ers
from .curves import described
from .ensemble import BLACK, FALLS, MEMBERS, SQUARE_QUERIES, WARM, Contest, Member, Surrogate, Task, most_steps
from .outcomes import Outcome, RunRows
from .plan import AuditSettings
from .realisable import FILE_FORMS, levels_within
from .receipts import Receipts, receipted
from .shards import Shard
from .subject import Subject

__all__ = [
    "Strong",
    "additions",
    "overstated",
    "strengthen",
]


@dataclass(frozen=True, eq=False)
class Strong:
    """The results of the ensemble: rows like those of a standard run, and facts about them."""

    runs: tuple[RunRows, ...]
    curve: dict[str, Any] | None
    about: dict[str, Any]
    doubts: dict[str, float]
    receipts: dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Ensemble:
    """The members, a second model to transfer from, and every ε, the smallest first."""

    members: tuple[Member, ...]
    surrogate: Surrogate | None
    ladder: tuple[float, ...]

    @property
    def said(self) -> str:
        """What the rows of a batch depend on, as recorded in their shard."""
        other = "" if self.surrogate is None else self.surrogate.weights
        return f"{[m.name for m in self.members]} {SQUARE_QUERIES} {list(self.ladder)} {other}"


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
    attacked = subject.attacked
    ladder = sorted({*epsilons, subject.settings.ball.eps})
    runs, whole, receipts = [], {}, {}
    if members:
        samples = {task.name: len(ladder) * len(attacked[task.goal.side]) for task in chosen}
        black = [m.name for m in members if m.kind == "black"]
        white = subject.settings.method == "pgd"
        steps = sum(most_steps(task.goal) * samples[task.name] for task in chosen) if white else 0
        queries = SQUARE_QUERIES * sum(samples.values()) * len(black)
        subject.report.say(f"strong: up to {steps:,} image-steps and {queries:,} queries of {' and '.join(black)}")
    ensemble = Ensemble(tuple(members), surrogate, tuple(ladder))
    for task in chosen:
        label = f"{task.name}.strong"
        known = _contested(subject, ensemble, task, label)
        runs.append(_run_rows(task, label, known, standard))
        whole[task.name] = known.rows
        receipts[task.name] = {n.removeprefix("receipt/"): r for n, r in known.rows.items() if n.startswith("receipt/")}
    return Strong(
        tuple(runs),
        _curve(chosen, whole, ladder, members, len(attacked["query"])) if len(ladder) > 1 else None,
        {
            "members": [m.name for m in members],
            "surrogate": None if surrogate is None else surrogate.weights,
            "square_queries": SQUARE_QUERIES,
            "image_steps": sum(run.image_steps for run in runs),
            "queries": int(sum(rows["queries"].sum() for rows in whole.values())),
            "after": {task.name: _after(task, whole[task.name], members) for task in chosen},
            "realisable": {form: _columns(chosen, whole, f"{form}/") for form in FILE_FORMS},
        },
        _doubts(chosen, whole, members),
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
    joined = {name: torch.cat([each.rows[name].cpu() for each in parts]) for name in parts[0].rows}
    every = Shard(joined, sum(each.seconds for each in parts), sum(each.image_steps for each in parts))
    return shards.keep(label, None, every, made)


def _climb_ladder(contest: Contest, ensemble: Ensemble, settings: AuditSettings, kept: set[int]) -> dict[str, Tensor]:
    """All members at every ε, the smallest first; returns the rows."""
    task, rows = contest.task, {"ids": contest.ids}
    ball, budget, members = settings.ball, settings.budget, ensemble.members
    if contest.targets is not None:
        rows["targets"] = contest.targets
    rows |= {f"before/{name}": row for name, row in contest.initial.items()}
    for place, eps in enumerate(ensemble.ladder):
        here, starts = replace(ball, eps=eps), contest.found() if place else None
        scale = eps / ball.eps if ball.eps else 1.0
        white = settings.method == "pgd"  # without gradients a step has no length
        scaled = replace(budget, alpha=budget.alpha * scale) if white else budget
        contest.standard(here, scaled, method=settings.find)
        if starts is not None and not members:  # without members, a curve uses the standard attacks only
            contest.standard(here, scaled, starts, settings.find)
        rows["after/standard"] = contest.measures[task.main]
        if starts is not None and members:
            contest.enter(WARM if white else BLACK[0], here, ensemble.surrogate, starts)
        for member in (each for each in members if each.wants(task.goal)):
            before = contest.measures[task.main]
            contest.enter(member, here, ensemble.surrogate)
            rows[f"after/{member.name}"] = now = contest.measures[task.main]
            if eps <= ball.eps:  # samples that a smaller ε beat are lost before the audit's own ε
                gain = (now - before).abs() > 0.05
                rows[f"beaten/{member.kind}"] = gain | rows.get(f"beaten/{member.kind}", torch.zeros_like(gain))
        rows |= {f"curve/{place}/{name}": row for name, row in contest.measures.items()}
        if eps == ball.eps:
            rows |= _snapshot(contest, here, kept)
            final = {name: row for name, row in rows.items() if name.startswith("after/")}
    rows |= final
    rows["queries"] = torch.tensor([contest.queries])
    return rows


def _snapshot(contest: Contest, ball: Ball, kept: set[int]) -> dict[str, Tensor]:
    """Results at the audit's own ε: measures, the same as files, and receipts."""
    rows = {f"held/{name}": row for name, row in contest.measures.items()}
    clean = contest.scene.clean(contest.task.goal.side)[contest.ids]
    rows["shift"] = euclidean(contest.embeddings, clean).double()
    for form, change in FILE_FORMS.items():
        if contest.images.shape[1] in (1, 3):
            after = contest.measure(embed_all(contest.embed, [change(contest.images, contest.clean, ball)]))
            rows |= {f"{form}/{name}": row for name, row in after.items()}
    picked = torch.tensor([place for place, number in enumerate(contest.ids.tolist()) if number in kept]).long()
    picked = picked.to(contest.ids.device)
    levels = levels_within(contest.images[picked], contest.clean[picked], ball)
    rows |= {"receipt/ids": contest.ids[picked], "receipt/images": levels}
    rows["receipt/measure"] = contest.measures[contest.task.main][picked]
    if len(picked):  # stated measures are of the images in the files
        seen = embed_all(contest.embed, [levels.to(contest.clean.dtype) / 255])
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
                worst = torch.maximum(worst, known) if column in FALLS else torch.minimum(worst, known)
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
    chosen: Sequence[Task],
    whole: Mapping[str, Mapping[str, Tensor]],
    ladder: Sequence[float],
    members: Sequence[Member],
    queries: int,
) -> dict[str, Any]:
    """R@1 and, where it is defined, ERS at every ε, the clean values first."""
    points = [_columns(chosen, whole, head) for head in ("before/", *(f"curve/{i}/" for i in range(len(ladder))))]
    lines: dict[str, list[float]] = {}
    for task in chosen:
        if task.name == "recall":
            lines["R@1"] = [point["columns"][next(iter(task.columns))] for point in points]
    if all(point["ers"] is not None for point in points):
        lines["ERS"] = [point["ers"] for point in points]
    for column in points[0]["columns"]:
        lines.setdefault(column, [point["columns"][column] for point in points])
    return {**described(chosen, members, queries), "eps": [0.0, *ladder], "lines": lines}


def _doubts(
    chosen: Sequence[Task],
    whole: Mapping[str, Mapping[str, Tensor]],
    members: Sequence[Member],
) -> dict[str, float]:
    """The input of the flags about the ensemble, in percent.

    The shares of samples that Square, or transfer, beat after all gradient attacks, at the audit's ε or a smaller one
    of its curve. They are shares of right answers. Without a recall goal, they count samples moved by 5 % of the list
    or more.
    """
    found: dict[str, float] = {}
    task = next((each for each in chosen if each.name == "recall"), chosen[0] if chosen else None)
    if task is None:
        return found
    rows = whole[task.name]
    clean = rows[f"before/{task.main}"]
    counted = clean > 0.5 if task.name == "recall" else torch.ones_like(clean, dtype=torch.bool)
    kinds = {member.kind for member in members}
    # Without gradient attacks there is nothing that the others could beat.
    for kind in kinds - {"white"} if "white" in kinds and counted.any() else ():
        found[kind] = 100 * float(rows[f"beaten/{kind}"][counted].double().mean())
    return found


def overstated(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The standard and the strong value of `what`: of ERS, or of the column that fell most.

    Rounded to one decimal, as in the table, so that their difference equals the one in the flag.
    """
    standard, strong = outcomes["corrected"], outcomes["strong"]
    if standard.ers is not None and strong.ers is not None:
        return {"standard": round(standard.ers.value, 1), "strong": round(strong.ers.value, 1), "what": "ERS"}
    falls = {
        name: (100 if name in NOT_PERCENT else 1) * abs(standard.columns[name].value - column.value)
        for name, column in strong.columns.items()
        if name in standard.columns
    }
    name = max(falls, key=lambda each: falls[each], default=None)
    if name is None:
        return {}
    scale = 100 if name in NOT_PERCENT else 1
    return {
        "standard": round(scale * standard.columns[name].value, 1),
        "strong": round(scale * strong.columns[name].value, 1),
        "what": name if scale == 1 else f"100·{name}",
    }


def additions(
    strong: Strong,
    outcomes: Mapping[str, Outcome],
    settings: Mapping[str, Any],
    chosen: Sequence[Task],
    model: Mapping[str, Any],
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields it adds to an Audit: a curve, facts about the ensemble, and receipts."""
    if settings["strength"] != "strong":
        return {"curve": strong.curve}
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
        "curve": strong.curve,
        "strong": strong.about | {"doubts": strong.doubts | overstated(outcomes)},
        "receipts": Receipts(about, strong.receipts, how),
    }


def _code(goal: Goal) -> str:
    """Where an attack of the user's comes from, for whoever verifies it; nothing is imported by this name."""
    return f"{type(goal).__module__}:{type(goal).__qualname__}"
