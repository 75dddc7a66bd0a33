import os
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from anchorhold.auditing.inputs import prepare
from anchorhold.console import Silent
from anchorhold.data import store
from anchorhold.data.datasets import folder_split
from anchorhold.data.images import load_images
from anchorhold.data.settings import DataSettings
from anchorhold.data.splits import Split
from anchorhold.data.store import ResidentStore, Store, _compacted, centre_crop, crop_flip, decode, readable, resident
from anchorhold.data.workers import START
from anchorhold.errors import DataError, RunError, SettingsError
from anchorhold.model.embedder import Embedder
from anchorhold.random import Key

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def files(*paths: Path, root: Path | None = None) -> Split:
    """A split of two classes that take turns."""
    labels = torch.arange(len(paths)) % 2
    return Split("x", labels, ("even", "odd"), tuple(paths), root=root)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, image: Image.Image, **options: Any) -> Path:
    image.save(path, **options)
    return path


# ---- decode ------------------------------------------------------------------


@pytest.mark.skipif(START != "fork", reason="processes that start anew cost more than they save")
def test_processes_read_what_threads_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path / f"{n:02}.png", Image.fromarray(noise(9, 7, seed=n))) for n in range(40)]
    whole, one = files(*paths), decode(files(*paths), 8, workers=3)
    for broken in (5, 6, 30):
        paths[broken].write_bytes(b"no image")
    some = decode(whole, 8, workers=3, on_bad_image="skip")
    monkeypatch.setattr(store, "_MANY", 1)
    monkeypatch.setattr(store, "ThreadPoolExecutor", None)  # it must not be asked for
    assert readable(whole, 8, workers=3, on_bad_image="skip")[1] == some.skipped
    again = decode(whole, 8, workers=3, on_bad_image="skip")
    assert again.skipped == some.skipped and len(some.skipped) == 3
    assert torch.equal(again.images, some.images) and torch.equal(again.split.labels, some.split.labels)
    kept = [n for n in range(40) if n not in (5, 6, 30)]
    assert torch.equal(some.images, one.images[kept])
    with pytest.raises(DataError, match=r"cannot read .*05\.png: not an image"):
        decode(whole, 8, workers=3)


def test_who_may_have_no_processes_has_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path / f"{n:02}.png", Image.fromarray(noise(9, 7, seed=n))) for n in range(20)]
    monkeypatch.setattr(store, "_MANY", 1)
    monkeypatch.setattr(store, "hired", None)  # it must not be asked for
    monkeypatch.setattr(store, "current_process", lambda: SimpleNamespace(daemon=True))  # as in a pool's worker
    assert len(decode(files(*paths), 8, workers=2).images) == 20


@pytest.mark.skipif(START != "fork", reason="processes that start anew cost more than they save")
def test_a_process_that_cannot_be_made_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path / f"{n:02}.png", Image.fromarray(noise(9, 7, seed=n))) for n in range(20)]
    made, fork = list[int](), os.fork

    def once() -> int:
        if made:
            raise OSError(12, "Cannot allocate memory")
        made.append(fork())
        return made[0]

    monkeypatch.setattr(store, "_MANY", 1)
    monkeypatch.setattr(os, "fork", once)
    with pytest.raises(RunError, match="a process that reads images died"):
        decode(files(*paths), 8, workers=3)
    end = time.monotonic() + 120
    while made[0] in (left := {child.pid for child in active_children()}) and time.monotonic() < end:
        time.sleep(0.02)
    assert made[0] not in left  # or it would be waited for at the end, for ever


@pytest.mark.skipif(START != "fork", reason="processes that start anew cost more than they save")
def test_a_process_that_dies_while_it_decodes_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [save(tmp_path / f"{n:02}.png", Image.fromarray(noise(9, 7, seed=n))) for n in range(20)]
    monkeypatch.setattr(store, "_MANY", 1)
    monkeypatch.setattr("anchorhold.data.decode.pixels_of", lambda *_: os._exit(1))
    with pytest.raises(RunError, match=r"a process that reads images died.*'data\.workers': 1"):
        decode(files(*paths), 8, workers=2)


