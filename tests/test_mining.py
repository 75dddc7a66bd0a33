"""`ah.mine`: triplets from any embeddings and labels, against brute force."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorhold as ah
from anchorhold.errors import AnchorholdError
from anchorhold.geometry import unit
from anchorhold.random import Key
from anchorhold.triplets import SAMPLERS, mine

LABELS = [4, 1, 4, 9, 1, 4, 7, 1, 1, 7, 2]  # 9 and 2 are alone


def vectors(seed: int = 0, count: int = len(LABELS)) -> Tensor:
    return 3 * Key.of(seed)("vectors").normal(torch.arange(count), (5,))


def eligible(sampler: str, a: int, e: Tensor, labels: list[int], partner: int) -> tuple[set[int], set[int]]:
    """What a sampler may draw for an anchor with this partner, by its definition, in plain loops."""
    e = unit(e)
    d = [float((e[a] - e[i]).norm()) for i in range(len(e))]
    positives = {i for i in range(len(e)) if labels[i] == labels[a] and i != a}
    negatives = {i for i in range(len(e)) if labels[i] != labels[a]}
    if sampler == "semihard":
        semi = {n for n in negatives if d[partner] < d[n] < d[partner] + 0.2}
        return {partner}, semi or negatives
    if sampler == "softhard":
        far = {p for p in positives if d[p] > min(d[n] for n in negatives)}
        near = {n for n in negatives if d[n] < max(d[p] for p in positives)}
        return far or positives, near or negatives
    if sampler == "hardest":
        return {partner}, {min(negatives, key=lambda n: d[n])}
    return {partner}, negatives


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_triplets_are_those_of_the_definition(sampler: str) -> None:
    drawn = set()
    for seed in range(40):
        e = vectors(seed % 4)
        a, p, n = ah.mine(e, torch.tensor(LABELS), sampler, seed=seed)
        assert a.tolist() == [i for i, label in enumerate(LABELS) if LABELS.count(label) > 1]
        for anchor, positive, negative in zip(*(x.tolist() for x in (a, p, n))):
            assert LABELS[anchor] == LABELS[positive] and anchor != positive and LABELS[anchor] != LABELS[negative]
            positives, negatives = eligible(sampler, anchor, e, LABELS, positive)
            assert positive in positives and negative in negatives
            drawn.add((anchor, positive))
    if sampler == "random":  # every positive is drawn at some time
        assert len(drawn) == sum(LABELS.count(label) - 1 for label in LABELS)


def test_the_order_of_the_batch_does_not_matter_to_what_may_be_drawn() -> None:
    e, labels = vectors(), torch.tensor(LABELS)
    order = torch.randperm(len(e), generator=torch.Generator().manual_seed(0))
    first = {(a.item(), n.item()) for a, _, n in zip(*ah.mine(e, labels, "hardest"))}
    second = {(order[a].item(), order[n].item()) for a, _, n in zip(*ah.mine(e[order], labels[order], "hardest"))}
    assert first == second


def test_half_of_each_class_rounded_up() -> None:
    a, _, _ = ah.mine(vectors(), LABELS, anchors="half")
    counts = {label: sum(LABELS[i] == label for i in a.tolist()) for label in set(LABELS)}
    assert counts == {4: 2, 1: 2, 7: 1, 9: 0, 2: 0}


def test_names_are_labels_and_seeds_differ() -> None:
    e, names = vectors(), [f"class {label}" for label in LABELS]
    numbered = ah.mine(e, LABELS, "random", seed=3)
    assert all(torch.equal(x, y) for x, y in zip(numbered, ah.mine(e, names, "random", seed=3)))
    assert any(not torch.equal(x, y) for x, y in zip(numbered, ah.mine(e, LABELS, "random", seed=4)))


@pytest.mark.parametrize("labels", [[1, 1, 1], [1, 2, 3], []])
def test_without_a_positive_or_a_negative_there_are_no_triplets(labels: list[int]) -> None:
    for sampler, anchors in itertools.product(SAMPLERS, ("all", "half")):
        found = ah.mine(vectors(0, len(labels)), labels, sampler, anchors=anchors)  # type: ignore[arg-type]
        assert [len(x) for x in found] == [0, 0, 0]


def test_it_fits_a_loss_of_pytorch_metric_learning() -> None:
    from pytorch_metric_learning.losses import TripletMarginLoss

    e, labels = vectors(), torch.tensor(LABELS)
    indices = ah.mine(e, labels, "softhard")
    found = TripletMarginLoss(margin=0.2)(e, labels, indices)
    d = [
        float(torch.relu((unit(e)[a] - unit(e)[p]).norm() - (unit(e)[a] - unit(e)[n]).norm() + 0.2))
        for a, p, n in zip(*indices)
    ]
    assert float(found) == pytest.approx(sum(d) / max(sum(x > 0 for x in d), 1), abs=1e-6)


def test_a_sampler_of_yours_gets_the_view() -> None:
    def second(view: Any) -> tuple[Tensor, Tensor]:
        d = view.distances.masked_fill(view.same, torch.inf)
        return view.partner, d == d.kthvalue(2, dim=1, keepdim=True).values

    e = unit(vectors())
    a, _, n = ah.mine(e, LABELS, second)
    for anchor, negative in zip(a.tolist(), n.tolist()):
        order = sorted((float((e[anchor] - e[i]).norm()), i) for i in range(len(e)) if LABELS[i] != LABELS[anchor])
        assert order[1][1] == negative


def test_in_pair_order_the_samplers_are_those_of_training() -> None:
    """The hardest negative depends on no draw, and a class of two has one partner."""
    e, labels = vectors(1, 8), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    trained = mine("hardest", e, labels, Key.of(0), anchors="all")
    a, p, n = ah.mine(e, labels, "hardest")
    assert all(torch.equal(x, y) for x, y in zip((a, p, n), (trained.anchor, trained.positive, trained.negative)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sampler": "semihrad"}, "did you mean semihard"),
        ({"labels": [1, 2]}, "11 embeddings and 2 labels"),
        ({"labels": [1, "a", None]}, "all numbers or all names"),
        ({"embeddings": torch.zeros(3)}, "a tensor"),
        ({"anchors": "even"}, "there are: all, half"),
    ],
)
def test_wrong_use_is_one_line(more: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message):
        ah.mine(**{"embeddings": vectors(), "labels": LABELS, **more})
