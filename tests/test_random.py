"""Keyed randomness: pure, independent of how it is asked for, and random."""

import pytest
import torch

from anchorhold.random import Key

IDS = torch.arange(20_000)


def test_a_draw_depends_on_nothing_but_its_key_and_id() -> None:
    key = Key.of(3)("crop", 5)
    whole = key.uniform(IDS, (2, 3))
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(whole[order], key.uniform(IDS[order], (2, 3)))
    assert torch.equal(whole[7:9], key.uniform(torch.tensor([7, 8]), (2, 3)))
    torch.manual_seed(1)
    assert torch.equal(whole, Key.of(3)("crop", 5).uniform(IDS, (2, 3)))


def test_known_values_so_that_no_release_changes_a_run() -> None:
    # SplitMix64's own test vector: seed 1234567 gives this first number.
    assert Key(1234567 + 0x9E3779B97F4A7C15).bits(torch.tensor([0])).item() == 6457827717110365317
    assert Key.of(0)("crop", 1).value == 0x7BEEF402415D286E
    # A uniform number is the bits that its type can hold, the highest first: computed with Python's whole numbers.
    key, ids = Key.of(5), torch.arange(64)
    bits = [number % 2**64 for number in key.bits(ids).tolist()]
    assert key.uniform(ids).tolist() == [(number >> 11) / 2**53 for number in bits]
    assert key.uniform(ids, (), torch.float32).tolist() == [(number >> 40) / 2**24 for number in bits]


def test_keys_part_ways() -> None:
    root = Key.of(0)
    keys = [root, root("a"), root("b"), root(0), root(1), root("a", 1), root(1, "a"), Key.of(1)]
    assert len({key.value for key in keys}) == len(keys)
    first, second = root("a").uniform(IDS), root("b").uniform(IDS)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.02


def test_uniform_normal_integers_and_permutation_are_what_they_say() -> None:
    key = Key.of(11)
    u = key.uniform(IDS)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.002
    assert key.uniform(IDS, (), torch.float32).max() < 1
    n = key.normal(IDS)
    assert abs(n.mean()) < 0.03 and abs(n.std() - 1) < 0.02 and n.isfinite().all()
    counts = torch.bincount(key.integers(IDS, 5), minlength=5)
    assert len(counts) == 5 and counts.min() > 3700
    high = torch.arange(1, 6).repeat(4000)
    assert (key.integers(IDS, high) < high).all()
    order = key.permutation(100)
    assert sorted(order.tolist()) == list(range(100)) and order.tolist() != list(range(100))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_on_the_gpu() -> None:
    key = Key.of(5)
    assert torch.equal(key.bits(IDS, (3,)), key.bits(IDS.cuda(), (3,)).cpu())
    assert torch.equal(key.uniform(IDS), key.uniform(IDS.cuda()).cpu())
