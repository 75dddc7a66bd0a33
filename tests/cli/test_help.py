"""Help: every command has a first sentence and an example that parses, in short sentences and plain words."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from anchorhold.cli import main as cli

COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
MOST_WORDS = 25
PRIVATE = re.compile(r"\b(whoever|nobody|to be had|so many|goes on|looks?|print's|in print)\b", re.IGNORECASE)
# What runs on a machine without data, in a second or two.
QUICK = ("settings", "recipes")


def example_of(name: str) -> str:
    return str(COMMANDS[name].help).rpartition("Example: ")[2]


def texts_of(name: str) -> list[str]:
    command = COMMANDS[name]
    prose = [part for part in str(command.help).split("\n\n") if not part.startswith("Example: ")]
    return [*prose, *(each.help for each in command.params if getattr(each, "help", None))]


def run(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses(name: str) -> None:
    program, command, *arguments = shlex.split(example_of(name))
    assert (program, command) == ("anchorhold", name) and len(example_of(name)) <= 78
    COMMANDS[name].make_context(name, arguments).close()  # an unknown option would raise


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_short_sentences_and_plain_words(name: str) -> None:
    assert all(getattr(each, "help", None) for each in COMMANDS[name].params if each.name != "help")
    for text in texts_of(name):
        assert not PRIVATE.search(text), text
        for sentence in re.split(r"(?<=[.;:])\s", text):
            assert len(sentence.split()) <= MOST_WORDS, sentence


@pytest.mark.parametrize("name", QUICK)
def test_examples_that_need_nothing_run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, example_of(name)) == 0
    assert len(capsys.readouterr().out.splitlines()) > 5


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import torch
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for shade in range(6):
        Image.new("RGB", (8, 8), (40 * shade, 90, 255 - 40 * shade)).save(tmp_path / "photos" / f"{shade}.png")
    Image.new("RGB", (8, 8), (80, 90, 175)).save(tmp_path / "query.png")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in ("train", "resume", "attack", "embed", "search", "push", "hardness"):
            assert run(monkeypatch, example_of(name)) == 0, capsys.readouterr().err
        assert run(monkeypatch, "anchorhold compare runs --sort r1") == 0
        assert run(monkeypatch, "anchorhold report runs") == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "after 3 epochs" in out and "written: runs/digits/training.html" in out
    assert (tmp_path / "card" / "README.md").is_file()
