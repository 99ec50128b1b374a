"""The configuration of a module, as ranks compare it in each call: everything that was set from outside.

Ranks with different options cannot compute a common loss. A walk over the attributes of a module distinguishes three kinds of values:

* *Configuration* was set from outside: options, the training mode, a temperature that is annealed. Ranks compare it.
* *State* was changed by the module's own forward: counters, running means, queues. It is tracked but not compared, because ranks may hold
  different values. ``Configuration.follow`` records it after each forward.
* Values that cannot be read (an open file, an object of a library) are not compared, and neither is the number of a rank or a device.

Each call compares the attributes with those of the last call by identity, and rereads those that were replaced or changed in place. Text
and hash are only computed if a value differs. Contents of tensors are hashed in the first call, and when a tensor other than a buffer was
written to from outside.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.class_code import names_written
from lightning_ddp_losses.core.option_values import (
    PLAIN,
    UNREAD,
    Name,
    Shape,
    Written,
    can_be_hashed,
    hash_of,
    is_of_process,
    is_of_program,
    read_value,
)

AttributeKey: TypeAlias = tuple[str, str]
"""Path of a module, and the name of an attribute. An empty name represents the class of the module."""

_READ_CHARACTERS = 2000  # limit for a configuration in an error
# attributes that torch, and patched methods, store in a module
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}
# counters of pytorch-metric-learning's memory, which a checkpoint restores
_COUNTERS = frozenset({"queue_idx", "has_been_filled"})
# tensors that hold a loss's earlier batches
_MEMORIES = frozenset({"embedding_memory", "label_memory", "curr_batch_idx", "position", "hist_", "bank_ptr"})


class Configuration:
    """The options of one module that were set from outside, which must be equal on all ranks.

    A copy or a pickle compares with the same earlier values as its original.

    Attributes:
        changes: Number of times a change was detected. As long as it is constant, nothing has changed.
        unread: Paths of the attributes that cannot be read and are not compared.
    """

    def __init__(self) -> None:
        self._options: dict[AttributeKey, str] = {}  # values set from outside, as text
        self._last: dict[AttributeKey, Any] | None = None  # the most recently read values
        self._digest = ""
        self._snapshot = _Snapshot()
        self.changes = 0
        self.unread: tuple[str, ...] = ()

    @property
    def is_read(self) -> bool:
        """Whether the configuration was read before."""
        return self._last is not None

    def read(self, module: nn.Module) -> str:
        """Return the configuration as text for an error that shows how ranks differ, with a hash of the complete configuration."""
        if self._snapshot.is_same(module):
            return self._digest
        if not self.is_read:
            self._options = {key: _shown_setting(key[1], value) for key, value in _fixed_values(module)}
        last = self._last or {}
        values = self._walk(module)
        for key, value in values.items():
            are_nan = last.get(key) != last.get(key) and value != value  # noqa: PLR0124 - NaN differs from itself
            if key not in last or (last[key] != value and not are_nan):
                self._options[key] = _shown_setting(key[1], value)
        for key in last.keys() - values.keys():
            self._options.pop(key, None)
        self._digest = _digest(self._options)
        return self._digest

    def weights(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return parameters and buffers of the module that was read last. Shared ones appear once for each slot."""
        buffers: list[Tensor] = []
        for slots in self._snapshot.buffer_slots:
            buffers += [buffer for buffer in slots.values() if buffer is not None]
        return self._snapshot.parameters, buffers

    def follow(self, module: nn.Module) -> None:
        """Record the values after the module's own forward. Whatever forward changed is state."""
        if self._last is not None and not self._snapshot.is_same(module):
            self._walk(module)

    def _walk(self, module: nn.Module) -> dict[AttributeKey, Any]:
        if not self._snapshot.update_(module):
            self._snapshot = _Snapshot(module)
        values: dict[AttributeKey, Any] = {}
        unread = []
        for key, value in self._snapshot.values.items():
            if value is UNREAD:
                unread.append(".".join(filter(None, key)))
            else:
                values[key] = value
        self._last = values
        self.unread = tuple(unread)
        self.changes += 1
        return values

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_snapshot": _Snapshot()}


