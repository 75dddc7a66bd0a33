"""Where a run stands: what a checkpoint holds, and how it is written and read back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .errors import RunError
from .record import Run

__all__ = ["Meters", "Progress", "restore", "save"]


@dataclass
class Progress:
    """Where a run stands: what a checkpoint holds besides weights and optimiser."""

    epoch: int = 0
    index: int = 0  # batches of this epoch that are done
    step: int = 0  # optimiser batches since the beginning
    collapsed: int = 0  # checks running that found a collapse
    seconds: float = 0.0
    image_steps: float = 0.0
    meters: dict[str, list[float]] = field(default_factory=dict)  # name: [sum, count] over this epoch


def save(run: Run, model: nn.Module, optimiser: torch.optim.Adam, state: dict[str, Tensor], at: Progress) -> None:
    """Write model, optimiser, defence state and progress as one file; never one with a NaN in it."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for part, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{name}.{part}"] = value
    tensors |= {f"state.{name}": value for name, value in state.items()}
    if not all(bool(torch.isfinite(v).all()) for v in tensors.values() if v.is_floating_point()):
        raise RunError(f"a weight became NaN or infinite by step {at.step}; the checkpoint before it is kept")
    run.save(tensors, vars(at))


def restore(run: Run, model: nn.Module, optimiser: torch.optim.Adam, state: dict[str, Tensor]) -> Progress | None:
    """Put the last checkpoint back into model, optimiser and state; None where there is none yet."""
    loaded = run.load()
    if loaded is None:
        return None
    tensors, at = loaded
    device = next(model.parameters()).device
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    for name, parameter in model.named_parameters():
        parts = {p: tensors.get(f"optimiser.{name}.{p}") for p in ("step", "exp_avg", "exp_avg_sq")}
        count = parts.pop("step")
        if count is not None:
            # Moments take the memory layout of their weight: the fused optimiser reads both in memory order.
            moments = {p: torch.empty_like(parameter).copy_(v) for p, v in parts.items() if v is not None}
            optimiser.state[parameter] = {
                "step": count.to(parameter.device) if optimiser.defaults["fused"] else count,
                **moments,
            }
    state |= {k.removeprefix("state."): v.to(device) for k, v in tensors.items() if k.startswith("state.")}
    return Progress(**at)


class Meters:
    """Means over an epoch, summed on the device so that logging waits for nothing."""

    def __init__(self, sums: Mapping[str, list[float]]) -> None:
        self._sums: dict[str, Tensor | float] = {name: total for name, (total, _) in sums.items()}
        self._counts: dict[str, int] = {name: int(count) for name, (_, count) in sums.items()}

    def add(self, name: str, value: Tensor | float) -> None:
        value = value.detach().double() if isinstance(value, Tensor) else value
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._counts[name] = self._counts.get(name, 0) + 1

    def sums(self) -> dict[str, list[float]]:
        return {name: [float(total), self._counts[name]] for name, total in self._sums.items()}

    def total(self, name: str) -> float:
        return float(self._sums.get(name, 0.0))

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self.sums().items()}

    def note(self) -> str:
        return f"loss {self.means().get('loss', float('nan')):.4f}"

    def reset(self) -> None:
        self._sums.clear()
        self._counts.clear()
