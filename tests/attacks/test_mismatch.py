"""Targeted mismatch."""

import pytest
import torch

from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import ATTACKS
from anchorhold.errors import DataError
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests import reference
from tests.analytic import draw
from tests.attacking import attack
from tests.attacks import changed, dial, world

KEY = Key.of(1)


def test_value_and_measure_equal_the_loops() -> None:
    scene, ids = world(apart=True).scene, torch.arange(0, 40, 3)
    goal = ATTACKS["TMA"]("corrected")
    targets, e = goal.targets(scene, ids, KEY), changed(scene.queries[ids])
    assert targets is not None
    cosines = [1 - reference.cosine(x, scene.gallery[t].tolist()) for x, t in zip(e.tolist(), targets.tolist())]
    expected = torch.tensor(cosines, dtype=torch.float64)
    assert torch.allclose(goal.measure(scene, ids, targets, e)["TMA"], expected)
    value = goal.objective(scene, ids, targets).value(e[:, None], torch.arange(len(ids)))
    assert torch.allclose(value, expected - 1)


def test_targets_are_everybody_else() -> None:
    labels = torch.zeros(5, dtype=torch.long)
    scene = Scene.of(draw(5, 4), labels)
    seen: dict[str, set[tuple[int, int]]] = {}
    for protocol in ("published", "corrected"):
        goal, ids = ATTACKS["TMA"](protocol), torch.arange(5)
        draws = [goal.targets(scene, ids, Key.of(seed)) for seed in range(200)]
        seen[protocol] = {(i, int(t)) for d in draws if d is not None for i, t in enumerate(d.tolist())}
    everything = {(i, t) for i in range(5) for t in range(5)}
    assert seen["published"] == seen["corrected"] == {(i, t) for i, t in everything if i != t}
    stranger = Scene(scene.gallery, labels, scene.queries[:1], labels[:1], torch.tensor([-1]))
    draws = [ATTACKS["TMA"]("corrected").targets(stranger, torch.tensor([0]), Key.of(seed)) for seed in range(100)]
    assert {int(d) for d in draws if d is not None} == set(range(5))
    with pytest.raises(DataError, match="at least 2"):
        ATTACKS["TMA"]("corrected").targets(Scene.of(draw(1, 4), labels[:1]), torch.tensor([0]), KEY)


def test_moves_towards_the_target_on_the_circle() -> None:
    there = dial(0.2, 0.5, 0.9)
    found = attack(
        there.embed,
        there.images,
        there.scene,
        ATTACKS["TMA"]("published"),
        torch.arange(3),
        Ball(0.1),
        Budget(9, 0.02),
        targets=torch.tensor([2, 0, 0]),
    )
    assert torch.allclose(found.images.flatten(), torch.tensor([0.3, 0.4, 0.8], dtype=torch.float64))
    assert found.measures["TMA"].tolist() == pytest.approx([torch.tensor(a).cos().item() for a in (0.6, 0.2, 0.6)])
    assert found.success is None
