"""What a user names may be a pipe, and memory may run out: both are said as what they are, and neither hangs."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import anchorhold as ah
from anchorhold.auditing.receipts import read_receipts
from anchorhold.config.recipes import recipe_text
from anchorhold.data.datasets import dataset
from anchorhold.data.store import decode
from anchorhold.errors import AnchorholdError, DataError, RunError, lacks_memory
from anchorhold.index.folder import Index
from anchorhold.index.searching import _frame
from anchorhold.index.sources import source_at
from anchorhold.model.weights import read_tensors
from anchorhold.report.collect import read_audit
from anchorhold.report.pictures import load_pictures
from anchorhold.runs.files import regular
from anchorhold.runs.folder import Run
from tests.cli.test_main import run


def photos(root: Path, classes: int = 4, images: int = 3) -> Path:
    for name in range(classes):
        for index in range(images):
            path = root / f"c{name}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (60 * name, 60 * index, 90)).save(path)
    return root


@contextmanager
def pipe(path: Path) -> Iterator[None]:
    """A pipe of that name that must not be opened: who opens it to read waits. It is let go, so that the test ends."""
    os.mkfifo(path)
    done, opened = threading.Event(), threading.Event()

    def let_go() -> None:
        while not done.wait(0.05):
            with suppress(OSError):  # nobody reads
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                opened.set()

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not opened.is_set(), f"{path} was opened and waited for"


def test_only_regular_files_and_links_to_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert regular(tmp_path / "b").read_text() == "x"
    with pytest.raises(OSError, match="a device and not a regular file"):
        regular(tmp_path / "zero")
    with pytest.raises(IsADirectoryError):
        regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "nothing")


def test_a_pipe_among_images_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    root = photos(tmp_path / "photos")
    options = ["--recipe", "natural", "--set", "train.epochs=1", "--device", "cpu", "--out", str(tmp_path / "out")]
    options += ["--set", "model.backbone=small", "--set", "model.dim=4", "--weights", "none"]
    options += ["--set", "data.resize=8", "--set", "data.crop=8"]
    with pipe(root / "c1" / "x.jpg"):
        code, _, err = run(capsys, monkeypatch, "train", str(root), *options)
        assert code == 2 and "c1/x.jpg" in err and "a pipe and not a regular file" in err, err
        data = dataset("folder", root)
        split = data.train if any("c1" in path.parts for path in data.train.paths or ()) else data.test
        found = decode(split, 8, on_bad_image="skip")
        assert [line.split(":")[0] for line in found.skipped] == ["c1/x.jpg"]


READERS: dict[str, Callable[[Path], Any]] = {
    "run.json": lambda path: Run(path.parent).read_json(),
    "metrics.jsonl": lambda path: Run(path.parent).metrics(),
    "last.safetensors": lambda path: Run(path.parent).load(),
    "model.safetensors": lambda path: ah.load(str(path.parent)),
    "w.pth": read_tensors,
    "audit.json": lambda path: read_audit(path.parent),
    "pictures.safetensors": load_pictures,
    "index.json": lambda path: Index(path.parent),
    "receipts.json": lambda path: read_receipts(path.parent),
    "list.csv": lambda path: dataset("csv", path),
    "of.csv": source_at,
    "of.tar": source_at,
    "query.png": lambda path: _frame(path, 8),
    "mine.toml": lambda path: recipe_text(str(path)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    with pipe(tmp_path / name), pytest.raises((AnchorholdError, OSError)):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(5, "Input/output error"), False),
        (torch.OutOfMemoryError("full"), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_memory_that_ran_out_is_known(error: BaseException, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_running_out_of_memory_is_no_bad_image(
    tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(file: Any, size: int) -> Any:
        raise MemoryError

    monkeypatch.setattr("anchorhold.data.decode.pixels_of", full)
    monkeypatch.setattr("anchorhold.index.embedding.pixels_of", full)
    monkeypatch.setattr("anchorhold.index.searching.pixels_of", full)
    root = photos(tmp_path / "photos")
    with pytest.raises(RunError, match=r"out of memory.*data\.store.: .stream") as caught:
        decode(dataset("folder", root).train, 8, on_bad_image=policy)
    assert "on-bad-image" not in str(caught.value) and ".png" in str(caught.value)
    with pytest.raises(MemoryError):
        _frame(root / "c0" / "0.png", 8)
    (tmp_path / "net.py").write_text("from torch import nn\nmake = lambda: nn.Flatten()\n")
    monkeypatch.chdir(tmp_path)
    options = ["--out", "ix", "--size", "4", "--device", "cpu", "--on-bad-image", policy]
    code, _, err = run(capsys, monkeypatch, "embed", "net:make", str(root), *options)
    assert code == 2 and "out of memory" in err and "--batch" in err and err.count("error") == 1, err


def test_a_model_that_fails_late_is_not_told_its_size() -> None:
    class Tired(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 5:
                raise KeyError("tired")
            return x.flatten(1)

    model = ah.wrap(Tired())
    for _ in range(4):
        model(torch.rand(2, 3, 4, 4))
    with pytest.raises(AnchorholdError, match=r"at call 5, .*KeyError: 'tired'") as caught:
        model(torch.rand(2, 3, 4, 4))
    assert "size" not in str(caught.value)


def test_a_model_that_wants_memory_is_not_told_its_size() -> None:
    class Hungry(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    with pytest.raises(RuntimeError, match="can't allocate"):
        ah.wrap(Hungry())(torch.rand(2, 3, 4, 4))


@pytest.mark.parametrize("where", ["forward", "make", "import"])
def test_a_model_that_exits_is_one_line(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    exits = {place: "sys.exit(0)" if place == where else "pass" for place in ("forward", "make", "import")}
    (tmp_path / f"quits_{where}.py").write_text(
        "import sys\nfrom torch import nn\n"
        f"class Net(nn.Module):\n  def forward(self, x):\n    {exits['forward']}\n    return x.flatten(1)\n"
        f"def make():\n  {exits['make']}\n  return Net()\n{exits['import']}\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ["--data", "digits", "--attacks", "ES", "--steps", "1", "--limit", "8", "--device", "cpu"]
    code, _, err = run(capsys, monkeypatch, "audit", f"quits_{where}:make", *options)
    assert code == 2 and ("exit" in err or "SystemExit" in err) and err.count("error") == 1, err


def test_data_that_are_pipes_alone_are_refused(tmp_path: Path) -> None:
    with pipe(tmp_path / "x.png"), pytest.raises(DataError, match="regular"):
        source_at(tmp_path / "x.png")
