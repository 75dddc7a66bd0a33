"""A data set from outside the package: by name wherever a name may stand, and never from a record."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anchorhold as ah
from anchorhold.cli import main as cli
from anchorhold.errors import AnchorholdError, DataError, RunError, SettingsError
from anchorhold.runs.folder import Run

MODULE = """
from pathlib import Path
import torch
import anchorhold as ah

Path("imported").touch()
NUMBER = 3
labels = torch.arange(6).repeat_interleave(10)
names = [("ant", "bee", "cat", "dog", "emu", "fox")[label] for label in labels]


def birds(root=None, seed=0, loud=False):
    images = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    images[:, 0, :, 0] = labels[:, None] / 6
    return images, names

def parts():
    images, names = birds()
    odd = labels % 2 == 1
    return {"train": (images[odd], labels[odd]), "test": (images[~odd], labels[~odd])}

def pictures():
    from PIL import Image
    images, names = birds()
    return [(Image.fromarray((image[0] * 255).byte().numpy()), name) for image, name in zip(images, names)]

whole = birds()

def ours(): return ah.dataset("digits")
def folder(root): return root
def nothing(): return None
def fails(): raise OSError("the disk is gone")
def again(): return "flock:birds"
def four(): return 4
"""
SHORT: dict[str, Any] = {
    "train": {"epochs": 1, "collapse_warmup": 9},
    "model": {"backbone": "small", "dim": 8, "weights": ""},
    "batch": {"pairs": 8},
}
QUICK = [
    *("--recipe", "natural", "--epochs", "1", "--device", "cpu", "--set", "batch.pairs=8", "--set", "model.dim=8"),
    *("--set", "model.backbone=small", "--weights", "none", "--set", "train.collapse_warmup=9"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "flock.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("flock", None)


def told(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anchorhold", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_name_of_yours_is_a_data_set(here: Path) -> None:
    data = ah.dataset("flock:birds")
    assert data.name == "flock:birds" and data.train.name == "birds/train" and data.as_given
    assert len(torch.unique(data.train.labels)) == 4 and len(torch.unique(data.test.labels)) == 2
    assert ah.dataset("flock.py:birds").train.fingerprint() == data.train.fingerprint()
    assert ah.dataset("flock:whole").train.fingerprint() == data.train.fingerprint()  # the data themselves
    assert ah.dataset("flock:birds", seed=1).train.fingerprint() != data.train.fingerprint()
    assert ah.dataset("flock:birds", loud=True).train.fingerprint() == data.train.fingerprint()
    assert ah.dataset("flock:birds", held_out=2).held_out == 2
    assert len(torch.unique(ah.dataset("flock:parts").test.labels)) == 3
    assert not ah.dataset("flock:pictures").as_given  # the recipe resizes and crops PIL images


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("flock:bird", {}, "did you mean birds"),
        ("nowhere:birds", {}, "no module 'nowhere'"),
        ("flock:NUMBER", {}, "cannot read images from int"),
        ("flock:nothing", {}, "returns None; return what ah.fit takes"),
        ("flock:fails", {}, r"flock:fails fails \(OSError: the disk is gone\)"),
        ("flock:again", {}, "returns the name flock:birds; return the data"),
        ("flock:four", {}, "cannot read images from int"),
        ("flock:nothing", {"root": "x"}, "has no argument 'root'; it has none"),
        ("flock:birds", {"size": 3}, "has no argument 'size'; it has root, seed, loud"),
        ("flock:whole", {"root": "x"}, "no function; leave out the root"),
    ],
)
def test_a_slip_is_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message) as raised:
        ah.dataset(name, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.medium
def test_it_is_trained_on_resumed_and_audited_by_name(here: Path) -> None:
    run = ah.fit(None, "flock:birds", "natural", here / "run", overrides=SHORT, device="cpu")
    settings = run.read_json()["settings"]["data"]
    assert (settings["name"], settings["resize"], settings["crop"]) == ("flock:birds", 0, 0)
    found = ah.audit(ah.load(run.path), "flock:birds", limit=5, steps=1, attacks=["ES"], resamples=5, examine=None)
    assert found.data["classes"] == 2 and found.data["query"]["name"] == "birds/test" and not found.notes
    given = ah.fit(None, ah.dataset("flock:birds"), "natural", here / "b", overrides=SHORT, device="cpu")
    assert given.read_json()["weights"] == run.read_json()["weights"]
    images, names = sys.modules["flock"].birds()
    raw = ah.audit(ah.load(run.path), (images, names), limit=5, steps=1, attacks=["ES"], resamples=5, examine=None)
    assert raw.data["classes"] == 2  # the same images without their name


@pytest.mark.medium
def test_a_record_does_not_bring_it_in(here: Path) -> None:
    run = ah.fit(None, "flock:birds", "natural", here / "run", overrides=SHORT, device="cpu")
    record = run.path / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    (here / "imported").unlink()
    sys.modules.pop("flock")
    with pytest.raises(RunError, match=r"names the code flock:birds.*allow=\['flock:birds'\]"):
        ah.resume(run.path, device="cpu")
    assert not (here / "imported").exists()
    assert ah.resume(run.path, device="cpu", allow=["flock:birds"]).read_json()["status"] == "done"
    assert (here / "imported").exists()


@pytest.mark.medium
def test_on_the_command_line(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, _, err = told(monkeypatch, capsys, "train", "flock:birds", *QUICK)
    assert code == 0, err
    out = here / "runs" / "flock-birds-natural-0"
    assert Run(out).read_json()["settings"]["data"]["resize"] == 0
    python = ah.fit(None, "flock:birds", "natural", here / "b", overrides=SHORT, device="cpu")
    assert python.read_json()["weights"] == Run(out).read_json()["weights"]
    quick = ["--limit", "5", "--steps", "1", "--attacks", "ES", "--device", "cpu", "--out", "audit"]
    code, said, err = told(monkeypatch, capsys, "audit", str(out), "--data", "flock:birds", *quick)
    assert code == 0 and "of 2 classes" in said and "attacked: the test split of flock:birds" in said, err
    record = out / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    code, _, err = told(monkeypatch, capsys, "resume", str(out), "--device", "cpu")
    assert code == 2 and "--allow flock:birds" in err and err.count("\n") == 1
    code, _, err = told(monkeypatch, capsys, "resume", str(out), "--device", "cpu", "--allow", "flock:birds")
    assert code == 0, err
    varied = ["sweep", "flock:birds", *QUICK[:2], *QUICK[4:-4], "--vary", "train.seed=0,1", "--out", "swept"]
    code, _, err = told(
        monkeypatch, capsys, *varied, "--set", "model.weights=", "--set", "train.epochs=1", "--no-audit"
    )
    assert code == 0, err
    assert {path.name for path in (here / "swept").iterdir() if path.is_dir()} == {"train.seed=0", "train.seed=1"}


@pytest.mark.medium
def test_pictures_of_a_data_set_of_yours_are_resized_as_the_recipe_says(here: Path) -> None:
    overrides = SHORT | {"data": {"resize": 10, "crop": 8}}
    run = ah.fit(None, "flock:pictures", "natural", here / "run", overrides=overrides, device="cpu")
    found = ah.audit(ah.load(run.path), "flock:pictures", limit=5, steps=1, attacks=["ES"], resamples=5, examine=None)
    assert (found.data["query"]["resize"], found.data["query"]["crop"]) == (10, 8) and found.data["classes"] == 2


def test_a_data_set_of_yours_in_memory_is_trained_on_as_it_is(here: Path) -> None:
    made = ah.dataset("flock:ours")
    assert made.as_given and not ah.dataset("digits").as_given
    run = ah.fit(None, "flock:ours", "natural", here / "run", overrides=SHORT, device="cpu")
    told = run.read_json()["settings"]["data"]
    assert (told["resize"], told["crop"]) == (0, 0)


def test_a_folder_with_a_colon_in_its_name_is_a_folder(here: Path) -> None:
    (here / "flock:birds").mkdir()
    with pytest.raises(DataError, match=r"has 0 classes|no images|no class"):
        ah.dataset("flock:birds")
    with pytest.raises(SettingsError, match="no data set or folder 'flock'"):
        ah.dataset("flock")
