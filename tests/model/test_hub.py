"""Weights and models by their name on the Hub: found, pinned, recorded, checked, and every refusal in one line."""

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import anchorhold as ah
from anchorhold.cli.main import app
from anchorhold.config.build import build, to_dict
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.adapters import dataset_from
from anchorhold.errors import AnchorholdError, ModelError, RunError
from anchorhold.extensions import Origin, code_named_in
from anchorhold.model.embedder import Embedder
from anchorhold.model.hub import HubName, fetch
from anchorhold.model.load import load_model
from anchorhold.model.weights import read_tensors
from anchorhold.training.sweeping import _trained
from tests.hub_server import TOKEN, Hub, serving

SMALL: dict[str, Any] = {"backbone": "small", "dim": 4, "channels": 1, "size": 8}
IMAGES = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub of our own for this process, without any token; huggingface_hub read its environment at import."""
    from huggingface_hub import constants

    with serving() as found:
        point_at(monkeypatch, found.url, tmp_path / "cache")
        yield found
    assert constants.HF_HUB_OFFLINE is False or os.environ.get("HF_HUB_OFFLINE")


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def saved(folder: Path, **changes: Any) -> bytes:
    folder.mkdir(exist_ok=True, parents=True)
    return Embedder(**(SMALL | changes)).save(folder / "m.safetensors").read_bytes()


def command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


def refused(text: str, kind: type[AnchorholdError] = ModelError) -> str:
    """The one line with which `ah.load` refuses a name."""
    with pytest.raises(kind) as error:
        ah.load(text)
    line = str(error.value)
    assert "\n" not in line and "/cache/" not in line and len(line) < 400
    return line


# Names ------------------------------------------------------------------------------------------------------


def test_names_are_read_in_all_their_parts() -> None:
    assert HubName.parse("hf:a/b") == HubName("a/b")
    assert HubName.parse("hf:a/b@v1.0") == HubName("a/b", "v1.0")
    assert HubName.parse("hf:a/b@refs/pr/3:x/y@2.pt") == HubName("a/b", "refs/pr/3", "x/y@2.pt")
    whole = "hf:madrylab/robust-imagenet-models:resnet18_linf_eps4.0.ckpt"
    assert str(HubName.parse(whole)) == whole and HubName.parse(whole).revision == ""


@pytest.mark.parametrize(
    "text",
    [
        "hf:", "hf:resnet18", "hf://a/b", "hf:a/b/c", "hf:a/b@", "hf:a/b:", "hf:a--b/c", "hf:a/..", "hf:../b",
        "hf:a/b:../../x", "hf:a/b:/etc/passwd", "hf:a/b:x/../../y", "hf:a/b:x\\..\\y", "hf:a/b:x//y", "hf:a/b:x\ny",
        "hf:a/b@../../x", "hf:a/b@/x", "hf:a/b@a b", "hf:é/b", "hf:a/b:\x1b[2J", "hf:a/b:..", "hf:a/b:./x",
    ],
)  # fmt: skip
def test_names_that_lead_elsewhere_are_refused_before_anything_is_asked(hub: Hub, text: str, tmp_path: Path) -> None:
    line = refused(text)
    assert "hf:" in line or "revision" in line or "file" in line
    assert line.isprintable() and not hub.asked and not (tmp_path / "cache").exists()


# Loading ----------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_and_a_revision_pins_it(hub: Hub, tmp_path: Path) -> None:
    first = hub.put("me/digits", {"model.safetensors": saved(tmp_path / "a", seed=1)})
    second = hub.put("me/digits", {"model.safetensors": saved(tmp_path / "b", seed=2)})
    old, new = (Embedder(**SMALL, seed=seed).eval()(IMAGES) for seed in (1, 2))
    assert torch.equal(ah.load("hf:me/digits")(IMAGES), new)
    pinned = ah.load(f"hf:me/digits@{first}")
    assert torch.equal(pinned(IMAGES), old) and pinned.hub == f"hf:me/digits@{first}:model.safetensors"
    assert ah.load("hf:me/digits@main").hub == f"hf:me/digits@{second}:model.safetensors"
    hub.put("me/digits", {"weights/old.safetensors": saved(tmp_path / "a", seed=1)}, branch="v/1")
    assert torch.equal(load_model("hf:me/digits@v/1:weights/old.safetensors")(IMAGES), old)


def test_a_repository_that_moved_is_found(hub: Hub, tmp_path: Path) -> None:
    hub.put("new/name", {"model.safetensors": saved(tmp_path)})
    hub.moved["old/name"] = "new/name"
    assert ah.load("hf:old/name").dim == 4


def test_a_module_of_your_own_is_given_again(hub: Hub, tmp_path: Path) -> None:
    from anchorhold.model.trainable import trainable

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    theirs = trainable(ah.wrap(net(0), mean=[0.5], std=[0.25]))
    hub.put("me/own", {"model.safetensors": theirs.save(tmp_path / "m.safetensors").read_bytes()})
    assert torch.equal(ah.load("hf:me/own", module=net(1))(IMAGES), theirs.eval()(IMAGES))
    assert "module=" in refused("hf:me/own") and "hf:me/own@" in refused("hf:me/own")
    with pytest.raises(ModelError, match=r"hf:me/own@\w{40}:model\.safetensors holds the weights of"):
        ah.load("hf:me/own", module=nn.Flatten())


def test_weights_of_every_layout_are_recorded_with_commit_and_hash(hub: Hub, tmp_path: Path) -> None:
    net = Embedder("small", 0, channels=1, seed=5).backbone.state_dict()
    torchvision = net | {"fc.weight": torch.zeros(2, 2)}
    robust = {f"module.model.{key}": value for key, value in net.items()}
    robust |= {f"module.attacker.model.{key}": value for key, value in net.items()}
    robust |= {"module.normalizer.new_mean": torch.zeros(1)}
    torch.save(torchvision, tmp_path / "tv.pth")
    torch.save({"model": robust, "epoch": 3, "optimizer": {"lr": 0.1}}, tmp_path / "r.ckpt")
    files = {"tv.pth": tmp_path / "tv.pth", "resnet18_linf_eps4.0.ckpt": tmp_path / "r.ckpt"}
    contents = {name: path.read_bytes() for name, path in files.items()}
    commit = hub.put("lab/robust", contents)
    for name, data in contents.items():
        model = Embedder("small", 4, f"hf:lab/robust:{name}", channels=1)
        report = model.weights_report
        assert report is not None and report.source == f"hf:lab/robust@{commit}:{name}"
        assert report.sha256 == hashlib.sha256(data).hexdigest()[:16]
        assert all(torch.equal(value, net[key]) for key, value in model.backbone.state_dict().items())


@pytest.mark.slow
def test_files_of_torchvision_timm_and_robust_models_transfer(hub: Hub, tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file
    from torchvision.models import resnet18

    theirs, images = resnet18(weights=None).eval(), torch.rand(1, 3, 64, 64)
    state = theirs.state_dict()
    robust = {f"module.{part}.{key}": t for part in ("model", "attacker.model") for key, t in state.items()}
    robust |= {"module.normalizer.new_mean": torch.zeros(3, 1, 1), "module.normalizer.new_std": torch.ones(3, 1, 1)}
    other = timm.create_model("resnet18", num_classes=7)
    torch.save(state, tmp_path / "resnet18.pth")
    torch.save({"model": robust, "optimizer": {}, "epoch": 90}, tmp_path / "resnet18_linf_eps4.0.ckpt")
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    hub.put("lab/nets", {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()})
    theirs.fc = nn.Identity()
    with torch.no_grad():
        for file in ("resnet18.pth", "resnet18_linf_eps4.0.ckpt"):
            model = Embedder("resnet18", 0, f"hf:lab/nets:{file}").eval()
            torch.testing.assert_close(model.backbone(images), theirs(images), rtol=1e-5, atol=1e-5)
        other.reset_classifier(0)
        model = Embedder("resnet18", 0, "hf:lab/nets").eval()  # timm's file is the default one
        assert torch.equal(model.backbone(images), other.eval()(images))
    with pytest.raises(ModelError, match=r"hf:lab/nets@\w{40}:resnet18\.pth does not fit resnet34"):
        Embedder("resnet34", 0, "hf:lab/nets:resnet18.pth")


def test_pickled_code_in_a_repository_is_not_run(hub: Hub, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'owned'}",)

    torch.save({"state_dict": {"conv.weight": torch.ones(1)}, "x": Evil()}, tmp_path / "evil.pt")
    hub.put("evil/repo", {"evil.pt": (tmp_path / "evil.pt").read_bytes(), "code.py": b"raise SystemExit"})
    with pytest.raises(ModelError, match="does not fit small"):
        Embedder("small", 4, "hf:evil/repo:evil.pt", channels=1)
    with pytest.raises(ModelError, match=r"hf:evil/repo@\w{40}:code\.py cannot be read as weights"):
        Embedder("small", 4, "hf:evil/repo:code.py", channels=1)
    assert not (tmp_path / "owned").exists()


@pytest.mark.medium
def test_a_model_file_cannot_name_a_further_download(hub: Hub, tmp_path: Path) -> None:
    for number, (key, value) in enumerate(
        [("backbone", "hf-hub:me/a"), ("backbone", "hf:me/a"), ("weights", "hf:me/a")]
    ):
        model = Embedder(**SMALL)
        model.config[key] = value
        hub.put("me/evil", {f"{number}.safetensors": model.save(tmp_path / "m.safetensors").read_bytes()})
        refused(f"hf:me/evil:{number}.safetensors")
    assert not any("me/a" in each for each in hub.asked)


def test_a_saved_model_gives_size_mean_and_preprocessing_to_a_start_from_it(hub: Hub, tmp_path: Path) -> None:
    data = saved(tmp_path, mean=[0.3], std=[0.2], preprocessing={"resize": 10, "crop": 8})
    hub.put("me/start", {"model.safetensors": data})
    model = Embedder("small", 2, "hf:me/start", channels=1)
    assert model.config["mean"] == [0.3] and model.preprocess.resize == 10 and model.size == (8, 8)
    heads = [each for each in hub.asked if each.startswith("HEAD /me/")]
    assert len(heads) == 2  # one download: our question and the client's own
    with pytest.raises(ModelError, match=r"hf:me/start@\w{40}:model.safetensors was trained with mean"):
        Embedder("small", 2, "hf:me/start", channels=1, mean=[0.5])


# What the Hub refuses ---------------------------------------------------------------------------------------


def test_private_gated_and_missing_are_one_line_each(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(tmp_path)
    hub.put("me/secret", {"model.safetensors": data}, private=True)
    hub.put("me/gated", {"model.safetensors": data}, gated=True)
    hub.put("me/open", {"b.ckpt": b"x", "a.txt": b"y", ".gitattributes": b"z", "sub/model.pt": b"w"})
    assert "no such repository, or it is private" in refused("hf:me/nothing")
    assert "HF_TOKEN" in refused("hf:me/secret")
    assert "gated" in refused("hf:me/gated") and f"{hub.url}/me/gated" in refused("hf:me/gated")
    assert refused("hf:me/open@v9").startswith("hf:me/open has no revision 'v9'")
    assert refused("hf:me/open:c.pt").endswith("it has b.ckpt, sub/model.pt, a.txt")
    assert refused("hf:me/open").endswith("name a file, hf:me/open:FILE, of b.ckpt, sub/model.pt, a.txt")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept your token" in refused("hf:me/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert ah.load("hf:me/secret").dim == ah.load("hf:me/gated").dim == 4
    assert "no such repository" in refused("hf:me/nothing")


def test_a_hub_that_is_down_is_one_line_and_the_cache_serves(hub: Hub, tmp_path: Path) -> None:
    hub.put("me/a", {"model.safetensors": saved(tmp_path)})
    ah.load("hf:me/a")
    hub.broken = 503
    assert ah.load("hf:me/a").dim == 4
    assert "answers 503" in refused("hf:me/b")


def test_without_a_network_the_cache_serves_and_else_one_line(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("me/a", {"model.safetensors": saved(tmp_path)})
    here = ah.load("hf:me/a").hub
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        point_at(monkeypatch, url, tmp_path / "cache")
        assert ah.load("hf:me/a").hub == here
        line = refused("hf:me/a@v2")
        assert url in line and "cannot be reached" in line and "not in the cache" in line


def test_offline_mode(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.put("me/a", {"model.safetensors": saved(tmp_path)})
    ah.load("hf:me/a")
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert ah.load("hf:me/a").dim == 4
    assert "HF_HUB_OFFLINE" in refused("hf:me/b") and len(hub.asked) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.medium
def test_a_hub_that_does_not_answer_is_given_up_soon(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anchorhold.model.hub.PATIENCE", 0.3)
    hub.put("me/a", {"model.safetensors": saved(tmp_path)})
    hub.hangs = 60.0
    assert "cannot be reached" in refused("hf:me/a") and len(hub.questions("me/a")) == 1


# Damage -----------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_refused_on_the_hub_on_the_way_and_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    data = bytearray(saved(tmp_path))
    hub.put("me/good", {"model.safetensors": bytes(data)})
    data[-9] ^= 1  # in a weight: the numbers stay finite, only the seal knows
    hub.put("me/bad", {"model.safetensors": bytes(data)})
    assert "is damaged or was replaced (its contents changed" in refused("hf:me/bad")
    hub.corrupt = True
    with pytest.raises(ModelError, match="the file in the cache is damaged; remove"):
        fetch("hf:me/good")
    hub.corrupt = False
    for path in (tmp_path / "cache").rglob("blobs/*"):
        path.unlink()
    found = fetch("hf:me/good")
    assert ah.load("hf:me/good").dim == 4
    blob = found.path.resolve()
    kept = bytearray(blob.read_bytes())
    kept[-9] ^= 1
    blob.write_bytes(bytes(kept))
    with pytest.raises(ModelError, match="the file in the cache is damaged"):
        ah.load("hf:me/good")


def test_weights_on_the_way_are_checked_too(hub: Hub, tmp_path: Path) -> None:
    torch.save(Embedder("small", 0, channels=1).backbone.state_dict(), tmp_path / "w.pt")
    hub.put("me/w", {"w.pt": (tmp_path / "w.pt").read_bytes()})
    hub.corrupt = True
    with pytest.raises(ModelError, match="the file in the cache is damaged"):
        Embedder("small", 2, "hf:me/w:w.pt", channels=1)
    assert len(read_tensors(tmp_path / "w.pt")) > 0


# Records ----------------------------------------------------------------------------------------------------


def test_a_name_on_the_hub_in_a_record_is_neither_code_nor_a_download(hub: Hub) -> None:
    told = to_dict(settings_from("natural", {"model.weights": "hf:me/w@main:w.pt"}))
    assert build(told).model.weights == "hf:me/w@main:w.pt" and list(code_named_in({"weights": "hf:x"})) == []
    with pytest.raises(RunError, match="names the code hf:thing"):
        build({"defence": {"name": "hf:thing"}})  # a module of the name hf is code all the same
    for spec in ("hf:me/w", "small=hf:me/w:w.pt", "os:getcwd=hf:me/w"):
        with pytest.raises(RunError, match=f"index.json names the download {spec}.*--model {spec}"):
            load_model(spec, origin=Origin("index.json", repeat="--model {}"))
    assert not hub.asked


def tiny() -> Any:
    images = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return images, torch.arange(40) % 5


STEP = {"train.epochs": 1, "batch.pairs": 4, "train.on_collapse": "warn"}
CHANGES = STEP | {"model.backbone": "small", "model.dim": 4}


@pytest.mark.medium
def test_a_run_records_its_start_and_resumes_without_asking_the_hub(hub: Hub, tmp_path: Path) -> None:
    torch.save(Embedder("small", 0, channels=1, seed=3).backbone.state_dict(), tmp_path / "w.pt")
    commit = hub.put("me/w", {"w.pt": (tmp_path / "w.pt").read_bytes()})
    changes = CHANGES | {"model.weights": "hf:me/w:w.pt"}
    data = tiny()
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=changes, device="cpu")
    info = run.read_json()
    assert info["settings"]["model"]["weights"] == "hf:me/w:w.pt"
    assert info["model"]["weights"]["source"] == f"hf:me/w@{commit}:w.pt"
    assert info["model"]["weights"]["sha256"] == hashlib.sha256((tmp_path / "w.pt").read_bytes()).hexdigest()[:16]
    asked = len(hub.asked)
    (run.path / "model.safetensors").unlink()
    run.update_json(status="interrupted")
    ah.resume(run.path, data=data, device="cpu")
    assert len(hub.asked) == asked and run.read_json()["status"] == "done"
    # Without a checkpoint the weights would come from the record: only the user may name a download.
    for name in ("last", "previous", "model"):
        (run.path / f"{name}.safetensors").unlink(missing_ok=True)
    run.update_json(status="interrupted")
    with pytest.raises(RunError, match=r"names the download hf:me/w:w\.pt.*allow=\['hf:me/w:w\.pt'\]"):
        ah.resume(run.path, data=data, device="cpu")
    assert len(hub.asked) == asked
    ah.resume(run.path, data=data, device="cpu", allow=["hf:me/w:w.pt"])
    assert len(hub.asked) > asked and run.read_json()["status"] == "done"
    # A sweep repeats the names of its own call.
    for name in ("last", "previous", "model"):
        (run.path / f"{name}.safetensors").unlink(missing_ok=True)
    run.update_json(status="interrupted")
    settings = build(run.read_json()["settings"])
    assert _trained(run.path, settings, dataset_from(data), None, "cpu", Silent())


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["model", "weights"])
def test_an_index_names_its_model_and_a_search_asks_you_to_repeat_it(hub: Hub, tmp_path: Path, kind: str) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8), (90 * number, 40, 0)).save(photos / f"{number}.png")
    model = Embedder("small", 4, size=8)
    torch.save(model.backbone.state_dict(), tmp_path / "w.pt")
    files = {"model.safetensors": model.save(tmp_path / "m.safetensors").read_bytes()}
    hub.put("me/m", files | {"w.pt": (tmp_path / "w.pt").read_bytes()})
    spec = "hf:me/m" if kind == "model" else "small=hf:me/m:w.pt"
    more = [] if kind == "model" else ["--size", "8"]
    code, text = command("embed", spec, str(photos), "--out", str(tmp_path / "ix"), "--device", "cpu", *more)
    assert code == 0, text
    about = json.loads((tmp_path / "ix" / "index.json").read_text())["model"]
    assert about["named"]["spec"] == spec
    if kind == "model":
        assert about["hub"] == f"hf:me/m@{hub.repos['me/m'].branches['main']}:model.safetensors"
    asked = len(hub.asked)
    search = ["search", str(tmp_path / "ix"), str(photos / "1.png"), "--device", "cpu"]
    code, text = command(*search)
    assert code == 2 and f"names the download {spec}" in text and f"--model {spec}" in text and len(hub.asked) == asked
    code, text = command(*search, "--model", spec)
    assert code == 0 and "1.png" in text, text


@pytest.mark.medium
def test_runs_and_audits_of_a_model_from_the_hub_record_the_commit(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put("me/m", {"model.safetensors": saved(tmp_path)})
    data = tiny()
    run = ah.fit(ah.load("hf:me/m"), data, "natural", tmp_path / "run", overrides=STEP, device="cpu")
    assert run.read_json()["model"]["hub"] == f"hf:me/m@{commit}:model.safetensors"
    assert "\nbase_model: me/m\n" in ah.model_card(run)
    options: dict[str, Any] = {"attacks": ["ES"], "limit": 4, "steps": 1, "device": "cpu", "examine": None}
    found = ah.audit(ah.load("hf:me/m"), data, **options).to_dict()
    assert found["model"]["hub"] == f"hf:me/m@{commit}:model.safetensors"
    assert "hub" not in ah.audit(Embedder(**SMALL), data, **options).to_dict()["model"]


def test_bare_weights_are_no_model_and_the_line_says_how_to_use_them(hub: Hub, tmp_path: Path) -> None:
    torch.save({"conv.weight": torch.ones(1)}, tmp_path / "w.pt")
    hub.put("me/w", {"w.pt": (tmp_path / "w.pt").read_bytes()})
    code, text = command("audit", "hf:me/w:w.pt", "--data", "digits", "--device", "cpu")
    assert code == 2 and "resnet18=hf:me/w@" in text and "cache" not in text
    code, text = command("audit", "hf:me/w", "--data", "digits", "--mean", "0.5", "--std", "0.5")
    assert code == 2 and "has no model.safetensors" in text and "of w.pt" in text
