"""Recipes, overrides, and errors that name the nearest right key."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anchorhold.config.build import build, to_dict
from anchorhold.config.recipes import nested, parse_assignments, recipe_names, recipe_text, settings_from, usual_recipe
from anchorhold.config.settings import DEFENCE_SETTINGS, OptimiserSettings, TrainSettings
from anchorhold.data.settings import BatchSettings, DataSettings
from anchorhold.defences.settings import HardnessSettings
from anchorhold.errors import SettingsError
from anchorhold.model.settings import ModelSettings
from anchorhold.perturb.settings import Budget
from anchorhold.schedules import Schedule, falling, grown, learning


def sets(*assignments: str) -> dict:  # type: ignore[type-arg]
    return parse_assignments(assignments)


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("data", ["cub", "digits", "gaussians", "folder"])
def test_every_recipe_builds_for_every_data_set_and_survives_json(name: str, data: str) -> None:
    settings = settings_from(name, {"data": {"name": data}})
    assert build(to_dict(settings)) == settings


def test_the_papers_values_are_the_defaults() -> None:
    s = settings_from("hm-lga", {"data": {"name": "cub"}})
    assert (s.optimiser.lr, s.optimiser.weight_decay, s.batch.pairs, s.train.epochs) == (1e-5, 4e-4, 112, 75)
    assert (s.data.resize, s.data.crop, s.model.backbone, s.model.dim) == (256, 224, "resnet18", 512)
    assert s.defence == HardnessSettings("softhard", "lga", 0.2, eps=8 / 255, alpha=1 / 255, steps=8)


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
        (["train.epochs=three"], "train.epochs must be a whole number"),
        (["train.epochs=2.5"], "train.epochs must be a whole number"),
        (["defence.eps=8/0"], "must be a number"),
        (["defence.eps=8/25/5"], "must be a number"),
        (["data.flip=maybe"], "data.flip must be true or false"),
        (["data.on_bad_image=skp"], "did you mean skip"),
        (["defence.source=softhrad"], "did you mean softhard"),
        (["defence.destination=3"], r"\[-2, 2\]"),
        (["defence.destination=lgaa"], "did you mean lga"),
        (["defence.name=hardnes"], "did you mean hardness"),
        (["train=3"], "train is a section; set one of its keys, such as train.epochs"),
        (["data=3"], "data is a section; set one of its keys, such as data.name"),
        (["defence=3"], "defence is a section; set one of its keys, such as defence.name"),
        (["train.epochs.x=3"], "train.epochs must be a whole number"),
        (["train.attack_eps=nan"], "train.attack_eps must be a number"),
        (["train.epochs=0"], "^train.epochs must be at least 1, got 0$"),
        (["train.epochs"], "needs KEY=VALUE"),
        (["=3"], "needs KEY=VALUE"),
        (["defence.eps=-1"], "negative"),
    ],
)
def test_mistakes_are_named(assignments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from("hm-lga", sets(*assignments))


def test_overrides_may_have_dots_beside_sections() -> None:
    mixed = {"train.epochs": 1, "train": {"seed": 2}, "defence": {"eps": "4/255"}, "defence.steps": 3}
    plain = {"train": {"epochs": 1, "seed": 2}, "defence": {"eps": "4/255", "steps": 3}}
    assert nested(mixed) == plain and settings_from("hm-lga", mixed) == settings_from("hm-lga", plain)
    assert settings_from("hm-lga", {"data.name": "digits"}).model.backbone == "small"  # values for the set count too


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train.epochs": 1, "train": {"epochs": 1}}, "overrides give train.epochs twice"),
        ({"train": 3, "train.epochs": 1}, "overrides give train twice"),
        ({"train.epoch": 1}, "no setting train.epoch; did you mean train.epochs"),
        (["train.epochs=1"], r'overrides must be a dict such as \{"train.epochs": 3\}, not \[\'train.epochs=1'),
    ],
)
def test_overrides_that_make_no_sense(overrides: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from("hm-lga", overrides)


@pytest.mark.parametrize(
    ("recipe", "name", "words"),
    [
        ("hm", "act", "^recipe hm sets defence.source, which defence.name=act does not have: choose recipe=.act.$"),
        ("natural", "hardness", "recipe natural sets defence.sampler, .* choose recipe=.hm. or "),
        ("natural", "own", r'choose a recipe of your own, with \[defence\] name = "own"$'),
    ],
)
def test_another_defence_names_the_recipe_that_has_it(
    monkeypatch: pytest.MonkeyPatch, recipe: str, name: str, words: str
) -> None:
    monkeypatch.setitem(DEFENCE_SETTINGS, "own", HardnessSettings)
    with pytest.raises(SettingsError, match=words):
        settings_from(recipe, sets(f"defence.name={name}"))
    with pytest.raises(SettingsError, match=r"no setting defence\.stepz"):  # what the user said is still theirs
        settings_from("act", sets("defence.name=rest", "defence.stepz=3"))


def test_a_slip_in_a_recipe_stays_one_when_its_defence_is_named_again(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[defence]\nname = "act"\nstepz = 3\n')
    with pytest.raises(SettingsError, match=r"no setting defence\.stepz; did you mean defence\.steps"):
        settings_from(str(tmp_path / "own.toml"), sets("defence.name=act"))


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


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (DataSettings, {"resize": -1}, "data.resize must be at least 0, got -1"),
        (DataSettings, {"crop": -1}, "data.crop must be at least 0"),
        (DataSettings, {"resize": 32, "crop": 33}, "data.crop = 33 is larger than data.resize = 32"),
        (BatchSettings, {"pairs": 0}, "batch.pairs must be at least 1"),
        (BatchSettings, {"classes": 1}, "batch.classes must be at least 2"),
        (BatchSettings, {"instances": 0}, "batch.instances must be at least 2"),
        (BatchSettings, {"instances": 3}, "batch.instances must be even"),
        (BatchSettings, {"mining_pairs": -1}, "batch.mining_pairs must be at least 0"),
        (ModelSettings, {"dim": -1}, "model.dim must be at least 0"),
        (OptimiserSettings, {"lr": 0.0}, "optimiser.lr must be above 0"),
        (OptimiserSettings, {"lr": float("inf")}, "optimiser.lr must be finite, got inf"),
        (OptimiserSettings, {"schedule": "cosin"}, "optimiser.schedule 'cosin'; did you mean cosine"),
        (OptimiserSettings, {"weight_decay": -1.0}, "optimiser.weight_decay must be at least 0"),
        (TrainSettings, {"seed": -1}, "train.seed must be at least 0"),
        (TrainSettings, {"seed": 2**63}, "train.seed must be below"),
        (TrainSettings, {"evaluate_every": 0}, "train.evaluate_every must be at least 1"),
        (TrainSettings, {"checkpoint_seconds": -1.0}, "train.checkpoint_seconds must be at least 0"),
        (TrainSettings, {"attack_eps": float("nan")}, "train.attack_eps must be finite, got nan"),
        (TrainSettings, {"attack_steps": -1}, "train.attack_steps must be at least 0"),
        (TrainSettings, {"attack_queries": -1}, "train.attack_queries must be at least 0"),
        (TrainSettings, {"collapse_warmup": -1}, "train.collapse_warmup must be at least 0"),
        (TrainSettings, {"collapse_separability": -1.0}, "train.collapse_separability must be at least 0"),
        (TrainSettings, {"collapse_distance": -1.0}, "train.collapse_distance must be at least 0"),
    ],
)
def test_every_section_refuses_what_makes_no_sense(section: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        section(**values)


def test_a_crop_needs_no_resize() -> None:
    assert DataSettings(resize=0, crop=28).crop == 28


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("extends = 3", "extends must name a recipe or a .toml file, got 3"),
        ("on = 3", "on is a section; set one of its keys, such as on.digits.train"),
        ("defence = 3", "defence is a section"),
        ("data = 3", "data is a section"),
        ("data.name = [1]", "data.name must be text"),
        ("defence.name = [1]", "no defence '.1.'"),
        ("[train]\nepochs = [1]", "train.epochs must be a whole number, got .1."),
        ("[train]\nepochs = inf", "train.epochs must be a whole number, got inf"),
        ("[optimiser]\nlr = nan", "optimiser.lr must be a number, got nan"),
        ("[optimiser]\nlr = inf", "optimiser.lr must be a number, got inf"),
        ("[on.digit.train]\nepochs = 1", "no data set 'digit' for on.digit; did you mean digits"),
        ("[on.cub.trian]\nepochs = 1", "no section on.cub.trian; did you mean train"),
        ("[on.cub.train]\nepoch = 1", "no setting on.cub.train.epoch; did you mean epochs"),
        ("[on.cub.defence]\nstpes = 1", "no setting on.cub.defence.stpes; did you mean steps"),
        ("[on.cub]\ntrain = 1", "on.cub.train is a section; set one of its keys, such as on.cub.train.epochs"),
        ("[on]\ncub = 1", "on.cub is a section"),
    ],
)
def test_malformed_recipes_are_one_line(tmp_path: Path, toml: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(toml)
    with pytest.raises(SettingsError, match=words) as caught:
        settings_from(str(tmp_path / "bad.toml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("overrides", [{"data": 3}, {"data": {3: 1}}, {3: {}}, {"defence": [1]}])
def test_malformed_overrides_are_settings_errors(overrides: Any) -> None:
    with pytest.raises(SettingsError):
        settings_from("hm-lga", overrides)


def test_values_for_a_data_set_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[on.mine.train]\nepochs = 9\n")
    assert settings_from(str(tmp_path / "mine.toml"), {"data": {"name": "mine"}}).train.epochs == 9


def test_extends_starts_from_the_file_that_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "e.toml").write_text("[train]\nepochs = 9\n[data]\nname = 'cub'\n[on.digits.model]\ndim = 3\n")
    (tmp_path / "mine" / "m.toml").write_text("extends = '../e.toml'\n[train]\nseed = 4\n[data]\nname = 'digits'\n")
    (tmp_path / "mine" / "loop.toml").write_text("extends = '../mine/loop.toml'")
    monkeypatch.chdir(tmp_path)
    s = settings_from("mine/m.toml")
    assert (s.train.epochs, s.train.seed) == (9, 4)
    assert (s.data.name, s.model.dim) == ("digits", 3)  # the nearer name, also where it chooses
    with pytest.raises(SettingsError, match="extends itself"):
        settings_from("mine/loop.toml")


@pytest.mark.parametrize(
    ("schedule", "left"),
    [("constant", [1, 1, 1]), ("linear", [1, 0.75, 0.25]), ("cosine", [1, (2 + 2**0.5) / 4, (2 - 2**0.5) / 4])],
)
def test_lengths_fall_by_their_schedule(schedule: Schedule, left: list[float]) -> None:
    assert [falling(schedule, share) for share in (0, 0.25, 0.75)] == pytest.approx(left)
    assert [Budget(4, 0.5, schedule=schedule).length(step) for step in (0, 1, 3)] == pytest.approx(
        [x / 2 for x in left]
    )


def test_one_cycle_is_that_of_torch() -> None:
    steps = 10_000
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1.0, steps, cycle_momentum=False)
    for step in range(steps - 1):
        if step % 250 == 0:
            assert learning("one-cycle", step / steps) == pytest.approx(optimiser.param_groups[0]["lr"], abs=1e-3)
        optimiser.step()
        cycle.step()
    assert learning("one-cycle", 1.0) == pytest.approx(4e-6)
    for share in (0.0, 0.3, 1.0):
        assert learning("linear", share) == falling("linear", share)


def test_a_length_grows_over_the_first_part() -> None:
    assert [grown(share, 0.5) for share in (0.0, 0.1, 0.5, 0.9)] == [0.0, 0.2, 1.0, 1.0]
    assert [grown(share, 0.0) for share in (0.0, 1.0)] == [1.0, 1.0]


def test_the_usual_recipe_is_robust_and_leaves_pairs_to_a_defence_of_your_own() -> None:
    s = settings_from(usual_recipe())
    assert (s.defence_name, s.defence.form, s.defence.clean) == ("proxy", "trades", 0.2)
    assert s.defence.beta_at(1.0) == pytest.approx(4) and s.defence.eps == 8 / 255 and s.batch.kind == "images"
    assert settings_from("robust", {"defence.clean": 0.5}).defence.beta_at(1.0) == pytest.approx(1)
    assert usual_recipe({"defence": {"name": "hm"}}) == usual_recipe({"defence": {"clean": 0.4}}) == "robust"
    for own in (usual_recipe({"defence": {"name": "ideas:noise"}}), usual_recipe({}, print)):
        assert settings_from(own).batch.kind == "pairs"


def test_the_share_of_the_clean_loss_and_beta_are_one_number() -> None:
    """The later one replaces the earlier, both at once are refused, and neither end of the share is a dead end."""

    def chosen(recipe: str, *assignments: str) -> tuple[str, object, float]:
        s = settings_from(recipe, sets(*assignments)).defence
        return s.form, s.clean, s.share

    assert chosen("robust") == ("trades", 0.2, 0.2)
    assert chosen("robust", "defence.beta=9") == ("trades", "auto", pytest.approx(0.1))
    assert chosen("proxy-trades") == ("trades", "auto", pytest.approx(0.2))
    assert chosen("proxy-trades", "defence.clean=0.5") == ("trades", 0.5, 0.5)
    assert chosen("robust", "defence.clean=1") == ("trades", 1.0, 1.0)
    assert chosen("robust", "defence.form=natural") == ("natural", "auto", 1.0)
    assert chosen("robust", "defence.form=minmax") == ("minmax", 0.2, 0.2)
    assert chosen("proxy-minmax", "defence.clean=0") == ("minmax", 0.0, 0.0)
    for words, recipe, *assignments in (
        ("small share such as 0.05", "robust", "defence.clean=0"),
        ("sets β already", "robust", "defence.clean=0.5", "defence.beta=4"),  # also where β is the default
        ("form = minmax or trades", "robust", "defence.form=natural", "defence.clean=0.5"),
    ):
        with pytest.raises(SettingsError, match=words):
            settings_from(recipe, sets(*assignments))


@pytest.mark.parametrize("recipe", ["proxy", "proxy-minmax", "proxy-trades", "robust"])
def test_a_record_in_which_0_was_no_share_is_read_as_before(recipe: str) -> None:
    now = settings_from(recipe)
    older = to_dict(now)
    older["defence"]["clean"] = {"robust": 0.2}.get(recipe, 0.0)
    then = build(older)
    assert (then.defence.share, then.defence.raises) == (now.defence.share, now.defence.raises)
    assert recipe != "proxy-trades" or then.defence.beta_at(1.0) == 4
