"""Encoders by name: the real libraries with small random models, saved to a folder; no network."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import anchorhold as ah
from anchorhold.cli.main import app
from anchorhold.errors import ModelError, RunError
from anchorhold.extensions import code_named_in
from anchorhold.index.folder import Index
from anchorhold.model.encoders import Encoder
from anchorhold.model.load import load_model
from anchorhold.model.preprocessing import record_of

pytestmark = pytest.mark.medium

VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
TINY = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
}
KINDS = ("clip", "clip_vision", "siglip", "dinov2", "dinov2_with_registers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models of transformers."""
    import transformers as t
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    place = tmp_path_factory.mktemp("encoders")
    torch.manual_seed(0)
    whole = t.CLIPModel(t.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=24))
    siglip = t.SiglipModel(t.SiglipConfig(text_config=TEXT, vision_config=VISION))
    crop = {"height": 32, "width": 32}
    shortest: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": crop}
    models: dict[str, tuple[Any, Any]] = {
        "clip": (whole, t.CLIPImageProcessor(**shortest)),
        "clip_vision": (
            t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**VISION, projection_dim=24)),
            t.CLIPImageProcessor(**shortest),
        ),
        "siglip": (siglip, t.SiglipImageProcessor(size=crop)),
        "dinov2": (
            t.Dinov2Model(t.Dinov2Config(**{**VISION, "mlp_ratio": 2})),
            t.BitImageProcessor(size={"shortest_edge": 40}, crop_size=crop, image_mean=[0.485, 0.456, 0.406]),
        ),
        "dinov2_with_registers": (
            t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**{**VISION, "mlp_ratio": 2})),
            t.BitImageProcessor(size={"shortest_edge": 40}, crop_size=crop),
        ),
        "vit": (t.ViTModel(t.ViTConfig(**VISION)), t.ViTImageProcessor(size=crop)),
    }
    for name, (model, processor) in models.items():
        model.eval().save_pretrained(place / name)
        processor.save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that open_clip knows by name, and the weights of one, as a file."""
    import open_clip
    from safetensors.torch import save_file

    place = tmp_path_factory.mktemp("open_clip")
    (place / "tiny-vit.json").write_text(json.dumps(TINY))
    open_clip.add_model_config(place)
    torch.manual_seed(3)
    save_file(open_clip.create_model("tiny-vit").state_dict(), place / "weights.safetensors")
    return place


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight classes of six pictures, wider than they are high."""
    place, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for own in range(8):
        (place / f"c{own}").mkdir()
        base = rng.uniform(0, 255, (6, 9, 3))
        for number in range(6):
            pixels = np.clip(base + rng.normal(0, 20, base.shape), 0, 255).astype("uint8")
            Image.fromarray(pixels).resize((77, 51)).save(place / f"c{own}" / f"{number}.png")
    return place


def theirs(name: str, place: Path, images: list[Image.Image]) -> tuple[Tensor, Tensor]:
    """Images and vectors as the library itself makes them."""
    import transformers as t

    processor = t.AutoImageProcessor.from_pretrained(place / name)
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        if name in ("clip", "siglip"):
            model: Any = t.AutoModel.from_pretrained(place / name).eval()
            out = model.get_image_features(pixel_values=pixels).pooler_output
        elif name == "clip_vision":
            out = t.CLIPVisionModelWithProjection.from_pretrained(place / name)(pixel_values=pixels).image_embeds
        else:
            out = t.AutoModel.from_pretrained(place / name).eval()(pixel_values=pixels).last_hidden_state[:, 0]
    return pixels, torch.nn.functional.normalize(out, dim=1)


def normalised(model: Any, images: Tensor) -> Tensor:
    out: Tensor = (images - model.mean) / model.std
    return out


