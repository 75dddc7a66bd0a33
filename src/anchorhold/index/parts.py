"""What is done of an index that is being made: a file for each block of images, written whole or not at all."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..errors import DataError, RunError
from ..record import atomic
from .folder import Index, write_index
from .sources import Item, digest_of, shown

__all__ = ["PARTS", "Parts", "refuse_other", "remove_parts"]

PARTS = ".anchorhold-parts"  # no folder of the user's is called so


class Parts:
    """The blocks of `size` items, and those of them that have a part in the folder PARTS of `out`."""

    def __init__(self, out: Path, items: Sequence[Item], made_with: Mapping[str, Any], size: int) -> None:
        self.out, self.folder, self.items, self.made_with, self.size = out, out / PARTS, items, made_with, size
        self.count = -(-len(items) // size)

    def block(self, number: int) -> Sequence[Item]:
        """The items of a block."""
        return self.items[number * self.size : (number + 1) * self.size]

    def todo(self, whole: bool) -> set[int]:
        """The blocks that have no part, or one of other items: an image that was mended is embedded again.

        With `whole`, a part that lacks an image is none.
        """
        for name in ("ids.csv", "vectors.safetensors"):
            if (self.out / name).exists() and not self.folder.exists():
                raise RunError(f"{self.out} has a file {name} that is not of an index; choose another --out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # at once: not after the first block
        except OSError as error:
            raise RunError(f"cannot make {self.folder}: {error.strerror}; choose another --out") from None
        for left in self.folder.glob(".*.part"):
            left.unlink(missing_ok=True)
        return {number for number in range(self.count) if not self._done(number, whole)}

    def keep(self, number: int, vectors: Tensor, kept: Sequence[int], bad: Sequence[tuple[str, str]]) -> None:
        """Put away the vectors of a block, which of its items have one, and why the others have none."""
        known = {"made_with": self.made_with, "items": digest_of(self.block(number)), "bad": bad}
        tensors = {"vectors": vectors.contiguous(), "kept": torch.tensor(kept, dtype=torch.long)}
        with atomic(self._path(number)) as temporary:
            safetensors.torch.save_file(tensors, temporary, {"anchorhold": json.dumps(known)})

    def finish(self, about: Mapping[str, Any], labelled: bool) -> Index:
        """Write the index and remove the parts."""
        rows: list[tuple[str, str]] = []
        skipped: list[tuple[str, str]] = []
        dim = 0
        for number in range(self.count):
            known, tensors = self._read(number)
            block = self.block(number)
            rows += [(block[place].id, block[place].label) for place in tensors["kept"].tolist()]
            skipped += known["bad"]
            dim = dim or tensors["vectors"].shape[1]
        if not rows:
            name, reason = skipped[0]
            raise DataError(f"none of {len(skipped):,} images can be read, the first is {shown(name)}: {reason}")
        whole = {"images": len(rows), "dim": dim, **about, "skipped": skipped}
        index = write_index(self.out, whole, rows, labelled, self._vectors())
        remove_parts(self.out)
        return index

    def _vectors(self) -> Iterator[Tensor]:
        for number in range(self.count):
            yield self._read(number)[1]["vectors"]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def _read(self, number: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        with safetensors.safe_open(self._path(number), "pt") as file:
            known = json.loads((file.metadata() or {})["anchorhold"])
            return known, {name: file.get_tensor(name) for name in ("vectors", "kept")}

    def _done(self, number: int, whole: bool) -> bool:
        if not self._path(number).is_file():
            return False
        try:
            known, _ = self._read(number)
        except (safetensors.SafetensorError, OSError, KeyError, ValueError):
            return False  # damaged by something else than us: done again
        refuse_other(self.out, known["made_with"], self.made_with)
        return known["items"] == digest_of(self.block(number)) and not (whole and known["bad"])


def refuse_other(out: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Never mix vectors that were made in different ways."""
    changed = [name for name in wanted if known.get(name) != wanted[name]]
    if changed:
        raise RunError(f"{out} was made with another {', '.join(changed)}; choose another --out, or remove it")


def remove_parts(out: Path) -> None:
    """Take away the parts, and nothing that is not one of them."""
    for pattern in ("[0-9]*.safetensors", ".*.part"):
        for part in (out / PARTS).glob(pattern):
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (out / PARTS).rmdir()
