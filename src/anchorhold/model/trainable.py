"""A module of yours as one that can be trained: wrapped, saved with what is around it, and loaded again.

A file holds weights and a record, never code. So you give the module again when you load it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from ..data.trained import TrainedOn
from ..errors import ModelError, RunError
from ..runs.fields import field, parsed
from ..runs.folder import EXPORT
from ..runs.sealed import save_sealed
from ..runs.writing import atomic
from .embedder import Embedder, freeze_statistics
from .preprocessing import Preprocessing
from .sharing import OnHub
from .weights import METADATA, LoadReport, check_model, check_numbers
from .wrap import Victim, wrap

__all__ = ["Trainable", "check_modes", "load_trainable", "rebuilt", "trainable"]

_ADVICE = "give the module that was trained"


class Trainable(OnHub, Victim):
    """Your module behind `wrap`, with what a training keeps of it. Parameters stay the module's own.

    With `freeze_batchnorm`, BatchNorm keeps its running statistics while its weight and bias train, as in the papers.
    """

    def __init__(self, victim: Victim, freeze_batchnorm: bool = True) -> None:
        mean, std = (None if each is None else each.flatten().tolist() for each in (victim.mean, victim.std))
        super().__init__(victim.module, mean, std, victim.size, victim.output, victim.unit)
        self.config: dict[str, Any] = {
            "module": f"{type(victim.module).__module__}.{type(victim.module).__qualname__}",
            "mean": mean,
            "std": std,
            "size": None if victim.size is None else list(victim.size),
            "output": victim.output,
            "freeze_batchnorm": freeze_batchnorm,
        }
        if isinstance(preset := getattr(victim.module, "preset", None), str):
            self.config["preset"] = preset
        self.trained_on: TrainedOn | None = None
        self.weights_report: LoadReport | None = None
        self.still: tuple[nn.Module, ...] = ()  # BatchNorm outside of the part that trains, set by `tuning`
        # On the device of the module, as `wrap` has it.
        self.to(next((p.device for p in self.parameters()), torch.device("cpu")))

    @property
    def preprocess(self) -> Preprocessing:
        """How files become images: as in training, once it is trained."""
        record = self.config.get("preprocessing")
        if record is None:
            return super().preprocess
        side = record["crop"] or record["resize"] or 224
        return Preprocessing.recorded(record, self.size or (side, side), self.config["mean"], self.config["std"])

    def train(self, mode: bool = True) -> "Trainable":
        """Like any module's, but for frozen BatchNorm."""
        super().train(mode)
        if self.config["freeze_batchnorm"]:
            freeze_statistics(self)
        for module in self.still:
            module.eval()
        return self

    def save(self, path: str | Path) -> Path:
        """Write weights and record as one safetensors file; into a folder, as model.safetensors."""
        path = Path(path)
        path = path / EXPORT if path.is_dir() else path
        seen = self.trained_on.record() if self.trained_on else None
        # Copies: safetensors refuses tensors that share memory, as tied weights do.
        tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in self.state_dict().items()}
        with atomic(path) as temporary:
            save_sealed(tensors, temporary, METADATA, {"config": self.config, "weights": None, "trained_on": seen})
        return path


def trainable(model: nn.Module, freeze_batchnorm: bool = True, part: str = "all") -> Embedder | Trainable:
    """The model as `fit` trains it; one of ours stays as it is. A `part` that trains is unfrozen by `tuning`.

    >>> trainable(nn.Sequential(nn.Flatten(), nn.Linear(12, 4))).config["module"]
    'torch.nn.modules.container.Sequential'
    """
    if isinstance(model, Embedder | Trainable):
        return model
    made = Trainable(_plain(model), freeze_batchnorm)
    if not made.unit:
        raise ModelError("training compares unit vectors: use ah.wrap(…, unit=True)")
    if {p.dtype for p in made.parameters()} & {torch.float16, torch.bfloat16}:
        raise ModelError("the weights are in half precision, too coarse to train: call .float() on the module")
    if not any(p.requires_grad or part != "all" for p in made.parameters()):
        raise ModelError("no parameter of the module requires a gradient: there is nothing to train")
    return made


def _plain(model: nn.Module) -> Victim:
    """The module with one wrap around it, checked for what cannot be saved."""
    if any(is_lazy(each) for each in (*model.parameters(), *model.buffers())):
        raise ModelError("the module has parameters without a shape yet: call it once on a batch of images first")
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise ModelError(f"{odd[0]} of the module's state is no tensor, and cannot be saved: register tensors only")
    if isinstance(model, Victim) and not model.gradients:
        raise ModelError("a model without gradients cannot be trained: give an nn.Module that has gradients")
    if isinstance(model, Victim) and model.before is not None:
        raise ModelError("training has no step before the module: leave before and backward out, and audit with them")
    if isinstance(model, Victim) and isinstance(model.module, Victim):
        raise ModelError("the module is wrapped twice: wrap your own module, with all it needs")
    return model if isinstance(model, Victim) else wrap(model)


def check_modes(model: Trainable, images: Tensor) -> None:
    """Refuse a module that gives other vectors in training than in use: it would learn what is never searched by.

    Both modes are called on `images` (B, C, H, W), with copies of the buffers, so that BatchNorm counts nothing.
    """
    shapes = []
    before = model.training
    for mode in (True, False):
        model.train(mode)
        buffers = {name: value.clone() for name, value in model.named_buffers()}
        with torch.no_grad():
            shapes.append(tuple(functional_call(model, buffers, (images,)).shape))
    model.train(before)
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"the module gives vectors {shapes[0]} in training and {shapes[1]} in use: choose one output for both "
            "with ah.wrap(…, output=…)"
        )


def load_trainable(path: str | Path, module: nn.Module, device: str | torch.device = "cpu") -> Trainable:
    """A module that `fit` trained, from the run folder or file with its weights; they are copied into `module`."""
    path = Path(path)
    path = path / EXPORT if path.is_dir() else path
    if not path.is_file():
        raise ModelError(f"there is no model at {path}: give a .safetensors file or a finished run folder")
    check_model(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            known = parsed((file.metadata() or {})[METADATA])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        config = field(known, "config", dict, path, "save it again")
        if "module" not in config:
            raise ModelError(f"{path} holds a model of Anchorhold's own: load it without a module")
        model = rebuilt(module, config)
        model.trained_on = TrainedOn.read(known.get("trained_on"))
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError, RunError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path} holds no module that Anchorhold trained ({reason})") from None
    own = model.state_dict()
    apart = sorted(set(own) ^ set(tensors)) or [name for name in own if own[name].shape != tensors[name].shape]
    if apart:
        raise ModelError(
            f"{path} holds the weights of {config['module']}, and they do not fit this module "
            f"({apart[0]} and {len(apart) - 1} others): {_ADVICE}"
        )
    check_numbers(tensors, str(path), own)
    model.load_state_dict(tensors)
    return model.to(device).eval()


def rebuilt(module: nn.Module, config: Mapping[str, Any]) -> Trainable:
    """Your module with what a record says is around it, whatever is around it now."""
    inner = module
    while isinstance(inner, Victim):
        inner = inner.module
    mean, std, size, output = (config.get(name) for name in ("mean", "std", "size", "output"))
    made = Trainable(_plain(wrap(inner, mean=mean, std=std, size=size, output=output)))
    made.config |= {name: config[name] for name in ("freeze_batchnorm", "preprocessing") if name in config}
    return made
