"""Files are written whole or not at all, through no link, and one line says why one could not be."""

import errno
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from anchorhold.errors import DataError, RunError
from anchorhold.model.embedder import Embedder
from anchorhold.runs.folder import Run
from anchorhold.runs.locks import tidy
from anchorhold.runs.writing import atomic
from tests.children import forked


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file larger than `size` bytes, as by ulimit -f."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_over_the_limit_of_file_sizes_is_one_line_and_the_last_one_stays(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    run.save({"w": torch.ones(1)}, {"step": 1})
    with at_most(4096), pytest.raises(RunError, match=r"last\.safetensors .*ulimit -f.*resume"):
        run.save({"w": torch.zeros(4096)}, {"step": 2})
    assert (run.load() or ({}, {}))[1] == {"step": 1}
    assert {each.name for each in tmp_path.iterdir()} == {"run.json", "last.safetensors"}


def too_long(path: Path) -> None:
    Run(path).append({"epoch": 1, "text": "x" * 9000})


def too_large(path: Path) -> None:
    Run(path).write_json({"text": "x" * 9000})


def export(path: Path) -> None:
    Embedder("test_resnet", 8, channels=1, size=(8, 8)).save(path / "model.safetensors")


@pytest.mark.parametrize("write", [too_long, too_large, export])
def test_other_files_over_the_limit_are_one_line_that_names_them(tmp_path: Path, write: Callable[[Path], None]) -> None:
    Run.create(tmp_path, {})
    with at_most(4096), pytest.raises(RunError, match=r"(metrics\.jsonl|run\.json|model\.safetensors) .*ulimit -f"):
        write(tmp_path)


@pytest.mark.parametrize(
    ("number", "word"), [(errno.EDQUOT, "quota"), (errno.EIO, "input/output"), (errno.ENOSPC, "disk is full")]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_quota_and_input_output_errors_are_one_line(tmp_path: Path, number: int, word: str, wrapped: bool) -> None:
    from safetensors import SafetensorError

    run = Run.create(tmp_path, {})
    run.save({"w": torch.ones(1)}, {"step": 1})
    reason = os.strerror(number)
    text = f"Error while serializing: I/O error: {reason} (os error {number})"
    error = SafetensorError(text) if wrapped else OSError(number, reason)
    with mock.patch("safetensors.torch.save_file", side_effect=error), pytest.raises(RunError, match=word) as told:
        run.save({"w": torch.zeros(1)}, {"step": 2})
    assert "last.safetensors" in str(told.value) and "\n" not in str(told.value)
    assert (run.load() or ({}, {}))[1] == {"step": 1}
    with mock.patch("os.fsync", side_effect=OSError(number, reason)), pytest.raises(RunError, match=word):
        run.write_json({"status": "new"})
    assert "status" not in run.read_json()


def test_an_error_of_the_writer_itself_is_not_taken_for_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), atomic(tmp_path / "x"):
        raise ValueError("mine")
    assert not list(tmp_path.iterdir())


def test_an_error_about_another_file_is_not_taken_for_this_one(tmp_path: Path) -> None:
    missing = tmp_path / "image.jpg"
    with pytest.raises(FileNotFoundError) as caught, atomic(tmp_path / "x"):
        missing.read_bytes()
    assert caught.value.filename == str(missing)
    with pytest.raises(DataError, match="Errno 28"), atomic(tmp_path / "x"):
        raise DataError("something of ours, [Errno 28] in its text")


def test_no_link_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "page.html").symlink_to(victim)
    (folder / f".page.html.{os.getpid()}.part").symlink_to(victim)
    with atomic(folder / "page.html") as temporary:
        assert os.lstat(temporary.parent).st_mode & 0o077 == 0
        temporary.write_text("ours")
    assert victim.read_text() == "theirs"
    assert (folder / "page.html").read_text() == "ours" and not (folder / "page.html").is_symlink()
    (folder / "metrics.jsonl").symlink_to(victim)
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        Run(folder).append({"epoch": 1})
    assert victim.read_text() == "theirs"


def test_temporary_names_cannot_be_guessed_and_vanish(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        with atomic(tmp_path / "x") as temporary:
            temporary.write_text("")
            names.add(temporary.parent.name)
    assert len(names) == 3 and not any(str(os.getpid()) in name for name in names)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    with atomic(tmp_path / ("é" * 120)) as temporary:  # as long a name as a file can have
        temporary.write_text("")


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    with atomic(tmp_path / "x") as temporary:
        temporary.write_text("")
        temporary.chmod(0o600)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "x")}
    assert len(modes) == 1


def test_what_a_killed_process_left_is_tidied_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", {})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("")

    def dies() -> None:
        with atomic(run.path / "last.safetensors") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(dies), 0)
    (left,) = run.path.glob(".*.part")
    (run.path / ".movie.mkv.part").write_text("of somebody else")
    (run.path / ".y.13.anchorhold.part").symlink_to(outside)
    with atomic(run.path / "training.html") as temporary:
        temporary.write_text("page")
        tidy(run.path)
        assert temporary.exists()
    kept = {"run.json", "training.html", ".movie.mkv.part", ".y.13.anchorhold.part"}
    assert not left.exists() and {each.name for each in run.path.iterdir()} == kept
    assert (outside / "mine").exists()
