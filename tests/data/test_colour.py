"""Random colours against torchvision's own."""

from typing import Any

import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from anchorhold.data.colour import jittered
from anchorhold.data.images import Images
from anchorhold.data.settings import DataSettings
from anchorhold.data.splits import Split
from anchorhold.data.store import resident
from anchorhold.errors import SettingsError
from anchorhold.random import Key

KEY = Key.of(8)
SLOTS = torch.arange(6)
IMAGES = KEY("images").uniform(SLOTS, (3, 5, 4), torch.float32)


@pytest.mark.parametrize("amount", [0.2, 0.9])
def test_it_is_torchvision_s_with_the_same_factors(amount: float) -> None:
    found = jittered(IMAGES, amount, KEY, SLOTS)
    factors = {
        part: (1 + amount * (2 * KEY(part).uniform(SLOTS) - 1)).tolist()
        for part in ("brightness", "contrast", "saturation")
    }
    for number, image in enumerate(IMAGES):
        wanted = tv.adjust_brightness(image, factors["brightness"][number])
        wanted = tv.adjust_contrast(wanted, factors["contrast"][number])
        wanted = tv.adjust_saturation(wanted, factors["saturation"][number])
        assert torch.allclose(found[number], wanted, atol=2e-4)
    assert (found - IMAGES).abs().max() > 0.05 and found.min() >= 0 and found.max() <= 1


def test_a_row_depends_on_its_slot_alone() -> None:
    assert torch.equal(jittered(IMAGES[3:], 0.5, KEY, SLOTS[3:]), jittered(IMAGES, 0.5, KEY, SLOTS)[3:])
    grey = IMAGES[:, :1]
    assert jittered(grey, 0.5, KEY, SLOTS).shape == grey.shape


def test_training_images_are_jittered_and_test_images_are_not() -> None:
    frames = (255 * IMAGES.permute(0, 2, 3, 1)).to(torch.uint8)
    split = Split("some", SLOTS, tuple("abcdef"), images=frames)

    def made(**more: Any) -> Images:
        return Images(split, resident(frames, "cpu"), SLOTS, None, False, **more)

    plain, bright = (next(each.augmented([SLOTS], iter([KEY]))) for each in (made(), made(jitter=0.5)))
    assert torch.equal(bright, jittered(plain, 0.5, KEY("colour"), SLOTS)) and not torch.equal(bright, plain)
    assert torch.equal(next(made(jitter=0.5).plain()), next(made().plain()))


@pytest.mark.parametrize("amount", [-0.1, 1.5])
def test_the_amount_is_a_share(amount: float) -> None:
    with pytest.raises(SettingsError, match=r"data\.jitter"):
        DataSettings(jitter=amount)
