"""A run is a folder, and nothing in it is ever half written.

    run.json            settings, seed, versions, commit, data fingerprint, every number at the end
    metrics.jsonl       one line per epoch
    last.safetensors    model, optimiser and defence state; previous.safetensors is the one before
    model.safetensors   the export

Files are written under a temporary name, flushed to the disk and renamed. No pickle is read or written.
"""

import errno
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import RunError

__all__ = ["SCHEMA", "Run", "atomic", "provenance", "without_nan"]

SCHEMA = "anchorhold.run/1"
_UMASK = os.umask(0)
os.umask(_UMASK)  # it can only be read by setting it


@contextmanager
def atomic(path: Path, before: Path | None = None) -> Iterator[Path]:
    """A temporary path that becomes `path` when the block ends well, and vanishes when it does not.

    What stood at `path` is lost, or becomes `before`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_UMASK)  # safetensors makes files that nobody else may read
        if before is not None and path.exists():
            os.replace(path, before)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # there is no folder to look in where the folder could not be made
            temporary.unlink()
        # safetensors reports the system's error as text of its own, so the text is looked at as well.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            on = f"`anchorhold resume {path.parent}` goes on" if (path.parent / "run.json").exists() else "try again"
            raise RunError(
                f"the disk is full: {path} was not written, what was there before is intact; free some space, then {on}"
            ) from None
        if isinstance(error, OSError):
            reason = f"{path.parent} is a file" if os.path.isfile(path.parent) else error.strerror or error
            raise RunError(f"cannot write {path}: {reason}; choose another place") from None
        raise


class Run:
    """A run folder, to write to and to read from."""

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        self.path = Path(path)
        self.writes = writes  # one of several ranks does
        self.broken = ""  # what `load` had to pass over

    @classmethod
    def create(cls, path: str | Path, info: Mapping[str, Any], *, replace: bool = False) -> "Run":
        """A new run folder; one that holds a run already is refused unless it may be replaced."""
        run = cls(path)
        # A run that never came to a checkpoint has nothing to lose.
        if not replace and any((run.path / f"{name}.safetensors").exists() for name in ("last", "previous", "model")):
            raise RunError(
                f"{run.path} holds a run already; `anchorhold resume {run.path}` goes on with it, "
                "or choose another --out"
            )
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the run folder {run.path}: {error.strerror}; choose another place") from None
        for name in ("last", "previous", "model"):
            (run.path / f"{name}.safetensors").unlink(missing_ok=True)
        (run.path / "metrics.jsonl").unlink(missing_ok=True)
        run.write_json({"schema": SCHEMA, **info})
        return run

    # run.json

    def write_json(self, info: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        with atomic(self.path / "run.json") as temporary:
            temporary.write_text(
                json.dumps(without_nan(info), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
            )

    def read_json(self) -> dict[str, Any]:
        try:
            info: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} is not a run folder: it has no run.json") from None
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read {self.path / 'run.json'}: {error}") from None
        schema = info.get("schema") if isinstance(info, dict) else None
        if schema != SCHEMA:
            raise RunError(f"{self.path / 'run.json'} has schema {schema!r}; this version reads {SCHEMA}")
        return info

    def update_json(self, **fields: Any) -> None:
        if self.writes:
            self.write_json({**self.read_json(), **fields})

    # metrics.jsonl

    def append(self, row: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        try:
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(without_nan(row), allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror}") from None

    def metrics(self) -> list[dict[str, Any]]:
        """All complete lines; the last one may be torn where a run was killed."""
        rows = []
        if (self.path / "metrics.jsonl").exists():
            for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    break
        return rows

    def cut_metrics(self, epoch: int) -> None:
        """Forget lines of epochs after `epoch`, the last that the checkpoint has behind it: they come again."""
        if not self.writes:
            return
        rows = [row for row in self.metrics() if row["epoch"] <= epoch]
        with atomic(self.path / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    # checkpoints

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write last.safetensors; the one before becomes previous.safetensors."""
        from safetensors.torch import save_file

        if not self.writes:
            return
        last = self.path / "last.safetensors"
        with atomic(last, before=self.path / "previous.safetensors") as temporary:
            # clone: safetensors refuses tensors that share memory or are not dense
            save_file(
                {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()},
                temporary,
                metadata={"state": json.dumps(state)},
            )

    def tidy(self) -> None:
        """Remove what a killed process left half written."""
        for part in self.path.glob(".*.part") if self.writes else ():
            part.unlink(missing_ok=True)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint that can be read, or None before the first; `broken` says what could not be."""
        from safetensors import safe_open

        broken = []
        for name in ("last.safetensors", "previous.safetensors"):
            path = self.path / name
            if not path.exists():
                continue
            try:
                with safe_open(path, framework="pt") as file:
                    state = json.loads(file.metadata()["state"])
                    return {key: file.get_tensor(key) for key in file.keys()}, state  # noqa: SIM118
            except Exception as error:  # safetensors raises its own kinds for truncated files
                broken.append(f"{name} ({error})")
                self.broken = f"{path} cannot be read ({error}); going on from the checkpoint before it"
        if broken:
            raise RunError(f"no checkpoint in {self.path} can be read: {'; '.join(broken)}; train anew")
        return None


def without_nan(value: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity: null stands for both."""
    if isinstance(value, Mapping):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def provenance(device: torch.device) -> dict[str, Any]:
    """Versions, machine and commit, so that a number can be made again."""
    packages = ["anchorhold", "torch", "torchvision", "timm", "numpy"]
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    threads = torch.get_num_threads()  # how sums are rounded on a CPU depends on it
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"
    )
    return {
        "versions": {"python": platform.python_version(), **versions},
        "device": f"{device.type}: {where}",
        "commit": commit(),
    }


def commit() -> str | None:
    """The commit of the source tree; $ANCHORHOLD_COMMIT where there is no git, None where neither is."""
    if "ANCHORHOLD_COMMIT" in os.environ:
        return os.environ["ANCHORHOLD_COMMIT"]
    here = Path(__file__).resolve().parent
    if not (here.parents[1] / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=here,
            check=True,
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()