@pytest.mark.parametrize("name", KINDS)
def test_a_transformers_model_gives_its_own_vectors(name: str, saved: Path, photos: Path) -> None:
    model = ah.load(f"transformers:{saved / name}")
    files = [photos / "c0" / "0.png", photos / "c3" / "1.png"]
    images = torch.stack([model.preprocess(file) for file in files])
    wanted, vectors = theirs(name, saved, [Image.open(file) for file in files])
    assert images.shape == (2, 3, 32, 32) and not model.training
    # Its processor resizes with torch, which rounds a pixel otherwise than Pillow does.
    assert (normalised(model, images) - wanted).abs().max() < 1.6 / 255 / 0.2
    assert torch.allclose(model(wanted * model.std + model.mean), vectors, atol=1e-5)
    assert torch.allclose(model(images), vectors, atol=0.02)
    assert not any("text" in key for key in model.state_dict())


def test_an_open_clip_model_gives_its_own_vectors(tiny: Path, photos: Path) -> None:
    import open_clip

    whole, _, transform = open_clip.create_model_and_transforms("tiny-vit", str(tiny / "weights.safetensors"))
    model = ah.load(f"open_clip:tiny-vit/{tiny / 'weights.safetensors'}")
    files = [photos / "c0" / "0.png", photos / "c3" / "1.png"]
    images = torch.stack([model.preprocess(file) for file in files])
    wanted = torch.stack([transform(Image.open(file)) for file in files])
    assert torch.allclose(normalised(model, images), wanted, atol=1e-6)  # to the pixel
    with torch.no_grad():
        assert torch.allclose(model(images), whole.eval().encode_image(wanted, normalize=True), atol=1e-6)
    assert {key.split(".")[0] for key in model.state_dict()} == {"module", "mean", "std"}


@pytest.mark.parametrize(
    ("size", "interpolation"), [((77, 51), "bicubic"), ((51, 78), "bilinear"), ((40, 40), "lanczos")]
)
def test_proportions_are_kept_as_torchvision_keeps_them(size: tuple[int, int], interpolation: str) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import center_crop, resize

    from anchorhold.data.decode import Square, square

    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3)).astype("uint8")
    wanted = center_crop(resize(Image.fromarray(pixels), 32, InterpolationMode(interpolation)), 32)
    assert np.array_equal(square(Image.fromarray(pixels), Square(32, interpolation, True)), np.asarray(wanted))


def test_open_clip_s_random_weights_have_to_be_meant(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"alone has random weights.*tiny-vit/none"):
        ah.load("open_clip:tiny-vit")
    one, two = ah.load("open_clip:tiny-vit/none"), ah.load("open_clip:tiny-vit/none")
    assert "the weights are random" in one.notes  # type: ignore[operator]
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(one(x), two(x))


def test_timm_s_nets_get_timm_s_preprocessing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm
    from timm.data import create_transform, resolve_data_config

    import anchorhold.model.hub

    def offline(tag: str, module: Any) -> dict[str, Tensor]:
        state: dict[str, Tensor] = timm.create_model(tag, pretrained=False, num_classes=0).state_dict()
        return state

    monkeypatch.setattr(anchorhold.model.weights, "_download", offline)
    model = ah.load("timm:test_vit")
    config = resolve_data_config(timm.get_pretrained_cfg("test_vit").to_dict())
    wanted = create_transform(**config, is_training=False)(Image.open(photos / "c0" / "0.png"))
    assert torch.allclose(normalised(model, model.preprocess(photos / "c0" / "0.png")), wanted, atol=1e-6)
    assert model.preset == "timm:test_vit" and "bicubic" in str(model.preprocess)
    plain = load_model("test_vit")  # a bare name: as ever
    assert "bilinear" in str(plain.preprocess) and plain.preset == ""


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output


