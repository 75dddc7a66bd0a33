"""Weights from files: key layouts, checkpoints with foreign objects, pickles that would run code."""

import dataclasses
import json
import os
import pickle
import sys
import tarfile
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from anchorhold.errors import ModelError
from anchorhold.model import pickles, weights
from anchorhold.model.backbones import backbone
from anchorhold.model.embedder import Embedder
from anchorhold.model.weights import _download, load_weights, read_tensors

SHARED = Path(__file__).resolve().parents[3] / "shared" / "weights"
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@pytest.fixture(scope="module")
def torchvision_net() -> nn.Module:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    net: nn.Module = resnet18(weights=None)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):  # statistics that an untouched net would not have by chance
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net.eval()


def _tiny() -> dict[str, Tensor]:
    net, _ = backbone("small", channels=1)
    return {name: torch.randn_like(t) for name, t in net.state_dict().items()}


def _load_tiny(path: Path) -> tuple[dict[str, Tensor], Any]:
    net, _ = backbone("small", channels=1)
    report = load_weights(net, path, "small")
    return net.state_dict(), report


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", ["safetensors", "pth", "pth.tar", "legacy"])
def test_torchvision_layout_fits_timm(tmp_path: Path, torchvision_net: nn.Module, kind: str) -> None:
    path = tmp_path / f"r18.{kind}"
    state = torchvision_net.state_dict()
    if kind == "safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
    model = Embedder("resnet18", 0, path, mean=[0, 0, 0], std=[1, 1, 1]).eval()
    images = torch.rand(2, 3, 64, 64)
    logits = torchvision_net.fc(model.backbone(images))
    torch.testing.assert_close(logits, torchvision_net(images))
    report = model.weights_report
    assert report is not None
    assert (report.source, report.tensors, report.ignored) == (path.name, 120, 2)
    assert len(report.sha256 or "") == 16
    assert json.loads(json.dumps(dataclasses.asdict(report)))["tensors"] == 120


def _robust_checkpoint(state: dict[str, Tensor], extra: Any) -> dict[str, Any]:
    """What robust-models-transfer publishes: the network twice, normalisers, and objects of its libraries."""
    model: dict[str, Tensor] = {}
    for name, tensor in state.items():
        model[f"module.model.{name}"] = tensor
        model[f"module.attacker.model.{name}"] = tensor + 1  # told apart from the copy that is wanted
    for name in ("normalizer", "attacker.normalize"):
        model[f"module.{name}.new_mean"] = model[f"module.{name}.new_std"] = torch.ones(3, 1, 1)
    model["module.model.fc.weight"] = torch.zeros(2, 2)
    return {"model": model, "optimizer": {"state": {0: torch.ones(1)}}, "epoch": 1, "amp": extra}


class _Plain:
    def __init__(self) -> None:
        self.rows, self.name = [1, 2], "x"


class _ListLike(list[int]):
    pass


class _DictLike(dict[str, int]):
    pass


@FORMATS
def test_checkpoint_with_classes_that_are_gone(tmp_path: Path, zipped: bool) -> None:
    state, path = _tiny(), tmp_path / "robust.pt"
    gone = types.ModuleType("a_library_that_is_gone")
    for kind in (_Plain, _ListLike, _DictLike):
        setattr(gone, kind.__name__, kind)
        kind.__module__ = gone.__name__
    sys.modules[gone.__name__] = gone
    try:
        extra = [
            _Plain(),
            _ListLike([1, 2]),
            _DictLike(a=1),
            _Plain,
            {1, 2},
            b"bytes",
            torch.device("cpu"),
            1j,
        ]
        checkpoint = _robust_checkpoint(state, extra)
        torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    finally:
        del sys.modules[gone.__name__]
    loaded, report = _load_tiny(path)
    assert _equal(loaded, state)
    assert report.tensors == len(state)
    assert report.ignored == len(checkpoint["model"]) - len(state)


