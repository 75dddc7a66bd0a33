"""Resumable blocks of an unfinished index: one file for each block of images, written atomically."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from ..console import shown
from ..errors import DataError, RunError
from ..interface import option
from ..runs.fields import parsed
from ..runs.locks import tidy
from ..runs.sealed import check_seal, save_sealed
from ..runs.writing import atomic, no_link
from .folder import Index, write_index
from .sources import Item, digest_of

__all__ = ["PARTS", "Parts", "refuse_other", "remove_parts", "told_of"]

PARTS = ".anchorhold-parts"  # hidden, and not a name that users choose


class Parts:
    """The items in blocks of `size`; finished blocks have a file (part) in the folder PARTS of `out`."""

    def __init__(self, out: Path, items: Sequence[Item], made_with: Mapping[str, Any], size: int) -> None:
        self.out, self.folder, self.items, self.made_with, self.size = out, out / PARTS, items, made_with, size
        self.count = -(-len(items) // size)

    def block(self, number: int) -> Sequence[Item]:
        """The items of a block."""
        return self.items[number * self.size : (number + 1) * self.size]

    def todo(self, whole: bool) -> set[int]:
        """The blocks that have no part, or whose items changed: a repaired image is embedded again.

        With `whole`, a part with skipped images does not count.
        """
        for name in ("ids.csv", "vectors.safetensors"):
            if (self.out / name).exists() and not self.folder.exists():
                raise RunError(
                    f"{self.out} has a file {name} that does not belong to an index; choose another {option('out')}"
                )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # fail now, not after the first block
        except OSError as error:
            raise RunError(f"cannot create {self.folder}: {error.strerror}; choose another {option('out')}") from None
        tidy(no_link(self.folder))
        return {number for number in range(self.count) if not self._done(number, whole)}

    def keep(self, number: int, vectors: Tensor, kept: Sequence[int], bad: Sequence[tuple[str, str]]) -> None:
        """Save the vectors of a block, the places of their items, and the reasons for skipped ones."""
        known = {"made_with": self.made_with, "items": digest_of(self.block(number)), "bad": bad}
        tensors = {"vectors": vectors.contiguous(), "kept": torch.tensor(kept, dtype=torch.long)}
        with atomic(self._path(number)) as temporary:
            save_sealed(tensors, temporary, "anchorhold", known)

    def finish(self, about: Mapping[str, Any], labelled: bool) -> Index:
        """Write the index and remove the parts."""
        rows: list[tuple[str, str]] = []
        skipped: list[tuple[str, str]] = []
        dim = 0
        for number in range(self.count):
            known, tensors = self._read(number)
            block = self.block(number)
            rows += [(block[place].id, block[place].named) for place in tensors["kept"].tolist()]
            skipped += known["bad"]
            dim = dim or tensors["vectors"].shape[1]
            if len(tensors["kept"]) and tensors["vectors"].shape[1] != dim:
                raise RunError(f"{self._path(number)} has vectors of another dimension; delete it and embed again")
        if not rows:
            raise DataError(f"no image can be read ({len(skipped):,} tried), the first is {told_of(skipped[0])}")
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
        """The metadata and tensors of a block; a ValueError if they are not as `keep` wrote them."""
        check_seal(self._path(number))
        with safetensors.safe_open(self._path(number), "pt") as file:
            known = parsed((file.metadata() or {})["anchorhold"])
            tensors = {name: file.get_tensor(name) for name in ("vectors", "kept")}
        vectors, kept = tensors["vectors"], tensors["kept"]
        if (
            not isinstance(known, dict)
            or not isinstance(known["made_with"], dict)
            or not isinstance(known["bad"], list)
        ):
            raise ValueError("its metadata have the wrong types")
        if (
            vectors.dtype != torch.float32
            or vectors.ndim != 2
            or kept.dtype != torch.long
            or kept.shape != vectors.shape[:1]
        ):
            raise ValueError("its tensors have the wrong types or shapes")
        if not all(0 <= place < len(self.block(number)) for place in kept.tolist()) or not vectors.isfinite().all():
            raise ValueError("its tensors have values out of range")
        return known, tensors

    def _done(self, number: int, whole: bool) -> bool:
        if not self._path(number).is_file():
            return False
        try:
            known, _ = self._read(number)
        except (safetensors.SafetensorError, OSError, KeyError, ValueError):
            return False  # damaged: embed the block again
        refuse_other(self.out, known["made_with"], self.made_with)
        return bool(known.get("items") == digest_of(self.block(number)) and not (whole and known["bad"]))


def refuse_other(out: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to mix vectors that were made with different settings."""
    names = dict.fromkeys((*wanted, "interpolation", "proportions"))  # the last two are there if they are unusual
    changed = [name for name in names if known.get(name) != wanted.get(name)]
    if changed:
        raise RunError(
            f"{out} was made with another {', '.join(changed)}; choose another {option('out')}, or remove this folder"
        )


def told_of(bad: Any) -> str:
    """Name and reason of a skipped image, as read from a file."""
    name, reason = bad if isinstance(bad, list | tuple) and len(bad) == 2 else (bad, "unreadable")
    return shown(f"{name}: {reason}")


def remove_parts(out: Path) -> None:
    """Remove the parts, and no other files."""
    tidy(no_link(out / PARTS))
    for part in (out / PARTS).glob("[0-9]*.safetensors"):
        part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (out / PARTS).rmdir()
