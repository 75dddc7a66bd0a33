"""Audits of data at the edges: two classes, other channels, queries without a match, ε given in another form."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.attacks.class_losses import dlr
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import goal_named
from anchorhold.auditing.subject import without_match
from anchorhold.auditing.verifying import verify
from anchorhold.errors import ModelError, SettingsError

QUICK: dict[str, Any] = {"attacks": ["margin"], "limit": 4, "steps": 2, "resamples": 9, "examine": None}
QUICK |= {"device": "cpu"}


def net(pixels: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 4)).requires_grad_(False)


def data(channels: int = 3, count: int = 24, classes: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.rand(count, 4, 4, channels).movedim(3, 1), torch.arange(count) % classes


def test_dlr_has_a_gradient_also_with_two_classes() -> None:
    images, labels = data(classes=2)
    embed, ids = net(48), torch.arange(8)
    scene = Scene.of(embed(images), labels)
    d = torch.cdist(scene.queries[:8], scene.gallery)
    d[ids, ids] = torch.inf
    same = labels[:8, None] == labels
    margin = d.masked_fill(~same, torch.inf).amin(1) - d.masked_fill(same, torch.inf).amin(1)
    x = images[:8].clone().requires_grad_()
    value = dlr(goal_named("margin", "corrected"), scene, ids, None).value(embed(x)[:, None], ids)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert torch.allclose(value, margin, atol=1e-4) and (gradient.flatten(1).norm(dim=1) > 0.1).all()


@pytest.mark.medium
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images_of_any_number_of_channels(channels: int, tmp_path: Path) -> None:
    """8 bits and receipts exist for all of them, JPEG and pictures for 1 and 3."""
    options = {**QUICK, "strength": "strong", "protocols": "corrected", "epsilons": (), "limit": 2}
    model, given = net(16 * channels), data(channels)
    found = ah.audit(model, given, out=tmp_path, **options)
    plain = channels in (1, 3)
    assert found.strong is not None
    assert [*found.strong["realisable"]] == (["8 bits", "JPEG 90"] if plain else ["8 bits"])
    assert all("margin" in form["columns"] for form in found.strong["realisable"].values())
    page = (tmp_path / "page.html").read_text()
    assert ("Examples</h2>" in page) == plain and ("no pictures" in " ".join(found.notes)) != plain
    assert verify(tmp_path, model, given, device="cpu").problems == ()


def test_an_error_of_the_surrogate_names_it() -> None:
    for wrong in (nn.Linear(3, 2), nn.Sequential(nn.Flatten(), nn.Linear(48, 4), _NaN())):
        with pytest.raises(ModelError, match="the surrogate cannot be used: ") as error:
            ah.audit(net(48), data(), strength="strong", surrogate=wrong, **QUICK)
        assert "\n" not in str(error.value)


class _NaN(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0


def test_epsilons_are_numbers_or_one_number() -> None:
    for given in (8 / 255, [8 / 255], (8 / 255, 8 / 255)):
        found = ah.audit(net(48), data(), epsilons=given, eps=8 / 255, **{**QUICK, "limit": 2})
        assert found.settings["epsilons"] == (8 / 255,)
    for wrong, named in (("8/255", "'8/255'"), (["8/255"], "'8/255'"), ([None], "None"), (True, "True"), ([[1]], "1")):
        with pytest.raises(SettingsError, match="each ε of epsilons is a number such as 8 / 255, not ") as error:
            ah.audit(net(48), data(), epsilons=wrong, **QUICK)  # type: ignore[arg-type]
        assert named in str(error.value) and "\n" not in str(error.value)


def test_queries_without_a_match_are_counted_and_have_no_map(tmp_path: Path) -> None:
    images, labels = data()
    apart = {"query": (images[:12], labels[:12] + 3), "gallery": (images[12:], labels[12:])}
    found = ah.audit(net(48), apart, **QUICK, out=tmp_path)
    assert "12 of 12 queries have no other image of their class in the gallery: R@1 counts them as wrong" in found.notes
    page = re.sub(r"<script.*?</script>", "", (tmp_path / "page.html").read_text(), flags=re.S)
    for shown in (str(found), repr(found), found._repr_html_(), page):
        assert not re.search(r"\bnan\b", shown, re.I)
    assert "mAP –" in str(found) and json.loads((tmp_path / "audit.json").read_text())["clean"]["mAP"]["value"] is None
    some = torch.tensor([0, 0, 1, 1, 2, 3])
    assert without_match(Scene.of(torch.eye(6), some)) == 2  # an image is no match of its own
    assert without_match(Scene(torch.eye(6), some, torch.eye(6), some, torch.full((6,), -1))) == 0
    assert not any("no other image" in note for note in ah.audit(net(48), data(), **QUICK).notes)
