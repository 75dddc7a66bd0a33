"""SP-QA: against a few lines of its own, in both protocols, and what it keeps that QA does not."""

import math

import pytest
import torch

from anchorhold.attacks.goal import Goal
from anchorhold.attacks.menu import goal_named
from anchorhold.auditing.plan import AuditSettings
from anchorhold.errors import SettingsError
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests import reference
from tests.attacking import attack
from tests.attacks import changed, world

KEY = Key.of(1)
IDS = torch.arange(0, 40, 4)


def made(name: str, protocol: str, **settings: float) -> Goal:
    return goal_named(name, protocol, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("name", ["SPQA+", "SPQA-"])
def test_targets_objective_and_measures_equal_the_loops(name: str, m: int, apart: bool) -> None:
    scene = world(apart=apart).scene
    goal = made(name, "corrected", m=m, kept_items=3, weight=0.7)
    targets = goal.targets(scene, IDS, KEY)
    assert targets is not None and targets.shape == (len(IDS), m + 3)
    e, own = changed(scene.queries[IDS]), scene.own.tolist()
    value = goal.objective(scene, IDS, targets).value(e[:, None], torch.arange(len(IDS)))
    published = made(name, "published", m=m, kept_items=3, rate=2.0)
    grown = published.objective(scene, IDS, targets).value(e[:, None], torch.arange(len(IDS)))
    for i, query in enumerate(IDS.tolist()):
        aims = targets[i].tolist()
        clean = [reference.distance(scene.queries[query].tolist(), x) for x in scene.gallery.tolist()]
        order = [item for item in reference.ordered(clean, own[query]) if name == "SPQA+" or item not in aims[:m]]
        assert aims[m:] == order[:3]
        row = [reference.distance(e[i].tolist(), x) for x in scene.gallery.tolist()]
        gap = reference.hinge([row[c] for c in aims[:m]], [row] * m, name == "SPQA+")
        lost = reference.hinge([row[s] for s in aims[m:]], [row] * 3, True)
        assert -float(value[i]) == pytest.approx(gap + 0.7 * lost, abs=1e-6)
        assert -float(grown[i]) == pytest.approx(gap + math.exp(2.0 * lost) * lost, abs=1e-6)
        for each, counts_self in ((goal, False), (published, True)):
            measured = each.measure(scene, IDS, targets, e)
            for label, part in ((name, aims[:m]), (f"{name}:kept", aims[m:])):
                ranks = [reference.query_standing(row, c, own[query], counts_self) for c in part]
                assert float(measured[label][i]) == pytest.approx(sum(ranks) / len(part))


def test_the_published_weight_has_an_end_and_no_gradient() -> None:
    goal = made("SPQA+", "published", rate=4e4)
    lost = torch.tensor([0.0, 1e-4, 1.0], requires_grad=True)
    balance = goal.balance(lost)  # type: ignore[attr-defined]
    assert balance.tolist() == pytest.approx([1.0, math.exp(4.0), 1e9], rel=1e-4) and not balance.requires_grad


@pytest.mark.parametrize("name", ["QA+", "QA-"])
def test_it_keeps_the_top_where_plain_qa_loses_it(name: str) -> None:
    there = world(120)
    ids = torch.arange(0, 120, 3)
    goal = made(f"SP{name}", "corrected", weight=10.0)
    aims = goal.targets(there.scene, ids, KEY)
    assert aims is not None
    kept = {}
    for each, targets in ((made(name, "corrected"), aims[:, :1]), (goal, aims)):
        done = attack(
            there.embed, there.images[ids], there.scene, each, ids, Ball(0.1), Budget(20, 0.02), KEY, targets=targets
        )
        kept[each.name] = goal.measure(there.scene, ids, aims, done.embeddings)
    clean = goal.measure(there.scene, ids, aims, there.scene.queries[ids])
    plain, careful = kept[name], kept[f"SP{name}"]
    assert careful[f"SP{name}:kept"].mean() < 0.7 * plain[f"SP{name}:kept"].mean()
    gain = (careful[f"SP{name}"] - clean[f"SP{name}"]).mean() * (-1 if name == "QA+" else 1)
    assert gain > 0  # it still moves its candidates, though less


def test_wrong_use_is_one_line() -> None:
    with pytest.raises(SettingsError, match="kept_items must be at least 1"):
        made("SPQA+", "corrected", kept_items=0)
    with pytest.raises(SettingsError, match="lower kept_items"):
        made("SPQA-", "corrected", kept_items=60).targets(world().scene, IDS, KEY)
    with pytest.raises(SettingsError, match="two aims"):
        AuditSettings(attacks=("SPQA+",), strength="strong")
    AuditSettings(attacks=("SPQA+", "ES"), epsilons=(0.1,))  # a curve is of R@1 alone
