"""Evaluation during training: signs of collapse, and retrieval on the test split, clean and attacked."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attacks.goal import Scene
from ..attacks.recall import Gallery, NearestAttack, attacked_queries, first_is_right, margin
from ..config.settings import AttackName, Settings, TrainSettings
from ..data.batches import pair_batches
from ..data.images import Images
from ..geometry import distance_matrix, euclidean
from ..metrics import evaluate, score_queries
from ..model.frozen import Embed, embed_all, embed_images, frozen
from ..perturb.ball import Ball
from ..perturb.problem import Problem
from ..perturb.settings import Budget, threat_of
from ..random import Key
from ..separation import separation
from ..triplets import collapseness, hardness, mine

__all__ = [
    "Way",
    "attack_of",
    "attention_of",
    "evaluate_model",
    "recall_under_attack",
    "retrieval",
    "scores_under_attack",
    "signs_of_collapse",
    "summary",
]

USUAL_ATTENTION = 10.0
ATTENTION = {"cars": 9.5, "sop": 2.0}  # Tian et al. 2024, table 5

SUMMARY = {  # the numbers of an epoch that the progress bar shows
    "loss": "loss {:.4f}",
    "r1": "R@1 {:.1f}",
    "r1_attacked": "attacked {:.1f}",
    "accuracy": "accuracy {:.1f}",
    "accuracy_attacked": "attacked {:.1f}",
    "drift": "drift {:.3f}",
    "drift_attacked": "attacked {:.3f}",
    "kl": "KL {:.3f}",
    "kl_attacked": "attacked {:.3f}",
    "features_r1": "R@1 of features {:.1f}",
    "features_r1_attacked": "attacked {:.1f}",
    "separability": "sep. {:.2f}",
}


def attention_of(settings: Settings) -> float:
    """λ of the collapseness that a run logs: the defence's, else that of Tian et al. 2024 for the data set."""
    usual = ATTENTION.get(settings.data.name, USUAL_ATTENTION)
    return float(getattr(settings.defence, "attention", usual))


def signs_of_collapse(
    model: nn.Module, images: Images, key: Key, attention: float = USUAL_ATTENTION
) -> dict[str, float]:
    """Numbers that show a collapse, on clean random triplets of one batch that is the same in every epoch.

    `attention` is λ of the collapseness.

    Returns:
        `separability`: (mean d(a,n) − mean d(a,p)) / d̄ (Tian et al. 2024, 4.4). Near 0, the model has collapsed.
        `mean_distance`: d̄, the mean distance over all pairs of the batch. Near 0, the model has collapsed.
        `hardness` and `hardness_variance`: mean and variance of d(a,p) − d(a,n).
        `collapseness`: C of the triplets (Tian et al. 2024, eq. 5).
        `mean_cosine`: of clean pairs, which ICS raises.
        `intra_distance` and `inter_distance`: mean distances within and between classes. The distance
        of an image to itself does not count.
        `separability_high` and `mean_distance_high`: upper ends of one-sided 95 % intervals, over all pairs of
        different images. With few images they stay high.
        `beyond_chance`: (R@1 − chance) / (1 − chance) among the same images.
    """
    (ids, *_) = pair_batches(images.split.labels, 256, key)
    with frozen(model) as embed:
        e = embed_all(embed, images.plain(ids))
    chosen = mine("random", e, images.labels[ids.to(e.device)], key)
    a, p, n = e[chosen.anchor], e[chosen.positive], e[chosen.negative]
    h, pairs = hardness(a, p, n), len(e) * (len(e) - 1)
    distances, labels, ids = distance_matrix(e, e), images.labels[ids.to(e.device)], ids.to(e.device)
    mean, same, itself = distances.sum() / pairs, labels[:, None] == labels, ids[:, None] == ids
    signs = {
        "separability": -h.mean() / mean.clamp(min=1e-12),
        "mean_distance": mean,
        "hardness": h.mean(),
        "hardness_variance": h.var(correction=0),
        "collapseness": collapseness(euclidean(a, p), euclidean(a, n), attention),
        "mean_cosine": (e.sum(0).square().sum() - e.square().sum()) / pairs,
    }
    some = _first_of_each(ids)
    here, own = (e[some], labels[some]), torch.arange(len(some), device=e.device)
    apart = separation(*here, *here, own, key("separation"))
    ends = {"separability_high": apart.separability.high, "mean_distance_high": apart.distance.high}
    for name, value in (ends | {"beyond_chance": apart.skill.value}).items():
        if math.isfinite(value):  # undefined for a single class
            signs[name] = mean.new_tensor(value)
    for name, pick in (("intra_distance", same & ~itself), ("inter_distance", ~same)):
        if pick.any():  # classes may have one image each
            signs[name] = distances[pick].mean()
    return {name: sign.item() for name, sign in signs.items()}


