"""The list of settings: complete, with meanings, and true about where values come from."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest

from anchorhold.config.build import build, dotted, to_dict
from anchorhold.config.listing import Setting, list_settings, origins, resolved, set_by_user, written
from anchorhold.config.recipes import parse_assignments, recipe_names, settings_from
from anchorhold.config.settings import DEFENCE_SETTINGS, Settings
from anchorhold.defences.own import OWN
from anchorhold.errors import SettingsError
from tests.cli.test_main import run

MOST_WORDS = 25


def everything() -> list[Setting]:
    return [each for name in DEFENCE_SETTINGS for each in list_settings(defence=name)]


def test_every_key_has_a_meaning_of_one_short_sentence() -> None:
    lacking = sorted({f"{each.key} ({', '.join(each.defences)})" for each in everything() if not each.meaning})
    assert not lacking, f'write Annotated[type, "meaning."] beside the type of: {", ".join(lacking)}'
    for each in everything():
        words = each.meaning.split()
        assert len(words) <= MOST_WORDS, f"{each.key} has {len(words)} words"
        assert each.meaning.endswith(".") and each.meaning[:1] != " ", each.key


@pytest.mark.parametrize("name", DEFENCE_SETTINGS)
def test_the_list_has_the_keys_and_defaults_that_settings_have(name: str) -> None:
    kind = DEFENCE_SETTINGS[name]
    listed = {each.key: each.default for each in list_settings(defence=name)}
    known = {key for key in dotted(Settings()) if "." in key}
    assert set(listed) == known | {"defence.name"} | {f"defence.{key}" for key in dotted(kind())}
    tree = to_dict(replace(Settings(), defence=kind(), defence_name=name))
    for key, default in listed.items():
        section, _, own = key.partition(".")
        assert default == tree[section][own], key
    assert build(tree) == replace(Settings(), defence=kind(), defence_name=name)


def test_a_key_that_defences_share_comes_once_for_each_default() -> None:
    steps = [each for each in list_settings("defence.steps") if each.key == "defence.steps"]
    assert {each.default: each.defences for each in steps} == {
        8: ("madry", "trades", "hardness", "act", "est", "ses", "rest"),
        4: ("free",),
        16: ("tride",),
        5: ("proxy", "adml"),
        3: ("classify", "distil", "distil-logits"),
    }
    # A class that changes the default inherits the meaning; in free training the steps are replays.
    assert len({each.meaning for each in steps if each.defences != ("free",)}) == 1
    norm = [each for each in list_settings() if each.key == "defence.norm"]
    assert len(norm) == 1 and "natural" not in norm[0].defences


def test_types_spell_out_their_choices() -> None:
    listed = {each.key: each for each in list_settings(defence="hardness")}
    assert listed["train.precision"].allowed == "auto | fp32 | tf32 | bf16"
    assert listed["defence.source"].allowed == "random | semihard | softhard | distance | hardest | module:thing"
    assert listed["defence.destination"].allowed.startswith("number, or random | ")
    assert (listed["train.epochs"].allowed, listed["data.flip"].allowed) == ("whole number", "true or false")
    assert {each.key: each for each in list_settings(defence="adml")}["defence.formulation"].allowed == "1 | 2 | 3"
    for each in everything():
        assert not each.choices or each.default in each.choices, each.key


@pytest.mark.parametrize("recipe", recipe_names())
@pytest.mark.parametrize("data", ["cub", "digits"])
def test_a_resolved_recipe_is_the_settings_of_a_run_and_a_recipe_itself(
    recipe: str, data: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_from(recipe, {"data.name": data})
    tree = to_dict(settings)
    for each in resolved(recipe, {"data.name": data}):
        section, _, key = each.key.partition(".")
        assert each.value == tree[section][key], each.key
    code, text, err = run(capsys, monkeypatch, "recipes", "show", recipe, "--resolved", "--data", data)
    assert code == 0, err
    assert all("  # " in line for line in text.splitlines() if line and line[0] != "[")
    (tmp_path / "mine.toml").write_text(text)
    again = settings_from(str(tmp_path / "mine.toml"))
    assert replace(again, recipe=recipe) == settings
    assert set(tomllib.loads(text)) == {"data", "batch", "model", "optimiser", "train", "defence"}


def test_every_value_says_where_it_comes_from(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'extends = "hm-lga"\n[train]\nepochs = 9\n[on.digits.batch]\npairs = 5\n[defence]\nsteps = 4\n'
    )
    mine = str(tmp_path / "mine.toml")
    where = origins(mine, {"data.name": "digits", "train.seed": 3})
    assert where["train.epochs"] == where["defence.steps"] == mine and where["batch.pairs"] == f"{mine} on digits"
    assert where["model.dim"] == "base on digits" and where["defence.source"] == "hm-lga"
    assert where["defence.eps"] == "hm-lga on digits" and where["train.seed"] == where["data.name"] == "set"
    assert "optimiser.schedule" not in where
    listed = {each.key: each for each in list_settings(recipe=mine, data="digits")}
    assert (listed["batch.pairs"].value, listed["batch.pairs"].default) == (5, 112)
    assert listed["optimiser.schedule"].origin == "default"


def test_what_the_user_set_is_what_stands_in_their_own_words(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "catride"\n[batch]\nmining_pairs = 0\n')
    assert "batch.pairs" not in set_by_user("catride", {"data.name": "folder"})  # 56, by our recipe
    assert set_by_user(str(tmp_path / "mine.toml"), {"train.epochs": 1}) == {"batch.mining_pairs", "train.epochs"}
    assert "batch.pairs" in set_by_user("hm-lga", {"batch": {"pairs": 112}})


def test_a_row_is_resolved_too(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run(capsys, monkeypatch, "recipes", "show", "hm/t6/cub/hm-lga-32", "--resolved")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert code == 0 and {"steps = 32 # row", 'name = "cub" # row', "pairs = 112 # default"} <= set(lines)
    assert 'eps = "8/255" # hm-lga' in lines


@dataclass(frozen=True)
class NoiseSettings:
    size: Annotated[float, "How large the noise is."] = 0.05
    silent: bool = False


def noise(step: Any, settings: NoiseSettings) -> Iterator[Any]:
    yield step


def test_a_defence_of_yours_is_listed_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "mine:noise", noise)
    listed = {each.key: each for each in list_settings(defence="mine:noise") if each.section == "defence"}
    assert set(listed) == {"defence.name", "defence.size", "defence.silent"}
    assert listed["defence.size"].meaning == "How large the noise is." and listed["defence.silent"].meaning == ""


def test_patterns_match_keys_and_meanings() -> None:
    found = [each.key for each in list_settings("learning rate")]
    assert found == ["optimiser.lr", "optimiser.schedule", "defence.loss_lr", "defence.proxy_lr"]
    assert {each.section for each in list_settings("data.*")} == {"data"}
    assert next(each.key for each in list_settings("EPOCHS") if each.section == "train") == "train.epochs"


@pytest.mark.parametrize(
    ("value", "text"),
    [(8 / 255, '"8/255"'), (4 / 765, '"4/765"'), (0.2, "0.2"), (1e-5, "1e-05"), (1 / 7, repr(1 / 7))],
)
def test_values_are_written_as_a_recipe_has_them(value: Any, text: str) -> None:
    assert written(value) == text
    read = tomllib.loads(f"x = {text}")["x"]
    assert settings_from("", {"defence": {"name": "hardness", "eps": read}}).defence.eps == float(value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["settings", "batch_size"], "did you mean batch.pairs?"),
        (["settings", "lrr"], "did you mean optimiser.lr?"),
        (["settings", "qqqqqq"], "`anchorhold settings` lists them"),
        (["settings", "--recipe", "hmlga"], "did you mean hm-lga?"),
        (["settings", "--defence", "hardnes"], "did you mean hardness?"),
        (["settings", "--defence", "no_such_module:thing"], "no module 'no_such_module'"),
        (["settings", "--recipe", "act", "--defence", "act"], "give either a recipe or a defence"),
        (["settings", "--data", "digits"], "give a recipe too"),
        (["settings", "--recipe", "act", "--data", "digit"], "did you mean digits?"),
        (["recipes", "show", "hmlga", "--resolved"], "did you mean hm-lga?"),
        (["recipes", "--resolved"], "--resolved and --data are for `anchorhold recipes show NAME`"),
        (["recipes", "show", "act", "--data", "cub"], "--data is for --resolved"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    code, _, err = run(capsys, monkeypatch, *arguments)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def test_the_command_prints_keys_with_meanings_or_json(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, _ = run(capsys, monkeypatch, "settings", "train.epochs")
    assert code == 0 and text.splitlines()[:2] == ["[train]", "train.epochs = 75   (whole number)"]
    assert text.splitlines()[2].startswith("    ") and len(text.splitlines()) == 3
    code, text, _ = run(capsys, monkeypatch, "settings", "--recipe", "hm-lga", "--data", "digits", "--json")
    listed = {each["key"]: each for each in json.loads(text)}
    assert code == 0 and listed["batch.pairs"]["value"] == 64 and listed["batch.pairs"]["default"] == 112
    assert listed["batch.pairs"]["origin"] == "base on digits" and listed["batch.pairs"]["meaning"]


@pytest.mark.medium
def test_settings_load_without_torch() -> None:
    script = (
        "import sys; from anchorhold.cli.main import app; import anchorhold as ah; "
        "app(['settings'], standalone_mode=False); app(['recipes', 'show', 'hm-lga', '--resolved'], "
        "standalone_mode=False); assert ah.list_settings('lr'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SYNONYMS = {
    "lr": "optimiser.lr",
    "learning_rate": "optimiser.lr",
    "train.lr": "optimiser.lr",
    "optimizer.lr": "optimiser.lr",
    "weight_decay": "optimiser.weight_decay",
    "batch_size": "batch.pairs",
    "batch.size": "batch.pairs",
    "train.batch_size": "batch.pairs",
    "epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "seed": "train.seed",
    "eps": "defence.eps",
    "epsilon": "defence.eps",
    "defense.eps": "defence.eps",
    "defence.epsilon": "defence.eps",
    "steps": "defence.steps",
    "step-size": "defence.alpha",
    "backbone": "model.backbone",
    "arch": "model.backbone",
    "model.name": "model.backbone",
    "embedding_dim": "model.dim",
    "workers": "data.workers",
    "num_workers": "data.workers",
    "img_size": "data.crop",
    "sampler": "defence.source",
    "epoch": "train.epochs",
}


@pytest.mark.parametrize(("written_key", "key"), SYNONYMS.items())
def test_an_unknown_key_names_the_one_that_is_meant(written_key: str, key: str) -> None:
    with pytest.raises(SettingsError, match=rf"^no setting .*; did you mean {key}\?$"):
        settings_from("hm-lga", parse_assignments([f"{written_key}=1"]))
    known = {each.key for each in everything()}
    assert key in known and written_key not in known


@pytest.mark.parametrize("key", ["momentum", "optimiser.momentum", "optimizer.momentum"])
def test_what_does_not_exist_is_said_so(key: str) -> None:
    with pytest.raises(SettingsError, match="training uses Adam, which has no momentum"):
        settings_from("hm-lga", parse_assignments([f"{key}=0.9"]))


def test_synonyms_lead_only_to_keys_that_the_defence_has() -> None:
    with pytest.raises(SettingsError) as error:
        settings_from("natural", {"epsilon": 1})
    assert "defence.eps" not in str(error.value)
    with pytest.raises(SettingsError, match=r"did you mean defence.sampler\?"):
        settings_from("act", {"miner": "x"})
