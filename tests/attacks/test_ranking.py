"""Candidate and query attacks: loops, closed forms, whom they aim at, and when they are done."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from anchorhold.attacks.goal import Goal, ProtocolName, Scene, aimed
from anchorhold.attacks.menu import ATTACKS
from anchorhold.attacks.ranking import hinge, top_size
from anchorhold.errors import DataError, SettingsError
from anchorhold.geometry import unit
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests import reference
from tests.analytic import draw
from tests.attacking import attack
from tests.attacks import changed, dial, world

KEY = Key.of(1)
NAMES = ["CA+", "CA-", "QA+", "QA-"]
PROTOCOLS = ["published", "corrected"]
IDS = torch.arange(0, 20, 2)


def several(name: str, count: int) -> dict[str, int]:
    return {"w" if name.startswith("CA") else "m": count}


def distances(rows: Tensor, gallery: Tensor) -> list[list[float]]:
    return [[reference.distance(x, y) for y in gallery.tolist()] for x in rows.tolist()]


# Against loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [True, False])
def test_hinge(raised: bool) -> None:
    reach, shared, lists = draw(4, 2).abs(), draw(4, 7, name="x").abs(), draw(4, 2, 7, name="y").abs()
    for margin in (0.0, 0.3):
        own = [reference.hinge(r, rows, raised, margin) for r, rows in zip(reach.tolist(), lists.tolist())]
        one = [reference.hinge(r, [row, row], raised, margin) for r, row in zip(reach.tolist(), shared.tolist())]
        assert torch.allclose(hinge(reach, lists, raised, margin), torch.tensor(own, dtype=torch.float64))
        assert torch.allclose(hinge(reach, shared, raised, margin), torch.tensor(one, dtype=torch.float64))


@pytest.mark.parametrize(("name", "count", "apart"), [*product(NAMES, [1, 2], [False, True])])
def test_objective_and_measure_equal_the_loops(name: str, count: int, apart: bool) -> None:
    there = world(apart=apart)
    scene, goal = there.scene, ATTACKS[name]("corrected", **several(name, count))
    ids = IDS[: len(there.side(goal.side)) // 2]
    targets = goal.targets(scene, ids, KEY)
    assert targets is not None and targets.shape == (len(ids), count)
    if goal.side == "gallery":
        targets[0, 0] = ids[0]  # itself, once
    else:
        targets[::2, 0] = scene.own[ids[::2]].clamp(min=0)  # itself, often: it is not always the first once it moved
    e = changed(scene.clean(goal.side)[ids])
    value = goal.objective(scene, ids, targets).value(e[:, None], torch.arange(len(ids)))
    losses, standings = [], {True: [], False: []}
    gallery, own = scene.gallery.tolist(), scene.own.tolist()
    for i, moved in enumerate(e.tolist()):
        aims = targets[i].tolist()
        if goal.side == "gallery":
            queries = scene.queries[aims].tolist()
            reach = [reference.distance(q, moved) for q in queries]
            lists = distances(scene.queries[aims], scene.gallery)
        else:
            row = [reference.distance(moved, x) for x in gallery]
            reach, lists = [row[c] for c in aims], [row] * count
        losses.append(reference.hinge(reach, lists, name.endswith("+")))
        for counts_self in (True, False):
            each = [
                reference.candidate_standing(q, moved, gallery, int(ids[i]), own[t], counts_self)
                if goal.side == "gallery"
                else reference.query_standing(lists[0], t, own[int(ids[i])], counts_self)
                for t, q in zip(aims, scene.queries[aims].tolist() if goal.side == "gallery" else aims)
            ]
            standings[counts_self].append(sum(each) / count)
    assert torch.allclose(-value, torch.tensor(losses, dtype=torch.float64), atol=1e-7)  # d(x, x) is 1e-8, not 0
    for protocol in PROTOCOLS:
        measured = ATTACKS[name](protocol, **several(name, count)).measure(scene, ids, targets, e)
        expected = torch.tensor(standings[protocol == "published"], dtype=torch.float64)
        assert torch.allclose(measured[name], expected, atol=1e-12), protocol
    assert standings[True] != standings[False]


def test_the_margin_belongs_to_the_loss_and_to_the_goal() -> None:
    there = world()
    targets = ATTACKS["CA-"]("corrected").targets(there.scene, IDS, KEY)
    e, where = changed(there.scene.gallery[IDS])[:, None], torch.arange(len(IDS))
    plain, wide = (ATTACKS["CA+"]("corrected", margin=beta).objective(there.scene, IDS, targets) for beta in (0.0, 3.0))
    # With a margin beyond every distance no hinge rests, and the loss grows by the margin less its own share.
    assert (wide.value(e, where) < plain.value(e, where) - 1).all()
    antipode = -there.scene.queries[targets][:, :1, :]  # type: ignore[index]
    done = [ATTACKS["CA-"]("corrected", margin=beta).objective(there.scene, IDS, targets).goal for beta in (0.0, 3.0)]
    assert done[0] is not None and done[0](antipode, where).all()
    assert done[1] is not None and not done[1](antipode, where).any()


# Targets ----------------------------------------------------------------------------------------------------


def test_uniform_targets_reach_everybody_and_near_ones_the_top() -> None:
    there = world(300, 5)
    scene, ids = there.scene, torch.arange(300)
    for name in ("CA+", "QA+"):
        drawn = ATTACKS[name]("corrected", **several(name, 9)).targets(scene, ids, KEY)
        assert drawn is not None and len(drawn.unique()) == 300
    near = distances(scene.queries[:30], scene.gallery)
    assert top_size(300) == 3
    for name in ("CA-", "QA-"):
        goal = ATTACKS[name]("corrected", **several(name, 2))
        drawn = goal.targets(scene, ids, KEY)
        assert drawn is not None
        reached: set[int] = set()
        for i in range(30):
            top = reference.ordered(near[i], i)[:3]
            assert set(drawn[i].tolist()) <= set(top)
            reached |= {top.index(t) for t in drawn[i].tolist()}
        assert reached == {0, 1, 2}
        repeated = (drawn[:, 0] == drawn[:, 1]).any()
        assert bool(repeated) == (name == "CA-")  # QA draws without replacement


def test_near_targets_leave_the_candidates_own_query_out() -> None:
    scene = world(apart=True).scene
    ids = torch.arange(len(scene.gallery))
    whose = scene.query_of(ids)
    assert [int(q) for q in whose if q >= 0] != [] and all(scene.own[q] == i for i, q in zip(ids, whose) if q >= 0)
    drawn = ATTACKS["CA-"]("corrected", w=30).targets(scene, ids, KEY)
    assert drawn is not None and not (drawn == whose[:, None]).any()
    for i, row in enumerate(distances(scene.gallery, scene.queries)):
        assert set(drawn[i].tolist()) == set(reference.ordered(row, int(whose[i]))[:2])


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_the_samples_own_whatever_the_batch(name: str) -> None:
    scene, goal = world().scene, ATTACKS[name]("published", **several(name, 2))
    whole = goal.targets(scene, IDS, KEY)
    one = [goal.targets(scene, IDS[i : i + 1], KEY) for i in range(len(IDS))]
    assert whole is not None and torch.equal(whole, torch.cat([t for t in one if t is not None]))
    other = goal.targets(scene, IDS, Key.of(2))
    assert other is not None and not torch.equal(whole, other)


def test_the_top_holds_at_least_two_and_no_more_than_there_are() -> None:
    assert [top_size(n) for n in (3, 199, 200, 5924, 8131, 60502)] == [2, 2, 2, 59, 81, 605]
    scene = Scene.of(draw(2, 4), torch.arange(2))
    for name in ("CA-", "QA-"):
        targets = ATTACKS[name]("corrected").targets(scene, torch.arange(2), KEY)
        assert targets is not None and targets.tolist() == [[1], [0]]
    with pytest.raises(SettingsError, match="lower m"):
        ATTACKS["QA-"]("corrected", m=2).targets(scene, torch.arange(2), KEY)
    with pytest.raises(DataError, match="at least 2 images"):
        ATTACKS["QA-"]("corrected").targets(Scene.of(draw(1, 4), torch.arange(1)), torch.arange(1), KEY)
    with pytest.raises(SettingsError, match="at least 1"):
        ATTACKS["CA+"]("corrected", w=0)


# When it is done --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CA-", "QA+", "QA-"])
def test_done_exactly_where_the_gradient_is_zero(name: str) -> None:
    scene, goal = world().scene, ATTACKS[name]("published")
    ids = torch.arange(40)
    targets = goal.targets(scene, ids, KEY)
    assert targets is not None
    t = scene.queries[targets[:, 0]]
    goal_met = t if name == "QA+" else -t
    # Between the clean embedding and where the goal is met.
    away = torch.linspace(0.1, 1, 40, dtype=torch.float64)[:, None]
    e = torch.nn.functional.normalize((1 - away) * scene.queries + away * goal_met, dim=1)[:, None].requires_grad_()
    objective = goal.objective(scene, ids, targets)
    (gradient,) = torch.autograd.grad(objective.value(e, ids).sum(), e)
    assert objective.goal is not None
    done = objective.goal(e.detach(), ids)
    assert done.any() and not done.all()
    assert torch.equal(done, (gradient == 0).all(2).squeeze(1))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_ever_raises_a_candidate_above_the_query_itself(protocol: str) -> None:
    scene = world().scene
    goal = ATTACKS["CA+"](protocol)
    assert goal.objective(scene, IDS, goal.targets(scene, IDS, KEY)).goal is None


# Closed forms on the circle: the nearer the pixel, the nearer the embedding ---------------------------------


def arrived(goal: Goal, target: int, attacked: int, *angles: float) -> tuple[float, dict[str, Tensor]]:
    there = dial(*angles)
    ids, aim = torch.tensor([attacked]), torch.tensor([[target]])
    found = attack(there.embed, there.images[ids], there.scene, goal, ids, Ball(0.1), Budget(9, 0.02), targets=aim)
    return found.images.item() - angles[attacked], found.measures


def test_candidates_move_to_or_from_the_query_and_are_counted_in_its_list() -> None:
    angles = (0.0, 0.15, 0.25, 0.3, 0.9)  # the query, two in the way, the candidate, one beyond
    moved, measured = arrived(ATTACKS["CA+"]("published"), 0, 3, *angles)
    assert moved == pytest.approx(-0.1)
    assert measured["CA+"].item() == pytest.approx(2 / 5)  # at .2: behind the query itself and .15
    _, measured = arrived(ATTACKS["CA+"]("corrected"), 0, 3, *angles)
    assert measured["CA+"].item() == pytest.approx(1 / 4)  # .15; the list: .15, .25, c', .9
    moved, measured = arrived(ATTACKS["CA-"]("published"), 0, 3, *angles)
    assert moved == pytest.approx(0.1)
    assert measured["CA-"].item() == pytest.approx(4 / 5)  # the query, .15, .25 and the clean c
    _, measured = arrived(ATTACKS["CA-"]("corrected"), 0, 3, *angles)
    assert measured["CA-"].item() == pytest.approx(2 / 4)


def test_queries_move_until_the_candidate_is_first_or_as_far_as_they_may() -> None:
    angles = (0.3, 0.38, 0.9)
    moved, measured = arrived(ATTACKS["QA+"]("corrected"), 1, 0, *angles)
    assert 0.04 <= moved < 0.08  # first as soon as it is nearer than the query's own clean image
    assert measured["QA+"].item() == 0
    moved, measured = arrived(ATTACKS["QA-"]("published"), 1, 0, *angles)
    assert moved == pytest.approx(-0.1)
    assert measured["QA-"].item() == pytest.approx(1 / 3)  # behind the query's own image
    assert arrived(ATTACKS["QA-"]("corrected"), 1, 0, *angles)[1]["QA-"].item() == 0


# Self is left out because of who it is ----------------------------------------------------------------------


def check_self_is_not_counted(goal: Goal) -> None:
    """After a small push the clean self lies nearest and must not push the others down."""
    name, scene = goal.name, dial(0.1, 0.2, 0.5, 0.9).scene
    e = dial(0.13, 0.2, 0.5, 0.9).scene.queries[:1]
    assert goal.measure(scene, torch.tensor([0]), torch.tensor([[1]]), e)[name].item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_self_counted_is_killed(name: str) -> None:
    goal = ATTACKS[name]("corrected")
    check_self_is_not_counted(goal)
    with pytest.raises(AssertionError):
        check_self_is_not_counted(replace(goal, counts_self=True))  # type: ignore[call-arg]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [16, 512])
def test_an_image_ties_with_itself_and_with_its_copies_in_every_batch(
    name: str, protocol: ProtocolName, dim: int
) -> None:
    """In fp32 two ways to compute one distance differ, and rounding must not decide which of two equals is nearer."""
    key, count = Key.of(3), 300
    e = unit(key("points").normal(torch.arange(count), (dim,), torch.float32) + 1)
    e[150::3] = e[:150:3]  # copies
    scene, goal = Scene.of(e, torch.arange(count) % 10), ATTACKS[name](protocol)
    everyone, targets = torch.arange(count), aimed(goal.targets(scene, torch.arange(count), key))

    def measured(batch: int) -> Tensor:
        return torch.cat([goal.measure(scene, ids, targets[ids], e[ids])[name] for ids in everyone.split(batch)])

    whole = measured(count)
    for batch in (7, 64):  # of 300 at most 5 may lie so near to another that rounding decides
        assert float((measured(batch) != whole).double().mean()) < 0.02
    # In float64 a plain count of what is nearer; no copy is nearer than what it is a copy of.
    query, item = (targets[:, 0], everyone) if goal.side == "gallery" else (everyone, targets[:, 0])
    d = torch.cdist(e[query].double(), e.double())
    nearer = (d < d.gather(1, item[:, None]) - 1e-9).double()
    if protocol == "corrected":
        nearer.scatter_(1, query[:, None], 0)
    listed = count - (protocol == "corrected") * (query != item).double()
    assert float((whole - nearer.sum(1) / listed).abs().mean()) < 0.02 / count
