"""The files beside the code: they parse, they agree with each other, and they name what exists."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from anchorhold.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "anchorhold"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))

in_a_checkout = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="an sdist has no .github")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_the_citation_agrees_with_the_project() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert citation["title"].lower() == PROJECT["name"]
    assert str(citation["version"]) == __version__
    assert citation["license"] == PROJECT["license"]
    assert set(PROJECT["keywords"]) - {"metric learning"} <= set(citation["keywords"])
    assert len(citation["references"]) == 4
    for each in (citation, *citation["references"]):
        assert each["type"] and each["title"] and each["authors"]


@in_a_checkout
def test_workflows_have_jobs_with_steps() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"tests", "release"}
    for path in WORKFLOWS:
        flow = read(path)
        assert flow["name"] == path.stem and flow[True], path  # YAML 1.1 reads the key `on` as true
        assert flow["permissions"] == {"contents": "read"}, path
        for job in flow["jobs"].values():
            assert job["runs-on"] and job["steps"]
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])
            assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


@in_a_checkout
def test_the_oldest_python_is_tested() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["fast"]["strategy"]["matrix"]
    assert matrix["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    assert all(isinstance(version, str) for version in matrix["python"])  # 3.10 as a number would be 3.1


@in_a_checkout
def test_issue_forms_ask_for_something() -> None:
    forms = [path for path in FORMS if path.stem != "config"]
    assert len(forms) >= 3
    for path in forms:
        form = read(path)
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert ids and len(ids) == len(set(ids)), path


def test_hooks_use_the_tools_of_the_environment() -> None:
    place = ROOT / ".pre-commit-config.yaml"
    if not place.exists():
        pytest.skip("an sdist has no hooks")
    (repository,) = read(place)["repos"]
    assert repository["repo"] == "local"
    tools = {"ruff": "ruff", "mypy": "mypy", "lint-imports": "import-linter"}
    developing = {re.split(r"[<>=\[]", each)[0] for each in PROJECT["optional-dependencies"]["dev"]}
    for hook in repository["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert hook["language"] == "system" and tools[tool] in developing


# The walk of CONTRIBUTING.md -------------------------------------------------------------------------------


def walk() -> list[str]:
    """The section, without comments."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## A stranger's walk\n.*?(?=^## )", page, re.M | re.S)
    return [re.sub(r" *<!--.*?-->", "", line) for line in section.strip().splitlines()]


def files_of_the_walk() -> list[list[str]]:
    """The files that each of its two lists names, in order."""
    lists = re.split(r"^From .*$", "\n".join(walk()), flags=re.M)[1:]
    return [re.findall(r"`([\w/-]+\.(?:py|toml))`", each) for each in lists]


def imports_of(name: str) -> set[str]:
    """The modules of the package that a file imports at its top, as files."""
    found = set()
    for node in ast.parse((PACKAGE / name).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = (PACKAGE / name).parents[node.level - 1]
            stem = folder.joinpath(*(node.module or "").split("."))
            inside = [stem / alias.name for alias in node.names]
            found |= {each.with_suffix(".py") for each in (stem, *inside)}
    return {path.relative_to(PACKAGE).as_posix() for path in found if path.is_file()}


def test_the_walk_names_each_file_once() -> None:
    training, audit = files_of_the_walk()
    files = [*training, *audit]
    assert len(walk()) <= 40 and len(training) > 15 and len(audit) > 10
    assert len(files) == len(set(files))
    assert not [name for name in files if not (PACKAGE / name).is_file()]


def test_the_walk_takes_no_step_back() -> None:
    for files in files_of_the_walk():
        for place, name in enumerate(files):
            if name.endswith(".py"):
                assert not imports_of(name) & set(files[place + 1 :]), name
