"""Hardness manipulation and natural training, and where the two are the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anchorhold import Embedder
from anchorhold.defences import DEFENCES, Batch, Step
from anchorhold.defences.hardness import HardnessSettings, hardness_manipulation
from anchorhold.defences.natural import NaturalSettings, natural
from anchorhold.errors import SettingsError
from anchorhold.random import Key
from anchorhold.triplets import SAMPLERS, hardness

KEY = Key.of(3)


def make_step(labels: list[int] | None = None, state: dict[str, Tensor] | None = None, **changes: Any) -> Step:
    labels = labels or [0, 0, 1, 1, 2, 2, 0, 0, 3, 3, 1, 1]
    ids = torch.arange(len(labels))
    model = Embedder("small", dim=16, channels=1, size=8, seed=1).double()
    batch = Batch(KEY("images").uniform(ids, (1, 8, 8)), torch.tensor(labels), ids)
    return Step(model, batch, 0, 1, KEY("step"), {} if state is None else state, **changes)


def train(step: Step, losses: Iterator[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of one step."""
    (loss,) = losses
    step.model.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_destination_equal_to_the_source_is_natural_training(sampler: str) -> None:
    step = make_step()
    robust = train(step, hardness_manipulation(step, HardnessSettings(sampler, sampler)))
    plain = train(step, natural(step, NaturalSettings(sampler)))
    assert torch.allclose(robust[0], plain[0], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(robust[1], plain[1]))
    assert any(g.abs().max() > 0 for g in plain[1])


def test_destination_two_is_min_max() -> None:
    """HM[S, 2] climbs H without ever stopping: the plain loop of min-max training gives the same images."""
    step = make_step()
    settings = HardnessSettings("softhard", 2.0, eps=0.1, alpha=0.03, steps=4)
    loss, _ = train(step, hardness_manipulation(step, settings))
    with step.frozen() as embed:
        clean = embed(step.batch.images)
        chosen = step.mine("softhard", clean, 0.2)
        originals = torch.stack([step.batch.images[i] for i in (chosen.anchor, chosen.positive, chosen.negative)])
        moved = originals.clone()
        for _ in range(4):
            moved.requires_grad_(True)
            a, p, n = (embed(view) for view in moved)
            (gradient,) = torch.autograd.grad(hardness(a, p, n).sum(), moved)
            moved = moved.detach() + 0.03 * gradient.sign()
            moved = torch.minimum(torch.maximum(moved, originals - 0.1), originals + 0.1).clamp(0, 1)
        expected = torch.relu(hardness(*(embed(view) for view in moved)) + 0.2).mean()
    assert torch.allclose(loss, expected, atol=1e-12)


@pytest.mark.parametrize("destination", ["lga", "softhard", "hardest", 0.0])
def test_the_perturbation_raises_hardness_to_its_destination(destination: str | float) -> None:
    logged: dict[str, float] = {}
    # After a loss of 0 LGA asks for hardness 0, which the triplets of an untrained net lie around.
    state = {"previous_loss": torch.zeros((), dtype=torch.float64)}
    step = make_step(state=state, log=lambda name, value: logged.update({name: float(value)}))
    train(step, hardness_manipulation(step, HardnessSettings("random", destination, eps=0.2, alpha=0.02, steps=10)))
    assert logged["hardness_after"] > logged["hardness_before"]
    assert 0 < logged["active_first"] <= 1 and logged["active_last"] <= logged["active_first"]
    assert logged["image_steps"] > 0


def test_lga_follows_the_previous_loss_and_two_trainings_do_not_share_it() -> None:
    harder: dict[str, Tensor] = {"previous_loss": torch.tensor(0.0, dtype=torch.float64)}
    gentle: dict[str, Tensor] = {}
    results = []
    for state in (gentle, harder):
        logged: dict[str, float] = {}
        step = make_step(state=state, log=lambda name, value, kept=logged: kept.update({name: float(value)}))
        loss, _ = train(step, hardness_manipulation(step, HardnessSettings(eps=0.3, alpha=0.02, steps=20)))
        results.append(logged["hardness_after"])
        assert state["previous_loss"] == loss
    assert results[1] > results[0]  # a lower loss asks for harder triplets
    assert gentle["previous_loss"] != harder["previous_loss"]


@pytest.mark.parametrize("name", DEFENCES)
def test_a_batch_of_one_class_is_no_reason_to_fail(name: str) -> None:
    step = make_step(labels=[4] * 8)
    loss, gradients = train(step, DEFENCES[name].run(step, DEFENCES[name].settings()))
    assert loss.isfinite() and all(g.isfinite().all() for g in gradients)


def test_source_and_destination_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Semihard falls back to random negatives in this batch, so with one key it would mostly repeat the source."""
    drawn: list[Tensor] = []
    mine = Step.mine

    def spy(step: Step, sampler: str, *rest: Any, **more: Any) -> Any:
        drawn.append((found := mine(step, "random", *rest, **more)).negative)
        return found

    monkeypatch.setattr(Step, "mine", spy)
    step = make_step(labels=[c for c in range(12) for _ in "ab"])
    train(step, hardness_manipulation(step, HardnessSettings("softhard", "semihard", steps=0)))
    assert len(drawn) == 2 and not torch.equal(*drawn)


def test_mining_stays_inside_its_groups() -> None:
    step = make_step(mining_pairs=2)
    with step.frozen() as embed:
        chosen = step.mine("hardest", embed(step.batch.images), 0.2)
    assert torch.equal(chosen.anchor // 4, chosen.negative // 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HardnessSettings("softhrad"), "did you mean softhard"),
        (lambda: HardnessSettings(destination="lgo"), "did you mean lga"),
        (lambda: HardnessSettings(destination=2.5), r"\[-2, 2\]"),
        (lambda: HardnessSettings(steps=-1), "negative"),
        (lambda: HardnessSettings(margin=0.0), "margin"),
        (lambda: NaturalSettings("semihart"), "did you mean semihard"),
        (lambda: NaturalSettings(loss="triplett"), "did you mean triplet"),
        (lambda: NaturalSettings(margin=-0.1), "margin"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_contrastive_training_uses_its_loss() -> None:
    step = make_step()
    loss, _ = train(step, natural(step, NaturalSettings(loss="contrastive", margin=1.0)))
    triplet, _ = train(step, natural(step, NaturalSettings()))
    assert loss > 0 and not torch.allclose(loss, triplet)
