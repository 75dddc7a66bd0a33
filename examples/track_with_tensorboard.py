"""Track a training: TensorBoard's curves, and a callback of your own that keeps the best epoch.

    python examples/track_with_tensorboard.py
    tensorboard --logdir RUN/tensorboard

On the command line: anchorhold train digits --track tensorboard --track track_with_tensorboard:Best
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anchorhold as ah


class Best:
    """The epoch with the highest R@1 so far. `ah.Callback` says which methods there are."""

    def __init__(self) -> None:
        self.epoch, self.r1 = 0, 0.0

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        if row.get("r1", 0.0) > self.r1:
            self.epoch, self.r1 = row["epoch"], row["r1"]

    def on_end(self, run: Any) -> None:
        print(f"best R@1 {self.r1:.2f} after epoch {self.epoch}")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves as TensorBoard reads them: (step, value) by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def main(out: Path) -> dict[str, list[tuple[int, float]]]:
    short = {"train.epochs": 4, "train.evaluate_every": 1}
    run = ah.fit(None, "digits", "natural", out, overrides=short, callbacks=["tensorboard", Best()], device="cpu")
    curves = read(run.path / "tensorboard")
    same = all(abs(value - row["loss"]) < 1e-6 for (_, value), row in zip(curves["loss"], run.metrics()))
    print(f"{len(curves)} curves of {len(curves['loss'])} epochs; the loss is that of metrics.jsonl: {same}")
    return curves


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder) / "run")
