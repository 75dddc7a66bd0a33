"""The public names: guarded, lazy, and complete."""

import json
import subprocess
import sys
from typing import Any

import pytest

import anchorhold

PUBLIC = [
    "AdversarialBatch",
    "AnchorholdError",
    "Ascent",
    "Ball",
    "Budget",
    "Callback",
    "Console",
    "Dataset",
    "Embedder",
    "Objective",
    "Problem",
    "Split",
    "Threat",
    "__version__",
    "adversary",
    "algorithm1",
    "ars",
    "ascend",
    "attack",
    "attack_list",
    "audit",
    "dataset",
    "embed",
    "ers",
    "estimate",
    "export",
    "fit",
    "list_settings",
    "load",
    "mine",
    "model_card",
    "resume",
    "search",
    "smallest_perturbation",
    "sweep",
    "wrap",
]


def test_the_list_of_public_names_changes_only_on_purpose() -> None:
    assert anchorhold.__all__ == PUBLIC == sorted(PUBLIC)
    assert dir(anchorhold) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(anchorhold, name)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'adit'"):
        _ = anchorhold.adit


# One process loads more and more. After each line these may not be there.
LOADS = [
    ("import anchorhold", "torch timm torchvision sklearn matplotlib numpy"),
    ("from anchorhold.cli.main import main; shown('--help')", "torch timm torchvision numpy"),
    ("import anchorhold.data.decode", "torch"),  # as a process that decodes images does
    ("import anchorhold.data.store, anchorhold.data.datasets, anchorhold.data.batches", "sklearn torchvision timm PIL"),
    ("import anchorhold.model.embedder", "timm torchvision"),
    ("anchorhold.fit, anchorhold.Embedder", "timm torchvision sklearn matplotlib"),
    ("import anchorhold.training.sweeping, anchorhold.report.plots", "matplotlib"),
]
SCRIPT = """
import contextlib, io, json, sys
said = io.StringIO()

def shown(*words):
    sys.argv = ["anchorhold", *words]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main()

found = []
for statement, absent in json.loads(sys.argv[1]):
    exec(statement)
    found.append(sorted(set(absent.split()) & set(sys.modules)))
print(json.dumps({"found": found, "help": said.getvalue()}))
"""


@pytest.fixture(scope="module")
def loaded() -> Any:
    command = [sys.executable, "-c", SCRIPT, json.dumps(LOADS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.medium
@pytest.mark.parametrize("line", range(len(LOADS)), ids=[statement for statement, _ in LOADS])
def test_importing_loads_no_more_than_it_needs(line: int, loaded: Any) -> None:
    assert not loaded["found"][line]


@pytest.mark.medium
def test_help_is_quick_because_torch_is_not_loaded(loaded: Any) -> None:
    assert not loaded["found"][1]
    for command in ("demo", "train", "resume", "recipes", "doctor"):
        assert command in loaded["help"]
