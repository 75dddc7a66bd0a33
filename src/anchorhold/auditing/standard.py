"""One attack on all its samples, in fixed batches: rows before and after, and examples for the page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from ..attacks.goal import Goal, Scene, aimed
from ..attacks.run import Attack, Attacked
from ..columns import rises
from ..device import precise
from ..errors import check
from ..geometry import Retrieved, euclidean, retrieve
from ..random import Key
from .outcomes import RunRows
from .plan import AttackRun
from .realisable import to_bytes
from .shards import REJECTED, Shard, joined_rows
from .subject import Subject

__all__ = ["NEIGHBOURS", "attack_all", "shown_lists"]

NEIGHBOURS = 10  # shown before and after in the examples


def attack_all(run: AttackRun, subject: Subject) -> RunRows:
    """All rows of a run; batches without a shard are computed."""
    first, shards, key = run.goals[0], subject.shards, subject.key
    side, what = first.side, run.made_by
    whole = shards.whole(run.label, what)
    if whole is not None:
        return _gathered(run, whole)
    ids = subject.attacked[side]
    batches = subject.batches(ids)
    kept = shards.kept(run.label, len(batches), what)
    done = sum(len(batches[index]) for index in kept)
    again = f", start {run.start_seed + 1}" if run.start_seed else ""
    starts = key("start seed", run.start_seed) if run.start_seed else key
    title = f"{run.attack} ({', '.join(goal.protocol for goal in run.goals)}{again})"
    with subject.report.task(title, len(ids), done) as advance:

        def attacked(part: Tensor, images: Tensor) -> tuple[dict[str, Tensor], int]:
            nonlocal done
            subject.redraw(run.label, int(part[0]))
            rows, steps = _batch(run, subject, part, images, starts)
            done += len(part) * shards.ranks.size
            advance(min(done, len(ids)), "")
            return rows, steps

        parts = shards.each(run.label, batches, what, kept, subject.material.side(side), attacked)
    # Merged: with a file per batch, the examples of a large set would take gigabytes.
    whole = shards.keep(run.label, None, _joined(run, parts), what)
    return _gathered(run, whole)


def _batch(run: AttackRun, subject: Subject, ids: Tensor, images: Tensor, starts: Key) -> tuple[dict[str, Tensor], int]:
    """The rows of one batch, and their image-steps."""
    first, scene, settings = run.goals[0], subject.scene, subject.settings
    images = images.to(scene.gallery.dtype)  # a float64 model is attacked in float64
    with subject.precision():
        attack = Attack(
            subject.embed,
            scene,
            first,
            settings.ball,
            settings.budget,
            starts,
            settings.find,
            look_back=any(goal.looks_back for goal in run.goals),
        )
        targets = first.targets(scene, ids.to(scene.gallery.device), subject.key)
        result = attack.run(images, ids, len(ids), targets=targets)
    with precise():
        return _rows(run, result, images, scene), result.image_steps + result.queries


def _rows(run: AttackRun, result: Attacked, images: Tensor, scene: Scene) -> dict[str, Tensor]:
    """The rows of a batch: measures of every protocol before and after, and three examples."""
    clean = scene.clean(run.goals[0].side)[result.ids]
    rows = {"ids": result.ids, "shift": euclidean(result.embeddings, clean).double()}
    if result.targets is not None:
        rows["targets"] = result.targets
    if result.rejected is not None and bool(result.rejected.any()):
        rows[REJECTED] = result.rejected
    for goal in run.goals:
        after = result.measured(goal, scene)
        named = goal.kept or goal.name
        check(named in after, f"{goal.name} measures {', '.join(after)}: one of them has to be called {named}")
        rows |= {f"after/{goal.protocol}/{name}": row for name, row in after.items()}
        before = goal.measure(scene, result.ids, result.targets, clean, clean)
        rows |= {f"before/{goal.protocol}/{name}": row for name, row in before.items()}
    order = _by_resistance(run, rows)
    # The overall worst and best are among those of the batches; the median is approximate.
    picked = order[_three(len(order))]
    rows |= {f"example/{name}": row for name, row in _examples(run, result, images, scene, picked).items()}
    return rows


def _by_resistance(run: AttackRun, rows: Mapping[str, Tensor]) -> Tensor:
    """Positions of the samples, least robust first; ties by how far their embedding moved."""
    goal = run.goals[-1]
    name = goal.kept or goal.name
    held = rows[f"after/{goal.protocol}/{name}"]
    held = -held if rises(name) else held
    order = rows["shift"].argsort(descending=True, stable=True)
    return order[held[order].argsort(stable=True)]


def _examples(run: AttackRun, result: Attacked, images: Tensor, scene: Scene, picked: Tensor) -> dict[str, Tensor]:
    ids, aims = result.ids[picked], None if result.targets is None else result.targets[picked]
    asked, before, after = shown_lists(run.goals[0], scene, ids, aims, result.embeddings[picked])
    return {
        "ids": ids,
        "asked": asked,
        "before": before.ids,
        "after": after.ids,
        "clean": to_bytes(images[picked]),
        "perturbed": to_bytes(result.images[picked]),
    }


def shown_lists(
    goal: Goal, scene: Scene, ids: Tensor, targets: Tensor | None, changed: Tensor, count: int = NEIGHBOURS
) -> tuple[Tensor, Retrieved, Retrieved]:
    """The queries (N,) whose lists are shown, and their nearest items before and after, without own images.

    For an attack on queries this is the perturbed query. For an attack on candidates it is the first target.
    """
    count = max(1, min(count, len(scene.gallery) - 1))
    if goal.side == "query":
        own = scene.own[ids]
        before = retrieve(scene.queries[ids], scene.gallery, count, exclude=own)
        return ids, before, retrieve(changed, scene.gallery, count, exclude=own)
    asked = aimed(targets).reshape(len(ids), -1)[:, 0]
    own, queries = scene.own[asked], scene.queries[asked]
    before = retrieve(queries, scene.gallery, count, exclude=own)
    lists = []
    for row in range(len(ids)):  # each in its own gallery, with one candidate replaced
        gallery = scene.gallery.index_copy(0, ids[row, None], changed[row, None])
        lists.append(retrieve(queries[row, None], gallery, count, exclude=own[row, None]))
    after = Retrieved(
        *(torch.cat([getattr(each, name) for each in lists]) for name in ("ids", "distances", "relevant"))
    )
    return asked, before, after


def _joined(run: AttackRun, shards: Sequence[Shard]) -> Shard:
    """The rows of all batches, with three examples."""
    rows = joined_rows(shards)
    order = _by_resistance(run, rows)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    where = {int(sample): int(place[row]) for row, sample in enumerate(rows["ids"])}
    found = torch.tensor([where[int(sample)] for sample in rows["example/ids"]])
    chosen = torch.stack([(found - rank).abs().argmin() for rank in _three(len(order))])
    rows |= {name: row[chosen] for name, row in rows.items() if name.startswith("example/")}
    return Shard(rows, sum(shard.seconds for shard in shards), sum(shard.image_steps for shard in shards))


def _three(count: int) -> list[int]:
    """Ranks of the worst, the median and the best."""
    return [0, (count - 1) // 2, count - 1]


def _gathered(run: AttackRun, whole: Shard) -> RunRows:
    rows = whole.rows

    def of(when: str, goal: Goal) -> dict[str, Tensor]:
        head = f"{when}/{goal.protocol}/"
        return {name.removeprefix(head): row for name, row in rows.items() if name.startswith(head)}

    return RunRows(
        label=run.label,
        attack=run.attack,
        start_seed=run.start_seed,
        goals={goal.protocol: {k: v for k, v in asdict(goal).items() if k != "protocol"} for goal in run.goals},
        side=run.goals[0].side,
        ids=rows["ids"],
        targets=rows.get("targets"),
        shift=rows["shift"],
        measures={goal.protocol: of("after", goal) for goal in run.goals},
        initial={goal.protocol: of("before", goal) for goal in run.goals},
        examples={n.removeprefix("example/"): row for n, row in rows.items() if n.startswith("example/")},
        seconds=whole.seconds,
        image_steps=whole.image_steps,
        rejected=int(rows[REJECTED].sum()) if REJECTED in rows else 0,
    )
