"""fit() and resume(): prepare a run, from data and a recipe to its folder; `loop.train` then trains it.

anchorhold train cub --root CUB_200_2011 --recipe natural --out runs/natural
anchorhold train cub --root CUB_200_2011 --recipe hm-lga --set defence.steps=32 --out runs/hm32
anchorhold resume runs/hm32
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn

from ..config.build import build, to_dict
from ..config.recipes import nested, settings_from
from ..config.settings import Settings
from ..console import Report, Silent
from ..data.adapters import IN_MEMORY, dataset_from
from ..data.datasets import dataset
from ..data.splits import Dataset, Split, by_lengths
from ..data.trained import TrainedOn
from ..defences.own import name_of
from ..device import computer_of, device_named
from ..distributed import Ranks, joined
from ..errors import ModelError, RunError, check
from ..extensions import Origin
from ..model.embedder import Embedder, embedder_from
from ..model.encoders import preset_of
from ..model.preprocessing import preprocessing_of, record_of
from ..model.trainable import Trainable, rebuilt, trainable
from ..model.tuning import Tuning
from ..model.weights import check_model
from ..runs.folder import EXPORT, Run
from ..runs.locks import one_writer
from ..runs.provenance import provenance
from .loop import train
from .trainer import Trainer

__all__ = ["build_model", "fit", "resume", "with_data", "with_preparation"]


def fit(
    model: nn.Module | None,
    data: Any,
    recipe: str = "hm-lga",
    out: str | Path = "",
    *,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    defence: Callable[..., Any] | str | None = None,
    row: str = "",
    device: str = "auto",
    report: Report | None = None,
    replace_run: bool = False,
) -> Run:
    """Train a model by a recipe, and return its run folder.

    Args:
        model: the model to train; None builds the one that the settings describe. Any module that maps images to
            vectors will do, `ah.wrap(module, mean=…, std=…, size=…)` where images have to be prepared for it.
        data: from `ah.dataset`, or what that takes first: a name, a folder, a CSV. Or images in memory: (images,
            labels), a torch Dataset or DataLoader, a Hugging Face split, {"train": …, "test": …} of these.
        recipe: the name of a recipe, or a TOML file.
        out: the run folder; by default a new one in runs/, named after data, recipe and seed.
        settings: the whole settings, instead of recipe and overrides.
        overrides: changes to the recipe, such as {"train": {"epochs": 3}} or {"train.epochs": 3}.
        defence: your own, a function `defence(step, settings)`, instead of the recipe's; its settings are under
            "defence" in `overrides`.
        row: the published row that the settings belong to, for the record.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress and messages; None is silent.
        replace_run: whether an existing run in `out` may be overwritten.
    """
    if not isinstance(data, Dataset):
        data = _data_from(data, nested(overrides or {}).get("data", {}))
    if defence is not None:
        check(settings is None, "settings name their defence: leave defence out, or give recipe and overrides")
        overrides = _with_defence(overrides or {}, defence)
    settings = settings or settings_from(recipe, with_preparation(with_data(overrides or {}, data), data, model))
    given = None if model is None else trainable(model, settings.model.freeze_batchnorm, settings.model.train)
    settings = _settings_for(given, data, settings)
    where = device_named(device)
    ranks = joined(where)
    report = report if report and ranks.first else Silent()
    model = given or build_model(settings, data)
    if model.weights_report is not None:
        report.say(f"weights: {model.weights_report}")
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
    out = out or Path("runs") / f"{data.name}-{Path(settings.recipe or 'run').stem}-{settings.train.seed}"
    run = Run(out, writes=ranks.first)
    with one_writer(out, ranks, report):
        _create(run, info, replace_run, ranks, report)
        _train(run, settings, model, data, where, report, ranks)
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
) -> Run:
    """Continue a run from its last checkpoint.

    Args:
        out: the run folder.
        model: needed if it is a module of your own, or if you built the model and the run has no checkpoint yet.
        data: only needed if the run was given data by hand, in any form that `fit` takes.
        root: the folder of the images, if they have moved.
        device: auto, cpu, cuda or cuda:N.
        report: receives progress and messages; None is silent.
        allow: code that may be imported, as `module:thing`; settings that name other code are refused.
        defence: the defence of your own that the run trains by, where it was given as an object.
    """
    where = device_named(device)
    ranks = joined(where)
    run = Run(out, writes=ranks.first)
    ranks.once(run.read_json)  # before locking, so that a folder without a run stays untouched
    report = report if report and ranks.first else Silent()
    command = f"anchorhold resume {quote(str(run.path))} --allow {{}}"
    given = frozenset() if defence is None else frozenset({name_of(defence)})
    origin = Origin(str(run.path / "run.json"), frozenset(allow) | given, command)
    with one_writer(out, ranks, report):
        info = ranks.once(run.read_json)
        if _complete(run, info, ranks, report):
            return run
        settings = build(run.field(info, "settings", dict), origin)
        data = _resumed_data(run, settings, data, root)
        _check_same_data(run, info, data, report)
        model = _resumed_model(run, info, settings, data) if model is None else _same_model(run, info, model)
        _remember(model, settings, data)
        here = computer_of(where)
        if info.get("device") != here:
            report.say(f"begun on {info.get('device')}, resumed on {here}: results may differ by rounding")
        # No hash is recorded until the model is exported again.
        run.update_json(status="training", export=None, model={**info["model"], "config": model.config})
        _train(run, settings, model, data, where, report, ranks)
    return run


def _train(
    run: Run,
    settings: Settings,
    model: Embedder | Trainable,
    data: Dataset,
    device: torch.device,
    report: Report,
    ranks: Ranks,
) -> None:
    """Train the part of the model that `model.train` names; the model is whole again however it ends."""
    tuning = Tuning(model, settings.model)
    try:
        train(Trainer(run, settings, model, data, device, report, ranks, tuning))
    finally:
        tuning.end()


# Settings and model ------------------------------------------------------------------------------------------


def with_data(overrides: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """The overrides, completed with the name, root and held-out classes of the data set."""
    known: dict[str, Any] = {"name": data.name, "root": data.root}
    known |= {"held_out": data.held_out} if data.held_out else {}
    known |= {"resize": 0, "crop": 0} if data.name == "memory" else {}  # tensors are trained on as they are
    overrides = nested(overrides)
    given = overrides.get("data", {})
    check(isinstance(given, Mapping), f"overrides: data must be a section of settings, not {given!r}")
    return {**overrides, "data": {**known, **given}}


def with_preparation(overrides: Mapping[str, Any], data: Dataset, model: nn.Module | None) -> dict[str, Any]:
    """The overrides, completed with the resize and crop of an encoder; images in memory stay as the recipe has them."""
    if model is None or not preset_of(model) or data.train.paths is None:
        return dict(overrides)
    way = preprocessing_of(model)
    own = {name: getattr(way, name) for name in ("resize", "crop", "interpolation", "proportions")}
    given = overrides.get("data", {})
    if {"resize", "crop"} & set(given):  # sizes of yours replace the encoder's
        own = {name: own[name] for name in ("interpolation", "proportions")}
    return {**overrides, "data": {**own, **given}}


def _with_defence(overrides: Mapping[str, Any], defence: Callable[..., Any] | str) -> dict[str, Any]:
    """The overrides with the name of a defence that is given as an object."""
    changes = nested(overrides)
    given = changes.get("defence", {})
    check(isinstance(given, Mapping) and "name" not in given, "the defence is given: leave its name out of overrides")
    return {**changes, "defence": {**given, "name": defence if isinstance(defence, str) else name_of(defence)}}


def _settings_for(model: Embedder | Trainable | None, data: Dataset, settings: Settings) -> Settings:
    """The settings, checked against the data; a given model replaces the one they describe."""
    check(
        settings.data.held_out == data.held_out,
        f"data.held_out is {settings.data.held_out}, but the data set holds out {data.held_out} classes; "
        "give the number where you load it, ah.dataset(…, held_out=N)",
    )
    if model is None:
        return settings
    described = {name: model.config[name] for name in ("backbone", "dim", "freeze_batchnorm") if name in model.config}
    if isinstance(model, Trainable):
        described |= {"backbone": model.config["module"], "dim": 0}
    return replace(settings, model=replace(settings.model, weights="", **described))


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


def _data_from(data: Any, section: Any) -> Dataset:
    """The data set that `fit` is given, in any form; `section` is what overrides say about data."""
    check(isinstance(section, Mapping), f"overrides: data must be a section of settings, not {section!r}")
    held_out, resize = (section.get(name, 0) for name in ("held_out", "resize"))
    whole = all(isinstance(each, int) and each >= 0 for each in (held_out, resize))
    check(whole, f"data.held_out ({held_out!r}) and data.resize ({resize!r}) must be whole numbers")
    return dataset_from(data, section.get("root"), held_out=held_out, resize=resize)


def _resumed_data(run: Run, settings: Settings, data: Any, root: str | Path | None) -> Dataset:
    """The data of a run: found again by name and root, or given again."""
    wanted = settings.data
    if data is not None:
        return dataset_from(data, held_out=wanted.held_out, resize=wanted.resize)
    if wanted.name in IN_MEMORY:
        raise RunError(f"{run.path} was given its data in memory: give the same again, ah.resume(…, data=…)")
    return dataset(wanted.name, root or wanted.root or None, held_out=wanted.held_out)


def _same_model(run: Run, info: Mapping[str, Any], model: nn.Module) -> Embedder | Trainable:
    """The model that is given again, with what run.json says is around it."""
    config = run.field(info, "model.config", dict)
    if isinstance(model, Embedder) or "module" not in config:
        return trainable(model)
    return rebuilt(model, config)


def _resumed_model(run: Run, info: Mapping[str, Any], settings: Settings, data: Dataset) -> Embedder:
    """A model with the run's structure; the checkpoint will overwrite every weight."""
    config = run.field(info, "model.config", dict)
    if "module" in config:
        preset = config.get("preset")
        name, module = (preset, f"ah.load({preset!r})") if isinstance(preset, str) else ("module:function", "…")
        raise RunError(
            f"{run.path} trains a module of yours, {preset or config['module']}: give it again, as in "
            f"ah.resume({str(run.path)!r}, model={module}) or --model {name}"
        )
    if run.load() is not None:
        return embedder_from(run.field(info, "model.config", dict), run.path / "run.json")
    if run.field(info, "model.given", bool):
        raise RunError(
            f"{run.path} has no checkpoint yet, and you built its model yourself; give the model, or train again"
        )
    return build_model(settings, data)


def _remember(model: Embedder | Trainable, settings: Settings, data: Dataset) -> None:
    """Store preprocessing and training data with the model; audits and indexes use them."""
    model.config["preprocessing"] = record_of(settings.data)
    model.trained_on = TrainedOn.of(data)


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
    return {"config": model.config, "weights": weights, "given": by_hand}


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
            f"the data of {run.path} changed since the run began; restore them, or train again with another --out"
        )
