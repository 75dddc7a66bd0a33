"""Which images a folder, a CSV or a tar holds, and one clear line for whatever is wrong with them."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from anchorhold.console import shown
from anchorhold.errors import DataError
from anchorhold.index.sources import Source, digest_of, source_at


def ids(source: Source) -> list[str]:
    return [item.id for item in source.items]


def contents(source: Source, *numbers: int) -> dict[int, bytes | None]:
    """What `read` gives for some items, as bytes."""
    found = {}
    for at, what in source.read(lambda number: not numbers or number in numbers):
        found[at] = what.read_bytes() if isinstance(what, Path) else what.read() if what is not None else None
    return found


def pack(path: Path, members: dict[str, bytes | None], mode: str = "w") -> Path:
    """A tar of files; None makes a link of that name."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name.removeprefix("again:"))
            if data is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            else:
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def test_a_folder_gives_every_image_below_it_in_order(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/deep/1.JPG", "a.webp", "notes.txt", ".hidden/x.png", "b/.x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    source = source_at(tmp_path)
    assert ids(source) == ["a.webp", "b/2.png", "b/deep/1.JPG"] and not source.notes and not source.labelled
    assert contents(source) == {at: name.encode() for at, name in enumerate(ids(source))}
    assert contents(source, 1) == {1: b"b/2.png"}


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a/1.png", "b/2.png", "b/deep/3.png"], ["a", "b", "b"]),
        (["test/a/1.png", "train/b/2.png"], ["a", "b"]),  # the two halves of a data set are no classes
        (["test/1.png", "train/b/2.png"], ["", ""]),
        (["a/1.png", "b/2.png", "loose.png"], ["", "", ""]),
        (["only/1.png", "only/2.png"], ["", ""]),
        (["1.png", "2.png"], ["", ""]),
    ],
)
def test_class_folders_are_labels(tmp_path: Path, names: list[str], labels: list[str]) -> None:
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x")
    source = source_at(tmp_path / "in")
    assert [item.named for item in source.items] == labels and source.labelled == any(labels)
    packed = source_at(pack(tmp_path / "p.tar", dict.fromkeys(ids(source), b"x")))
    assert [item.named for item in packed.items] == labels
    inside = source_at(pack(tmp_path / "q.tar", {f"photos/{name}": b"x" for name in ids(source)}))
    assert [item.named for item in inside.items] == labels


def test_links_are_not_followed_and_loops_do_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "loop.png").symlink_to("loop.png")
    source = source_at(tmp_path)
    assert ids(source) == ["a.png", "loop.png"] and source.notes == ("left out 2 links: self, up.",)
    assert source.items[1].problem == os.strerror(40) == "Too many levels of symbolic links"
    with pytest.raises(DataError, match=r"self cannot be read \(Too many levels of symbolic links\)"):
        source_at(tmp_path / "self")


def test_what_cannot_be_an_image_is_known_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    source = source_at(tmp_path)
    assert [item.problem for item in source.items] == ["the file is empty", "not a file"]
    assert contents(source) == {0: None, 1: None}


