"""What the package imports, pyproject.toml declares."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import anchorhold


@pytest.mark.medium
def test_every_import_is_declared() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    declared = {re.split(r"[<>=\[ ]", each)[0].lower() for each in wanted}
    owners = packages_distributions()
    missing = set()
    for file in Path(anchorhold.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            for name in {each.partition(".")[0] for each in names} - sys.stdlib_module_names - {"huggingface_hub"}:
                if not declared & {owner.lower() for owner in owners.get(name, [name])}:  # the hub comes with timm
                    missing.add(name)
    assert not missing