def _first_of_each(ids: Tensor) -> Tensor:
    """The first position of each image in a batch: an image that was drawn twice counts once."""
    known, whose = ids.unique(return_inverse=True)
    places = torch.arange(len(ids), device=ids.device)
    return torch.full_like(known, len(ids)).scatter_reduce_(0, whose, places, "amin")


def evaluate_model(
    model: nn.Module,
    test: Images,
    train: TrainSettings,
    key: Key,
    precision: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """R@1, R@2 and mAP@R on the test split; with `train.attack_eps` above 0, also R@1 and mAP@R under attack.

    Args:
        model: what embeds the images.
        test: the split, with its images.
        train: kind, size and effort of the attack.
        key: decides which queries are attacked, and where each attack starts.
        precision: the context in which the attack computes.
    """
    found, gallery = retrieval(model, test)
    if train.attack_eps > 0:
        scores = scores_under_attack(model, test, gallery, attack_of(train), key, train.attack_queries, precision())
        found |= {f"{name}_attacked": value for name, value in scores.items()}
    return found


class Way(NamedTuple):
    """The attack of an evaluation: how far and with which steps.

    Its name is margin, the most direct attack on R@1, or nearest, algorithm 1 of ADML.
    """

    ball: Ball
    budget: Budget
    name: AttackName = "margin"


def attack_of(train: TrainSettings) -> Way:
    """The attack that the settings choose. ADML's has steps of 2ε/steps and keeps its last iterate."""
    eps, steps = train.attack_eps, train.attack_steps
    if train.attack == "nearest":
        threat = threat_of("adml", eps=eps, steps=steps)
        return Way(threat.ball, threat.budget, "nearest")
    return Way(Ball(eps), Budget(steps, 2.5 * eps / max(steps, 1), start="random", keep="best"))


def retrieval(model: nn.Module, images: Images) -> tuple[dict[str, float], Gallery]:
    """R@1, R@2 and mAP@R of a split in percent, and the embeddings of its gallery."""
    with frozen(model) as embed:
        gallery = Gallery(embed_images(embed, images), images.labels)
    asked = ("R@1", "R@2", "mAP@R")
    asks = images.split.queries
    if asks is None:
        metrics = evaluate(gallery.embeddings, gallery.labels, metrics=asked)
    else:
        asks = asks.to(images.labels.device)
        queries, gallery = (Gallery(gallery.embeddings[side], gallery.labels[side]) for side in (asks, ~asks))
        metrics = evaluate(
            queries.embeddings,
            queries.labels,
            gallery=gallery.embeddings,
            gallery_labels=gallery.labels,
            metrics=asked,
        )
    return {"r1": 100 * metrics.r1, "r2": 100 * metrics.r2, "map_r": 100 * metrics.map_r}, gallery


def recall_under_attack(
    model: nn.Module,
    images: Images,
    gallery: Gallery,
    ball: Ball,
    budget: Budget,
    key: Key,
    queries: int = 0,
    precision: AbstractContextManager[object] | None = None,
) -> float:
    """R@1 in percent when each query is perturbed by the margin attack; arguments as in `scores_under_attack`."""
    return scores_under_attack(model, images, gallery, Way(ball, budget), key, queries, precision)["r1"]


def scores_under_attack(
    model: nn.Module,
    images: Images,
    gallery: Gallery,
    way: Way,
    key: Key,
    queries: int = 0,
    precision: AbstractContextManager[object] | None = None,
) -> dict[str, float]:
    """`r1` and `map_r` in percent when each query is perturbed.

    Args:
        model: what embeds the images.
        images: the split, with its images.
        gallery: embeddings and labels, as `retrieval` returns them.
        way: the attack.
        key: decides which queries are attacked, and where each attack starts.
        queries: how many queries are attacked, 0 for all.
        precision: the context in which the attack computes.
    """
    asks = images.split.queries
    able = torch.arange(len(images.labels)) if asks is None else asks.nonzero().squeeze(1)
    chosen = able[key("queries").permutation(len(able))[: queries or len(able)]].sort().values
    parts = list(chosen.split(256))
    perturb = _past_the_margin if way.name == "margin" else _from_the_nearest

    def scores(mine: Sequence[Tensor]) -> Tensor:
        rows = []
        for ids, views in zip(mine, images.plain(torch.cat(list(mine)))):
            here = ids.to(views.device)
            # Separate queries are not in the gallery.
            own = here if asks is None else torch.full_like(here, -1)
            labels = images.labels[here]
            e = perturb(Attempt(embed, gallery, way.ball, way.budget, key), views, labels, own, here)
            rows.append(_scored(e, gallery, labels, own))
        return torch.cat(rows)

    with frozen(model) as embed, precision or nullcontext():
        kept = images.ranks.spread(parts, scores, [len(part) for part in parts])
    right, precise = kept.unbind(1)
    return {"r1": 100 * int(right.sum()) / len(chosen), "map_r": 100 * float(precise.nanmean())}


class Attempt(NamedTuple):
    """What the attacks of an evaluation share."""

    embed: Embed
    gallery: Gallery
    ball: Ball
    budget: Budget
    key: Key


def _past_the_margin(to: Attempt, views: Tensor, labels: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """Embeddings (N, D) of the queries after the attack that climbs `margin`."""
    problem = Problem(to.embed, margin(to.gallery, labels, own), to.ball, to.budget, to.key)
    return attacked_queries(problem, views, ids)


def _from_the_nearest(to: Attempt, views: Tensor, labels: Tensor, own: Tensor, ids: Tensor) -> Tensor:
    """Embeddings (N, D) of the queries after algorithm 1 of ADML, by which those that are wrong already stay clean."""
    clean, goal = embed_all(to.embed, [views]), NearestAttack()
    scene = Scene(to.gallery.embeddings, to.gallery.labels, clean, labels, own)
    every = torch.arange(len(views), device=views.device)
    targets = goal.targets(scene, every, to.key)
    rows = every[targets >= 0]
    if len(rows):
        problem = Problem(to.embed, goal.objective(scene, rows, targets[rows]), to.ball, to.budget, to.key)
        clean[rows] = attacked_queries(problem, views[rows], ids[rows])
    return clean


def _scored(e: Tensor, gallery: Gallery, labels: Tensor, own: Tensor) -> Tensor:
    """(N, 2) whether the nearest neighbour of each query is right, and its average precision at R."""
    right = first_is_right(e, gallery, labels, own)
    more = score_queries(
        e, labels, gallery=gallery.embeddings, gallery_labels=gallery.labels, self_ids=own, metrics=("mAP@R",)
    )
    return torch.stack([right.double(), more["map_r"]], dim=1)


def summary(row: Mapping[str, Any]) -> str:
    """The numbers of an epoch as short text.

    >>> summary({"epoch": 3, "loss": 0.25, "r1": 61.04})
    'epoch 3, loss 0.2500, R@1 61.0'
    """
    known = [text.format(row[name]) for name, text in SUMMARY.items() if row.get(name) is not None]
    return ", ".join([f"epoch {row['epoch']}", *known])
