"""Keyed randomness: every draw is a pure function of (seed, purpose, step, sample id).

There is no generator and no state. A `Key` is a 64-bit number; calling it folds in names and numbers, and a
draw hashes the key with the sample ids. Draws are therefore the same on CPU and CUDA, for any batch size, order or
number of processes, and a checkpoint needs no random state.

The hash is the SplitMix64 finaliser (Steele, Lea and Flood, 2014) in wrapping int64 arithmetic, which CPU and
CUDA compute bit by bit alike.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Key"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: SplitMix64's increment
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The same 64 bits as a Python int that fits torch.int64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    # torch's >> on int64 copies the sign bit; the mask makes it a logical shift.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_MUL_1)
    z = (z ^ _shift(z, 27)) * _signed(_MUL_2)
    return z ^ _shift(z, 31)


@dataclass(frozen=True)
class Key:
    """A node in the tree of random draws.

    >>> key = Key.of(0)("crop", 12)
    >>> ids = torch.arange(6)
    >>> bool((key.uniform(ids)[4:] == key.uniform(ids[4:])).all())   # for any batch
    True
    """

    value: int

    @staticmethod
    def of(seed: int) -> "Key":
        """The root of all draws of one run."""
        return Key(_mix_int((seed + _GAMMA) & _MASK))

    def __call__(self, *path: str | int) -> "Key":
        """The key below this one for a purpose, a step, an epoch, …"""
        value = self.value
        for part in path:
            if isinstance(part, str):
                part = int.from_bytes(hashlib.blake2b(part.encode(), digest_size=8).digest(), "little")
            value = _mix_int((value * 3 + _mix_int((part + _GAMMA) & _MASK)) & _MASK)
        return Key(value)

    def bits(self, ids: Tensor, shape: Sequence[int] = ()) -> Tensor:
        """Random int64 of shape `(len(ids), *shape)`, each a function of this key, the id and the place in `shape`."""
        count = math.prod(shape)
        rows = _mix(ids.long().reshape(-1, 1) * _signed(_GAMMA) + _signed(self.value))
        if count == 1:
            return rows.reshape(ids.numel(), *shape)
        columns = torch.arange(count, device=ids.device).reshape(1, -1) * _signed(_GAMMA)
        return _mix(rows + columns).reshape(ids.numel(), *shape)

    def uniform(self, ids: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> Tensor:
        """Uniform numbers in [0, 1), one row per id."""
        digits = 53 if dtype == torch.float64 else 24
        return _shift(self.bits(ids, shape), 64 - digits).to(dtype) * 2.0**-digits

    def normal(self, ids: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal numbers by Box and Muller, one row per id."""
        radius = torch.sqrt(-2 * torch.log1p(-self("radius").uniform(ids, shape, torch.float64)))
        return (radius * torch.cos(2 * math.pi * self("angle").uniform(ids, shape, torch.float64))).to(dtype)

    def integers(self, ids: Tensor, high: int | Tensor) -> Tensor:
        """One whole number in [0, high) per id; `high` may differ between ids."""
        return (self.uniform(ids) * high).long()

    def permutation(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """0 … count-1 in random order."""
        return torch.argsort(self.bits(torch.arange(count, device=device)), stable=True)
