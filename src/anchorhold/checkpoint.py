"""Where a run stands: what a checkpoint holds, and how it is written and read back."""

from collections.abc import Iterator, Mapping
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


def save(
    run: Run,
    parts: Mapping[str, nn.Module],
    optimiser: torch.optim.Adam,
    tensors: Mapping[str, Mapping[str, Tensor]],
    at: Progress,
) -> None:
    """Write modules, optimiser, loose tensors and progress as one file, each under its name; never one with a NaN.

    `parts` are modules by name (model, and a defence's companion), `tensors` dicts by name (state, ema).
    """
    whole = {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}
    for name, parameter in _parameters(parts):
        for piece, value in optimiser.state.get(parameter, {}).items():
            whole[f"optimiser.{name}.{piece}"] = value
    whole |= {f"{part}.{name}": value for part, values in tensors.items() for name, value in values.items()}
    if not all(bool(torch.isfinite(v).all()) for v in whole.values() if v.is_floating_point()):
        raise RunError(f"a weight became NaN or infinite by step {at.step}; the checkpoint before it is kept")
    run.save(whole, vars(at))


def restore(
    run: Run,
    parts: Mapping[str, nn.Module],
    optimiser: torch.optim.Adam,
    tensors: Mapping[str, dict[str, Tensor]],
) -> Progress | None:
    """Put the last checkpoint back into what `save` was given; None where there is none yet."""
    loaded = run.load()
    if loaded is None:
        return None
    whole, at = loaded
    device = next(parts["model"].parameters()).device

    def under(part: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{part}."): v for name, v in whole.items() if name.startswith(f"{part}.")}

    for part, module in parts.items():
        module.load_state_dict(under(part))
    for name, parameter in _parameters(parts):
        moments = {p: whole.get(f"optimiser.{name}.{p}") for p in ("step", "exp_avg", "exp_avg_sq")}
        count = moments.pop("step")
        if count is not None:
            # Moments take the memory layout of their weight: the fused optimiser reads both in memory order.
            laid = {p: torch.empty_like(parameter).copy_(v) for p, v in moments.items() if v is not None}
            optimiser.state[parameter] = {
                "step": count.to(parameter.device) if optimiser.defaults["fused"] else count,
                **laid,
            }
    for part, values in tensors.items():
        values |= {name: v.to(device) for name, v in under(part).items()}
    return Progress(**at)


def _parameters(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """All that is trained; the model's by their own names, others with their part's before it."""
    for part, module in parts.items():
        yield from module.named_parameters(prefix="" if part == "model" else part)


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