def test_every_kind_of_file_becomes_rgb_bytes(tmp_path: Path) -> None:
    rgb, grey = Image.fromarray(noise(8, 8)), Image.fromarray(noise(8, 8, 1))
    alpha = rgb.copy()
    alpha.putalpha(grey)
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    flat = Image.new("RGB", (8, 8), (200, 40, 90))
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 40, 90])
    made: dict[str, tuple[Image.Image, dict[str, Any], Any]] = {
        "a.png": (rgb, {}, np.asarray(rgb)),
        "b.bmp": (rgb, {}, np.asarray(rgb)),
        "c.webp": (rgb, {"lossless": True}, np.asarray(rgb)),
        "d.png": (grey, {}, np.asarray(grey)[..., None].repeat(3, 2)),
        "e.png": (alpha, {}, np.asarray(rgb)),
        "f.png": (Image.fromarray(deep), {}, (deep / 257).round().astype(np.uint8)[..., None].repeat(3, 2)),
        "g.gif": (palette, {}, np.asarray(flat)),
        "h.png": (palette, {"transparency": b"\x00\x80"}, np.asarray(flat)),
        "i.jpg": (flat, {"quality": 95}, np.asarray(flat)),
        "j.jpg": (flat.convert("CMYK"), {"quality": 95}, np.asarray(flat)),
        "k.tif": (Image.fromarray(deep), {}, (deep / 257).round().astype(np.uint8)[..., None].repeat(3, 2)),
        "l.png": (grey.convert("1"), {}, np.asarray(grey.convert("1").convert("RGB"))),
    }
    split = files(*(save(tmp_path / name, image, **options) for name, (image, options, _) in made.items()))
    decoded = decode(split, 8, workers=3)
    assert decoded.images.dtype == torch.uint8
    assert decoded.images.shape == (len(made), 8, 8, 3)
    assert decoded.split is split
    assert decoded.skipped == ()
    for (name, (_, _, wanted)), got in zip(made.items(), decoded.images.numpy()):
        tolerance = 3 if name.endswith("jpg") else 0
        assert np.abs(got.astype(int) - wanted).max() <= tolerance, name