class _Call:
    """Pickles as a call: loading it the ordinary way runs it."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.what = function, args

    def __reduce__(self) -> Any:
        return self.what

    def __call__(self) -> None: ...  # pickle wants what it is to call to be callable


class _MadeByCall(_Call):
    """As dill does: a class that a function makes, then an object of that class with a state and items."""

    def __reduce__(self) -> Any:
        function, args = self.what
        return _Call(function, *args), (), {"state": 1}, None, iter([("a", 1)])


@FORMATS
@pytest.mark.parametrize("where", ["beside", "inside", "top"])
def test_a_pickle_that_would_run_code_does_not(tmp_path: Path, zipped: bool, where: str) -> None:
    state, path, mark = _tiny(), tmp_path / "evil.pt", tmp_path / "mark"
    calls = [
        _Call(os.system, f"touch '{mark}'"),
        _Call(exec, f"open({str(mark)!r}, 'w')"),
        _MadeByCall(eval, f"open({str(mark)!r}, 'w') and __import__('collections').OrderedDict"),
        _Call(getattr, mark.parent, "name"),
    ]
    checkpoint: Any = _robust_checkpoint(state, calls)
    if where == "inside":
        checkpoint = {**state, "evil": calls[0], "evil too": calls[1]}
    elif where == "top":
        checkpoint = calls[1]
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    if where == "top":
        with pytest.raises(ModelError, match="no named tensors"):
            read_tensors(path)
    else:
        assert _equal(_load_tiny(path)[0], state)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the control: the file is really loaded
    assert mark.exists()


def _by_hand(opcodes: bytes) -> bytes:
    """A checkpoint in the legacy format around opcodes that no pickler would write."""
    head = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    return b"".join(pickle.dumps(part, 2) for part in head) + b"\x80\x02" + opcodes + b"." + pickle.dumps([], 2)


def test_the_legacy_header_is_read_as_data_too(tmp_path: Path) -> None:
    path, mark = tmp_path / "evil.pt", tmp_path / "mark"
    path.write_bytes(pickle.dumps(_Call(os.system, f"touch '{mark}'"), 2))
    with pytest.raises(ModelError, match="cannot be read"):
        read_tensors(path)
    assert not mark.exists()


def test_objects_of_classes_that_were_made_by_a_call(tmp_path: Path) -> None:
    path = tmp_path / "dill.pt"
    made = b"cdill\n_create_type\n)R)\x81}b"  # a call makes the class, NEWOBJ an object of it, BUILD its state
    path.write_bytes(_by_hand(b"(X\x01\x00\x00\x00a" + made + b"d"))
    with pytest.raises(ModelError, match="no named tensors"):
        read_tensors(path)


def test_functions_that_are_let_through_cannot_be_changed(tmp_path: Path) -> None:
    """BUILD sets attributes on whatever it is given: on a function, for the rest of the process."""
    path = tmp_path / "poison.pt"
    path.write_bytes(_by_hand(b"ctorch._utils\n_rebuild_parameter\n}X\x08\x00\x00\x00poisonedK\x01sb"))
    with pytest.raises(ModelError, match="no named tensors"):
        read_tensors(path)
    assert not hasattr(torch._utils._rebuild_parameter, "poisoned")
    assert not hasattr(pickles._parameter, "poisoned")
    assert torch.load(path, weights_only=False).poisoned == 1  # the control
    del torch._utils._rebuild_parameter.poisoned


@pytest.mark.parametrize(
    "opcodes",
    [
        b"(X\x06\x00\x00\x00modulecsome.where\nNet\nX\x04\x00\x00\x00a.pyX\x06\x00\x00\x00sourcetQ",
        b"(X\x06\x00\x00\x00modulecsome.where\nNet\n)RX\x04\x00\x00\x00a.pyX\x06\x00\x00\x00sourcetQ",
        b"\x82\x01)R",
        b"K\x01K\x02\x85R",
        b"ctorch\nUntypedStorage\nX\x01\x00\x00\x00x\x85R",
    ],
    ids=[
        "module with source",
        "made module with source",
        "extension",
        "call a number",
        "storage from a name",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_strange_opcodes_write_and_call_nothing(
    tmp_path: Path, opcodes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # torch.load writes "patches" of changed sources to the working folder
    monkeypatch.setattr("pickle._extension_cache", {1: tmp_path.joinpath("called").mkdir})
    path = tmp_path / "strange.pt"
    path.write_bytes(_by_hand(opcodes))
    with pytest.raises(ModelError):
        read_tensors(path)
    assert list(tmp_path.iterdir()) == [path]


@FORMATS
@pytest.mark.filterwarnings("error")
def test_every_kind_of_tensor_comes_out_as_it_went_in(tmp_path: Path, zipped: bool) -> None:
    base = torch.arange(12.0)
    state = {
        "view": base[2:8].view(2, 3).t(),
        "parameter": nn.Parameter(torch.rand(3)),
        "half": torch.rand(3).half(),
        "brain": torch.rand(3).bfloat16(),
        "count": torch.tensor(5),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    state["parameter"].note = "python attributes are dropped"  # type: ignore[attr-defined]
    path = tmp_path / "kinds.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    read = read_tensors(path)
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
        assert not read[name].requires_grad


@pytest.mark.parametrize("nest", ["state_dict", "model", "model_state_dict", "net", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "model.", "backbone.", "encoder.", "attacker.model."])
def test_wrappings(tmp_path: Path, nest: str, prefix: str) -> None:
    state, path = _tiny(), tmp_path / "w.ckpt"
    inside = {f"{prefix}{name}": t for name, t in state.items()} | {
        f"{prefix}fc.weight": torch.zeros(1),
        f"{prefix}normalizer.new_mean": torch.zeros(1),
    }
    torch.save({"step": torch.tensor(3), nest: inside, "lr": 0.1}, path)
    assert _equal(_load_tiny(path)[0], state)


def test_a_saved_embedder_gives_its_backbone(tmp_path: Path) -> None:
    trained = Embedder("test_resnet", 8, seed=1)
    path = trained.save(tmp_path / "model.safetensors")
    other = Embedder("test_resnet", 32, path, seed=2)
    assert _equal(other.backbone.state_dict(), trained.backbone.state_dict())
    assert other.weights_report is not None
    assert other.weights_report.ignored == 4  # head's two, mean, std


@pytest.mark.parametrize("place", ["runs/pre", "runs/pre/model.safetensors", "."])
def test_a_run_folder_gives_its_backbone(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "pre"
    folder.mkdir(parents=True)
    trained = Embedder("small", 8, channels=1, seed=1)
    trained.save(folder)
    monkeypatch.chdir(folder if place == "." else tmp_path)
    other = Embedder("small", 32, place, channels=1, seed=2)
    assert _equal(other.backbone.state_dict(), trained.backbone.state_dict())
    assert not torch.equal(other.head.weight[:8], trained.head.weight)
    assert str(other.weights_report) == "pre/model.safetensors, 8 tensors of the backbone loaded, 4 others ignored"


def test_a_model_of_ours_keeps_its_mean_and_std(tmp_path: Path) -> None:
    trained = Embedder("small", 8, channels=1, mean=[0.25], std=[0.5])
    trained.save(tmp_path)
    other = Embedder("small", 16, tmp_path, channels=1)
    images = torch.rand(2, 1, 8, 8)
    assert (other.config["mean"], other.config["std"]) == ([0.25], [0.5])
    assert torch.equal(other.features(images), trained.features(images))
    assert Embedder("small", 16, tmp_path, channels=1, mean=(0.25,)).config["std"] == [0.5]
    for wrong in ({"mean": [0.3]}, {"std": [1.0]}):
        with pytest.raises(ModelError, match=r"was trained with (mean \[0.25\], not \[0.3\]|std \[0.5\], not \[1.0\])"):
            Embedder("small", 16, tmp_path, channels=1, **wrong)  # type: ignore[arg-type]


def test_a_model_of_ours_with_another_backbone_is_refused(tmp_path: Path) -> None:
    path = Embedder("mlp", 8, channels=1, size=8).save(tmp_path / "mine.safetensors")
    with pytest.raises(ModelError, match=r"mine.safetensors holds a mlp, not a small; set model.backbone to mlp"):
        Embedder("small", 8, path, channels=1)
    with pytest.raises(ModelError, match=r"1.weight \(128, 64\) for \(128, 192\)"):  # for grey images
        Embedder("mlp", 8, path, channels=3, size=8)
    Embedder("test_resnet", 8).save(path)
    named = Embedder("test_resnet.r160_in1k", 8, path, seed=3)  # the same network under timm's longer name
    assert named.weights_report is not None


def test_a_folder_without_a_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model.safetensors in this folder; give a file or a finished run"):
        Embedder("small", 8, tmp_path, channels=1)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ModelError, match=r"finish the run: ah\.resume"):
        Embedder("small", 8, tmp_path, channels=1)


@pytest.mark.parametrize("about", ["", "[]", "{}", '{"config": 3}', '{"config": {"backbone": "other"}}'])
def test_metadata_that_is_not_ours_says_nothing(tmp_path: Path, about: str) -> None:
    path, state = tmp_path / "w.safetensors", _tiny()
    safetensors.torch.save_file(state, path, {"anchorhold": about})
    assert weights.saved_config(path) is None and _equal(_load_tiny(path)[0], state)


def test_half_precision_is_cast_and_counters_may_be_missing(tmp_path: Path, torchvision_net: nn.Module) -> None:
    path = tmp_path / "half.safetensors"
    state = torchvision_net.state_dict()
    kept = {name: t.half() for name, t in state.items() if not name.endswith("num_batches_tracked")}
    safetensors.torch.save_file(kept, path)
    model = Embedder("resnet18", 0, path)
    assert model.backbone.conv1.weight.dtype == torch.float32
    assert torch.equal(model.backbone.conv1.weight, state["conv1.weight"].half().float())


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    path, state = tmp_path / "w.safetensors", _tiny()
    kept = {**state, "0.weight": torch.zeros(32, 3, 3, 3), "strange": torch.zeros(1)}
    del kept["2.bias"]
    safetensors.torch.save_file(kept, path)
    net, _ = backbone("small", channels=1)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        load_weights(net, path, "small")
    message = str(caught.value)
    assert "1 missing (2.bias)" in message
    assert "1 unexpected (strange)" in message
    assert "0.weight (32, 3, 3, 3) for (32, 1, 3, 3)" in message
    assert "\n" not in message
    assert _equal(net.state_dict(), before)  # nothing was half loaded
    safetensors.torch.save_file({f"x{i}": torch.zeros(1) for i in range(9)}, path)
    with pytest.raises(ModelError, match=r"9 unexpected \((x\d, ){5}…\)"):
        load_weights(net, path, "small")


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_files_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"cut.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        safetensors.torch.save_file(_tiny(), path)
    else:
        torch.save(_tiny(), path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    for length in (0, 3, 20, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match="cannot be read as weights") as caught:
            read_tensors(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_programs_and_archives_are_refused(tmp_path: Path) -> None:
    script, tar, text = tmp_path / "script.pt", tmp_path / "weights.tar", tmp_path / "page.pth"
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(script)
    with pytest.raises(ModelError, match="TorchScript"):
        read_tensors(script)
    # Debug records are packed, so a script may unpack to more than it has: it is still a script, not a bomb.
    with zipfile.ZipFile(script, "a", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("script/code/debug.pkl", bytes(100_000))
    with pytest.raises(ModelError, match="TorchScript"):
        read_tensors(script)
    text.write_text("<html>404</html>")
    with tarfile.open(tar, "w") as archive:
        archive.add(text, "pickle")
    with pytest.raises(ModelError, match="tar archive"):
        read_tensors(tar)
    with pytest.raises(ModelError, match="cannot be read as weights"):
        read_tensors(text)


def test_names_without_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        Embedder("small", 4, "nowhere.pth", channels=1)
    with pytest.raises(ModelError, match="no ImageNet weights exist for 'small'"):
        Embedder("small", 4, "imagenet", channels=1)
    with pytest.raises(ModelError, match="could not download"):
        Embedder("resnet18", 4, "timm:resnet18.no_such_tag")


def test_a_download_without_a_connection_is_said_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: Any, **__: Any) -> None:
        raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub and we cannot find")

    monkeypatch.setattr(timm, "create_model", offline)
    told = r"^could not download the weights 'resnet18.tv_in1k' \(check your connection\); give a file"
    with pytest.raises(ModelError, match=told):
        _download("resnet18.tv_in1k", nn.Conv2d(3, 4, 3))


@pytest.mark.parametrize("tag", ["hf-hub:owner/name", "hf_hub:owner/name", "local-dir:/tmp", "resnet18/../x", ""])
def test_weights_of_timm_are_named_as_timm_lists_them(monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    import timm

    whole = timm.create_model

    def built(name: str, pretrained: bool = False, **rest: Any) -> nn.Module:
        assert not pretrained, "asked the hub"
        model: nn.Module = whole(name, **rest)
        return model

    monkeypatch.setattr("timm.create_model", built)
    with pytest.raises(ModelError, match=r"give timm:NAME or timm:NAME\.TAG"):
        Embedder("resnet18", 4, f"timm:{tag}")


@pytest.mark.medium
def test_imagenet_without_network_fails_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr("socket.create_connection", _unreachable)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"resnet18\.tv_in1k.*give a file"):
        Embedder("resnet18", 4, "imagenet")
    assert constants.HF_HUB_OFFLINE is False or os.environ.get("HF_HUB_OFFLINE")


def _unreachable(*args: Any, **kwargs: Any) -> None:
    raise OSError("no route")


@pytest.mark.medium
def test_imagenet_takes_torchvisions_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    asked: list[tuple[str, bool]] = []
    create = timm.create_model

    def pretend(name: str, pretrained: bool, **options: Any) -> nn.Module:
        asked.append((name, pretrained))
        net: nn.Module = create(name, pretrained=False, **options)
        return net

    monkeypatch.setattr(timm, "create_model", pretend)
    report = Embedder("resnet18", 4, "imagenet").weights_report
    assert asked == [("resnet18", False), ("resnet18.tv_in1k", True)]
    assert report is not None
    assert (report.source, report.sha256) == ("timm:resnet18.tv_in1k", None)


@pytest.mark.parametrize("name", ["resnet18_imagenet.safetensors", "resnet18_robust_linf4.safetensors"])
def test_the_shared_weights_load(name: str) -> None:
    if not (SHARED / name).is_file():
        pytest.skip(f"{SHARED / name} is not here")
    model = Embedder("resnet18", 8, SHARED / name).eval()
    assert torch.isfinite(model(torch.rand(1, 3, 64, 64))).all()


def test_the_shared_imagenet_weights_give_torchvisions_logits() -> None:
    from torchvision.models import resnet18

    path = SHARED / "resnet18_imagenet.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    state = {name: t.float() for name, t in read_tensors(path).items()}
    reference = resnet18(weights=None).eval()
    reference.load_state_dict(state, strict=False)
    model = Embedder("resnet18", 0, path).eval()
    images = torch.rand(2, 3, 224, 224)
    normalised = (images - model.mean) / model.std
    with torch.no_grad():
        ours = model.backbone(normalised) @ state["fc.weight"].T + state["fc.bias"]
        torch.testing.assert_close(ours, reference(normalised), rtol=1e-4, atol=1e-4)
