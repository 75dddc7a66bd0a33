"""Ctrl-C while the program is still being imported: one line and exit 130, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import anchorhold

pytestmark = pytest.mark.medium

# A module that takes long to import, in the place of one that the command line needs.
SLOW = """
import pathlib, time
pathlib.Path({mark!r}).touch()
for _ in range(5000):
    try:
        time.sleep(0.02)
    except BaseException:  # libraries in C swallow it too
        pass
"""


def _interruptible() -> None:
    """Tests that a shell started in the background ignore Ctrl-C, and so would their processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(tmp_path: Path, shadowed: str, *words: str) -> subprocess.CompletedProcess[str]:
    mark = tmp_path / "mark"
    place = tmp_path / "path" / f"{shadowed}.py"
    place.parent.mkdir()
    place.write_text(SLOW.format(mark=str(mark)))
    path = os.pathsep.join([str(place.parent), *filter(None, [os.environ.get("PYTHONPATH")]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "anchorhold", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        preexec_fn=_interruptible,
    )
    try:
        for _ in range(2400):  # a loaded machine is slow; it takes a tenth of a second
            if mark.exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        assert mark.exists(), process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.parametrize(
    ("shadowed", "words"),
    [
        ("typer", ["--help"]),  # before there is a command line
        ("torch", ["train", "digits", "--out", "run"]),  # while a command loads what it needs
    ],
)
def test_while_importing_it_is_one_line(shadowed: str, words: list[str], tmp_path: Path) -> None:
    done = interrupted(tmp_path, shadowed, *words)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    assert not (tmp_path / "run").exists()


def test_the_command_starts_where_the_signal_is_caught() -> None:
    import tomllib

    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert about["project"]["scripts"]["anchorhold"] == "anchorhold.__main__:main"
    code = "import signal, sys; before = set(sys.modules); import anchorhold.__main__"
    code += "; print(len(set(sys.modules) - before), signal.getsignal(2) is signal.default_int_handler)"
    src = str(Path(anchorhold.__file__).parents[1])  # -S leaves out what is installed
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": src},
        preexec_fn=_interruptible,
    )
    count, untouched = done.stdout.split()
    assert int(count) < 25 and untouched == "True"  # little is imported before it, and an import changes nothing
