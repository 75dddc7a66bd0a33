import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from anchorhold.data.datasets import dataset, folder_split
from anchorhold.data.splits import Dataset, Split
from anchorhold.errors import DataError, SettingsError


def picture(path: Path, colour: tuple[int, int, int] = (9, 99, 200)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 6), colour).save(path)
    return path


def small_cub(root: Path, extension: str = ".jpg") -> Path:
    """CUB's layout with four classes of three images; the lists say .jpg, as the official ones do."""
    root.mkdir(parents=True)
    listed: list[str] = []
    marks: list[str] = []
    for number in (1, 100, 101, 200):
        for i in range(3):
            name = f"{number:03d}.Bird/Bird_{i}"
            picture(root / "images" / (name + extension), (number, i, 0))
            listed.append(f"{len(listed) + 1} {name}.jpg")
            marks.append(f"{len(marks) + 1} {number}")
    (root / "images.txt").write_text("\n".join(listed) + "\n")
    (root / "image_class_labels.txt").write_text("\n".join(marks) + "\n")
    (root / "classes.txt").write_text("".join(f"{n} {n:03d}.Bird\n" for n in range(1, 201)))
    return root


def photos(root: Path, classes: int = 10, images: int = 3) -> Path:
    for c in range(classes):
        for i in range(images):
            picture(root / f"class{c}" / f"{i}.jpg", (c, i, 0))
    return root


# ---- splits ------------------------------------------------------------------


def two_by_two() -> Split:
    images = torch.arange(4 * 12, dtype=torch.uint8).reshape(4, 2, 2, 3)
    return Split("x", torch.tensor([0, 0, 1, 1]), ("p", "q"), images=images)


def test_keep_takes_a_mask_or_ids_in_their_order() -> None:
    split = two_by_two()
    by_mask = split.keep(torch.tensor([True, False, False, True]))
    by_ids = split.keep(torch.tensor([3, 0]))
    assert split.images is not None
    assert by_mask.images is not None
    assert by_ids.images is not None
    assert by_mask.labels.tolist() == [0, 1]
    assert torch.equal(by_mask.images, split.images[[0, 3]])
    assert by_ids.labels.tolist() == [1, 0]
    assert torch.equal(by_ids.images, split.images[[3, 0]])
    with pytest.raises(DataError, match="4 images but the mask has 2"):
        split.keep(torch.tensor([True, False]))


def test_a_split_refuses_what_does_not_fit_together() -> None:
    labels, images = torch.tensor([0, 1]), torch.zeros(2, 1, 1, 3)
    with pytest.raises(DataError, match="either paths or images"):
        Split("x", labels, ("p", "q"))
    with pytest.raises(DataError, match="2 images but labels of shape"):
        Split("x", torch.tensor([0]), ("p", "q"), images=images)
    with pytest.raises(DataError, match="int64"):
        Split("x", labels.float(), ("p", "q"), images=images)
    with pytest.raises(DataError, match="outside 0 … 0"):
        Split("x", labels, ("p",), images=images)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 3, 8, 8), r"shape \(2, 3, 8, 8\).*images\.permute\(0, 2, 3, 1\)"),
        (torch.zeros(2, 8, 8), r"shape \(2, 8, 8\).*the last axis holds 1 … 4 channels"),
        (torch.zeros(2, 8, 8, 0), "the last axis holds 1 … 4 channels"),
        (torch.tensor(1.0), "give \\(N, height, width, channels\\)"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.float64), r"torch\.float64; .*images\.float\(\)"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.int64), r"torch\.int64; .*images\.to\(torch\.uint8\)"),
        (torch.full((2, 8, 8, 3), 200.0), "not in .0, 1.: divide by 255"),
        (torch.full((2, 8, 8, 3), -1.5), "without normalisation"),
        (torch.full((2, 8, 8, 3), 1.5), "scale them to that range"),
        (torch.full((2, 8, 8, 3), torch.nan), "pixels from nan to nan"),
        (torch.full((2, 8, 8, 3), torch.inf), "pixels from inf to inf"),
    ],
)
def test_a_split_refuses_images_of_another_order_type_or_range(images: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Split("x", torch.tensor([0, 1]), ("p", "q"), images=images)


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_data_set_made_by_hand_has_two_classes_in_both_splits(part: str) -> None:
    whole = two_by_two()
    splits = {"train": whole, "test": whole}
    Dataset("mine", **splits)
    with pytest.raises(DataError, match=r"x has only one class \(q\)"):
        Dataset("mine", **{**splits, part: whole.keep(whole.labels == 1)})
    with pytest.raises(DataError, match="x has no images"):
        Dataset("mine", **{**splits, part: whole.keep(whole.labels == 2)})


def test_classes_held_out_are_tested_on_instead_of_the_test_split() -> None:
    whole, less = dataset("digits"), dataset("digits", held_out=2)
    assert (
        less.held_out == 2
        and whole.held_out == 0
        and any("evaluating on 2 held-out training classes" in note for note in less.notes)
    )
    seen, unseen = (set(split.labels.tolist()) for split in (less.train, less.test))
    classes = sorted(set(whole.train.labels.tolist()))
    assert (seen, unseen) == (set(classes[:-2]), set(classes[-2:]))
    assert len(less.train) + len(less.test) == len(whole.train) and less.test.fingerprint() != whole.test.fingerprint()
    for held, wrong in (
        (1, "hold out at least two"),
        (4, "leave at least two to train on"),
        (-1, "hold out at least two"),
    ):
        with pytest.raises(DataError, match=wrong):
            dataset("digits", held_out=held)
    with pytest.raises(DataError, match="2 classes of digits are already held out"):
        less.holding_out(2)


def test_fingerprint_sees_content_and_not_the_place(tmp_path: Path) -> None:
    one = dataset("folder", photos(tmp_path / "one", 4)).train.fingerprint()
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "two")
    data = dataset("folder", tmp_path / "elsewhere" / "two")
    assert data.train.fingerprint() == one != data.test.fingerprint()
    assert one.startswith("contents:")
    assert data.train.paths is not None
    data.train.paths[0].write_bytes(b"longer than before" * 99)
    assert data.train.fingerprint() != one
    data.train.paths[0].unlink()
    with pytest.raises(DataError, match="is missing or cannot be read"):
        data.train.fingerprint()


