"""ES, LTM, GTM, GTT, `nearest` and `margin`: loops, closed forms, and the evaluator's defects as mutants."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anchorhold.attacks import recall as recall_module
from anchorhold.attacks.goal import Goal, Scene
from anchorhold.attacks.menu import ATTACKS
from anchorhold.attacks.run import Attacked
from anchorhold.errors import DataError
from anchorhold.geometry import euclidean
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests import reference
from tests.attacking import attack
from tests.attacks import World, changed, dial, world

KEY = Key.of(1)
PROTOCOLS = ["published", "corrected"]
RECALL = ["ES", "LTM", "GTM", "GTT", "nearest", "margin"]


def rows(e: Tensor, gallery: Tensor) -> list[list[float]]:
    return [[reference.distance(x, y) for y in gallery.tolist()] for x in e.tolist()]


def column(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def run(there: World, goal: Goal, ball: Ball = Ball(0.1), budget: Budget = Budget(9, 0.02), **more: Any) -> Attacked:  # noqa: B008
    return attack(there.embed, there.images, there.scene, goal, torch.arange(len(there.images)), ball, budget, **more)


def right(scene: Scene, ids: Tensor, e: Tensor) -> list[float]:
    """R@1 of each query by loops, self left out by identity."""
    labels, found = scene.gallery_labels.tolist(), []
    for i, row in zip(ids.tolist(), rows(e, scene.gallery)):
        nearest = reference.ordered(row, int(scene.own[i]))[0]
        found.append(float(labels[nearest] == int(scene.labels[i])))
    return found


# Against loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", RECALL)
def test_recall_is_measured_as_by_loops(name: str, protocol: str, apart: bool) -> None:
    scene, ids = world(apart=apart).scene, torch.arange(0, 40, 3)
    goal, e = ATTACKS[name](protocol), changed(scene.queries[ids])
    targets = goal.targets(scene, ids, KEY)
    measured = goal.measure(scene, ids, targets, e, e)
    if name == "GTT":
        assert targets is not None
        lists = rows(e, scene.gallery)
        ranks = [reference.rank(row, int(t), int(scene.own[i])) for row, t, i in zip(lists, targets, ids)]
        assert measured["GTT"].tolist() == [float(r < 4) for r in ranks]
        assert measured["GTT@1"].tolist() == [float(r < 1) for r in ranks]
    else:
        kept = right(scene, ids, e)
        assert measured["ES:R" if name == "ES" else name].tolist() == kept
        assert 0 < sum(kept) < len(kept)
    beaten = goal.success(measured)
    assert goal.kept is not None and beaten is not None and torch.equal(beaten, measured[goal.kept] == 0)


def test_nearest_measures_map_at_r_too() -> None:
    scene, ids = world().scene, torch.arange(0, 40, 3)
    e = changed(scene.queries[ids])
    expected = []
    for i, row in zip(ids.tolist(), rows(e, scene.gallery)):
        relevant = [bool(scene.labels[j] == scene.labels[i]) for j in reference.ordered(row, i)]
        expected.append(reference.average_precision_at_r(relevant, sum(relevant)))
    assert torch.allclose(
        ATTACKS["nearest"]("corrected").measure(scene, ids, None, e)["nearest:mAP@R"], column(expected)
    )


def check_ltm(goal: Goal) -> None:
    """The value is that of the definition, the query's own image being none of its matches."""
    scene, ids = world().scene, torch.arange(0, 40, 3)
    e = changed(scene.queries[ids], 0.1)
    labels = scene.labels.tolist()
    losses = [reference.misrank_loss(row, labels, labels[i], i) for i, row in zip(ids.tolist(), rows(e, scene.gallery))]
    value = goal.objective(scene, ids, None).value(e[:, None], torch.arange(len(ids)))
    assert torch.allclose(-value, column(losses))


def test_ltm_published_keeps_self_among_the_matches() -> None:
    check_ltm(ATTACKS["LTM"]("corrected"))
    scene, ids = world().scene, torch.arange(0, 40, 3)
    e, labels = changed(scene.queries[ids], 0.1), scene.labels.tolist()
    losses = [
        reference.misrank_loss(row, labels, labels[i], -1) for i, row in zip(ids.tolist(), rows(e, scene.gallery))
    ]
    objective = ATTACKS["LTM"]("published").objective(scene, ids, None)
    assert torch.allclose(-objective.value(e[:, None], torch.arange(len(ids))), column(losses))
    assert objective.goal is None


