"""Anti-collapse triplets: the pair moves together, the anchor stays."""

from typing import Any

import pytest
import torch

from anchorhold.defences.act import anti_collapse, collapse_pair
from anchorhold.defences.natural import natural
from anchorhold.defences.settings import ActSettings, NaturalSettings
from anchorhold.defences.step import Step
from anchorhold.errors import SettingsError
from anchorhold.geometry import euclidean
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Problem
from anchorhold.perturb.settings import Budget
from tests.analytic import tanh_embedder
from tests.defences.test_hardness import KEY, make_step, train


def test_the_pair_moves_together_and_never_leaves_early() -> None:
    embed, pairs = tanh_embedder(9), KEY("pairs").uniform(torch.arange(6), (2, 1, 3, 3))
    found = ascend(Problem(embed, collapse_pair(), Ball(0.1), Budget(8, 0.02)), pairs)
    before, after = (euclidean(embed(x[:, 0]), embed(x[:, 1])) for x in (pairs, found.images))
    assert (after < before).all() and found.image_steps == 8 * 12


def test_without_steps_it_is_natural_training() -> None:
    step = make_step()
    plain = train(step, natural(step, NaturalSettings("softhard")))
    still = train(step, anti_collapse(step, ActSettings("softhard", steps=0)))
    assert torch.allclose(plain[0], still[0], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(plain[1], still[1]))


def test_the_anchor_stays_clean_and_the_pair_comes_together() -> None:
    step = make_step()
    seen: list[torch.Tensor] = []
    embed = step.embed
    step.embed = lambda images: seen.append(images) or embed(images)  # type: ignore[func-returns-value, method-assign]
    for steps in (6, 0):
        train(step, anti_collapse(step, ActSettings(eps=0.2, alpha=0.05, steps=steps)))
    assert torch.equal(seen[0].unflatten(0, (-1, 3))[:, 0], step.batch.images[0::2])
    moved, clean = (embed(images).unflatten(0, (-1, 3)) for images in seen)
    assert (euclidean(moved[:, 1], moved[:, 2]) < euclidean(clean[:, 1], clean[:, 2])).all()


def test_triplets_are_mined_in_the_window_and_on_clean_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    step, mine, asked = make_step(), Step.mine, []

    def spy(self: Step, sampler: str, embeddings: torch.Tensor, margin: float) -> Any:
        asked.append((sampler, embeddings, margin))
        return mine(self, sampler, embeddings, margin)

    monkeypatch.setattr(Step, "mine", spy)
    train(step, anti_collapse(step, ActSettings("semihard", window=0.7, eps=0.2, alpha=0.05, steps=2)))
    with step.frozen() as embed:
        ((sampler, mined_on, window),) = asked
        assert (sampler, window) == ("semihard", 0.7) and torch.allclose(mined_on, embed(step.batch.images), atol=1e-12)


def test_settings_that_make_no_sense_are_refused() -> None:
    for wrong in ({"sampler": "randon"}, {"margin": -1.0}, {"window": 0.0}, {"eps": -0.1}):
        with pytest.raises(SettingsError):
            ActSettings(**wrong)  # type: ignore[arg-type]
