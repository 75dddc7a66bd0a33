"""Files of others: code that they name is not run, and what is wrong with them is one line."""

import contextlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.distributed import local_rank, neighbours, started
from anchorhold.errors import AnchorholdError, ModelError, RunError
from anchorhold.index.embedding import embed
from anchorhold.index.searching import search
from anchorhold.model.embedder import Embedder, load_embedder
from anchorhold.runs.folder import Run
from anchorhold.training.fit import fit, resume
from tests.cli.test_main import run
from tests.index.test_embedding import SIZE, photographs

QUICK = {"train.epochs": 1, "batch.pairs": 64, "model.dim": 8, "model.backbone": "mlp", "model.weights": ""}
MARK = "open('ran', 'w').close()\nfrom torch import nn\ndef thing():\n    return nn.Flatten()\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photographs, a model, their index, and a module that leaves a mark where it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign", raising=False)
    photographs(tmp_path / "photos", 3)
    Embedder("small", 8, size=SIZE).save(tmp_path / "m.safetensors")
    embed(tmp_path / "m.safetensors", tmp_path / "photos", tmp_path / "ix", device="cpu")
    (tmp_path / "foreign.py").write_text(MARK)
    return tmp_path


def changed(path: Path, *keys: str, value: Any) -> None:
    told = json.loads(path.read_text())
    node = told
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path.write_text(json.dumps(told))


def test_code_that_an_index_names_is_not_run(capsys: Any, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    changed(place / "ix/index.json", "model", "named", "spec", value="foreign:thing")
    image = "photos/a/000.png"
    code, _, err = run(capsys, monkeypatch, "search", "ix", image)
    assert code == 2 and "--model foreign:thing" in err and err.count("\n") == 1
    assert not (place / "ran").exists()
    # Said by the user it is run, and then its weights are other ones.
    code, _, err = run(capsys, monkeypatch, "search", "ix", image, "--model", "foreign:thing")
    assert code == 2 and "cannot be compared" in err and (place / "ran").exists()


@pytest.mark.medium
@pytest.mark.parametrize("keys", [("defence", "name"), ("model", "backbone"), ("data", "name"), ("model", "weights")])
def test_code_that_a_run_names_has_to_be_repeated(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, place: Path, keys: tuple[str, str]
) -> None:
    fit(None, "digits", "natural", "run", overrides=QUICK, device="cpu")
    changed(place / "run/run.json", "status", value="training")
    changed(place / "run/run.json", "settings", *keys, value="foreign:thing")
    code, _, err = run(capsys, monkeypatch, "resume", "run")
    assert code == 2 and "anchorhold resume run --allow foreign:thing" in err and not (place / "ran").exists()
    code, _, err = run(capsys, monkeypatch, "resume", "run", "--allow", "foreign:other")
    assert code == 2 and "--allow foreign:thing" in err
    with pytest.raises(RunError, match="names the code"):
        resume("run", device="cpu")
    code, _, err = run(capsys, monkeypatch, "resume", "run", "--allow", "foreign:thing")
    assert "names the code" not in err


def test_weights_by_a_timm_name_and_a_root_with_a_colon_are_no_code(place: Path) -> None:
    from anchorhold.config.build import build, to_dict

    told = to_dict(settings_from("natural", {"model.weights": "timm:resnet18.tv_in1k", "data.root": "photos:old"}))
    assert build(told).model.weights == "timm:resnet18.tv_in1k"


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("model",), None),
        (("model", "weights"), 3),
        (("model", "named"), "m.safetensors"),
        (("model", "named", "spec"), ["m"]),
        (("model", "named", "mean"), "a"),
        (("model", "named", "size"), [True, 8]),
        (("images",), "many"),
        (("images",), 1e308),
        (("dim",), [8]),
        (("made_with",), []),
        (("made_with", "resize"), None),
        (("made_with", "crop"), 10**9),
    ],
)
def test_fields_of_an_index_are_of_their_type(place: Path, keys: tuple[str, ...], value: Any) -> None:
    changed(place / "ix/index.json", *keys, value=value)
    with pytest.raises(AnchorholdError) as caught:
        search(place / "ix", place / "photos/a/000.png", device="cpu")
    assert "index.json" in str(caught.value) and "\n" not in str(caught.value)


def test_nesting_without_end_is_one_line(place: Path) -> None:
    (place / "ix/index.json").write_text("[" * 100_000)
    with pytest.raises(RunError, match="nested too deeply"):
        search(place / "ix", place / "photos/a/000.png", device="cpu")


