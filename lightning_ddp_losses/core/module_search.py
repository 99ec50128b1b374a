"""Modules that a module holds without having registered them: in a list, a dict, a closure, a callback.

``nn.Module`` sees only what is assigned to its attributes; whatever else holds modules is searched here.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core.forward_patch import MethodPatch

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 8
_LIBRARIES = frozenset({"torch", "lightning", "builtins", "numpy", "collections", "rich", "logging"})
_BACK_REFERENCES = ("_trainer", "trainer", "_fabric")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, Tensor)


def unregistered_modules(module: nn.Module, elsewhere: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Outermost unregistered modules with their paths, each once, breadth first.

    Args:
        module: Whose attributes are searched, and those of its submodules.
        elsewhere: Other objects to search, by the name that paths shall start with.
    """
    seen = {id(inner) for inner in module.modules()}
    queue: list[tuple[str, Any, int]] = []
    for name, inner in module.named_modules():
        prefix = f"self.{name}" if name else "self"
        queue += [(f"{prefix}.{key}", value, 0) for key, value in _attributes(inner)]
    queue += [(name, value, 0) for name, value in elsewhere.items()]
    for count, (path, value, depth) in enumerate(queue):
        if count > _MAX_OBJECTS:
            return
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            seen.update(id(inner) for inner in value.modules())
            yield path, value
        elif depth < _MAX_DEPTH:
            queue += [(p, v, depth + 1) for p, v in _inside(path, value)]


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes, without what nn.Module and Lightning keep there."""
    for key, value in vars(module).items():
        kept_by_others = ("_modules", "_parameters", "_buffers", "_trainer", "_fabric", "forward")
        if key not in kept_by_others and not isinstance(value, MethodPatch):
            yield key, value


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
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
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield f"{path}.<closure>.{name}", cell.cell_contents
        yield from ((f"{path}.<default {i}>", item) for i, item in enumerate(value.__defaults__ or ()))
    elif _may_hold(type(value).__module__):
        yield from ((f"{path}.{key}", item) for key, item in _vars(value).items())


def _may_hold(package: str) -> bool:
    """Whether an object of a class from that package may hold a user's module (Lightning's own callbacks may)."""
    return package.startswith("lightning.pytorch.callbacks") or package.split(".", maxsplit=1)[0] not in _LIBRARIES


def _vars(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return {k: v for k, v in found.items() if k not in _BACK_REFERENCES} if isinstance(found, dict) else {}