def test_ltm_has_nothing_to_do_without_matches_or_without_others() -> None:
    e = world().scene.queries[:3]
    for labels in (torch.arange(3), torch.zeros(3, dtype=torch.long)):
        scene, ids = Scene.of(e, labels), torch.arange(3)
        objective = ATTACKS["LTM"]("corrected").objective(scene, ids, None)
        x = changed(e)[:, None].requires_grad_()
        value = objective.value(x, ids)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        assert value.eq(0).all() and gradient.eq(0).all()
        assert objective.goal is not None and objective.goal(x.detach(), ids).all()


def check_gtm(goal: Goal) -> None:
    """The target is the nearest item whose label is not the query's own."""
    scene, ids = world().scene, torch.arange(40)
    labels = scene.labels.tolist()
    lists = rows(scene.queries, scene.gallery)
    expected = [reference.nearest_other(lists[i], labels, labels[i]) for i in range(40)]
    targets = goal.targets(scene, ids, KEY)
    assert targets is not None and targets.tolist() == expected


def test_gtm_targets() -> None:
    check_gtm(ATTACKS["GTM"]("corrected"))
    scene, ids = world().scene, torch.arange(40)
    targets = ATTACKS["GTM"]("published").targets(scene, ids, KEY)
    labels, lists = scene.labels.tolist(), rows(scene.queries, scene.gallery)
    assert targets is not None and targets.tolist() == [reference.as_coded(lists[i], labels, i) for i in range(40)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_with_one_class_only_gtm_aims_at_nobody_and_leaves_everything(protocol: str) -> None:
    there = dial(0.1, 0.4, 0.9, labels=[2, 2, 2])
    found = run(there, ATTACKS["GTM"](protocol))
    assert found.targets is not None and found.targets.tolist() == [-1, -1, -1]
    assert torch.equal(found.images, there.images) and found.image_steps == 0
    assert found.measures["GTM"].tolist() == [1, 1, 1]


# Closed forms on the circle ---------------------------------------------------------------------------------


def test_gtm_goes_to_the_nearest_stranger() -> None:
    there = dial(0.3, 0.35, 0.5, 0.95, labels=[0, 0, 1, 2])
    found = run(there, ATTACKS["GTM"]("corrected"))
    assert found.images.flatten().tolist() == pytest.approx([0.4, 0.45, 0.4, 0.85])
    # At .4 the own class (.35) is nearest still, at .45 it is not; the last two have no others of their class.
    assert found.measures["GTM"].tolist() == [1, 0, 0, 0]
    assert found.success is not None and found.success.tolist() == [False, True, True, True]


def test_gtt_leaves_the_neighbour_on_the_other_side() -> None:
    there = dial(0.5, 0.54, 0.45, 0.42, 0.41, 0.38)
    found = run(there, ATTACKS["GTT"]("corrected"))
    assert found.targets is not None and found.targets[0] == 1
    assert 0.43 < found.images[0].item() < 0.47  # from where .54 is the last, no nearer than .38
    assert found.measures["GTT"][0] == 0 and found.measures["GTT@1"][0] == 0


def test_nearest_pushes_from_the_neighbour_and_leaves_those_already_wrong() -> None:
    there = dial(0.3, 0.35, 0.5, 0.95, labels=[0, 0, 1, 1])
    for budget in (Budget(9, 0.02), Budget(9, 0.02, start="random"), Budget(1, 0.1)):
        found = run(there, ATTACKS["nearest"]("corrected"), budget=budget, key=KEY)
        assert found.targets is not None and found.targets.tolist() == [1, 0, -1, 3 - 1]
        assert found.images.flatten().tolist() == pytest.approx([0.2, 0.45, 0.5, 1.0])
        assert found.measures["nearest"].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("name", ["nearest", "margin"])
def test_attacks_on_recall_do_damage(name: str) -> None:
    there = world()
    before = column(right(there.scene, torch.arange(40), there.scene.queries))
    found = run(there, ATTACKS[name]("corrected"), Ball(0.15), Budget(15, 0.02))
    assert before.mean() >= 0.7 and found.measures[name].mean() <= 0.4
    assert torch.equal(found.measures[name], column(right(there.scene, torch.arange(40), there.embed(found.images))))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_es_moves_away_though_it_starts_stationary(protocol: str) -> None:
    there = dial(0.2, 0.5, 0.8)
    found = run(there, ATTACKS["ES"](protocol))
    moved = (found.images - there.images).abs().flatten()
    assert moved.tolist() == pytest.approx([0.1] * 3)
    chord = 2 * torch.tensor(0.05).sin().item()  # nine steps of .02 arrive well before the last
    assert found.measures["ES:D"].tolist() == pytest.approx([chord] * 3, abs=1e-5)


def test_es_opens_by_itself_only_where_the_budget_does_not_say_how() -> None:
    goal = ATTACKS["ES"]("corrected")
    assert [goal.prepare(Budget(start=start)).start for start in ("zero", "random")] == ["tiny", "random"]


def test_es_published_is_the_shift_before_the_last_step() -> None:
    there = world()
    short = {steps: run(there, ATTACKS["ES"]("published"), budget=Budget(steps, 0.02)) for steps in (2, 3)}
    clean = there.scene.queries
    early = euclidean(there.embed(short[2].images), clean)
    assert torch.allclose(short[3].measures["ES:D"], early) and not torch.allclose(short[2].measures["ES:D"], early)
    with pytest.raises(DataError, match="before the last step"):
        ATTACKS["ES"]("published").measure(there.scene, torch.arange(40), None, clean)


def test_es_published_opens_along_the_sum_of_coordinates() -> None:
    there = world()
    found = run(there, ATTACKS["ES"]("published"), budget=Budget(1, 0.02))
    x = there.images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(there.embed(x).sum(), x)
    assert torch.allclose(found.images, (there.images + 0.02 * gradient.sign()).clamp(0, 1))
    seeds = [run(there, ATTACKS["ES"]("corrected"), budget=Budget(1, 0.02), key=Key.of(s)).images for s in (0, 1)]
    assert not torch.equal(*seeds)


# The evaluator's defects as mutants of the corrected path ---------------------------------------------------


def check_es(goal: Goal) -> None:
    """ES:D is how far the images that are handed back lie from the clean ones."""
    there = world()
    found = run(there, goal, budget=Budget(3, 0.02))
    assert torch.allclose(found.measures["ES:D"], euclidean(there.embed(found.images), there.scene.queries))


def check_identity(goal: Goal) -> None:
    """A stranger that looks exactly like the query, and comes before it, is a wrong nearest neighbour."""
    scene = dial(0.3, 0.3, 0.8, labels=[1, 0, 1]).scene
    query = torch.tensor([1])
    measured = goal.measure(scene, query, None, scene.queries[query], scene.queries[query])
    assert goal.kept is not None and measured[goal.kept].item() == 0


def inside_the_subset(scene: Scene, ids: Tensor) -> Tensor:
    return recall_module.subset_index(scene, ids, scene.labels[ids], matching=False)


@pytest.mark.parametrize(
    ("name", "check", "mutant"),
    [
        ("GTM", check_gtm, {"as_coded": True}),
        ("LTM", check_ltm, {"keeps_self": True}),
        ("ES", check_es, {"one_step_early": True}),
        ("ES", check_identity, {"by_position": True}),
        ("LTM", check_identity, {"by_position": True}),
        ("GTM", check_identity, {"by_position": True}),
    ],
)
def test_defects_are_killed(name: str, check: Callable[[Goal], None], mutant: dict[str, bool]) -> None:
    goal = ATTACKS[name]("corrected")
    check(goal)
    with pytest.raises(AssertionError):
        check(replace(goal, **mutant))  # type: ignore[arg-type]


def test_the_index_inside_the_masked_subset_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_module, "nearest_other", inside_the_subset)
    with pytest.raises(AssertionError):
        check_gtm(ATTACKS["GTM"]("corrected"))


def test_the_published_path_has_the_defects() -> None:
    for name, check in (("GTM", check_gtm), ("LTM", check_ltm), ("ES", check_es), ("GTM", check_identity)):
        with pytest.raises(AssertionError):
            check(ATTACKS[name]("published"))
