"""`anchorhold audit` and `anchorhold attack`: what they print and write, and one clear line for every mistake."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anchorhold.cli import main as cli
from anchorhold.data.datasets import dataset
from anchorhold.errors import SettingsError
from anchorhold.model.embedder import Embedder
from anchorhold.report.audit_page import command_of
from anchorhold.runs.folder import Run
from anchorhold.runs.schemas import RUN_SCHEMA
from tests.cli.test_main import run

pytestmark = pytest.mark.medium

QUICK = ["--data", "digits", "--steps", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    Embedder("small", 16, channels=1, size=8).save(tmp_path / "m.safetensors")
    photographs(tmp_path)
    Embedder("small", 8, size=8).save(tmp_path / "rgb.safetensors")
    (tmp_path / "theirs.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8))\n"
    )


def photographs(place: Path, classes: str = "abc") -> None:
    from PIL import Image

    for name in classes:
        for index in range(4):
            path = place / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (12, 10), (80 * "abc".find(name) % 256, 60 * index, 90)).save(path)
    Image.new("RGB", (9, 9), (10, 200, 30)).save(place / "mine.png")


def test_audit_writes_what_it_prints_and_goes_on(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--attacks", "CA+,ES", "--limit", "30", "--eps", "4/255", "--out", "a"]
    code, out, err = run(capsys, monkeypatch, "audit", "m.safetensors", *QUICK, *options)
    assert code == 0, err
    assert "30 of 896 queries" in out and "ε 4/255" in out and "written: a/audit.json" in out
    assert "CA+ (published, corrected): 30 of 30" in err
    found = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert found["settings"]["eps"] == 4 / 255 and set(found["protocols"]) == {"published", "corrected"}
    assert f"{found['protocols']['corrected']['columns']['ES:R']['value']:.1f}" in out
    photographs(tmp_path)
    Path("photos").rename("digits")  # a folder of that name does not take its place, as it does not in training
    code, again, err = run(capsys, monkeypatch, "audit", "m.safetensors", *QUICK, *options)
    assert code == 0 and again == out and "30 of 30" not in err
    code, _, err = run(capsys, monkeypatch, "audit", "m.safetensors", *QUICK, *options, "--seed", "1")
    assert code == 2 and "would lose its seed 0 (now 1): give another --out, or --replace to replace it" in err
    code, _, err = run(capsys, monkeypatch, "audit", "m.safetensors", *QUICK, *options, "--seed", "1", "--replace")
    assert code == 0, err
    assert json.loads((tmp_path / "a" / "audit.json").read_text())["settings"]["seed"] == 1


def test_the_page_has_the_command_as_it_was_typed(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seeded = "import torch\n\ndef net():\n    torch.manual_seed(3)\n    return "
    (tmp_path / "seeded.py").write_text(seeded + "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8))\n")
    given = ["--data", "photos", "--mean", ".5,.5,.5", "--std", ".2,.2,.2", "--size", "8"]
    quick = ["--attacks", "TMA", "--limit", "3", "--steps", "1", "--device", "cpu"]
    code, _, err = run(capsys, monkeypatch, "audit", "seeded:net", *given, *quick, "--out", "first")
    assert code == 0, err
    said = command_of(json.loads((tmp_path / "first" / "audit.json").read_text()))
    assert said.startswith("anchorhold audit seeded:net " + " ".join(given))
    assert said in html.unescape((tmp_path / "first" / "page.html").read_text())
    code, _, err = run(capsys, monkeypatch, *said.split()[1:], "--device", "cpu", "--out", "again")
    assert code == 0, err
    first, again = (json.loads((tmp_path / name / "audit.json").read_text()) for name in ("first", "again"))
    assert first["protocols"] == again["protocols"] and first["model"] == again["model"]
    assert str(tmp_path) not in json.dumps(first)


def noted_in(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("note:")]


def test_held_out_classes_have_a_place_of_their_own(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick = [*QUICK, "--attacks", "ES", "--limit", "10"]
    for trained, told in ((0, True), (2, False), (3, False)):
        place = tmp_path / f"run{trained}"
        Embedder("small", 16, channels=1, size=8).save(place / "model.safetensors")
        Run(place).write_json({"schema": RUN_SCHEMA, "settings": {"data": {"name": "digits", "held_out": trained}}})
        code, out, err = run(capsys, monkeypatch, "audit", place.name, *quick, "--held-out", "2")
        assert code == 0, err
        assert "10 of 364 queries against 364 images of 2 classes" in out
        assert ("note: the model was trained without holding out classes: it has seen classes" in out) == told
        assert ("it has seen classes that are attacked here" in out) == told
        assert (tmp_path / "audits" / f"{place.name}-digits-held-out-2" / "audit.json").is_file()
    code, out, err = run(capsys, monkeypatch, "audit", "run2", *quick, "--held-out", "3")
    assert code == 0 and "note: the model was trained with only 2 classes held out: it has seen classes" in out, err
    for place, kind, noted in (("run0", "digits", False), ("run2", "digits", True), ("run2", "cub", False)):
        held = {"data": {"name": kind, "held_out": int(place[-1])}}
        Run(tmp_path / place).write_json({"schema": RUN_SCHEMA, "settings": held})
        code, out, err = run(capsys, monkeypatch, "audit", place, *quick)
        told = "note: this audits the test split, not the 2 classes that training held out; for those: --held-out 2"
        assert code == 0 and (told in " ".join(out.split())) == bool(noted_in(out)) == noted, err
    Run(tmp_path / "run2").write_json({"schema": "another/9"})
    code, out, err = run(capsys, monkeypatch, "audit", "run2", *quick)
    assert code == 0 and not noted_in(out), err  # what cannot be read says nothing, and stops nothing
    code, out, err = run(capsys, monkeypatch, "audit", "run0", *quick, "--held-out", "9")
    assert code == 2 and "cannot hold out 9 of the 5 classes" in err and not out  # no note on what is refused


@pytest.mark.parametrize("held_out", [0, 2])
def test_a_folder_is_audited_on_the_test_split_that_a_run_made_of_it(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held_out: int
) -> None:
    photographs(tmp_path, "abcdefgh")
    data = dataset("folder", "photos", held_out=held_out)
    Embedder("small", 8, size=8).save(tmp_path / "run" / "model.safetensors")
    known = {"settings": {"data": {"held_out": held_out}}, "data": {"test": data.test.fingerprint()}}
    Run("run").write_json({"schema": RUN_SCHEMA, **known})
    own = dataset("folder", "photos").test
    quick = ["--data", "photos", "--steps", "1", "--device", "cpu", "--attacks", "ES", "--out", "a"]
    for model in ("run", "run/model.safetensors"):
        code, out, err = run(capsys, monkeypatch, "audit", model, *quick)
        assert code == 0 and "8 of 8 queries against 8 images of 2 classes" in out, err
        for text in (out, err):
            assert "attacked: the classes of photos that the model was not trained on" in text
        assert "2 of its 8 classes are held out for test" in err and "classes of photos are audited" not in err
    found = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert found["data"]["query"]["fingerprint"] == own.fingerprint()  # by which compare knows it, unless held out
    code, out, err = run(capsys, monkeypatch, "audit", "rgb.safetensors", *quick[:-1], "b")
    assert code == 0 and "32 of 32 queries" in out, err
    assert (out + err).count("training classes") == 2 and (out + err).count("may include training classes") == 1
    assert "all 8 classes of photos are audited" in err and "make folders train/ and test/ in it" in err
    for name in "abcdefgh":
        shutil.copy(f"photos/{name}/0.png", f"photos/{name}/9.png")
    code, out, err = run(capsys, monkeypatch, "audit", "run", *quick[:-1], "c")
    assert code == 0 and "40 of 40 queries" in out and "all 8 classes" in err, err  # another folder by now


def test_a_csv_is_audited_on_the_test_split_that_a_run_made_of_it(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    photographs(tmp_path, "abcdefgh")
    rows = [f"photos/{name}/{index}.png,{name}" for name in "abcdefgh" for index in range(4)]
    (tmp_path / "some.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    Embedder("small", 8, size=8).save(tmp_path / "run" / "model.safetensors")
    Run("run").write_json({"schema": RUN_SCHEMA, "data": {"test": dataset("csv", "some.csv").test.fingerprint()}})
    quick = ["--data", "some.csv", "--steps", "1", "--device", "cpu", "--attacks", "ES"]
    code, out, err = run(capsys, monkeypatch, "audit", "run", *quick)
    assert code == 0 and "8 of 8 queries" in out and "classes of some.csv that the model was not trained on" in err, err
    code, out, err = run(capsys, monkeypatch, "audit", "rgb.safetensors", *quick)
    assert code == 0 and "32 of 32 queries" in out and "add a column split with train and test" in err, err


def test_algorithm_1_with_its_budget_and_seeds(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--data", "digits", "--device", "cpu", "--attacks", "nearest", "--threat", "adml", "--limit", "40"]
    command = ["audit", "m.safetensors", *options, "--seeds", "3", "--out", "a"]
    code, out, err = run(capsys, monkeypatch, *command)
    assert code == 0, err
    assert "ε 0.01, 5 steps of 0.004 from 3 random starts" in out and "start 3): 40 of 40" in err
    found = json.loads((tmp_path / "a" / "audit.json").read_text())
    for name in ("nearest", "nearest:mAP@R"):
        column = found["protocols"]["corrected"]["columns"][name]
        assert len(column["seeds"]) == 3 and f"{column['value']:.1f} ± {column['std']:.1f} [" in out
    code, out, err = run(capsys, monkeypatch, *command[:-1], "b", "--eps", ".05", "--steps", "4", "--alpha", "1/50")
    assert code == 0, err
    assert "ε 0.05, 4 steps of 0.02 from 3 random starts" in out
    code, out, err = run(
        capsys, monkeypatch, "attack", "m.safetensors", "7", *options[:4], "--goal", "nearest", "--threat", "adml"
    )
    assert code == 0 and "nearest (corrected) on digits/test[7], ε 0.01" in out, err


def test_audit_of_a_folder_with_a_model_of_ones_own(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--mean", ".5,.5,.5", "--std", ".2,.2,.2", "--size", "8", "--full", "--protocol", "corrected"]
    code, out, err = run(
        capsys, monkeypatch, "audit", "theirs:net", "--data", "photos", "--steps", "1", *options, "--method", "fgsm"
    )
    assert code == 0, err
    assert "12 of 12 queries" in out and "ERS" in out and "audits/theirs-net-photos/audit.json" in out
    found = json.loads((tmp_path / "audits" / "theirs-net-photos" / "audit.json").read_text())
    assert found["settings"]["limit"] == 0 and found["settings"]["method"] == "fgsm"
    assert str(tmp_path) not in json.dumps(found)


def test_a_function_may_return_a_wrapped_model(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its mean, std and size count, as if they were typed; typing others is an error."""
    code = (
        "\n\ndef told():\n    import anchorhold as ah\n    return ah.wrap(net(), mean=[.5] * 3, std=[.2] * 3, size=8)\n"
    )
    own = "from torch import nn, manual_seed\n\ndef net():\n    manual_seed(0)\n"
    (tmp_path / "shared.py").write_text(own + "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8))\n" + code)
    quick = ["--data", "photos", "--steps", "1", "--full", "--attacks", "ES", "--alpha", "1/255"]
    typed = ["--mean", ".5,.5,.5", "--std", ".2,.2,.2", "--size", "8"]
    found = {}
    for name, more in (("told", []), ("net", typed)):
        code_, _, err = run(capsys, monkeypatch, "audit", f"shared:{name}", *quick, *more, "--out", name)
        assert code_ == 0 and "without mean and std" not in err, err
        found[name] = json.loads((tmp_path / name / "audit.json").read_text())
    assert found["told"]["protocols"] == found["net"]["protocols"]
    assert found["told"]["model"]["wrap"] == found["net"]["model"]["wrap"] and found["told"]["model"]["wrap"][
        "size"
    ] == [8, 8]
    code_, _, err = run(capsys, monkeypatch, "audit", "shared:told", *quick, *typed[:4])
    assert code_ == 2 and "leave out --mean and --std" in err


