"""Every command and every piece of Python on the pages runs, page by page, in a folder with photos and small models.

Blocks marked `% not run: why` are parsed: options and settings of commands, the syntax of Python.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image

import anchorhold as ah
from anchorhold.cli.main import app, main
from anchorhold.config.recipes import parse_assignments, settings_from, usual_recipe
from tests.docs.pages import LANGUAGES, PAGES, README, ROOT, Block, blocks_of, called, commands_of, words_of
from tests.docs.shortened import shortened

ALL = [README, *PAGES]
TEXTS = {page: page.read_text(encoding="utf-8") for page in ALL}
BLOCKS = {page: blocks_of(text) for page, text in TEXTS.items()}
ELSEWHERE = ("pip", "git", "cd", "./start", "uv", "open", "docker", "curl", "srun")  # installs, fetches or shows


# Typer brings a click of its own, whose classes have no public place.
Refused: type[Exception] = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")


# What a page may take for granted: the usual imports, and a model of the reader's.
BEFORE = """
import torch
from torch import Tensor, nn
import anchorhold as ah
net = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""
# Labels that the shortened commands do not print: one epoch, too few queries for the worst classes, no curve, seconds.
# And a class of the reader's photos.
LESS = {
    "docs/audit/quick-start.md": {"epochs", "worst"},
    "docs/guides/comparing.md": {"strong", "at"},
    "docs/guides/searching.md": {"cup"},
    "docs/train/quick-start.md": {"epochs", "min"},
}
_FOLDER = r"\b(?:runs|audits)/[\w-]+"


def ids(page: Path) -> str:
    return called(page)


# ---- what every block has -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ALL, ids=ids)
def test_every_block_says_its_language(page: Path) -> None:
    unknown = [f"line {block.line}: {block.language!r}" for block in BLOCKS[page] if block.language not in LANGUAGES]
    assert not unknown


