"""embed: vectors and ids of a folder, a CSV or a tar; killed, it goes on; what is bad is named and nothing is lost."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from anchorhold.auditing.subject import _described
from anchorhold.data.decode import pixels_of
from anchorhold.data.store import centre_crop
from anchorhold.errors import DataError, Interrupted, ModelError, RunError, SettingsError
from anchorhold.index import embedding
from anchorhold.index.embedding import embed
from anchorhold.index.folder import Index, Named, described
from anchorhold.index.sources import Item
from anchorhold.index.unfinished import Parts
from anchorhold.model.embedder import Embedder
from anchorhold.model.wrap import wrap
from anchorhold.random import Key

SIZE = 16


class Lines:
    """A report that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def task(self, name: str, total: int, done: int = 0) -> Any:
        from contextlib import nullcontext

        self.said.append(f"{name} {total} {done}")
        return nullcontext(lambda done, note: self.said.append(f"{name} at {done}"))


def photographs(folder: Path, count: int) -> Path:
    """PNGs of noise, each different, in two folders."""
    pixels = Key.of(1)("photographs").uniform(torch.arange(count), (20, 24, 3)).mul(256).to(torch.uint8)
    for number, each in enumerate(pixels):
        path = folder / "ab"[number % 2] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each.numpy()).save(path)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return photographs(tmp_path / "photos", 11)


@pytest.fixture(scope="module")
def model() -> Embedder:
    return Embedder("small", 8, size=SIZE).eval()


def expected(model: nn.Module, root: Path, ids: list[str]) -> Tensor:
    """One by one, the plain way: squeezed to 8/7 of the size, the middle cut out, embedded."""
    frames = [torch.from_numpy(pixels_of(root / name, 18).copy())[None] for name in ids]
    with torch.no_grad():
        return torch.cat([model(centre_crop(frame, SIZE)) for frame in frames])


def ids_of(index: Index) -> list[str]:
    return [name for name, _ in index.rows]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_becomes_vectors_and_ids(model: Embedder, photos: Path, tmp_path: Path) -> None:
    index = embed(model, photos, tmp_path / "ix", batch=2, device="cpu")
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    assert ids_of(index) == names and len(index) == 11
    vectors = load_file(tmp_path / "ix" / "vectors.safetensors")["vectors"]
    assert vectors.shape == (11, 8) and vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, expected(model, photos, names), atol=1e-6, rtol=0)
    assert sorted(files(tmp_path / "ix")) == ["ids.csv", "index.json", "vectors.safetensors"]
    assert torch.equal(torch.cat(list(index.parts(rows=4))), vectors)


def test_class_folders_are_labels_and_a_flat_folder_has_none(model: Embedder, photos: Path, tmp_path: Path) -> None:
    index = embed(model, photos, tmp_path / "ix", batch=2, device="cpu")
    assert index.rows == [(name, name[0]) for name in ids_of(index)] and index.about["labelled"] is True
    flat = embed(model, photos / "a", tmp_path / "flat", device="cpu")
    assert {label for _, label in flat.rows} == {""} and flat.about["labelled"] is False
    assert (tmp_path / "flat" / "ids.csv").read_text().startswith("id\n")


