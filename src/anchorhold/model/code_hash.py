"""A hash of functions: of their code alone, or with the values they hold."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["code_of", "hash_of"]

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_HELD = (*_PLAIN, Tensor, np.ndarray, np.generic, list, tuple, set, frozenset, dict)  # globals that count


def code_of(function: Callable[..., Any]) -> str:
    """A hash of a function's name and its own code, not of what it calls."""
    inner = getattr(function, "__wrapped__", function)
    kind = type(inner)
    name = getattr(inner, "__qualname__", kind.__qualname__)
    digest = hashlib.blake2b(f"{getattr(inner, '__module__', kind.__module__)}.{name}".encode(), digest_size=8)
    code = getattr(inner, "__code__", None) or getattr(kind.__call__, "__code__", None)
    for part in _parts(code) if isinstance(code, CodeType) else ():
        digest.update(part)
    return digest.hexdigest()


def hash_of(step: object) -> str:
    """A hash of a function's code and of the values it holds: defaults, closure, globals of its module, attributes.

    Functions of the same module that it calls are included, and the weights of modules. Attributes whose name starts
    with an underscore are not: counters and caches may be kept there.

    >>> hash_of(lambda x: x + 1) == hash_of(lambda x: x + 1), hash_of(lambda x: x + 1) == hash_of(lambda x: x + 2)
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _held(step, {}):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(code: CodeType) -> Iterator[bytes]:
    """The instructions of a function and its constants; functions inside it by theirs."""
    yield code.co_code
    yield repr(code.co_names).encode()
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _parts(each)
        elif isinstance(each, _PLAIN):
            yield repr(each).encode()


def _held(value: object, seen: dict[int, object]) -> Iterator[bytes]:
    """Bytes that identify a value; what has no values of its own is identified by its name or type."""
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
        return
    if isinstance(value, Tensor):
        yield f"{tuple(value.shape)} {value.dtype}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        yield f"{array.shape} {array.dtype}".encode()
        yield repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # kept alive, so that no other object gets its id
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _held(name, seen)
            yield from _held(part, seen)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items".encode()
        for part in value:
            yield from _held(part, seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(hash_of, value))).encode()
    elif isinstance(value, functools.partial):
        yield from _held((value.func, value.args, value.keywords), seen)
    elif isinstance(value, MethodType):
        yield from _held((value.__func__, value.__self__), seen)
    elif isinstance(value, FunctionType):
        yield from _of_function(value, seen)
    else:
        yield from _of_object(value, seen)


def _of_function(function: FunctionType, seen: dict[int, object]) -> Iterator[bytes]:
    """The code of a function, and the values that it takes from elsewhere."""
    yield from _parts(function.__code__)
    yield from _held((function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _held(cell.cell_contents, seen)
        except ValueError:  # a name without a value yet
            yield b"empty"
    for name in _names(function.__code__):
        part = function.__globals__.get(name)
        own = getattr(part, "__module__", None) == function.__module__
        if isinstance(part, _HELD) or own:
            yield name.encode()
            yield from _held(part, seen)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _of_object(value: object, seen: dict[int, object]) -> Iterator[bytes]:
    """The type of an object and its attributes; a module with its weights."""
    kind = value if isinstance(value, type) else type(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or kind.__qualname__
    yield f"{kind.__module__}.{name}".encode()
    for method in ("__call__", "forward"):
        function = getattr(kind, method, None)
        if isinstance(function, FunctionType) and not function.__module__.startswith("torch.nn.modules"):
            yield from _held(function, seen)
    if isinstance(value, type | ModuleType):
        return
    public = {n: part for n, part in getattr(value, "__dict__", {}).items() if not n.startswith("_")}
    if isinstance(value, nn.Module):
        public.pop("training", None)
        public |= dict(value.named_parameters(recurse=False)) | dict(value.named_buffers(recurse=False))
        public |= dict(value.named_children())
    yield from _held(public, seen)
