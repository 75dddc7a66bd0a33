"""A run is a folder; its files are never half written.

    run.json            settings, seed, versions, commit, data fingerprint, final numbers
    metrics.jsonl       one line per epoch
    last.safetensors    checkpoint: model, optimiser and defence state; previous.safetensors is the one before
    model.safetensors   the exported model

Files are written under a temporary name, flushed to the disk and renamed. No pickle is read or written.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..console import shown
from ..display import frame_of, html_table
from ..errors import RunError, lacks_memory
from ..interface import option, resuming, worded
from .fields import dig, field, number, parsed
from .files import regular
from .schemas import RUN_SCHEMA, upgraded
from .sealed import SEAL, check_seal, save_sealed
from .writing import appended, atomic

__all__ = ["EXPORT", "Run", "without_nan"]

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import Tensor

EXPORT = "model.safetensors"  # file name of the exported model in a run folder

T = TypeVar("T")

_SHOWN = ("epoch", "loss", "r1", "map_r", "r1_attacked", "accuracy", "drift", "features_r1", "seconds")  # in a notebook
_ROWS = 8


class Run:
    """A run folder, for reading and writing: what `ah.fit` and `ah.resume` return.

    `run.read_json()["final"]` has the last numbers, `run.metrics()` one row for each epoch.

    Args:
        path: the folder.
        writes: False makes every writing method do nothing.

    Attributes:
        path: the folder.
        writes: whether this process writes; of several ranks only the first does.
        broken: why `load` had to skip a checkpoint; empty if it did not.
    """

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes
        self.broken = ""

    @classmethod
    def create(cls, path: str | Path, info: Mapping[str, Any], *, replace: bool = False) -> "Run":
        """Make a new run folder; a folder that holds a run is refused unless `replace`."""
        run = cls(path)
        # A run without a checkpoint has nothing to lose.
        if not replace and any((run.path / f"{name}.safetensors").exists() for name in ("last", "previous", "model")):
            raise RunError(
                f"{run.path} already holds a run; to resume it, "
                + worded(f"run `{resuming(run.path)}`", f"call {resuming(run.path)}")
                + f", or choose another {option('out')}"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"cannot create the run folder {run.path}: {error.strerror}; choose another {option('out')}"
            ) from None
        for name in ("last", "previous", "model"):
            (run.path / f"{name}.safetensors").unlink(missing_ok=True)
        (run.path / "metrics.jsonl").unlink(missing_ok=True)
        run.write_json({"schema": RUN_SCHEMA, **info})
        return run

    # run.json

    def write_json(self, info: Mapping[str, Any]) -> None:
        """Replace run.json. NaN and infinity become null."""
        if not self.writes:
            return
        with atomic(self.path / "run.json") as temporary:
            temporary.write_text(
                json.dumps(without_nan(info), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
                encoding="utf-8",
                errors="backslashreplace",  # for file names that are not UTF-8; JSON has the same escapes
            )

    def read_json(self) -> dict[str, Any]:
        """The content of run.json: settings, seed, versions, commit, data, status, final numbers."""
        try:
            info: dict[str, Any] = parsed(regular(self.path / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(
                f"{self.path} is not a run folder: it has no run.json; give a folder that a training made"
            ) from None
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {self.path / 'run.json'}: {error}") from None
        info = upgraded(info) if isinstance(info, dict) else info
        schema = info.get("schema") if isinstance(info, dict) else None
        if schema != RUN_SCHEMA:
            raise RunError(
                f"{self.path / 'run.json'} has schema {schema!r}, but this version reads {RUN_SCHEMA}; "
                "use the version that wrote it"
            )
        return info

    def field(self, info: Mapping[str, Any], place: str, kind: type[T]) -> T:
        """The value at a dotted place of run.json, checked for its type."""
        return field(info, place, kind, self.path / "run.json", "restore the run from a copy, or train again")

    def update_json(self, **fields: Any) -> None:
        """Set these fields of run.json and keep the others."""
        if self.writes:
            self.write_json({**self.read_json(), **fields})

    # metrics.jsonl

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl. NaN and infinity become null."""
        if not self.writes:
            return
        appended(self.path / "metrics.jsonl", json.dumps(without_nan(row), allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All complete lines; the last one may be cut off if the run was killed."""
        rows = []
        if (self.path / "metrics.jsonl").exists():
            try:
                text = regular(self.path / "metrics.jsonl").read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise RunError(f"cannot read {self.path / 'metrics.jsonl'}: {error}") from None
            for line in text.splitlines():
                try:
                    row = parsed(line)
                except ValueError:
                    break
                rows += [row] if isinstance(row, dict) else []
        return rows

    def cut_metrics(self, epoch: int) -> None:
        """Remove the lines of epochs after `epoch`, the last complete one of the checkpoint: they will come again."""
        if not self.writes:
            return
        rows = [row for row in self.metrics() if (number(row.get("epoch")) or 0) <= epoch]
        with atomic(self.path / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    # in a notebook

    def to_frame(self) -> "DataFrame":
        """metrics.jsonl as a pandas DataFrame, a row for each epoch; pandas has to be installed."""
        return frame_of(self.metrics())

    def __repr__(self) -> str:
        try:
            told = self._told()
        except RunError:  # nothing there yet, or not readable: a repr never fails
            return f"<Run {shown(str(self.path))}>"
        return f"<Run {shown(str(self.path))}: {', '.join(f'{name} {value}' for name, value in told.items())}>"

    def _repr_html_(self) -> str:
        try:
            told, rows = self._told(), self.metrics()
        except RunError:
            return html_table(repr(self), (), ())
        names = [name for name in _SHOWN if any(name in row for row in rows)]
        last = [["…", *[""] * (len(names) - 1)]] if len(rows) > _ROWS else []
        table = last + [[_brief(row.get(name)) for name in names] for row in rows[-_ROWS:]]
        said = ", ".join(f"{name} {value}" for name, value in told.items())
        return html_table(f"Run {self.path}", names, table, subtitle=said)

    def _told(self) -> dict[str, str]:
        """What the record says of the run, in a few words; it may come from anyone."""
        info, rows = self.read_json(), self.metrics()
        done = number(rows[-1].get("epoch")) if rows else 0
        asked = number(dig(info, "settings", "train", "epochs"))
        found = {
            "status": dig(info, "status"),
            "recipe": dig(info, "settings", "recipe"),
            "epoch": None if done is None else f"{done:g}" + ("" if asked is None else f" of {asked:g}"),
        }
        scored = [value for row in rows if (value := number(row.get("r1"))) is not None]
        found["R@1"] = f"{scored[-1]:.1f}" if scored else None
        return {name: shown(str(value))[:60] for name, value in found.items() if isinstance(value, str) and value}

    # checkpoints

    def save(self, tensors: Mapping[str, "Tensor"], state: Mapping[str, Any]) -> None:
        """Write last.safetensors; the old one becomes previous.safetensors."""
        if not self.writes:
            return
        last = self.path / "last.safetensors"
        with atomic(last, before=self.path / "previous.safetensors") as temporary:
            # clone: safetensors refuses tensors that share memory or are not dense
            whole = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
            save_sealed(whole, temporary, "state", state)

    def unstarted(self) -> bool:
        """Whether the run has only its initial checkpoint, which the same command would make again."""
        from safetensors import safe_open

        last = self.path / "last.safetensors"
        further = any((self.path / f"{name}.safetensors").exists() for name in ("previous", "model"))
        if further or not last.exists() or self.metrics():
            return False
        try:
            with safe_open(regular(last), framework="pt") as file:
                return bool(json.loads(file.metadata()["state"])["step"] == 0)
        except Exception:  # a damaged checkpoint may hold progress
            return False

    def load(self) -> tuple[dict[str, "Tensor"], dict[str, Any]] | None:
        """The last readable checkpoint, or None if there is none yet; `broken` says which one was skipped."""
        from safetensors import safe_open

        broken = []
        for name in ("last.safetensors", "previous.safetensors"):
            path = self.path / name
            if not path.exists():
                continue
            try:
                check_seal(path)
                with safe_open(path, framework="pt") as file:
                    state = parsed(file.metadata()["state"])
                    state.pop(SEAL, None)
                    return {key: file.get_tensor(key) for key in file.keys()}, state  # noqa: SIM118
            except Exception as error:  # safetensors has its own exceptions for truncated files
                if lacks_memory(error):
                    raise
                broken.append(f"{name} ({error})")
                self.broken = f"{path} cannot be read ({error}); resuming from the checkpoint before it"
        if broken:
            raise RunError(f"no checkpoint in {self.path} can be read: {'; '.join(broken)}; train again")
        return None


def without_nan(value: Any) -> Any:
    """The same value with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _brief(value: Any) -> str:
    known = number(value)
    return "" if known is None else f"{known:.4g}"