def test_a_csv_gives_paths_beside_it_with_labels(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for name in ("x/b.png", "x/a.png"):
        (tmp_path / name).write_bytes(name.encode())
    table = tmp_path / "list.csv"
    table.write_text("﻿label,path\nred,x/b.png\n,./x/a.png\nblue,x/gone.png\n", encoding="utf-8")
    source = source_at(table)
    assert source.labelled and [(i.id, i.label) for i in source.items] == [
        ("x/b.png", "red"),
        ("x/a.png", ""),
        ("x/gone.png", "blue"),
    ]
    assert source.items[2].problem == "No such file or directory"
    assert contents(source, 0, 1) == {0: b"x/b.png", 1: b"x/a.png"}
    table.write_text("path\nx/b.png\n")
    assert not source_at(table).labelled


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "begins with nothing"),
        (b"a.png,3\n", "begins with a.png,3; its first line must name the columns"),
        (b"path\na.png\n./a.png\n", "lists a.png twice, on lines 2 and 3"),
        (b"path,label\na.png,1\n,2\n", "line 3 of"),
        (b"path\na.png,1\n", "line 2 of"),
        (b"path\n\xff.png\n", "is not UTF-8"),
        (b"path\n", "has no images"),
    ],
)
def test_a_bad_csv_is_one_line(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "list.csv").write_bytes(text)
    with pytest.raises(DataError) as caught:
        source_at(tmp_path / "list.csv")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_a_tar_is_read_as_a_stream(tmp_path: Path, mode: str) -> None:
    members = {
        "p/b.png": b"bb",
        "./p/a.jpg": b"a",
        "p/no.txt": b"n",
        "p/e.png": b"",
        "p/._b.png": b"mac",
        "l.png": None,
    }
    source = source_at(pack(tmp_path / "p.tar", members, mode))
    assert ids(source) == ["p/b.png", "p/a.jpg", "p/e.png"] and source.notes == ("left out 1 link in p.tar: l.png.",)
    assert contents(source) == {0: b"bb", 1: b"a", 2: None} and contents(source, 1) == {1: b"a"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.tar"]  # nothing was unpacked


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a.png": b"x", "../evil.txt": b"x"}, "../evil.txt, which is outside"),
        ({"a/../../b.png": b"x"}, "a/../../b.png, which is outside"),
        ({"/etc/b.png": b"x"}, "/etc/b.png, which is outside"),
        ({"a.png": b"x", "./a.png": b"y"}, "a.png twice"),
        ({"a.txt": b"x"}, "has no images"),
    ],
)
def test_a_bad_tar_is_one_line(tmp_path: Path, members: dict[str, bytes | None], words: str) -> None:
    with pytest.raises(DataError) as caught:
        source_at(pack(tmp_path / "p.tar", members))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("mode", "kept"), [("w", 700), ("w", 2560), ("w", 3000), ("w:gz", 200)])
def test_a_tar_that_is_cut_off_or_changed_is_one_line(tmp_path: Path, mode: str, kept: int) -> None:
    path = pack(tmp_path / "p.tar", {f"{n}.png": os.urandom(2000) for n in range(3)}, mode)
    whole = source_at(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError) as caught:
        contents(source_at(path))
    assert "p.tar" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DataError):
        contents(whole)
    pack(path, {"0.png": b"other"})
    with pytest.raises(DataError, match="changed while it was read"):
        contents(whole)


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = pack(tmp_path / "p.tar", {f"{n}.png": b"x" * 2000 for n in range(3)})
    data = bytearray(path.read_bytes())
    data[2560:2600] = b"?" * 40
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged or cut off"):
        source_at(path)


def test_a_tar_that_would_fill_the_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anchorhold.index import sources

    monkeypatch.setattr(sources, "_MOST", 5)
    source = source_at(pack(tmp_path / "p.tar", {"a.png": b"12345", "b.png": b"123456"}))
    assert not source.items[0].problem and "larger than" in source.items[1].problem
    assert contents(source) == {0: b"12345", 1: None}


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE], ids=["name", "header"])
def test_a_name_without_end_in_a_tar_is_not_read(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("a.png")
    member.type, member.size = kind, 2**22
    with tarfile.open(tmp_path / "p.tgz", "w:gz") as tar:
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(DataError, match="too long"):
        source_at(tmp_path / "p.tgz")


def test_a_tar_that_was_packed_again_is_another(tmp_path: Path) -> None:
    """The image has the same name, size and time; what lies before it has changed."""
    marks = [
        digest_of(source_at(pack(tmp_path / "p.tar", {"notes.txt": bytes(length), "a.png": b"123"})).items)
        for length in (1, 1, 600)
    ]
    assert marks[0] == marks[1] != marks[2]


def test_neither_folder_nor_list_nor_tar(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no tar" * 200)
    with pytest.raises(DataError) as caught:
        source_at(tmp_path / "a.png")
    assert "cannot be read as a tar" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(DataError, match="No such file or directory"):
        source_at(tmp_path / "nowhere")


def test_a_digest_knows_names_labels_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "b.png").write_bytes(b"x")
    first = source_at(tmp_path).items
    assert digest_of(first) == digest_of(source_at(tmp_path).items) != digest_of(first[:1])
    (tmp_path / "b.png").write_bytes(b"xy")
    assert digest_of(first) != digest_of(source_at(tmp_path).items)
    (tmp_path / "b.png").write_bytes(b"y")
    os.utime(tmp_path / "b.png", ns=(1, 1))
    earlier = digest_of(source_at(tmp_path).items)
    os.utime(tmp_path / "b.png", ns=(1, 2))
    assert digest_of(source_at(tmp_path).items) != earlier
    assert shown("\udcff.png") == "\\udcff.png"