@pytest.mark.parametrize("goal", ["ES", "CA+", "QA-", "TMA", "LTM", "GTM", "GTT"])
def test_attack_shows_the_list_before_and_after(capsys: Any, monkeypatch: pytest.MonkeyPatch, goal: str) -> None:
    code, out, err = run(capsys, monkeypatch, "attack", "m.safetensors", "7", *QUICK, "--goal", goal, "--eps", ".2")
    assert code == 0, err
    assert f"{goal} (corrected) on digits/test[7]" in out
    assert out.count("class") == 2 and "before" in out and "after" in out
    assert out.count("digits/test[") >= 21


def test_attack_on_files(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from PIL import Image

    options = ["--data", "photos", "--steps", "2", "--device", "cpu", "--eps", "8/255"]
    shape = ["--crop", "10", "--resize", "10", "--save", "out.png"]
    code, out, err = run(capsys, monkeypatch, "attack", "rgb.safetensors", "photos/a/1.png", *options, *shape)
    assert code == 0, err
    assert "a/1.png" not in out.split("\n", 1)[1] and "b/0.png" in out and "perturbed image: out.png" in out
    with Image.open(tmp_path / "out.png") as changed:
        assert changed.size == (10, 10)
        pixel = changed.getpixel((5, 5))
    assert (
        isinstance(pixel, tuple) and all(abs(a - b) <= 9 for a, b in zip(pixel, (0, 60, 90))) and pixel != (0, 60, 90)
    )
    for goal in ("ES", "QA+"):
        code, out, err = run(capsys, monkeypatch, "attack", "rgb.safetensors", "mine.png", *options, "--goal", goal)
        assert code == 0, err
        assert f"{goal} (corrected) on mine.png" in out
        assert ("ES:R: –, needs the class of the image: give --class\n" in out) == (
            goal == "ES"
        ) and "ES:R: wrong" not in out
    code, out, err = run(capsys, monkeypatch, "attack", "rgb.safetensors", "mine.png", *options, "--class", "b")
    assert code == 0 and re.search(r"ES:R: (right|wrong) before", out), err
    code, out, err = run(
        capsys, monkeypatch, "attack", "rgb.safetensors", "mine.png", *options, "--goal", "LTM", "--class", "b"
    )
    assert code == 0, err
    code, out, err = run(capsys, monkeypatch, "attack", "m.safetensors", "mine.png", *QUICK)
    assert code == 0, err  # made grey, and as small as the digits


SAID = ("decoding", "are audited", "held in", "attacked: ", "does not record")  # what is said before a mistake is found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit", "nowhere/x", *QUICK], "no model 'nowhere/x'"),
        (["audit", "m.safetensors", "--data", "dgits"], "did you mean digits?"),
        (["audit", "m.safetensors", "--data", "cub"], "--root"),
        (["audit", "m.safetensors", *QUICK, "--eps", "lots"], "--eps needs a number"),
        (["audit", "m.safetensors", *QUICK, "--mean", ".5"], "has its own mean and std"),
        (["audit", "m.safetensors", *QUICK, "--attacks", "LMT"], "did you mean LTM?"),
        (["audit", "m.safetensors", *QUICK, "--attacks", ","], "--attacks , names no attack; give some, e.g. CA+,ES"),
        (["audit", "m.safetensors", *QUICK, "--held-out", "-1"], "give the number of training classes to evaluate on"),
        (["audit", "m.safetensors", *QUICK, "--threat", "admll"], "did you mean adml?"),
        (["attack", "m.safetensors", "7", *QUICK, "--threat", "x"], "choose from: adml, standard"),
        (["audit", "m.safetensors", *QUICK, "--threat", "adml", "--seeds", "0"], "seeds must be at least 1"),
        (["audit", "m.safetensors", *QUICK, "--seeds", "5"], "--seeds 5 needs a random start"),
        (["audit", "m.safetensors", *QUICK, "--protocol", "print"], "there are: published, corrected"),
        (["audit", "m.safetensors", *QUICK, "--method", "bim"], "there are: pgd, fgsm, cw"),
        (["audit", "m.safetensors", "--data", "photos", "--device", "cpu"], "(B, 1, H, W)"),
        (["attack", "m.safetensors", "9999", *QUICK], "give a number from 0 to 895"),
        (["attack", "m.safetensors", "none.png", *QUICK], "there is no image none.png"),
        (["attack", "m.safetensors", "7", *QUICK, "--goal", "EX"], "no attack is called 'EX'"),
        (["attack", "m.safetensors", "7", *QUICK, "--save", "x.jpg"], "--save needs a .png"),
        (["attack", "rgb.safetensors", "mine.png", "--data", "photos", "--goal", "CA+"], "is not in the gallery"),
        (["attack", "rgb.safetensors", "mine.png", "--data", "photos", "--goal", "GTM"], "--class"),
        (["attack", "rgb.safetensors", "mine.png", "--data", "photos", "--class", "z"], "no class 'z'"),
    ],
)
def test_mistakes_are_one_line_and_exit_two(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    code, _, err = run(capsys, monkeypatch, *arguments)
    assert code == 2, err
    lines = [line for line in err.splitlines() if not any(words in line for words in SAID)]
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0], err


def test_one_perturbed_image_stays_in_its_ball() -> None:
    import anchorhold as ah
    from anchorhold.auditing.one_image import attack as attack_one

    data = ah.dataset("digits")
    done = attack_one(ah.load("m.safetensors"), "3", data, "TMA", eps=0.1, steps=3, device="cpu")
    assert data.test.images is not None
    moved = (done.image.int() - data.test.images[3].int()).abs()
    assert 0 < moved.max() <= 26 and done.image.dtype == torch.uint8
    before, after = done.measures["TMA"]
    assert after > before


def test_attacks_take_settings() -> None:
    assert cli.audit._attacks("") is None
    assert cli.audit._attacks("CA+:w=5, ES") == {"CA+": {"w": 5}, "ES": {}}
    assert cli.audit._attacks("CA+:w=2:margin=0.1") == {"CA+": {"w": 2, "margin": 0.1}}
    with pytest.raises(SettingsError, match="write settings as NAME=VALUE"):
        cli.audit._attacks("ES:D")
