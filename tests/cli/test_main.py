"""The command line, in process: what it prints, what it writes, and one clear line for every mistake."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorhold.cli import main as cli
from tests.report.invented import a_run

QUICK = [
    "--set",
    "train.epochs=1",
    "--set",
    "batch.pairs=64",
    "--set",
    "batch.images=64",
    "--set",
    "model.dim=8",
    "--device",
    "cpu",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.medium
def test_train_then_resume(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, err = run(capsys, monkeypatch, "train", "digits", "--recipe", "natural", *QUICK, "--out", "runs/a")
    assert code == 0 and "run folder: runs/a" in out and "R@1" in out and "after 1 epoch\n" in out
    assert "training: 15 of 15" in err  # plain lines where there is no terminal
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "done"
    code, out, err = run(capsys, monkeypatch, "resume", "runs/a")
    assert code == 0 and "already complete" in err
    code, _, err = run(capsys, monkeypatch, "train", "digits", *QUICK, "--out", "runs/a")
    assert code == 2 and err == (
        "error: runs/a already holds a run; to resume it, run `anchorhold resume runs/a`, or choose another --out\n"
    )


@pytest.mark.medium
def test_a_folder_of_photographs(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from PIL import Image

    for name in "abcde":
        for index in range(4):
            path = tmp_path / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (40 * "abcde".index(name), 20 * index, 90)).save(path)
    small = ["--set", "data.resize=10", "--set", "data.crop=8", "--set", "model.backbone=small", "--weights", "none"]
    code, out, err = run(capsys, monkeypatch, "train", "photos", *QUICK, *small, "--out", "runs/p")
    assert code == 0 and "run folder" in out
    assert "held out" in err  # which classes are tested on was said
    (tmp_path / "photos" / "a" / "0.png").write_bytes(b"not an image")
    code, _, err = run(capsys, monkeypatch, "train", "photos", *QUICK, *small, "--out", "runs/q")
    assert code == 2 and "a/0.png" in err and "--set data.on_bad_image=skip" in err
    code, _, err = run(
        capsys, monkeypatch, "train", "photos", *QUICK, *small, "--out", "runs/r", "--on-bad-image", "skip"
    )
    assert code == 0 and "skipped 1 unreadable image of" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "dgits"], "did you mean digits?"),
        (["train", "cub"], "--root"),
        (["train", "cub", "--root", "nowhere"], "nowhere"),
        (["train", "cub", "--set", "data.root=nowhere"], "nowhere"),
        (["train", "digits", "--set", "data.name=cub"], "you gave two data sets, digits and --set data.name=cub"),
        (["train", ".", "--root", "nowhere"], ". is the folder itself"),
        (["train", ".", "--set", "data.root=nowhere"], ". is the folder itself"),
        (["train", "digits", "--set", "data=3"], "data is a section"),
        (["train", "digits", "--set", "train=3", "--epochs", "1"], "train is a section"),
        (["train", "digits", "--root", "nowhere"], "digits needs no files; leave out --root"),
        (["train", __file__], "test_main.py is a file but not a .csv"),
        (["train", "digits", "--recipe", "hm", "--set", "defence.name=act"], "choose --recipe act"),
        (["train", "digits", "--epochs", "0"], "train.epochs must be at least 1"),
        (["train", "digits", "--recipe", "hm-lgaa"], "did you mean hm-lga?"),
        (["train", "digits", "--set", "defence.stps=3"], "did you mean defence.steps?"),
        (["train", "digits", "--set", "nonsense"], "--set needs KEY=VALUE"),
        (["train", "digits", "--weights", "missing.pth"], "no such file"),
        (["train", "digits", "--device", "cuda:77"], "CUDA"),
        (["train", "digits", "--device", "tpu"], "--device"),
        (["train", "digits", "--out", "a" * 300], "aaa"),  # which the system refuses even to look for
        (["train", "cub", "--root", "a" * 300], "aaa"),
        (["audit", "a" * 300, "--data", "digits"], "aaa"),
        (["compare", "a" * 300], "aaa"),
        (["resume", "nowhere"], "no run.json"),
        (["recipes", "show", "natrual"], "did you mean natural?"),
        (["recipes", "shwo", "natural"], "usage: anchorhold recipes"),
    ],
)
def test_mistakes_are_one_line_and_exit_two(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    code, _, err = run(capsys, monkeypatch, *arguments)
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_what_the_system_refuses_without_a_file_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(10, "No child processes")

    monkeypatch.setattr("anchorhold.training.fit.fit", refuse)
    monkeypatch.setattr("anchorhold.cli.train.fit", refuse, raising=False)
    monkeypatch.setattr(sys, "argv", ["anchorhold", "train", "digits"])
    with pytest.raises(OSError, match="child"):
        cli.main()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "data/x"), "data/x: Permission denied; "),
        (OSError(36 if sys.platform == "linux" else 63, "File name too long", "aaa"), "aaa: File name too long; "),
        (OSError(28, "No space left on device"), "No space left on device; "),
        (FileNotFoundError(2, "No such file or directory", "git"), ""),  # of a program or of the package: no user's
    ],
)
def test_what_the_system_refuses_is_one_line(error: OSError, words: str) -> None:
    from anchorhold.cli.app import _message

    told = _message(error)
    assert told.startswith(words) and bool(told) == bool(words)


@pytest.mark.parametrize("arguments", ["--debug resume nowhere", "resume nowhere --debug", "resume nowhere"])
def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    from anchorhold.errors import RunError

    if "--debug" not in arguments:
        monkeypatch.setenv("ANCHORHOLD_DEBUG", "1")
    before = dict(os.environ)
    monkeypatch.setattr(sys, "argv", ["anchorhold", *arguments.split()])
    with pytest.raises(RunError):
        cli.main()
    assert dict(os.environ) == before


def test_debug_is_in_the_help_with_its_variable(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ANCHORHOLD_DEBUG" in run(capsys, monkeypatch, "--help")[1]


def test_a_recipe_may_say_where_the_data_lie(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("extends = 'natural'\n[data]\nroot = 'over-there'\n")
    code, _, err = run(capsys, monkeypatch, "train", "cub", "--recipe", "r.toml")
    assert code == 2 and "over-there" in err
    code, _, err = run(capsys, monkeypatch, "train", "cub", "--recipe", "r.toml", "--root", "here")
    assert code == 2 and "over-there" not in err and "here" in err


@pytest.mark.medium
def test_resume_is_told_where_the_data_lie_now(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from anchorhold.errors import RunError
    from anchorhold.training import fit as training

    def resume(out: Path, **options: Any) -> None:
        raise RunError(f"{out} {options['root']}")

    monkeypatch.setattr(training, "resume", resume)
    assert run(capsys, monkeypatch, "resume", "runs/a", "--root", "moved")[2] == "error: runs/a moved\n"


def test_ctrl_c_is_one_word(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anchorhold.cli import doctor
    from anchorhold.errors import Interrupted

    def stop(error: BaseException) -> Any:
        raise error

    for error, word in ((KeyboardInterrupt(), "stopped\n"), (Interrupted("saved"), "saved\n")):
        monkeypatch.setattr(doctor, "findings", lambda error=error: stop(error))
        assert run(capsys, monkeypatch, "doctor") == (130, "", word)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(
            ["train", "digits", "--recipe", "natural", *QUICK, "--out", "runs/a"],
            0,
            marks=pytest.mark.slow,
            id="train",
        ),
        (["recipes"], 0),
        pytest.param(["resume", "x"], 2, marks=pytest.mark.slow, id="resume"),
        (["compare", "compared", "--out", "z.md"], 0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_a_reader_who_has_gone_ends_no_work(tmp_path: Path, arguments: list[str], code: int, closed: str) -> None:
    a_run(tmp_path / "compared" / "a")
    (tmp_path / "compared" / "run.json").write_text("{")  # which has to be told
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "anchorhold", *arguments],
        stdout=writes,
        stderr=writes if closed == "both" else subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1" if closed == "both" else ""},  # each meets the loss elsewhere
        text=True,
        check=False,
    )
    os.close(writes)
    assert done.returncode == code, done.stderr
    assert not done.stderr or ("BrokenPipe" not in done.stderr and "ignored" not in done.stderr)
    if arguments[0] == "train":
        assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "done"
        assert (tmp_path / "runs/a/model.safetensors").exists()
    assert arguments[0] != "compare" or (tmp_path / "z.md").exists()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["recipes"], 0),
        (["compare", "x"], 2),
        pytest.param(["resume", "x"], 2, marks=pytest.mark.slow),
        pytest.param(["train", "dgits"], 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("closed", [[2], [1, 2]])
def test_where_nobody_listens_the_exit_code_is_the_same(arguments: list[str], code: int, closed: list[int]) -> None:
    """As under a service manager: standard error, or both, are closed from the beginning."""
    words = " ".join(map(shlex.quote, [sys.executable, "-m", "anchorhold", *arguments]))
    done = subprocess.run(
        ["sh", "-c", f"{words} {' '.join(f'{each}>&-' for each in closed)}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert closed == [1, 2] or done.stdout  # an error too: standard output is left


@pytest.mark.slow
def test_a_published_row_is_shown_as_a_recipe(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dataclasses import replace

    from anchorhold.config.recipes import settings_from
    from anchorhold.reproduce.rows import row_settings, rows

    for row in rows():
        code, out, _ = run(capsys, monkeypatch, "recipes", "show", row.id)
        assert code == 0 and ("R@1" not in row.published or f"R@1 {row.published['R@1']:g}" in out)
        (tmp_path / "row.toml").write_text(out)
        asked = {"data": {"name": row.data}}
        shown = replace(settings_from(str(tmp_path / "row.toml"), asked), recipe=row.recipe)
        assert shown == settings_from(row.recipe, row_settings(row) | asked), row.id


def test_recipes_and_doctor(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "recipes")
    assert code == 0 and "hm-lga " in out and "base " not in out
    code, out, _ = run(capsys, monkeypatch, "recipes", "show", "hm-lga")
    assert code == 0 and 'destination = "lga"' in out
    code, out, _ = run(capsys, monkeypatch, "doctor")
    assert code == 0 and "torch" in out and "timm backbones" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit"], "missing argument 'model'; see `anchorhold audit --help`"),
        (["search"], "missing argument 'index'; see `anchorhold search --help`"),
        (["trian"], "no such command 'trian', did you mean train?; see `anchorhold --help`"),
        (["--foo"], "no such option: --foo; see `anchorhold --help`"),
        (["audit", "x", "--limt", "3"], "no such option: --limt, did you mean --limit?; see `anchorhold audit --help`"),
        (
            ["audit", "x", "--limit", "many"],
            "invalid value for '--limit': it must be a whole number; see `anchorhold audit --help`",
        ),
        (["train", "--epochs"], "option '--epochs' requires an argument; see `anchorhold train --help`"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    assert run(capsys, monkeypatch, *arguments) == (2, "", f"error: {message}\n")


def test_no_command_at_all_is_help(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out, err = run(capsys, monkeypatch)
    assert "Usage: " in out + err and "error" not in err
