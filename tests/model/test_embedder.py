"""Embedder: the unit sphere, normalisation inside, BatchNorm, initialisation, save and load."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from anchorhold.errors import AnchorholdError, ModelError, RunError, SettingsError
from anchorhold.model.backbones import backbone
from anchorhold.model.embedder import Embedder, load_embedder, save
from anchorhold.runs.folder import Run

SMALL = {"backbone": "small", "dim": 16, "channels": 1}
TIMM = "test_resnet"  # timm's own for tests: a ResNet with BatchNorm of half a million parameters


def _norm_layers(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def _one_step(model: Embedder) -> None:
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.rand(4, 3, 32, 32)) * torch.randn(4, model.dim)).sum().backward()
    optimiser.step()


@pytest.mark.parametrize(
    ("name", "side", "features"),
    [("small", 8, 128), ("small", 28, 128), ("small", 9, 128), ("c2f2", 28, 1024), ("mlp", 12, 128)],
)
def test_own_backbones_give_pooled_features(name: str, side: int, features: int) -> None:
    net, count = backbone(name, channels=1, size=(side, side))
    assert count == features
    assert net(torch.rand(3, 1, side, side)).shape == (3, features)
    assert not _norm_layers(net)


def test_small_pools_like_adaptive_pooling() -> None:
    net, _ = backbone("small", channels=1)
    maps = torch.rand(2, 5, 7, 4)
    torch.testing.assert_close(net[6](maps), _quadrant_reference(maps))


def _quadrant_reference(maps: torch.Tensor) -> torch.Tensor:
    pooled = nn.AdaptiveAvgPool2d(2)(maps)  # (B, C, 2, 2); ours is cell by cell
    return torch.cat([pooled[..., r, c] for r in range(2) for c in range(2)], dim=1)


def test_c2f2_is_the_papers_net() -> None:
    model = Embedder("c2f2", 512, channels=1)
    shapes = [tuple(p.shape) for p in model.parameters() if p.ndim > 1]
    assert shapes == [(32, 1, 5, 5), (64, 32, 5, 5), (1024, 3136), (512, 1024)]


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "resnet18"])
def test_timm_feature_count_is_what_comes_out(name: str) -> None:
    net, features = backbone(name)
    assert net.eval()(torch.rand(1, 3, 64, 64)).shape == (1, features)


def test_unknown_backbone_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean resnet18"):
        Embedder("resnet81")


def test_a_net_for_fixed_images_says_so() -> None:
    with pytest.raises(ModelError, match="built for images of 12×12"):
        Embedder("mlp", 4, channels=1, size=12)(torch.rand(1, 1, 13, 13))


def test_unit_norm_and_dtypes() -> None:
    model = Embedder(**SMALL)
    images = torch.rand(5, 1, 8, 8)
    out = model(images)
    assert out.shape == (5, 16)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.norm(dim=1), torch.ones(5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(images)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.norm(dim=1), torch.ones(5))
    assert not torch.equal(half, out)  # else autocast did nothing and the test proves nothing
    assert model.double()(images.double()).dtype == torch.float64


@pytest.mark.parametrize("dim", [0, None])
def test_without_head_the_features_are_the_embedding(dim: int | None) -> None:
    model = Embedder("small", dim, channels=1)
    images = torch.rand(2, 1, 8, 8)
    assert model.dim == 128
    torch.testing.assert_close(model(images), nn.functional.normalize(model.backbone(images), dim=1))


def test_normalisation_is_inside() -> None:
    model = Embedder("small", 8)
    images = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    by_hand = nn.functional.normalize(model.head(model.backbone((images - mean) / std)), dim=1)
    torch.testing.assert_close(model(images), by_hand)
    grey = Embedder("small", 8, channels=1)
    assert (grey.mean.item(), grey.std.item()) == (0.0, 1.0)
    shifted = Embedder("small", 8, channels=1, mean=[0.5], std=[0.25])
    assert not torch.equal(shifted(images[:, :1]), grey(images[:, :1]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": [0.5, 0.5]},
        {"std": [0.0]},
        {"dim": -1},
        {"dim": "a"},
        {"channels": 0},
        {"channels": 1.5},
        {"size": -3},
        {"size": 2.5},
        {"size": (8, "8")},
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        Embedder(**{**SMALL, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "images",
    [torch.rand(1, 8, 8), torch.rand(1, 3, 8, 8), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)],
)
def test_images_of_the_wrong_kind_are_refused(images: torch.Tensor) -> None:
    with pytest.raises(ModelError, match=r"\(B, 1, H, W\)"):
        Embedder(**SMALL)(images)


def test_frozen_batchnorm_keeps_statistics_and_trains_weights() -> None:
    model = Embedder(TIMM, 8)
    layers = _norm_layers(model)
    assert layers
    assert not any(layer.training for layer in layers)  # from the start, not only after train()
    before = {name: b.clone() for name, b in model.named_buffers()}
    affine = [layer.bias.clone() for layer in layers]
    _one_step(model)
    assert model.training
    assert model.backbone.training
    assert all(torch.equal(before[name], b) for name, b in model.named_buffers())
    # A block's last BatchNorm starts at weight 0, which shields those before it from the first gradient.
    assert sum(not torch.equal(layer.bias, bias) for layer, bias in zip(layers, affine)) >= len(layers) / 3
    assert any(not torch.equal(layer.weight, torch.ones_like(layer.weight)) for layer in layers[:1])


def test_live_batchnorm_when_asked() -> None:
    model = Embedder(TIMM, 8, freeze_batchnorm=False)
    before = [layer.running_mean.clone() for layer in _norm_layers(model)]
    _one_step(model)
    assert all(not torch.equal(b, layer.running_mean) for b, layer in zip(before, _norm_layers(model)))


def test_initialisation_is_keyed_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = Embedder(**SMALL, seed=7).state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(456)
    again = Embedder(**SMALL, seed=7).state_dict()
    other = Embedder(**SMALL, seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Embedder(TIMM, 8, mean=[0.1, 0.2, 0.3], freeze_batchnorm=False, seed=3)
    _one_step(model)
    model.to(dtype).eval()
    images = torch.rand(2, 3, 32, 32, dtype=dtype)
    path = model.save(tmp_path / "new" / "m.safetensors")
    loaded = load_embedder(path).eval()
    assert loaded.config == model.config
    assert torch.equal(loaded(images), model(images))
    assert [p.name for p in path.parent.iterdir()] == ["m.safetensors"]  # no temporary left behind


def test_numpys_whole_numbers_are_numbers(tmp_path: Path) -> None:
    model = Embedder("small", np.int64(4), channels=np.int64(1), size=np.int64(8))  # type: ignore[arg-type]
    assert load_embedder(model.save(tmp_path)).config == Embedder("small", 4, channels=1, size=8).config


def test_a_run_folder_loads(tmp_path: Path) -> None:
    model = Embedder(**SMALL)
    assert save(model, tmp_path) == tmp_path / "model.safetensors"
    assert torch.equal(load_embedder(tmp_path).head.weight, model.head.weight)


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = Embedder(**SMALL).save(tmp_path / "m.safetensors")
    old = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, full)
    with pytest.raises(RunError, match="disk is full"):
        Embedder(**SMALL, seed=1).save(path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_no_model_say_what_they_are(tmp_path: Path) -> None:
    path = Embedder(**SMALL).save(tmp_path / "m.safetensors")
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"not a complete safetensors file|damaged"):
            load_embedder(path)
    safetensors.torch.save_file({"conv1.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match="not saved by Anchorhold"):
        load_embedder(path)
    safetensors.torch.save_file({"mean": torch.zeros(1)}, path, {"anchorhold": "{}"})
    with pytest.raises(ModelError, match="use the version that saved it"):
        load_embedder(path)
    with pytest.raises(AnchorholdError, match="no model at"):
        load_embedder(tmp_path / "none")


def test_a_model_with_a_table_of_positions_comes_back(tmp_path: Path) -> None:
    model = Embedder("small", 8, channels=1)
    model.backbone.register_buffer("positions", torch.arange(5))
    path = model.save(tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="positions"):  # the backbone made from the settings has no such buffer
        load_embedder(path)
    with pytest.MonkeyPatch.context() as patch:
        made = Embedder.__init__

        def with_positions(self: Embedder, *args: object, **kwargs: object) -> None:
            made(self, *args, **kwargs)  # type: ignore[arg-type]
            self.backbone.register_buffer("positions", torch.zeros(5, dtype=torch.int64))

        patch.setattr(Embedder, "__init__", with_positions)
        assert torch.equal(load_embedder(path).backbone.positions, torch.arange(5))


def test_a_model_of_a_run_without_a_record_takes_the_preprocessing_of_its_run(tmp_path: Path) -> None:
    model = Embedder("small", 8, size=32)
    model.save(tmp_path)
    assert load_embedder(tmp_path).preprocess.assumed
    data = {"resize": 40, "crop": 32, "name": "folder"}
    Run.create(tmp_path / "run", {"settings": {"data": data}, "status": "done"})
    model.save(tmp_path / "run")
    found = load_embedder(tmp_path / "run").preprocess
    assert (found.resize, found.crop, found.assumed) == (40, 32, False)


@pytest.mark.parametrize("size", [(96, 64), (100, 100)])
def test_a_vit_is_made_for_the_size_that_is_asked(size: tuple[int, int], tmp_path: Path) -> None:
    model = Embedder("vit_tiny_patch16_224", 8, size=size, seed=1)
    x = torch.rand(2, 3, *size)
    assert model(x).shape == (2, 8)
    assert torch.equal(load_embedder(model.eval().save(tmp_path / "vit.safetensors"))(x), model(x))


@pytest.mark.parametrize(("backbone", "size"), [("vit_tiny_patch16_224", 10), ("maxvit_tiny_tf_224", 96)])
def test_a_size_that_a_backbone_cannot_take_is_one_line(backbone: str, size: int) -> None:
    with pytest.raises(ModelError, match=f"{backbone} cannot take images of {size}×{size}"):
        Embedder(backbone, 8, size=size)
