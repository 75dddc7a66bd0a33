"""The command line, in process: what it prints, what it writes, and one clear line for every mistake."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorhold import cli

QUICK = ["--set", "train.epochs=1", "--set", "batch.pairs=64", "--set", "model.dim=8", "--device", "cpu"]


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


def test_train_then_resume(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out, err = run(capsys, monkeypatch, "train", "digits", "--recipe", "natural", *QUICK, "--out", "runs/a")
    assert code == 0 and "run folder: runs/a" in out and "R@1" in out
    assert "training: 15 of 15" in err  # plain lines where there is no terminal
    assert json.loads((tmp_path / "runs/a/run.json").read_text())["status"] == "done"
    code, out, err = run(capsys, monkeypatch, "resume", "runs/a")
    assert code == 0 and "complete already" in err
    code, _, err = run(capsys, monkeypatch, "train", "digits", *QUICK, "--out", "runs/a")
    assert code == 2 and err == (
        "error: runs/a holds a run already; `anchorhold resume runs/a` goes on with it, or choose another --out\n"
    )


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
    assert code == 2 and "a/0.png" in err and "--on-bad-image skip" in err
    code, _, err = run(
        capsys, monkeypatch, "train", "photos", *QUICK, *small, "--out", "runs/r", "--on-bad-image", "skip"
    )
    assert code == 0 and "skipped 1 unreadable images" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "dgits"], "did you mean digits?"),
        (["train", "cub"], "--root"),
        (["train", "cub", "--root", "nowhere"], "nowhere"),
        (["train", "digits", "--recipe", "hm-lgaa"], "did you mean hm-lga?"),
        (["train", "digits", "--set", "defence.stps=3"], "did you mean defence.steps?"),
        (["train", "digits", "--set", "nonsense"], "--set wants key=value"),
        (["train", "digits", "--weights", "missing.pth"], "no such file"),
        (["train", "digits", "--device", "cuda:77"], "CUDA"),
        (["train", "digits", "--device", "tpu"], "--device"),
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


def test_debug_shows_the_traceback(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anchorhold.errors import RunError

    monkeypatch.setattr(sys, "argv", ["anchorhold", "--debug", "resume", "nowhere"])
    with pytest.raises(RunError):
        cli.main()
    monkeypatch.delenv("ANCHORHOLD_DEBUG")


def test_recipes_and_doctor(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "recipes")
    assert code == 0 and "hm-lga " in out and "base" not in out
    code, out, _ = run(capsys, monkeypatch, "recipes", "show", "hm-lga")
    assert code == 0 and 'destination = "lga"' in out
    code, out, _ = run(capsys, monkeypatch, "doctor")
    assert code == 0 and "torch" in out and "timm backbones" in out


def test_help_is_quick_because_torch_is_not_loaded() -> None:
    script = (
        "import sys; sys.argv = ['anchorhold', '--help']\n"
        "from anchorhold.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert not {'torch', 'numpy', 'timm'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "train", "resume", "recipes", "doctor"):
        assert command in done.stdout