def rewritten(path: Path, change: Any) -> None:
    """The safetensors file with other metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    about = json.loads(head["__metadata__"]["anchorhold"])
    change(about)
    del about["sealed"]  # an attacker would leave it out too
    head["__metadata__"]["anchorhold"] = json.dumps(about)
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", "abc"), ("mean", [None] * 3), ("std", [float("nan")] * 3), ("backbone", 5), ("backbone", None),
     ("weights", "/etc/hostname"), ("weights", "timm:resnet18"),
     ("channels", [3]), ("channels", 10**30), ("dim", 99_999_999), ("size", ["a", "b"]), ("seed", None)],
)  # fmt: skip
def test_settings_inside_weights_are_of_their_type(place: Path, name: str, value: Any) -> None:
    rewritten(place / "m.safetensors", lambda about: about["config"].update({name: value}))
    with pytest.raises(AnchorholdError) as caught:
        load_embedder(place / "m.safetensors")
    assert "\n" not in str(caught.value)
    with contextlib.suppress(AnchorholdError):  # bare weights of the backbone may still be weights
        Embedder("small", 8, place / "m.safetensors", size=SIZE)


@pytest.mark.parametrize(
    ("kind", "word"),
    [(torch.bool, "bool"), (torch.complex64, "complex64"), (torch.int64, "int64"), (torch.float32, "NaN")],
)
def test_weights_that_are_no_numbers_are_refused(place: Path, kind: torch.dtype, word: str) -> None:
    path = place / "m.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["anchorhold"])
    del about["sealed"]
    tensors = safetensors.torch.load_file(path)
    name = next(each for each in tensors if each.startswith("backbone") and each.endswith("weight"))
    tensors[name] = (tensors[name] * float("nan")) if kind is torch.float32 else tensors[name].to(kind)
    safetensors.torch.save_file(tensors, path, {"anchorhold": json.dumps(about)})
    for load in (load_embedder, lambda path: Embedder("small", 8, path, size=SIZE)):
        with pytest.raises(ModelError, match=word):
            load(path)


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, "train.seed = " + "7" * 5000, "a = '\0'", "[train]\nseed = 1\0"])
def test_recipes_that_no_parser_takes_are_one_line(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "r.toml").write_text(text)
    code, _, err = run(capsys, monkeypatch, "train", "digits", "--recipe", str(tmp_path / "r.toml"))
    assert code == 2 and err.count("\n") == 1 and err.startswith("error: ")


@pytest.mark.parametrize(
    "setting",
    ["batch.pairs=1e308", "model.dim=99999999", "optimiser.lr=1e308", "train.attack_steps=1e300", "train.epochs=1e30",
     "defence.margin=1e300", "data.workers=99999999", "train.seed=1e999999999", "data.resize=99999999"],
)  # fmt: skip
def test_absurd_settings_are_refused_at_once(capsys: Any, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    arguments = ("train", "digits", "--recipe", "natural", "--set", setting, "--device", "cpu", "--epochs", "1")
    arguments = arguments[:-2] if "epochs" in setting else arguments
    code, _, err = run(capsys, monkeypatch, *arguments)
    assert code == 2 and setting.partition("=")[0] in err and err.count("\n") == 1


def test_a_run_without_some_of_its_numbers_is_told_without_them(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    fit(None, "digits", "natural", "run", overrides=QUICK, device="cpu")
    for keys, value in ((("final", "r2"), None), (("final",), {"r1": 50.0}), (("final",), "gone"), (("start",), 3)):
        changed(place / "run/run.json", *keys, value=value)
        code, out, _ = run(capsys, monkeypatch, "resume", "run", "--device", "cpu")
        assert code == 0 and "run folder: run" in out and "R@2" not in out


def test_a_name_that_is_not_unicode_is_kept_as_it_is(tmp_path: Path) -> None:
    info = {"root": os.fsdecode(b"photos-\xff"), "ε": 1}
    told = Run.create(tmp_path / "run", info).read_json()
    assert {key: told[key] for key in info} == info
    assert "ε" in (tmp_path / "run/run.json").read_text()


@pytest.mark.parametrize("about", [{}, {"anchorhold": "{}"}, {"anchorhold": "[]"}, {"anchorhold": "7"}])
def test_an_embed_part_without_its_metadata_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, about: dict[str, str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("anchorhold.index.unfinished.remove_parts", lambda out: None)
        embed(place / "m.safetensors", place / "photos", place / "other", device="cpu")
    for name in ("index.json", "ids.csv", "vectors.safetensors"):
        (place / "other" / name).unlink()
    part = place / "other/.anchorhold-parts/000000.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(part), part, about)
    index = embed(place / "m.safetensors", place / "photos", place / "other", device="cpu")
    assert (place / "ix/vectors.safetensors").read_bytes() == (index.path / "vectors.safetensors").read_bytes()


@pytest.mark.medium
@pytest.mark.parametrize("about", [{}, {"anchorhold": "{}"}, {"anchorhold": "[]"}])
def test_an_audit_shard_without_its_metadata_is_made_again(place: Path, about: dict[str, str]) -> None:
    model, options = load_embedder(place / "m.safetensors"), {"attacks": {"ES": {}}, "limit": 2, "steps": 1}
    first = ah.audit(model, place / "photos", out=place / "audit", device="cpu", **options)
    for shard in (place / "audit/shards").iterdir():
        rows = safetensors.torch.load_file(shard)
        safetensors.torch.save_file({name: row.flip(0) for name, row in rows.items()}, shard, about)
    again = ah.audit(model, place / "photos", out=place / "audit", device="cpu", **options)
    assert again.to_dict()["protocols"] == first.to_dict()["protocols"]


@pytest.mark.parametrize("value", ["abc", "", "-1", "1.5", "²", "9" * 5000])
def test_what_torchrun_sets_is_a_whole_number(capsys: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name, read in (("RANK", started), ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", neighbours)):
        with monkeypatch.context() as patch, pytest.raises(RunError, match=f"^{name} is"):
            patch.setenv(name, value)
            read()
    monkeypatch.setenv("WORLD_SIZE", value)
    code, _, err = run(capsys, monkeypatch, "recipes")
    assert code == 2 and err.startswith("error: WORLD_SIZE is") and err.count("\n") == 1 and len(err) < 200
