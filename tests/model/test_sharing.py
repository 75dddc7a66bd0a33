"""Push then load: the same vectors, a card that says what was measured, and nothing of the machine."""

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import anchorhold as ah
from anchorhold.cli.main import app
from anchorhold.errors import AnchorholdError, ModelError, RunError, SettingsError
from anchorhold.model.embedder import Embedder
from anchorhold.model.trainable import trainable
from anchorhold.runs.folder import Run
from anchorhold.runs.summary import summary_of, without_paths
from tests.hub_server import TOKEN, Hub, serving
from tests.model.test_hub import IMAGES, SMALL, point_at

ROOT = Path(__file__).resolve().parents[2]
STRONG = ROOT / "results" / "cub" / "hm-lga-112"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as found:
        point_at(monkeypatch, found.url, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its audit. Data, recipe and initial weights are named by their absolute paths."""
    folder = tmp_path_factory.mktemp("somewhere-on-this-machine")
    (folder / "mine.toml").write_text('extends = "natural"\n')
    torch.save(Embedder("small", 0).backbone.state_dict(), folder / "start.pt")
    for number in range(48):
        (folder / "photos" / f"c{number % 8}").mkdir(parents=True, exist_ok=True)
        colour = (30 * (number % 8), number, 200)
        Image.new("RGB", (8, 8), colour).save(folder / "photos" / f"c{number % 8}" / f"{number}.png")
    changes: dict[str, Any] = {"train.epochs": 1, "batch.pairs": 8, "train.on_collapse": "warn"}
    changes |= {"model.backbone": "small", "model.dim": 4, "model.weights": str(folder / "start.pt")}
    changes |= {"data.resize": 8, "data.crop": 8}
    photos = str(folder / "photos")
    run = ah.fit(None, photos, str(folder / "mine.toml"), folder / "run", overrides=changes, device="cpu")
    ah.audit(ah.load(run.path), photos, out=folder / "audit", limit=8, steps=2, epsilons=(), device="cpu")
    return folder


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


def metadata(card: str) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert found
    told = yaml.safe_load(found[1])
    assert isinstance(told, dict)
    return told


def metrics(card: str) -> dict[str, float]:
    (one,) = metadata(card)["model-index"]
    (result,) = one["results"]
    return {each["name"]: each["value"] for each in result["metrics"]}


# Push and load ----------------------------------------------------------------------------------------------


@pytest.mark.medium
def test_a_model_comes_back_bit_for_bit_and_commits_stay(hub: Hub) -> None:
    first, second = (Embedder(**SMALL, seed=seed).eval() for seed in (1, 2))
    name = first.push_to_hub("me/digits", private=True, commit_message="one\nmore")
    assert re.fullmatch(r"hf:me/digits@[0-9a-f]{40}", name) and hub.repos["me/digits"].private
    again = second.push_to_hub("hf:me/digits")
    assert torch.equal(ah.load(name)(IMAGES), first(IMAGES))
    assert torch.equal(ah.load(again)(IMAGES), second(IMAGES))
    assert torch.equal(ah.load("hf:me/digits")(IMAGES), second(IMAGES))
    assert set(hub.files("me/digits")) == {"model.safetensors", "README.md"}
    assert any(each.startswith("PUT /lfs/") for each in hub.asked)


def test_a_module_of_your_own_is_pushed_as_weights(hub: Hub) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model = trainable(ah.wrap(net, mean=[0.5], std=[0.5])).eval()
    name = model.push_to_hub("me/own")
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    assert torch.equal(ah.load(name, module=other)(IMAGES), model(IMAGES))
    assert "torch.nn.modules.container.Sequential" in hub.files("me/own")["README.md"].decode()


@pytest.mark.medium
def test_a_run_is_shared_with_numbers_and_without_the_machine(hub: Hub, place: Path) -> None:
    run, audit = Run(place / "run"), place / "audit"
    model = ah.load(run.path)
    name = model.push_to_hub("me/digits", run=run, audit=audit, license="mit")
    files = hub.files("me/digits")
    secrets = {str(place), place.name, str(Path.home()), os.getcwd(), TOKEN}
    if len(socket.gethostname()) > 5:
        secrets.add(socket.gethostname())
    for file, data in files.items():
        assert not [each for each in secrets if each.encode() in data], file
    assert run.read_json()["settings"]["data"]["root"] == str(place / "photos")
    shared, info = json.loads(files["run.json"]), run.read_json()
    assert shared["settings"]["data"]["root"] == "" and shared["settings"]["recipe"] == "mine.toml"
    assert shared["settings"]["model"]["weights"] == "start.pt" == shared["model"]["weights"]["source"]
    assert shared["final"] == info["final"] and shared["weights"] == info["weights"]
    told = json.loads((audit / "audit.json").read_text())
    card = files["README.md"].decode()
    assert metrics(card) == {
        "R@1, no attack": round(told["clean"]["R@1"]["value"], 2),
        "ERS, published": round(told["protocols"]["published"]["ers"]["value"], 2),
        "ERS, corrected": round(told["protocols"]["corrected"]["ers"]["value"], 2),
    }
    about = metadata(card)
    assert about["library_name"] == "anchorhold" and about["license"] == "mit" and len(about["tags"]) > 2
    ers = told["protocols"]["corrected"]["ers"]
    assert f"{ers['value']:.1f} [{ers['low']:.1f}, {ers['high']:.1f}]" in card and "ε 8/255" in card
    assert told["flags"] and all(f"**{flag['name']}**" in card for flag in told["flags"])
    # The whole repository in one folder is a run whose model is the exported one.
    images = IMAGES.expand(-1, 3, -1, -1)
    assert torch.equal(ah.load(name)(images), model(images))
    assert ah.load(name).trained_on == model.trained_on


@pytest.mark.medium
def test_the_command_writes_or_uploads_the_same_files(hub: Hub, place: Path, tmp_path: Path) -> None:
    words = ["push", str(place / "run"), "me/digits", "--audit", str(place / "audit")]
    code, text = command(*words, "--dry-run", str(tmp_path / "dry"))
    assert code == 0 and not hub.asked, text
    code, text = command(*words)
    assert code == 0 and "uploaded: hf:me/digits@" in text, text
    dry = {each.name: each.read_bytes() for each in (tmp_path / "dry").iterdir()}
    assert dry == hub.files("me/digits")
    assert dry["model.safetensors"] == (place / "run" / "model.safetensors").read_bytes()
    assert Run(tmp_path / "dry").read_json()["status"] == "done"
    assert ah.load(tmp_path / "dry").dim == 4  # its hash is the one in run.json
    code, text = command(*words[:3], "--dry-run", str(tmp_path / "dry"))  # the same folder again, without an audit
    assert code == 0 and "no audit" in text
    assert set(metrics((tmp_path / "dry" / "README.md").read_text())) == {"R@1, no attack"}


@pytest.mark.medium
def test_a_run_of_your_own_module_is_pushed_without_its_code(hub: Hub, tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = (images, torch.arange(40) % 5)
    changes = {"train.epochs": 1, "batch.pairs": 8, "train.on_collapse": "warn"}
    run = ah.fit(net(), data, "natural", tmp_path / "run", overrides=changes, device="cpu")
    model = ah.load(run.path, module=net())
    audit = ah.audit(model, data, attacks=["ES"], limit=4, steps=1, out=tmp_path / "audit", device="cpu", classes="all")
    code, text = command("push", str(run.path), "me/own", "--audit", str(tmp_path / "audit"))
    assert code == 0, text
    assert torch.equal(ah.load("hf:me/own", module=net())(IMAGES), model(IMAGES))
    assert model.push_to_hub("me/own", run=run, audit=audit).startswith("hf:me/own@")


# What is refused --------------------------------------------------------------------------------------------


def refused(model: Any, repo: str = "me/x", kind: type[AnchorholdError] = ModelError, **options: Any) -> str:
    with pytest.raises(kind) as error:
        model.push_to_hub(repo, **options)
    line = str(error.value)
    assert "\n" not in line and len(line) < 400 and TOKEN not in line
    return line


@pytest.mark.medium
def test_wrong_use_is_one_line_each(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    model = Embedder(**SMALL)
    assert "owner/name" in refused(model, "digits")
    assert "owner/name alone" in refused(model, "me/x@v1", SettingsError)
    assert "owner/name alone" in refused(model, "me/x:file", SettingsError)
    assert "may not write" in refused(model, "others/x")
    assert "give its identifier" in refused(model, license="my own\nwords", kind=SettingsError)
    assert "refuses the model card" in refused(model, license="nobodys-licence")
    assert "is not a run folder" in refused(model, run=tmp_path, kind=RunError)
    assert "cannot read" in refused(model, audit=tmp_path, kind=RunError)
    hub.put("me/public", {"a.txt": b""})
    assert "exists and is public" in refused(model, "me/public", private=True)
    assert set(hub.files("me/public")) == {"a.txt"}
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not know you" in refused(model)
    monkeypatch.delenv("HF_TOKEN")
    assert "hf auth login" in refused(model)
    assert "does not know you" in refused(model, token=True)
    assert model.push_to_hub("me/y", token=TOKEN).startswith("hf:me/y@")
    hub.broken = 500
    assert "answers 500" in refused(model, token=TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refused(model, token=TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        point_at(monkeypatch, url, tmp_path / "cache")
        assert f"{url} cannot be reached" in refused(model, token=TOKEN)


def test_a_hub_that_hangs_is_given_up_soon(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anchorhold.model.sharing.PATIENCE", 0.3)
    hub.hangs = 60.0
    assert "cannot be reached" in refused(Embedder(**SMALL)) and len(hub.questions("me/x")) == 1


@pytest.mark.medium
def test_numbers_of_another_model_are_refused(hub: Hub, place: Path, tmp_path: Path) -> None:
    other = Embedder(**SMALL)
    assert "the run trained other weights" in refused(other, run=place / "run", kind=RunError)
    assert "the audit is of another model" in refused(other, audit=place / "audit", kind=RunError)
    own = trainable(nn.Sequential(nn.Flatten(), nn.Linear(64, 3))).save(tmp_path / "own.safetensors")
    code, text = command("push", str(own), "me/x", "--audit", str(place / "audit"))
    assert code == 2 and "push the run folder" in text
    with pytest.raises(RunError, match="another model"):
        (tmp_path / "run").mkdir()
        info = Run(place / "run").read_json()
        Run(tmp_path / "run").write_json({**info, "weights": "f" * 16})
        ah.model_card(tmp_path / "run", place / "audit")
    assert not hub.asked


def test_the_command_refuses_what_it_cannot_share(tmp_path: Path) -> None:
    code, text = command("push", str(tmp_path), "me/x")
    assert code == 2 and "no model at" in text and text.count("\n") == 1
    data = bytearray(Embedder(**SMALL).save(tmp_path / "m.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "m.safetensors").write_bytes(bytes(data))
    code, text = command("push", str(tmp_path / "m.safetensors"), "me/x")
    assert code == 2 and "is damaged" in text
    Embedder(**SMALL).save(tmp_path / "m.safetensors")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    code, text = command("push", str(tmp_path / "m.safetensors"), "me/x", "--dry-run", str(tmp_path / "notes"))
    assert code == 2 and "holds other files (diary.txt)" in text and len(list((tmp_path / "notes").iterdir())) == 1
    Embedder(**SMALL).save(tmp_path / "alone" / "model.safetensors")
    code, text = command("push", str(tmp_path / "alone"), "me/x", "--dry-run", str(tmp_path / "alone"))
    assert code == 2 and "the folder of the model itself" in text
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "bare.safetensors")
    code, text = command("push", str(tmp_path / "bare.safetensors"), "me/x")
    assert code == 2 and "was not saved by Anchorhold" in text


def test_a_model_whose_record_holds_a_path_stays_at_home(hub: Hub) -> None:
    model = trainable(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    model.config["output"] = "/home/me/secret"
    assert "contains a path of your machine" in refused(model) and not hub.asked


# The card ---------------------------------------------------------------------------------------------------

STRANGE = "a \"b': [c]\n---\nlicense: mit\n<script>`x`|y é 日本 \x1b[2J \ud800 #{}&*!%@"


def audit_record(name: str) -> dict[str, Any]:
    column = {"value": 50.0, "low": 40.0, "high": 60.0, "initial": 80.0}
    outcome = {"columns": {"ES:R": column, name: column}, "ers": {"value": 30.0, "low": 29.0, "high": 31.0}}
    return {
        "schema": "anchorhold.audit/1",
        "settings": {"eps": 8 / 255, "alpha": 3 / 255, "steps": 32, "method": "pgd"},
        "data": {"query": {"name": name}, "images": [10, 10], "attacked": [5, 5], "part": name},
        "clean": {"R@1": {"value": 80.0, "low": 70.0, "high": 90.0}},
        "protocols": {"corrected": outcome},
        "model": {"weights": "0" * 16, "config": {"backbone": name, "dim": 8}},
        "flags": [{"name": name, "message": name}],
        "notes": [],
    }


class Found:
    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def to_dict(self) -> dict[str, Any]:
        return self.record


def test_strange_names_break_neither_metadata_nor_text() -> None:
    from huggingface_hub import ModelCard

    card = ah.model_card(None, Found(audit_record(STRANGE)), name="me/x")
    assert card.isprintable() or all(letter.isprintable() or letter == "\n" for letter in card)
    card.encode("utf-8")
    about = metadata(card)
    assert "license" not in about and set(metrics(card)) == {"R@1, no attack", "ERS, corrected"}
    (result,) = about["model-index"][0]["results"]
    assert "日本" in result["dataset"]["name"] and "\n" not in result["dataset"]["name"]
    assert re.fullmatch(r"[\w.-]+", result["dataset"]["type"], re.ASCII)
    assert ModelCard(card).data.eval_results is not None
    assert card.count("\n---\n") == 1 and "<script>" not in card.split("\n---\n")[1]
    table = [line for line in card.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


@pytest.mark.parametrize("junk", [None, 3, "x", [], [[]], {"a": {}}, float("nan"), True])
def test_records_of_other_kinds_give_a_card_all_the_same(junk: Any, tmp_path: Path) -> None:
    record = audit_record("digits/test")
    for section in ("settings", "data", "clean", "protocols"):
        for key in record[section]:
            changed = {**record, section: {**record[section], key: junk}}
            metadata(ah.model_card(None, Found(changed)))
    for key in ("flags", "model", "notes"):
        metadata(ah.model_card(None, Found({**record, key: junk})))
    run = {"schema": "anchorhold.run/2", "status": "done"}
    for key in ("settings", "data", "model", "versions", "final", "row", "commit"):
        (tmp_path / "run.json").write_text(json.dumps({**run, key: junk}))
        metadata(ah.model_card(tmp_path))


def test_a_model_that_was_not_audited_says_so(tmp_path: Path) -> None:
    card = ah.model_card(None)
    assert "model-index" not in metadata(card) and "not been audited" in card
    with pytest.raises(ModelError, match="owner/name"):
        ah.model_card(None, name="x y")


def test_a_strong_audit_shows_r1_under_attack() -> None:
    if not (STRONG / "strong").is_dir():
        pytest.skip("an sdist has no results")
    card = ah.model_card(STRONG, STRONG / "strong", name="me/cub")
    told = json.loads((STRONG / "strong" / "audit.json").read_text())
    column = told["protocols"]["strong"]["columns"]["LTM"]
    assert metrics(card)["R@1, strong attack"] == round(column["value"], 2)
    assert f"{column['value']:.1f} [{column['low']:.1f}, {column['high']:.1f}] %" in card
    (result,) = metadata(card)["model-index"][0]["results"]
    assert result["metrics"][-1]["args"] == {"protocol": "strong", "eps": "8/255", "norm": "linf"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/me/my photos", "my photos"), ("~/x/y.pt", "y.pt"), ("../up/y.pt", "y.pt"), ("./y", "y"),
        ("file:/home/me/x", "x"), ("8/255", "8/255"), ("hm/t6/cub/hm-lga-8", "hm/t6/cub/hm-lga-8"),
        ("hf:a/b@refs/pr/1:c/d.pt", "hf:a/b@refs/pr/1:c/d.pt"), ("https://h.co/a/b", "https://h.co/a/b"),
        ("see '/srv/data/x.png': bad", "see 'x.png': bad"), ("a=/srv/x,/srv/y/", "a=x,y"), ("and/or", "and/or"),
        ("timm:resnet18", "timm:resnet18"), ("/", ""), ("in:/root/a", "in:a"),
    ],
)  # fmt: skip
def test_paths_lose_their_folders_and_nothing_else_changes(text: str, left: str) -> None:
    assert without_paths({"a": [text, 1]}) == {"a": [left, 1]}


def test_a_summary_keeps_only_what_it_knows() -> None:
    info = {"schema": "s", "host": "machine", "settings": {"recipe": "a/b.toml", "model": {"weights": "hf:a/b:c"}}}
    assert summary_of(info) == {"schema": "s", "settings": {"recipe": "b.toml", "model": {"weights": "hf:a/b:c"}}}