def parsed(words: list[str]) -> Any:
    """The context of a command line: every option exists and has a value of its type. Nothing runs."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("anchorhold", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            break
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    return context


def check_command(command: str) -> None:
    """Options exist, and settings that are given by --set are valid."""
    words = words_of(command)
    if "-m" in words and "anchorhold" in words[words.index("-m") + 1 :][:1]:  # torchrun … -m anchorhold …
        words = words[words.index("-m") + 1 :]
    if not words or words[0] != "anchorhold":
        return
    with contextlib.redirect_stdout(io.StringIO()):
        context = parsed(words[1:])
    if context.info_name == "train" and "--set" in words:
        changes = parse_assignments(after for before, after in pairwise(words) if before == "--set")
        recipe = next((after for before, after in pairwise(words) if before == "--recipe"), usual_recipe(changes))
        if not recipe.endswith(".toml") and ":" not in " ".join(words):
            data = words[words.index("train") + 1]
            known = {"data": {"name": data}} if re.fullmatch(r"[a-z]+", data) else {}
            settings_from(recipe, changes | known)


@pytest.mark.parametrize("page", ALL, ids=ids)
def test_commands_that_are_not_run_have_options_that_exist(page: Path) -> None:
    for block in BLOCKS[page]:
        if block.not_run and block.language in ("bash", "console"):
            for command, _ in commands_of(block):
                try:
                    check_command(command)
                except (Refused, ah.AnchorholdError) as error:
                    told = getattr(error, "format_message", error.__str__)()
                    pytest.fail(f"{called(page)}:{block.line}: {command}: {told}")
        elif block.not_run and block.language == "python":
            compile(block.code, f"{called(page)}:{block.line}", "exec")


@pytest.mark.parametrize("page", ALL, ids=ids)
def test_trainings_of_a_page_can_run_one_after_the_other(page: Path) -> None:
    """Each names the folder of its data set, and writes to a folder of its own: one that holds a run is refused."""
    taken: set[str] = set()
    for block in BLOCKS[page]:
        for command, _ in commands_of(block) if block.language in ("bash", "console") else []:
            if not command.startswith("anchorhold train ") or "--dry-run" in command:
                continue
            options = vars(parsed(words_of(command)[1:]))["params"]
            assert options["data"] not in ("cub", "cars", "sop", "inshop") or options["root"], command
            out = str(options["out"] or f"runs/{options['data']}-{options['recipe']}")
            assert out not in taken, f"{called(page)}:{block.line}: {command}"
            taken.add(out)


# ---- running ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/ with eight classes, a list of them, a query, and two run folders and an audit."""
    import numpy as np

    place = tmp_path_factory.mktemp("world")
    rng, lines = np.random.default_rng(0), ["path,label"]
    for number in range(8):
        base = rng.integers(0, 256, 3)
        folder = place / "photos" / f"class{number}"
        folder.mkdir(parents=True)
        for copy in range(6):
            pixels = (base + rng.normal(0, 20, (24, 24, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{copy}.jpg")
            lines.append(f"photos/class{number}/{copy}.jpg,class{number}")
    for name in ("list.csv", "photos.csv"):
        (place / name).write_text("\n".join(lines) + "\n")
    for name in ("query.jpg", "cat.jpg", "cup.jpg"):
        shutil.copy(place / "photos" / "class0" / "0.jpg", place / name)
    with contextlib.chdir(place), shortened():
        ah.fit(None, "digits", "natural", place / "given" / "digits", device="cpu")
        ah.fit(None, "photos/", "natural", place / "given" / "photos", device="cpu")
        ah.audit(ah.load(place / "given" / "digits"), "digits", seed=1).save(place / "given" / "audit")
    return place


def words_in(text: str) -> set[str]:
    """The labels of an output: its words, without numbers and without what an ellipsis leaves open."""
    text = re.sub(r"\S*…\S*", " ", text)
    return {word for word in re.findall(r"[^\W\d_][\w@]*", text) if not re.search(r"\d", word.replace("R@1", ""))}


class Page:
    """A page that runs: its folder, its Python names, and what went wrong."""

    def __init__(self, page: Path, place: Path, world: Path) -> None:
        self.page, self.place, self.world = page, place, world
        self.names: dict[str, Any] = {"__name__": f"page_{page.stem.replace('-', '_')}"}
        self.problems: list[str] = []

    def run(self, blocks: list[Block]) -> None:
        exec(BEFORE, self.names)
        run = [block.code for block in blocks if not block.not_run]
        made = {
            word for code in run for word in re.findall(r"(?:--out[ =]|out=\"|save\(\")((?:runs|audits)/[\w-]+)", code)
        }
        made |= {word for code in run for call in re.findall(r"fit\([^)]*", code) for word in re.findall(_FOLDER, call)}
        for name in sorted({word for code in run for word in re.findall(_FOLDER, code)} - made):
            self.give(name, "audit" if name.startswith("audits/") else "photos" if "photo" in name else "digits")
        for block in blocks:
            for given in block.given:
                self.give(*given.split())
            if block.file:
                path = self.place / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.code + "\n", encoding="utf-8")
            if not block.not_run:
                self.one(block)

    def give(self, name: str, kind: str = "digits") -> None:
        shutil.rmtree(self.place / name, ignore_errors=True)
        shutil.copytree(self.world / "given" / kind, self.place / name)

    def one(self, block: Block) -> None:
        where = f"{called(self.page)}:{block.line}"
        for line in block.setup:
            self.python(line, f"{where} (setup)")
        if block.language == "python":
            self.python(block.code, where)
        elif block.language in ("bash", "console"):
            for command, printed in commands_of(block):
                self.command(command, printed, where)

    def python(self, code: str, where: str) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, where, "exec"), self.names)
        except Exception:
            self.problems.append(f"{where}\n{code}\n{traceback.format_exc(limit=-3)}")

    def command(self, command: str, printed: list[str], where: str) -> None:
        words = [] if "<<" in command else words_of(command)
        if words[:1] and words[0] in ELSEWHERE:
            return
        simple = words[:1] == ["anchorhold"] and not re.search(r"[|<>;&*$]", command)
        code, said = self.inside(words[1:]) if simple else self.outside(command)
        wanted = 2 if any(line.startswith("error: ") for line in printed) else 0
        if code != wanted:
            self.problems.append(f"{where}: {command}\nexit {code}, not {wanted}\n{said[-1500:]}")
        for line in printed:
            if line.startswith("error: ") and line.rstrip("…") not in " ".join(said.split()):
                self.problems.append(f"{where}: {command}\nprints {said!r}, not {line!r}")
            if code == 0 and (absent := words_in(line) - words_in(said) - LESS.get(called(self.page), set())):
                self.problems.append(f"{where}: {command}\nprints no {', '.join(sorted(absent))}: {said[-3000:]}")

    def inside(self, words: list[str]) -> tuple[int, str]:
        said, before = io.StringIO(), sys.argv
        sys.argv = ["anchorhold", *words]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception:
            return 1, said.getvalue() + traceback.format_exc(limit=-3)
        finally:
            sys.argv = before
        return code, said.getvalue()

    def outside(self, command: str) -> tuple[int, str]:
        """In bash, where `anchorhold` is the shortened one."""
        shim = self.place.parent / "bin"
        shim.mkdir(exist_ok=True)
        tool = shim / "anchorhold"
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tests.docs.shortened "$@"\n')
        tool.chmod(0o755)
        paths = [str(ROOT / "src"), str(ROOT), str(self.place)]
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(shim), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(
            ["bash", "-ec", command], cwd=self.place, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr


RUN = [page for page in ALL if any(b.language in ("bash", "console", "python") and not b.not_run for b in BLOCKS[page])]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=ids)
def test_the_snippets_of_a_page_run(page: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "here"
    shutil.copytree(world, place, ignore=shutil.ignore_patterns("given"))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    before = set(sys.modules)
    running = Page(page, place, world)
    try:
        with shortened():
            running.run(BLOCKS[page])
    finally:  # modules that the page wrote
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(place)):
                del sys.modules[name]
    assert not running.problems, "\n\n".join(running.problems)


