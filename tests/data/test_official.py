"""Cars-196, Stanford Online Products and In-Shop on small copies of their layouts; Cars for real where it lies."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anchorhold as ah
from anchorhold.auditing.inputs import splits_of
from anchorhold.data.datasets import dataset
from anchorhold.errors import DataError
from tests.data.test_datasets import picture

CARS = [("000004", 196), ("000001", 1), ("000003", 99), ("000002", 98)]  # not in the order of their names


def small_cars(root: Path, kind: str, extension: str = ".jpg") -> Path:
    """Two training and two test classes; the annotations say .jpg, as the official ones do."""
    for name, mark in CARS:
        picture(root / "car_ims" / (name + extension), (mark, 0, 0))
    names = [f"Car {number}" for number in range(1, 197)]
    if kind == "mat":
        from scipy.io import savemat  # type: ignore[import-untyped]

        fields = [("relative_im_path", object), ("bbox_x1", object), ("class", object), ("test", object)]
        rows = np.zeros((1, len(CARS)), dtype=fields)
        for at, (name, mark) in enumerate(CARS):
            rows[0, at] = (f"car_ims/{name}.jpg", 7, mark, 0)
        savemat(root / "cars_annos.mat", {"annotations": rows, "class_names": np.array([names], dtype=object)})
    else:
        lines = [f"car_ims/{name}{extension},{mark},0,{names[mark - 1]}" for name, mark in CARS]
        (root / "cars_annos.csv").write_text("\n".join(["relative_im_path,class,test,class_name", *lines]))
    return root


def small_sop(root: Path) -> Path:
    root.mkdir(parents=True)
    image = 0
    for part, marks in (("train", (1, 2)), ("test", (11319, 22634))):
        lines = ["image_id class_id super_class_id path"]
        for mark in marks:
            for i in range(2):
                image += 1
                name = f"bicycle_final/{mark}_{i}.JPG"
                picture(root / name)
                lines.append(f"{image} {mark} 1 {name}")
        (root / f"Ebay_{part}.txt").write_text("\n".join(lines) + "\n")
    return root


SHOP = [("train", 1), ("train", 2), ("query", 7), ("gallery", 7), ("gallery", 8), ("query", 8), ("gallery", 7)]


def small_shop(root: Path, official: bool = True) -> Path:
    """Query and gallery lie mixed in the list, as in the official one."""
    lines = [str(len(SHOP)), "image_name item_id evaluation_status"]
    for at, (status, item) in enumerate(SHOP):
        name = f"img/WOMEN/Dresses/id_{item:08d}/{at:02d}_1_front.jpg"
        picture(root / ("Img" if official else "") / name, (item, at, 0))
        lines.append(f"{name}   id_{item:08d}   {status}")
    place = root / "Eval" if official else root
    place.mkdir(exist_ok=True)
    (place / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    return root


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# ---- Cars --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mat", "csv"])
@pytest.mark.parametrize("extension", [".jpg", ".webp"])
@pytest.mark.parametrize("inner", ["", "cars196"])
def test_cars_by_its_annotations(tmp_path: Path, kind: str, extension: str, inner: str) -> None:
    (tmp_path / "here").mkdir()
    small_cars(tmp_path / "here" / inner, kind, extension)
    data = dataset("cars", tmp_path / "here")
    assert data.train.labels.tolist() == [1, 98]  # 1-based, by the order of the names
    assert data.test.labels.tolist() == [99, 196]
    assert [data.train.sample(i) for i in range(2)] == [f"car_ims/00000{n}{extension}" for n in (1, 2)]
    assert [data.test.classes[label] for label in data.test.labels.tolist()] == ["Car 99", "Car 196"]
    assert data.query is data.test is data.gallery
    assert data.notes == (
        "incomplete data set: cars/train 2, cars/test 2 images; the whole has cars/train 8,054, cars/test 8,131.",
    )


def test_cars_without_what_it_needs_says_what_and_where_from(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give the folder cars196; .*Stanford's page of Cars-196"):
        dataset("cars")
    with pytest.raises(DataError, match=r"neither cars_annos\.mat nor cars_annos\.csv; .*Stanford's page"):
        dataset("cars", tmp_path)
    root = small_cars(tmp_path / "cars", "mat")
    (root / "car_ims" / "000003.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 4 listed images is missing, .*000003\.jpg; unpack .*Stanford's"):
        dataset("cars", root)
    (root / "cars_annos.mat").write_bytes(b"no MATLAB file" * 99)
    with pytest.raises(DataError, match=r"cars_annos\.mat cannot be read as Cars' annotations"):
        dataset("cars", root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",99,", ",99.0,", "line 4 of .*the class 99.0, outside 1 … 196"),
        (",99,", ",197,", "the class 197, outside 1 … 196"),
        (",99,", ",0,", "the class 0, outside 1 … 196"),
        (",class,", ",klass,", "has no column class"),
        ("car_ims/000003", "car_ims/000001", "line 3 of .*repeats car_ims/000001.jpg from line 2"),
        ("car_ims/000003", "../000003", r"names \.\./000003\.jpg, which is outside"),
        ("car_ims/000003", "/etc/000003", "which is outside"),
        ("Car 99", "Car,99", "line 4 of .*has 5 fields, but its header has 4"),
    ],
)
def test_cars_with_wrong_annotations(tmp_path: Path, old: str, new: str, message: str) -> None:
    root = small_cars(tmp_path / "cars", "csv")
    replaced(root / "cars_annos.csv", old, new)
    with pytest.raises(DataError, match=message):
        dataset("cars", root)


def test_the_real_cars() -> None:
    root = os.environ.get("ANCHORHOLD_CARS")
    if not root:
        pytest.skip("set ANCHORHOLD_CARS to an unpacked cars196 to test the real set")
    data = dataset("cars", root)
    assert torch.unique(data.train.labels).tolist() == list(range(1, 99))
    assert torch.unique(data.test.labels).tolist() == list(range(99, 197))
    if (Path(root) / "cars_annos.mat").is_file():
        assert (len(data.train), len(data.test), data.notes) == (8054, 8131, ())
    else:  # a copy without its 15 largest files
        with open(Path(root) / "cars_annos.csv", newline="") as file:
            marks = [int(row["class"]) for row in csv.DictReader(file)]
        assert (len(data.train), len(data.test)) == (sum(m <= 98 for m in marks), sum(m > 98 for m in marks))
        assert len(data.train) >= 8048 and len(data.test) >= 8122 and "the whole has cars/train 8,054" in data.notes[0]


# ---- Stanford Online Products ------------------------------------------------


def test_sop_by_its_two_lists(tmp_path: Path) -> None:
    small_sop(tmp_path / "Stanford_Online_Products")
    data = dataset("sop", tmp_path)
    assert data.train.labels.tolist() == [1, 1, 2, 2]
    assert data.test.labels.tolist() == [11319, 11319, 22634, 22634]
    assert data.test.sample(0) == "bicycle_final/11319_0.JPG" and data.test.classes[22634] == "22634 bicycle"
    assert "sop/train 4, sop/test 4 images; the whole has sop/train 59,551, sop/test 60,502" in data.notes[0]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "Ebay_test.txt",
            "image_id class_id",
            "id class",
            "does not begin with 'image_id class_id super_class_id path'",
        ),
        ("Ebay_test.txt", "11319 1", "11319.0 1", "line 2 of .*the class 11319.0"),
        ("Ebay_test.txt", "22634 1", "22635 1", "the class 22635, outside 1 … 22634"),
        ("Ebay_test.txt", "22634 1", "2 1", "class 2 is in both lists"),
        ("Ebay_test.txt", "6 11319", "5 11319", "line 3 of .*repeats the image id 5"),
        ("Ebay_test.txt", "11319_1.JPG", "11319_0.JPG", "line 3 of .*repeats .* from line 2"),
        ("Ebay_train.txt", " 1 bicycle", " bicycle", "line 2 of .*not 4 fields"),
        (
            "Ebay_train.txt",
            "bicycle_final/1_0",
            "bicycle_final/9_9",
            r"1 of 4 listed .*9_9\.JPG; .*Online Products",
        ),
        ("Ebay_train.txt", "bicycle_final/1_0", "../1_0", "which is outside"),
    ],
)
def test_sop_with_wrong_lists(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    root = small_sop(tmp_path / "sop")
    replaced(root / file, old, new)
    with pytest.raises(DataError, match=message):
        dataset("sop", root)


@pytest.mark.parametrize("part", ["train", "test"])
def test_sop_without_a_list_says_which_and_where_from(tmp_path: Path, part: str) -> None:
    root = small_sop(tmp_path / "sop")
    (root / f"Ebay_{part}.txt").unlink()
    with pytest.raises(DataError, match=f"Ebay_{part}.txt is missing; .*Stanford's page of Online Products"):
        dataset("sop", root)


# ---- In-Shop -----------------------------------------------------------------


@pytest.mark.parametrize("official", [True, False])
def test_inshop_searches_queries_in_the_gallery(tmp_path: Path, official: bool) -> None:
    data = dataset("inshop", small_shop(tmp_path / "shop", official))
    assert [data.train.classes[i] for i in data.train.labels.tolist()] == ["id_00000001", "id_00000002"]
    for side, items in ((data.query, (7, 8)), (data.gallery, (7, 8, 7))):
        assert [side.classes[i] for i in side.labels.tolist()] == [f"id_{item:08d}" for item in items]
        assert side.queries is None
    assert (data.query.name, data.gallery.name) == ("inshop/query", "inshop/gallery")
    assert not {*(data.query.paths or ())} & {*(data.gallery.paths or ())}
    assert len(data.test) == 5 and "inshop/query 2, inshop/gallery 3 images; the whole has" in data.notes[0]
    assert "inshop/train 25,882, inshop/query 14,218, inshop/gallery 12,612" in data.notes[0]
    # An audit of the data set and one of its test split look at the same.
    for given in (data, data.test):
        query, gallery, own, _ = splits_of(given)
        assert (query.name, gallery.name, own) == ("inshop/query", "inshop/gallery", None)
    swapped = torch.tensor([False, True, True, False, True])
    other = ah.Split("x", data.test.labels, data.test.classes, data.test.paths, root=data.test.root, queries=swapped)
    assert other.fingerprint() != data.test.fingerprint()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("7\n", "8\n", "announces 8 images but lists 7"),
        ("7\nimage_name", "image_name", "does not begin with a number"),
        ("item_id", "id", "does not begin with a number and"),
        ("   query", "   val", "line 5 of .*the status val, not train, query or gallery"),
        ("   query", "", "line 5 of .*not 3 fields"),
        ("/06_1_front", "/03_1_front", "line 9 of .*repeats .* from line 6"),
        ("/06_1_front", "/66_1_front", "1 of 7 listed images is missing, .*66_1_front.jpg; .*DeepFashion"),
    ],
)
def test_inshop_with_a_wrong_list(tmp_path: Path, old: str, new: str, message: str) -> None:
    root = small_shop(tmp_path / "shop")
    replaced(root / "Eval" / "list_eval_partition.txt", old, new)
    with pytest.raises(DataError, match=message):
        dataset("inshop", root)


def test_inshop_without_its_list_says_where_it_is_to_be_had(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"list_eval_partition\.txt is missing; .*DeepFashion"):
        dataset("inshop", tmp_path)


# ---- looks and audits of queries against a gallery ---------------------------


def shop_in_memory() -> ah.Dataset:
    """Digits whose first hundred test images ask the others; nobody meets itself."""
    digits = ah.dataset("digits")
    asks = torch.zeros(len(digits.test), dtype=torch.bool)
    asks[torch.arange(0, len(asks), 9)] = True
    images = digits.test.images
    test = ah.Split("shop/test", digits.test.labels, digits.test.classes, images=images, queries=asks)
    return ah.Dataset("digits", digits.train, test)


@pytest.mark.medium
def test_evaluations_while_training_take_queries_against_the_gallery(tmp_path: Path) -> None:
    from anchorhold.metrics import evaluate
    from anchorhold.model.frozen import embed_all, frozen

    data = shop_in_memory()
    changes: dict[str, Any] = {
        "train": {"epochs": 1, "attack_eps": 0.1, "attack_steps": 3, "attack_queries": 60},
        "model": {"dim": 16},
        "defence": {"steps": 1},
    }
    run = ah.fit(None, data, "hm-lga", tmp_path / "run", overrides=changes, device="cpu")
    (row,) = run.metrics()
    asks = data.test.queries
    assert asks is not None and data.test.images is not None
    with frozen(ah.load(tmp_path / "run")) as embed:
        e = embed_all(embed, [data.test.images.permute(0, 3, 1, 2) / 255])
    scores = evaluate(e[asks], data.test.labels[asks], gallery=e[~asks], gallery_labels=data.test.labels[~asks])
    assert row["r1"] == pytest.approx(100 * scores.r1) and row["map_r"] == pytest.approx(100 * scores.map_r)
    assert row["map_r"] != pytest.approx(100 * evaluate(e, data.test.labels).map_r, abs=1e-6)
    assert row["r1_attacked"] <= row["r1"]


def test_an_audit_takes_queries_against_the_gallery(tmp_path: Path) -> None:
    data = shop_in_memory()
    model = ah.Embedder("small", 8, None, channels=1, size=(8, 8))
    found = ah.audit(model, data, limit=10, attacks=["ES"], steps=1, device="cpu").to_dict()
    assert found["data"]["same"] is False
    assert found["data"]["images"] == [len(data.query), len(data.gallery)] == [100, 796]
