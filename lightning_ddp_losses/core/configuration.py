"""The configuration of a module, as ranks compare it in each call: what was set from outside.

Ranks with different options compute no common loss. A walk over the attributes of a module reads three kinds of values:

* *Configuration* was set from outside: options, the training mode, a temperature that is annealed. Ranks compare it.
* *State* was changed by the module's own forward: counters, running means, queues. It is followed and not compared, as ranks may hold
  different values. ``Configuration.follow`` notes it after each forward.
* What cannot be read (an open file, an object of a library) is not compared, nor is the number of a rank or a device.

A walk is made if an attribute is another object than at the last walk, or if a container, a tensor or an object was changed in place.
Text and hash are made if a value of the walk differs. Contents of tensors are hashed at the first walk, and when a tensor that is no buffer
was written to from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import hashlib
import inspect
import numbers
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import compat, inputs

AttributeKey: TypeAlias = tuple[str, str]
"""Path of a module, and the name of an attribute. An empty name stands for the class of the module."""

_READ_CHARACTERS = 2000  # of a configuration, in an error
_MOST_ITEMS = 1_000  # in a value: a longer container is data
_DEEPEST = 4  # containers and objects inside each other
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, range, slice)
_PLAIN_TYPES = frozenset(_PLAIN)
# what torch, and patches of methods, keep in a module
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}
# of pytorch-metric-learning's memory, which a checkpoint restores
_COUNTERS = frozenset({"queue_idx", "has_been_filled"})
# tensors that hold a loss's earlier batches
_MEMORIES = frozenset({"embedding_memory", "label_memory", "curr_batch_idx", "position", "hist_", "bank_ptr"})
# numbers of a process, by name: not compared, wherever they are
_OF_PROCESSES = frozenset(
    {"rank", "local_rank", "global_rank", "node_rank", "world_rank", "process_index", "gpu", "gpu_id", "device_id"}
)
_PACKAGE = __name__.partition(".")[0]
_INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))


class Configuration:
    """The options of one module that were set from outside. They must be equal on all ranks.

    A copy or a pickle compares with the same earlier values as its original.

    Attributes:
        walks: Number of walks: as long as it stays, nothing has changed.
        unread: Paths of the attributes that cannot be read, and are not compared.
    """

    def __init__(self) -> None:
        self._options: dict[AttributeKey, str] = {}  # from outside, as text
        self._last: dict[AttributeKey, Any] | None = None  # values of the last walk
        self._digest = ""
        self._snapshot = _Snapshot()
        self.walks = 0
        self.unread: tuple[str, ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether it was read before."""
        return self._last is not None

    def read(self, module: nn.Module) -> str:
        """Return the configuration for an error that shows how ranks differ, and a hash of all of it."""
        if self._snapshot.is_same(module):
            return self._digest
        if not self.is_read:
            self._options = {key: _shown(key[1], value) for key, value in _fixed_values(module)}
        last, values = self._last or {}, self._walk(module)
        for key, value in values.items():
            are_nan = last.get(key) != last.get(key) and value != value  # noqa: PLR0124 - NaN differs from itself
            if key not in last or (last[key] != value and not are_nan):
                self._options[key] = _shown(key[1], value)
        for key in last.keys() - values.keys():
            self._options.pop(key, None)
        self._digest = _digest(self._options)
        return self._digest

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return parameters and buffers of the module that was read last, one that is held twice twice."""
        parameters: list[Tensor] = []
        buffers: list[Tensor] = []
        for own_parameters, own_buffers in self._snapshot.slots:
            parameters += [parameter for parameter in own_parameters.values() if parameter is not None]
            buffers += [buffer for buffer in own_buffers.values() if buffer is not None]
        return parameters, buffers

    def follow(self, module: nn.Module) -> None:
        """Note the values after the module's own forward. What it changed is state."""
        if self.is_read and not self._snapshot.is_same(module):
            self._walk(module)

    def _walk(self, module: nn.Module) -> dict[AttributeKey, Any]:
        found = dict(_values_of(module))
        values = {key: value for key, value in found.items() if value is not _UNREAD}
        self.unread = tuple(".".join(filter(None, key)) for key in found.keys() - values.keys())
        self._last, self._snapshot = values, _Snapshot(module, values)
        self.walks += 1
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_snapshot": _Snapshot()}


