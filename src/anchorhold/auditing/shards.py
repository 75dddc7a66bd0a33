"""Rows of an audit, saved batch by batch, so that an audit can resume.

A shard is one safetensors file, `shards/RUN.BATCH.safetensors`, written atomically. The shards of a complete run are
merged into `shards/RUN.all.safetensors`. Metadata record model, data and budget, so that rows of different audits are
never mixed. With several ranks each batch belongs to one rank.
"""

import glob
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ..data.images import Images
from ..distributed import Ranks
from ..errors import RunError
from ..interface import option, replacing
from ..runs.fields import field, parsed
from ..runs.locks import tidy
from ..runs.sealed import check_seal, save_sealed
from ..runs.writing import atomic, no_link

__all__ = ["REJECTED", "Shard", "Shards", "as_known", "but_sample", "joined_rows"]

REJECTED = "rejected"  # the row of samples with a perturbed image whose embedding was not finite
_IDS = (torch.int64,)
_MEASURED = (torch.float32, torch.float64, torch.bool)


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one batch of one run, and their cost."""

    rows: dict[str, Tensor]
    seconds: float
    image_steps: int


def joined_rows(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The rows of several batches as one; a batch without rejected samples has no row of them."""
    rows = {
        name: torch.cat([shard.rows[name].cpu() for shard in shards]) for name in shards[0].rows if name != REJECTED
    }
    if any(REJECTED in shard.rows for shard in shards):
        every = (shard.rows.get(REJECTED, torch.zeros(len(shard.rows["ids"]), dtype=torch.bool)) for shard in shards)
        rows[REJECTED] = torch.cat([row.cpu() for row in every])
    return rows


class _Rows(dict[str, Tensor]):
    """Rows of a file; a missing one is an error of one line."""

    def __init__(self, rows: Mapping[str, Tensor], path: Path) -> None:
        super().__init__(rows)
        self.path = path

    def __missing__(self, name: str) -> Tensor:
        raise RunError(f"{self.path} has no {name}: delete {self.path.parent}, and audit again")


