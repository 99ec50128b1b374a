"""The values of options, read such that changes can be detected: copies of plain values and containers, tensors by their write count.

Values that cannot be read (an open file, an object of a library) are ``UNREAD``.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import hashlib
import numbers
import sys
import sysconfig
import types
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import inputs, torch_compat

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, range, slice)
"""Types of values that cannot change in place."""

_PLAIN_TYPES = frozenset(PLAIN)
_MOST_ITEMS = 1_000  # limit for a value: a longer container is data
_DEEPEST = 4  # nesting depth of containers and objects
# names of values that belong to a process, which are not compared wherever they occur
_OF_PROCESSES = frozenset(
    {"rank", "local_rank", "global_rank", "node_rank", "world_rank", "process_index", "gpu", "gpu_id", "device_id"}
)
_PACKAGE = __name__.partition(".")[0]
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


def hash_of(data: bytes) -> str:
    """Return a short hash."""
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def is_of_process(name: object) -> bool:
    """Return whether a name indicates that its value belongs to this process."""
    return isinstance(name, str) and name.strip("_") in _OF_PROCESSES


def can_be_hashed(tensor: Tensor | None) -> bool:
    """Return whether the content of a tensor can be read as bytes."""
    if tensor is None or is_lazy(tensor) or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta"


class Name(str):
    """A name that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class Shape(tuple):  # type: ignore[type-arg]
    """The shape of a parameter."""

    __slots__ = ()


class _Unread:
    """Represents a value that cannot be read, or that is not compared."""

    def __repr__(self) -> str:
        return "..."

    def __reduce__(self) -> str:
        return "UNREAD"


UNREAD = _Unread()


class _Copied:
    """Replaces, in a copy, the value that the original was compared by. A tensor or container of the copy is equal if its content is.

    Args:
        text: Hash of the content. None if it had changed since it was read.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __eq__(self, other: object) -> bool:
        return self._text is not None and repr(other) == self._text

    def __repr__(self) -> str:
        return self._text or "..."

    def __reduce__(self) -> tuple[Any, ...]:
        return _Copied, (self._text,)


class Written:
    """A tensor, array or long container that is compared by identity, and by its write count or its length.

    Its text is a hash of its content.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_value", "_version")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = 0
        if not isinstance(value, Tensor):
            self._version = len(value)
        elif not value.is_inference():
            self._version = torch_compat.tensor_version(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Written):
            return NotImplemented
        return self._value is other._value and self._version == other._version

    def __repr__(self) -> str:
        if hasattr(self._value, "tobytes"):
            return f"#{hash_of(self._value.tobytes())}"
        if not isinstance(self._value, Tensor):
            items = [item if isinstance(item, PLAIN) else type(item).__qualname__ for item in self._value]
            return f"#{hash_of(repr(items).encode())}"
        data = self._value.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        return f"#{hash_of(data.view(torch.uint8).numpy().tobytes())}"

    def __reduce__(self) -> tuple[Any, ...]:
        is_as_read = self == Written(self._value)
        return _Copied, (repr(self) if is_as_read else None,)


def read_value(value: Any) -> Any:
    """Return a copy of a value in which changes can be detected, or ``UNREAD``."""
    if type(value) in _PLAIN_TYPES:
        return value
    try:
        return _Reader().read(value, 0)
    except Exception:  # a user's object may raise an error when it is inspected
        return UNREAD


class _Reader:
    """Reads a value and at most ``_MOST_ITEMS`` values inside it."""

    def __init__(self) -> None:
        self._left = _MOST_ITEMS

    def read(self, value: Any, depth: int) -> Any:
        """Return a copy of a value at the given nesting depth."""
        if isinstance(value, (*PLAIN, numbers.Number)):
            return value
        if isinstance(value, (enum.Enum, type, torch.device)):
            # the index of a device depends on the rank
            return Name(value.type if isinstance(value, torch.device) else getattr(value, "__qualname__", value))
        if depth == _DEEPEST or isinstance(value, (nn.Parameter, nn.Module)):
            return UNREAD
        if isinstance(value, Tensor):
            return Written(value) if can_be_hashed(value) else UNREAD
        if inputs.is_array(value):
            return Written(value) if value.ndim else value.item()
        return self._read_parts(value, depth + 1)

    def _read_parts(self, value: Any, depth: int) -> Any:
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._read_container(value, depth)
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)):
            return self._read_function(value, depth)
        if hasattr(value, "__dict__") and _only_holds_values(type(value)):  # type: ignore[arg-type]
            return Name(type(value).__name__), self._read_container(vars(value), depth)
        return UNREAD

    def _read_container(self, container: Any, depth: int) -> Any:
        if len(container) > self._left:
            return Written(container) if len(container) > _MOST_ITEMS else UNREAD
        self._left -= len(container)
        if isinstance(container, dict):
            compared = {key: item for key, item in container.items() if not is_of_process(key)}
            keys = [key if isinstance(key, PLAIN) else type(key).__qualname__ for key in compared]
            return dict(zip(keys, [self.read(item, depth) for item in compared.values()], strict=True))
        items = [self.read(item, depth) for item in container]
        if isinstance(container, (set, frozenset)):
            return sorted(items, key=repr)
        return tuple(items) if isinstance(container, tuple) else items

    def _read_function(self, function: Any, depth: int) -> Any:
        """Return what a function contains: its defaults, closure variables, and names and numbers in its code, but not tensors."""
        if isinstance(function, types.MethodType):
            function = function.__func__
        if isinstance(function, partial):
            return [self.read(part, depth) for part in (function.func, function.args, function.keywords)]
        name = Name(getattr(function, "__qualname__", ""))
        if not isinstance(function, types.FunctionType) or not is_of_program(function.__module__ or ""):
            return name
        code, carried = function.__code__, [function.__defaults__, function.__kwdefaults__]
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an unassigned variable
                if not is_of_process(variable):
                    carried.append(cell.cell_contents)
        constants = [constant for constant in code.co_consts if isinstance(constant, (bool, int, float))]
        return [
            name,
            code.co_names,
            constants,
            *(self.read(part, depth) for part in carried if not inputs.is_array(part)),
        ]


@functools.lru_cache(maxsize=1024)
def _only_holds_values(cls: Any) -> bool:
    """Return whether a class only holds attributes, like a configuration. Objects of other classes may be meters or logs."""
    if issubclass(cls, (types.SimpleNamespace, argparse.Namespace)):
        return True
    bases = [base for base in cls.__mro__ if base is not object]
    names = [name for base in bases for name in vars(base) if callable(vars(base)[name])]
    return all(is_of_program(base.__module__) for base in bases) and all(name.startswith("__") for name in names)


@functools.lru_cache(maxsize=1024)
def is_of_program(module: str) -> bool:
    """Return whether a Python module is part of the user's program. Objects of libraries may hold paths, times or caches."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # a notebook does not have a file
        return module == "__main__"
    return module.partition(".")[0] != _PACKAGE and not file.startswith(_INSTALLED)
