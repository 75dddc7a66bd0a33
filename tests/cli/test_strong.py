"""`anchorhold audit --strength strong`, `verify` and `algorithm1` on the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from anchorhold.auditing import run as auditing
from anchorhold.data.datasets import dataset
from anchorhold.model.embedder import Embedder
from anchorhold.runs.folder import Run
from anchorhold.runs.schemas import RUN_SCHEMA
from tests.auditing.test_strong import shorter
from tests.cli.test_audit import photographs
from tests.cli.test_main import run

pytestmark = pytest.mark.medium

HERE = ["--data", "digits", "--device", "cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    monkeypatch.setattr(auditing, "MEMBERS", shorter())
    Embedder("small", 16, channels=1, size=8).save(tmp_path / "m.safetensors")
    Embedder("small", 8, channels=1, size=8).save(tmp_path / "other.safetensors")


@pytest.mark.slow
def test_a_strong_audit_and_its_receipts(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--attacks", "GTM,CA-:w=2", "--limit", "10", "--steps", "2", "--strength", "strong", "--out", "a"]
    more = ["--curve", "4/255,8/255", "--surrogate", "other.safetensors"]
    code, out, err = run(capsys, monkeypatch, "audit", "m.safetensors", *HERE, *options, *more)
    assert code == 0, err
    # One of ten queries is wrong before any attack: of the 3,082 steps at two ε it costs the 2 of the standard run.
    assert "strong attack: up to 32,760 image-steps and 28,000 queries of square" in err
    assert "`anchorhold verify a --model m.safetensors --data digits`" in out
    found = json.loads((tmp_path / "a" / "audit.json").read_text())
    assert found["settings"]["strength"] == "strong" and found["curve"]["eps"] == [0, 4 / 255, 8 / 255]
    assert found["strong"]["members"][-2:] == ["transfer", "square"]
    assert f"{found['protocols']['strong']['columns']['GTM']['value']:.1f}" in out
    assert len(list((tmp_path / "a" / "receipts" / "recall").glob("*.png"))) == 10
    code, out, err = run(capsys, monkeypatch, "verify", "a", "--model", "m.safetensors", *HERE)
    assert code == 0 and out.startswith("20 images of 2 goals verified: recall"), err
    code, out, err = run(capsys, monkeypatch, "verify", "a", "--model", "other.safetensors", *HERE)
    assert (
        code == 2 and "error: a failed verification: 1 problem, the first: the receipts belong to another model" in err
    )
    code, _, err = run(capsys, monkeypatch, "verify", "nowhere", "--model", "m.safetensors", *HERE)
    assert code == 2 and "no receipts in nowhere" in err


@pytest.mark.parametrize(("kind", "data"), [("folder", "photos"), ("csv", "some.csv")])
def test_receipts_of_the_test_split_that_a_run_made_of_a_folder(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, data: str
) -> None:
    photographs(tmp_path, "abcdefgh")
    rows = [f"photos/{name}/{index}.png,{name}" for name in "abcdefgh" for index in range(4)]
    (tmp_path / "some.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    Embedder("small", 8, size=8).save(tmp_path / "run" / "model.safetensors")
    Run("run").write_json({"schema": RUN_SCHEMA, "data": {"test": dataset(kind, data).test.fingerprint()}})
    here = ["--data", data, "--device", "cpu"]
    options = ["--attacks", "GTM", "--steps", "1", "--strength", "strong", "--out", "a"]
    code, out, err = run(capsys, monkeypatch, "audit", "run", *here, *options)
    assert code == 0 and "8 of 8 queries" in out, err
    shutil.copy("run/model.safetensors", "alone.safetensors")  # a model may travel without its run
    for model in ("run", "alone.safetensors"):
        code, out, err = run(capsys, monkeypatch, "verify", "a", "--model", model, *here)
        assert code == 0 and out.startswith("8 images of 1 goal verified: recall"), err
        assert f"samples of {kind}/test (8 images of 2 classes)" in " ".join(out.split())
    code, out, err = run(capsys, monkeypatch, "audit", "run", *here, *options[:4], "--out", "a")
    assert code == 2 and "a holds a strong audit with receipts" in err  # which would not belong to it any more
    if kind == "csv":
        return
    shutil.rmtree("photos")
    photographs(tmp_path)  # too few classes to hold some out
    code, out, err = run(capsys, monkeypatch, "verify", "a", "--model", "run", *here)
    assert code == 2 and "the receipts belong to other data" in err


@pytest.mark.slow
def test_algorithm_1(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ["--limit", "12", "--seeds", "2", "--eps", "0.05", "--out", "t"]
    code, out, err = run(capsys, monkeypatch, "algorithm1", "m.safetensors", "other.safetensors", *HERE, *options)
    assert code == 0, err
    lines = [line.split()[:2] for line in out.splitlines()[2:10]]
    assert lines == [[name, method] for name in ("m", "other") for method in ("Benign", "FGSM", "C&W", "PGD")]
    assert (tmp_path / "t" / "m" / "cw" / "audit.json").is_file()
    photographs(tmp_path, "abcdefgh")
    Embedder("small", 8, size=8).save(tmp_path / "run" / "model.safetensors")
    Run("run").write_json({"schema": RUN_SCHEMA, "data": {"test": dataset("folder", "photos").test.fingerprint()}})
    quick = ["--data", "photos", "--device", "cpu", "--seeds", "1", "--out", "f"]
    code, _, err = run(capsys, monkeypatch, "algorithm1", "run", *quick)
    assert code == 0 and "classes of photos that the model was not trained on" in err
    again = run(capsys, monkeypatch, "algorithm1", "m.safetensors", "other.safetensors", *HERE, *options)
    assert again[1] == out


def test_until_on_the_command_line(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "--limit",
        "10",
        "--steps",
        "1",
        "--protocol",
        "corrected",
        "--until",
        "50",
        "--curve",
        "none",
        "--out",
        "u",
    ]
    code, out, err = run(capsys, monkeypatch, "audit", "m.safetensors", *HERE, *options)
    assert code == 0 and "10 of 896 queries" in out, err
    code, _, err = run(capsys, monkeypatch, "audit", "m.safetensors", *HERE, "--strength", "very", "--out", "v")
    assert code == 2 and "there are: standard, strong" in err
