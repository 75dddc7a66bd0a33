"""Table 1 of 001: how hard the triplets of each sampler are before training."""

import pytest
import torch

from anchorhold.data.batches import pair_batches
from anchorhold.data.datasets import Dataset, dataset
from anchorhold.errors import SettingsError
from anchorhold.layers import settings_from
from anchorhold.random import Key
from anchorhold.report.samplers import sampler_hardness, sampler_table
from anchorhold.settings import Settings
from anchorhold.training import build_model


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return dataset("digits")


def settings(**batch: int | str) -> Settings:
    changes = {"data": {"name": "digits"}, "model": {"dim": 8}, "batch": {"pairs": 100, "mining_pairs": 0, **batch}}
    return settings_from("natural", changes)


def test_hardest_triplets_against_a_plain_loop(digits: Dataset) -> None:
    found = sampler_hardness(digits, settings(), device="cpu")
    plan = pair_batches(digits.train.labels, 100, Key.of(0)("batches", 0))
    whole = [ids for ids in plan if len(ids) == 200]
    assert len(whole) == len(plan) - 1 == len(found["hardest"])  # the short one at the end is left out
    model = build_model(settings(), digits).eval()
    pixels, labels = digits.train.images, digits.train.labels
    assert pixels is not None
    for ids, (mean, variance, near, far) in zip(whole[:2], found["hardest"]):
        images = pixels[ids].permute(0, 3, 1, 2).float() / (255 if pixels.dtype == torch.uint8 else 1)
        with torch.no_grad():
            e = model(images).double()
        values, pairs = [], []
        for place in range(0, len(ids), 2):
            distances = (e[place] - e).norm(dim=1)
            others = distances[labels[ids] != labels[ids[place]]]
            values.append(distances[place + 1] - others.min())
            pairs.append(torch.stack([distances[place + 1], others.min()]))
        h = torch.stack(values)
        assert mean.item() == pytest.approx(h.mean().item(), abs=1e-4)
        assert variance.item() == pytest.approx(h.var(correction=0).item(), abs=1e-4)
        d = torch.stack(pairs)
        for c, sign in ((near, -10), (far, 10)):
            positive, negative = ((sign * d).exp() * d).sum(0) / (sign * d).exp().sum(0)
            assert c.item() == pytest.approx((positive - negative).item(), abs=1e-4)


def test_samplers_come_in_print_order_of_hardness(digits: Dataset) -> None:
    found = sampler_hardness(digits, settings(), batches=3, device="cpu")
    assert list(found) == ["random", "semihard", "softhard", "distance", "hardest"]
    means = {name: rows[:, 0].mean().item() for name, rows in found.items()}
    assert means["random"] < means["softhard"] < means["hardest"] and means["distance"] <= means["hardest"]


def test_more_batches_than_an_epoch_has_are_new_ones(digits: Dataset) -> None:
    epoch = sampler_hardness(digits, settings(pairs=300), device="cpu")["hardest"]
    longer = sampler_hardness(digits, settings(pairs=300), batches=2 * len(epoch), device="cpu")["hardest"]
    assert torch.equal(longer[: len(epoch)], epoch) and len(longer) == 2 * len(epoch)
    assert not torch.isclose(longer[: len(epoch)], longer[len(epoch) :]).any()
    classes = sampler_hardness(digits, settings(kind="classes", classes=5, instances=4), batches=2, device="cpu")
    assert len(classes["random"]) == 2


def test_both_variances_and_c_are_in_the_table() -> None:
    rows = torch.tensor([[0.1, 0.5, -0.2, 0.1], [0.3, 0.8, -0.4, 0.2]], dtype=torch.float64)
    table = sampler_table({"random": rows, "hardest": rows + 1})
    assert table.rows[0] == ("random", *(pytest.approx(value) for value in (0.2, 0.02, 0.65, -0.3, 0.15)))
    assert table.rows[1] == ("hardest", *(pytest.approx(value) for value in (1.2, 0.02, 1.65, 0.7, 1.15)))
    assert sampler_table({"random": rows[:1]}).rows[0][2] is None  # one batch has no variance of means


def test_nonsense_is_refused(digits: Dataset) -> None:
    with pytest.raises(SettingsError, match="batches must not be negative"):
        sampler_hardness(digits, settings(), batches=-1)
    with pytest.raises(SettingsError, match="margin"):
        sampler_hardness(digits, settings(), margin=0)
