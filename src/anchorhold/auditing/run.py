"""audit(): clean metrics, the attacks in both protocols, the scores, and how sure one can be of them.

    audit = ah.audit(model, ah.dataset("digits"))                    # 1,000 queries over all classes
    audit = ah.audit(ah.wrap(theirs, mean=…, std=…, size=224), "photos/", limit=0, out="audits/theirs")
    print(audit); audit.save("audits/mine")

Samples are attacked in fixed batches, and what a batch gave is a shard. With `out`, shards are files, and an audit
that was stopped goes on with the batches that have none; its numbers are those of one that was left alone. What
is written, and the schema of audit.json, is described in `verdict`.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import __version__, checks
from ..attacks import Scene
from ..attacks.run import budget_named
from ..console import Report, Silent, duration
from ..device import compiles, computing, device_named, living_on, repeatable
from ..errors import AnchorholdError, Interrupted, ModelError
from ..metrics import nmi, score_queries
from ..model.chunked import chunked
from ..model.embedder import Embedder
from ..model.frozen import Embed, connected, embed_all, frozen
from ..model.victim import Victim, as_victim, fingerprint_of
from ..random import Key
from ..ranks import joined
from ..record import provenance
from ..scores import Interval, interval, resampled_means
from ..settings import check
from .ensemble import MEMBERS, STEPS, Surrogate, tasks
from .intake import Data, Material, prepare, sample
from .outcomes import Column, RunRows, outcome
from .plan import NINE, AuditSettings, runs_of
from .shards import Shards
from .shown import pictures_of
from .strong import additions, strengthen
from .sweep import AttackRun, sweep
from .until import audit_until, check_until
from .verdict import Audit, Flag

__all__ = ["Evidence", "audit", "flags_of"]

_CLEAN = {"r1": "R@1", "r2": "R@2", "map": "mAP", "map_r": "mAP@R", "map_10": "mAP@10"}


@dataclass(frozen=True, eq=False)
class Evidence:
    """What `examine` is given to look for reasons not to trust the numbers, while the frozen view is open."""

    model: nn.Module
    embed: Embed
    material: Material
    scene: Scene
    ids: Tensor  # the attacked queries
    settings: AuditSettings
    key: Key
    precision: Callable[[], AbstractContextManager[object]]
    audit: Audit  # everything but the flags
    report: Report

    def images(self, count: int = 64) -> tuple[Tensor, Tensor]:
        """Some of the attacked queries, spread evenly, and their ids."""
        places = torch.linspace(0, len(self.ids) - 1, min(count, len(self.ids))).round().long()
        (pixels,) = self.material.query.plain(self.ids[places], batch=len(places))
        return pixels, self.ids[places]


def flags_of(evidence: Evidence) -> list[checks.Flag]:
    """What `checks` finds on some of the attacked queries, with the budget of the audit."""
    images, ids = evidence.images()
    settings, last = evidence.settings, list(evidence.audit.protocols.values())[-1]
    known = {name: score for name, score in (("ERS", last.ers), ("ARS", last.ars.get("measured"))) if score is not None}
    spans = {
        name: Interval(score.low, score.high, 0.95, settings.resamples)
        for name, score in known.items()
        if score.low is not None and score.high is not None
    }
    values = {name: score.value for name, score in known.items()}
    doubts = (evidence.audit.strong or {}).get("doubts", {})
    cost, runs = checks.image_steps_at_most(settings.ball, settings.budget, len(images)), evidence.audit.runs
    if cost and (spent := sum(run.image_steps for run in runs)):
        # Beside few queries this is most of the work, and nothing would be heard until the end.
        took = duration(cost * sum(run.seconds for run in runs) / spent)
        evidence.report.say(f"looking for reasons not to trust it: up to {cost:,} image-steps, about {took}")
    with evidence.precision():
        return checks.examine(
            evidence.embed,
            images,
            evidence.scene,
            ids,
            settings.ball,
            settings.budget,
            evidence.key("flags"),
            intervals=spans,
            measured=values,
            strong=doubts,
        )


def audit(
    model: nn.Module,
    data: Data,
    *,
    protocols: Sequence[str] = ("published", "corrected"),
    attacks: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    limit: int = 1000,
    budget: str = "standard",
    eps: float | None = None,
    alpha: float | None = None,
    steps: int | None = None,
    method: Literal["pgd", "fgsm", "cw"] = "pgd",
    strength: Literal["standard", "strong"] = "standard",
    surrogate: nn.Module | None = None,
    epsilons: Sequence[float] = (),
    until: float | None = None,
    seed: int = 0,
    seeds: int = 1,
    batch: int = 128,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    out: str | Path | None = None,
    resize: int | None = None,
    crop: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    resamples: int = 1000,
    examine: Callable[[Evidence], Sequence[Flag]] | None = flags_of,
    report: Report | None = None,
) -> Audit:
    """How robust `model` is on `data`: clean metrics, attacks in both protocols, ERS and ARS with intervals.

    `data` is a data set (its test split), a split, a folder of class folders, (images, labels), or
    {"query": …, "gallery": …}. `limit` images are attacked, a seeded sample over all classes (0: all); the gallery
    stays whole. `attacks` are names, by default the nine of ERS, or names with settings: {"CA+": {"w": 5}}. `budget`
    is a name of `attacks.run.BUDGETS`, of which `eps`, `alpha` and `steps` replace a part; where it starts at random,
    every attack is made from `seeds` starts, and numbers are means over them. With `out` the audit is resumed where
    it was stopped, and saved there. `strength="strong"` adds the ensemble of `auditing.ensemble`, with `surrogate` as a
    second model to transfer from. `epsilons` make a curve, and with `until` more queries are attacked until the
    interval of ERS is that many points to either side. `examine` looks for flags at the end; None leaves that out.
    """
    check(out is None or not os.path.isfile(out), f"{out} is a file, and an audit a folder: choose another place")
    check(
        out is None or strength == "strong" or not os.path.isdir(Path(out) / "receipts"),
        f"{out} is a strong audit with receipts, which this one would leave without: say strength strong again, "
        "or choose another place",
    )
    check(attacks is None or len(attacks) > 0, "attacks names none: give some, such as CA+ and ES, or leave it out")
    one = (protocols,) if isinstance(protocols, str) else protocols
    chosen: dict[str, dict[str, Any]] = {
        name: {} for name in ([attacks] if isinstance(attacks, str) else attacks or NINE)
    }
    chosen |= {name: dict(changes) for name, changes in attacks.items()} if isinstance(attacks, Mapping) else {}
    ball, pgd = budget_named(budget, eps, alpha, steps)
    settings = AuditSettings(
        protocols=tuple(one),
        attacks=tuple(chosen),
        limit=limit,
        eps=ball.eps,
        alpha=pgd.alpha,
        steps=pgd.steps,
        method=method,
        seed=seed,
        batch=batch,
        precision=precision,
        compile=compile,
        resize=resize,
        crop=crop,
        resamples=resamples,
        start="zero" if method != "pgd" else pgd.start,
        seeds=seeds,
        strength=strength,
        epsilons=tuple(sorted(set(epsilons))),
    )
    check(surrogate is None or strength == "strong", "a second model serves the strong audit: say strength = strong")
    check_until(until, None if attacks is None else chosen)
    runs = runs_of(settings, chosen)
    where = device_named(device)
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    climbing = computing(settings.precision, where)
    victim = as_victim(model)
    material = prepare(data, victim, where, report, resize, crop, on_bad_image, ranks)
    for note in material.notes:
        report.say(note)
    work = len(runs) * min(limit or len(material.labels), len(material.labels)) * settings.budget.steps
    work += STEPS * len(tasks(runs)) * min(limit or len(material.labels), len(material.labels)) * (strength == "strong")
    fast = compiles(settings.compile, settings.precision, where, work)
    other = None if surrogate is None else as_victim(surrogate)
    with ExitStack() as stack:
        stack.enter_context(living_on(victim, where))
        stack.enter_context(repeatable())
        view = stack.enter_context(frozen(victim, fast))
        second = None
        if other is not None:
            stack.enter_context(living_on(other, where))
            second = _second(other, stack.enter_context(frozen(other)), material, settings.batch)

        def once(limit: int, place: str | Path | None) -> Audit:
            now = replace(settings, limit=limit)
            return _audit(victim, view, material, now, runs, climbing, where, place, examine, report, second)

        return once(limit, out) if until is None else audit_until(once, limit, len(material.labels), until, out, report)


def _second(model: nn.Module, view: Embed, material: Material, batch: int) -> Surrogate:
    """The second model with its own clean embeddings."""
    embed = chunked(connected(view), batch)
    return Surrogate(embed, material.scene(*_embedded(embed, material, batch)), fingerprint_of(model))


def _audit(
    victim: nn.Module,
    view: Embed,
    material: Material,
    settings: AuditSettings,
    runs: Sequence[AttackRun],
    climbing: Callable[[], AbstractContextManager[object]],
    where: torch.device,
    out: str | Path | None,
    examine: Callable[[Evidence], Sequence[Flag]] | None,
    report: Report,
    second: Surrogate | None = None,
) -> Audit:
    ranks = material.query.ranks
    begun, key = time.monotonic(), Key.of(settings.seed)("audit")
    embed = chunked(connected(view), settings.batch)
    scene = material.scene(*_embedded(embed, material, settings.batch))
    clean, clean_rows = _clean(scene, key, settings.resamples)
    attacked = {
        "query": sample(material.labels, settings.limit, key("sample")),
        "gallery": sample(material.gallery_labels, settings.limit, key("sample")),
    }
    about_model, about_data = _described(victim, scene), material.describe()
    about_data["attacked"] = [len(attacked["query"]), len(attacked["gallery"])]
    facts = asdict(settings)
    # The name of a shard says attack, protocol and start: more of each may be added later.
    added = ("protocols", "attacks", "resamples", "seeds", "strength", "epsilons")
    shared = {name: value for name, value in facts.items() if name not in added}
    made_with = {**shared, "model": about_model["weights"], "data": about_data, "device": where.type}
    made_with["version"] = __version__
    shards = Shards(out, made_with, ranks)
    spent = time.monotonic() - begun
    rows: list[RunRows] = []
    report.say(f"{len(runs)} attack runs on {len(attacked['query']):,} images, {settings.budget.steps} steps each")
    for done, run in enumerate(runs):
        side = run.goals[0].side
        if done == 1:
            left = rows[0].seconds / ranks.size * (len(runs) - 1)
            report.say(f"about {duration(left)} for the other {len(runs) - 1} runs")
        with _resumable(out):
            rows.append(
                sweep(
                    run,
                    embed,
                    material,
                    scene,
                    attacked[side],
                    settings.ball,
                    settings.budget,
                    settings.batch,
                    key,
                    climbing,
                    shards,
                    report,
                    settings.find,
                )
            )
    strong, shown = None, tuple(rows)
    if settings.strength == "strong" or settings.epsilons:
        with _resumable(out):
            strong = strengthen(
                tasks(runs),
                rows,
                embed,
                material,
                scene,
                attacked,
                settings.ball,
                settings.budget,
                settings.batch,
                key,
                climbing,
                shards,
                report,
                members=MEMBERS if settings.strength == "strong" else (),
                surrogate=second,
                epsilons=settings.epsilons,
            )
        rows += strong.runs if settings.strength == "strong" else ()
    begun = time.monotonic()
    names = [*dict.fromkeys(settings.protocols), *(["strong"] if settings.strength == "strong" else [])]
    outcomes = {name: outcome(name, rows, key, settings.resamples, material.same) for name in names}
    notes = [note for each in outcomes.values() for note in each.notes]
    found = Audit(
        settings=facts,
        provenance=provenance(where),
        model={**about_model, "notes": list(getattr(victim, "notes", ()))},
        data=about_data,
        clean=clean,
        protocols=outcomes,
        runs=tuple(rows),
        flags=(),
        notes=tuple(notes),
        seconds=spent + sum(run.seconds for run in rows) + time.monotonic() - begun,
        image_steps=sum(run.image_steps for run in rows),
        clean_rows=clean_rows,
        pictures=pictures_of(material, shown),
        **({} if strong is None else additions(strong, outcomes, facts, tasks(runs), about_model, about_data)),
    )
    if examine is not None:
        evidence = Evidence(victim, embed, material, scene, attacked["query"], settings, key, climbing, found, report)
        found = replace(found, flags=ranks.once(lambda: tuple(examine(evidence))))
    if out is not None and ranks.first:
        found.save(out)
    ranks.wait()
    together = f", the time of {ranks.size} ranks added up" if ranks.size > 1 else ""
    report.say(f"audited in {duration(found.seconds)}: {found.image_steps:,} image-steps{together}")
    return found


@contextmanager
def _resumable(out: str | Path | None) -> Iterator[None]:
    """Ctrl-C during the attacks: what is done lies in the audit's place, if it has one."""
    try:
        yield
    except KeyboardInterrupt:
        if out is None:
            raise
        raise Interrupted(f"stopped; the same audit with {out} as its place goes on from here") from None