def test_an_index_of_before_has_no_labels_and_is_complete_and_a_begun_one_gets_them(
    model: Embedder, photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    with monkeypatch.context() as before:
        before.setattr("anchorhold.index.sources._classes", lambda names, packed=False: [""] * len(names))
        embed(model, photos, tmp_path / "old", batch=1, device="cpu")
        before.setattr(Parts, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            embed(model, photos, tmp_path / "begun", batch=1, device="cpu")
    kept, report = files(tmp_path / "old"), Lines()
    old = embed(model, photos, tmp_path / "old", batch=1, device="cpu", report=report)
    assert files(tmp_path / "old") == kept and f"{tmp_path / 'old'} is already complete" in report.said
    assert {label for _, label in old.rows} == {""}
    monkeypatch.setattr(embedding, "vectors_of", lambda *_, **__: 1 / 0)  # nothing is embedded again
    begun = embed(model, photos, tmp_path / "begun", batch=1, device="cpu")
    assert begun.rows == [(name, name[0]) for name, _ in old.rows]


def test_a_csv_and_a_tar_give_the_same_vectors_with_their_own_ids(
    model: Embedder, photos: Path, tmp_path: Path
) -> None:
    folder = embed(model, photos, tmp_path / "one", batch=3, device="cpu")
    table = tmp_path / "list.csv"
    table.write_text("path,label\n" + "".join(f"photos/{name},{name[0]}\n" for name in ids_of(folder)))
    listed = embed(model, table, tmp_path / "two", batch=3, device="cpu")
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as tar:
        for name in ids_of(folder):
            tar.add(photos / name, name)
    packed = embed(model, tmp_path / "p.tgz", tmp_path / "three", batch=3, device="cpu")
    assert listed.rows == [(f"photos/{name}", name[0]) for name in ids_of(folder)] and packed.rows == folder.rows
    one, two, three = (torch.cat(list(index.parts())) for index in (folder, listed, packed))
    assert torch.equal(one, two) and torch.equal(one, three)


THEIRS = """
import os, pathlib, signal
from torch import nn

class Net(nn.Sequential):
    calls = 0

    def forward(self, images):
        Net.calls += 1
        if Net.calls == 7 and pathlib.Path("kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(images)

def net():
    import torch
    torch.manual_seed(0)
    return Net(nn.Flatten(), nn.Linear(192, 5))
"""


@pytest.mark.medium
def test_killed_it_goes_on_and_ends_identical(tmp_path: Path, monkeypatch: Any) -> None:
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        tar.add(photographs(tmp_path / "photos", 21), "photos")
    (tmp_path / "killed_net.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kill").touch()
    command = "embed killed_net:net p.tar --size 8 --batch 2 --device cpu --out ix"
    alike = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "anchorhold", *command.split()], env=alike, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = {path.name for path in (tmp_path / "ix").rglob("*")}
    assert left == {".anchorhold-lock", ".anchorhold-parts", "000000.safetensors"}
    with pytest.raises(RunError, match=r"no complete index; run the same ah\.embed to resume"):
        Index("ix")
    (tmp_path / "kill").unlink()
    net, report = Named("killed_net:net", size=[8, 8]), Lines()
    embed(net, "p.tar", "ix", batch=2, device="cpu", report=report)
    assert "8 of 21 images are already embedded" in report.said
    embed(net, "p.tar", "whole", batch=2, device="cpu")
    assert files(tmp_path / "ix") == files(tmp_path / "whole")


def test_stopped_it_says_how_to_go_on_and_damage_is_done_again(
    model: Embedder, photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    embed(model, photos, tmp_path / "whole", batch=1, device="cpu")
    keep = Parts.keep

    def stop(self: Parts, number: int, *rest: Any) -> None:
        keep(self, number, *rest)
        if number == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Parts, "keep", stop)
    with pytest.raises(Interrupted, match="to resume, do the same again with out="):
        embed(model, photos, tmp_path / "ix", batch=1, device="cpu")
    monkeypatch.setattr(Parts, "keep", keep)
    (tmp_path / "ix/.anchorhold-parts/000000.safetensors").write_bytes(b"torn")
    report = Lines()
    embed(model, photos, tmp_path / "ix", batch=1, device="cpu", report=report)
    assert "embedding 11 4" in report.said and report.said.count("embedding at 11") == 1
    assert files(tmp_path / "ix") == files(tmp_path / "whole")


def test_nothing_of_another_model_or_of_other_images_is_mixed_in(
    model: Embedder, photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    other, out = Embedder("small", 8, size=SIZE, seed=1), tmp_path / "ix"
    (photos / "b" / "009.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cannot read b/009.png of .*photos: not an image; .*on_bad_image=.skip"):
        embed(model, photos, out, batch=1, device="cpu")
    with pytest.raises(RunError, match=r"was made with another model; choose another out="):
        embed(other, photos, out, batch=1, device="cpu")
    with pytest.raises(RunError, match=r"another crop, batch; choose"):
        embed(model, photos, out, batch=2, resize=18, crop=14, device="cpu")
    # The image is mended: what was done before it stays, and what is different is done again.
    Image.new("RGB", (20, 24), (9, 9, 9)).save(photos / "b" / "009.png")
    report = Lines()
    index = embed(model, photos, out, batch=1, device="cpu", report=report)
    assert "embedding 11 8" in report.said and len(index) == 11
    embed(model, photos, tmp_path / "whole", batch=1, device="cpu")
    assert files(out) == files(tmp_path / "whole")
    report = Lines()
    embed(model, photos, out, batch=7, device="cpu", report=report)
    assert report.said == [f"{out} is already complete"]
    with pytest.raises(RunError, match="another model"):
        embed(other, photos, out, device="cpu")
    (photos / "b" / "009.png").unlink()
    with pytest.raises(RunError, match="another source"):
        embed(model, photos, out, device="cpu")


def stopped(monkeypatch: Any, *call: Any, block: int, **settings: Any) -> None:
    """embed, interrupted after a block."""
    keep = Parts.keep

    def stop(self: Parts, number: int, *rest: Any) -> None:
        keep(self, number, *rest)
        if number == block:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Parts, "keep", stop)
        embed(*call, **settings)


@pytest.mark.parametrize("packed", [False, True])
def test_an_image_of_the_same_size_that_was_written_later_is_embedded_again(
    model: Embedder, tmp_path: Path, monkeypatch: Any, packed: bool
) -> None:
    def written(colour: int, when: int) -> Path:
        for number in range(10):
            path = tmp_path / "photos" / f"{number}.bmp"  # as many bytes, whatever the colour
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (18, 18), (number, 9, colour if number == 5 else 0)).save(path)
            os.utime(path, ns=(when, when if number == 5 else 1_000_000_000))
        if not packed:
            return path.parent
        with tarfile.open(tmp_path / "p.tar", "w") as tar:
            tar.add(path.parent, "p")
        return tmp_path / "p.tar"

    source, out = written(0, 1_000_000_000), tmp_path / "ix"
    stopped(monkeypatch, model, source, out, block=1, batch=1, device="cpu")
    assert written(200, 5_000_000_000) == source
    report = Lines()
    index = embed(model, source, out, batch=1, device="cpu", report=report)
    assert "embedding 10 4" in report.said  # of two blocks of four, the one with the new image is done again
    whole = embed(model, source, tmp_path / "whole", batch=1, device="cpu")
    assert torch.equal(*(torch.cat(list(each.parts())) for each in (index, whole)))
    written(90, 6_000_000_000)
    with pytest.raises(RunError, match="another source"):
        embed(model, source, out, batch=1, device="cpu")


