"""What of a model trains: everything, its last layers, or adapters beside its layers (LoRA) and the last layers.

An adapter adds α/r · B A to the weight of a layer, with A (r, inputs) and B (outputs, r) (Hu et al. 2021). The library
`peft` makes them. A model keeps them only while it trains: they are merged into its weights when it is saved, and at
the end. So nothing that is saved needs `peft`.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ModelError, SettingsError, nearest
from ..random import Key
from .embedder import Embedder
from .settings import ModelSettings
from .trainable import Trainable

__all__ = ["Tuning"]

# Their forward reads the weights of the layers inside, and would not see an adapter.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Tuning:
    """The part of a model that trains, from `begin` until `end`; with `train = all` nothing is changed."""

    def __init__(self, model: Embedder | Trainable, settings: ModelSettings) -> None:
        self.model, self.settings = model, settings
        self._flags = [(p, p.requires_grad) for p in model.parameters()]
        self._uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self._adapters: list[tuple[nn.Module, str, Any]] = []  # parent, name of the child, the layer with an adapter

    def begin(self, images: Tensor, seed: int) -> str:
        """Freeze all but the part that trains, and return what that is, in words; "" where everything trains.

        Args:
            images: a small batch (B, C, H, W); the model is called on it to find the order of its layers.
            seed: of the adapters' first weights.
        """
        settings, model = self.settings, self.model
        if settings.train == "all":
            return ""
        called = _called(model, images)
        head = self._head(called)
        model.requires_grad_(False)
        targets = self._targets(called, head) if settings.train == "lora" else []
        if targets:
            self._inject(targets, seed)
        for name, parameter in model.named_parameters(remove_duplicate=False):  # a tied weight has several names
            if name in head or (targets and ".lora_" in name):
                parameter.requires_grad_(True)
        inside = {name.rpartition(".")[0] for name in head}
        model.still = tuple(
            module for name, module in model.named_modules() if isinstance(module, _BatchNorm) and name not in inside
        )
        model.train(model.training)
        return self._described(head, len(targets))

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The model without adapters for the block: its weights include what they add."""
        kept = self._merge()
        try:
            yield
        finally:
            for (parent, name, layer), weight in zip(self._adapters, kept):
                layer.base_layer.weight.data = weight
                setattr(parent, name, layer)

    def end(self) -> None:
        """Merge the adapters for good, and let every parameter require a gradient as it did before."""
        self._merge()
        self._adapters.clear()
        for parameter, before in self._flags:
            parameter.requires_grad_(before)
        self.model.still = ()

    def _merge(self) -> list[Tensor]:
        """Put the layers with merged weights in place of the adapters, and return the weights without them."""
        kept = []
        with torch.no_grad():
            for parent, name, layer in self._adapters:
                base = layer.base_layer
                kept.append(base.weight.data)
                base.weight.data = base.weight.data + layer.get_delta_weight("default").to(base.weight)
                setattr(parent, name, base)
        return kept

    # ------------------------------------------------------------------------------------------------ the head

    def _head(self, called: list[str]) -> set[str]:
        """The names of the parameters of the last layers."""
        model = self.model
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        wanted = self.settings.head or getattr(_inner(model), "head_name", "")
        if wanted:
            return set().union(*(self._under(each.strip(), names) for each in wanted.split(",")))
        if isinstance(model, Embedder):
            own = {name for name in names if name.startswith("head.")}
            if not own and self.settings.train == "head":
                raise SettingsError(
                    "model.dim = 0 leaves no head to train: set model.dim, or name layers in model.head"
                )
            return own
        # From the last layer with a matrix on: a norm after it belongs to the head too.
        layers = {name: dict(model.get_submodule(name).named_parameters()) for name in called}
        wide = [place for place, own in enumerate(layers.values()) if any(p.ndim > 1 for p in own.values())]
        if not wide:
            raise ModelError("the module calls no layer with a weight matrix: name its last layers in model.head")
        return {f"{name}.{each}" for name, own in list(layers.items())[wide[-1] :] for each in own}

    def _under(self, prefix: str, names: list[str]) -> set[str]:
        """The parameters at or below a name, as the user writes it."""
        whole = _prefix(self.model) + prefix
        found = {name for name in names if name == whole or name.startswith(f"{whole}.")}
        if not found:
            short = {name.removeprefix(_prefix(self.model)).rpartition(".")[0] for name in names} - {""}
            raise SettingsError(f"model.head: the model has no parameters under {prefix!r}; {_few(prefix, short)}")
        return found

    # ------------------------------------------------------------------------------------------------ adapters

    def _targets(self, called: list[str], head: set[str]) -> list[str]:
        """The layers that get adapters: by default every linear and convolutional one outside the head."""
        layers = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and f"{name}.weight" not in head
        }
        refused = {name: why for name, module in layers.items() if (why := self._unfit(name, module, called))}
        able = [name for name in layers if name not in refused]
        wanted = [each.strip() for each in self.settings.lora_targets.split(",") if each.strip()]
        for each in wanted:
            fits = [name for name in layers if _ends(name, each)]
            if not fits:
                short = {name.rpartition(".")[2] for name in able}
                raise SettingsError(f"model.lora_targets: no layer {each!r} outside the head; {_few(each, short)}")
            if bad := next((name for name in fits if name in refused), ""):
                raise SettingsError(f"model.lora_targets: {bad} {refused[bad]}; leave it out")
        if not able:
            raise ModelError("the model has no linear or convolutional layer for an adapter: set model.train = head")
        return [name for name in able if not wanted or any(_ends(name, each) for each in wanted)]

    def _unfit(self, name: str, module: nn.Linear | nn.Conv2d, called: list[str]) -> str:
        """Why a layer cannot have an adapter that is merged later; "" if it can."""
        above = [self.model.get_submodule(each) for each in _above(name)]
        if name not in called or any(isinstance(each, _OPAQUE) for each in above):
            return "is not called as a layer, so an adapter would have no effect"
        if type(module) not in (nn.Linear, nn.Conv2d):
            return f"is a {type(module).__name__}, which does not use its weight as it is"
        if self._uses[id(module.weight)] > 1:
            return "shares its weight with another layer"
        if isinstance(module, nn.Conv2d) and (module.groups > 1 or set(module.dilation) != {1}):
            return "is a convolution with groups or dilation"
        if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
            return f"pads with {module.padding_mode}"
        return ""

    def _inject(self, targets: list[str], seed: int) -> None:
        """Let peft put an adapter beside each of these layers."""
        peft = _peft()
        settings, model = self.settings, self.model
        config = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules="|".join(re.escape(name) for name in targets),
            bias="none",
        )
        device = next(model.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(Key.of(seed)("lora").value % 2**63)
            peft.inject_adapter_in_model(config, model)
        if hasattr(model, "peft_config"):
            del model.peft_config  # peft's note to itself; the model is plain again after training
        for name in targets:
            above, _, own = name.rpartition(".")
            parent = model.get_submodule(above)
            self._adapters.append((parent, own, getattr(parent, own)))

    def _described(self, head: set[str], adapters: int) -> str:
        """What trains: how many parameters, and which."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in self.model.parameters())
        layers = sorted({name.removeprefix(_prefix(self.model)).rpartition(".")[0] or name for name in head})
        what = []
        if adapters:
            what.append(f"adapters of rank {self.settings.lora_rank} on {adapters} layer{'s' * (adapters > 1)}")
        if layers:
            more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
            what.append(f"in full {', '.join(layers[:4])}{more}")
        return f"{trained:,} of {whole:,} parameters train: {'; '.join(what)}"


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise SettingsError("model.train = lora needs peft: run pip install 'anchorhold[lora]'") from None
    return peft


def _inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, Trainable) else model


def _prefix(model: nn.Module) -> str:
    """What stands before the names of a module of the user's."""
    return "module." if isinstance(model, Trainable) else ""


def _called(model: nn.Module, images: Tensor) -> list[str]:
    """The names of the layers that a call runs, in the order of their last call. Buffers and modes stay the same."""
    order: dict[str, None] = {}

    def note(name: str) -> Any:
        def hook(*_: Any) -> None:
            order.pop(name, None)
            order[name] = None

        return hook

    modes = [(module, module.training) for module in model.modules()]
    leaves = [(name, each) for name, each in model.named_modules() if name and not any(True for _ in each.children())]
    hooks = [each.register_forward_hook(note(name)) for name, each in leaves]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    try:
        functional_call(model.eval(), buffers, (images,))
    finally:
        for each in hooks:
            each.remove()
        for module, mode in modes:
            module.training = mode
    return list(order)


def _above(name: str) -> Iterator[str]:
    """The names of all modules that hold this one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _few(word: str, words: Collection[str]) -> str:
    """The nearest name, or the first few."""
    some = sorted(words)
    return nearest(word, some, f"it has {', '.join(some[:6])}{', …' if len(some) > 6 else ''}")
