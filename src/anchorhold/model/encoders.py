"""Encoders that people deploy, by name: the image towers of open_clip and transformers, and timm's nets.

    open_clip:NAME/TAG         as in open_clip.list_pretrained(); TAG may be a file, or none for random weights
    transformers:OWNER/NAME    CLIP, SigLIP or DINOv2 from the Hub; or a folder that save_pretrained wrote
    timm:NAME                  with its pretrained weights: pooled features without a head

Each brings its mean, std, size, interpolation and crop. Weights are read as tensors, and no code from the Hub is run.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import AnchorholdError, ModelError, lacks_memory, nearest
from ..extensions import Origin
from .embedder import Embedder
from .hub import impatient
from .preprocessing import Preprocessing, record_of
from .wrap import Victim

__all__ = ["Encoder", "Tower", "encoder_named", "is_encoder", "preset_of"]

_LIBRARIES = ("open_clip", "transformers")
# The class of a model's image tower, its vector in the output, and the layers that make the vector last.
_TOWERS = {
    "clip": ("CLIPVisionModelWithProjection", "image_embeds", "net.visual_projection"),
    "clip_vision_model": ("CLIPVisionModelWithProjection", "image_embeds", "net.visual_projection"),
    "siglip": ("SiglipVisionModel", "pooler_output", ""),
    "siglip_vision_model": ("SiglipVisionModel", "pooler_output", ""),
    "dinov2": ("Dinov2Model", "pooler_output", ""),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "pooler_output", ""),
}
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


class Tower(nn.Module):
    """The image part of an encoder, from normalised images to vectors; `preset` is the name it has in commands."""

    def __init__(self, net: nn.Module, preset: str, output: str = "", head: str = "") -> None:
        super().__init__()
        self.net, self.preset, self.output, self.head_name = net, preset, output, head

    def forward(self, images: Tensor) -> Tensor:
        """Vectors (B, D), not yet of unit length."""
        if self.output:
            out: Any = getattr(self.net(pixel_values=images), self.output)
        else:
            out = self.net(images)
            out = out[0] if isinstance(out, tuple) else out  # pooled, tokens
        vectors: Tensor = out
        return vectors


class Encoder(Victim):
    """A tower with its own mean, std and size around it, which knows how files become its images."""

    def __init__(self, tower: Tower, mean: Sequence[float], std: Sequence[float], way: Mapping[str, Any]) -> None:
        self.record = record_of(way)
        side = self.record["crop"] or self.record["resize"]
        super().__init__(tower, mean, std, side)
        self._statistics = list(mean), list(std)

    @property
    def preprocess(self) -> Preprocessing:
        """The encoder's own preprocessing of files."""
        side = self.record["crop"] or self.record["resize"]
        way = Preprocessing.recorded(self.record, (side, side), *self._statistics)
        return Preprocessing(
            way.resize, way.crop, way.interpolation, way.mean, way.std, proportions=way.proportions
        )  # images in memory stay as they are


def is_encoder(name: str) -> bool:
    """Whether a name is one of open_clip's or transformers'.

    >>> is_encoder("open_clip:ViT-B-32/openai"), is_encoder("mine:net")
    (True, False)
    """
    return name.partition(":")[0] in _LIBRARIES


def preset_of(model: nn.Module) -> str:
    """The name of the encoder that a model is, or was before it was trained; "" for all others."""
    inner = model.module if isinstance(model, Victim) else model
    return str(getattr(inner, "preset", "")) if isinstance(inner, Embedder | Tower) else ""


def encoder_named(name: str, origin: Origin) -> Encoder:
    """The encoder of a name; one that only a record names is neither downloaded nor read."""
    origin.check(name, loads=True)
    library, _, place = name.partition(":")
    try:
        with _quiet(), impatient():
            return (_open_clip if library == "open_clip" else _transformers)(place, name)
    except Exception as error:  # the libraries, the Hub and the network may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ModelError(f"{name} cannot be loaded ({lines[0][:160]}); check the name and the network") from None


# open_clip ---------------------------------------------------------------------------------------------------


