"""Checkpoints: what is put back is what was saved, in the layout the optimiser needs."""

from pathlib import Path

import pytest
import torch
from torch import nn

from anchorhold.errors import RunError
from anchorhold.runs.folder import Run
from anchorhold.training import checkpoint
from anchorhold.training.checkpoint import Meters, Progress


def trained(seed: int) -> tuple[nn.Module, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
    optimiser = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        model(torch.rand(2, 3, 4, 4)).square().sum().backward()
        optimiser.step()
    return model, optimiser


def test_everything_comes_back(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    model, optimiser = trained(0)
    at = Progress(epoch=2, index=3, step=44, collapsed=1, seconds=1.5, image_steps=7.0, meters={"loss": [0.5, 2]})
    checkpoint.save(run, {"model": model}, optimiser, {"state": {"previous_loss": torch.tensor(0.3)}}, at)
    other, fresh = trained(1)
    fresh.state.clear()
    state: dict[str, torch.Tensor] = {}
    assert checkpoint.restore(run, {"model": other}, fresh, {"state": state}) == at
    assert state == {"previous_loss": torch.tensor(0.3)}
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)
        for part in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimiser.state[a][part], fresh.state[b][part])
        assert fresh.state[b]["exp_avg"].stride() == b.stride()


def test_no_checkpoint_yet_and_never_one_with_a_nan(tmp_path: Path) -> None:
    run = Run.create(tmp_path, {})
    model, optimiser = trained(0)
    assert checkpoint.restore(run, {"model": model}, optimiser, {}) is None
    checkpoint.save(run, {"model": model}, optimiser, {}, Progress(step=1))
    next(model.parameters()).data[0] = float("nan")
    with pytest.raises(RunError, match="by step 2; the checkpoint before it is kept"):
        checkpoint.save(run, {"model": model}, optimiser, {}, Progress(step=2))
    assert (run.load() or ({}, {}))[1]["step"] == 1


def test_meters_go_on_where_they_were() -> None:
    whole, first = Meters({}), Meters({})
    for value in (0.1, 0.2):
        whole.add("loss", torch.tensor(value))
        first.add("loss", torch.tensor(value))
    second = Meters(first.sums())
    for meters in (whole, second):
        meters.add("loss", torch.tensor(0.7))
        meters.add("steps", 4.0)
    assert whole.means() == second.means() and whole.total("steps") == 4.0
    whole.reset()
    assert whole.means() == {}


@pytest.mark.parametrize("name", ["model.0.weight", "optimiser.0.weight.step", "optimiser.0.weight.exp_avg", "ema.x"])
@pytest.mark.parametrize("value", [torch.ones(7), torch.tensor(float("nan"))], ids=["another shape", "NaN"])
def test_tensors_that_do_not_fit_are_one_line(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    run = Run.create(tmp_path, {})
    model, optimiser = trained(0)
    checkpoint.save(run, {"model": model}, optimiser, {"ema": {"x": torch.zeros(())}}, Progress())
    loaded = run.load()
    assert loaded is not None and name in loaded[0]
    run.save({**loaded[0], name: value}, {k: v for k, v in loaded[1].items() if k != "sealed"})
    with pytest.raises(RunError, match="does not fit"):
        checkpoint.restore(run, {"model": model}, optimiser, {"ema": {"x": torch.zeros(())}})
