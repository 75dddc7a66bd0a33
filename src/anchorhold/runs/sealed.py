"""Safetensors files with a hash of themselves (a seal), so that any flipped bit is detected.

The JSON in the metadata begins with the SHA-256 of the whole file, computed with zeros in place of the hash. File and
hash are written together, so a kill cannot separate them. Files without a seal are still read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .fields import parsed
from .files import regular

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SEAL", "Damaged", "check_seal", "save_sealed"]

SEAL = "sealed"
_BLANK = "0" * 64
_BEGINS = re.compile(rf'\{{"{SEAL}": "([0-9a-f]{{64}})"')
_HASH = re.compile(r"[0-9a-f]{64}")
_BLOCK = 2**20
_LONGEST = 10**8  # bytes of the longest header that safetensors reads


class Damaged(ValueError):
    """A file that differs from what was written."""


def save_sealed(tensors: "Mapping[str, Tensor]", path: Path, key: str, about: Mapping[str, Any]) -> None:
    """Write tensors with `about` as JSON under the entry `key` of the metadata, the only one: entries have no order."""
    from safetensors.torch import save_file

    save_file(dict(tensors), path, {key: json.dumps({SEAL: _BLANK, **about})})
    with open(path, "r+b") as file:
        head = _head(file)
        mark = _hash(head, file)
        file.seek(head.index(_BLANK.encode()))
        file.write(mark.encode())


def check_seal(path: Path) -> bool:
    """Whether a safetensors file has a seal; raises `Damaged` if the seal does not match."""
    with open(regular(path), "rb") as file:
        head = _head(file)
        try:
            known = parsed(head[8:]).get("__metadata__") or {}
            texts = {str(key): str(text) for key, text in known.items()}
        except (ValueError, AttributeError):
            return False  # not a safetensors file, which its reader reports
        found = {match[1] for text in texts.values() if (match := _BEGINS.match(text))}
        if not found:
            # A bit may have flipped in the seal's name or in its hash, but not in both.
            ours = (texts.get(key, "") for key in ("anchorhold", "state"))
            if any(f'"{SEAL}"' in text for text in texts.values()) or any(_HASH.search(text) for text in ours):
                raise Damaged("its seal is broken")
            return False
        mark = found.pop()
        if head.count(mark.encode()) != 1 or _hash(head.replace(mark.encode(), _BLANK.encode()), file) != mark:
            raise Damaged("its contents changed after it was saved")
    return True


def _head(file: IO[bytes]) -> bytes:
    """The eight bytes of length, and the header of that length."""
    length = file.read(8)
    return length + file.read(min(int.from_bytes(length, "little"), _LONGEST))


def _hash(head: bytes, file: IO[bytes]) -> str:
    """The hash of a header and of the rest of the file."""
    digest = hashlib.sha256(head)
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.hexdigest()
