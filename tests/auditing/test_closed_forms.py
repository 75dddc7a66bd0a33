"""The strong attack on a model whose reachable answers are known exactly, in Linf and L2.

The embedding is a point on a circle, whose angle is linear in the image: s = ⟨w, x⟩. Within ε an attacker reaches every
angle up to r = ε‖w‖₁ (Linf) or ε‖w‖₂ (L2) away, and none beyond. So a query falls if and only if some angle within r
has a nearest item of another class.
"""

import pytest
import torch
from torch import Tensor

from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.auditing.ensemble import Contest, Task
from anchorhold.auditing.members import MEMBERS
from anchorhold.perturb.ball import Ball
from anchorhold.random import Key
from tests.analytic import draw

COUNT, PIXELS = 60, (1, 4, 4)


def world(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w, images, their angles and labels: clusters of one class with others between them."""
    w = 10 * torch.nn.functional.normalize(draw(1, 16, name=f"w{seed}")[0], dim=0)
    angles = 0.8 * torch.tanh(draw(COUNT, name=f"angles{seed}"))
    labels = (angles * 9 + draw(COUNT, name=f"labels{seed}")).round().long() % 3
    images = (0.5 + angles[:, None] * w / 100).reshape(COUNT, *PIXELS).float()
    return w, images, angles, labels


def reachable(angles: Tensor, labels: Tensor, radius: float, at_least: float = 0.0) -> Tensor:
    """(N,) whether an angle within the radius is nearer to another class, by `at_least`, on a fine grid."""
    found = []
    for query in range(COUNT):
        others = torch.arange(COUNT) != query
        asked = angles[query] + torch.linspace(-radius, radius, 4001, dtype=torch.float64)
        away = (asked[:, None] - angles[others]).abs()
        same = labels[others] == labels[query]
        right, wrong = away.masked_fill(~same, 9).amin(1), away.masked_fill(same, 9).amin(1)
        found.append(bool((right - wrong > at_least).any()))
    return torch.tensor(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_query_falls_if_and_only_if_it_can(norm: str, seed: int) -> None:
    w, images, angles, labels = world(seed)

    def embed(x: Tensor) -> Tensor:
        angle = (x.flatten(1) - 0.5) @ w.to(x)
        return torch.stack([angle.cos(), angle.sin()], 1)

    task = Task("recall", goal_named("margin", "corrected"), (), {"margin": "margin"})
    reach = float(w.norm(1) if norm == "linf" else w.norm(2))
    scene, ids = Scene.of(embed(images), labels), torch.arange(COUNT)
    fell = 0
    for radius in (0.004, 0.02, 0.08):
        contest = Contest(task, embed, images, scene, ids, Key.of(seed))
        for member in MEMBERS:
            if member.kind != "transfer":
                contest.enter(member, Ball(radius / reach, norm), None)
        beaten = torch.ones(COUNT, dtype=torch.bool)
        beaten[contest.left()] = False
        can, surely = reachable(angles, labels, radius), reachable(angles, labels, 0.98 * radius, 1e-3)
        assert not (beaten & ~can).any()  # no answer falls that cannot
        assert not (surely & ~beaten).any(), (surely & ~beaten).nonzero()  # each falls that can
        fell += int((beaten & ~reachable(angles, labels, 0.0)).sum())
    assert fell > 20  # the attack has something to do
