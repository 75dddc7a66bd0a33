"""One flipped bit of a model or a checkpoint is noticed; other images of the same length are others."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

import anchorhold as ah
from anchorhold.auditing.shards import Shard, Shards
from anchorhold.console import Silent
from anchorhold.data import contents
from anchorhold.data.datasets import dataset
from anchorhold.errors import AnchorholdError, ModelError, RunError
from anchorhold.model.embedder import Embedder, save
from anchorhold.model.weights import read_tensors
from anchorhold.runs.folder import Run
from anchorhold.training.fit import fit, resume

TINY = {
    "model": {"backbone": "small", "dim": 4, "weights": ""},
    "data": {"resize": 8, "crop": 8},
    "batch": {"pairs": 8},
    "train": {"epochs": 1},
}


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def photos(root: Path, classes: int = 5, images: int = 4) -> Path:
    for name in range(classes):
        for index in range(images):
            path = root / f"c{name}" / f"{index}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (50 * name, 60 * index, 90)).save(path)
            os.utime(path, (1e9, 1e9))
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    return fit(None, photos(place / "photos"), "natural", place / "run", overrides=TINY, device="cpu").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def flips(path: Path, count: int) -> list[tuple[int, int]]:
    """Places of bits: in the length, all over the header, and in the data."""
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    head = [chance.randrange(8, end) for _ in range(count)]
    seal = whole.index(b"sealed") if b"sealed" in whole else 8
    places = [0, 1, 7, *range(seal - 2, seal + 14), *head, *(chance.randrange(end, len(whole)) for _ in range(count))]
    return [(place, chance.randrange(8)) for place in [*places, end - 1, end, len(whole) - 1]]


def flip(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "load a run": lambda path: ah.load(str(path.parent)),
    "load a file": lambda path: ah.load(str(path)),
    "start from it": lambda path: Embedder("small", 4, path),
}


@pytest.mark.parametrize("alone", [False, True], ids=["in its run", "alone"])
@pytest.mark.parametrize("how", LOADERS)
def test_a_flipped_bit_of_a_model_is_noticed(run: Path, how: str, alone: bool) -> None:
    path = run / "model.safetensors"
    if alone:
        (run / "run.json").unlink()
    LOADERS[how](path)
    missed = []
    for place, bit in flips(path, 40):
        flip(path, place, bit)
        with suppress(AnchorholdError):
            LOADERS[how](path)
            missed.append((place, bit))
        flip(path, place, bit)
    LOADERS[how](path)
    assert not missed


def test_a_flipped_bit_of_a_checkpoint_is_noticed(run: Path) -> None:
    path, missed = run / "last.safetensors", []
    shutil.copy(path, run / "previous.safetensors")
    for place, bit in flips(path, 60):
        flip(path, place, bit)
        now = Run(run)
        assert now.load() is not None  # from the one before
        if "last.safetensors" not in now.broken:
            missed.append((place, bit))
        flip(path, place, bit)
    assert not missed and Run(run).load() is not None


def test_a_flipped_bit_of_an_older_model_is_known_from_its_run(run: Path) -> None:
    """Without a seal inside it there is still the hash that run.json has."""
    path = run / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["anchorhold"])
    about.pop("sealed", None)
    safetensors.torch.save_file(read_tensors(path), path, {"anchorhold": json.dumps(about)})
    info = json.loads((run / "run.json").read_text())
    mark = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    (run / "run.json").write_text(json.dumps({**info, "export": mark}))
    ah.load(str(run))
    flip(path, path.stat().st_size - 3, 4)
    with pytest.raises(ModelError, match=r"ah\.resume"):
        ah.load(str(run))
    (run / "run.json").unlink()  # then nothing can be told, as before
    ah.load(str(path))


def test_resume_writes_a_damaged_model_anew(run: Path) -> None:
    path, heard = run / "model.safetensors", Heard()
    whole = path.read_bytes()
    flip(path, len(whole) - 5, 2)
    resume(run, device="cpu", report=heard)
    assert path.read_bytes() == whole and any("damaged" in line for line in heard.said)
    info = json.loads((run / "run.json").read_text())
    assert info["status"] == "done" and info["export"]
    ah.load(str(run))


def test_a_run_that_is_killed_after_its_model_was_written_is_whole(run: Path) -> None:
    """Between the model and run.json: the model is good, and no older hash speaks against it."""
    other = Embedder("small", 4, seed=5)
    (run / "model.safetensors").unlink()

    class Killed(Exception): ...

    class Dies(Run):
        def update_json(self, **fields: Any) -> None:
            if fields.get("status") == "done":
                raise Killed
            super().update_json(**fields)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr("anchorhold.training.fit.Run", Dies)
        patch.setattr("anchorhold.model.embedder.save", lambda model, path: save(other, path))
        resume(run, device="cpu")
    ah.load(str(run))


def test_damaged_rows_of_an_audit_are_made_again(tmp_path: Path) -> None:
    shards = Shards(tmp_path, {"model": "x"})
    shards.keep("ES", 0, Shard({"rows": torch.rand(50)}, 1.0, 2))
    path = tmp_path / "shards" / "ES.00000.safetensors"
    assert shards.find("ES", 0) is not None
    for place in (path.stat().st_size - 7, 120):
        flip(path, place, 3)
        assert shards.find("ES", 0) is None
        flip(path, place, 3)


@pytest.mark.parametrize(
    "forged",
    [
        {"shift": torch.rand(2)},
        {"shift": torch.rand(3, dtype=torch.complex64)},
        {"ids": torch.tensor([0, 1, 9])},
        {"ids": torch.tensor(0)},
        {"example/after": torch.tensor([[0.5]])},
        {"example/clean": torch.zeros(2, 2, 2, 1, dtype=torch.uint8)},
    ],
)
def test_rows_that_do_not_fit_together_are_made_again(tmp_path: Path, forged: dict[str, torch.Tensor]) -> None:
    shards = Shards(tmp_path, {"model": "x"}, items=9)
    rows = {"ids": torch.arange(3), "shift": torch.rand(3), "after/corrected/R@1": torch.ones(3).bool()}
    rows |= {"example/after": torch.tensor([[1]]), "example/clean": torch.zeros(1, 2, 2, 1, dtype=torch.uint8)}
    shards.keep("ES", 0, Shard(rows, 1.0, 2))
    assert shards.find("ES", 0) is not None
    shards.keep("ES", 0, Shard(rows | forged, 1.0, 2))  # with a seal that holds
    assert shards.find("ES", 0) is None


def test_a_row_that_a_file_lacks_is_one_line(tmp_path: Path) -> None:
    shards = Shards(tmp_path, {"model": "x"})
    shards.keep("ES", None, Shard({"ids": torch.arange(3)}, 1.0, 2))
    found = shards.find("ES", None)
    assert found is not None
    with pytest.raises(RunError, match="has no shift"):
        found.rows["shift"]


# ---- images ----------------------------------------------------------------------------------------------


def other_images(root: Path) -> None:
    """The same names, lengths and times of writing."""
    for path in root.rglob("*.bmp"):
        before = path.stat()
        Image.new("RGB", (12, 10), (7, 7, 7)).save(path)
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_other_images_of_the_same_length_are_refused(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos")
    done = fit(None, root, "natural", tmp_path / "run", overrides=TINY, device="cpu")
    done.update_json(status="interrupted")
    resume(tmp_path / "run", device="cpu")
    done.update_json(status="interrupted")
    other_images(root)
    with pytest.raises(RunError, match="changed since the run began"):
        resume(tmp_path / "run", device="cpu")


def test_a_run_of_an_older_version_goes_on_and_says_what_is_compared(tmp_path: Path) -> None:
    root, heard = photos(tmp_path / "photos"), Heard()
    done = fit(None, root, "natural", tmp_path / "run", overrides=TINY, device="cpu")
    data = dataset("folder", root)
    marks = {name: getattr(data, name).lengths_fingerprint() for name in ("train", "test")}
    assert all(len(mark) == 16 for mark in marks.values())
    info = done.read_json()
    done.update_json(status="interrupted", data={**info["data"], **marks})
    resume(tmp_path / "run", device="cpu", report=heard)
    assert any("lengths" in line for line in heard.said)
    done.update_json(status="interrupted")
    next(root.rglob("*.bmp")).write_bytes(b"longer" * 999)
    with pytest.raises(RunError, match="changed since the run began"):
        resume(tmp_path / "run", device="cpu")


def test_fingerprints_of_images_in_memory_stay_as_they_were() -> None:
    assert dataset("digits").train.fingerprint() == "dec6b267f8d37ddc"


def test_a_fingerprint_is_of_contents_and_cheap_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANCHORHOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "_SETTLED", 0)
    monkeypatch.setattr(contents, "_read", {})
    split = dataset("folder", photos(tmp_path / "photos")).train
    first, read = split.fingerprint(), list[str]()
    hashed = contents._hash
    monkeypatch.setattr(contents, "_hash", lambda name, stamp: (read.append(name), hashed(name, stamp))[1])
    assert split.fingerprint() == first and not read
    monkeypatch.setattr(contents, "_read", {})  # another process
    assert split.fingerprint() == first and not read
    other_images(tmp_path / "photos")
    assert split.fingerprint() != first and len(read) == len(split)
    shutil.rmtree(tmp_path / "photos")
    photos(tmp_path / "photos")
    assert split.fingerprint() == first


@pytest.mark.parametrize("kept", ["", "[]", '{"x": 3}', "[" * 9999, None])
def test_a_cache_that_is_damaged_or_cannot_be_written_is_none(
    tmp_path: Path, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANCHORHOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(contents, "_SETTLED", 0)
    split = dataset("folder", photos(tmp_path / "photos")).train
    first = split.fingerprint()
    (place,) = (tmp_path / "cache" / "contents").iterdir()
    if kept is None:
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("a file in the place of the folder")
    else:
        place.write_text(kept)
    monkeypatch.setattr(contents, "_read", {})
    assert split.fingerprint() == first


def test_a_file_that_was_just_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be written again within the same tick of the clock that stamps it."""
    monkeypatch.setattr(contents, "_read", {})
    monkeypatch.setattr(contents, "_SETTLED", 600 * 10**9)  # not the usual two seconds: the machine may be slow
    split = dataset("folder", photos(tmp_path / "photos")).train
    split.fingerprint()
    assert not contents._read


def test_rows_of_an_older_audit_are_of_the_same_files(tmp_path: Path) -> None:
    now = {"name": "x", "fingerprint": "contents:1", "resize": 8, "crop": 8, "lengths": "2"}
    then = {"name": "x", "fingerprint": "2", "resize": 8, "crop": 8}
    Shards(tmp_path, {"data": {"query": then, "gallery": then}}).keep("ES", 0, Shard({"r": torch.ones(1)}, 1.0, 1))
    assert Shards(tmp_path, {"data": {"query": now, "gallery": now}}).find("ES", 0) is not None
    other = {**now, "lengths": "3"}
    with pytest.raises(RunError, match="another data"):
        Shards(tmp_path, {"data": {"query": other, "gallery": now}}).find("ES", 0)
