"""CutMix: what is pasted, how much, and that draws are keyed."""

import pytest
import torch

from anchorhold.data.mixing import pasted
from anchorhold.random import Key

KEY = Key.of(4)
IMAGES = Key.of(1).uniform(torch.arange(200), (3, 9, 12))


def test_a_rectangle_of_another_image_lies_where_it_lay() -> None:
    mixed, others, kept = pasted(IMAGES, 1.0, KEY)
    for image, before, other, share in zip(mixed, IMAGES, others.tolist(), kept.tolist()):
        changed = (image != before).all(0)
        assert torch.equal(image[:, changed], IMAGES[other][:, changed])
        assert torch.equal(image[:, ~changed], before[:, ~changed])
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        area = 0
        if len(rows):  # a rectangle without gaps
            area = int((rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1))
        assert area == int(changed.sum())
        assert share == pytest.approx(1 - area / 108) or IMAGES[other].equal(before)
    assert sorted(others.tolist()) == list(range(200))


def test_the_area_is_uniform_before_it_is_cut_and_the_share_is_kept_to() -> None:
    many = torch.zeros(4000, 1, 32, 32)
    kept = pasted(many, 1.0, KEY)[2]
    whole = Key.of(0).uniform(torch.arange(40000), (3,), torch.float64)  # side², row, column, by another way
    side = whole[:, 0].sqrt()
    cut = [(mid + side / 2).clamp(max=1) - (mid - side / 2).clamp(min=0) for mid in (whole[:, 1], whole[:, 2])]
    assert float(1 - kept.mean()) == pytest.approx(float((cut[0] * cut[1]).mean()), abs=0.015)
    half = pasted(many, 0.5, KEY)[2]
    assert float((half == 1).double().mean()) == pytest.approx(0.5, abs=0.03)


def test_draws_are_keyed_by_place() -> None:
    mixed, others, kept = pasted(IMAGES, 0.7, KEY)
    again = pasted(IMAGES, 0.7, KEY)
    assert torch.equal(mixed, again[0]) and torch.equal(others, again[1]) and torch.equal(kept, again[2])
    assert not torch.equal(kept, pasted(IMAGES, 0.7, KEY("else"))[2])