def test_fingerprint_of_images_in_memory_sees_every_byte_and_label() -> None:
    split = two_by_two()
    assert split.images is not None
    other = split.images.clone()
    other[3, 1, 1, 2] += 1
    prints = {
        split.fingerprint(),
        Split("x", split.labels, split.classes, images=other).fingerprint(),
        Split("x", torch.tensor([0, 1, 1, 1]), split.classes, images=split.images).fingerprint(),
        Split("x", split.labels, ("p", "r"), images=split.images).fingerprint(),
    }
    assert len(prints) == 4
    assert two_by_two().fingerprint() in prints


# ---- the menu ----------------------------------------------------------------


def test_unknown_names_are_met_with_the_nearest_or_the_list() -> None:
    with pytest.raises(SettingsError, match=r"no data set or folder 'digts'; did you mean digits\?$"):
        dataset("digts")
    listed = "choose one of cub, cars, sop, inshop, digits, gaussians, or give a folder of class folders"
    with pytest.raises(SettingsError, match=f"no data set or folder 'nowhere/x'; {listed}, a CSV or module:function$"):
        dataset("nowhere/x")
    with pytest.raises(SettingsError, match="'foldr'; choose one of cub, cars, sop, inshop, digits, gaussians, or"):
        dataset("foldr")  # nobody types `folder`: a folder is given by its path
    with pytest.raises(SettingsError, match="no option 'dimensions'; it has dimension, train, test, sigma"):
        dataset("gaussians", dimensions=3)
    with pytest.raises(SettingsError, match="no option 'size'; it has none"):
        dataset("digits", size=3)


def test_what_is_no_name_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^a data set must be one of cub, .*, a folder or a CSV, not a NoneType$"):
        dataset(None)  # type: ignore[arg-type]
    (tmp_path / "notes.md").touch()
    with pytest.raises(SettingsError, match=r"notes\.md is a file but not a \.csv; choose one of"):
        dataset(tmp_path / "notes.md")
    for name in ("digits", "gaussians"):
        with pytest.raises(SettingsError, match=f"^{name} needs no files; leave out its root$"):
            dataset(name, "nowhere")


# ---- CUB ---------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "CUB_200_2011"])
@pytest.mark.parametrize("extension", [".jpg", ".webp"])
def test_cub_by_its_folder_or_the_one_above_in_any_format(tmp_path: Path, inner: str, extension: str) -> None:
    small_cub(tmp_path / "here" / inner, extension)
    data = dataset("cub", tmp_path / "here")
    assert data.train.labels.tolist() == [0] * 3 + [99] * 3
    assert data.test.labels.tolist() == [100] * 3 + [199] * 3
    assert data.test.classes[199] == "200.Bird"
    assert data.train.paths is not None
    assert [p.suffix for p in data.train.paths] == [extension] * 6
    assert data.train.sample(0) == f"001.Bird/Bird_0{extension}"
    assert data.query is data.test is data.gallery
    assert (data.name, data.train.name, data.test.name) == ("cub", "cub/train", "cub/test")


def test_cub_keeps_the_listed_file_where_two_formats_lie_side_by_side(tmp_path: Path) -> None:
    root = small_cub(tmp_path / "cub")
    picture(root / "images" / "001.Bird" / "Bird_0.webp")
    assert dataset("cub", root).train.sample(0) == "001.Bird/Bird_0.jpg"


