"""The site builds without a warning, with its notebooks run; every public name is in its reference."""

import dataclasses
import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anchorhold as ah
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PICTURES = sorted((DOCS / "pictures").glob("*.png"))
NAMES = [name for name in ah.__all__ if name != "__version__"]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(ah, name))]
in_a_checkout = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="an sdist has no results")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    # As `./start docs` does. The folder of doctrees also holds the notebooks that were run.
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-E", "-q", "-b", "html", str(DOCS), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return out


@in_a_checkout
@pytest.mark.slow
def test_the_site_builds_and_every_door_is_in_it(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    doors = re.findall(r'class="door docutils container">.*?</ol>', home, re.S)
    assert len(doors) == 3
    for door in doors:
        assert len(re.findall(r"<li>", door)) == 4
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert pages <= {page.relative_to(site) for page in site.rglob("*.html")}


@in_a_checkout
@pytest.mark.slow
def test_notebooks_were_run(site: Path) -> None:
    for notebook in NOTEBOOKS:
        html = (site / "notebooks" / notebook.with_suffix(".html").name).read_text(encoding="utf-8")
        assert "cell_output" in html and "Traceback" not in html, notebook


@in_a_checkout
@pytest.mark.slow
def test_every_public_name_is_in_the_reference_once(site: Path) -> None:
    anchors: list[str] = []
    for page in (site / "api").glob("*.html"):
        anchors += re.findall(r'id="anchorhold\.(\w+)"', page.read_text(encoding="utf-8"))
    assert sorted(anchors) == sorted(NAMES)


def test_every_public_name_is_on_a_page_of_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:function|class):: anchorhold\.(\w+)$", text, re.M)
    assert sorted(named) == sorted(NAMES)


def test_the_first_page_of_the_reference_lists_every_public_name() -> None:
    text = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \[[^]]+\]\((\w+\.md)\) \| (.*) \|$", text, re.M)
    assert sorted(name for _, cell in table for name in re.findall(r"`(\w+)`", cell)) == sorted(NAMES)
    for page, cell in table:  # each where it says
        shown = (DOCS / "api" / page).read_text(encoding="utf-8")
        assert all(f":: anchorhold.{name}\n" in shown for name in re.findall(r"`(\w+)`", cell)), page


def test_what_the_example_of_extending_imports_is_in_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    named = re.findall(r"^\.\. auto(?:function|class):: anchorhold\.[\w.]*?(\w+)$", text, re.M)
    source = (ROOT / "examples" / "ideas.py").read_text(encoding="utf-8")
    used = {
        name for names in re.findall(r"^from anchorhold\.\S+ import (.+)$", source, re.M) for name in names.split(", ")
    }
    assert {"RecallGoal", "Step"} <= used <= set(named)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name: str) -> None:
    assert doctest.DocTestParser().get_examples(getattr(ah, name).__doc__)


def told(doc: str, head: str = "Args") -> list[str]:
    """The names under Args: or Attributes:, each with its text."""
    section = re.search(rf"^{head}:\n(.*?)(?=\n *\n|\Z)", inspect.cleandoc(doc), re.M | re.S)
    return re.findall(r"^ {4}\*{0,2}(\w+(?:, \w+)*): \S", section[1], re.M) if section else []


def parameters_of(value: Any) -> list[str]:
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception
        return []
    return [name for name in signature.parameters if name not in ("self", "args", "kwargs")]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_told_one_by_one(name: str) -> None:
    """Of a function with more than one, and of a class."""
    parameters = parameters_of(getattr(ah, name))
    if len(parameters) > 1 or name == "ers":
        assert told(getattr(ah, name).__doc__) == parameters


@pytest.mark.parametrize(("owner", "methods"), [(ah.Console, ("say", "task")), (ah.Callback, ("on_epoch", "on_end"))])
def test_arguments_of_messages_and_callbacks_are_told(owner: type, methods: tuple[str, ...]) -> None:
    for method in methods:
        value = getattr(owner, method)
        assert told(value.__doc__) == [name for name in parameters_of(value) if name != "self"]


def _shown() -> dict[str, Any]:
    """Every class in the reference that is no public name itself: what functions return, and what code is given."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    found = {}
    for module, name in re.findall(r"^\.\. autoclass:: (anchorhold\.[\w.]+)\.(\w+)$", text, re.M):
        found[name] = getattr(importlib.import_module(module), name)
    return found


SHOWN = _shown()
DESCRIBED = ("Audit", "Outcome", "ColumnValue", "Score", "ListAttack", "Single", "SmallestPerturbation", "Algorithm1")
DESCRIBED += ("Forecast", "Swept", "Found", "Step", "Batch", "Scene", "View")


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_field_of_a_result_is_told(name: str) -> None:
    assert told(SHOWN[name].__doc__, "Attributes") == [each.name for each in dataclasses.fields(SHOWN[name])]


@pytest.mark.parametrize("name", ["Run", "Index"])
def test_every_attribute_of_a_folder_is_told(name: str, tmp_path: Path) -> None:
    if name == "Index":
        (tmp_path / "index.json").write_text('{"schema": "anchorhold.index/1"}')
    assert told(SHOWN[name].__doc__, "Attributes") == list(vars(SHOWN[name](tmp_path)))


@pytest.mark.parametrize("name", SHOWN)
def test_every_method_in_the_reference_has_words(name: str) -> None:
    for each, value in vars(SHOWN[name]).items():
        value = getattr(value, "__func__", value)
        if not each.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)) and each != "log":
            assert value.__doc__, each


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if "+SKIP" in (getattr(ah, name).__doc__ or "")])
def test_examples_that_doctest_skips_run(name: str) -> None:
    """They take longer than an example may, not because they cannot run."""
    value = getattr(ah, name)
    text = value.__doc__.replace("# doctest: +SKIP", "")
    names = {**vars(sys.modules[value.__module__])}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_opens_in_colab(notebook: Path) -> None:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    first = "".join(code[0]["source"])
    assert '"google.colab" in sys.modules' in first and re.search(r"^    %pip install .*\banchorhold\b", first, re.M)
    assert (
        f"colab.research.google.com/github/anchorhold/anchorhold/blob/main/docs/notebooks/{notebook.name}"
        in "".join(cells[0]["source"])
    )


def test_pictures_are_small_and_drawn_by_a_script() -> None:
    assert {"hardness", "attack", "scores"} <= {picture.stem for picture in PICTURES}
    assert not [picture.name for picture in PICTURES if picture.stat().st_size > 200_000]
    for name in ("hardness", "attack", "scores"):
        assert (DOCS / "pictures" / f"{name}.py").is_file()


@in_a_checkout
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hardness", "scores"])
def test_a_script_draws_its_picture(name: str, tmp_path: Path) -> None:
    code = f"import pathlib, {name}; print({name}.main(pathlib.Path({str(tmp_path)!r})))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(DOCS / "pictures")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
