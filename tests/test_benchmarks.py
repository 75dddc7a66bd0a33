"""The benchmarks run: numbers in docs/ must be there to be made again."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorhold.data.splits import Dataset, Split

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.slow
def test_scale_measures_a_training_step_and_a_search(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    done = run("scale.py", "--device", "cpu", "--threads", "1", "--quick", "--only", "steps,search", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["scale"]
    assert found["steps"][0]["ms"] > 0 and found["steps"][0]["image_steps_a_step"] == 3 * 56
    assert [row["count"] for row in found["search"]] == [10_000, 100_000]


@pytest.mark.slow
def test_peers_find_the_same(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    out = tmp_path / "peers.json"
    done = run("search_peers.py", "--quick", "--turns", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert len(found["peers"]) == 6 and all(row["ratio"] > 0 for row in found["peers"].values())
    assert found["commit"] and found["versions"]["faiss-cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "speed.py",
        "scale.py",
        "accuracy.py",
        "sensitivity.py",
        "starts.py",
        "kills.py",
        "recipes.py",
        "search_peers.py",
        "peers.py",
    ],
)
def test_every_benchmark_says_what_it_does(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0 and name in done.stdout


@pytest.mark.slow
def test_kills_are_counted_and_leave_the_same_index(tmp_path: Path) -> None:
    out = tmp_path / "kills.json"
    done = run("kills.py", "--kills", "3", "--only", "embed", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["kills"] == 3 and found["equal"] == found["trials"] > 0


def test_a_difference_after_a_kill_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kills = importlib.import_module("kills")
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0000001)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.tensor([value])}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"epoch": 1, "seconds": len(name)}) + "\n")
    a, b, c = (kills.facts(tmp_path / name) for name in "abc")
    assert not list(kills.differing(a, b)) and len(list(kills.differing(a, c))) == 1
    (tmp_path / "b" / ".x.part").mkdir()
    assert len(list(kills.differing(a, kills.facts(tmp_path / "b")))) == 1
    assert sum(kills.shares(100, [*"abcd", "torchrun"]).values()) == 100


def test_parts_of_one_file_are_made_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parts = importlib.import_module("parts")
    file = str(tmp_path / "parts.json")
    one, other = (parts.Parts(file, "found", {"commit": "abc", "epochs": 3}) for _ in range(2))
    one.keep("a", 1), other.keep("b", 2)
    assert json.loads(Path(file).read_text()) == {"commit": "abc", "epochs": 3, "found": {"a": 1, "b": 2}}
    with pytest.raises(AssertionError, match=r"made with \{'epochs': 3\}"):
        parts.Parts(file, "found", {"commit": "abc", "epochs": 75})


def images_of_noise() -> Split:
    noise = torch.rand(4, 256, 256, 3, generator=torch.Generator().manual_seed(0))
    images = (noise * torch.linspace(0, 255, 256)[:, None, None]).to(torch.uint8)
    return Split("noise", torch.tensor([0, 0, 1, 1]), ["one", "other"], images=images)


def test_images_are_stored_again_at_the_quality_of_their_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sensitivity = importlib.import_module("sensitivity")
    split = images_of_noise()
    assert split.images is not None
    data = Dataset("noise", split, split)
    for name, quality in (("webp", 33), ("webp-55", 55)):
        made, weights = sensitivity.changed(name, data, "w", tmp_path)
        wanted = [sensitivity.again(image.numpy(), quality) for image in split.images]
        assert weights == "w" and all((a.numpy() == b).all() for a, b in zip(made.test.images, wanted, strict=True))
    assert sensitivity.changed("as-is", data, "w", tmp_path) == (data, "w")


def test_distortion_compares_the_file_with_the_image_and_with_what_is_stored_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sensitivity = importlib.import_module("sensitivity")
    found = sensitivity.distortion(images_of_noise())
    assert found["files"] > 0 and 0 < found["webp-55"] < found["webp"]
    monkeypatch.setattr(sensitivity, "again", lambda pixels, quality: pixels * 0 + quality)
    found = sensitivity.distortion(images_of_noise())
    assert (found["webp"], found["webp-55"]) == ((75 - 33) ** 2, (75 - 55) ** 2)


def test_variances_of_the_last_stage_alone_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sensitivity = importlib.import_module("sensitivity")
    names = ("layer4.0.bn1.running_var", "layer4.0.bn1.running_mean", "layer3.0.bn1.running_var")
    save_file({name: torch.ones(1000) for name in names}, tmp_path / "w")
    alike = load_file(sensitivity.moved(str(tmp_path / "w"), tmp_path / "alike", 0.7))
    each = load_file(sensitivity.moved(str(tmp_path / "w"), tmp_path / "each"))
    assert all((made[name] == 1).all() for made in (alike, each) for name in names[1:])
    assert (alike[names[0]] == 0.7).all() and abs(each[names[0]].log().std() - 0.15) < 0.01


def test_a_mixture_of_weights_lies_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    starts = importlib.import_module("starts")
    one = {"w": torch.tensor([1.0, 2.0]).half(), "count": torch.tensor(7), "fc": torch.zeros(1)}
    other = {"w": torch.tensor([3.0, 6.0]).half(), "count": torch.tensor(9)}
    for share, wanted in ((0.0, [1.0, 2.0]), (0.25, [1.5, 3.0]), (1.0, [3.0, 6.0])):
        made = starts.mixed(one, other, share)
        assert made["w"].tolist() == wanted and made["w"].dtype == torch.float32
        assert made["count"] == 7 and made.keys() == {"w", "count"}
