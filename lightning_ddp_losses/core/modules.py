"""Modules: patched methods, and modules that are not registered.

A patch replaces one method of one module for the duration of a fit, without changing the module's type. It is stored in the instance under
the method's name: attributes, parameter names, hooks and ``isinstance`` behave as for the plain module. A copy or a pickle of the module
has the plain method again.

``nn.Module`` only registers modules in its attributes. Other places that hold modules (a list, a dict, a closure, a callback) are searched
by this module, because Lightning does not move, synchronise or save unregistered modules. *Hidden* modules are held by an optimizer (or run
with gradients inside ``training_step``) without being in ``module.parameters()``. Copies that are not in an optimizer are ignored.

``ModuleContents`` stores the result of a walk over a module, and repeats the walk when the content of a slot changes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_losses.core import precision, torch_compat
from lightning_ddp_losses.core.transparent import all_modules, wrapped_module

_MAX_OBJECTS = 20_000  # number of objects to inspect
_MAX_ITEMS = 1_000  # items of one container: a longer one is data
_MAX_DEPTH = 8
_LIBRARIES = frozenset({"torch", "lightning", "builtins", "numpy", "collections", "rich", "logging"})
_BACK_REFERENCES = ("_trainer", "trainer", "_fabric")
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, Tensor)


# ---------------------------------------------------------------------- methods


F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Run the function itself outside torch.compile. Functions that it calls may still be compiled."""
    return cast("F", torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


def eager_recursive(function: F) -> F:
    """Run the function, and everything that it calls, outside torch.compile."""
    return cast("F", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _plain_method(module: nn.Module, name: str) -> Callable[..., Any]:
    return types.MethodType(getattr(type(module), name), module)


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


class MethodPatch:
    """Replaces a method of one module. A subclass defines the call. Copies and pickles of the module contain the original method.

    Args:
        module: Module that has the method.
        name: Name of the method.

    Attributes:
        synchronises: Whether the method's result depends on the rows of all ranks.
    """

    synchronises: ClassVar[bool] = False

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module = module
        self._name = name
        self._original: Callable[..., Any] | None = module.__dict__.get(name)

    def install(self) -> None:
        """Replace the method."""
        self.module.__dict__[self._name] = self

    def remove(self) -> None:
        """Restore the method, unless other code has replaced it since."""
        if self.module.__dict__.get(self._name) is self:
            del self.module.__dict__[self._name]
            if self._original is not None:
                self.module.__dict__[self._name] = self._original

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original method."""
        if self._original is not None:
            return self._original(*args, **kwargs)
        return getattr(type(self.module), self._name)(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._original is not None:
            return _same, (self._original,)
        return _plain_method, (self.module, self._name)


def synchronises(module: nn.Module) -> bool:
    """Return whether a patch of this package computes the module's forward over the rows of all ranks."""
    return bool(getattr(module.__dict__.get("forward"), "synchronises", False))


def plain_norms(module: nn.Module) -> dict[str, Any]:
    """Return torch's plain batch-norm layers, which use only this rank's rows, by path. Subclasses may synchronise and are excluded."""
    return {
        name: inner for name, inner in module.named_modules() if type(inner) in _PLAIN_NORMS and not synchronises(inner)
    }


# ---------------------------------------------------------------------- registered modules and parameters


class ModuleContents:
    """The modules and parameters inside a module. Each step compares their slots, and repeats the walk only if one has changed.

    Args:
        module: Module to inspect.

    Attributes:
        modules: The module and all modules inside it, each once.
        parameters: Their parameters. A shared parameter appears once for each slot.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.modules: list[nn.Module] = []
        self.parameters: list[Tensor] = []
        self._last_slots: list[object] | None = None

    def refresh(self) -> bool:
        """Update the contents, and return whether something was added, removed or replaced since the last call."""
        slots, last = self._slots(), self._last_slots
        if last is not None and len(slots) == len(last) and all(map(is_, slots, last)):
            return False
        self.modules = precision.modules_of(self._module)
        self.parameters = precision.parameters_in(self.modules)
        self._last_slots = self._slots()
        return True

    def _slots(self) -> list[object]:
        """Return the contents of the slots of the known modules. The loops run in C."""
        return [*torch_compat.all_slots(self.modules, "modules"), *torch_compat.all_slots(self.modules, "parameters")]

    def __reduce__(self) -> tuple[Any, ...]:  # a copy walks over the copied module
        return ModuleContents, (self._module,)


# ---------------------------------------------------------------------- modules that are not registered


def objects_beside_module(trainer: Any) -> dict[str, Any]:
    """Return the objects of a trainer that may hold modules, by path: its callbacks and its data module."""
    callbacks = getattr(trainer, "callbacks", None) or []
    found = {f"callbacks[{index}] ({type(callback).__name__})": callback for index, callback in enumerate(callbacks)}
    found["datamodule"] = getattr(trainer, "datamodule", None)
    return found


def unregistered_modules(module: nn.Module, elsewhere: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost unregistered modules with their paths, each once, breadth first.

    Args:
        module: Module to search, with its submodules.
        elsewhere: Other objects to search, by the name that paths should start with.
    """
    seen = {id(inner) for inner in all_modules(module)}
    queue: list[tuple[str, Any, int]] = []
    for name, inner in module.named_modules():
        prefix = f"self.{name}" if name else "self"
        queue += [(f"{prefix}.{key}", value, 0) for key, value in _own_attributes(inner)]
    queue += [(name, value, 0) for name, value in elsewhere.items()]
    # the queue grows while it is iterated, and only contains values that can lead to a module
    for path, value, depth in queue:
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            seen.update(id(inner) for inner in all_modules(value))
            yield path, value
        elif depth < _MAX_DEPTH:
            room = min(_MAX_ITEMS, _MAX_OBJECTS - len(queue))
            items = itertools.islice(_inside(path, value), max(room, 0))
            queue += [(p, v, depth + 1) for p, v in items if not isinstance(v, _PLAIN)]


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes, without those that nn.Module and Lightning store in it."""
    kept_by_others = ("_modules", "_parameters", "_buffers", "_trainer", "_fabric", "forward")
    for key, value in vars(module).items():
        if key not in kept_by_others and not isinstance(value, MethodPatch):
            yield key, value
    wrapped = wrapped_module(module)
    if wrapped is not None:
        yield from _own_attributes(wrapped)


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    # measured: isinstance(value, Mapping) for every class takes a second, because it walks through all subclasses of Mapping
    if hasattr(type(value), "items") and isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func
        yield from ((f"{path}.args[{i}]", item) for i, item in enumerate(value.args))
        yield from ((f"{path}.keywords[{key!r}]", item) for key, item in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty cell
                yield f"{path}.<closure>.{name}", cell.cell_contents
        yield from ((f"{path}.<default {i}>", item) for i, item in enumerate(value.__defaults__ or ()))
    elif _may_hold(type(value).__module__):
        yield from ((f"{path}.{key}", item) for key, item in _vars(value).items())


def _may_hold(package: str) -> bool:
    """Return whether an object of a class from that package may hold a user's module (Lightning's own callbacks may)."""
    return package.startswith("lightning.pytorch.callbacks") or package.split(".", maxsplit=1)[0] not in _LIBRARIES


def _vars(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    if not isinstance(found, dict):
        return {}
    return {key: item for key, item in found.items() if key not in _BACK_REFERENCES}


@dataclass(frozen=True)
class Hidden:
    """Result of the search.

    Attributes:
        optimised: Unregistered modules with parameters in an optimizer, by path.
        idle: Other unregistered modules with trainable parameters, by path.
        loose: Descriptions of optimised parameters that do not belong to any module within reach of the search.
    """

    optimised: dict[str, nn.Module]
    idle: dict[str, nn.Module]
    loose: list[str]


def find_hidden(module: nn.Module, optimizers: Iterable[Optimizer], elsewhere: Mapping[str, Any]) -> Hidden:
    """Search the module's attributes, and other roots, for unregistered trainable modules.

    Args:
        module: The LightningModule.
        optimizers: Its optimizers.
        elsewhere: Other objects to search, by the name that paths should start with (callbacks, data module).
    """
    registered = {id(p) for p in module.parameters()}
    # 1. optimised parameters that are not registered in the module
    unregistered: dict[int, str] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in registered:
                    place = f"optimizer {i}, group {j}"
                    unregistered[id(parameter)] = f"a parameter of shape {tuple(parameter.shape)} in {place}"
    # 2. the modules that hold them, and other trainable modules
    optimised: dict[str, nn.Module] = {}
    idle: dict[str, nn.Module] = {}
    for path, found in unregistered_modules(module, elsewhere):
        own = [p for p in found.parameters() if id(p) not in registered]
        if any(id(p) in unregistered for p in own):
            optimised[path] = found
            for p in own:
                unregistered.pop(id(p), None)
        elif any(p.requires_grad for p in own):
            idle[path] = found
    # 3. the remaining parameters do not belong to a module within reach
    return Hidden(optimised, idle, list(unregistered.values()))
