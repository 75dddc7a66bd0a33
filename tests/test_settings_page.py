"""Every `--set` line on docs/reproduce/settings.md is accepted, and gives what the papers state."""

import re
import shlex
from pathlib import Path

import pytest

from anchorhold.config.recipes import parse_assignments, settings_from
from anchorhold.config.settings import Settings

PAGE = Path(__file__).parents[1] / "docs/reproduce/settings.md"
LINES = re.findall(r"^anchorhold train .*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def settings(line: str) -> Settings:
    """The settings of a command line: DATA --root FOLDER --recipe NAME --set KEY=VALUE … --out RUN."""
    _, _, data, *words = shlex.split(line)
    options = list(zip(words[::2], words[1::2], strict=True))
    assert {name for name, _ in options} <= {"--recipe", "--set", "--root", "--out"}, line
    (recipe,) = [value for name, value in options if name == "--recipe"]
    changes = parse_assignments(value for name, value in options if name == "--set")
    return settings_from(recipe, changes | {"data": {"name": data}})


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_accepted_and_changes_something(line: str) -> None:
    found = settings(line)
    plain = settings(re.sub(r" --set \S+", "", line))
    assert found != plain
    for change in re.findall(r"--set (\S+)", line):  # none repeats what the recipe has
        section = change.split(".")[0]
        assert getattr(found, section) != getattr(plain, section), change


def test_the_lines_give_what_the_papers_state() -> None:
    of = {
        recipe: [settings(line) for line in LINES if f"--recipe {recipe} " in line]
        for recipe in ("hm-lga", "catride", "est")
    }
    stated = of["hm-lga"][1]  # the first one has the steps of the code
    assert (stated.optimiser.lr, stated.batch.pairs * 2, stated.train.epochs) == (1e-3, 112, 150)
    stated = of["catride"][0]
    assert (stated.optimiser.lr, stated.batch.pairs * 2, stated.train.epochs) == (1e-3, 112, 100)
    assert of["catride"][1].defence.weights_carry_gradient
    est, l2 = (stated.defence for stated in of["est"])
    assert (est.start, est.norm, l2.start, l2.norm, l2.signed) == ("random", "linf", "random", "l2", True)


def test_the_recipes_are_those_of_the_tables() -> None:
    for recipe, pairs, steps in (("hm-lga", 112, 8), ("catride", 56, 16)):
        s = settings_from(recipe, {"data.name": "cub"})
        assert (s.optimiser.lr, s.optimiser.weight_decay, s.optimiser.schedule) == (1e-5, 4e-4, "constant")
        assert (s.train.epochs, s.batch.pairs, s.batch.mining_pairs, s.defence.steps) == (75, pairs, 56, steps)
        assert (s.model.backbone, s.model.dim) == ("resnet18", 512)
    for data, attention in (("cub", 10.0), ("cars", 9.5), ("sop", 2.0)):
        defence = settings_from("catride", {"data.name": data}).defence
        assert (defence.attention, defence.gamma, defence.beta) == (attention, 0.5, 0.04)
