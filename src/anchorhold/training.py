"""fit(): from images and a recipe to a model and a run folder, in one loop that reads top to bottom.

    anchorhold train cub --root CUB_200_2011 --recipe natural --out runs/natural
    anchorhold train cub --root CUB_200_2011 --recipe hm-lga --set defence.steps=32 --out runs/hm32
    anchorhold resume runs/hm32

Everything random is keyed by (seed, purpose, step), so a run that was killed at any step and resumed ends with
the same weights as one that was left alone.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint
from .checkpoint import Meters, Progress
from .console import Report, Silent, duration
from .data.batches import class_batches, pair_batches
from .data.datasets import Dataset, dataset
from .defences import DEFENCES, Batch, Inner, Step
from .defences.pretrain import Through, Unit
from .device import compiles, computing, device_named
from .errors import Interrupted, RunError
from .layers import build, nested, settings_from, to_dict
from .model.average import Average
from .model.embedder import Embedder
from .model.graphed import Graphed
from .model.victim import fingerprint_of
from .model.weights import EXPORT, digest
from .monitors import Images, load_images, look, retrieval, signs_of_collapse
from .random import Key
from .ranks import Ranks, joined
from .record import Run, provenance
from .settings import Settings, check, falling
from .stopping import check_finite, judge_canary, judge_collapse, judge_features, stop_on_signal

__all__ = ["fit", "resume", "with_data"]

LOOK = 20  # steps between looks at whether the loss is still finite: each look waits for the GPU


def fit(
    model: Embedder | None,
    data: Dataset | str | Path,
    recipe: str = "hm-lga",
    out: str | Path = "",
    *,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    row: str = "",
    device: str = "auto",
    report: Report | None = None,
    replace_run: bool = False,
) -> Run:
    """Train `model` (None: the one the settings describe) on `data` by a recipe; the run folder is returned.

    `data` comes from `ah.dataset`, or is what that takes first: a name, a folder, a CSV. `overrides` is a dict such as
    {"train": {"epochs": 3}} or {"train.epochs": 3}; `settings` replaces recipe and overrides.
    `row` names the published row that the settings are of, for the record.
    """
    if not isinstance(data, Dataset):
        said = nested(overrides or {}).get("data", {})
        data = dataset(data, said.get("root"), held_out=said.get("held_out", 0))
    if settings is None:
        settings = settings_from(recipe, with_data(overrides or {}, data))
    check(
        settings.data.held_out == data.held_out,
        f"data.held_out is {settings.data.held_out}, but {data.held_out} classes of these data are held out: "
        "say it where the data are made, ah.dataset(…, held_out=N)",
    )
    given = model is not None
    if model is not None:
        described = {name: model.config[name] for name in ("backbone", "dim", "freeze_batchnorm")}
        settings = replace(settings, model=replace(settings.model, weights="", **described))
    where = device_named(device)
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    model = model or build_model(settings, data)
    if model.weights_report is not None:
        report.say(f"weights: {model.weights_report}")
    info = {
        "settings": to_dict(settings),
        "row": row,
        **provenance(where),
        "data": {
            "name": data.name,
            "train": data.train.fingerprint(),
            "test": data.test.fingerprint(),
            "images": [len(data.train), len(data.test)],
        },
        "model": {
            "config": model.config,
            "weights": asdict(model.weights_report) if model.weights_report else None,
            "given": given,  # by the caller: the settings alone cannot make it again
        },
        "ranks": ranks.size,
        "status": "training",
    }
    out = out or Path("runs") / f"{data.name}-{Path(settings.recipe or 'run').stem}-{settings.train.seed}"
    ranks.once(lambda: Run.create(out, info, replace=replace_run))
    run = Run(out, writes=ranks.first)
    _train(run, settings, model, data, where, report, ranks)
    return run


def resume(
    out: str | Path,
    *,
    model: Embedder | None = None,
    data: Dataset | None = None,
    root: str | Path | None = None,
    device: str = "auto",
    report: Report | None = None,
) -> Run:
    """Go on with a run where its last checkpoint stands.

    `root` is where the images lie if they have moved; `data` and `model` are for what was made by hand.
    """
    where = device_named(device)
    ranks = joined(where)
    run = Run(out, writes=ranks.first)
    info = ranks.once(run.read_json)
    report = report if report and ranks.first else Silent()
    if info["status"] == "done":
        if ranks.once((run.path / EXPORT).exists):
            report.say(f"{run.path} is complete already")
            return run
        if run.load() is None:
            raise RunError(f"{run.path} is done, but has neither its model nor a checkpoint any more: train anew")
        report.say(f"{run.path} has lost {EXPORT}, which is written anew from its last checkpoint")
    settings = build(info["settings"])
    data = data or dataset(settings.data.name, root or settings.data.root or None, held_out=settings.data.held_out)
    seen = {"train": data.train.fingerprint(), "test": data.test.fingerprint()}
    if any(info["data"][split] != mark for split, mark in seen.items()):
        raise RunError(f"the data of {run.path} have changed since it began; give the same, or train anew elsewhere")
    if model is None and run.load() is not None:
        model = Embedder(**info["model"]["config"])  # the checkpoint holds every weight
    if model is None and info["model"]["given"]:
        raise RunError(f"{run.path} has no checkpoint yet and its model was made by hand: give it, or train anew")
    model = model or build_model(settings, data)
    here = provenance(where)["device"]
    if info.get("device") != here:
        report.say(f"begun on {info.get('device')}, going on with {here}: the same but for rounding")
    run.update_json(status="training")
    _train(run, settings, model, data, where, report, ranks)
    return run


def build_model(settings: Settings, data: Dataset) -> Embedder:
    """The embedder that the settings describe, for the images of `data`."""
    m = settings.model
    sample = data.train.images
    channels = 3 if sample is None else sample.shape[-1]
    side = settings.data.crop or settings.data.resize
    size = (side, side) if side or sample is None else sample.shape[1:3]
    return Embedder(
        m.backbone,
        m.dim,
        m.weights or None,
        channels=channels,
        size=size,
        freeze_batchnorm=m.freeze_batchnorm,
        seed=settings.train.seed,
    )


# The loop --------------------------------------------------------------------------------------------------


def _train(
    run: Run,
    settings: Settings,
    model: Embedder,
    data: Dataset,
    device: torch.device,
    report: Report,
    ranks: Ranks,
) -> None:
    train, key = settings.train, Key.of(settings.train.seed)
    for note in data.notes:
        report.say(note)
    images = load_images(data.train, settings.data, device, report, ranks)
    test = load_images(data.test, settings.data, device, report, ranks)

    model.to(device)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    defence = DEFENCES[to_dict(settings)["defence"]["name"]]
    parts: dict[str, nn.Module] = {"model": model}
    if defence.companion is not None:
        parts["companion"] = defence.companion(model, images.labels, settings.defence).to(device)
    optimiser = torch.optim.Adam(
        [p for part in parts.values() for p in part.parameters() if p.requires_grad],
        lr=settings.optimiser.lr,
        fused=device.type == "cuda",
        weight_decay=settings.optimiser.weight_decay,
    )
    average = Average(nn.ModuleDict(parts), train.ema)
    loose: dict[str, dict[str, Tensor]] = {"state": {}, "ema": average.tensors}
    run.tidy()
    restored = checkpoint.restore(run, parts, optimiser, loose)
    if run.broken:
        report.say(run.broken)
    at = restored or Progress()
    if ranks.size > 1:  # and by then all have read what the first may replace
        ranks.alike("images", [each.split.fingerprint() for each in (images, test)])
        ranks.alike("weights or another checkpoint", [fingerprint_of(model), at.step])
    run.cut_metrics(at.epoch)
    if run.writes and (flags := run.read_json().get("flags")):
        run.update_json(flags=[flag for flag in flags if flag["epoch"] <= at.epoch])
    precision = computing(train.precision, device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    meters = Meters(at.meters)
    begun = saved = warm = time.monotonic()
    spent = at.seconds

    def save() -> None:
        nonlocal saved
        at.seconds, at.meters = spent + time.monotonic() - begun, meters.sums()
        checkpoint.save(run, parts, optimiser, loose, at)
        saved = time.monotonic()

    if restored is None:
        save()  # so that a run can always be resumed from its folder alone
    total = train.epochs * len(_plan(images, settings, key("batches", 0)))
    first = at.step
    # A third of the images leave at once, and the passes of training count double.
    work = total * settings.batch.pairs * (5 + getattr(settings.defence, "steps", 0))
    fast = compiles(train.compile, train.precision, device, work)
    # Live BatchNorm changes from pass to pass, and with a companion it is not the model that is passed through.
    plain = settings.model.freeze_batchnorm and defence.companion is None
    graphed = Graphed(model, precision) if fast and plain else None
    # What passes through live BatchNorm is a rank's own share, and so is what it remembers of it.
    buffers = [] if settings.model.freeze_batchnorm else [b for part in parts.values() for b in part.buffers()]
    watched = device.type == "cuda" and train.canary_every > 0
    with stop_on_signal() as stopping, report.task("training", total, at.step) as advance:
        if at.step == 0 and defence.look is not None:
            advance(0, "a look at the features before it")
            begins, _ = retrieval(Through(model, Unit()), test)
            run.update_json(start={f"features_{name}": value for name, value in begins.items()})
        start = ranks.once(run.read_json).get("start", {}).get("features_r1")
        began = time.monotonic()
        while at.epoch < train.epochs:
            plan = _plan(images, settings, key("batches", at.epoch))
            keys = (key("augment", at.epoch, i) for i in range(at.index, len(plan)))
            views = images.augmented(plan[at.index :], keys)
            model.train()
            for ids, view in zip(plan[at.index :], views):
                ids = ids.to(device)
                benign = train.benign > 0 and key("benign").uniform(torch.tensor([at.step])).item() < train.benign
                step = Step(
                    model,
                    Batch(view, images.labels[ids], ids),
                    at.epoch,
                    train.epochs,
                    key("step", at.step),
                    # What a defence remembers is of perturbed batches: a benign one leaves no trace in it.
                    dict(loose["state"]) if benign else loose["state"],
                    meters.add,
                    precision,
                    settings.batch.mining_pairs,
                    parts.get("companion"),
                    fast,
                    watched and canary_due(at.step, train.canary_every),
                    graphed,
                    ranks,
                )
                for group in optimiser.param_groups:
                    group["lr"] = settings.optimiser.lr * falling(settings.optimiser.schedule, at.step / total)
                for loss in defence.run(step, _unperturbed(settings.defence) if benign else settings.defence):
                    optimiser.zero_grad(set_to_none=True)
                    loss.backward()
                    ranks.summed(p.grad for group in optimiser.param_groups for p in group["params"])
                    optimiser.step()
                    ranks.same(buffers)
                    average.update()
                    finite &= torch.isfinite(loss.detach())
                    meters.add("loss", loss.detach())
                    del loss  # and with it the graph behind it, which a capture of the next pass must not meet
                at.index, at.step = at.index + 1, at.step + 1
                if at.step % LOOK == 0 or at.index == len(plan):
                    check_finite(run, bool(finite), at, report)
                    advance(at.step, f"epoch {at.epoch + 1}, {meters.note()}")
                if fast and at.step == first + 1:
                    report.say(f"the first step ended after {duration(time.monotonic() - began)}, compiled")
                if at.step == first + LOOK:
                    warm = time.monotonic()  # what is compiled and captured comes once
                if at.step == first + 2 * LOOK:
                    left = (total - at.step) * (time.monotonic() - warm) / LOOK
                    report.say(f"about {duration(left)} for {total - at.step:,} steps, looks at the test split apart")
                if ranks.any(stopping()):  # they stop together, or those that go on would wait for ever
                    save()
                    run.update_json(status="interrupted")
                    raise Interrupted(
                        f"stopped and saved at step {at.step}; to go on: anchorhold resume {quote(str(run.path))}"
                    )
                if time.monotonic() - saved >= train.checkpoint_seconds and at.index < len(plan):
                    check_finite(run, bool(finite), at, report)
                    save()
            at.image_steps += meters.total("image_steps")
            at.epoch, at.index = at.epoch + 1, 0
            with average.lent():
                row: dict[str, Any] = {"step": at.step, "epoch": at.epoch, **meters.means()}
                if defence.look is None:
                    row |= signs_of_collapse(model, images, key("collapse"))
                if at.epoch % train.evaluate_every == 0 or at.epoch == train.epochs:
                    if defence.look is not None:
                        row |= defence.look(*parts.values(), images, settings.defence, key("look"), precision)
                        found = look(Through(model, Unit()), test, train, key("look"), precision)
                        row |= {f"features_{name}": value for name, value in found.items()}
                    else:
                        row |= look(model, test, train, key("look"), precision)
            meters.reset()
            row = ranks.agreed(row)  # the last bits may differ, and what follows from them must not
            row["seconds"] = round(spent + time.monotonic() - begun, 2)
            run.append(row)
            advance(at.step, _summary(row))
            judge_canary(run, row, report)
            if defence.look is None:  # pretraining leaves the head as it is, and nothing can be told from that
                judge_collapse(run, settings, at, row, report)
            else:
                judge_features(run, start, row, report)
            if time.monotonic() - saved >= train.checkpoint_seconds or at.epoch == train.epochs:
                save()
    if run.writes:
        with average.lent():
            model.save(run.path / EXPORT)
        run.update_json(
            status="done",
            final=run.metrics()[-1] if run.metrics() else {},
            seconds=round(at.seconds, 2),
            image_steps=round(at.image_steps),
            export=digest(run.path / EXPORT),
        )
    ranks.wait()


def canary_due(step: int, every: int) -> bool:
    """Whether the canary looks at this step, one of `every` and one earlier each time.

    CA-TRIDE takes turns, and every 500th step is the same one's.
    """
    return (step + step // every) % every == 0


def _unperturbed(defence: Any) -> Any:
    """The settings of the same defence without its attack."""
    return replace(defence, eps=0.0, steps=0) if isinstance(defence, Inner) else defence


def _plan(images: Images, settings: Settings, key: Key) -> list[Tensor]:
    b = settings.batch
    if b.kind == "classes":
        return class_batches(images.split.labels, b.classes, b.instances, key)
    return pair_batches(images.split.labels, b.pairs, key, distinct=b.distinct)


def _summary(row: Mapping[str, Any]) -> str:
    words = {
        "loss": "loss {:.4f}",
        "r1": "R@1 {:.1f}",
        "r1_attacked": "attacked {:.1f}",
        "accuracy": "accuracy {:.1f}",
        "accuracy_attacked": "attacked {:.1f}",
        "drift": "drift {:.3f}",
        "drift_attacked": "attacked {:.3f}",
        "features_r1": "R@1 of features {:.1f}",
        "features_r1_attacked": "attacked {:.1f}",
        "separability": "sep. {:.2f}",
    }
    return ", ".join(
        [f"epoch {row['epoch']}", *(text.format(row[k]) for k, text in words.items() if row.get(k) is not None)]
    )


# Small things ----------------------------------------------------------------------------------------------


def with_data(overrides: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """What is known of a data set, below what the caller says."""
    known: dict[str, Any] = {"name": data.name, "root": data.root}
    known |= {"held_out": data.held_out} if data.held_out else {}
    overrides = nested(overrides)
    said = overrides.get("data", {})
    check(isinstance(said, Mapping), f"overrides: data is a section of settings, not {said!r}")
    return {**overrides, "data": {**known, **said}}