def _open_clip(place: str, name: str) -> Encoder:
    try:
        import open_clip
    except ImportError:
        raise ModelError(f"{name} needs open_clip: run pip install 'anchorhold[encoders]'") from None
    model, _, tag = place.partition("/")
    if model not in open_clip.list_models():
        raise ModelError(f"open_clip has no model {model!r}; {nearest(model, open_clip.list_models(), _NAMES)}")
    tags = open_clip.list_pretrained_tags_by_model(model)
    known = ", ".join(tags[:6]) + (", …" if len(tags) > 6 else "")
    if not tag:
        one = f"name its weights, as in open_clip:{model}/{tags[0]} ({known})" if tags else "name a file of its weights"
        raise ModelError(f"open_clip:{model} alone has random weights; {one}, or open_clip:{model}/none if you mean it")
    if tag not in (*tags, "none") and not Path(tag).expanduser().is_file():
        raise ModelError(f"{model} has no weights {tag!r}, and there is no such file; {nearest(tag, [*tags, 'none'])}")
    if tag not in (*tags, "none") and Path(tag).suffix in (".npz", ".npy"):
        raise ModelError(f"{tag} is no file of tensors: give .safetensors or .pt")
    weights = tag if tag in tags else str(Path(tag).expanduser())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # what is not loaded is the same every time
        whole: Any = open_clip.create_model(
            model, None if tag == "none" else weights, precision="fp32", weights_only=True, pretrained_image=False
        )
    about = whole.visual.preprocess_cfg
    if about["resize_mode"] == "longest":
        raise ModelError(f"{name} pads its images to a square, which is not possible here; choose another model")
    side = _side(about["size"], name)
    way = {"resize": side, "crop": side, "interpolation": about["interpolation"]}
    way |= {"proportions": True} if about["resize_mode"] == "shortest" else {}
    visual = whole.visual
    last = next((each for each in ("proj", "attnpool", "head") if getattr(visual, each, None) is not None), "")
    made = Encoder(Tower(visual.float(), name, head=f"net.{last}" if last else ""), about["mean"], about["std"], way)
    if tag == "none":
        made._note("the weights are random")
    return made


_NAMES = "open_clip.list_models() lists them"


# transformers ------------------------------------------------------------------------------------------------


def _transformers(place: str, name: str) -> Encoder:
    try:
        import transformers
    except ImportError:
        raise ModelError(f"{name} needs transformers: run pip install 'anchorhold[encoders]'") from None
    folder = Path(place).expanduser()
    if not place or (not folder.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", place)):
        raise ModelError(f"{name}: there is no folder {place!r}; give OWNER/NAME on the Hub, or a folder")
    source = str(folder) if folder.is_dir() else place
    config: Any = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    kind = str(config.model_type)
    if kind not in _TOWERS:
        raise ModelError(f"{name} is a {kind[:40]}; CLIP, SigLIP and DINOv2 are known, wrap others with ah.wrap")
    tower, output, head = _TOWERS[kind]
    if kind == "clip_vision_model" and "WithProjection" not in str(config.architectures):
        tower, output, head = "CLIPVisionModel", "pooler_output", ""
    own = getattr(config, "vision_config", config)
    if kind == "clip":
        own.projection_dim = config.projection_dim
    net, info = getattr(transformers, tower).from_pretrained(
        source, config=own, dtype=torch.float32, weights_only=True, output_loading_info=True, trust_remote_code=False
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"{name} lacks {len(missing)} of the weights of its image tower, such as {missing[0]}")
    return Encoder(Tower(net, name, output, head), *_prepared(transformers, source, name))


def _prepared(transformers: Any, source: str, name: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Mean, std and preprocessing from the model's preprocessor_config.json."""
    try:
        found: Any = transformers.AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        raise ModelError(f"{name} does not say how its images are prepared ({reason})") from None
    size, crop = _sides(found.size), _sides(found.crop_size) if found.do_center_crop else {}
    proportions = "shortest_edge" in size
    resize = size["shortest_edge"] if proportions else _side((size.get("height"), size.get("width")), name)
    inner = _side((crop.get("height"), crop.get("width")), name) if crop else 0
    if not found.do_resize or (proportions and not inner) or inner > resize:
        raise ModelError(f"{name} prepares images in a way that is not known here; wrap the model with ah.wrap")
    if found.do_rescale and abs(found.rescale_factor - 1 / 255) > 1e-6:
        raise ModelError(f"{name} does not take images in [0, 1]; wrap the model with ah.wrap")
    way = {"resize": resize, "crop": inner, "interpolation": _RESAMPLING.get(int(found.resample), "bicubic")}
    mean, std = (found.image_mean, found.image_std) if found.do_normalize else ([0.0] * 3, [1.0] * 3)
    return list(mean), list(std), way | ({"proportions": True} if proportions else {})


def _sides(size: Any) -> dict[str, int]:
    """The sides that a size of transformers gives, by name."""
    names = ("height", "width", "shortest_edge", "longest_edge")
    known = size if isinstance(size, Mapping) else vars(size)
    return {each: int(known[each]) for each in names if known.get(each)}


def _side(size: Any, name: str) -> int:
    """The side of a square size."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or sides[0] != sides[1] or not sides[0]:
        raise ModelError(f"{name} takes images of {sides}, which are not square; wrap the model with ah.wrap")
    return int(sides[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the libraries print while they load: bars, reports, retries."""
    import importlib.util

    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    bars = None
    if importlib.util.find_spec("transformers"):
        from transformers.utils import logging as theirs

        bars = theirs.is_progress_bar_enabled()
        theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars:
            theirs.enable_progress_bar()
