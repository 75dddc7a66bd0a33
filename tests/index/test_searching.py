"""search: the nearest images, exactly, in bounded memory, with the model that made the index and no other."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from anchorhold.errors import DataError, ModelError, RunError, SettingsError
from anchorhold.index.embedding import embed
from anchorhold.index.folder import SCHEMA, Index, described, write_index
from anchorhold.index.searching import _nearest, search
from anchorhold.model.embedder import Embedder
from anchorhold.random import Key
from tests.cli.test_main import run
from tests.index.test_embedding import SIZE, photographs
from tests.peak import run_measured


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven photographs, a model, and their index."""
    folder = tmp_path_factory.mktemp("search")
    photographs(folder / "photos", 11)
    model = Embedder("small", 8, size=SIZE)
    model.save(folder / "m.safetensors")
    Embedder("small", 8, size=SIZE, seed=1).save(folder / "other.safetensors")
    embed(folder / "m.safetensors", folder / "photos", folder / "ix", device="cpu")
    return folder


def index_of(folder: Path, vectors: Tensor, weights: str = "") -> Index:
    about = {"images": len(vectors), "dim": vectors.shape[1], "model": {"weights": weights, "named": None}}
    folder.mkdir()
    return write_index(folder, about, [(str(n), "") for n in range(len(vectors))], False, vectors.split(7))


def test_an_image_of_the_index_comes_first_and_the_rest_by_distance(place: Path) -> None:
    index = Index(place / "ix")
    vectors = torch.cat(list(index.parts()))
    names = [name for name, _ in index.rows]
    found = search(place / "ix", place / "photos" / "b" / "003.png", 4, device="cpu")
    one = vectors[names.index("b/003.png")]
    by_hand = sorted((float((one - other).norm()), name) for other, name in zip(vectors, names))
    assert [hit.id for hit in found.hits] == [name for _, name in by_hand[:4]]
    assert [hit.rank for hit in found.hits] == [1, 2, 3, 4]
    assert [hit.distance for hit in found.hits] == pytest.approx([far for far, _ in by_hand[:4]], abs=1e-5)
    assert len(search(index, place / "photos" / "b" / "003.png", 99, device="cpu").hits) == 11


@pytest.mark.parametrize("rows", [3, 7, 50])
def test_parts_do_not_change_what_is_found(tmp_path: Path, monkeypatch: Any, rows: int) -> None:
    vectors = Key.of(0)("v").normal(torch.arange(40), (6,)).float()
    vectors[[5, 21, 33]] = vectors[30].clone()  # equals stay in order of the index
    index = index_of(tmp_path / "ix", vectors)
    parts = Index.parts
    monkeypatch.setattr(Index, "parts", lambda self: parts(self, rows))
    query = vectors[30:31] + 0.25
    distances, places = _nearest(index, query, 12)
    exact = (vectors.double() - query.double()).norm(dim=1)
    order = exact.argsort(stable=True)[:12]
    assert places.tolist() == order.tolist()
    torch.testing.assert_close(distances, exact[order], atol=1e-9, rtol=0)
    same, _ = _nearest(index, vectors[30:31], 4)
    assert float(same.max()) < 1e-6  # fp32 would say 1e-3


def test_faiss_finds_the_same(place: Path) -> None:
    pytest.importorskip("faiss")
    for name in ("a/000.png", "b/007.png"):
        exact = search(place / "ix", place / "photos" / name, 5, device="cpu")
        fast = search(place / "ix", place / "photos" / name, 5, backend="faiss", device="cpu")
        assert [hit.id for hit in fast.hits] == [hit.id for hit in exact.hits]
        for one, two in zip(fast.hits, exact.hits):
            assert one.distance == pytest.approx(two.distance, abs=2e-3)


