"""fit() and resume(): prepare a run, from data and a recipe to its folder; `loop.train` then trains it.

anchorhold train cub --root CUB_200_2011 --recipe natural --out runs/natural
anchorhold train cub --root CUB_200_2011 --recipe hm-lga --set defence.steps=32 --out runs/hm32
anchorhold resume runs/hm32
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.build import build, to_dict
from ..config.settings import Settings
from ..console import Report, Silent
from ..data.adapters import IN_MEMORY, dataset_from
from ..data.beside import without_folders
from ..data.datasets import dataset
from ..data.own import is_own
from ..data.splits import Dataset, Split, by_lengths
from ..data.trained import TrainedOn
from ..defences.own import given_again, name_of
from ..device import computer_of, device_named
from ..distributed import Ranks, joined
from ..errors import ModelError, RunError
from ..extensions import Origin, is_hub
from ..interface import option, resuming, worded
from ..model.embedder import Embedder, embedder_from
from ..model.preprocessing import record_of
from ..model.trainable import Trainable, rebuilt, trainable
from ..model.tuning import Tuning
from ..model.weights import LoadReport, check_model
from ..model.wrap import hub_of
from ..perturb.settings import Threat
from ..pretraining.settings import WITHOUT_LABELS
from ..runs.fields import dig
from ..runs.folder import EXPORT, Run
from ..runs.locks import one_writer
from ..runs.provenance import provenance
from .callbacks import Callback, Callbacks, callbacks_of
from .forecasting import say_if_long
from .loop import train
from .preparing import against, build_model, completed, prepared, widened
from .trainer import Trainer

__all__ = ["fit", "resume"]


def fit(
    model: nn.Module | None,
    data: Any,
    recipe: str | None = None,
    out: str | Path = "",
    *,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    defence: Callable[..., Any] | str | None = None,
    threat: Threat | str | None = None,
    row: str = "",
    device: str = "auto",
    report: Report | None = None,
    replace_run: bool = False,
    callbacks: Sequence[Callback | str] = (),
) -> Run:
    """Train a model by a recipe, and return its run folder.

    Args:
        model: the model to train; None builds the one that the settings describe. Any module that maps images to
            vectors will do, `ah.wrap(module, mean=…, std=…, size=…)` where images have to be prepared for it.
        data: from `ah.dataset`, or what that takes first: a name, a folder, a CSV, `module:function`. Or images in
            memory: (images, labels), a torch Dataset or DataLoader, a Hugging Face split, {"train": …, "test": …}.
        recipe: the name of a recipe, or a TOML file. By default robust; with a defence of yours hm-lga.
        out: the run folder; by default a new one in runs/, named after data, recipe and seed.
        settings: the whole settings, instead of recipe and overrides.
        overrides: changes to the recipe, such as {"train": {"epochs": 3}} or {"train.epochs": 3}. A loss, miner,
            sampler or gradual function of yours may stand there as an object: {"defence": {"loss": MyLoss()}}. A loss
            is trained in place, as the model is.
        defence: your own, a function `defence(step, settings)`, instead of the recipe's; its settings are under
            "defence" in `overrides`.
        threat: what the attack inside the training may do, instead of the recipe's: `ah.Threat(eps=0.5, norm="l2")`.
        row: the published row that the settings belong to, for the record.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress and messages, such as `ah.Console()`; None is silent.
        replace_run: whether an existing run in `out` may be overwritten.
        callbacks: told about every epoch and the end (`ah.Callback`): objects, "tensorboard", or `module:thing`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     run = fit(None, "digits", "natural", f"{place}/run", overrides={"train.epochs": 1}, device="cpu")
    ...     run.read_json()["status"]
    'done'
    """
    told = callbacks_of(callbacks)
    data, settings, given, notes = prepared(model, data, recipe, settings, overrides, defence, row)
    settings = settings if threat is None else against(threat, settings)
    where = device_named(device)
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    for note in notes:
        report.say(note)
    model = given or build_model(settings, data)
    if model.weights_report is not None:
        report.say(f"weights: {model.weights_report}")
    settings, note = completed(settings, model)
    if note:
        report.say(note)
    described = _data_record(data, report)
    _remember(model, settings, data)
    info = {
        "settings": to_dict(settings),
        "row": row,
        **provenance(computer_of(where)),
        "data": described,
        "model": _model_record(model, given is not None),
        "ranks": ranks.size,
        "status": "training",
    }
    word = data.name.replace("/", "-").replace(":", "-")  # of module:thing
    out = out or Path("runs") / f"{word}-{Path(settings.recipe or 'run').stem}-{settings.train.seed}"
    run = Run(out, writes=ranks.first)
    with one_writer(out, ranks, report):
        _create(run, info, replace_run, ranks, report)
        if ranks.size == 1:
            say_if_long(settings, model, data, where, report)
        _train(run, settings, model, data, where, report, ranks, told)
    return run


def resume(
    out: str | Path,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    root: str | Path | None = None,
    device: str = "auto",
    report: Report | None = None,
    allow: Collection[str] = (),
    defence: Callable[..., Any] | None = None,
    own: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | str] = (),
) -> Run:
    """Continue a run from its last checkpoint.

    Args:
        out: the run folder.
        model: needed if it is a module of your own, or if you built the model and the run has no checkpoint yet.
        data: only needed if the run was given data by hand, in any form that `fit` takes.
        root: the folder of the images, if they have moved.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress and messages, such as `ah.Console()`; None is silent.
        allow: code that may be imported, as `module:thing`, and weights that may be downloaded, as `hf:owner/name`;
            settings that name others are refused.
        defence: the defence of your own that the run trains by, where it was given as an object.
        own: what else of the defence's settings was given as an object, such as {"loss": MyLoss(2.0)}; or the new
            place of a teacher that has moved, {"teacher": "runs/teacher"}.
        callbacks: as in `fit`; a run does not remember them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     run = fit(None, "digits", "natural", f"{place}/run", overrides={"train.epochs": 1}, device="cpu")
    ...     resume(run.path, device="cpu").read_json()["status"]  # a finished run stays as it is
    'done'
    """
    told = callbacks_of(callbacks)
    where = device_named(device)
    ranks = joined(where)
    run = Run(out, writes=ranks.first)
    ranks.once(run.read_json)  # before locking, so that a folder without a run stays untouched
    report = report if report and ranks.first else Silent()
    command = worded(f"{resuming(run.path)} --allow {{}}", "allow=['{}']")
    given = frozenset() if defence is None else frozenset({name_of(defence)})
    origin = Origin(str(run.path / "run.json"), frozenset(allow) | given, command)
    with one_writer(out, ranks, report):
        info = ranks.once(run.read_json)
        if _complete(run, info, ranks, report):
            return run
        settings = build(given_again(run.path, run.field(info, "settings", dict), own or {}), origin)
        data = widened(_resumed_data(run, info, settings, data, root, origin), settings)
        _check_same_data(run, info, data, report)
        model = _resumed_model(run, info, settings, data, origin) if model is None else _same_model(run, info, model)
        _remember(model, settings, data)
        here = computer_of(where)
        if info.get("device") != here:
            report.say(f"begun on {info.get('device')}, resumed on {here}: results may differ by rounding")
        # No hash is recorded until the model is exported again.
        run.update_json(status="training", export=None, model={**info["model"], "config": model.config})
        _train(run, settings, model, data, where, report, ranks, told)
    return run


def _train(
    run: Run,
    settings: Settings,
    model: Embedder | Trainable,
    data: Dataset,
    device: torch.device,
    report: Report,
    ranks: Ranks,
    callbacks: Sequence[Callback],
) -> None:
    """Train the part of the model that `model.train` names; the model is whole again however it ends."""
    tuning = Tuning(model, settings.model)
    try:
        trainer = Trainer(run, settings, model, data, device, report, ranks, tuning)
        trainer.callbacks = Callbacks(callbacks, run, report)
        train(trainer)
    finally:
        tuning.end()


# What a run trains again -------------------------------------------------------------------------------------


def _resumed_data(
    run: Run, info: Mapping[str, Any], settings: Settings, data: Any, root: str | Path | None, origin: Origin
) -> Dataset:
    """The data of a run: found again by name and root, or given again."""
    wanted = settings.data
    if data is None and wanted.name in IN_MEMORY:
        raise RunError(f"{run.path} was given its data in Python: give the same again with ah.resume(…, data=…)")
    if data is None and not is_own(wanted.name):
        loose = wanted.name == "folder" and to_dict(settings)["defence"]["name"] in WITHOUT_LABELS
        options = {"labels": False} if loose else {}
        return dataset(wanted.name, root or wanted.root or None, held_out=wanted.held_out, **options)
    given, place = (wanted.name, root or wanted.root or None) if data is None else (data, None)
    mark = run.field(info, "data.train", str)
    # PIL images of one size are kept in it, unless `fit` was told to resize them: its recipe does not count.
    for resize in dict.fromkeys((wanted.resize, 0)):
        found = dataset_from(given, place, held_out=wanted.held_out, resize=resize, origin=origin)
        if found.train.images is None or found.train.fingerprint() == mark:
            break
    return found


def _same_model(run: Run, info: Mapping[str, Any], model: nn.Module) -> Embedder | Trainable:
    """The model that is given again, with what run.json says is around it."""
    config = run.field(info, "model.config", dict)
    if isinstance(model, Embedder) or "module" not in config:
        return trainable(model)
    return rebuilt(model, config)


def _resumed_model(run: Run, info: Mapping[str, Any], settings: Settings, data: Dataset, origin: Origin) -> Embedder:
    """A model with the run's structure; the checkpoint will overwrite every weight."""
    config = run.field(info, "model.config", dict)
    if "module" in config:
        preset = config.get("preset")
        name, module = (preset, f"ah.load({preset!r})") if isinstance(preset, str) else ("module:function", "…")
        raise RunError(
            f"{run.path} trains a module of yours, {preset or config['module']}: give it again, as in "
            + worded(f"--model {name}", f"ah.resume({str(run.path)!r}, model={module})")
        )
    if run.load() is not None:
        model = embedder_from(run.field(info, "model.config", dict), run.path / "run.json")
        model.weights_report = _recorded_weights(dig(info, "model", "weights"))  # goes into the model's file again
        return model
    if run.field(info, "model.given", bool):
        raise RunError(
            f"{run.path} has no checkpoint yet, and you built its model; give it with {option('model')}, or train again"
        )
    if is_hub(settings.model.weights):
        origin.check_download(settings.model.weights)
    return build_model(settings, data)