def test_cub_without_a_root_or_a_list_says_what_and_where_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give the folder CUB_200_2011; .*Caltech"):
        dataset("cub")
    for name in ("images.txt", "image_class_labels.txt", "classes.txt"):
        root = small_cub(tmp_path / name)
        (root / name).unlink()
        with pytest.raises(DataError, match=f"{root / name} is missing.*Caltech"):
            dataset("cub", root)


def test_cub_with_missing_images_names_the_first_and_the_count(tmp_path: Path) -> None:
    root = small_cub(tmp_path / "cub")
    (root / "images" / "100.Bird" / "Bird_1.jpg").unlink()
    shutil.rmtree(root / "images" / "101.Bird")
    with pytest.raises(DataError, match=r"4 of 12 listed images are missing, .*100\.Bird/Bird_1\.jpg"):
        dataset("cub", root)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("image_class_labels.txt", "12 200\n", "", "1 image id is in only one of them, the first is 12"),
        ("images.txt", "1 001.Bird/Bird_0.jpg\n", "", "in only one of them, the first is 1;"),
        ("image_class_labels.txt", "12 200", "12 201", "gives image 12 the class 201"),
        ("image_class_labels.txt", "12 200", "12 owl", "gives image 12 the class owl"),
        ("classes.txt", "100 100.Bird\n", "", "gives image 4 the class 100"),
        ("images.txt", "2 001", "x 001", "line 2 of .*images.txt is 'x 001"),
        ("images.txt", "2 001", "1 001", "line 2 of .*not a new id"),
    ],
)
def test_cub_lists_that_do_not_match(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    root = small_cub(tmp_path / "cub")
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        dataset("cub", root)


def test_cub_with_empty_lists_has_no_images(tmp_path: Path) -> None:
    root = small_cub(tmp_path / "cub")
    for name in ("images.txt", "image_class_labels.txt"):
        (root / name).write_text("\n")
    with pytest.raises(DataError, match="cub/train has no images"):
        dataset("cub", root)


def test_the_real_cub() -> None:
    root = os.environ.get("ANCHORHOLD_CUB")
    if not root:
        pytest.skip("set ANCHORHOLD_CUB to an unpacked CUB_200_2011 to test the real set")
    data = dataset("cub", root)
    assert (len(data.train), len(data.test)) == (5864, 5924)
    assert torch.unique(data.train.labels).tolist() == list(range(100))
    assert torch.unique(data.test.labels).tolist() == list(range(100, 200))


# ---- folders -----------------------------------------------------------------


def test_a_folder_holds_out_a_fifth_of_its_classes_and_says_so(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos")
    data = dataset(str(root))
    held = sorted({data.test.classes[i] for i in data.test.labels.tolist()})
    assert (len(data.train), len(data.test), len(held)) == (24, 6, 2)
    assert not set(data.train.labels.tolist()) & set(data.test.labels.tolist())
    names = ", ".join(held)
    assert data.notes == (
        f"{root} has no train/ and test/: 2 of its 10 classes are held out for test (seed 0): {names}.",
    )
    assert data.train.paths is not None
    for path, label in zip(data.train.paths, data.train.labels.tolist()):
        assert path.parent.name == data.train.classes[label]
    again = dataset("folder", root)
    assert torch.equal(again.test.labels, data.test.labels)
    assert again.test.paths == data.test.paths
    chosen = {tuple(dataset("folder", root, seed=seed).test.labels.tolist()) for seed in range(6)}
    assert len(chosen) > 1


@pytest.mark.parametrize(("classes", "held"), [(4, 2), (7, 2), (13, 3), (20, 4)])
def test_how_many_classes_are_held_out(tmp_path: Path, classes: int, held: int) -> None:
    data = dataset("folder", photos(tmp_path, classes, images=2))
    assert len(data.test) == 2 * held
    assert len(data.train) == 2 * (classes - held)


def test_train_and_test_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    photos(tmp_path / "train", 3)
    for name in ("class1", "other"):
        picture(tmp_path / "test" / name / "a.PNG")
        picture(tmp_path / "test" / name / "b.png")
    data = dataset("folder", tmp_path)
    assert data.train.classes == data.test.classes == ("class0", "class1", "class2", "other")
    assert data.test.labels.tolist() == [1, 1, 3, 3]
    assert data.notes == ()
    alone, _ = folder_split(tmp_path / "test")
    assert alone.fingerprint() == data.test.fingerprint()


@pytest.mark.parametrize(("there", "lacking"), [("train", "test"), ("test", "train")])
def test_half_a_data_set_names_the_missing_half(tmp_path: Path, there: str, lacking: str) -> None:
    photos(tmp_path / there, 4)
    with pytest.raises(DataError, match=f"has {there}/ but no {lacking}/; add {tmp_path / lacking}"):
        dataset("folder", tmp_path)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    photos(tmp_path, 3)
    picture(tmp_path / "train" / "locomotive.jpg")
    picture(tmp_path / "train" / "tram.jpg")
    assert "train" in dataset("folder", tmp_path).train.classes


def test_what_counts_as_an_image_of_a_class(tmp_path: Path) -> None:
    photos(tmp_path, 4, images=2)
    deep = picture(tmp_path / "class0" / "nested" / "deeper" / "x.JPEG")
    for ignored in (".hidden.jpg", ".thumbs/x.jpg"):
        picture(tmp_path / "class0" / ignored)
    (tmp_path / "class0" / "notes.txt").write_text("no image")
    (tmp_path / "class0" / "nested" / "loop").symlink_to(tmp_path, target_is_directory=True)
    picture(tmp_path / ".cache" / "x.jpg")
    split, notes = folder_split(tmp_path)
    assert split.paths is not None
    assert split.classes == ("class0", "class1", "class2", "class3")
    assert split.labels.bincount().tolist() == [3, 2, 2, 2]
    assert deep in split.paths
    assert notes == ()


def test_notes_tell_what_was_left_out_and_what_stands_alone(tmp_path: Path) -> None:
    photos(tmp_path, 4, images=2)
    picture(tmp_path / "lonely" / "x.jpg")
    picture(tmp_path / "stray.jpg")
    (tmp_path / "void").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "class0", target_is_directory=True)
    split, notes = folder_split(tmp_path)
    assert len(split) == 9
    assert notes == (
        f"left out 1 image of {tmp_path} outside the class folders.",
        f"left out 1 folder of {tmp_path} without images: void.",
        f"left out 1 linked folder of {tmp_path}: link.",
        "1 class has only one image in folder, which no other image can match: lonely.",
    )


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give a folder of class folders"):
        dataset("folder")
    with pytest.raises(DataError, match="absent cannot be read as a folder"):
        dataset("folder", tmp_path / "absent")
    with pytest.raises(DataError, match=r"stray\.jpg cannot be read as a folder"):
        dataset("folder", picture(tmp_path / "loose" / "stray.jpg"))
    with pytest.raises(DataError, match="1 image but no class folders"):
        dataset("folder", tmp_path / "loose")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match=r"has 0 classes \(none\)"):
        dataset("folder", tmp_path / "nothing")
    with pytest.raises(DataError, match=r"has 3 classes \(class0, class1, class2\), but needs four"):
        dataset("folder", photos(tmp_path / "three", 3))
    photos(tmp_path / "both" / "train", 2)
    (tmp_path / "both" / "test").mkdir()
    with pytest.raises(DataError, match="folder/test has no images"):
        dataset("folder", tmp_path / "both")
    photos(tmp_path / "both" / "test", 1)
    with pytest.raises(DataError, match=r"folder/test has only one class \(class0\)"):
        dataset("folder", tmp_path / "both")