def test_what_is_read_ahead_is_bounded_by_its_bytes(monkeypatch: Any) -> None:
    """A source of members of 1 kB and 4 kB, as a tar gives them; how much of it is held is counted at every step."""
    sizes = [1000, 4000] * 20
    read = 0

    class Fake:
        items = tuple(Item(str(number), size=size) for number, size in enumerate(sizes))

        def read(self, wanted: Any) -> Any:
            nonlocal read
            for number, size in enumerate(sizes):
                read += 1
                yield number, io.BytesIO(bytes(size))

    frame = 3 * 4**2
    for bound, most in ((10_000, 512), (100, 512), (10**9, 6)):
        read = 0
        monkeypatch.setattr(embedding, "_AHEAD", bound)
        ahead = []
        for taken, (at, frame_or_reason) in enumerate(embedding._decoded(Fake(), lambda at: True, 4, most)):  # type: ignore[arg-type]
            assert (at, frame_or_reason) == (taken, "not an image")
            ahead.append((read - at, sum(size + frame for size in sizes[at:read])))
        assert len(ahead) == 40
        # Beyond the bound lies one member, which had to be read to know it.
        assert all((count <= most + 1 and held <= bound + 4000 + frame) or count == 2 for count, held in ahead)
        assert max(count for count, _ in ahead) > (1 if bound == 100 else 3)


def test_bad_images_are_skipped_by_name(model: Embedder, photos: Path, tmp_path: Path) -> None:
    good = embed(model, photos, tmp_path / "good", batch=2, device="cpu")
    (photos / "a" / "005x.png").write_bytes(b"no image")
    (photos / "b" / "zero.png").touch()
    (photos / "b" / "loop.png").symlink_to("loop.png")
    with pytest.raises(DataError, match=r"2 of 14 images of .* cannot be read, the first is b/loop.png: Too many"):
        embed(model, photos, tmp_path / "ix", device="cpu")
    report = Lines()
    index = embed(model, photos, tmp_path / "ix", batch=2, on_bad_image="skip", device="cpu", report=report)
    assert index.rows == good.rows
    for mine, other in zip(index.parts(), good.parts()):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)
    skipped = [tuple(each) for each in index.about["skipped"]]
    assert skipped == [
        ("a/005x.png", "not an image"),
        ("b/loop.png", "Too many levels of symbolic links"),
        ("b/zero.png", "the file is empty"),
    ]
    assert any(line.startswith("skipped 3 unreadable images") and "a/005x.png" in line for line in report.said)