def test_an_audit_and_an_index_name_the_encoder(
    saved: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved)
    quick = ["--limit", "8", "--steps", "1", "--attacks", "ES", "--device", "cpu"]
    code, text = run("audit", "transformers:clip", "--data", str(photos), *quick, "--out", str(tmp_path / "audit"))
    assert code == 0, text
    record = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert record["model"]["preset"] == "transformers:clip"
    query = record["data"]["query"]
    assert (query["resize"], query["interpolation"], query["proportions"]) == (32, "bicubic", True)
    code, text = run("embed", "transformers:clip", str(photos), "--out", str(tmp_path / "index"), "--device", "cpu")
    assert code == 0, text
    index, query = Index(tmp_path / "index"), photos / "c2" / "3.png"
    assert index.about["model"]["preset"] == "transformers:clip"
    name = f"transformers:{saved / 'clip'}"
    assert index.about["model"]["named"]["spec"] == name  # found from any folder
    monkeypatch.chdir(tmp_path)
    found = ah.search(index, query, 1, model=name, device="cpu").hits[0]
    assert found.id == "c2/3.png" and found.distance < 1e-3
    # A record alone does not load a model.
    with pytest.raises(RunError, match=f"names the model {name}.*name it yourself: model="):
        ah.search(index, query, device="cpu")
    with pytest.raises(ModelError, match="was made with model"):
        ah.search(index, query, model=f"transformers:{saved / 'siglip'}", device="cpu")


def test_a_name_in_a_record_loads_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from anchorhold.extensions import Origin

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was read"))
    for name in (f"transformers:{saved / 'clip'}", "open_clip:ViT-B-32/openai", "transformers:a/b=runs/x"):
        with pytest.raises(RunError, match="names the model"):
            load_model(name, origin=Origin("index.json"))
    names = ["open_clip:RN50", "transformers:owner", "timm:resnet18", "mine:net"]
    assert list(code_named_in(names)) == ["mine:net"]


@pytest.mark.parametrize("part", ["lora", "head"])
@pytest.mark.parametrize("name", ["clip", "siglip", "dinov2", "open_clip"])
def test_an_encoder_is_trained_saved_and_loaded(
    name: str, part: str, saved: Path, tiny: Path, photos: Path, tmp_path: Path
) -> None:
    spec = "open_clip:tiny-vit/none" if name == "open_clip" else f"transformers:{saved / name}"
    overrides: dict[str, Any] = {"train": {"epochs": 1, "collapse_warmup": 9}, "optimiser": {"lr": 1e-3}}
    overrides |= {"batch": {"pairs": 8, "mining_pairs": 0}, "model": {"train": part, "lora_rank": 2}}
    model = ah.load(spec)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    done = ah.fit(model, photos, "natural", tmp_path / "run", overrides=overrides, device="cpu")
    data = done.read_json()["settings"]["data"]
    assert record_of({key: data[key] for key in ("resize", "crop", "interpolation", "proportions")}) == (
        record_of(model.record) | {"proportions": model.preprocess.proportions}  # type: ignore[arg-type]
    )
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    heads = {"clip": "visual_projection", "siglip": "head.mlp.fc2", "dinov2": "layernorm", "open_clip": "net.proj"}
    assert any(heads[name] in key for key in changed) and (len(changed) > 5) == (part == "lora")
    again = load_model(f"{spec}={tmp_path / 'run'}")
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(again(x), model.eval()(x)) and str(again.preprocess) == str(model.preprocess)
    with pytest.raises(ModelError, match=f"holds the weights of {spec}: give it too"):
        ah.load(tmp_path / "run")


