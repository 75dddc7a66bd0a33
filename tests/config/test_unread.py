"""A setting that you give and that the run would not read is refused, with the setting that would read it."""

from typing import Any

import pytest

from anchorhold.config.build import build, to_dict
from anchorhold.config.recipes import recipe_names, settings_from
from anchorhold.config.settings import Settings
from anchorhold.data.settings import BatchSettings
from anchorhold.defences.settings import HardnessSettings
from anchorhold.errors import SettingsError

YOURS = {"defence.loss": "torch.nn:CrossEntropyLoss", "batch.kind": "images"}


@pytest.mark.parametrize(
    ("recipe", "others", "key", "value", "reader"),
    [
        ("proxy", {}, "defence.eps", 0.1, {"defence.form": "minmax"}),
        ("proxy", {}, "defence.steps", 5, {"defence.form": "trades"}),  # also where it is the default
        ("proxy-minmax", YOURS | {"defence.loss_lr": 0.1}, "defence.proxy_lr", 0.1, {"defence.loss_lr": 0}),
        ("adml", {}, "defence.weight", 5, {"defence.formulation": 3}),
        ("hm", {}, "defence.u", 0.1, {"defence.boost": 0.1}),
        ("catride", {"defence.guide": "hardness"}, "defence.adaptive", 60, {"defence.guide": "collapseness"}),
        ("catride", {"defence.phases": "cap"}, "defence.gamma", 3, {"defence.phases": "both"}),
        ("catride", {"defence.top_rank_loss": False}, "defence.gamma", 2, {"defence.top_rank_loss": True}),
        ("catride", {"defence.sampler": "distance"}, "defence.window", 0.5, {"defence.sampler": "semihard"}),
        ("robust", {}, "batch.pairs", 8, {"batch.kind": "pairs"}),
        ("robust", {}, "batch.mining_pairs", 8, {"batch.kind": "classes"}),
        ("hm-lga", {}, "batch.images", 8, {"batch.kind": "images", "defence.name": "proxy"}),
        ("hm-lga", {}, "batch.classes", 8, {"batch.kind": "classes"}),
        ("natural", {}, "train.attack_steps", 50, {"train.attack_eps": 0.1}),
    ],
)
def test_what_would_change_nothing_is_refused(
    recipe: str, others: dict[str, Any], key: str, value: Any, reader: dict[str, Any]
) -> None:
    settings_from(recipe, others)
    with pytest.raises(SettingsError, match=f"{key} has no effect: .*leave {key} out"):
        settings_from(recipe, {**others, key: value})
    section, name = key.split(".")
    read = "" if "defence.name" in reader else recipe
    assert to_dict(settings_from(read, {**others, **reader, key: value}))[section][name] == value


@pytest.mark.parametrize("name", recipe_names())
def test_what_a_recipe_or_a_record_has_besides_is_left_alone(name: str) -> None:
    tree = to_dict(settings_from(name))
    tree["train"]["attack_steps"] = 7
    assert build(tree).train.attack_steps == 7


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("robust", {"defence.triplets": 1}, r"batch\.kind = images has no pairs for defence\.triplets = 1: set batch"),
        ("hm-lga", {"batch.kind": "images"}, r"batch\.kind = images has no pairs for the triplets of this defence"),
        ("natural", {"batch.kind": "images"}, r"batch\.kind = images"),
        ("adml", {"batch.kind": "images"}, r"batch\.kind = images has no pairs for the tuples"),
    ],
)
def test_triplets_need_batches_of_pairs(recipe: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from(recipe, changes)
    settings_from(recipe, {**changes, "batch.kind": "classes"})


def test_hardness_needs_pairs_also_for_a_loss_of_yours() -> None:
    with pytest.raises(SettingsError, match="has no pairs for the triplets"):
        settings_from("hm-lga", YOURS)


def test_a_loss_of_yours_needs_no_pairs_and_settings_by_hand_are_checked_too() -> None:
    for recipe in ("natural", "madry", "trades", "proxy-trades"):
        assert settings_from(recipe, YOURS).batch.kind == "images"
    with pytest.raises(SettingsError, match=r"batch\.kind = images"):
        Settings(batch=BatchSettings("images"), defence=HardnessSettings())


def test_sizes_for_several_recipes_may_be_given_together() -> None:
    sizes = {"batch.pairs": 8, "batch.mining_pairs": 0, "batch.images": 16}
    assert settings_from("robust", sizes).batch.images == 16 and settings_from("hm-lga", sizes).batch.pairs == 8