def test_another_model_is_refused(place: Path) -> None:
    image = place / "photos" / "a" / "000.png"
    with pytest.raises(ModelError, match="vectors cannot be compared; give the model that made it"):
        search(place / "ix", image, model=place / "other.safetensors", device="cpu")
    same = Embedder("small", 8, size=SIZE).eval()
    assert search(place / "ix", image, model=same, device="cpu") == search(place / "ix", image, device="cpu")
    with torch.no_grad():
        next(same.parameters()).view(-1)[0] += 1e-3
    with pytest.raises(ModelError, match="cannot be compared"):
        search(place / "ix", image, model=same, device="cpu")


def test_an_index_made_from_python_asks_for_its_model(place: Path, tmp_path: Path) -> None:
    model = Embedder("small", 8, size=SIZE)
    index = embed(model, place / "photos", tmp_path / "ix", device="cpu")
    with pytest.raises(ModelError, match="does not record where its model is"):
        search(index, place / "photos" / "a" / "000.png", device="cpu")
    assert search(index, place / "photos" / "a" / "000.png", 1, model=model, device="cpu").hits[0].id == "a/000.png"


def test_labels_are_shown_where_there_are_some(place: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text(
        f"path,label\n{place / 'photos/a/000.png'},robin\n{place / 'photos/b/001.png'},\n"
    )
    index = embed(place / "m.safetensors", tmp_path / "list.csv", tmp_path / "ix", device="cpu")
    found = search(index, place / "photos/a/000.png", device="cpu")
    assert found.hits[0].label == "robin" and "robin" in str(found) and str(found).startswith("  rank  distance  label")


@pytest.mark.parametrize(
    ("image", "options", "error", "words"),
    [
        ("nowhere.png", {}, DataError, "No such file or directory; give an image file"),
        ("text.png", {}, DataError, "not an image"),
        ("empty.png", {}, DataError, "the file is empty"),
        (".", {}, DataError, "not a file"),
        ("photos/a/000.png", {"k": 0}, SettingsError, "k must be a whole number of at least 1"),
        ("photos/a/000.png", {"k": "a"}, SettingsError, "k must be a whole number of at least 1, got 'a'"),
        ("photos/a/000.png", {"backend": "fais"}, SettingsError, "choose exact or faiss"),
        ("photos/a/000.png", {"model": "gone"}, ModelError, "give its new location with model="),
    ],
)
def test_mistakes_are_one_line(place: Path, image: str, options: Any, error: type[Exception], words: str) -> None:
    (place / "text.png").write_text("text")
    (place / "empty.png").touch()
    with pytest.raises(error) as caught:
        search(place / "ix", place / image, device="cpu", **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_faiss_where_it_is_missing_is_one_line(place: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(SettingsError, match=r"needs faiss, .*pip install 'anchorhold\[faiss\]'"):
        search(place / "ix", place / "photos/a/000.png", backend="faiss", device="cpu")


SCRIPT = """
from anchorhold.index.searching import search
found = search("ix", "one.png", 2, model="m.safetensors", device="cpu")
print(peak() / 2**30, *(hit.id for hit in found.hits), *(f"{hit.distance:.4f}" for hit in found.hits))
"""


@pytest.mark.slow
def test_a_million_vectors_are_searched_in_less_than_two_gigabytes(tmp_path: Path) -> None:
    count, dim = 1_000_000, 128
    model = Embedder("small", dim, size=SIZE).eval()
    model.save(tmp_path / "m.safetensors")
    Image.new("RGB", (18, 18), (200, 90, 10)).save(tmp_path / "one.png")
    with torch.no_grad():
        query = model(torch.tensor([200.0, 90, 10]).div(255).reshape(1, 3, 1, 1).expand(1, 3, SIZE, SIZE))[0]
    # Zeros, which take no room on the disk, and the query itself near both ends.
    ix = tmp_path / "ix"
    ix.mkdir()
    about = {"schema": SCHEMA, "images": count, "dim": dim, "made_with": {"resize": 18, "crop": SIZE}}
    (ix / "index.json").write_text(json.dumps(about | {"model": {**described(model), "named": None}}))
    (ix / "ids.csv").write_text("id\n" + "".join(f"{n:08d}\n" for n in range(count)))
    head = json.dumps({"vectors": {"dtype": "F32", "shape": [count, dim], "data_offsets": [0, 4 * count * dim]}})
    with open(ix / "vectors.safetensors", "wb") as file:
        start = file.write(len(head).to_bytes(8, "little") + head.encode())
        file.truncate(start + 4 * count * dim)
        for row in (3, count - 1):
            file.seek(start + 4 * row * dim)
            file.write(query.numpy().astype("<f4").tobytes())
    done = run_measured(SCRIPT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    peak, *found = done.stdout.split()
    assert found == ["00000003", "00999999", "0.0000", "0.0000"] and float(peak) < 2, done.stdout


def test_the_commands(place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    out = str(tmp_path / "new ix")
    code, text, err = run(capsys, monkeypatch, "embed", "m.safetensors", "photos", "--out", out, "--device", "cpu")
    assert code == 0 and "11 vectors" in text and f"next: anchorhold search '{out}' IMAGE" in text
    assert "embedding: 11 of 11" in err
    code, text, err = run(capsys, monkeypatch, "search", out, "photos/a/002.png", "-k", "3", "--device", "cpu")
    lines = text.splitlines()
    assert code == 0 and len(lines) == 4 and lines[0].split() == ["rank", "distance", "label", "id"]
    assert lines[1].split() == ["1", "0.0000", "a", "a/002.png"]
    code, text, _ = run(capsys, monkeypatch, "search", out, "photos/a/002.png", "-k", "3", "--json", "--device", "cpu")
    hits = json.loads(text)["hits"]
    assert code == 0 and [hit["rank"] for hit in hits] == [1, 2, 3] and hits[0]["id"] == "a/002.png"
    assert [hit["label"] for hit in hits] == [hit["id"][0] for hit in hits]
    for arguments, words in (
        (["search", "photos", "photos/a/002.png"], "holds no index"),
        (["search", out, "photos/a/002.png", "--model", "other.safetensors"], "cannot be compared"),
        (["search", out, "photos/a/002.png", "--size", "9"], "need --model"),
        (["embed", "m.safetensors", "nowhere", "--out", "iz"], "nowhere cannot be read"),
        (["embed", "m.safetensors", "photos", "--out", "iz", "--on-bad-image", "shrug"], "choose fail or skip"),
    ):
        code, _, err = run(capsys, monkeypatch, *arguments, "--device", "cpu")
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and words in err, err
    assert not (place / "iz").exists()


def test_your_own_module_is_found_again_with_its_mean_and_std(
    place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(
        "import torch\nfrom torch import nn\n\ndef net():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    own = ["--mean", ".5,.5,.5", "--std", ".2,.2,.2", "--size", "8", "--device", "cpu"]
    code, _, err = run(capsys, monkeypatch, "embed", "own_net:net", str(place / "photos"), "--out", "ix", *own)
    assert code == 0, err
    image = str(place / "photos/b/005.png")
    code, _, err = run(capsys, monkeypatch, "search", "ix", image, "--device", "cpu")
    assert code == 2 and "--model own_net:net" in err  # a file's word is not enough to run code
    code, text, err = run(capsys, monkeypatch, "search", "ix", image, "--model", "own_net:net", "--device", "cpu")
    assert code == 0 and text.splitlines()[1].split() == ["1", "0.0000", "b", "b/005.png"], err


def test_a_model_without_weights_has_no_digest_to_mistake() -> None:
    assert described(nn.Identity())["weights"] != described(nn.Flatten())["weights"]


@pytest.mark.parametrize("images", [0, -3, 2**63, 10**30])
def test_a_number_of_images_that_no_index_has_is_one_line(images: int, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"schema": SCHEMA, "images": images}))
    with pytest.raises(RunError, match="make the index again"):
        len(Index(tmp_path))
