"""One writer at a time in a folder, and a killed one keeps nobody out."""

import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from PIL import Image

import anchorhold as ah
from anchorhold.console import Silent
from anchorhold.distributed import Ranks
from anchorhold.errors import RunError
from anchorhold.index.embedding import embed
from anchorhold.runs.locks import LOCK, one_writer
from anchorhold.training.sweeping import sweep
from tests.children import forked, killed

SMALL = {
    "model": {"backbone": "small", "dim": 8, "weights": "", "freeze_batchnorm": False},
    "batch": {"pairs": 16, "mining_pairs": 0},
    "train": {"epochs": 1, "precision": "fp32"},
}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """The folder is locked by another process, whose number is given."""
    ready, told = os.pipe()

    def holds() -> None:
        with one_writer(folder, Ranks(), Silent()):
            os.write(told, b"!")
            signal.pause()

    child = forked(holds)
    os.close(told)
    try:
        assert os.read(ready, 1) == b"!"
        yield child
    finally:
        killed(child)
        os.close(ready)


def fits(folder: Path, digits: ah.Dataset) -> object:
    return ah.fit(None, digits, "natural", folder, overrides=SMALL, device="cpu", replace_run=True)


def resumes(folder: Path, digits: ah.Dataset) -> object:
    from anchorhold.training.fit import resume

    return resume(folder, data=digits, device="cpu")


def audits(folder: Path, digits: ah.Dataset) -> object:
    model = ah.Embedder("small", 8, channels=1, size=8)
    quick: dict[str, Any] = {"limit": 8, "steps": 1, "attacks": ["ES"], "examine": None, "resamples": 10}
    return ah.audit(model, digits.test, out=folder, device="cpu", **quick)


def embeds(folder: Path, digits: ah.Dataset) -> object:
    photos = folder.parent / "photos"
    photos.mkdir(exist_ok=True)
    for number in range(3):
        Image.new("RGB", (8, 8), (50 * number, 0, 0)).save(photos / f"{number}.png")
    return embed(ah.Embedder("small", 8, size=8), photos, folder, device="cpu")


def sweeps(folder: Path, digits: ah.Dataset) -> object:
    return sweep(digits, "natural", {"train.seed": ["1"]}, folder, overrides=SMALL, device="cpu")


@pytest.mark.medium
@pytest.mark.parametrize("work", [fits, resumes, audits, embeds, sweeps])
def test_a_folder_in_use_is_refused_by_who_holds_it_and_free_after_a_kill(
    work: Callable[[Path, ah.Dataset], object], digits: ah.Dataset, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    if work is resumes:
        fits(folder, digits)
    before = sorted(folder.iterdir()) if folder.exists() else []
    with held(folder) as holder:
        with pytest.raises(RunError, match=rf"in use by process {holder} on {socket.gethostname()} since 20.*; wait"):
            work(folder, digits)
        assert sorted(each for each in folder.iterdir() if each.name != LOCK) == before
    assert (folder / LOCK).exists()  # left by the kill, and locked by nobody
    work(folder, digits)
    assert not (folder / LOCK).exists()


def test_a_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    ready, told = os.pipe()

    def holds() -> None:
        with one_writer(tmp_path, Ranks(), Silent()):
            os.write(told, str(forked(signal.pause)).encode())
            signal.pause()

    parent = forked(holds)
    os.close(told)
    worker = int(os.read(ready, 20))
    killed(parent)
    try:
        with one_writer(tmp_path, Ranks(), Silent()):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(ready)


class Lines(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_the_work_goes_on_with_a_warning(tmp_path: Path, number: int) -> None:
    report = Lines()
    with mock.patch.object(fcntl, "flock", side_effect=OSError(number, "no")), one_writer(tmp_path, Ranks(), report):
        (tmp_path / "work").touch()
    assert len(report.said) == 1 and "cannot lock" in report.said[0]


def test_a_folder_in_which_nothing_came_to_be_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError), one_writer(tmp_path / "new", Ranks(), Silent()):
        raise ValueError
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunError, match="cannot create the folder"),
        one_writer(tmp_path / "file" / "x", Ranks(), Silent()),
    ):
        pass


def test_a_planted_lock_is_neither_followed_nor_believed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK).symlink_to(victim)
    with pytest.raises(RunError, match="remove it"), one_writer(folder, Ranks(), Silent()):
        pass
    assert victim.read_text() == "theirs"
    (folder / LOCK).unlink()
    (folder / LOCK).write_bytes(b"[" * 5000)
    with one_writer(folder, Ranks(), Silent()), open(folder / LOCK, "r+") as file:
        file.write("[" * 3000)
        file.flush()
        with pytest.raises(RunError, match="in use by another process"), one_writer(folder, Ranks(), Silent()):
            pass
