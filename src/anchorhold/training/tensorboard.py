"""The numbers of a run for TensorBoard: an event file in RUN/tensorboard that says what metrics.jsonl says.

When a run starts or resumes, the file is written anew from metrics.jsonl. So nothing is there twice after a kill, and
nothing is missing, even if the run was not tracked before.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import RunError, SettingsError
from ..runs.fields import number
from ..runs.folder import Run

__all__ = ["FOLDER", "TensorBoard"]

FOLDER = "tensorboard"
AXIS = "step"  # of the curves


class TensorBoard:
    """A callback: every number of a row becomes a point of the curve of its name, at the row's step."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingsError(
                f"TensorBoard's writer cannot be loaded ({error}): pip install 'anchorhold[tensorboard]'"
            ) from None
        self._make: Any = SummaryWriter
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        """Write the rows that the run has already, in place of older event files."""
        folder = run.path / FOLDER
        if folder.is_symlink():  # in a folder of somebody else it may lead anywhere
            raise RunError(f"{folder} is a symbolic link: remove it")
        for old in sorted(folder.glob("events.out.tfevents.*")):
            _remove(old)
        # purge_step: a TensorBoard that is open forgets what it read from the older files.
        self._writer = self._make(str(folder), purge_step=0, flush_secs=10)
        rows = run.metrics()
        now, last = time.time(), max((number(row.get("seconds")) or 0.0 for row in rows), default=0.0)
        for row in rows:
            self._write(row, now - (last - (number(row.get("seconds")) or 0.0)))
        self._writer.flush()

    def on_epoch(self, row: Mapping[str, Any]) -> None:
        """Add a point to each curve."""
        self._write(row, time.time())
        self._writer.flush()  # an epoch takes long, and a kill must lose nothing

    def on_end(self, run: Run) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, row: Mapping[str, Any], when: float) -> None:
        step = int(number(row.get("step")) or 0)
        for name, value in row.items():
            known = number(value)
            if name != AXIS and known is not None:
                self._writer.add_scalar(name, known, step, walltime=when)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
