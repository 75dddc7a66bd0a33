"""Rows of an audit, kept batch by batch: what has no shard is still to be done.

A shard is one safetensors file, `shards/RUN.BATCH.safetensors`, written whole or not at all; those of a run that is
complete become one, `shards/RUN.all.safetensors`. Its metadata say what it was made with, so that rows of another
model, other data or another budget are never mixed in. Of several ranks each makes whole batches.
"""

import glob
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..errors import RunError
from ..monitors import Images
from ..ranks import Ranks
from ..record import atomic

__all__ = ["Shard", "Shards"]


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one batch of one run, and what they took."""

    rows: dict[str, Tensor]
    seconds: float
    image_steps: int


class Shards:
    """The shards of an audit: files below `folder`, or memory where there is none."""

    def __init__(self, folder: str | Path | None, about: Mapping[str, Any], ranks: Ranks | None = None) -> None:
        self.folder = None if folder is None else Path(folder) / "shards"
        self.about = json.loads(json.dumps(about))  # as it will come back from a file
        self.held: dict[str, Shard] = {}
        self.ranks = ranks or Ranks()
        self.ranks.alike("images or weights", self.about)

    def whole(self, run: str, extra: str = "") -> Shard | None:
        """All rows of a run that is complete."""
        return self.ranks.once(lambda: self.find(run, None, extra))

    def kept(self, run: str, count: int, extra: str = "") -> dict[int, Shard]:
        """Those of `count` batches that have a shard."""
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
        """The rows of every batch of ids: those that are kept, and the others made, each by one rank.

        `make(ids, images)` gives rows and image-steps. A rank asks for all its images at once: they are read ahead.
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
        """The rows of a batch (None: of all), or None where they are to be made; those of another audit are refused."""
        name = _name(run, batch)
        if self.folder is None:
            return self.held.get(name)
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            with safetensors.safe_open(path, "pt") as file:
                known = json.loads((file.metadata() or {})["anchorhold"])
                rows = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        except (safetensors.SafetensorError, OSError, KeyError, ValueError):
            return None  # damaged by something else than us: done again
        self._refuse_stale(known["about"], known["run"], extra)
        return Shard(rows, known["seconds"], known["image_steps"])

    def keep(self, run: str, batch: int | None, shard: Shard, extra: str = "") -> Shard:
        """Put the rows of a batch away, or, by the first rank, those of all, which replace the batches'."""
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
            safetensors.torch.save_file(shard.rows, temporary, {"anchorhold": json.dumps(known)})

    def _refuse_stale(self, known: Mapping[str, Any], run: str, extra: str) -> None:
        keys = sorted({*known, *self.about})
        changed = [key for key in keys if _but_sample(known.get(key)) != _but_sample(self.about.get(key))]
        if run != extra:
            changed.append(f"attack ({run}, now {extra})")
        if changed:
            assert self.folder is not None
            raise RunError(
                f"{self.folder.parent} holds rows of another audit, with another {', '.join(changed)}; "
                f"give another --out, or delete {self.folder}"
            )


def _but_sample(value: Any) -> Any:
    """Data without how many of them are attacked: limit says that, and other data they are not."""
    return {key: each for key, each in value.items() if key != "attacked"} if isinstance(value, Mapping) else value


def _name(run: str, batch: int | None) -> str:
    return f"{run}.{'all' if batch is None else f'{batch:05d}'}.safetensors"
