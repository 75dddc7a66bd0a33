"""export: one ONNX file that gives what torch gives, for any batch, from images in [0, 1]."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anchorhold import __version__
from anchorhold.errors import ModelError, RunError, SettingsError
from anchorhold.index import exporting
from anchorhold.index.exporting import export
from anchorhold.index.folder import described
from anchorhold.model.embedder import Embedder
from anchorhold.model.wrap import wrap
from tests.cli.test_main import run

pytestmark = pytest.mark.medium


def session(path: Path) -> Any:
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture(autouse=True)
def _extra() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'anchorhold[onnx]'")


@pytest.mark.slow
def test_the_file_gives_what_torch_gives_for_any_batch(tmp_path: Path) -> None:
    model = Embedder("resnet18", 12, size=(32, 24), seed=3).train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):  # else they are the identity, and nothing is seen of them
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    path = export(model, tmp_path / "m.onnx")
    assert model.training and [each.name for each in tmp_path.iterdir()] == ["m.onnx"]
    net = session(path)
    (given,), (got,) = net.get_inputs(), net.get_outputs()
    assert (given.name, got.name, given.shape[1:], got.shape[1:]) == ("images", "vectors", [3, 32, 24], [12])
    for count in (1, 3, 8):
        images = torch.rand(count, 3, 32, 24)
        vectors = torch.from_numpy(net.run(None, {"images": images.numpy()})[0])
        with torch.no_grad():
            torch.testing.assert_close(vectors, model.eval()(images), atol=1e-4, rtol=0)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(count))


@pytest.mark.slow
def test_the_command_writes_metadata_that_say_what_it_is(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANCHORHOLD_DEBUG", raising=False)
    monkeypatch.setenv("ANCHORHOLD_COMMIT", "abc123")
    model = Embedder("small", 6, channels=1, size=8)
    model.save(tmp_path / "m.safetensors")
    code, text, err = run(capsys, monkeypatch, "export", "m.safetensors", "--out", "m.onnx")
    assert code == 0 and text.startswith("written: m.onnx, which agrees with torch within 1e-4\n") and not err
    about = session(tmp_path / "m.onnx").get_modelmeta().custom_metadata_map
    assert about["anchorhold"] == __version__ and about["commit"] == "abc123" and about["input_range"] == "[0, 1]"
    known = json.loads(about["model"])
    assert known["config"] == model.config and known["weights"] == described(model)["weights"]
    assert about["preparation"] == "resize to 9×9 (bilinear), centre crop 8×8"
    code, _, err = run(capsys, monkeypatch, "export", "m.safetensors", "--out", "m.pt")
    assert code == 2 and err == "error: --out m.pt: give a file name that ends in .onnx\n"
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, _, err = run(capsys, monkeypatch, "export", "m.safetensors", "--out", "n.onnx")
    assert (
        code == 2
        and err == "error: this needs onnxscript, which is not installed; run pip install 'anchorhold[onnx]'\n"
    )


def test_a_wrapped_module_has_its_mean_and_std_inside(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    model = wrap(inner, mean=[0.5] * 3, std=[0.2] * 3, size=4)
    net = session(export(model, tmp_path / "m.onnx"))
    images = torch.rand(7, 3, 4, 4)
    vectors = torch.from_numpy(net.run(None, {"images": images.numpy()})[0])
    by_hand = nn.functional.normalize(inner((images - 0.5) / 0.2), dim=1).detach()
    torch.testing.assert_close(vectors, by_hand, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("off", "written"), [(0.9e-4, True), (2e-4, False), (float("nan"), False)])
def test_a_file_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, written: bool
) -> None:
    model = Embedder("small", 6, size=8).eval()

    class Runtime:
        def __init__(self, path: str, providers: list[str]) -> None:
            assert Path(path).read_text() == "onnx"

        def run(self, names: list[str], given: dict[str, Any]) -> list[Any]:
            vectors = model(torch.from_numpy(given["images"])).detach()
            if len(vectors) == 5:  # all batches are looked at, and all coordinates
                vectors[-1, -1] += off
            return [vectors.numpy()]

    program = SimpleNamespace(model=SimpleNamespace(metadata_props={}), save=lambda path: Path(path).write_text("onnx"))
    monkeypatch.setattr(exporting, "_traced", lambda *_: program)
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(InferenceSession=Runtime))
    if written:
        export(model, tmp_path / "m.onnx")
    else:
        with pytest.raises(ModelError, match=r"differs from torch by .* on a batch of 5; nothing was written"):
            export(model, tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"] * written


def test_what_is_too_large_or_fails_is_said_before_it_is_traced(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.onnx, "export", None)
    with pytest.raises(ModelError, match=r"^the model fails on images of shape"):
        export(wrap(nn.Linear(5, 5), size=4), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"^a model must be an nn\.Module, not None"):
        export(None, tmp_path / "m.onnx")  # type: ignore[arg-type]
    monkeypatch.setattr(exporting, "_MOST", 1000)
    with pytest.raises(SettingsError, match="do not fit into one ONNX file"):
        export(Embedder("small", 6, size=8), tmp_path / "m.onnx")


def test_what_cannot_be_traced_is_one_line(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.flatten(1)[:, : 2 if float(images.sum()) > 1 else 3]

    with pytest.raises(ModelError) as caught:
        export(wrap(Own(), size=4), tmp_path / "m.onnx")
    assert str(caught.value).startswith("torch cannot export this Own to ONNX") and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_below_a_file_is_no_place(tmp_path: Path) -> None:
    (tmp_path / "notes.md").touch()
    with pytest.raises(RunError, match=r"x\.onnx: .*notes\.md is a file; choose another folder$"):
        export(Embedder("small", 6, size=8), tmp_path / "notes.md" / "x.onnx")
