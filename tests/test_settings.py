"""Recipes, overrides, and errors that name the nearest right key."""

from pathlib import Path

import pytest

from anchorhold.defences.hardness import HardnessSettings
from anchorhold.errors import SettingsError
from anchorhold.settings import (
    build,
    parse_assignments,
    recipe_names,
    recipe_text,
    settings_from,
    to_dict,
)


def sets(*assignments: str) -> dict:  # type: ignore[type-arg]
    return parse_assignments(assignments)


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("data", ["cub", "digits", "gaussians", "folder"])
def test_every_recipe_builds_for_every_data_set_and_survives_json(name: str, data: str) -> None:
    settings = settings_from(name, {"data": {"name": data}})
    assert build(to_dict(settings)) == settings


def test_the_papers_values_are_the_defaults() -> None:
    s = settings_from("hm-lga", {"data": {"name": "cub"}})
    assert (s.optimiser.lr, s.optimiser.weight_decay, s.batch.pairs, s.train.epochs) == (1e-5, 4e-4, 56, 75)
    assert (s.data.resize, s.data.crop, s.model.backbone, s.model.dim) == (256, 224, "resnet18", 512)
    assert s.defence == HardnessSettings("softhard", "lga", 0.2, 8 / 255, 1 / 255, 8)


def test_values_per_data_set_and_order_of_layers(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'extends = "hm-lga"\n[defence]\nsteps = 4\n[on.digits.defence]\nsteps = 2\n[on.cub.train]\nepochs = 9\n'
    )
    recipe = str(tmp_path / "mine.toml")
    digits = settings_from(recipe, sets("data.name=digits"))
    cub = settings_from(recipe, sets("data.name=cub"))
    assert (digits.defence.steps, cub.defence.steps, cub.train.epochs) == (2, 4, 9)
    assert digits.model.backbone == "small" and cub.model.backbone == "resnet18"
    assert settings_from(recipe, sets("data.name=digits", "defence.steps=5")).defence.steps == 5


def test_values_take_the_type_of_their_key() -> None:
    s = settings_from(
        "hm-lga", sets("defence.eps=4/255", "data.flip=false", "train.epochs=3", "defence.destination=-0.1")
    )
    assert s.defence.eps == 4 / 255 and s.data.flip is False and s.train.epochs == 3
    assert s.defence.destination == -0.1
    assert settings_from("hm-lga", sets("defence.destination=semihard")).defence.destination == "semihard"


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["defence.stepz=3"], "did you mean defence.steps"),
        (["trian.epochs=3"], "did you mean train"),
        (["train.epoch=3"], "did you mean train.epochs"),
        (["steps=3"], "did you mean"),
        (["train.epochs=three"], "train.epochs wants int"),
        (["train.epochs=2.5"], "train.epochs wants int"),
        (["defence.eps=8/0"], "wants a number"),
        (["data.flip=maybe"], "data.flip wants bool"),
        (["data.on_bad_image=skp"], "did you mean skip"),
        (["defence.source=softhrad"], "did you mean softhard"),
        (["defence.destination=3"], r"\[-2, 2\]"),
        (["defence.destination=lgaa"], "did you mean lga"),
        (["defence.name=hardnes"], "did you mean hardness"),
        (["train=3"], "is a section"),
        (["train.epochs"], "wants key=value"),
        (["=3"], "wants key=value"),
        (["defence.eps=-1"], "negative"),
    ],
)
def test_mistakes_are_named(assignments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from("hm-lga", sets(*assignments))


def test_recipes_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="did you mean hm-lga"):
        recipe_text("hm-lgaa")
    with pytest.raises(SettingsError, match="cannot read recipe"):
        recipe_text(str(tmp_path / "absent.toml"))
    (tmp_path / "bad.toml").write_text("[defence\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        settings_from(str(tmp_path / "bad.toml"))
    loop = tmp_path / "loop.toml"
    loop.write_text(f'extends = "{loop}"\n')
    with pytest.raises(SettingsError, match="extends itself"):
        settings_from(str(loop))