def _recorded_weights(record: Any) -> LoadReport | None:
    """The source of the first weights, from run.json; None where it has none, or not in this form."""
    try:
        return LoadReport(**record) if isinstance(record, Mapping) else None
    except TypeError:
        return None


def _remember(model: Embedder | Trainable, settings: Settings, data: Dataset) -> None:
    """Store preprocessing and training data with the model; audits and indexes use them."""
    model.config["preprocessing"] = record_of(settings.data.at_test)
    model.trained_on = TrainedOn.of(without_folders(data))  # an audit of the data set recognises it by its own images


# The run folder ----------------------------------------------------------------------------------------------


def _data_record(data: Dataset, report: Report) -> dict[str, Any]:
    """What run.json says about the data."""
    return {
        "name": data.name,
        "train": _mark(data.train, report),
        "test": _mark(data.test, report),
        "query": data.query.fingerprint(),  # audits recognise their data by it
        "images": [len(data.train), len(data.test)],
    }


def _model_record(model: Embedder | Trainable, by_hand: bool) -> dict[str, Any]:
    """What run.json says about the model; one made by hand cannot be built again from the settings."""
    weights = asdict(model.weights_report) if model.weights_report else None
    return {"config": model.config, "weights": weights, "given": by_hand, **hub_of(model)}


