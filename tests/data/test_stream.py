"""Images decoded by worker processes: the same frames, the same weights, and processes that end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import anchorhold as ah
from anchorhold.console import Silent
from anchorhold.data import images as monitors
from anchorhold.data import workers as processes
from anchorhold.data.datasets import dataset, folder_split
from anchorhold.data.settings import DataSettings
from anchorhold.data.splits import Split
from anchorhold.data.store import ResidentStore, Store, decode
from anchorhold.data.stream import Crew, StreamStore, memory_left
from anchorhold.data.workers import cores
from anchorhold.errors import DataError, RunError

pytestmark = pytest.mark.medium

CPU = torch.device("cpu")
PATIENCE = 120.0  # seconds until a process must have ended: it takes a moment, on a loaded machine longer


def photos(root: Path, classes: int = 5, images: int = 8, side: int = 20) -> Path:
    """Folders of noise, each class a little brighter than the one before."""
    noise = np.random.default_rng(0)
    for c in range(classes):
        (root / f"class{c}").mkdir(parents=True)
        for i in range(images):
            pixels = noise.integers(0, 120, (side, side, 3), dtype=np.uint8) + 25 * c
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"class{c}" / f"{i}.png")
    return root


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return folder_split(photos(tmp_path / "photos"))[0]


def streamed(split: Split, size: int = 12, workers: int = 2) -> StreamStore:
    return StreamStore(split.paths or (), size, CPU, workers)


@pytest.mark.parametrize("workers", [1, 3])
def test_frames_are_those_of_a_store_that_holds_them_all(split: Split, workers: int) -> None:
    held = decode(split, 12).images
    ids = torch.arange(40)
    # Repeats, an empty batch, one of a single image, and one that is larger than the shared memory.
    plan = [torch.tensor([3, 0, 3, 39]), ids[:0], ids[7:8], ids.flip(0).repeat(9), ids]
    store: Store = streamed(split, workers=workers)
    for _ in range(2):  # the workers stay
        frames = list(store.frames(plan))
        assert [len(each) for each in frames] == [4, 0, 1, 360, 40]
        for own, each in zip(plan, frames):
            assert each.dtype == torch.uint8 and torch.equal(each, held[own])
    assert list(store.frames([])) == []


def test_workers_that_are_spawned_give_the_same(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START", "spawn")
    held, store = decode(split, 12).images, streamed(split)
    plan = list(torch.arange(40).repeat(3).split(32))
    assert all(torch.equal(each, held[ids]) for ids, each in zip(plan, store.frames(plan), strict=True))
    own = pids(store)
    assert len(own) == 2 and os.getpid() not in own
    kill_one(store)
    with pytest.raises(RunError, match=r"out of memory, or because your script lacks `if __name__ == '__main__':`"):
        list(store.frames(plan))
    assert gone(own)


def test_who_stops_early_leaves_the_room_to_the_next(split: Split) -> None:
    held, store, plan = decode(split, 12).images, streamed(split), [torch.arange(40)] * 5
    for _ in range(3):
        frames = store.frames(plan)
        assert torch.equal(next(frames), held)
        frames.close()  # type: ignore[attr-defined]
    assert all(torch.equal(each, held) for each in store.frames(plan))
    crew = store.crew
    assert crew is not None and soon(lambda: sorted(crew.free) == list(range(8)))


def soon(truth: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not truth() and time.monotonic() < end:
        time.sleep(0.02)
    return truth()


def test_the_next_batch_is_put_together_without_being_asked_for(split: Split) -> None:
    store, taken = streamed(split), list[int]()
    take = store._take

    def counted(crew: Crew, part: Any, rows: Any) -> int:
        taken.append(count := take(crew, part, rows))
        return count

    store._take = counted  # type: ignore[method-assign]
    frames = store.frames([torch.arange(10), torch.arange(10, 17), torch.arange(3)])
    next(frames)
    assert soon(lambda: sum(taken) >= 17) and sum(taken) == 17  # the second, and no more
    assert [len(each) for each in frames] == [7, 3]


def test_without_room_the_reader_reads_itself(split: Split) -> None:
    held, store, ids = decode(split, 12).images, streamed(split), torch.arange(40)
    assert torch.equal(next(store.frames([ids])), held)
    crew = store.crew
    assert crew is not None and soon(lambda: len(crew.free) == 8)
    crew.free.clear()  # another reader, that stopped half way, has it all
    assert all(torch.equal(each, held[own]) for own, each in zip([ids, ids[:5]], store.frames([ids, ids[:5]])))


def test_two_may_read_by_turns(split: Split) -> None:
    held, store, plan = decode(split, 12).images, streamed(split), list(torch.arange(40).repeat(4).split(16))
    for ids, one, other in zip(plan, store.frames(plan), store.frames(plan)):
        assert torch.equal(one, held[ids]) and torch.equal(other, held[ids])


def pids(store: StreamStore) -> list[int]:
    assert store.crew is not None
    return list(store.crew.pool._processes)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # one that has ended and whose parent has not looked yet is still there by name
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # no Linux, or gone just now
        return True


def gone(own: list[int]) -> bool:
    return soon(lambda: not any(map(alive, own)))


def kill_one(store: StreamStore) -> None:
    """Kill a worker, and wait until its pool knows: the others could end the work before."""
    assert store.crew is not None
    pool = store.crew.pool
    os.kill(next(iter(pool._processes)), signal.SIGKILL)
    assert soon(lambda: bool(pool._broken))


def test_a_worker_that_dies_is_one_clear_error(split: Split) -> None:
    store = streamed(split, workers=4)
    frames = store.frames([torch.arange(40)] * 50)
    next(frames)
    own = pids(store)
    kill_one(store)
    with pytest.raises(RunError, match=r"a process that reads images died.*'data\.workers': 2") as caught:
        list(frames)
    assert "\n" not in str(caught.value)
    assert gone(own)
    assert len(next(store.frames([torch.arange(3)]))) == 3  # the next who asks has new workers


def test_the_workers_end_with_the_store(split: Split) -> None:
    closed, dropped = streamed(split), streamed(split)
    for store in (closed, dropped):
        next(store.frames([torch.arange(9)]))
    first, second = pids(closed), pids(dropped)
    assert len(first) == 2 and all(map(alive, first + second))
    closed.close()
    assert gone(first)
    del store, dropped
    assert gone(second)


def test_an_image_that_breaks_during_a_run_is_named(split: Split) -> None:
    assert split.paths is not None
    store = streamed(split)
    next(store.frames([torch.arange(3)]))
    split.paths[17].write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read .*class2/1\.png: not an image; .*repair it"):
        list(store.frames([torch.arange(40)]))


# ---- the same weights --------------------------------------------------------

FIT: dict[str, Any] = {
    "data": {"resize": 12, "crop": 8, "on_bad_image": "skip"},
    "model": {"backbone": "small", "dim": 8, "weights": ""},
    "batch": {"pairs": 6, "mining_pairs": 0},
    "optimiser": {"lr": 1e-2},
    "train": {"epochs": 2, "evaluate_every": 1, "attack_eps": 0.05, "attack_steps": 2, "attack_queries": 8},
    "defence": {"steps": 2},
}


@pytest.mark.slow
def test_the_three_stores_give_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = photos(tmp_path / "photos", classes=8)
    (root / "class1" / "3.png").write_bytes(b"broken")  # so that the ids are not those of the files
    data = dataset("folder", root)
    made: list[str] = []

    def on_the_host(images: torch.Tensor, device: torch.device) -> ResidentStore:
        elsewhere = torch.device("cpu", 0)  # the same place by another name, so it copies batch by batch
        assert images.device != elsewhere
        made.append("host")
        return ResidentStore(images, elsewhere)

    def fit(name: str, store: str, start: str = "fork") -> dict[str, Any]:
        monkeypatch.setattr(processes, "START", start)
        changes = {**FIT, "data": {**FIT["data"], "store": store, "workers": 2}}
        run = ah.fit(None, data, "hm-lga", tmp_path / name, overrides=changes, device="cpu")
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in run.metrics()]
        return {"rows": rows, **load_file(tmp_path / name / "model.safetensors")}

    resident, forked, spawned = fit("resident", "resident"), fit("fork", "stream"), fit("spawn", "stream", "spawn")
    monkeypatch.setattr(monitors, "resident", on_the_host)
    host = fit("host", "auto")
    assert made == ["host", "host"]
    for other in (forked, spawned, host):
        assert resident["rows"] == other["rows"]
        for name in resident.keys() - {"rows"}:
            assert torch.equal(resident[name], other[name]), name


# ---- which store -------------------------------------------------------------


class Told(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("store", "left", "streams"),
    [("auto", 10**6, False), ("auto", 34_000, True), ("stream", 10**6, True), ("resident", 1, False)],
)
def test_auto_streams_what_would_fill_half_of_the_memory(
    split: Split, monkeypatch: pytest.MonkeyPatch, store: Any, left: int, streams: bool
) -> None:
    monkeypatch.setattr(monitors, "memory_left", lambda: left)  # 40 images of 12 × 12 × 3 bytes are 17,280
    told = Told()
    loaded = monitors.load_images(split, DataSettings(resize=12, crop=8, store=store, workers=2), CPU, told)
    assert isinstance(loaded.store, StreamStore) == streams
    place = "streamed by 2 processes" if streams else "held in host memory"
    assert told.lines == [f"folder: 40 images, 0.0 GB, {place}"]
    assert len(next(loaded.plain())) == 40


def test_what_lies_in_memory_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "memory_left", lambda: 1)
    told = Told()
    loaded = monitors.load_images(dataset("digits").test, DataSettings(resize=0, crop=0, store="stream"), CPU, told)
    assert isinstance(loaded.store, ResidentStore) and told.lines == []


@pytest.mark.parametrize("store", ["resident", "stream"])
def test_bad_images_are_met_before_a_run_begins_in_either_store(split: Split, store: Any) -> None:
    assert split.paths is not None
    split.paths[5].write_bytes(b"")
    split.paths[30].unlink()
    split.paths[30].symlink_to(split.paths[30])  # a link to itself
    settings = {"resize": 12, "crop": 8, "store": store, "workers": 2}
    with pytest.raises(
        DataError, match=r"cannot read .*class0/5\.png: not an image; .*overrides=.*on_bad_image.: .skip"
    ):
        monitors.load_images(split, DataSettings(**settings), CPU, Silent())
    told = Told()
    loaded = monitors.load_images(split, DataSettings(**settings, on_bad_image="skip"), CPU, told)
    assert len(loaded.labels) == len(loaded.split) == 38
    assert told.lines[0] == "skipped 2 unreadable images of folder; the first: class0/5.png: not an image"
    kept = torch.tensor([i for i in range(40) if i not in (5, 30)])
    frames = torch.cat(list(loaded.store.frames([torch.arange(38)])))
    assert torch.equal(frames, decode(split.keep(kept), 12).images)


@pytest.mark.slow
def test_ten_thousand_files_of_no_bytes_are_one_line(tmp_path: Path) -> None:
    for c in range(4):
        (tmp_path / f"class{c}").mkdir()
        for i in range(2500):
            (tmp_path / f"class{c}" / f"{i}.jpg").touch()
    split, _ = folder_split(tmp_path)
    for store in ("resident", "stream"):
        settings = {"store": store, "resize": 8, "crop": 0}
        with pytest.raises(DataError, match=r"cannot read .*class0/0\.jpg: not an image"):
            monitors.load_images(split, DataSettings(**settings), CPU, Silent())  # type: ignore[arg-type]
        with pytest.raises(DataError, match="0 classes left after skipping 10000 unreadable images") as caught:
            monitors.load_images(split, DataSettings(**settings, on_bad_image="skip"), CPU, Silent())  # type: ignore[arg-type]
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def tree(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(limit: object, used: int, inactive: int = 0) -> dict[str, str]:
    return {"max": f"{limit}\n", "current": f"{used}\n", "stat": f"anon 7\ninactive_file {inactive}\nfile 9\n"}


def older(limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
    return {"limit_in_bytes": str(limit), "usage_in_bytes": str(used), "stat": stat}


@pytest.mark.parametrize(
    ("told", "groups", "left"),
    [
        ("0::/\n", {"": group(5000, 1000, 300)}, 4300),
        ("0::/a/b\n", {"": group("max", 9), "a": group(5000, 1000), "a/b": group("max", 9)}, 4000),
        ("0::/a/b\n", {"a": group(5000, 1000), "a/b": group(3000, 500, 20)}, 2520),
        ("0::/host/path\n", {"": group(700, 100)}, 600),  # a path of the host's, which the container does not see
        ("0::/../other\n", {"": group(700, 100), "../other": group(9, 0)}, 600),
        ("0::/a\n", {"a": group(500, 900)}, 0),
        ("0::/a\n", {"a": group("max", 1)}, 2048 * 1024),
        ("5:cpu,memory:/d\n0::/\n", {"memory/d": older(4000, 1000, 50), "memory": older(2**63 - 4096, 5)}, 3050),
        ("5:cpu:/d\n4:memory:/d\n", {"memory": older(800, 100)}, 700),
        (None, {}, 2048 * 1024),
    ],
)
def test_memory_that_is_left_is_the_least_that_any_account_leaves(
    tmp_path: Path, told: str | None, groups: dict[str, dict[str, str]], left: int
) -> None:
    known = {"meminfo": "MemTotal: 4096 kB\nMemAvailable:    2048 kB\n"}
    proc = tree(tmp_path / "proc", known | ({} if told is None else {"self/cgroup": told}))
    flat = {f"{place}/memory.{name}": text for place, own in groups.items() for name, text in own.items()}
    tree(tmp_path / "sys/fs", {name.lstrip("/"): text for name, text in flat.items()})
    assert memory_left(proc, tmp_path / "sys/fs") == left


def test_memory_is_guessed_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert memory_left(tmp_path / "proc", tmp_path / "sys") == 4096 * 500


def test_there_are_processors_and_memory() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    assert 2**20 < memory_left() < 2**50


# ---- how a process ends ------------------------------------------------------

SCRIPT = """
import sys, torch
from pathlib import Path
from anchorhold.data.datasets import folder_split
from anchorhold.data.stream import StreamStore
split, _ = folder_split(sys.argv[1])
store = StreamStore(split.paths, 12, torch.device("cpu"), 2)
frames = store.frames([torch.arange(40)] * 1000)
next(frames)
print(*store.crew.pool._processes, flush=True)
"""


def started(code: str, *arguments: str) -> "tuple[subprocess.Popen[str], list[int]]":
    command = [sys.executable, "-c", code, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    own = [int(word) for word in child.stdout.readline().split()]
    assert len(own) == 2
    return child, own


@pytest.mark.parametrize("end", ["pass", "raise ValueError('mine')"])
def test_a_script_may_end_with_an_iteration_half_way(tmp_path: Path, end: str) -> None:
    child, own = started(SCRIPT + end, str(photos(tmp_path / "photos")))
    _, errors = child.communicate(timeout=PATIENCE)
    assert child.returncode == (end != "pass")
    assert gone(own)
    assert errors.strip().splitlines()[-1:] == (["ValueError: mine"] if "mine" in end else [])


@pytest.mark.slow
def test_workers_end_when_the_reader_is_killed(tmp_path: Path) -> None:
    child, own = started(SCRIPT + "sys.stdin.read()\nimport time; time.sleep(60)", str(photos(tmp_path / "photos")))
    child.kill()
    child.wait()
    assert gone(own)


RUN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background

import sys, anchorhold as ah
from anchorhold.console import Silent

class Tell(Silent):
    def say(self, text):
        if text.startswith("about"):
            print(text, flush=True)

changes = eval(sys.argv[3])
try:
    data = ah.dataset("folder", sys.argv[1])
    ah.fit(None, data, "hm-lga", sys.argv[2], overrides=changes, device="cpu", report=Tell())
except ah.AnchorholdError as error:
    print(type(error).__name__, error, flush=True)
"""


def nobody_left(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves_and_leaves_no_process(tmp_path: Path) -> None:
    """The terminal's Ctrl-C reaches the workers too; the run must end its step all the same."""
    root, out = photos(tmp_path / "photos", classes=8), tmp_path / "run"
    changes = {**FIT, "data": {**FIT["data"], "store": "stream", "workers": 2}, "train": {"epochs": 5000}}
    command = [sys.executable, "-c", RUN, str(root), str(out), repr(changes)]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}  # 5,000 epochs take long, and it would say so
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, **pipes, start_new_session=True, env=quiet)
    assert child.stdout is not None and child.stdout.readline().startswith("about")
    os.killpg(child.pid, signal.SIGINT)
    said, errors = child.communicate(timeout=PATIENCE)
    assert said.startswith("Interrupted stopped and saved at step")
    # Python up to 3.11 may wake, at its own end, the thread of a pool that is just closing: it says so, and ends well.
    known = "Exception ignored in: <module 'threading'" in errors and "thread_wakeup.wakeup()" in errors
    assert errors == "" or (known and errors.count("Traceback") == 1)
    assert soon(lambda: nobody_left(child.pid)), "a worker outlived the run"
    assert (out / "last.safetensors").exists()