NUMBER = re.compile(r"(?<![@\w.])\d+(?:\.\d+)?")  # not the 1 of R@1


def masked(line: str) -> str:
    """A line of output without its numbers and the width of its columns."""
    return re.sub(r"\s+", "", NUMBER.sub("#", line))


def unlike(printed: list[str], said: str, most: float) -> list[str]:
    """The lines of a page that the output lacks, or has with a number that is further than `most` from the page's."""
    lines: dict[str, list[str]] = {}
    for line in said.splitlines():
        lines.setdefault(masked(line), []).append(line)
    wrong = []
    for line in printed:
        told = [float(number) for number in NUMBER.findall(line)]
        found = [[float(number) for number in NUMBER.findall(each)] for each in lines.get(masked(line), [])]
        near = any(all(abs(a - b) <= most for a, b in zip(each, told, strict=True)) for each in found)
        wrong += [] if near or line.strip() in ("", "…") else [line]
    return wrong


def test_a_printed_number_that_is_far_off_is_found() -> None:
    said = "R@1      87.5   2.5\nother 3"
    assert unlike(["R@1  85.0   5.0", "…", ""], said, 2.5) == []
    for line in ("R@1  84.9   2.5", "R@1  87.5", "R@2  87.5   2.5", "gone"):
        assert unlike([line], said, 2.5) == [line]


@pytest.mark.slow
def test_the_quick_start_and_the_comparison_print_what_the_pages_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At full size, two to three minutes: the numbers of the pages, within three of their 40 queries."""
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("audit/quick-start.md", "guides/comparing.md"):  # the second uses the model and audit of the first
        block = next(block for block in BLOCKS[ROOT / "docs" / name] if block.language == "console")
        for command, printed in commands_of(block):
            words = [sys.executable, "-m", *words_of(command)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            assert not unlike(printed, done.stdout, 7.5), done.stdout


def as_shown(line: str, said: str) -> bool:
    """Whether the output has this line of a page; … stands for anything."""
    parts = (re.escape(part) for part in line.rstrip().split("…"))
    return re.search(f"^{'.*'.join(parts)} *$", said, re.M) is not None


LISTED = [
    (page, block.line, command, printed)
    for page in ALL
    for block in BLOCKS[page]
    if block.language == "console" and not block.not_run
    for command, printed in commands_of(block)
    if re.match(r"anchorhold (?:recipes|settings)\b", command) and printed
]


@pytest.mark.parametrize(("page", "line", "command", "printed"), LISTED, ids=[f"{called(e[0])}:{e[1]}" for e in LISTED])
def test_lists_are_shown_as_they_are_printed(
    page: Path, line: int, command: str, printed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last digit: rows with their published numbers, recipes, settings."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(sys, "argv", words_of(command))
        main()
    said = capsys.readouterr().out
    assert not [each for each in printed if not as_shown(each, said)], said


def test_a_line_that_is_not_printed_is_found() -> None:
    assert as_shown("a … 38.0", "x\na b 38.0  \ny") and as_shown("…", "x") and as_shown("", "a\n\nb")
    assert not as_shown("a … 38.1", "x\na b 38.0\ny") and not as_shown("b 38.0", "a b 38.0")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```python\nx = 1\n```", [("python", "", "")]),
        ("% not run: needs CUB\n```bash\nanchorhold demo\n```", [("bash", "needs CUB", "")]),
        ("<!-- not run: slow -->\n```bash\nls\n```", [("bash", "slow", "")]),
        ("In `models.py`:\n\n```python\nx = 1\n```", [("python", "", "models.py")]),
        ("% not run: a\n\ntext\n\n```text\nb\n```\n```{note}\nc\n```", [("text", "", "")]),
    ],
)
def test_how_blocks_are_read(text: str, found: list[tuple[str, str, str]]) -> None:
    assert [(block.language, block.not_run, block.file) for block in blocks_of(text)] == found


def test_an_option_that_does_not_exist_is_found() -> None:
    check_command("anchorhold train cub --root X --recipe hm-lga --set optimiser.lr=1e-3")
    with pytest.raises(Refused):
        check_command("anchorhold train cub --recipee hm-lga")
    with pytest.raises(ah.AnchorholdError):
        check_command("anchorhold train cub --recipe hm-lga --set optimiser.rate=1e-3")
