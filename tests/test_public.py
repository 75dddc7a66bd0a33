"""The public names: guarded, lazy, and complete."""

import subprocess
import sys

import pytest

import anchorhold

PUBLIC = [
    "AnchorholdError",
    "Ascent",
    "Ball",
    "Budget",
    "Dataset",
    "Embedder",
    "Objective",
    "Split",
    "__version__",
    "ars",
    "ascend",
    "audit",
    "dataset",
    "embed",
    "ers",
    "export",
    "fit",
    "load",
    "resume",
    "search",
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


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import anchorhold", "torch timm torchvision sklearn matplotlib numpy"),
        ("import anchorhold; anchorhold.fit, anchorhold.Embedder", "timm torchvision sklearn matplotlib"),
    ],
)
def test_importing_loads_no_more_than_it_needs(statement: str, absent: str) -> None:
    check = f"import sys; {statement}; loaded = set('{absent}'.split()) & set(sys.modules); assert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
