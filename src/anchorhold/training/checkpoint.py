"""What a checkpoint holds, and how it is written and restored."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..runs.fields import field as field_of
from ..runs.fields import number
from ..runs.folder import Run

__all__ = ["Meters", "Progress", "restore", "save"]


@dataclass
class Progress:
    """How far a run has come: what a checkpoint holds besides tensors."""

    epoch: int = 0
    index: int = 0  # finished batches of this epoch
    step: int = 0  # finished batches of the whole run
    collapsed: int = 0  # epochs in a row that showed a collapse
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
    """Write a checkpoint as one file; a NaN is refused.

    Args:
        run: the run folder.
        parts: modules by name: the model, and a companion if there is one.
        optimiser: its moments are saved under the names of their parameters.
        tensors: other tensors by group (state, ema) and name.
        at: how far the run has come.
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
    """Load the last checkpoint into what `save` was given, in place; None if there is none yet."""
    loaded = run.load()
    if loaded is None:
        return None
    whole, at = loaded
    device = next(parts["model"].parameters()).device

    def under(part: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{part}."): v for name, v in whole.items() if name.startswith(f"{part}.")}

    for part, module in parts.items():
        _check_fits(run, part, module.state_dict(), under(part))
        module.load_state_dict(under(part))
    for name, parameter in _parameters(parts):
        moments = {p: whole.get(f"optimiser.{name}.{p}") for p in ("step", "exp_avg", "exp_avg_sq")}
        count = moments.pop("step")
        if count is not None:
            _check_fits(run, f"optimiser.{name}", {"step": torch.tensor(0.0)}, {"step": count})
            # Moments need the memory layout of their weight: the fused optimiser reads both in memory order.
            given = {p: v for p, v in moments.items() if v is not None}
            _check_fits(run, f"optimiser.{name}", dict.fromkeys(moments, parameter), given)
            laid = {p: torch.empty_like(parameter).copy_(v) for p, v in given.items()}
            optimiser.state[parameter] = {
                "step": count.to(parameter.device) if optimiser.defaults["fused"] else count,
                **laid,
            }
    for part, values in tensors.items():
        if values:  # the running mean exists from the start; a defence fills its state later
            _check_fits(run, part, values, under(part))
        values |= {name: v.to(device) for name, v in under(part).items()}
    return _progress(run, at)


def _check_fits(run: Run, part: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse a checkpoint whose tensors have other names or shapes, or are not finite."""
    for name in (*own, *given):
        fits = name in own and name in given and given[name].shape == own[name].shape
        fits = fits and given[name].is_floating_point() == own[name].is_floating_point()
        if not fits or not bool(given[name].isfinite().all()):
            raise RunError(f"the checkpoint of {run.path} does not fit its settings ({part}.{name}); train again")


def _progress(run: Run, at: Any) -> Progress:
    """The progress in a checkpoint, with the type of each field checked."""
    known = asdict(Progress())
    place, todo = f"the checkpoint of {run.path}", "train again"
    if not isinstance(at, dict) or set(at) - set(known):
        raise RunError(f"{place} has an unknown format; {todo}")
    found = {name: field_of(at, name, type(usual), place, todo) for name, usual in known.items() if name in at}
    for name, pair in found.get("meters", {}).items():
        if not isinstance(pair, list) or len(pair) != 2 or None in map(number, pair):
            raise RunError(f"{place} has no sum and count for {name}; {todo}")
    if min(found.get(name, 0) for name in ("epoch", "index", "step")) < 0:
        raise RunError(f"{place} has a negative epoch, index or step; {todo}")
    return Progress(**found)


def _parameters(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by name; those of a companion have its name in front."""
    for part, module in parts.items():
        yield from module.named_parameters(prefix="" if part == "model" else part)


class Meters:
    """Weighted means over an epoch. Sums stay on the device, so that logging never waits for it."""

    def __init__(self, sums: Mapping[str, list[float]]) -> None:
        self._sums: dict[str, Tensor | float] = {name: total for name, (total, _) in sums.items()}
        self._weights: dict[str, Tensor | float] = {name: weight for name, (_, weight) in sums.items()}

    def add(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0, /) -> None:
        """Count a value `weight` times in the mean of this name."""
        value, weight = (x.detach().double() if isinstance(x, Tensor) else x for x in (value, weight))
        self._sums[name] = self._sums.get(name, 0.0) + value * weight
        self._weights[name] = self._weights.get(name, 0.0) + weight

    def sums(self) -> dict[str, list[float]]:
        """[sum, weight] of each name, as a checkpoint stores them."""
        return {name: [float(total), float(self._weights[name])] for name, total in self._sums.items()}

    def total(self, name: str) -> float:
        return float(self._sums.get(name, 0.0))

    def means(self) -> dict[str, float]:
        """The mean of each name; a name without any weight is left out."""
        return {name: total / weight for name, (total, weight) in self.sums().items() if weight}

    def note(self) -> str:
        return f"loss {self.means().get('loss', float('nan')):.4f}"

    def reset(self) -> None:
        self._sums.clear()
        self._weights.clear()
