"""What `fit` is given, read: data, settings and model, before a run folder exists."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..config.build import to_dict
from ..config.listing import set_by_user
from ..config.recipes import nested, settings_from, usual_recipe
from ..config.settings import Settings
from ..data.adapters import dataset_from
from ..data.beside import with_folders
from ..data.splits import Dataset
from ..defences.own import name_of
from ..defences.settings import Inner, ProxySettings
from ..defences.teacher import teacher_of
from ..errors import check
from ..interface import Placeholder, setting, worded
from ..model.embedder import Embedder
from ..model.encoders import preset_of
from ..model.preprocessing import preprocessing_of
from ..model.trainable import Trainable, trainable
from ..model.weights import NoWeights
from ..model.wrap import fingerprint_of
from ..perturb.settings import Threat, threat_of
from ..pretraining.settings import WITHOUT_LABELS, DistilLogitsSettings
from ..pretraining.soft_labels import with_logits
from .suited import suited

__all__ = [
    "Prepared",
    "against",
    "build_model",
    "completed",
    "data_from",
    "prepared",
    "settings_for",
    "uses_no_labels",
    "widened",
    "with_data",
    "with_preparation",
]


class Prepared(NamedTuple):
    """What `fit` trains by: the data, the settings for them, the model if one was given, and notes for the user."""

    data: Dataset
    settings: Settings
    given: Embedder | Trainable | None
    notes: tuple[str, ...]


def prepared(
    model: nn.Module | None,
    data: Any,
    recipe: str | None,
    settings: Settings | None,
    overrides: Mapping[str, Any] | None,
    defence: Callable[..., Any] | str | None,
    row: str,
) -> Prepared:
    """The arguments of `fit`, read. A small data set of yours gets a smaller batch, unless you set its size."""
    if not isinstance(data, Dataset):
        if settings is not None:
            labels = settings.defence_name not in WITHOUT_LABELS
        else:
            labels = defence is not None or not uses_no_labels(recipe, overrides)
        data = data_from(data, nested(overrides or {}).get("data", {}), labels)
    if defence is not None:
        check(settings is None, "settings name their defence: leave defence out, or give recipe and overrides")
        overrides = _with_defence(overrides or {}, defence)
    note = ""
    if settings is None:
        recipe = usual_recipe(nested(overrides or {}), defence) if recipe is None else recipe
        overrides = with_preparation(with_data(overrides or {}, data), data, model)
        settings = settings_from(recipe, overrides)
        data = widened(data, settings)
        if not row:  # the row of a paper keeps its batch
            settings, note = suited(settings, data.name, data.train, set_by_user(recipe, overrides))
    else:
        data = widened(data, settings)
    given = None if model is None else trainable(model, settings.model.freeze_batchnorm, settings.model.train)
    return Prepared(data, settings_for(given, data, settings), given, (note,) if note else ())


def uses_no_labels(recipe: str | None, overrides: Mapping[str, Any] | None) -> bool:
    """Whether the recipe, with these changes, trains without labels: then loose images will do."""
    changes = nested(overrides or {})
    given = changes.get("defence", {})
    if isinstance(given, Mapping) and "name" in given:
        return given["name"] in WITHOUT_LABELS
    return settings_from(recipe or usual_recipe(changes)).defence_name in WITHOUT_LABELS


def widened(data: Dataset, settings: Settings) -> Dataset:
    """The data with the folders of `data.beside` in the training split; refused where labels are needed."""
    name = str(to_dict(settings)["defence"]["name"])
    free, some = name in WITHOUT_LABELS, " and ".join(WITHOUT_LABELS)
    check(free or not settings.data.beside, f"data.beside has images without labels, for {some}: {name} uses labels")
    check(
        free or data.train.labelled,
        f"{data.root or data.train.root} has no class folders, for {some}: {name} uses labels, so put the images of "
        "each class into a folder of its own",
    )
    return with_folders(data, settings.data.beside)


def with_data(overrides: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """The overrides, completed with the name, root and held-out classes of the data set."""
    known: dict[str, Any] = {"name": data.name, "root": data.root}
    known |= {"held_out": data.held_out} if data.held_out else {}
    known |= {"resize": 0, "crop": 0} if data.as_given else {}
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


def against(threat: Threat | str, settings: Settings) -> Settings:
    """The settings with another threat; a step that it leaves open keeps its share of ε, or crosses an L2 ball."""
    threat, own = threat_of(threat), settings.defence
    check(threat.start != "tiny", "a training starts at the clean image or at random: set start to zero or random")
    still = isinstance(own, ProxySettings) and own.form == "natural" and not own.hardens
    check(
        isinstance(own, Inner) and not still,
        f"{to_dict(settings)['defence']['name']} has no attack inside that takes a threat: leave it out",
    )
    steps = own.steps if threat.steps is None else threat.steps
    share = own.alpha / own.eps if own.eps and own.norm == threat.norm == "linf" else 2.5 / max(steps, 1)
    alpha = threat.eps * share if threat.alpha is None else threat.alpha
    start = own.start if threat.start == "zero" else "random"
    changed = replace(own, eps=threat.eps, norm=threat.norm, steps=steps, alpha=alpha, start=start)
    return replace(settings, defence=changed)


def settings_for(model: Embedder | Trainable | None, data: Dataset, settings: Settings) -> Settings:
    """The settings, checked against the data; a given model replaces the one they describe."""
    check(
        settings.data.held_out == data.held_out,
        f"data.held_out is {settings.data.held_out}, but the data set holds out {data.held_out} classes; "
        + worded("give the number once", "give the number where you load it, ah.dataset(…, held_out=N)"),
    )
    if model is None:
        return settings
    described = {name: model.config[name] for name in ("backbone", "dim", "freeze_batchnorm") if name in model.config}
    if isinstance(model, Trainable):
        described |= {"backbone": model.config["module"], "dim": 0}
    return replace(settings, model=replace(settings.model, weights="", **described))


def completed(settings: Settings, model: nn.Module) -> tuple[Settings, str]:
    """The settings of a new run with what only its models tell, and a note for the user; "" where there is none."""
    if isinstance(settings.defence, ProxySettings) and settings.defence.teacher:
        chosen, mark = settings.defence, fingerprint_of(teacher_of(settings.defence))
        place = str(Path(chosen.teacher).resolve())  # a run may be resumed from another folder
        known = replace(chosen, teacher=place, teacher_hash=mark)
        return replace(settings, defence=known), f"teacher: {chosen.teacher} ({mark})"
    if not isinstance(settings.defence, DistilLogitsSettings):
        return settings, ""
    soft = with_logits(settings.defence, model)
    note = f"soft labels: {soft.logits:,} logits of the classifier in the weights"
    if not soft.logits:
        note = "soft labels: the weights have no classifier, so the softmax is of the pooled features"
    return replace(settings, defence=soft), note


def build_model(settings: Settings, data: Dataset) -> Embedder:
    """The embedder that the settings describe, for the images of `data`."""
    m = settings.model
    sample = data.train.images
    channels = 3 if sample is None else sample.shape[-1]
    side = settings.data.crop or settings.data.resize
    size = (side, side) if side or sample is None else sample.shape[1:3]
    try:
        return Embedder(
            m.backbone,
            m.dim,
            m.weights or None,
            channels=channels,
            size=size,
            freeze_batchnorm=m.freeze_batchnorm,
            seed=settings.train.seed,
        )
    except NoWeights as error:
        file, none = setting("model.weights", Placeholder("FILE")), setting("model.weights", "")
        raise error.instead(file, none) from None


def data_from(data: Any, section: Any, labels: bool = True) -> Dataset:
    """The data set that `fit` is given, in any form; `section` is what overrides say about data."""
    check(isinstance(section, Mapping), f"overrides: data must be a section of settings, not {section!r}")
    given = [section.get(name, 0) for name in ("held_out", "resize")]
    held_out, resize = (int(each) if isinstance(each, str) and each.isdecimal() else each for each in given)
    whole = all(isinstance(each, int) and each >= 0 for each in (held_out, resize))
    check(whole, f"data.held_out ({held_out!r}) and data.resize ({resize!r}) must be whole numbers")
    return dataset_from(data, section.get("root"), held_out=held_out, resize=resize, labels=labels)
