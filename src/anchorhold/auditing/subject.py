"""The model and data of an audit, ready to attack: frozen view, clean embeddings, shards."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.goal import Scene
from ..columns import SHARES
from ..console import Report
from ..errors import AnchorholdError, ModelError, lacks_memory
from ..metrics import nmi, score_queries
from ..model.chunked import chunked
from ..model.embedder import Embedder
from ..model.encoders import preset_of
from ..model.frozen import Embed, connected, embed_all, embed_images
from ..model.no_gradients import Function, gives_gradients
from ..model.wrap import Victim, fingerprint_of, hub_of
from ..random import Key
from ..scores import interval, resampled_means, with_width
from ..version import __version__
from .draws import averaged, draws_needed, on_draws, redrawn
from .ensemble import Surrogate
from .inputs import Material, sample
from .outcomes import ColumnValue
from .plan import AuditSettings
from .shards import Shards

__all__ = ["Subject", "clean_columns", "climbed", "subject_of", "surrogate_of", "without_match"]

_CLEAN = {"r1": "R@1", "r2": "R@2", "map": "mAP", "map_r": "mAP@R", "map_10": "mAP@10"}
# Shards are named by attack, protocol and start, so more of each can be added later.
_ADDED = ("protocols", "attacks", "resamples", "seeds", "strength", "epsilons", "classes")

LARGE = 32 * 32  # pixels: smaller images are attacked fast everywhere
FEW_TOGETHER = 16


@dataclass(frozen=True, eq=False)
class Subject:
    """A model and data, with everything that the attacks of an audit share."""

    model: nn.Module
    embed: Embed  # of a random model the mean over its draws
    material: Material
    scene: Scene
    settings: AuditSettings
    attacked: Mapping[str, Tensor]  # ids of the samples, by side
    key: Key
    precision: Callable[[], AbstractContextManager[object]]  # context in which attacks compute
    shards: Shards
    report: Report
    about: Mapping[str, dict[str, Any]]  # "model" and "data" of audit.json
    together: int = 128  # samples in a shard

    def batches(self, ids: Tensor) -> list[Tensor]:
        """The samples in batches, each a shard that a stopped audit keeps."""
        return list(ids.split(self.together))

    @property
    def draws(self) -> int:
        """Of a random model, over which `embed` is the mean; 1 for others."""
        return int(self.about["model"].get("draws", 1))

    def redraw(self, label: str, batch: int = 0) -> None:
        """Before a batch is attacked: a random model draws the same in a resumed audit."""
        if self.draws > 1:
            redrawn(self.key("draws", label), batch)


def subject_of(
    model: nn.Module,
    view: Embed,
    material: Material,
    settings: AuditSettings,
    precision: Callable[[], AbstractContextManager[object]],
    out: str | Path | None,
    report: Report,
    replaces: bool = False,
) -> Subject:
    """Embed both sides, draw the samples, and find existing shards."""
    key = Key.of(settings.seed)("audit")
    answers = chunked(connected(view), settings.batch)
    # Each query of a function may cost.
    embed, draws = climbed(answers, material) if gives_gradients(model) else (answers, 1)
    if draws > 1:
        report.say(on_draws(draws))
        redrawn(key("draws"))
    scene = material.scene(*_embedded(embed, material, settings.batch))
    attacked = {
        "query": sample(material.labels, settings.limit, key("sample")),
        "gallery": sample(material.gallery_labels, settings.limit, key("sample")),
    }
    about = {"model": _described(model, scene), "data": material.describe()}
    if draws > 1:
        about["model"] |= {"draws": draws, "single_answers_r1": _single(answers, material, settings.batch)}
    about["data"]["attacked"] = [len(attacked["query"]), len(attacked["gallery"])]
    shared = {name: value for name, value in asdict(settings).items() if name not in _ADDED}
    made_with = {
        **shared,
        "model": about["model"]["weights"],
        "data": about["data"],
        "device": scene.gallery.device.type,
    }
    made_with["version"] = __version__
    together = _together(material, settings.batch, scene.gallery.device)
    made_with |= {"together": together} if together != settings.batch else {}
    items = max(len(material.labels), len(material.gallery_labels))
    shards = Shards(out, made_with, material.query.ranks, items, replaces)
    return Subject(model, embed, material, scene, settings, attacked, key, precision, shards, report, about, together)


def _together(material: Material, batch: int, device: torch.device) -> int:
    """Samples in a shard. On a CPU a batch of photos takes minutes, without a word and lost if it is stopped."""
    few = next(material.query.plain(torch.arange(1), 1), None)
    slow = device.type == "cpu" and few is not None and few.shape[-1] * few.shape[-2] >= LARGE
    return min(batch, FEW_TOGETHER) if slow else batch


def _single(answers: Embed, material: Material, batch: int) -> float:
    """Clean R@1 in percent where each image is embedded by one answer of a random model."""
    scene = material.scene(*_embedded(answers, material, batch))
    found = score_queries(
        scene.queries, scene.labels, gallery=scene.gallery, gallery_labels=scene.gallery_labels, self_ids=scene.own
    )
    return 100 * float(found["r1"].nanmean())


def climbed(answers: Embed, material: Material) -> tuple[Embed, int]:
    """The model through the mean over its draws if it is random, and how many these are; ranks must agree."""
    few = next(material.gallery.plain(torch.arange(min(16, len(material.gallery_labels))), 16), None)
    try:
        found = 1 if few is None else draws_needed(answers, few)
    except Exception:  # a model that fails is reported where it is used
        return answers, 1
    draws = int(material.query.ranks.agreed({"draws": found})["draws"])
    return (averaged(answers, draws) if draws > 1 else answers), draws


def surrogate_of(model: nn.Module, view: Embed, material: Material, batch: int) -> Surrogate:
    """The second model with its own clean embeddings."""
    embed = chunked(connected(view), batch)
    try:
        scene = material.scene(*_embedded(embed, material, batch))
    except ModelError as error:
        raise ModelError(f"the surrogate cannot be used: {error}") from error
    return Surrogate(embed, scene, fingerprint_of(model))


def _embedded(embed: Embed, material: Material, batch: int) -> tuple[Tensor, Tensor]:
    """Clean embeddings of queries and gallery; a model that fails on the images is an error of one line."""
    for images in material.gallery.plain(torch.arange(1)):
        try:
            embed_all(embed, [images])
        except Exception as error:  # the user's model may raise anything
            if isinstance(error, AnchorholdError) or lacks_memory(error):
                raise
            first = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
            raise ModelError(f"the model fails on images of shape {tuple(images.shape)} ({first})") from error
    gallery = embed_images(embed, material.gallery, batch)
    queries = gallery if material.same else embed_images(embed, material.query, batch)
    for role, e in (("gallery", gallery), ("query", queries)):
        bad = int((~e.isfinite()).any(1).sum())
        if bad:
            raise ModelError(f"{bad} of {len(e)} {role} embeddings are not finite, so nothing can be measured")
    return queries, gallery


def clean_columns(scene: Scene, key: Key, resamples: int) -> tuple[dict[str, ColumnValue], dict[str, Tensor]]:
    """Clean metrics in percent with their intervals, and the rows behind them."""
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
    for name, usual in _CLEAN.items():
        span = interval(100 * drawn[name])
        span = with_width(span, 100 * rows[name]) if usual in SHARES else span
        columns[usual] = ColumnValue(100 * float(rows[name].nanmean()), span.low, span.high)
    columns["NMI"] = ColumnValue(100 * nmi(scene.queries, scene.labels, key("nmi")), None, None)
    return columns, rows


def without_match(scene: Scene) -> int:
    """How many queries have no other image of their class in the gallery."""
    classes, counts = scene.gallery_labels.unique(return_counts=True)
    place = torch.searchsorted(classes, scene.labels).clamp(max=len(classes) - 1)
    found = torch.where(classes[place] == scene.labels, counts[place], 0)
    same = (scene.own >= 0) & (scene.gallery_labels[scene.own.clamp(min=0)] == scene.labels)
    return int((found <= same.long()).sum())


def _described(victim: nn.Module, scene: Scene) -> dict[str, Any]:
    inner = victim.module if isinstance(victim, Victim) else victim
    about = {
        "kind": _kind(inner),
        "parameters": sum(p.numel() for p in victim.parameters()),
        "dim": scene.gallery.shape[1],
        "weights": fingerprint_of(victim),
        **hub_of(victim),
    }
    about |= {"preset": preset} if (preset := preset_of(victim)) else {}
    about |= {} if gives_gradients(victim) else {"gradients": False}
    about |= {"wrap": around} if (around := _around(victim)) else {}
    config = getattr(inner, "config", None)
    return about | ({"config": config} if isinstance(inner, Embedder) else {})


def _around(victim: nn.Module) -> dict[str, list[float]]:
    """Mean, std and size that a wrapper adds, for the command on the page."""
    if not isinstance(victim, Victim):
        return {}
    known = {"mean": victim.mean, "std": victim.std}
    around = {name: [round(x, 7) for x in v.flatten().tolist()] for name, v in known.items() if v is not None}
    return around | ({} if victim.size is None else {"size": [*victim.size]})


def _kind(inner: nn.Module) -> str:
    """The class of a module, or the name of a function."""
    return inner.name if isinstance(inner, Function) else type(inner).__name__