class _Snapshot:
    """The attribute values of a walk. To compare them by identity takes much less time than a walk.

    Args:
        module: The module. None: no walk was made.
        values: What the walk has read.

    Attributes:
        slots: Parameters and buffers by name, of the module and of each one inside it.
    """

    def __init__(self, module: nn.Module | None = None, values: Mapping[AttributeKey, Any] | None = None) -> None:
        self._module = module
        self._parts: list[tuple[Callable[[], Collection[Any]], tuple[Any, ...]]] = []
        self.slots: list[tuple[Mapping[str, Tensor | None], Mapping[str, Tensor | None]]] = []
        for each in () if module is None else module.modules():
            self.slots.append((compat.parameter_slots(each), compat.buffer_slots(each)))
            attributes = vars(each)
            # a metric's states are other objects after each update
            own: Callable[[], Collection[Any]] = attributes.values
            if _is_metric(each):
                own = partial(_options_of, attributes, [name for name in attributes if _may_be_option(each, name)])
            slots = attributes["_modules"].values, attributes["_parameters"].values
            self._parts += [(part, tuple(part())) for part in (own, *slots)]
        # values that may change in place
        modules = {} if module is None else dict(module.named_modules())
        changeable = [(key, read) for key, read in (values or {}).items() if not isinstance(read, (*_PLAIN, _Shape))]
        self._read = [(vars(modules[path])[name], read) for (path, name), read in changeable]

    def is_same(self, module: nn.Module) -> bool:
        """Return whether a walk of this module would find the same values."""
        if self._module is not module:
            return False
        for part, before in self._parts:
            now = part()
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return all(_read(value) == read for value, read in self._read)


