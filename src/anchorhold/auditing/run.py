"""audit(): clean metrics, the attacks in both protocols, and the scores with intervals.

    audit = ah.audit(model, ah.dataset("digits"))                    # 1,000 queries over all classes
    audit = ah.audit(ah.wrap(theirs, mean=…, std=…, size=224), "photos/", limit=0, out="audits/theirs")
    print(audit); audit.save("audits/mine")

Samples are attacked in fixed batches, and the rows of a batch are a shard. With `out`, shards are files. A stopped
audit resumes with the batches that have none, and gives the same numbers as one without a stop. `result` describes the
files and the schema of audit.json.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..attacks.goal import Goal
from ..console import Report, Silent, duration
from ..device import compiles, computer_of, computing, device_named, living_on, repeatable
from ..distributed import joined
from ..errors import Interrupted, check
from ..interface import argument, option, recorded
from ..model.frozen import frozen
from ..model.no_gradients import gives_gradients
from ..model.preprocessing import preprocessing_of
from ..model.wrap import as_victim, fingerprint_of, unnormalised
from ..perturb.settings import VALUES_ONLY, Threat
from ..report.pictures import SHOWN_CHANNELS
from ..runs.locks import one_writer
from ..runs.provenance import provenance
from .black_box import how_attacked, usable
from .classes import Classes, part_of
from .draws import on_draws, still
from .ensemble import Surrogate, steps_at_most, strengthened, tasks
from .evidence import Evidence, flags_of
from .expected import say_if_long
from .inputs import Data, prepare
from .members import BLACK, MEMBERS
from .outcomes import RunRows, outcome
from .plan import NINE, AttackRun, AuditSettings, curve_levels, effort, runs_of
from .replacing import check_kept, check_place, drop_receipts
from .result import Audit, Flag
from .sample_size import audit_until, check_until
from .standard import attack_all
from .strong import Strong, additions, strengthen
from .subject import Subject, clean_columns, subject_of, surrogate_of, without_match
from .thumbnails import pictures_of

__all__ = ["audit"]

Examine = Callable[[Evidence], Sequence[Flag]]


def audit(
    model: nn.Module,
    data: Data,
    *,
    protocols: Sequence[str] = ("published", "corrected"),
    attacks: Sequence[str | Goal] | Mapping[str, Mapping[str, Any]] | None = None,
    limit: int = 1000,
    threat: Threat | str = "standard",
    eps: float | None = None,
    alpha: float | None = None,
    steps: int | None = None,
    method: Literal["pgd", "fgsm", "cw", "square", "nes"] = "pgd",
    strength: Literal["standard", "strong"] = "standard",
    surrogate: nn.Module | None = None,
    epsilons: Sequence[float] | float | None = None,
    until: float | None = None,
    seed: int = 0,
    seeds: int = 1,
    batch: int = 128,
    device: str = "auto",
    precision: Literal["auto", "fp32", "bf16"] = "auto",
    compile: Literal["auto", "on", "off"] = "auto",
    out: str | Path | None = None,
    replace: bool = False,
    resize: int | None = None,
    crop: int | None = None,
    on_bad_image: Literal["fail", "skip"] = "fail",
    classes: Classes = "unseen",
    resamples: int = 1000,
    examine: Examine | None = flags_of,
    report: Report | None = None,
) -> Audit:
    """How robust `model` is on `data`: clean metrics, attacks in both protocols, ERS and ARS with intervals.

    Args:
        model: any module that maps images in [0, 1] to vectors.
        data: what `fit` takes, of which the test split is attacked, or {"query": …, "gallery": …} of such.
        protocols: published, corrected, or both.
        attacks: names, by default the nine of ERS, or names with settings: {"CA+": {"w": 5}}. Yours as an object, or as
            `module:thing`.
        limit: number of attacked images, a seeded sample over all classes; 0 is all. The gallery is never reduced.
        threat: what the attacker may do, `ah.Threat(eps=8/255, norm="linf", steps=32)`; or a name: standard, adml.
        eps: the maximum change of a pixel (Linf) or of the image (L2), instead of the threat's.
        alpha: the length of a step, instead of the threat's; only pgd has one.
        steps: steps, instead of the threat's. For cw they are iterations, for square and nes queries, by default 1,000.
        method: pgd, fgsm or cw; square and nes take no gradients. A model without gradients is attacked by square.
        strength: strong adds the ensemble of `auditing.members`.
        surrogate: a second model; the strong audit transfers perturbations from it.
        epsilons: each ε of the curve of R@1 under the strong attack, or one. By default an eighth, a quarter, a half
            and all of the threat's ε, unless you choose `attacks` or `until`; () leaves the curve out.
        until: add queries until the interval of ERS is ± this many points.
        seed: of all random draws.
        seeds: number of random starts, where the budget has a random start. Results are means over them.
        batch: images attacked at a time.
        device: auto, cpu, cuda or cuda:N.
        precision: of the attacks: auto, fp32 or bf16. Measurements are in fp32.
        compile: auto, on or off.
        out: output folder; give the same one to resume, or to add attacks.
        replace: whether another audit in `out` may be replaced.
        resize: resize files to this square before the crop, instead of the model's; encoders resize the shorter side.
        crop: the side of the square that the model sees, instead of the model's.
        on_bad_image: fail or skip.
        classes: unseen or all, of data without a test split that the model was trained on.
        resamples: number of bootstrap resamples.
        examine: computes the flags; None skips them.
        report: receives progress messages.

    >>> from anchorhold import Embedder, dataset
    >>> model = Embedder("small", 8, channels=1, size=8)
    >>> quick = {"attacks": ["ES"], "limit": 4, "steps": 1, "resamples": 9, "examine": None, "device": "cpu"}
    >>> list(audit(model, dataset("digits"), **quick).protocols)
    ['published', 'corrected']
    """
    check_place(out, strength, replace)
    chosen, own = _chosen(attacks)
    way = usable(model, method)
    threat = effort(way, threat, eps, alpha, steps)
    settings = AuditSettings(
        protocols=(protocols,) if isinstance(protocols, str) else tuple(protocols),
        attacks=tuple(chosen),
        limit=limit,
        eps=threat.eps,
        alpha=threat.step,
        steps=threat.budget_steps,
        method=way,  # type: ignore[arg-type]  # checked by the settings
        seed=seed,
        batch=batch,
        precision=precision,
        compile=compile,
        resize=resize,
        crop=crop,
        resamples=resamples,
        start="zero" if way != "pgd" else threat.start,
        seeds=seeds,
        strength=strength,
        epsilons=curve_levels(epsilons, threat, way, protocols, usual=attacks is None and until is None),
        classes=classes,
        norm=threat.norm,
    )
    check(surrogate is None or strength == "strong", f"a surrogate needs {option('strength', 'strong')}")
    check(
        surrogate is None or gives_gradients(surrogate),
        "the surrogate gives no gradients to transfer from; choose another",
    )
    check_until(until, None if attacks is None else chosen)
    runs, where = runs_of(settings, chosen, own), device_named(device)
    check(
        not settings.epsilons or any(task.name == "recall" for task in tasks(runs)),
        f"a curve over ε is of R@1: add margin to the attacks, or leave out {option('epsilons', command='curve')}",
    )
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    victim = as_victim(model)
    part = part_of(data, (victim,), classes, preprocessing_of(victim).told(resize, crop).for_pictures)
    material = prepare(part.data, victim, where, report, resize, crop, on_bad_image, ranks)
    remarks = (*part.notes, *unnormalised(victim), *how_attacked(victim, settings.method, settings.steps))
    material = dataclasses.replace(material, part=part.recorded, remarks=remarks)
    for note in (*material.notes, *unnormalised(victim), f"attacked: {part.said}"):
        report.say(note)
    samples = min(limit or len(material.labels), len(material.labels))
    usual = settings.budget.steps
    harder = sum(steps_at_most(task, levels, usual) for task, levels in strengthened(settings, runs))
    work = samples * (len(runs) * usual + harder)
    fast, climbing = compiles(settings.compile, settings.precision, where, work), computing(settings.precision, where)
    other = None if surrogate is None else as_victim(surrogate)

    def keep(queries: int | None) -> None:
        """Refuse to replace an audit in `out` that has more than this one."""
        if out is None or replace:
            return
        place, weights, told = out, fingerprint_of(victim), material.describe()
        ranks.once(lambda: check_kept(place, settings, weights, told, queries, until is not None))

    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(one_writer(out, ranks, report))
            keep(None if until is not None else samples)
            if replace and strength != "strong" and ranks.first:
                drop_receipts(out)
        stack.enter_context(living_on(victim, where))
        stack.enter_context(repeatable())
        stack.enter_context(still(where, seed))
        view = stack.enter_context(frozen(victim, fast))
        second = None
        if other is not None:
            stack.enter_context(living_on(other, where))
            second = surrogate_of(other, stack.enter_context(frozen(other)), material, settings.batch)

        def once(limit: int, place: str | Path | None) -> Audit:
            begun, now = time.monotonic(), dataclasses.replace(settings, limit=limit)
            subject = subject_of(victim, view, material, now, climbing, place, report, replace)
            about = provenance(computer_of(where))
            return _audited(subject, runs, place, second, examine, about, begun)

        if until is None:
            return once(limit, out)
        return audit_until(once, limit, len(material.labels), until, out, report, keep)


def _chosen(
    attacks: Sequence[str | Goal] | Mapping[str, Mapping[str, Any]] | None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Goal]]:
    """Attacks by name, each with the settings that are changed, and those that were given as objects."""
    given = [attacks] if isinstance(attacks, str | Goal) else attacks
    check(
        given is None or len(given) > 0,
        f"{argument('attacks')} is empty: name some, such as CA+ and ES, or leave it out",
    )
    if isinstance(given, Mapping):
        return {name: dict(changes) for name, changes in given.items()}, {}
    named = [each() if isinstance(each, type) else each for each in given or NINE]
    own = {each.name: each for each in named if isinstance(each, Goal)}
    names = [each.name if isinstance(each, Goal) else each for each in named]
    check(len(set(names)) == len(names), f"{argument('attacks')} names one twice: {', '.join(names)}")
    return {name: {} for name in names}, own


def _audited(
    subject: Subject,
    runs: Sequence[AttackRun],
    out: str | Path | None,
    second: Surrogate | None,
    examine: Examine | None,
    made_by: dict[str, Any],
    begun: float,
) -> Audit:
    """Clean metrics, all attacks, the scores and the flags; saved if `out` is given."""
    settings, ranks, report, facts = subject.settings, subject.shards.ranks, subject.report, asdict(subject.settings)
    clean, clean_rows = clean_columns(subject.scene, subject.key, settings.resamples)
    spent = time.monotonic() - begun
    with _resumable(out):
        rows = _attacked(subject, runs, examine is not None)
        strong = _strengthened(subject, runs, rows, second)
    shown = tuple(rows)
    harder = () if strong is None else strong.runs
    spent += sum(run.seconds for run in (*rows, *harder))
    steps = sum(run.image_steps for run in (*rows, *harder))
    rows += harder if settings.strength == "strong" else ()
    begun = time.monotonic()
    outcomes = _outcomes(subject, rows)
    model, data = subject.about["model"], subject.about["data"]
    found = Audit(
        settings=facts,
        provenance=made_by,
        model={**model, "notes": list(getattr(subject.model, "notes", ()))},
        data=data,
        clean=clean,
        protocols=outcomes,
        runs=tuple(rows),
        flags=(),
        notes=(
            *_on_draws(model),
            *_on_output(subject.model, model["dim"]),
            *subject.material.remarks,
            *_on_matches(subject),
            *_on_channels(shown),
            *(note for each in outcomes.values() for note in each.notes),
        ),
        seconds=spent + time.monotonic() - begun,
        image_steps=steps,
        command=recorded(),
        checked=examine is not None,
        clean_rows=clean_rows,
        pictures=pictures_of(subject.material, shown),
        **({} if strong is None else additions(strong, outcomes, facts, tasks(runs), model, data)),
    )
    if examine is not None:
        begun = time.monotonic()
        with _resumable(out):
            flags = ranks.once(lambda: tuple(examine(Evidence(subject, found))))
        found = dataclasses.replace(found, flags=flags, seconds=found.seconds + time.monotonic() - begun)
    if out is not None and ranks.first:
        found.save(out)
    ranks.wait()
    together = f", summed over {ranks.size} ranks" if ranks.size > 1 else ""
    cost = "queries" if settings.method in VALUES_ONLY else "image-steps"
    report.say(f"audited in {duration(found.seconds)}: {found.image_steps:,} {cost}{together}")
    return found


def _on_draws(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes where the model is random."""
    draws = model.get("draws")
    if not draws:
        return ()
    single = f"all numbers are of these means; single answers have a clean R@1 of {model['single_answers_r1']:.1f}"
    return (on_draws(draws), single, "there are no receipts: nobody gets the same answers again")


