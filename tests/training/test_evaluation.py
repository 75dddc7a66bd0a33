"""Retrieval under attack: whom a query is compared with."""

from dataclasses import replace

import pytest
import torch

import anchorhold as ah
from anchorhold.console import Silent
from anchorhold.data.images import load_images
from anchorhold.data.settings import DataSettings
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from anchorhold.training.evaluation import recall_under_attack, retrieval


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