class Shards:
    """The shards of an audit: files below `folder`, or memory where there is none.

    `items` is the maximum number of images: ids in a file must be below it. If it `replaces`, rows of another audit are
    computed again; otherwise they are refused.
    """

    def __init__(
        self,
        folder: str | Path | None,
        about: Mapping[str, Any],
        ranks: Ranks | None = None,
        items: int = 2**31,
        replaces: bool = False,
    ) -> None:
        self.folder = None if folder is None else Path(folder) / "shards"
        self.items, self.replaces = items, replaces
        self.about = json.loads(json.dumps(about))  # as read back from a file
        self.held: dict[str, Shard] = {}
        self.ranks = ranks or Ranks()
        self.ranks.alike("images or weights", self.about)
        if self.folder is not None and self.ranks.first:
            tidy(no_link(self.folder))

    def whole(self, run: str, extra: str = "") -> Shard | None:
        """All rows of a complete run."""
        return self.ranks.once(lambda: self.find(run, None, extra))

    def kept(self, run: str, count: int, extra: str = "") -> dict[int, Shard]:
        """The shards found for `count` batches, by index."""
        found = self.ranks.once(lambda: [self.find(run, index, extra) for index in range(count)])
        return {index: shard for index, shard in enumerate(found) if shard is not None}

    def each(
        self,
        run: str,
        batches: Sequence[Tensor],
        extra: str,
        kept: Mapping[int, Shard],
        images: Images,
        make: Callable[[Tensor, Tensor], tuple[dict[str, Tensor], int]],
    ) -> list[Shard]:
        """The rows of every batch of ids: those in `kept`, and the others computed, each by one rank.

        `make(ids, images)` gives rows and image-steps. A rank requests all its images at once, to read them ahead.
        """
        shards, made = dict(kept), {}
        mine = [index for index in range(len(batches)) if index not in shards][self.ranks.rank :: self.ranks.size]
        views = images.plain(torch.cat([batches[index] for index in mine]), len(batches[0])) if mine else iter(())
        for index in mine:
            begun = time.monotonic()
            rows, steps = make(batches[index], next(views))
            made[index] = self.keep(run, index, Shard(rows, time.monotonic() - begun, steps), extra)
        for others in self.ranks.collected(made):
            shards |= others
        return [shards[index] for index in range(len(batches))]

    def find(self, run: str, batch: int | None, extra: str = "") -> Shard | None:
        """The rows of a batch (None: of all), or None where there are none; rows of another audit are refused."""
        name = _name(run, batch)
        if self.folder is None:
            return self.held.get(name)
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            if not check_seal(path):
                return None  # not written by this program
            with safetensors.safe_open(path, "pt") as file:
                known = parsed((file.metadata() or {})["anchorhold"])
                rows = _Rows({key: file.get_tensor(key) for key in file.keys()}, path)  # noqa: SIM118 (no mapping)
            about, made_by = field(known, "about", dict, path, ""), field(known, "run", str, path, "")
            shard = Shard(rows, field(known, "seconds", float, path, ""), field(known, "image_steps", int, path, ""))
        except (safetensors.SafetensorError, OSError, KeyError, ValueError, RunError):
            return None  # damaged: computed again
        if self._stale(about, made_by, extra):
            return None  # computed again
        return shard if _sound(rows, self.items) else None

    def keep(self, run: str, batch: int | None, shard: Shard, extra: str = "") -> Shard:
        """Save the rows of a batch. `batch` None saves all rows (first rank only) and deletes the batches' files."""
        name = _name(run, batch)
        # Copies: safetensors refuses tensors that share memory or are not dense.
        rows = {key: row.detach().cpu().contiguous().clone() for key, row in shard.rows.items()}
        shard = Shard(rows, shard.seconds, shard.image_steps)
        if self.folder is None:
            self.held[name] = shard
        elif batch is not None:
            self._write(name, shard, extra)
        elif self.ranks.first:
            self._write(name, shard, extra)
            for path in self.folder.glob(f"{glob.escape(run)}.[0-9]*.safetensors"):
                path.unlink()
        return shard

    def _write(self, name: str, shard: Shard, extra: str) -> None:
        assert self.folder is not None
        known = {"about": self.about, "run": extra, "seconds": shard.seconds, "image_steps": shard.image_steps}
        with atomic(self.folder / name) as temporary:
            save_sealed(shard.rows, temporary, "anchorhold", known)

    def _stale(self, known: Mapping[str, Any], run: str, extra: str) -> bool:
        """Whether rows are of another audit; refused, unless this one replaces it."""
        about = {**self.about, "data": as_known(self.about.get("data"), known.get("data"))}
        keys = sorted({*known, *about})
        changed = [key for key in keys if but_sample(known.get(key)) != but_sample(about.get(key))]
        if run != extra:
            changed.append(f"attack ({run}, now {extra})")
        if changed and not self.replaces:
            assert self.folder is not None
            random = " (random weights differ in each process: set a seed)" if "model" in changed else ""
            raise RunError(
                f"{self.folder.parent} holds rows of another audit, with another {', '.join(changed)}{random}; "
                f"give another {option('out')}, or {replacing()} to replace it"
            )
        return bool(changed)


def _sound(rows: Mapping[str, Tensor], items: int) -> bool:
    """Whether rows are consistent: a seal shows that a file is unchanged, not that it was right."""
    lengths: dict[str, set[int]] = {}
    for name, row in rows.items():
        group, _, what = name.rpartition("/") if name.startswith(("example/", "receipt/")) else ("", "", name)
        kinds = {"ids": _IDS, "targets": _IDS, "asked": _IDS, "before": _IDS, "after": _IDS, "queries": _IDS}
        kinds |= {"clean": (torch.uint8,), "perturbed": (torch.uint8,), "images": (torch.uint8,)}
        if row.dtype not in kinds.get(what, _MEASURED) or not row.dim():
            return False
        if row.dtype == torch.int64 and what != "queries" and row.numel() and not -1 <= row.min() <= row.max() < items:
            return False
        if what != "queries":
            lengths.setdefault(group, set()).add(len(row))
    return all(len(each) == 1 for each in lengths.values())


def but_sample(value: Any) -> Any:
    """The description of data without fields that do not identify them."""
    if not isinstance(value, Mapping):
        return value
    return {key: each for key, each in value.items() if key not in ("attacked", "part")}


def as_known(data: Any, known: Any) -> Any:
    """The description of data as older versions wrote it, with files identified by their lengths."""
    if not isinstance(data, Mapping) or not isinstance(known, Mapping):
        return data
    older = dict(data)
    for side in ("query", "gallery"):
        told, now = known.get(side), data.get(side)
        if isinstance(told, Mapping) and isinstance(now, Mapping) and "lengths" in now and "lengths" not in told:
            older[side] = {key: each for key, each in now.items() if key != "lengths"} | {"fingerprint": now["lengths"]}
    return older


def _name(run: str, batch: int | None) -> str:
    return f"{run}.{'all' if batch is None else f'{batch:05d}'}.safetensors"