def test_images_are_squeezed_with_antialias_and_left_alone_at_their_size(tmp_path: Path) -> None:
    big = Image.fromarray(noise(40, 30))
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    split = files(save(tmp_path / "a.png", big), save(tmp_path / "b.png", Image.fromarray(stripes)))
    images = decode(split, 10).images
    assert np.array_equal(images[0].numpy(), np.asarray(big.resize((10, 10), Image.Resampling.BILINEAR)))
    assert (images[1].float() - 127.5).abs().max() < 20  # without antialias these stripes would be black or white


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(noise(8, 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / "a.png", image, exif=exif)
    with Image.open(path) as file:
        wanted = np.asarray(ImageOps.exif_transpose(file))
    assert np.array_equal(wanted, np.asarray(image)) == (orientation == 1)
    assert np.array_equal(decode(files(path, path), 8).images[0].numpy(), wanted)


def bad_files(root: Path) -> list[Path]:
    """Six files of which 1, 2 and 3 cannot be read."""
    paths = [save(root / f"{i}.jpg", Image.fromarray(noise(64, 64, seed=i))) for i in range(6)]
    paths[1].write_bytes(paths[1].read_bytes()[:900])
    paths[2].write_text("hello")
    paths[3].unlink()
    return paths


def test_a_bad_image_fails_with_its_name_and_the_way_out(tmp_path: Path) -> None:
    paths = bad_files(tmp_path)
    wanted = f"cannot read {paths[1]}: .*truncated.*or skip such images with --this"
    with pytest.raises(DataError, match=wanted):
        decode(files(*paths), 16, skipping="--this")
    with pytest.raises(DataError, match=r"2\.jpg: not an image; repair or remove it$"):
        decode(files(paths[0], paths[2]), 16)
    with pytest.raises(DataError, match=r"3\.jpg: No such file or directory;"):
        decode(files(paths[0], paths[3]), 16)


def test_bad_images_are_skipped_and_told(tmp_path: Path) -> None:
    paths = bad_files(tmp_path)
    decoded = decode(files(*paths, root=tmp_path), 16, on_bad_image="skip")
    assert decoded.split.paths == (paths[0], paths[4], paths[5])
    assert decoded.split.labels.tolist() == [0, 0, 1]
    assert torch.equal(decoded.images, decode(files(paths[0], paths[5], paths[4]), 16).images[[0, 2, 1]])
    assert [entry.split(":")[0] for entry in decoded.skipped] == ["1.jpg", "2.jpg", "3.jpg"]
    assert decoded.skipped[1] == "2.jpg: not an image"


def test_what_is_left_is_moved_up_in_place() -> None:
    rows = torch.arange(7 * 2).reshape(7, 2)
    good = torch.tensor([True, False, True, True, False, False, True])
    wanted = rows[good]
    kept = _compacted(rows, good)
    assert torch.equal(kept, wanted)
    assert kept.data_ptr() == rows.data_ptr()  # no second tensor, however large the first


def test_queries_may_be_of_one_class_whatever_they_are_called(tmp_path: Path) -> None:
    paths = bad_files(tmp_path)
    one = replace(files(paths[0], paths[1], paths[4]), asks=True)
    assert len(decode(one, 16, on_bad_image="skip").images) == 2
    with pytest.raises(DataError, match=r"0 classes left .* at least one"):
        decode(replace(files(paths[1], paths[2]), asks=True), 16, on_bad_image="skip")
    with pytest.raises(DataError, match=r"1 class left.*at least two"):  # a name decides nothing
        decode(replace(files(paths[0]), name="my/query"), 16)
    whole = replace(files(*paths), queries=torch.tensor([True] * 2 + [False] * 4))
    assert whole.query.asks and not whole.gallery.asks and whole.query.keep(torch.tensor([0])).asks


def test_a_folder_or_csv_of_one_class_may_ask_a_gallery_of_two(tmp_path: Path) -> None:
    for name in ("q/owl", "g/owl", "g/cat"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(2):
            save(tmp_path / name / f"{i}.png", Image.fromarray(noise(20, 20, seed=i)))
    (tmp_path / "q.csv").write_text("path,label\nq/owl/0.png,owl\nq/owl/1.png,owl\n")
    for query in (tmp_path / "q", tmp_path / "q.csv", folder_split(tmp_path / "q", asks=True)[0]):
        model = Embedder("small", 4, size=14)
        material = prepare({"query": query, "gallery": tmp_path / "g"}, model, CPU, Silent())
        assert material.labels.tolist() == [1, 1] and material.gallery_labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(DataError, match="only one class"):
        prepare(tmp_path / "q", model, CPU, Silent())
    # Two models of the same weights see other squares by default, and what was measured says which.
    other = prepare({"query": query, "gallery": tmp_path / "g"}, Embedder("small", 4, size=7), CPU, Silent())
    for side in ("query", "gallery"):
        assert [m.describe()[side]["resize"] for m in (material, other)] == [16, 8]
        assert [m.describe()[side]["crop"] for m in (material, other)] == [14, 7]


def test_too_little_left_is_an_error(tmp_path: Path) -> None:
    paths = bad_files(tmp_path)
    with pytest.raises(DataError, match=r"1 class left after skipping 1 unreadable image, the first .*1\.jpg"):
        decode(files(paths[0], paths[1], paths[4]), 16, on_bad_image="skip")
    with pytest.raises(DataError, match="0 classes left after skipping 2 "):
        decode(files(paths[1], paths[2]), 16, on_bad_image="skip")
    with pytest.raises(DataError, match=r"1 class(es)? left; it needs"):
        decode(files(paths[0]), 16)


def test_a_decompression_bomb_is_a_bad_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", Image.fromarray(noise(64, 64)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=r"a\.png: .*decompression bomb"):
        decode(files(path, path), 16)


def test_float_pixels_are_refused_rather_than_guessed(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tif", Image.fromarray(np.ones((4, 4), dtype=np.float32)))
    with pytest.raises(DataError, match="floats of unknown range"):
        decode(files(path, path), 4)


def test_progress_reaches_the_end_and_workers_do_not_matter(tmp_path: Path) -> None:
    split = files(*(save(tmp_path / f"{i}.png", Image.fromarray(noise(9, 9, seed=i))) for i in range(40)))
    seen: list[tuple[int, int]] = []
    one = decode(split, 8, workers=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(16, 40), (32, 40), (40, 40)]
    assert torch.equal(one.images, decode(split, 8, workers=7).images)


def test_images_in_memory_come_back_as_they_are_or_resized() -> None:
    images = torch.from_numpy(noise(8, 8)).unsqueeze(0).repeat(2, 1, 1, 1)
    split = Split("x", torch.tensor([0, 1]), ("p", "q"), images=images)
    assert decode(split, None).images is images
    assert decode(split, 8).images is images
    smaller = decode(split, 4).images
    assert smaller.dtype == torch.uint8
    wanted = np.asarray(Image.fromarray(noise(8, 8)).resize((4, 4), Image.Resampling.BILINEAR))
    assert np.abs(smaller[1].numpy().astype(int) - wanted).max() <= 1
    points = torch.rand(2, 1, 5, 1)
    assert decode(Split("x", torch.tensor([0, 1]), ("p", "q"), images=points), 8).images is points


def test_decode_settings_that_make_no_sense(tmp_path: Path) -> None:
    split = files(tmp_path / "a.png", tmp_path / "b.png")
    with pytest.raises(SettingsError, match=r"set data.resize"):
        decode(split, None)
    with pytest.raises(SettingsError, match="size must be at least 1, got 0"):
        decode(split, 0)
    with pytest.raises(SettingsError, match="choose fail or skip"):
        decode(split, 8, on_bad_image="ignore")  # type: ignore[arg-type]


# ---- stores ------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_frames_come_in_the_order_of_the_plan_and_one_at_a_time(device: str) -> None:
    images = torch.arange(5 * 12, dtype=torch.uint8).reshape(5, 2, 2, 3)
    plan = [torch.tensor([3, 0, 3]), torch.tensor([4]), torch.tensor([], dtype=torch.int64)]
    taken = []

    def lazily() -> Iterator[Tensor]:
        for ids in plan:
            taken.append(ids)
            yield ids

    store: Store = resident(images, device)
    for place, (ids, frames) in enumerate(zip(plan, store.frames(lazily())), start=1):
        assert len(taken) == place
        assert frames.device.type == device
        assert torch.equal(frames.cpu(), images[ids])
    assert place == 3


def test_a_store_whose_frames_lie_elsewhere_copies_batch_by_batch() -> None:
    frames = list(ResidentStore(torch.rand(4, 2, 2, 3), torch.device("meta")).frames([torch.tensor([1, 2])]))
    assert frames[0].device.type == "meta"
    assert frames[0].shape == (2, 2, 2, 3)


def test_without_room_on_the_device_the_frames_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(4, 2, 2, 3)

    def full(self: Tensor, *_: object) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", full)
        store = resident(images, "cuda")
    assert store.images.device.type == "cpu"
    assert store.device.type == "cuda"
    if torch.cuda.is_available():
        (frames,) = store.frames([torch.tensor([2, 0])])
        assert frames.device.type == "cuda"
        assert torch.equal(frames.cpu(), images[[2, 0]])


# ---- crops -------------------------------------------------------------------


def reference(frames: Tensor, size: int, key: Key, slots: Tensor, flip: bool) -> Tensor:
    """Row by row, with slices."""
    rows = []
    for frame, slot in zip(frames, slots):
        one = slot.reshape(1)
        top = int(key("top").integers(one, frame.shape[0] - size + 1))
        left = int(key("left").integers(one, frame.shape[1] - size + 1))
        crop = frame[top : top + size, left : left + size]
        if flip and float(key("flip").uniform(one)) < 0.5:
            crop = crop.flip(1)
        rows.append(crop.permute(2, 0, 1).float() / 255)
    return torch.stack(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("height", "width", "size", "channels"), [(9, 7, 5, 3), (6, 6, 6, 3), (8, 8, 7, 1)])
def test_crops_equal_the_plain_loop(device: str, flip: bool, height: int, width: int, size: int, channels: int) -> None:
    frames = torch.from_numpy(noise(32 * height, width, channels).reshape(32, height, width, channels))
    key, slots = Key.of(1)("crop", 3), torch.arange(32) * 7 + 5
    got = crop_flip(frames.to(device), size, key, slots, flip=flip)
    assert got.dtype == torch.float32
    assert got.shape == (32, channels, size, size)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got.cpu(), reference(frames, size, key, slots, flip))


def test_a_row_depends_on_its_slot_alone() -> None:
    frames = torch.from_numpy(noise(6 * 9, 9).reshape(6, 9, 9, 3))
    key, slots = Key.of(0), torch.tensor([4, 8, 15, 16, 23, 42])
    whole = crop_flip(frames, 5, key, slots)
    torch.manual_seed(7)
    assert torch.equal(crop_flip(frames[[4, 1]], 5, key, slots[[4, 1]]), whole[[4, 1]])
    assert not torch.equal(crop_flip(frames, 5, key("other"), slots), whole)


def test_offsets_cover_all_places_evenly_and_half_is_mirrored() -> None:
    count, places = 12000, 4
    # Each pixel holds its own column, or its row in the second channel: a crop tells where it was cut.
    grid = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij"), -1).flip(2).to(torch.uint8)
    crops = (crop_flip(grid.expand(count, 8, 8, 2), 5, Key.of(2), torch.arange(count)) * 255).round().long()
    mirrored = crops[:, 0, 0, 0] > crops[:, 0, 0, 1]
    left, top = crops[:, 0, 0].amin(1), crops[:, 1, :, 0].amin(1)
    assert mirrored.float().mean() == pytest.approx(0.5, abs=0.02)
    joint = torch.bincount((top * places + left) * 2 + mirrored, minlength=2 * places**2)
    assert len(joint) == 2 * places**2
    assert joint.min() > 0.75 * count / len(joint)
    assert joint.max() < 1.25 * count / len(joint)


def scaled(frames: Tensor, size: int | None, key: Key, slots: Tensor, flip: bool, least: float) -> Tensor:
    """Crops of random area and proportions row by row: slice, interpolate, flip."""
    rows = []
    height, width = frames.shape[1:3]
    for frame, slot in zip(frames, slots):
        one = slot.reshape(1)
        areas, ratios = (key(name).uniform(one, (10,)).squeeze(0).tolist() for name in ("area", "ratio"))
        high, broad = height, width
        for share, turn in zip(areas, ratios):
            area, ratio = least + (1 - least) * share, (4 / 3) ** (2 * turn - 1)
            tall, wide = round(height * (area / ratio) ** 0.5), round(width * (area * ratio) ** 0.5)
            if tall <= height and wide <= width:
                high, broad = tall, wide
                break
        top, left = int(key("top").integers(one, height - high + 1)), int(key("left").integers(one, width - broad + 1))
        crop = frame[None, top : top + high, left : left + broad].permute(0, 3, 1, 2).float() / 255
        out = (size, size) if size else (height, width)
        crop = torch.nn.functional.interpolate(crop, out, mode="bilinear", antialias=True, align_corners=False)
        rows.append(crop.flip(3) if flip and float(key("flip").uniform(one)) < 0.5 else crop)
    return torch.cat(rows)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(
    ("height", "width", "size", "channels", "least"),
    [(32, 32, 28, 3, 0.6), (32, 32, 9, 3, 0.08), (20, 31, None, 1, 0.6), (9, 9, 9, 3, 1.0)],
)
def test_scaled_crops_equal_the_plain_loop(
    device: str, flip: bool, height: int, width: int, size: int | None, channels: int, least: float
) -> None:
    frames = torch.from_numpy(noise(32 * height, width, channels).reshape(32, height, width, channels))
    key, slots = Key.of(1)("crop", 3), torch.arange(32) * 7 + 5
    got = crop_flip(frames.to(device), size, key, slots, flip=flip, least=least)
    assert got.dtype == torch.float32 and got.is_contiguous(memory_format=torch.channels_last)
    assert got.min() >= 0 and got.max() <= 1
    assert torch.allclose(got.cpu(), scaled(frames, size, key, slots, flip, least), atol=3e-6)
    two = crop_flip(frames[[4, 1]], size, key, slots[[4, 1]], flip=flip, least=least)
    assert torch.allclose(two, got[[4, 1]].cpu(), atol=3e-6)


def test_scaled_crops_cover_what_they_should() -> None:
    """Each pixel holds its row and its column: their slopes in a crop tell how large it was."""
    count = 4000
    grid = torch.stack(torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij"), -1) / 63
    crops = crop_flip(grid.expand(count, 64, 64, 2), 8, Key.of(2), torch.arange(count), flip=False, least=0.6) * 63
    # Between the middles of the second and the last but one pixel, where no border disturbs, lie 5/8 of the crop.
    high = (crops[:, 0, -2, 4] - crops[:, 0, 1, 4]) * 8 / 5
    broad = (crops[:, 1, 4, -2] - crops[:, 1, 4, 1]) * 8 / 5
    area, ratio = high * broad / 64**2, broad / high
    assert 0.58 < area.min() < 0.62 and 0.98 < area.max() < 1.02
    assert 0.74 < ratio.min() < 0.77 and 1.3 < ratio.max() < 1.36
    assert ratio.log().mean().abs() < 0.01
    # Among areas up to 3/4 every proportion fits, so there they are all alike; beyond, few do.
    counts = torch.histc(area, 3, 0.6, 0.75)
    assert counts.min() > 0.85 * counts.max() and (area > 0.9).float().mean() < 0.1


def test_training_views_are_cropped_as_the_settings_say() -> None:
    images = torch.from_numpy(noise(8 * 16, 16).reshape(8, 16, 16, 3))
    split = Split("x", torch.arange(8) % 2, ("even", "odd"), images=images)
    for least in (0.0, 0.6):
        settings = DataSettings(resize=0, crop=12, crop_least=least, flip=False)
        loaded = load_images(split, settings, torch.device("cpu"), Silent())
        (views,) = loaded.augmented([torch.arange(8)], iter([Key.of(1)]))
        assert torch.equal(views, crop_flip(images, 12, Key.of(1), torch.arange(8), flip=False, least=least))


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"data\.crop_least is a share"):
        DataSettings(crop_least=1.2)
    with pytest.raises(SettingsError, match="at most 1"):
        crop_flip(torch.zeros(2, 8, 8, 3, dtype=torch.uint8), 8, Key.of(0), torch.arange(2), least=1.2)


def test_without_a_size_nothing_is_cropped_and_floats_keep_their_value() -> None:
    points = torch.rand(3, 1, 6, 1)
    slots = torch.arange(3)
    assert torch.equal(crop_flip(points, None, Key.of(0), slots, flip=False), points.permute(0, 3, 1, 2))
    assert torch.equal(centre_crop(points, None), points.permute(0, 3, 1, 2))


@pytest.mark.medium
@pytest.mark.parametrize(("height", "width", "size"), [(256, 256, 224), (9, 8, 5), (7, 7, 7), (8, 11, 6)])
def test_centre_crop_is_torchvisions(height: int, width: int, size: int) -> None:
    from torchvision.transforms import functional  # type: ignore[import-untyped]

    frames = torch.from_numpy(noise(2 * height, width).reshape(2, height, width, 3))
    got = centre_crop(frames, size)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, functional.center_crop(frames.permute(0, 3, 1, 2), [size, size]).float() / 255)


def test_crops_that_do_not_fit() -> None:
    frames, slots = torch.zeros(2, 8, 6, 3, dtype=torch.uint8), torch.arange(2)
    with pytest.raises(SettingsError, match="a crop of 7 does not fit frames of 8×6; choose 1 … 6"):
        crop_flip(frames, 7, Key.of(0), slots)
    with pytest.raises(SettingsError, match="a crop of 9 does not fit"):
        centre_crop(frames, 9)
    with pytest.raises(SettingsError, match="2 frames but 3 slots"):
        crop_flip(frames, 4, Key.of(0), torch.arange(3))