def _mark(split: Split, report: Report) -> str:
    """The fingerprint of a split; files without a known hash are read."""
    if split.paths is None:
        return split.fingerprint()
    with report.task(f"hashing {split.name}", len(split)) as advance:
        return split.fingerprint(lambda done, total: advance(done, ""))


def _create(run: Run, info: Mapping[str, Any], replace_run: bool, ranks: Ranks, report: Report) -> None:
    """Make the run folder. A run that has not finished a step is replaced without asking."""
    unstarted = ranks.once(run.unstarted)
    if unstarted and not replace_run:
        report.say(f"{run.path} holds a run without a finished step; replacing it")
    ranks.once(lambda: Run.create(run.path, info, replace=replace_run or unstarted))


def _complete(run: Run, info: Mapping[str, Any], ranks: Ranks, report: Report) -> bool:
    """Whether nothing is left to do. A lost or damaged model is exported again from the last checkpoint."""
    if run.field(info, "status", str) != "done":
        return False
    problem = ranks.once(lambda: _model_problem(run.path / EXPORT))
    if not problem:
        report.say(f"{run.path} is already complete")
        return True
    if run.load() is None:
        raise RunError(f"{run.path} is done, but its model and checkpoints are lost or damaged; train again")
    report.say(f"{problem}; exporting it again from the last checkpoint")
    return False


def _model_problem(model: Path) -> str:
    """What is wrong with the exported model, or an empty text."""
    if not model.exists():
        return f"{model} is missing"
    try:
        check_model(model)
    except ModelError:
        return f"{model} is damaged or was replaced"
    return ""


def _check_same_data(run: Run, info: Mapping[str, Any], data: Dataset, report: Report) -> None:
    """Refuse data that differ from those the run began with."""
    splits = data.train, data.test
    known = [run.field(info, f"data.{name}", str) for name in ("train", "test")]
    older = any(map(by_lengths, splits, known))
    if older:
        report.say(f"an older version began {run.path}; comparing names and lengths of its images, not contents")
    seen = [split.lengths_fingerprint() if older else _mark(split, report) for split in splits]
    if seen != known:
        raise RunError(
            f"the data of {run.path} changed since the run began; restore them, "
            f"or train again with another {option('out')}"
        )