# ---------------------------------------------------------------- before the attacks


def _embedded(embed: Embed, material: Material, batch: int) -> tuple[Tensor, Tensor]:
    """Clean embeddings of queries and gallery; a model that cannot take the images is one clear line."""
    for images in material.gallery.plain(torch.arange(1)):
        try:
            embed_all(embed, [images])
        except (AnchorholdError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # it is their code
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
            raise ModelError(f"the model fails on images of shape {tuple(images.shape)} ({first})") from error
    gallery = material.gallery.embedded(embed, batch)
    queries = gallery if material.same else material.query.embedded(embed, batch)
    for role, e in (("gallery", gallery), ("query", queries)):
        bad = int((~e.isfinite()).any(1).sum())
        if bad:
            raise ModelError(f"{bad} of {len(e)} {role} embeddings are not finite: nothing can be measured on them")
    return queries, gallery


def _clean(scene: Scene, key: Key, resamples: int) -> tuple[dict[str, Column], dict[str, Tensor]]:
    rows = score_queries(
        scene.queries,
        scene.labels,
        gallery=scene.gallery,
        gallery_labels=scene.gallery_labels,
        self_ids=scene.own,
    )
    rows = {name: rows[name].cpu() for name in _CLEAN}
    drawn = resampled_means(rows, key("bootstrap"), resamples)
    columns = {}
    for name, printed in _CLEAN.items():
        span = interval(100 * drawn[name])
        columns[printed] = Column(100 * float(rows[name].nanmean()), span.low, span.high)
    columns["NMI"] = Column(100 * nmi(scene.queries, scene.labels, key("nmi")), None, None)
    return columns, rows


def _described(victim: nn.Module, scene: Scene) -> dict[str, Any]:
    inner = victim.module if isinstance(victim, Victim) else victim
    about = {
        "kind": type(inner).__name__,
        "parameters": sum(p.numel() for p in victim.parameters()),
        "dim": scene.gallery.shape[1],
        "weights": fingerprint_of(victim),
    }
    config = getattr(inner, "config", None)
    return about | ({"config": config} if isinstance(inner, Embedder) else {})
