from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anchorhold.data.batches import class_batches, image_batches, pair_batches
from anchorhold.errors import DataError, SettingsError
from anchorhold.random import Key

# Classes of unlike sizes, out of order, with gaps between the labels.
LABELS = torch.tensor([7] * 1 + [3] * 12 + [40] * 5 + [8] * 30)[Key.of(9).permutation(48)]


def pairs(labels: Tensor, key: Key) -> list[Tensor]:
    return pair_batches(labels, 5, key)


def groups(labels: Tensor, key: Key) -> list[Tensor]:
    return class_batches(labels, 3, 4, key)


def test_every_image_is_an_anchor_once_with_a_partner_of_its_class() -> None:
    batches = pairs(LABELS, Key.of(0))
    assert [len(batch) for batch in batches] == [10] * 9 + [6]
    assert all(batch.dtype == torch.int64 for batch in batches)
    anchor, partner = torch.cat(batches).reshape(-1, 2).T
    assert anchor.sort().values.tolist() == list(range(48))
    assert anchor.tolist() != list(range(48))
    assert torch.equal(LABELS[anchor], LABELS[partner])


@pytest.mark.medium
@pytest.mark.parametrize("distinct", [False, True])
def test_partners_are_uniform_over_the_class_itself_included_unless_distinct(distinct: bool) -> None:
    labels, epochs = torch.tensor([0, 1, 0, 0, 1, 0, 2]), 4000
    met = torch.zeros(7, 7)
    for epoch in range(epochs):
        batches = pair_batches(labels, 4, Key.of(5)("pairs", epoch), distinct=distinct)
        anchor, partner = torch.cat(batches).reshape(-1, 2).T
        met[anchor, partner] += 1
    same = labels[:, None] == labels
    if distinct:
        same &= ~torch.eye(7, dtype=torch.bool)
        same[6, 6] = True  # it is alone in its class
    wanted = same / same.sum(1, keepdim=True) * epochs
    assert (met[~same] == 0).all()
    assert ((met - wanted).abs() < 4.5 * wanted.sqrt())[same].all()


@pytest.mark.medium
def test_the_order_is_shuffled_evenly() -> None:
    first = [int(pair_batches(torch.zeros(8), 2, Key.of(e))[0][0]) for e in range(4000)]
    counts = torch.bincount(torch.tensor(first), minlength=8)
    assert ((counts - 500).abs() < 4.5 * 500**0.5).all()


@pytest.mark.parametrize("make", [pairs, groups])
def test_an_epoch_depends_on_its_key_alone(make: Callable[[Tensor, Key], list[Tensor]]) -> None:
    torch.manual_seed(1)
    one = torch.cat(make(LABELS, Key.of(0)("epoch", 1)))
    torch.manual_seed(2)
    assert torch.equal(one, torch.cat(make(LABELS, Key.of(0)("epoch", 1))))
    assert not torch.equal(one, torch.cat(make(LABELS, Key.of(0)("epoch", 2))))
    if torch.cuda.is_available():
        assert torch.equal(one, torch.cat(make(LABELS.cuda(), Key.of(0)("epoch", 1))).cpu())


def test_the_batch_size_does_not_change_who_meets_whom() -> None:
    small, large = (torch.cat(pair_batches(LABELS, size, Key.of(3))) for size in (2, 17))
    assert torch.equal(small, large)


def test_class_batches_are_distinct_classes_of_distinct_images() -> None:
    sizes = torch.bincount(LABELS)
    for epoch in range(50):
        batches = groups(LABELS, Key.of(epoch))
        assert len(batches) == 4
        for batch in batches:
            labels = LABELS[batch].reshape(3, 4)
            assert (labels == labels[:, :1]).all()
            assert len(set(labels[:, 0].tolist())) == 3
            for row, label in zip(batch.reshape(3, 4), labels[:, 0].tolist()):
                assert len(set(row.tolist())) == min(4, int(sizes[label]))


def test_short_classes_repeat_evenly() -> None:
    (batch,) = class_batches(torch.tensor([0, 0, 0, 1]), 2, 7, Key.of(0))
    times = torch.bincount(batch, minlength=4)
    assert sorted(times[:3].tolist()) == [2, 2, 3]
    assert times[3] == 7


@pytest.mark.slow
def test_class_batches_draw_classes_and_images_uniformly() -> None:
    labels = torch.tensor([0] * 3 + [1] * 6 + [2] * 4 + [3] * 3)
    batches = [b for e in range(3000) for b in class_batches(labels, 2, 2, Key.of(e))]
    assert len(batches) == 12000
    times = torch.bincount(torch.cat(batches), minlength=16)
    # A class is in half of the batches, and an image of it in 2 of n of those.
    wanted = torch.tensor([12000 / n for n in (3, 6, 4, 3) for _ in range(n)])
    assert ((times - wanted).abs() < 4.5 * wanted.sqrt()).all()


def test_even_instances_make_pair_batches() -> None:
    for batch in class_batches(LABELS, 4, 2, Key.of(0)):
        assert torch.equal(LABELS[batch[0::2]], LABELS[batch[1::2]])


def test_a_set_smaller_than_a_batch_still_gives_one() -> None:
    assert len(class_batches(torch.tensor([0, 1]), 2, 9, Key.of(0))) == 1
    assert [len(batch) for batch in pair_batches(torch.tensor([0, 1]), 9, Key.of(0))] == [4]


def test_batches_that_cannot_be() -> None:
    with pytest.raises(SettingsError, match="has 4 classes, too few for batches of 5"):
        class_batches(LABELS, 5, 2, Key.of(0))
    with pytest.raises(SettingsError, match="got 0 × 2"):
        class_batches(LABELS, 0, 2, Key.of(0))
    with pytest.raises(SettingsError, match="at least 1 pair, got 0"):
        pair_batches(LABELS, 0, Key.of(0))
    for make in (pairs, groups):
        with pytest.raises(DataError, match="no images to make batches of"):
            make(torch.tensor([], dtype=torch.int64), Key.of(0))


@pytest.mark.parametrize(("images", "lengths"), [(10, [10] * 4 + [8]), (47, [48]), (48, [48]), (100, [48])])
def test_single_images_come_once_each(images: int, lengths: list[int]) -> None:
    """A single image that would be left over joins the batch before it."""
    batches = image_batches(LABELS, images, Key.of(2))
    assert [len(batch) for batch in batches] == lengths
    order = torch.cat(batches)
    assert order.sort().values.tolist() == list(range(48)) and order.tolist() != list(range(48))
    assert torch.equal(torch.cat(image_batches(LABELS, images, Key.of(2))), order)
    assert not torch.equal(torch.cat(image_batches(LABELS, images, Key.of(3))), order)


def test_single_images_need_some() -> None:
    with pytest.raises(DataError, match="no images"):
        image_batches(LABELS[:0], 4, Key.of(0))
    with pytest.raises(SettingsError, match="at least 1 image"):
        image_batches(LABELS, 0, Key.of(0))