def test_sizes_of_yours_replace_the_encoder_s(saved: Path, photos: Path, tmp_path: Path) -> None:
    words = f"train {photos} --recipe natural --model transformers:{saved / 'clip'} --out {tmp_path / 'run'} --epochs 1"
    words += " --set data.resize=48 --set data.crop=40 --set batch.pairs=8 --set batch.mining_pairs=0 --device cpu"
    code, text = run(*words.split())
    assert code == 0, text
    data = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["data"]
    assert (data["resize"], data["crop"], data["interpolation"], data["proportions"]) == (48, 40, "bicubic", True)
    assert "resized to 32×32" in text  # inside the model
    code, text = run("audit", str(tmp_path / "run"), "--data", str(photos))
    assert code == 2 and f"transformers:{saved / 'clip'}={tmp_path / 'run'}" in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("open_clip:ViT-B-33/openai", "did you mean ViT-B-32"),
        ("open_clip:ViT-B-32", "random weights; name its weights, as in open_clip:ViT-B-32/"),
        ("open_clip:ViT-B-32/laion3b_s34b_b79k", "did you mean laion2b_s34b_b79k"),
        ("transformers:", "there is no folder ''"),
        ("transformers:no such/folder/here", "there is no folder"),
        ("transformers:{saved}/vit", "is a vit; CLIP, SigLIP and DINOv2 are known"),
        ("transformers:{saved}", "cannot be loaded"),
    ],
)
def test_wrong_names_are_one_line(name: str, message: str, saved: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        ah.load(name.format(saved=saved))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 480


def test_an_encoder_has_its_own_mean_and_size(saved: Path) -> None:
    with pytest.raises(ModelError, match="its own mean and std"):
        load_model(f"transformers:{saved / 'clip'}", mean=[0.5] * 3, std=[0.5] * 3)
    with pytest.raises(ah.AnchorholdError, match="its own size"):
        load_model(f"transformers:{saved / 'clip'}", size=64)


@pytest.mark.parametrize("name", ["transformers:facebook/dinov2-small", "open_clip:ViT-B-32/laion2b_s34b_b79k"])
def test_without_a_network_it_says_so_at_once(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import anchorhold.model.hub

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(anchorhold.model.hub, "_reachable", lambda url: False)
    with pytest.raises(ModelError, match=r"cannot be loaded .*check the name and the network") as caught:
        ah.load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_without_the_extra_it_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModelError, match=r"pip install 'anchorhold\[encoders\]'"):
        ah.load(f"{library}:a/b")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


def test_no_pickle_is_executed(saved: Path, tiny: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved / "clip", tmp_path / "clip")
    (tmp_path / "clip" / "model.safetensors").unlink()
    for file in (tmp_path / "clip" / "pytorch_model.bin", tmp_path / "weights.pt"):
        torch.save({"visual.proj": Bomb(tmp_path / "boom")}, file)
    (tmp_path / "weights.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    names = [f"transformers:{tmp_path / 'clip'}"]
    names += [f"open_clip:tiny-vit/{tmp_path / file}" for file in ("weights.pt", "weights.bin")]
    for name in names:
        with pytest.raises(ModelError, match="cannot be loaded"):
            ah.load(name)
    assert not (tmp_path / "boom").exists()


def test_code_in_a_model_s_folder_is_not_run(saved: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(saved / "clip", tmp_path / "clip")
    (tmp_path / "clip" / "evil.py").write_text(f"open({str(tmp_path / 'boom')!r}, 'w')\nclass M: pass\n")
    config = json.loads((tmp_path / "clip" / "config.json").read_text())
    maps = {"AutoConfig": "evil.M", "AutoModel": "evil.M"}
    (tmp_path / "clip" / "config.json").write_text(json.dumps({**config, "auto_map": maps}))
    model = ah.load(f"transformers:{tmp_path / 'clip'}")
    assert isinstance(model, Encoder)
    (tmp_path / "clip" / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": maps}))
    with pytest.raises(ModelError):
        ah.load(f"transformers:{tmp_path / 'clip'}")
    assert not (tmp_path / "boom").exists()


def test_a_damaged_model_is_one_line(saved: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(saved / "dinov2", tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors.pop("layernorm.weight")
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights of its image tower, such as layernorm\.weight"):
        ah.load(f"transformers:{tmp_path / 'a'}")
    shutil.copytree(saved / "dinov2", tmp_path / "b")
    (tmp_path / "b" / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="does not say how its images are prepared"):
        ah.load(f"transformers:{tmp_path / 'b'}")


def test_names_alone_load_no_library() -> None:
    code = "import sys, anchorhold.model.load; assert not {'transformers', 'open_clip', 'peft'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
