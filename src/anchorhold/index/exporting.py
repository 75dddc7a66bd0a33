"""export(): write a model as ONNX with its normalisation, checked against torch before the file is written."""

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

from ..errors import AnchorholdError, ModelError, check, lacks_memory
from ..extensions import reason_of
from ..interface import option
from ..model.no_gradients import Function
from ..model.preprocessing import Preprocessing, preprocessing_of
from ..model.wrap import Victim, as_victim
from ..random import Key
from ..runs.provenance import commit
from ..runs.writing import atomic
from ..version import __version__
from .folder import Named, described, need

__all__ = ["export", "preparation_of"]

TOLERANCE = 1e-4  # largest difference of a coordinate between onnxruntime and torch
_MOST = 1536 * 2**20  # bytes of weights; above this, torch would write a second file
_BATCHES = (2, 1, 5)  # batch sizes to check; the first is the one for tracing


def export(model: nn.Module | str | Path | Named, out: str | Path) -> Path:
    """Write a model as one ONNX file, from `images` (batch, C, H, W) in [0, 1] to unit `vectors` (batch, D).

    The batch size is free; height and width are the model's own. If onnxruntime differs from torch by more than 1e-4,
    nothing is written. The file's metadata describe the model and its preprocessing (resize, crop, interpolation).

    Args:
        model: a model, a run folder, a file of weights, or what else `ah.load` takes.
        out: the file to write, which ends in .onnx.

    >>> import tempfile
    >>> from anchorhold import Embedder
    >>> export(Embedder("small", 8, channels=1, size=8), tempfile.mkdtemp() + "/model.onnx").name  # doctest: +SKIP
    'model.onnx'
    """
    out = Path(out).expanduser()
    check(out.suffix == ".onnx", f"{option('out', str(out))}: give a file name that ends in .onnx")
    *_, onnxruntime = need("onnx", "onnx", "onnxscript", "onnxruntime")
    given = Named(str(model)) if isinstance(model, str | Path) else model
    loaded = as_victim(given.load() if isinstance(given, Named) else given)
    weights = described(loaded)
    # A copy, so that the given model keeps its device, precision and mode.
    own = copy.deepcopy(loaded).float().cpu().eval()
    held = sum(4 * tensor.numel() for tensor in own.state_dict().values())
    check(held < _MOST, f"{held / 2**30:.1f} GiB of weights do not fit into one ONNX file; export a smaller model")
    way = preprocessing_of(own)
    batches = [_images(own, way, count) for count in _BATCHES]
    program = _traced(own, batches[0])
    height, width = batches[0].shape[2:]
    about = {
        "anchorhold": __version__,
        "commit": commit() or "",
        "model": json.dumps(weights),
        "input": "images: RGB, float32, (batch, channels, height, width)",
        "input_range": "[0, 1]",
        "output": f"vectors: {'unit length, ' * getattr(own, 'unit', True)}float32, (batch, dim)",
        "preparation": str(way) if height == width else f"images of {height}×{width} pixels",
        "preprocessing": json.dumps(way.described() | {"assumed": way.assumed}),
    }
    program.model.metadata_props.update(about)
    program.model.doc_string = f"{about['input']}, in {about['input_range']}: {about['preparation']}"
    with atomic(out) as temporary:
        program.save(str(temporary))
        _compare(onnxruntime, own, temporary, batches)
    return out


def preparation_of(path: str | Path) -> str:
    """The preprocessing that an exported file describes, as text."""
    (onnx,) = need("onnx", "onnx")
    return next(str(entry.value) for entry in onnx.load(path).metadata_props if entry.key == "preparation")


def _images(model: nn.Module, way: Preprocessing, count: int) -> Tensor:
    """Noise in the model's input shape; without a record that is its size, which need not be square."""
    mean = getattr(model, "mean", None)
    channels = len(mean) if isinstance(mean, Tensor) else 3
    size = getattr(model, "size", None) if way.assumed else None
    height, width = way.shape or size or (way.side, way.side)
    return Key.of(0)("export").uniform(torch.arange(count), (channels, height, width)).float()


class _Plain(nn.Module):
    """A wrapped model without its checks, which would fix the batch size in the file."""

    def __init__(self, victim: Victim) -> None:
        super().__init__()
        self.victim = victim

    def forward(self, images: Tensor) -> Tensor:
        victim = self.victim
        x = images if victim.mean is None or victim.std is None else (images - victim.mean) / victim.std
        out = victim._pick(victim.module(x)).flatten(1)
        return F.normalize(out, dim=1) if victim.unit else out


def _traced(model: nn.Module, images: Tensor) -> Any:
    if isinstance(model, Victim) and (model.before is not None or isinstance(model.module, Function)):
        raise ModelError("only a module without a step before it can be exported: export the nn.Module itself")
    try:
        with _quiet(), torch.no_grad():
            model(images)  # the model's own errors are clearer than the tracer's
            return torch.onnx.export(
                _Plain(model) if isinstance(model, Victim) else model,
                (images,),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["vectors"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except Exception as error:  # the tracer may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        kind = type(getattr(model, "module", model)).__name__
        raise ModelError(f"torch cannot export this {kind} to ONNX ({reason_of(error)})") from error


def _compare(onnxruntime: Any, model: nn.Module, path: Path, batches: list[Tensor]) -> None:
    """Refuse a file whose vectors differ from the model's."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for images in batches:
        with torch.no_grad():
            wanted = model(images)
        try:
            (got,) = session.run(["vectors"], {"images": images.numpy()})
        except Exception as error:  # e.g. if tracing fixed the batch size
            raise ModelError(f"onnxruntime fails on a batch of {len(images)} ({reason_of(error)})") from error
        off = float((torch.from_numpy(got) - wanted).abs().max())
        if not off <= TOLERANCE:
            raise ModelError(
                f"onnxruntime differs from torch by {off:g} on a batch of {len(images)}; nothing was written"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about torch's own code."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