class _Snapshot:
    """The most recently read attributes of a module. Comparing them by identity takes much less time than reading them.

    Args:
        module: The module. If None, the snapshot is empty.

    Attributes:
        values: Their values. Some are ``UNREAD``.
        parameters: Parameters of the module and of each one inside it.
        buffer_slots: Their buffers by name. A forward may replace them.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self.values: dict[AttributeKey, Any] = {}
        self.parameters: list[Tensor] = []
        self.buffer_slots: list[Mapping[str, Tensor | None]] = []
        self._attributes: list[tuple[dict[str, Any], list[str]]] = []  # per module, with the names of its options
        self._named: list[Mapping[str, Any]] = []  # attributes and buffers, whose names are compared
        self._keys: list[AttributeKey | None] = []  # key of each object, or None for a module or a parameter
        for path, each in () if module is None else module.named_modules():
            attributes = vars(each)
            parameters = torch_compat.parameter_slots(each)
            names = [name for name in attributes if _may_be_option(each, name)]
            self._attributes.append((attributes, names))
            self._keys += [(path, name) for name in names]
            self._keys += [None] * (len(attributes["_modules"]) + len(parameters))
            buffers = torch_compat.buffer_slots(each)
            self.buffer_slots.append(buffers)
            if not _is_metric(each):  # the states of a metric may be other attributes after an update
                self._named += [attributes, buffers]
                if buffers:
                    self.values[path, "_buffers"] = tuple(buffers)
            self.values[path, ""] = Name(type(each).__name__)
            for name, parameter in parameters.items():
                if parameter is not None:
                    self.parameters.append(parameter)
                    if not is_lazy(parameter):
                        self.values[path, name] = Shape(parameter.shape)
        self._names = [[*attributes] for attributes in self._named]
        self._objects = self._current_objects()
        self._changeable: list[tuple[AttributeKey, Any]] = []
        self._read_([self] * len(self._objects))

    def is_same(self, module: nn.Module) -> bool:
        """Return whether the attributes of this module would be read as the same values."""
        objects = self._current_objects()
        if not self._has_names_of(module) or len(objects) != len(self._objects):
            return False
        if not all(map(operator.is_, objects, self._objects)):
            return False
        return all(read_value(option) == self.values[key] for key, option in self._changeable)

    def update_(self, module: nn.Module) -> bool:
        """Reread changed values. Return whether this suffices, as modules, parameters and names of attributes are unchanged."""
        before = self._objects
        objects = self._current_objects()
        if not self._has_names_of(module) or len(objects) != len(before):
            return False
        slots = [now is earlier for key, now, earlier in zip(self._keys, objects, before, strict=True) if key is None]
        if not all(slots):
            return False
        self._objects = objects
        self._read_(before)
        return True

    def _has_names_of(self, module: nn.Module) -> bool:
        return self._module is module and self._names == [[*attributes] for attributes in self._named]

    def _current_objects(self) -> list[Any]:
        objects: list[Any] = []
        for attributes, names in self._attributes:
            objects += map(attributes.get, names)
            objects += attributes["_modules"].values()
            objects += attributes["_parameters"].values()
        return objects

    def _read_(self, before: list[Any]) -> None:
        """Read the options that were replaced, or that may have changed in place."""
        self._changeable = []
        for key, option, earlier in zip(self._keys, self._objects, before, strict=True):
            if key is None:
                continue
            if option is not earlier or not isinstance(self.values[key], PLAIN):
                self.values[key] = read_value(option)
            value = self.values[key]
            if value is not UNREAD and not isinstance(value, PLAIN):
                self._changeable.append((key, option))


def _digest(options: Mapping[AttributeKey, str]) -> str:
    modules: dict[str, list[str]] = {}
    for path, name in sorted(options):
        text = options[path, name]
        settings = modules.setdefault(path, [])
        if not name:
            modules[path] = [text, *settings]
        # for inner modules, the mode is only shown if it differs from the mode of the outer one
        elif name != "training" or not path or text != options.get(("", "training")):
            settings.append(text)
    shown = [f"{path or 'loss'}: {kind}({', '.join(settings)})" for path, (kind, *settings) in modules.items()]
    text = "; ".join(shown)
    return f"{text[:_READ_CHARACTERS]} #{hash_of(text.encode())}"


def _shown_setting(name: str, value: Any) -> str:
    """Return a setting as text, in which shapes and hashes follow the name immediately."""
    text = repr(value)
    return f"{name}{text}" if not name or isinstance(value, (Shape, Written)) else f"{name}={text}"


# ---------------------------------------------------------------------- which attributes are options


def _may_be_option(module: nn.Module, name: str) -> bool:
    """Return whether an attribute may be an option that is set from outside."""
    attributes = vars(module)
    if name in _OF_MODULES or name in _COUNTERS or name in _MEMORIES or is_of_process(name):
        return False
    if _is_metric(module):  # each update may change other attributes
        cls: Any = type(module)
        is_given = name.lstrip("_") in _constructor_names(cls)
        return is_given and name not in attributes["_defaults"] and name not in names_written(cls, "update")
    # private attributes of a library's class are not options
    is_private = name[0] == "_" and not is_of_program(type(module).__module__)
    return not is_private and name not in attributes.get("_record_these_stats", ())


def _fixed_values(root: nn.Module) -> Iterator[tuple[AttributeKey, Any]]:
    """Yield values that are compared once: buffers, which DDP may write to, and values that a metric computes from its options."""
    for path, module in root.named_modules():
        if not _is_metric(module):
            for name, buffer in torch_compat.buffer_slots(module).items():
                if name not in _MEMORIES and can_be_hashed(buffer):
                    yield (path, name), Written(buffer)
            continue
        for name, value in vars(module).items():
            is_public = name[0] != "_" and name not in _OF_MODULES and name not in vars(module)["_defaults"]
            if is_public and isinstance(value, (*PLAIN, list, tuple, dict)):
                yield (path, name), read_value(value)


def _is_metric(module: nn.Module) -> bool:
    attributes = vars(module)
    return isinstance(attributes.get("_defaults"), dict) and "_reductions" in attributes


@functools.lru_cache(maxsize=256)
def _constructor_names(cls: Any) -> frozenset[str]:
    """Return the names of all constructor parameters of a class and its bases."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base) and base is not object:
            names.update(inspect.signature(vars(base)["__init__"]).parameters)
    return frozenset(names)
