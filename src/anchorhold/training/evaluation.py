"""Evaluation during training: signs of collapse, and retrieval on the test split, clean and attacked."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..attacks.recall import Gallery, attack_recall, margin
from ..config.settings import TrainSettings
from ..data.batches import pair_batches
from ..data.images import Images
from ..geometry import distance_matrix, euclidean
from ..metrics import evaluate
from ..model.frozen import embed_all, embed_images, frozen
from ..perturb.ball import Ball
from ..perturb.problem import Problem
from ..perturb.settings import Budget
from ..random import Key
from ..separation import separation
from ..triplets import collapseness, hardness, mine

__all__ = ["evaluate_model", "recall_under_attack", "retrieval", "signs_of_collapse", "summary"]

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


def signs_of_collapse(model: nn.Module, images: Images, key: Key) -> dict[str, float]:
    """Numbers that show a collapse, on clean random triplets of one batch that is the same in every epoch.

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
        "collapseness": collapseness(euclidean(a, p), euclidean(a, n)),
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
    """R@1, R@2 and mAP@R on the test split; with `train.attack_eps` above 0, also R@1 under attack.

    Args:
        model: what embeds the images.
        test: the split, with its images.
        train: size and effort of the attack.
        key: decides which queries are attacked, and where each attack starts.
        precision: the context in which the attack computes.
    """
    found, gallery = retrieval(model, test)
    if train.attack_eps > 0:
        steps = train.attack_steps
        budget = Budget(steps, 2.5 * train.attack_eps / max(steps, 1), start="random", keep="best")
        ball = Ball(train.attack_eps)
        found["r1_attacked"] = recall_under_attack(
            model, test, gallery, ball, budget, key, train.attack_queries, precision()
        )
    return found


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
    """R@1 in percent when each query is perturbed.

    Args:
        model: what embeds the images.
        images: the split, with its images.
        gallery: embeddings and labels, as `retrieval` returns them.
        ball: how far an image may be perturbed.
        budget: steps of the attack.
        key: decides which queries are attacked, and where each attack starts.
        queries: how many queries are attacked, 0 for all.
        precision: the context in which the attack computes.
    """
    asks = images.split.queries
    able = torch.arange(len(images.labels)) if asks is None else asks.nonzero().squeeze(1)
    chosen = able[key("queries").permutation(len(able))[: queries or len(able)]].sort().values
    parts = list(chosen.split(256))

    def survivors(mine: Sequence[Tensor]) -> Tensor:
        kept = []
        for ids, views in zip(mine, images.plain(torch.cat(list(mine)))):
            here = ids.to(views.device)
            # Separate queries are not in the gallery.
            own = here if asks is None else torch.full_like(here, -1)
            labels = images.labels[here]
            problem = Problem(embed, margin(gallery, labels, own), ball, budget, key)
            kept.append(attack_recall(problem, views, labels, own, gallery, here))
        return torch.cat(kept).long()

    with frozen(model) as embed, precision or nullcontext():
        kept = images.ranks.spread(parts, survivors, [len(part) for part in parts])
    return 100 * int(kept.sum()) / len(chosen)


def summary(row: Mapping[str, Any]) -> str:
    """The numbers of an epoch as short text.

    >>> summary({"epoch": 3, "loss": 0.25, "r1": 61.04})
    'epoch 3, loss 0.2500, R@1 61.0'
    """
    known = [text.format(row[name]) for name, text in SUMMARY.items() if row.get(name) is not None]
    return ", ".join([f"epoch {row['epoch']}", *known])