def _on_matches(subject: Subject) -> tuple[str, ...]:
    """A note where queries cannot be answered right."""
    lost, count = without_match(subject.scene), len(subject.scene.labels)
    if not lost:
        return ()
    said = f"{lost:,} of {count:,} queries have no other image of their class in the gallery"
    return (f"{said}: R@1 counts them as wrong",)


def _on_channels(rows: Sequence[RunRows]) -> tuple[str, ...]:
    """A note where images cannot be shown."""
    count = next((run.examples["clean"].shape[3] for run in rows if "clean" in run.examples), 3)
    return () if count in SHOWN_CHANNELS else (f"the images have {count} channels, so the page has no pictures",)


def _on_output(model: nn.Module, dim: int) -> tuple[str, ...]:
    """A note on which of several outputs is the vector."""
    taken = getattr(model, "taken", "")
    return (f"vector: {taken} ({dim} numbers)",) if taken else ()


def _attacked(subject: Subject, runs: Sequence[AttackRun], checked: bool) -> list[RunRows]:
    """The rows of every run."""
    rows: list[RunRows] = []
    count, steps = len(subject.attacked["query"]), subject.settings.budget.steps
    what = "queries" if subject.settings.method in VALUES_ONLY else "steps"
    subject.report.say(f"{len(runs)} attack runs on {count:,} images, {steps} {what} each")
    say_if_long(subject, runs, checked)
    for done, run in enumerate(runs):
        if done == 1:
            left = rows[0].seconds / subject.shards.ranks.size * (len(runs) - 1)
            others = "the other run" if len(runs) == 2 else f"the other {len(runs) - 1} runs"
            subject.report.say(f"about {duration(left)} for {others}")
        rows.append(attack_all(run, subject))
    return rows