# ---- digits and Gaussians ----------------------------------------------------


def test_digits() -> None:
    data = dataset("digits")
    assert data.train.images is not None
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.shape == (901, 8, 8, 1)
    assert (int(data.train.images.min()), int(data.train.images.max())) == (0, 255)
    assert torch.unique(data.train.labels).tolist() == [0, 1, 2, 3, 4]
    assert torch.unique(data.test.labels).tolist() == [5, 6, 7, 8, 9]


def test_gaussians_are_those_of_the_paper() -> None:
    data = dataset("gaussians", seed=3)
    images, labels = data.train.images, data.train.labels
    assert images is not None
    assert images.dtype == torch.float32
    assert images.shape == (508, 1, 64, 1)
    assert len(data.test) == 516
    assert labels.bincount().tolist() == [254, 254]
    for label, mean in enumerate((0.25, 0.75)):
        own = images[labels == label]
        assert own.mean() == pytest.approx(mean, abs=1e-3)
        assert own.std() == pytest.approx(0.025, rel=0.03)
    same, other = dataset("gaussians", seed=3), dataset("gaussians", seed=4)
    assert same.train.fingerprint() == data.train.fingerprint() != other.train.fingerprint()
    assert same.test.fingerprint() != same.train.fingerprint()


def test_gaussians_stay_in_the_unit_cube_and_take_options() -> None:
    data = dataset("gaussians", dimension=1, train=5, test=400, sigma=1.0)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1]
    assert data.test.images is not None
    assert data.test.images.shape == (400, 1, 1, 1)
    assert (float(data.test.images.min()), float(data.test.images.max())) == (0, 1)
    with pytest.raises(SettingsError, match="dimension ≥ 1"):
        dataset("gaussians", dimension=0)
