"""The run folder: never half written, always readable."""

import errno
import platform
from pathlib import Path
from unittest import mock

import pytest
import torch

from anchorhold.device import computer_of
from anchorhold.errors import RunError
from anchorhold.runs.folder import Run
from anchorhold.runs.provenance import provenance
from anchorhold.runs.writing import atomic


def test_a_run_folder_is_not_overwritten_unasked(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {"status": "training"})
    Run.create(tmp_path, {"status": "training"})  # nothing was saved yet, so nothing is lost
    run.save({"w": torch.ones(1)}, {"step": 0})
    with pytest.raises(RunError, match=r"ah\.resume"):
        Run.create(tmp_path, {})
    Run.create(tmp_path, {"status": "new"}, replace=True)
    assert Run(tmp_path).read_json()["status"] == "new"


def test_checkpoints_come_back_and_the_one_before_is_kept(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    assert run.load() is None
    for step in (1, 2):
        run.save({"w": torch.full((2,), float(step))}, {"step": step})
    tensors, state = run.load() or ({}, {})
    assert tensors["w"].tolist() == [2, 2] and state == {"step": 2}
    last = tmp_path / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-3])
    assert (run.load() or ({}, {}))[1] == {"step": 1}  # a truncated one falls back to the one before
    assert "last.safetensors cannot be read" in run.broken  # and that is said
    (tmp_path / "previous.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match=r"no checkpoint in .* can be read"):
        run.load()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    run.save({"w": torch.ones(1)}, {"step": 1})
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("safetensors.torch.save_file", side_effect=full),
        pytest.raises(RunError, match="disk is full"),
    ):
        run.save({"w": torch.zeros(1)}, {"step": 2})
    assert (run.load() or ({}, {}))[1] == {"step": 1}
    with (
        mock.patch.object(Path, "write_text", side_effect=full),
        pytest.raises(RunError, match="disk is full"),
    ):
        run.update_json(status="done")
    assert "status" not in run.read_json()
    assert not list(tmp_path.glob(".*part"))


def test_atomic_leaves_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ValueError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("inside", "reason"), [("x", r"notes\.md is a file"), ("deep/x", "Not a directory")])
def test_below_a_file_nothing_can_be_written_and_that_is_said(tmp_path: Path, inside: str, reason: str) -> None:
    (tmp_path / "notes.md").write_text("mine")
    with (
        pytest.raises(RunError, match=rf"^cannot write .*{inside}: .*{reason}; choose another folder$"),
        atomic(tmp_path / "notes.md" / inside) as temporary,
    ):
        temporary.write_text("never")
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_metrics_survive_a_torn_line_and_are_cut_back(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    for epoch in (1, 2, 3):
        run.append({"epoch": epoch, "odd": float("nan")})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "lo')
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3]
    run.cut_metrics(2)
    run.append({"epoch": 3, "again": True})
    assert run.metrics() == [{"epoch": 1, "odd": None}, {"epoch": 2, "odd": None}, {"epoch": 3, "again": True}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run\.json"):
        Run(tmp_path).read_json()
    (tmp_path / "run.json").write_text('{"schema": "other/9"}')
    with pytest.raises(RunError, match="schema 'other/9'"):
        Run(tmp_path).read_json()
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RunError, match="schema None"):
        Run(tmp_path).read_json()
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="cannot read"):
        Run(tmp_path).read_json()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot create the run folder"):
        Run.create(tmp_path / "file" / "run", {})


def test_provenance_says_versions_commit_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANCHORHOLD_COMMIT", "abc")
    threads = torch.get_num_threads()
    try:
        said = []
        for count in (1, 2):
            torch.set_num_threads(count)
            said.append(provenance(computer_of(torch.device("cpu"))))
    finally:
        torch.set_num_threads(threads)
    assert said[0]["commit"] == "abc"
    assert said[0]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert [each["device"] for each in said] == [f"cpu: {platform.machine()}, {of}" for of in ("1 thread", "2 threads")]
