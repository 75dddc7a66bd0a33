"""One attack over all its samples, in fixed batches: rows before and after, and examples to look at."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..attacks import Attacked, Goal, Scene, attack
from ..attacks.goal import aimed
from ..console import Report
from ..geometry import Retrieved, euclidean, retrieve
from ..model.frozen import Embed, precise
from ..perturb.ascend import Budget, ascend
from ..perturb.ball import Ball
from ..perturb.methods import Find
from ..random import Key
from .intake import Material
from .outcomes import RunRows
from .shards import Shard, Shards

__all__ = ["NEIGHBOURS", "AttackRun", "shown_lists", "sweep", "to_bytes"]

NEIGHBOURS = 10  # shown before and after in the examples
_LOW_IS_GOOD = ("CA-", "QA-", "TMA")


@dataclass(frozen=True)
class AttackRun:
    """Goals that make the same perturbations."""

    attack: str
    goals: tuple[Goal, ...]
    start_seed: int = 0  # the same samples and targets from other random starts

    @property
    def label(self) -> str:
        again = f".seed{self.start_seed}" if self.start_seed else ""
        return f"{self.attack}.{'-'.join(goal.protocol for goal in self.goals)}{again}"


def sweep(
    run: AttackRun,
    embed: Embed,
    material: Material,
    scene: Scene,
    ids: Tensor,
    ball: Ball,
    budget: Budget,
    batch: int,
    key: Key,
    climbing: Callable[[], AbstractContextManager[object]],
    shards: Shards,
    report: Report,
    find: Find = ascend,
) -> RunRows:
    """Every batch of a run that has no shard yet, and then all rows."""
    side, what = run.goals[0].side, str(run.goals[0].run)
    whole = shards.whole(run.label, what)
    if whole is not None:
        return _gathered(run, whole)
    batches = list(ids.split(batch))
    kept = shards.kept(run.label, len(batches), what)
    done = sum(len(batches[index]) for index in kept)
    again = f", start {run.start_seed + 1}" if run.start_seed else ""
    starts = key("start seed", run.start_seed) if run.start_seed else key
    title = f"{run.attack} ({', '.join(goal.protocol for goal in run.goals)}{again})"
    with report.task(title, len(ids), done) as advance:

        def attacked(part: Tensor, images: Tensor) -> tuple[dict[str, Tensor], int]:
            nonlocal done
            images = images.to(scene.gallery.dtype)  # a float64 model is attacked in float64
            with climbing():
                result = attack(
                    embed,
                    images,
                    scene,
                    run.goals[0],
                    part,
                    ball,
                    budget,
                    starts,
                    len(part),
                    targets=run.goals[0].targets(scene, part.to(scene.gallery.device), key),
                    look_back=any(goal.looks_back for goal in run.goals),
                    find=find,
                )
            with precise():
                rows = _rows(run, result, images, scene)
            done += len(part) * shards.ranks.size
            advance(min(done, len(ids)), "")
            return rows, result.image_steps

        parts = shards.each(run.label, batches, what, kept, material.side(side), attacked)
    # With a file for each batch, the examples alone of a large set would be gigabytes.
    whole = shards.keep(run.label, None, _joined(run, parts), what)
    return _gathered(run, whole)


def _rows(run: AttackRun, result: Attacked, images: Tensor, scene: Scene) -> dict[str, Tensor]:
    """What a batch leaves: measures of every protocol before and after, and its three examples."""
    clean = scene.clean(run.goals[0].side)[result.ids]
    rows = {"ids": result.ids, "shift": euclidean(result.embeddings, clean).double()}
    if result.targets is not None:
        rows["targets"] = result.targets
    for goal in run.goals:
        rows |= {f"after/{goal.protocol}/{name}": row for name, row in result.measured(goal, scene).items()}
        before = goal.measure(scene, result.ids, result.targets, clean, clean)
        rows |= {f"before/{goal.protocol}/{name}": row for name, row in before.items()}
    order = _by_resistance(run, rows)
    # The worst and the best of all batches are among the worst and the best of each; the middle is nearly so.
    picked = order[_three(len(order))]
    rows |= {f"example/{name}": row for name, row in _examples(run, result, images, scene, picked).items()}
    return rows


def _by_resistance(run: AttackRun, rows: Mapping[str, Tensor]) -> Tensor:
    """Positions of the samples, those that withstood worst first; equals by how far their embedding moved."""
    goal = run.goals[-1]
    name = goal.kept or goal.name
    held = rows[f"after/{goal.protocol}/{name}"]
    held = -held if name in _LOW_IS_GOOD else held
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
    """Whose list an attack is about (N,), and its nearest items before and after; own images are left out.

    That is the perturbed query's own list, or, where a candidate was perturbed, that of the first query it aimed at.
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
    for row in range(len(ids)):  # each in a gallery of its own, where one candidate is another
        gallery = scene.gallery.index_copy(0, ids[row, None], changed[row, None])
        lists.append(retrieve(queries[row, None], gallery, count, exclude=own[row, None]))
    after = Retrieved(
        *(torch.cat([getattr(each, name) for each in lists]) for name in ("ids", "distances", "relevant"))
    )
    return asked, before, after


def to_bytes(images: Tensor) -> Tensor:
    """NCHW images in [0, 1] as NHWC uint8."""
    return (images.detach() * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _joined(run: AttackRun, shards: Sequence[Shard]) -> Shard:
    """The rows of all batches, with three examples."""
    rows = {name: torch.cat([shard.rows[name].cpu() for shard in shards]) for name in shards[0].rows}
    order = _by_resistance(run, rows)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    where = {int(sample): int(place[row]) for row, sample in enumerate(rows["ids"])}
    found = torch.tensor([where[int(sample)] for sample in rows["example/ids"]])
    chosen = torch.stack([(found - rank).abs().argmin() for rank in _three(len(order))])
    rows |= {name: row[chosen] for name, row in rows.items() if name.startswith("example/")}
    return Shard(rows, sum(shard.seconds for shard in shards), sum(shard.image_steps for shard in shards))


def _three(count: int) -> list[int]:
    """Ranks of the worst, the middle one and the best."""
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
    )