def _options_of(attributes: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    return [attributes.get(name) for name in names]


def _digest(options: Mapping[AttributeKey, str]) -> str:
    modules: dict[str, list[str]] = {}
    for path, name in sorted(options):
        text = options[path, name]
        settings = modules.setdefault(path, [])
        if not name:
            modules[path] = [text, *settings]
        # of the modules inside, only a mode of its own is shown
        elif name != "training" or not path or text != options.get(("", "training")):
            settings.append(text)
    shown = [f"{path or 'loss'}: {kind}({', '.join(settings)})" for path, (kind, *settings) in modules.items()]
    text = "; ".join(shown)
    return f"{text[:_READ_CHARACTERS]} #{_hash(text.encode())}"


def _shown(name: str, value: Any) -> str:
    """Return a setting as text. Shapes and hashes follow the name immediately."""
    text = repr(value)
    return f"{name}{text}" if not name or isinstance(value, (_Shape, _Written)) else f"{name}={text}"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


# ---------------------------------------------------------------------- the walk


def _values_of(root: nn.Module) -> Iterator[tuple[AttributeKey, Any]]:
    """Yield the values of a module and of all modules inside it, each once. Those that cannot be read are ``_UNREAD``."""
    for path, module in root.named_modules():
        yield (path, ""), _Name(type(module).__name__)
        for name, value in vars(module).items():
            if _may_be_option(module, name):
                yield (path, name), _read(value)
        for name, parameter in compat.parameter_slots(module).items():
            if parameter is not None and not is_lazy(parameter):
                yield (path, name), _Shape(parameter.shape)


def _may_be_option(module: nn.Module, name: str) -> bool:
    """Return whether an attribute may be an option that is set from outside."""
    attributes = vars(module)
    if name in _OF_MODULES or name in _COUNTERS or name in _MEMORIES or _is_of_process(name):
        return False
    if _is_metric(module):  # others may change in each update
        return name.lstrip("_") in _constructor_names(type(module)) and name not in attributes["_defaults"]  # type: ignore[arg-type]
    # what a library keeps in private attributes is no option
    is_private = name[0] == "_" and not _is_of_program(type(module).__module__)
    return not is_private and name not in attributes.get("_record_these_stats", ())


def _fixed_values(root: nn.Module) -> Iterator[tuple[AttributeKey, Any]]:
    """Yield values that are compared once: buffers, which DDP may write to, and what a metric computes from its options."""
    for path, module in root.named_modules():
        if not _is_metric(module):
            for name, buffer in compat.buffer_slots(module).items():
                if name not in _MEMORIES and _can_be_hashed(buffer):
                    yield (path, name), _Written(buffer)
            continue
        for name, value in vars(module).items():
            is_public = name[0] != "_" and name not in _OF_MODULES and name not in vars(module)["_defaults"]
            if is_public and isinstance(value, (*_PLAIN, list, tuple, dict)):
                yield (path, name), _read(value)


def _is_metric(module: nn.Module) -> bool:
    attributes = vars(module)
    return isinstance(attributes.get("_defaults"), dict) and "_reductions" in attributes


def _is_of_process(name: object) -> bool:
    """Return whether a name says that its value is one of this process."""
    return isinstance(name, str) and name.strip("_") in _OF_PROCESSES


def _can_be_hashed(tensor: Tensor | None) -> bool:
    if tensor is None or is_lazy(tensor) or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta"


@functools.lru_cache(maxsize=256)
def _constructor_names(cls: Any) -> frozenset[str]:
    """Return the names of all parameters that a class and its bases are made with."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            names.update(inspect.signature(vars(base)["__init__"]).parameters)
    return frozenset(names)


# ---------------------------------------------------------------------- a value


class _Name(str):
    """A name, which is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class _Shape(tuple):  # type: ignore[type-arg]
    """The shape of a parameter."""

    __slots__ = ()


class _Unread:
    """Stands for a value that cannot be read, or that is not compared."""

    def __repr__(self) -> str:
        return "..."

    def __reduce__(self) -> str:
        return "_UNREAD"


_UNREAD = _Unread()


class _Unknown:
    """Stands in a copy for a tensor of the original: any tensor may have replaced it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class _Written:
    """A tensor, array or long container that is compared by identity, and by its count of writes or its length.

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
            self._version = compat.tensor_version(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Written):
            return NotImplemented
        return self._value is other._value and self._version == other._version

    def __repr__(self) -> str:
        if hasattr(self._value, "tobytes"):
            return f"#{_hash(self._value.tobytes())}"
        if not isinstance(self._value, Tensor):
            items = [item if isinstance(item, _PLAIN) else type(item).__qualname__ for item in self._value]
            return f"#{_hash(repr(items).encode())}"
        data = self._value.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        return f"#{_hash(data.view(torch.uint8).numpy().tobytes())}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unknown, ()


def _read(value: Any) -> Any:
    """Return a copy of a value whose changes can be seen, or ``_UNREAD``."""
    if type(value) in _PLAIN_TYPES:
        return value
    try:
        return _Reader().read(value, 0)
    except Exception:  # an object of the user's may refuse to be looked at
        return _UNREAD


class _Reader:
    """Reads a value and, inside it, at most ``_MOST_ITEMS`` others."""

    def __init__(self) -> None:
        self._left = _MOST_ITEMS

    def read(self, value: Any, depth: int) -> Any:
        """Return a copy of a value that lies so many values deep."""
        if isinstance(value, (*_PLAIN, numbers.Number)):
            return value
        if isinstance(value, (enum.Enum, type, torch.device)):
            # the number of a device is where a rank computes
            return _Name(value.type if isinstance(value, torch.device) else getattr(value, "__qualname__", value))
        if depth == _DEEPEST or isinstance(value, (nn.Parameter, nn.Module)):
            return _UNREAD
        if isinstance(value, Tensor):
            return _Written(value) if _can_be_hashed(value) else _UNREAD
        if inputs.is_array(value):
            return _Written(value) if value.ndim else value.item()
        return self._read_parts(value, depth + 1)

    def _read_parts(self, value: Any, depth: int) -> Any:
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._read_container(value, depth)
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)):
            return self._read_function(value, depth)
        if hasattr(value, "__dict__") and _only_holds_values(type(value)):  # type: ignore[arg-type]
            return _Name(type(value).__name__), self._read_container(vars(value), depth)
        return _UNREAD

    def _read_container(self, container: Any, depth: int) -> Any:
        if len(container) > self._left:
            return _Written(container) if len(container) > _MOST_ITEMS else _UNREAD
        self._left -= len(container)
        if isinstance(container, dict):
            compared = {key: item for key, item in container.items() if not _is_of_process(key)}
            keys = [key if isinstance(key, _PLAIN) else type(key).__qualname__ for key in compared]
            return dict(zip(keys, [self.read(item, depth) for item in compared.values()], strict=True))
        items = [self.read(item, depth) for item in container]
        if isinstance(container, (set, frozenset)):
            return sorted(items, key=repr)
        return tuple(items) if isinstance(container, tuple) else items

    def _read_function(self, function: Any, depth: int) -> Any:
        """Return what a function carries: its defaults, variables around it, names and numbers in its code, but no tensors."""
        if isinstance(function, types.MethodType):
            function = function.__func__
        if isinstance(function, partial):
            return [self.read(part, depth) for part in (function.func, function.args, function.keywords)]
        name = _Name(getattr(function, "__qualname__", ""))
        if not isinstance(function, types.FunctionType) or not _is_of_program(function.__module__ or ""):
            return name
        code, carried = function.__code__, [function.__defaults__, function.__kwdefaults__]
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable without a value yet
                if not _is_of_process(variable):
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
    """Return whether objects of a class have attributes and do nothing with them, as a configuration. Others may be meters or logs."""
    if issubclass(cls, (types.SimpleNamespace, argparse.Namespace)):
        return True
    bases = [base for base in cls.__mro__ if base is not object]
    names = [name for base in bases for name in vars(base) if callable(vars(base)[name])]
    return all(_is_of_program(base.__module__) for base in bases) and all(name.startswith("__") for name in names)


@functools.lru_cache(maxsize=1024)
def _is_of_program(module: str) -> bool:
    """Return whether a Python module is part of the user's program. Objects of libraries may hold paths, times or caches."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # a notebook is a program without a file
        return module == "__main__"
    return module.partition(".")[0] != _PACKAGE and not file.startswith(_INSTALLED)
