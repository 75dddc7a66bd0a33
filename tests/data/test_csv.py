"""A CSV of path, label and split."""

from pathlib import Path

import pytest

from anchorhold.auditing.inputs import splits_of
from anchorhold.data.datasets import csv_split, dataset
from anchorhold.errors import DataError
from tests.data.test_datasets import picture


def table(folder: Path, *rows: str, head: str = "path,label,split") -> Path:
    """The CSV, and an image for every path in it."""
    for row in rows:
        name = row.split(",")[0].strip()
        if name and not (folder / name).exists():
            picture(folder / name)
    (folder / "list.csv").write_text("\n".join([head, *rows]) + "\n")
    return folder / "list.csv"


TRAIN = ("a/1.jpg,cat,train", "a/2.jpg,dog,train")


def test_rows_go_where_they_say(tmp_path: Path) -> None:
    path = table(tmp_path, *TRAIN, "t/3.jpg,owl,test", "t/4.jpg,cat,test", "t/5.jpg,owl,test")
    data = dataset(str(path))
    assert data.name == "csv" and data.root == str(path)
    assert [data.test.classes[i] for i in data.test.labels.tolist()] == ["owl", "cat", "owl"]
    assert [data.test.sample(i) for i in range(3)] == ["t/3.jpg", "t/4.jpg", "t/5.jpg"]
    assert [data.train.classes[i] for i in data.train.labels.tolist()] == ["cat", "dog"]
    assert data.query is data.test
    scored, _ = csv_split(path)
    assert scored.fingerprint() == data.test.fingerprint()


def test_query_and_gallery(tmp_path: Path) -> None:
    path = table(tmp_path, *TRAIN, "3.jpg,owl,query", "4.jpg,cat,gallery", "5.jpg,owl,gallery")
    data = dataset("csv", path)
    assert [data.query.sample(0), *map(data.gallery.sample, range(2))] == ["3.jpg", "4.jpg", "5.jpg"]
    assert data.train.queries is None
    query, gallery, _, _ = splits_of(str(path))
    assert (len(query), len(gallery)) == (1, 2)


def test_without_splits_a_fifth_of_the_classes_is_held_out_and_an_audit_takes_all(tmp_path: Path) -> None:
    path = table(tmp_path, *(f"{c}/{i}.jpg,{c}" for c in range(10) for i in range(2)), head="path,label")
    data = dataset("csv", path)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert not {*data.train.labels.tolist()} & {*data.test.labels.tolist()}
    assert "has no column split: 2 of its 10 classes are held out for test (seed 0)" in data.notes[0]
    query, gallery, _, _ = splits_of(path)
    assert query is gallery and len(query) == 20


def test_columns_in_any_order_with_others_beside_them_and_a_mark_of_excel(tmp_path: Path) -> None:
    for name in "1234":
        picture(tmp_path / f"{name}.jpg")
    rows = ["split,colour,label,path", 'train,red,"cat, black",1.jpg', "train,red,dog,2.jpg"]
    rows += ["test,red,dog,3.jpg", "test,red,owl, 4.jpg "]
    (tmp_path / "list.csv").write_text("\r\n".join(rows), encoding="utf-8-sig")
    data = dataset("csv", tmp_path / "list.csv")
    assert data.train.classes[int(data.train.labels[0])] == "cat, black" and data.test.sample(1) == "4.jpg"


def test_paths_may_lie_elsewhere(tmp_path: Path) -> None:
    far = picture(tmp_path / "far" / "x.jpg")
    (tmp_path / "near").mkdir()
    path = table(tmp_path / "near", *TRAIN, "../far/x.jpg,owl,test", "4.jpg,cat,test")
    assert dataset("csv", path).test.sample(0) == "../far/x.jpg"
    path = table(tmp_path / "near", *TRAIN, f"{far},owl,test", "4.jpg,cat,test")
    data = dataset("csv", path)
    assert data.test.sample(0) == far.as_posix() and data.test.fingerprint()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((*TRAIN, "a/1.jpg,owl,test"), "line 4 of .*repeats a/1.jpg from line 2; list each image once"),
        ((*TRAIN, "a/../a/1.jpg,owl,test"), "repeats a/../a/1.jpg from line 2"),
        (
            ("1.jpg,0.0,train", "2.jpg,1.0,train", "3.jpg,2.0,test"),
            "labels in .* 0.0 in line 2 is not a whole number from 0",
        ),
        (("1.jpg,0,train", "2.jpg,1,train", "3.jpg,2.5,test"), "2.5 in line 4 is not a whole number from 0"),
        (("1.jpg,0,train", "2.jpg,1,train", "3.jpg,nan,test"), "nan in line 4 is not a whole number from 0"),
        ((*TRAIN, "3.jpg,,test"), "line 4 of .*has no label"),
        ((*TRAIN, ",owl,test"), "line 4 of .*has no path"),
        ((*TRAIN, "3.jpg,owl,val"), "line 4 of .*has the split 'val'; write one of train, test, query, gallery"),
        ((*TRAIN, "3.jpg,owl"), "line 4 of .*has 2 fields, but its header has 3"),
        ((*TRAIN, "3.jpg,owl,test", "4.jpg,cat,query"), "use either test, or both query and gallery"),
        ((*TRAIN, "3.jpg,owl,query", "4.jpg,cat,query"), "use either test, or both query and gallery"),
        (("3.jpg,owl,test", "4.jpg,cat,test"), "no row with the split train"),
        (TRAIN, "csv/test has no images"),
        ((*TRAIN, "3.jpg,owl,test"), r"csv/test has only one class \(owl\)"),
        ((), "no images|has 0 classes|no row with the split train"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        dataset("csv", table(tmp_path, *rows))
    assert "\n" not in str(caught.value)


def test_labels_that_are_whole_numbers_or_look_partly_like_numbers_are_classes(tmp_path: Path) -> None:
    rows = ("1.jpg,007,train", "2.jpg,1.5 l engine,train", "3.jpg,2.0,test", "4.jpg,nan,test")
    assert set(dataset("csv", table(tmp_path, *rows)).train.classes) == {"007", "1.5 l engine", "2.0", "nan"}


def test_a_missing_image_a_missing_column_and_no_table_at_all(tmp_path: Path) -> None:
    path = table(tmp_path, *TRAIN, "3.jpg,owl,test", "4.jpg,cat,test")
    (tmp_path / "3.jpg").unlink()
    picture(tmp_path / "3.png")  # of another format: not what was listed
    with pytest.raises(DataError, match=r"1 of 4 listed images is missing, the first is .*3\.jpg; correct"):
        dataset("csv", path)
    with pytest.raises(DataError, match="has no column label; its first line is 'path,class'; give a CSV whose"):
        dataset("csv", table(tmp_path, "1.jpg,owl", head="path,class"))
    with pytest.raises(DataError, match=r"csv needs ah.dataset\('csv', root=…\); give a CSV"):
        dataset("csv")
    with pytest.raises(DataError, match=r"nowhere\.csv is missing; give a CSV"):
        dataset(str(tmp_path / "nowhere.csv"))
    (tmp_path / "list.csv").write_bytes(bytes(range(256)))
    with pytest.raises(DataError, match="cannot be read as a CSV"):
        dataset("csv", path)
