"""export(): an embedder as ONNX, normalisation inside, checked against torch before it is written."""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import __version__
from ..errors import AnchorholdError, ModelError
from ..model.victim import Victim, as_victim, reason_of
from ..random import Key
from ..record import atomic, commit
from ..settings import check
from .folder import Named, described, need, squares

__all__ = ["export"]

TOLERANCE = 1e-4  # of each coordinate of a unit vector, between onnxruntime and torch
_MOST = 1536 * 2**20  # bytes of weights; beyond, torch would put them into a second file
_BATCHES = (2, 1, 5)  # sizes it is tried with; the first is the one it is traced with


def export(model: nn.Module | str | Path | Named, out: str | Path) -> Path:
    """Write a model as one ONNX file: `images` (batch, C, H, W) in [0, 1] in, unit `vectors` (batch, D) out.

    The batch is free, height and width are the model's own. onnxruntime has to give what torch gives within 1e-4, or
    nothing is written. The file's metadata say what the model is and what its input has to be.
    """
    out = Path(out).expanduser()
    check(out.suffix == ".onnx", f"{out.name}: an ONNX file is called NAME.onnx")
    *_, onnxruntime = need("onnx", "onnx", "onnxscript", "onnxruntime")
    given = Named(str(model)) if isinstance(model, str | Path) else model
    loaded = as_victim(given.load() if isinstance(given, Named) else given)
    weights = described(loaded)
    # A copy: the given one keeps its device, its precision and its mode.
    own = copy.deepcopy(loaded).float().cpu().eval()
    held = sum(4 * tensor.numel() for tensor in own.state_dict().values())
    check(held < _MOST, f"{held / 2**30:.1f} GiB of weights are too much for one ONNX file; export a smaller model")
    batches = [_images(own, count) for count in _BATCHES]
    program = _traced(own, batches[0])
    (wide, inner), (height, width) = squares(own, None, None), batches[0].shape[2:]
    about = {
        "anchorhold": __version__,
        "commit": commit() or "",
        "model": json.dumps(weights),
        "input": "images: RGB, float32, (batch, channels, height, width)",
        "input_range": "[0, 1]",
        "output": f"vectors: {'unit length, ' * getattr(own, 'unit', True)}float32, (batch, dim)",
        "preparation": f"resize to {wide}×{wide}, cut {inner}×{inner} out of the middle"
        if height == width
        else f"images of {height}×{width} pixels",
    }
    program.model.metadata_props.update(about)
    with atomic(out) as temporary:
        program.save(str(temporary))
        _compare(onnxruntime, own, temporary, batches)
    return out


def _images(model: nn.Module, count: int) -> Tensor:
    """Noise in the shape that the model is for."""
    mean = getattr(model, "mean", None)
    channels = len(mean) if isinstance(mean, Tensor) else 3
    height, width = getattr(model, "size", None) or (224, 224)
    return Key.of(0)("export").uniform(torch.arange(count), (channels, height, width)).float()


class _Plain(nn.Module):
    """A victim without its checks, which would tie the file to the one batch size they saw."""

    def __init__(self, victim: Victim) -> None:
        super().__init__()
        self.victim = victim

    def forward(self, images: Tensor) -> Tensor:
        victim = self.victim
        x = images if victim.mean is None or victim.std is None else (images - victim.mean) / victim.std
        out = victim._pick(victim.module(x)).flatten(1)
        return F.normalize(out, dim=1) if victim.unit else out


def _traced(model: nn.Module, images: Tensor) -> Any:
    try:
        with _quiet(), torch.no_grad():
            model(images)  # what a model says of its own first call is clearer than what a tracer says
            return torch.onnx.export(
                _Plain(model) if isinstance(model, Victim) else model,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["vectors"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except AnchorholdError:
        raise
    except Exception as error:  # a tracer can fail in any way
        kind = type(getattr(model, "module", model)).__name__
        raise ModelError(f"torch cannot write this {kind} as ONNX ({reason_of(error)})") from error


def _compare(onnxruntime: Any, model: nn.Module, path: Path, batches: list[Tensor]) -> None:
    """Refuse a file that does not give what the model gives."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for images in batches:
        with torch.no_grad():
            wanted = model(images)
        try:
            (got,) = session.run(["vectors"], {"images": images.numpy()})
        except Exception as error:  # such as for a model that was traced for one size of batch only
            raise ModelError(f"onnxruntime fails on {len(images)} images ({reason_of(error)})") from error
        off = float((torch.from_numpy(got) - wanted).abs().max())
        if not off <= TOLERANCE:
            raise ModelError(f"onnxruntime differs from torch by {off:g} on {len(images)} images; nothing was written")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks on itself, which are about torch's own code."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
