"""The house rules: rooms that load without torch, lists that agree, short functions and files, the order of imports."""

import ast
import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import anchorhold
from anchorhold.attacks.menu import ATTACKS
from anchorhold.attacks.settings import DEFECTS, OPENING, usual_settings
from anchorhold.data.datasets import DATASETS
from anchorhold.data.settings import DATASET_NAMES
from anchorhold.defences import settings as defence_settings
from anchorhold.defences.menu import DEFENCES
from anchorhold.losses import LOSSES
from anchorhold.pretraining import settings as pretraining_settings
from anchorhold.pretraining.menu import PRETRAININGS
from anchorhold.triplets import SAMPLERS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(anchorhold.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Without torch ----------------------------------------------------------------------------------------------

LIGHT = ("runs", "config", "reproduce", "report")
HEAVY = "torch timm torchvision"
WITHOUT_TORCH = f"""
import importlib, sys
from anchorhold.cli import main
heavy = set({HEAVY!r}.split())
for name in sys.argv[1].split():
    importlib.import_module(name)
    assert not heavy & set(sys.modules), f"{{name}} loads {{heavy & set(sys.modules)}}"
sys.argv = ["anchorhold", "compare", sys.argv[2]]
try:
    main.main()
except SystemExit as end:
    assert not end.code, end.code
assert not heavy & set(sys.modules), f"compare loads {{heavy & set(sys.modules)}}"
"""


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.medium
def test_runs_config_reproduce_and_report_load_without_torch() -> None:
    names = [module_of(path) for path in SOURCES if path.relative_to(PACKAGE).parts[0] in LIGHT]
    names += [module_of(path) for path in SOURCES if path.name == "settings.py"]
    assert {name.split(".")[1] for name in names} > set(LIGHT)
    place = ROOT / "results" / "digits"
    if not place.is_dir():
        pytest.skip("an sdist has no results")
    command = [sys.executable, "-c", WITHOUT_TORCH, " ".join(names), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "ERS" in done.stdout


# Lists that are kept twice ----------------------------------------------------------------------------------


def test_names_without_torch_are_those_of_the_menus() -> None:
    assert set(defence_settings.SAMPLER_NAMES) == set(SAMPLERS)
    assert set(defence_settings.LOSS_NAMES) == set(LOSSES)
    assert set(DATASET_NAMES) == set(DATASETS)
    assert list(defence_settings.SETTINGS) == list(DEFENCES)
    assert list(pretraining_settings.SETTINGS) == list(PRETRAININGS)
    assert not set(DEFENCES) & set(PRETRAININGS)


@pytest.mark.parametrize("protocol", ["published", "corrected"])
@pytest.mark.parametrize("name", ATTACKS)
def test_usual_settings_are_the_defaults_of_the_goals(name: str, protocol: Any) -> None:
    goal: Any = ATTACKS[name](protocol)
    usual = usual_settings(name, protocol)
    own = {field.name: getattr(goal, field.name) for field in dataclasses.fields(goal)}
    for key, value in own.items():
        if key in usual:
            assert value == usual[key], key
    # A setting that is not listed as usual comes from the name of the attack.
    assert set(own) - set(usual) <= {"protocol", "raised", "targeted"}
    assert set(DEFECTS.get(name, ())) <= set(own)


def test_every_usual_setting_is_one_of_a_goal() -> None:
    fields = {field.name for make in ATTACKS.values() for field in dataclasses.fields(make("corrected"))}  # type: ignore[type-var]
    assert {key for name in ATTACKS for key in usual_settings(name, "published")} <= fields
    assert set(DEFECTS) <= set(ATTACKS) and set(OPENING) == {"published", "corrected"}


# Sizes ------------------------------------------------------------------------------------------------------

MOST_PARAMETERS = 8  # named ones: without self, cls, *these and **those
MOST_LINES = 400


def functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = f"{inside}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        within = f"{name}." if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else inside
        yield from functions(child, within)


def test_functions_take_few_parameters() -> None:
    many = set()
    for path in SOURCES:
        place = path.relative_to(PACKAGE).as_posix()
        for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            given = function.args
            names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
            # Keywords of public names are documented one by one (tests/docs/test_site.py). Commands are public too.
            public = name.removesuffix(".__init__") in anchorhold.__all__
            if len(names) > MOST_PARAMETERS and not place.startswith("cli/") and not public:
                many.add(f"{place} {name}")
    assert not many, f"more than {MOST_PARAMETERS} parameters"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


# The order of imports ---------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_room_imports_only_from_the_rooms_below_it() -> None:
    if importlib.util.find_spec("importlinter") is None:
        pytest.skip("import-linter is not installed")
    check = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
