"""Safe reading of pickled weights: only tensors are restored, and every other object becomes an inert placeholder.

Nothing in the file is imported or called. Checkpoints can therefore be read without the libraries that wrote them.
"""

import collections
import operator
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ModelError

__all__ = ["read_pickle"]


def read_pickle(path: Path, zipped: bool) -> Any:
    """The content of a torch checkpoint, as data; `zipped` says that it is a zip archive."""
    # torch.load gives TorchScript to the JIT and unpacks tar files; both are refused before it sees them.
    size = path.stat().st_size
    if zipped:
        _check_archive(path, size)
    elif _is_tar(path):
        raise ModelError(f"{path} is a tar archive; unpack it and give the weights file inside")
    return torch.load(path, map_location="cpu", pickle_module=_pickles(size), weights_only=False, mmap=False)


def _check_archive(path: Path, size: int) -> None:
    """Refuse programs and compressed archives; torch.save does not compress."""
    program = ModelError(f"{path} is a TorchScript archive, which is a program; save its state_dict() instead")
    with zipfile.ZipFile(path) as archive:
        whole = sum(entry.file_size for entry in archive.infolist())
        # Before the check of sizes, because TorchScript compresses its debug records.
        if any(PurePosixPath(name).name == "constants.pkl" for name in archive.namelist()):
            raise program
    if whole > size:
        raise ModelError(
            f"{path} has {size:,} bytes but unpacks to {whole:,}; save it again with torch.save, which does not "
            "compress; if it is not your own file, do not trust it"
        )
    # Check again with torch's own reader, which torch.load uses; it may unpack, so the sizes come first.
    if "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records():
        raise program


def _is_tar(path: Path) -> bool:
    """Whether the file is a tar; a compressed one is recognised by its magic number alone, without unpacking."""
    with open(path, "rb") as file:
        if file.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")):
            return True
    try:
        tarfile.open(path, "r:").close()
    except (tarfile.TarError, EOFError):
        return False
    return True


class _Inert:
    """Placeholder for every class and function that a pickle names: it accepts anything and does nothing."""

    dump_patches = False  # torch.load would write a file if it were true

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Inert":
        return object.__new__(_Inert)  # `cls` may be an instance, because dill makes classes by calling functions

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> "_Inert":
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    extend = add = update = append

    def __getattr__(self, name: str) -> "_Inert":
        if name.startswith("__"):
            raise AttributeError(name)  # Python looks up protocols this way; a placeholder has none
        return self


def _pickles(size: int) -> SimpleNamespace:
    """A replacement for the pickle module, for torch.load on a file of that many bytes."""
    bounded = type("Unpickler", (_Unpickler,), {"room": size, "claimed": {}})
    return SimpleNamespace(
        __name__=__name__, Unpickler=bounded, load=lambda file, **options: bounded(file, **options).load()
    )


class _Untyped:
    """Placeholder for torch's untyped storage, which a pickle could create with any number of bytes."""

    dtype = torch.uint8

    def __call__(self, *args: Any) -> _Inert:
        return _Inert()


def _tensor(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    # `rest` is requires_grad, hooks and attributes, which are not data. torch would extend a storage that is too short
    # to any size that the pickle gives.
    last = offset + sum((side - 1) * step for side, step in zip(size, stride, strict=True))
    if all(size) and last >= storage._size():
        raise ValueError(f"a tensor with {storage._size()} numbers claims to have {last + 1}")
    tensor: Tensor = torch._utils._rebuild_tensor(storage, offset, size, stride)
    return tensor


def _parameter(data: Tensor, *rest: Any) -> Tensor:
    return data


def _subclass(build: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    return build(*args)


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "UntypedStorage"): _Untyped(),
    ("torch.storage", "UntypedStorage"): _Untyped(),
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler (the version in Python), restricted to the table above.

    torch.load derives from it and adds the typed storages, which are named after dtypes.
    """

    room = 0  # bytes of the file
    claimed: ClassVar[dict[Any, int]] = {}  # bytes of each storage by its key

    def find_class(self, module: str, name: str) -> Any:
        return _HARMLESS.get((module, name), _Inert)

    def _ignore_state(self) -> None:
        # BUILD sets attributes on any object on the stack, even functions; tensors do not need it.
        self.stack.pop()  # type: ignore[attr-defined]

    def _storage(self) -> None:
        # torch allocates the size that the pickle claims before it reads the bytes.
        saved = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(saved, tuple) and len(saved) > 4 and saved[0] in ("storage", b"storage"):
            _, kind, key, _, count = saved[:5]
            self.claimed[key] = max(self.claimed.get(key, 0), operator.index(count) * kind.dtype.itemsize)
            if sum(self.claimed.values()) > self.room:
                raise ValueError(f"its tensors claim {sum(self.claimed.values()):,} bytes, but it has {self.room:,}")
        pickle._Unpickler.load_binpersid(self)  # type: ignore[attr-defined]

    def _bytes(self) -> None:
        # The same check for byte arrays.
        (count,) = struct.unpack("<Q", self.read(8))  # type: ignore[attr-defined]
        if count > self.room:
            raise ValueError(f"it claims {count:,} bytes, but it has {self.room:,}")
        self.append(bytearray(self.read(count)))  # type: ignore[attr-defined]

    # EXT opcodes use a registry of the process instead of find_class, so they are removed.
    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: act
        for code, act in pickle._Unpickler.dispatch.items()
        if code not in (pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0])
    } | {pickle.BUILD[0]: _ignore_state, pickle.BINPERSID[0]: _storage, pickle.BYTEARRAY8[0]: _bytes}