def _strengthened(
    subject: Subject, runs: Sequence[AttackRun], rows: Sequence[RunRows], second: Surrogate | None
) -> Strong | None:
    """The results of the ensemble: on R@1 for the curve, on every goal of a strong audit; None without either."""
    settings = subject.settings
    chosen = [task for task, _ in strengthened(settings, runs)]
    if not chosen:
        return None
    members = MEMBERS if settings.method == "pgd" else (*(m for m in MEMBERS if m.kind == "transfer"), *BLACK)
    return strengthen(subject, chosen, rows, members=members, surrogate=second, epsilons=settings.epsilons)


def _outcomes(subject: Subject, rows: Sequence[RunRows]) -> dict[str, Any]:
    """Columns and scores of every protocol."""
    settings, scene = subject.settings, subject.scene
    names = [*dict.fromkeys(settings.protocols), *(["strong"] if settings.strength == "strong" else [])]
    # Only the published protocol keeps a query's own image in its list.
    without = len(scene.gallery) - int((scene.own >= 0).all())
    listed = {name: len(scene.gallery) if name == "published" else without for name in names}
    same = subject.material.same
    return {name: outcome(name, rows, subject.key, settings.resamples, same, listed[name]) for name in names}


@contextmanager
def _resumable(out: str | Path | None) -> Iterator[None]:
    """Ctrl-C during the attacks: finished batches are in `out`, if it is given."""
    try:
        yield
    except KeyboardInterrupt:
        if out is None:
            raise
        raise Interrupted(f"stopped; to resume, run the same audit with {option('out', str(out))}") from None
