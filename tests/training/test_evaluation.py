"""Retrieval under attack: whom a query is compared with."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.images import load_images
from anchorhold.data.settings import DataSettings
from anchorhold.errors import SettingsError
from anchorhold.model.frozen import frozen
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from anchorhold.training.evaluation import (
    Way,
    attack_of,
    evaluate_model,
    recall_under_attack,
    retrieval,
    scores_under_attack,
)


@pytest.mark.parametrize("apart", [False, True], ids=["own image in the gallery", "queries apart"])
def test_under_an_attack_that_moves_nothing_recall_is_that_of_retrieval(apart: bool) -> None:
    split = ah.dataset("digits").test
    if apart:
        split = replace(split, queries=torch.arange(len(split)) % 3 == 0)
    images = load_images(split, DataSettings(crop=0, resize=0), torch.device("cpu"), Silent())
    model = ah.Embedder("small", dim=4, channels=1, size=8)
    found, gallery = retrieval(model, images)
    attacked = recall_under_attack(model, images, gallery, Ball(0.0), Budget(1, 0.0), Key.of(3))
    assert attacked == pytest.approx(found["r1"]) and 20 < attacked < 99
    for attack in ("margin", "nearest"):
        still = scores_under_attack(model, images, gallery, Way(Ball(0.0), Budget(1, 0.0), attack), Key.of(3))  # type: ignore[arg-type]
        assert still == pytest.approx({"r1": found["r1"], "map_r": found["map_r"]}, abs=0.01)


@pytest.mark.parametrize("apart", [False, True], ids=["own image in the gallery", "queries apart"])
def test_the_nearest_attack_is_algorithm_1_of_adml(apart: bool) -> None:
    split = ah.dataset("digits").test.keep(torch.arange(896) % 15 == 0)
    if apart:
        split = replace(split, queries=torch.arange(len(split)) % 3 == 0)
    images = load_images(split, DataSettings(crop=0, resize=0), torch.device("cpu"), Silent())
    model = ah.Embedder("small", dim=8, channels=1, size=8, seed=2)
    clean, gallery = retrieval(model, images)
    found = scores_under_attack(model, images, gallery, Way(Ball(0.1), Budget(3, 0.05), "nearest"), Key.of(3))

    (x,) = images.plain()
    asks = range(len(x)) if split.queries is None else split.queries.nonzero().squeeze(1).tolist()
    held = list(range(len(x))) if split.queries is None else (~split.queries).nonzero().squeeze(1).tolist()
    with frozen(model) as embed:
        e = embed(x).detach()
        hits, precisions = [], []
        for i in asks:
            others = [j for j in held if j != i]
            labels = split.labels[others]
            j = others[int(torch.linalg.vector_norm(e[others] - e[i], dim=1).argmin())]
            z = x[i : i + 1].clone()
            if split.labels[j] == split.labels[i]:
                for _ in range(3):
                    goal = torch.linalg.vector_norm(embed(z.requires_grad_(True)) - e[j] + 1e-6)
                    z = z.detach() + 0.05 * torch.autograd.grad(goal, z)[0].sign()
                    z = torch.minimum(torch.maximum(z, x[i] - 0.1), x[i] + 0.1).clamp(0, 1)
            order = torch.linalg.vector_norm(e[others] - embed(z).detach(), dim=1).argsort()
            right = (labels[order] == split.labels[i]).double()
            total = int(right.sum())
            hits.append(float(right[0]))
            precisions.append(float(sum(right[k] * right[: k + 1].mean() for k in range(total)) / total))
    assert found["r1"] == pytest.approx(100 * sum(hits) / len(hits))
    assert found["map_r"] == pytest.approx(100 * sum(precisions) / len(precisions), abs=1e-4)
    assert found["r1"] < clean["r1"] and found["map_r"] < clean["map_r"]


def test_the_settings_choose_the_attack_of_evaluations() -> None:
    train = settings_from("adml", {"train": {"attack_eps": 0.01, "attack_steps": 5, "attack": "nearest"}}).train
    ball, budget, _ = attack_of(train)
    assert (ball.eps, budget.steps, budget.alpha, budget.start, budget.keep) == (0.01, 5, 0.004, "random", "last")
    images = load_images(ah.dataset("digits").test, DataSettings(crop=0, resize=0), torch.device("cpu"), Silent())
    model, found = ah.Embedder("small", dim=4, channels=1, size=8), {}
    for attack in ("margin", "nearest"):
        train = replace(train, attack=attack, attack_eps=0.1, attack_queries=60)  # type: ignore[arg-type]
        found[attack] = evaluate_model(model, images, train, Key.of(1), nullcontext)
        assert found[attack]["r1_attacked"] < found[attack]["r1"]
        assert 0 < found[attack]["map_r_attacked"] < found[attack]["map_r"]
    assert found["margin"] != found["nearest"]
    with pytest.raises(SettingsError, match="did you mean nearest"):
        settings_from("adml", {"train.attack": "neerest"})