def test_what_was_skipped_before_fails_where_it_shall(
    model: Embedder, photos: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (photos / "a" / "000.png").write_bytes(b"no image")
    keep = Parts.keep

    def stop(self: Parts, *rest: Any) -> None:
        keep(self, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(Parts, "keep", stop)
    with pytest.raises(Interrupted):
        embed(model, photos, tmp_path / "ix", batch=1, on_bad_image="skip", device="cpu")
    monkeypatch.setattr(Parts, "keep", keep)
    with pytest.raises(DataError, match=r"cannot read a/000.png"):
        embed(model, photos, tmp_path / "ix", batch=1, device="cpu")
    assert len(embed(model, photos, tmp_path / "ix", batch=1, on_bad_image="skip", device="cpu")) == 10


@pytest.mark.medium
def test_thousands_of_empty_files_are_one_line(model: Embedder, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for number in range(10_000):
        (empty / f"{number:05d}.jpg").touch()
    for way in ("fail", "skip"):
        with pytest.raises(DataError) as caught:
            embed(model, empty, tmp_path / "ix", on_bad_image=way, device="cpu")  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"10,000 of 10,000 images of {empty} cannot be read, the first is 00000.jpg: the file is empty; "
            "repair or remove them"
        )
    photographs(empty, 2)
    assert len(embed(model, empty, tmp_path / "ix", on_bad_image="skip", device="cpu")) == 2


def test_all_images_unreadable_is_one_line(model: Embedder, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"no image can be read \(1 tried\), the first is a.png: not an image"):
        embed(model, tmp_path / "p", tmp_path / "ix", on_bad_image="skip", device="cpu")


def test_names_that_are_not_unicode_come_back_as_they_were(model: Embedder, photos: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b'\xff \n,".png')
    try:
        os.rename(photos / "a" / "000.png", photos / "a" / odd)
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    index = embed(model, photos, tmp_path / "ix", device="cpu")
    assert f"a/{odd}" in ids_of(index) and set(index.rows) == set(Index(tmp_path / "ix").rows)


def test_parquet_has_the_same_rows(model: Embedder, photos: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    index = embed(model, photos, tmp_path / "ix", device="cpu")
    embed(model, photos, tmp_path / "ix", parquet=True, device="cpu")  # also of an index that is complete
    table = parquet.read_table(tmp_path / "ix" / "vectors.parquet")
    assert table.column_names == ["id", "label", "vector"] and table["id"].to_pylist() == ids_of(index)
    assert table["label"].to_pylist() == [name[0] for name in ids_of(index)]
    assert torch.equal(torch.tensor(table["vector"].to_pylist()), torch.cat(list(index.parts())))
    (tmp_path / "list.csv").write_text("path,label\nphotos/a/000.png,é\n")
    embed(model, tmp_path / "list.csv", tmp_path / "two", parquet=True, device="cpu")
    assert parquet.read_table(tmp_path / "two" / "vectors.parquet")["label"].to_pylist() == ["é"]


def test_a_missing_extra_is_one_line(model: Embedder, photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r"needs pyarrow, .*pip install 'anchorhold\[parquet\]'"):
        embed(model, photos, tmp_path / "ix", parquet=True, device="cpu")
    assert not (tmp_path / "ix").exists()


def test_the_digest_is_the_audits(model: Embedder) -> None:
    from anchorhold.attacks.goal import Scene

    e, zero = torch.zeros(2, 8), torch.zeros(2, dtype=torch.long)
    for each in (model, wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 8)), mean=[0.5], std=[0.5])):
        assert described(each)["weights"] == _described(each, Scene(e, zero, e, zero, zero))["weights"]


def test_what_wrap_does_around_the_weights_is_part_of_the_digest(photos: Path, tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
            pooled = images.mean((2, 3)) * self.scale
            return pooled, pooled.square()

    net = Two()
    plain: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.5] * 3, "size": 8, "output": 0}
    changes: list[dict[str, Any]] = [
        {},
        {"mean": [0.4] * 3},
        {"std": [0.4] * 3},
        {"size": 9},
        {"size": (8, 9)},
        {"output": 1},
        {"unit": False},
    ]
    marks = [described(wrap(net, **{**plain, **change}))["weights"] for change in changes]
    assert len(set(marks)) == len(marks)
    assert described(wrap(net, **plain))["weights"] == marks[0]
    square = {"resize": 18, "crop": 16, "device": "cpu"}
    index = embed(wrap(net, **plain), photos, tmp_path / "ix", **square)
    for change in changes[1:]:
        other = wrap(net, **{**plain, **change})
        with pytest.raises(RunError, match="another model"):
            embed(other, photos, tmp_path / "ix", **square)
        with pytest.raises(ModelError, match="cannot be compared"):
            index.model(other)


