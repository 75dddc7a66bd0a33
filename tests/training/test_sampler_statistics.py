"""Table 1 of Zhou & Patel 2022: how hard the triplets of each sampler are before training."""

import json
from pathlib import Path

import pytest
import torch

from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import Settings
from anchorhold.data.batches import pair_batches
from anchorhold.data.datasets import dataset
from anchorhold.data.splits import Dataset
from anchorhold.errors import SettingsError
from anchorhold.random import Key
from anchorhold.training.preparing import build_model
from anchorhold.training.sampler_statistics import BATCHES, sampler_hardness, sampler_settings, sampler_table
from anchorhold.triplets import candidates

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return dataset("digits")


def settings(**batch: int | str) -> Settings:
    changes = {"data": {"name": "digits"}, "model": {"dim": 8}, "batch": {"pairs": 100, "mining_pairs": 0, **batch}}
    return settings_from("natural", changes)


def test_hardest_triplets_against_a_plain_loop(digits: Dataset) -> None:
    found = sampler_hardness(digits, settings(), batches=0, device="cpu")
    plan = pair_batches(digits.train.labels, 100, Key.of(0)("batches", 0))
    whole = [ids for ids in plan if len(ids) == 200]
    assert len(whole) == len(plan) - 1 == len(found["hardest"])  # the short one at the end is left out
    model = build_model(settings(), digits).eval()
    pixels, labels = digits.train.images, digits.train.labels
    assert pixels is not None
    for ids, (mean, variance, near, far, own, easy, both) in zip(whole[:2], found["hardest"]):
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
        assert own == both == 0 and easy.item() == pytest.approx((h < -0.2).double().mean().item(), abs=0.01)
        d = torch.stack(pairs)
        for c, sign in ((near, -10), (far, 10)):
            positive, negative = ((sign * d).exp() * d).sum(0) / (sign * d).exp().sum(0)
            assert c.item() == pytest.approx((positive - negative).item(), abs=1e-4)


def test_softhard_draws_the_anchor_itself_as_often_as_the_size_of_its_set_says(digits: Dataset) -> None:
    """Softhard may draw it where no positive is farther than the nearest negative."""
    small = settings(pairs=3)
    found = sampler_hardness(digits, small, batches=60, device="cpu")["softhard"]
    plan = pair_batches(digits.train.labels, 3, Key.of(0)("batches", 0))
    model, pixels, labels = build_model(small, digits).eval(), digits.train.images, digits.train.labels
    assert pixels is not None
    expected, spread = 0.0, 0.0
    for ids in plan[:60]:
        images = pixels[ids].permute(0, 3, 1, 2).float() / (255 if pixels.dtype == torch.uint8 else 1)
        with torch.no_grad():
            allowed, _ = candidates("softhard", model(images), labels[ids])
        chances = torch.tensor([row[2 * i].item() / row.sum().item() for i, row in enumerate(allowed)])
        expected += chances.mean().item() / 60
        spread += (chances * (1 - chances)).sum().item() / 180**2
    assert expected > 0.05 and abs(found[:, 4].mean().item() - expected) < 4 * spread**0.5
    assert (found[:, 6] <= found[:, 4:6].min(1).values).all()


def test_samplers_come_in_published_order_of_hardness(digits: Dataset) -> None:
    found = sampler_hardness(digits, settings(), batches=3, device="cpu")
    assert list(found) == ["random", "semihard", "softhard", "distance", "hardest"]
    means = {name: rows[:, 0].mean().item() for name, rows in found.items()}
    assert means["random"] < means["softhard"] < means["hardest"] and means["distance"] <= means["hardest"]


def test_more_batches_than_an_epoch_has_are_new_ones(digits: Dataset) -> None:
    epoch = sampler_hardness(digits, settings(pairs=300), batches=0, device="cpu")["hardest"]
    longer = sampler_hardness(digits, settings(pairs=300), batches=2 * len(epoch), device="cpu")["hardest"]
    assert torch.equal(longer[: len(epoch)], epoch) and len(longer) == 2 * len(epoch)
    assert not torch.isclose(longer[: len(epoch), :4], longer[len(epoch) :, :4]).any()
    classes = sampler_hardness(digits, settings(kind="classes", classes=5, instances=4), batches=2, device="cpu")
    assert len(classes["random"]) == 2


@pytest.mark.parametrize("name", ["cub", "digits", "folder"])
def test_unless_told_otherwise_batches_are_the_table_s(name: str) -> None:
    """112 images, mined as one group, as many batches as the table: not the batches of training."""
    data = {"data": {"name": name}}
    b = sampler_settings(data).batch
    assert (b.kind, b.pairs, BATCHES) == ("pairs", 56, 1000) and b.mining_pairs in (0, 56)
    assert sampler_settings({**data, "batch": {"distinct": "true"}}).batch.pairs == 56
    assert sampler_settings({**data, "batch": {"pairs": "112"}}) == settings_from(
        "natural", {**data, "batch": {"pairs": 112}}
    )


@pytest.mark.slow
def test_the_variance_of_batch_means_is_that_of_a_mean(digits: Dataset) -> None:
    """Var of a mean of n independent triplets is Var[H] / n: with twice the pairs it is half of the table's."""
    for pairs in (56, 112):
        chosen = sampler_settings({"data": {"name": "digits"}, "model": {"dim": 8}, "batch": {"pairs": pairs}})
        mean, variance, *_ = sampler_hardness(digits, chosen, batches=100, device="cpu")["random"].T
        assert mean.var().item() == pytest.approx(variance.mean().item() / pairs, rel=0.3)


def test_cub_has_the_table_s_variances_with_its_batches() -> None:
    """Paper: random .00035, semihard .00013, softhard .00122, distance and hardest .00021."""
    table = json.loads((ROOT / "results" / "cub" / "samplers-56.json").read_text())
    assert table["settings"]["batch"]["pairs"] == sampler_settings({"data": {"name": "cub"}}).batch.pairs
    printed = {"random": 0.00035, "semihard": 0.00013, "softhard": 0.00122, "distance": 0.00021, "hardest": 0.00021}
    for row in table["rows"]:
        # 40 batches: the standard error of a variance is √(2/39) of it.
        assert row["variance"] == pytest.approx(printed[row["sampler"]], rel=2 * (2 / 39) ** 0.5)


def test_both_variances_and_c_are_in_the_table() -> None:
    rows = [[0.1, 0.5, -0.2, 0.1, 0.08, 0.2, 0.05], [0.3, 0.8, -0.4, 0.2, 0.1, 0.0, 0.0]]
    rows = torch.tensor(rows, dtype=torch.float64)
    table = sampler_table({"random": rows, "hardest": rows + 1})
    assert table.rows[0] == ("random", *(pytest.approx(value) for value in (0.2, 0.02, 0.65, -0.3, 0.15, 9, 25)))
    assert table.rows[1][:6] == ("hardest", *(pytest.approx(value) for value in (1.2, 0.02, 1.65, 0.7, 1.15)))
    assert sampler_table({"random": rows[1:]}).rows[0][-2:] == (10, None)  # no triplet has H < −γ
    assert sampler_table({"random": rows[:1]}).rows[0][2] is None  # one batch has no variance of means


def test_nonsense_is_refused(digits: Dataset) -> None:
    with pytest.raises(SettingsError, match="batches must be at least 0"):
        sampler_hardness(digits, settings(), batches=-1)
    with pytest.raises(SettingsError, match="margin"):
        sampler_hardness(digits, settings(), margin=0)