def test_a_place_that_cannot_be_written_is_known_at_once(model: Embedder, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = Lines()
    with pytest.raises(RunError, match=r"cannot create the folder .*file: it is a file; choose another out="):
        embed(model, photos, tmp_path / "file", device="cpu", report=report)
    assert not report.said


def test_killed_after_the_last_file_nothing_is_left_over(model: Embedder, photos: Path, tmp_path: Path) -> None:
    embed(model, photos, tmp_path / "ix", device="cpu")
    (tmp_path / "ix" / ".anchorhold-parts").mkdir()
    embed(model, photos, tmp_path / "ix", device="cpu")
    assert not (tmp_path / "ix" / ".anchorhold-parts").exists()


def test_a_model_is_remembered_by_its_whole_path(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path.resolve()
    (tmp_path / "lr=3").mkdir()
    for spec, whole in (
        ("lr=3", f"{here}/lr=3"),
        ("resnet18=w.pth", f"resnet18={here}/w.pth"),
        ("own:net", "own:net"),
        ("resnet18", "resnet18"),
    ):
        assert Named(spec, [0.5], [0.2], [8, 8]).found() == {"spec": whole, "mean": [0.5], "std": [0.2], "size": [8, 8]}


def test_models_that_cannot_embed_are_one_line(photos: Path, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)[:, :3] * float("nan")

    with pytest.raises(ModelError, match=r"11 vectors are not finite, the first is of a/000.png"):
        embed(wrap(Odd(), size=8), photos, tmp_path / "ix", device="cpu")
    with pytest.raises(ModelError, match="fails on images of shape"):
        embed(wrap(nn.Linear(5, 5)), photos, tmp_path / "iy", device="cpu")
    with pytest.raises(SettingsError, match="a crop of 20 does not fit images of 10×10"):
        embed(wrap(Odd()), photos, tmp_path / "iz", resize=10, crop=20, device="cpu")


def test_one_channel_and_the_mode_and_place_of_the_model_are_kept(photos: Path, tmp_path: Path) -> None:
    grey = Embedder("small", 8, channels=1, size=SIZE).train()
    index = embed(grey, photos, tmp_path / "ix", device="cpu")
    assert grey.training and len(index) == 11
    frame = torch.from_numpy(pixels_of(photos / "a/000.png", 18).copy())[None]
    with torch.no_grad():
        torch.testing.assert_close(next(index.parts())[:1], grey(centre_crop(frame, SIZE).mean(1, keepdim=True)))


def test_an_index_that_was_tampered_with_is_one_line(model: Embedder, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "ix"
    embed(model, photos, out, device="cpu")
    ids, about = (out / "ids.csv").read_text(), json.loads((out / "index.json").read_text())
    (out / "ids.csv").write_text(ids.rsplit("\n", 2)[0] + "\n")
    with pytest.raises(RunError, match="has 10 rows for 11 vectors"):
        _ = Index(out).rows
    (out / "index.json").write_text(json.dumps(about | {"dim": 9}))
    with pytest.raises(RunError, match=r"which index.json contradicts"):
        list(Index(out).parts())
    (out / "index.json").write_text(json.dumps(about | {"schema": "anchorhold.index/9"}))
    with pytest.raises(RunError, match=r"this version reads anchorhold.index/1"):
        Index(out)
    (out / "vectors.safetensors").write_bytes(b"torn")
    (out / "index.json").write_text(json.dumps(about))
    with pytest.raises(RunError, match=r"vectors.safetensors cannot be read"):
        list(Index(out).parts())
    with pytest.raises(RunError, match=r"holds no index; make one with ah\.embed"):
        Index(photos)


def test_what_is_not_of_an_index_is_left_alone(tmp_path: Path, model: Embedder) -> None:
    """A folder of images called parts, in the very place where the index goes, has to be there afterwards."""
    place = tmp_path / "shop"
    for name in ("wheels", "parts"):
        (place / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (number, 9, 9)).save(place / name / f"{number}.png")
    index = embed(model, place, place)
    assert len(index) == 4 and len(list((place / "parts").iterdir())) == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "ids.csv").write_text("path\n../shop/wheels/0.png\n")
    with pytest.raises(RunError, match="does not belong to an index"):
        embed(model, other / "ids.csv", other)
    assert (other / "ids.csv").read_text().startswith("path")
