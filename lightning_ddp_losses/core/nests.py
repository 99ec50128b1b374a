"""Nests: dicts, lists, tuples, named tuples and dataclasses of tensors, as batches are. Their parts by path, and how they are rebuilt."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor


def children_of(nest: Any) -> list[tuple[str, Any]] | None:
    """List the parts of a nest by key. None for a leaf, as a list of plain values (a column of strings) is."""
    if isinstance(nest, Mapping):
        return [(f"[{key!r}]", nest[key]) for key in nest]
    if _is_named_tuple(nest):
        return [(f".{name}", child) for name, child in zip(nest._fields, nest, strict=True)]
    if isinstance(nest, tuple) or (isinstance(nest, list) and any(map(_is_nest_or_array, nest))):
        return [(f"[{index}]", child) for index, child in enumerate(nest)]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [(f".{field.name}", getattr(nest, field.name)) for field in dataclasses.fields(nest)]
    return None


def rebuild_nest(nest: Any, children: Sequence[Any]) -> Any:
    """Return a nest like ``nest`` with other children, in the order of ``children_of``."""
    if _is_named_tuple(nest):
        return type(nest)(*children)
    if isinstance(nest, (tuple, list)):
        return type(nest)(children)
    if isinstance(nest, Mapping) and not isinstance(nest, MutableMapping):
        return type(nest)(dict(zip(nest, children, strict=True)))  # type: ignore[call-arg]
    # a copy keeps the factory of a defaultdict, and attributes of a dataclass that are no fields
    rebuilt: Any = copy.copy(nest)
    if isinstance(nest, MutableMapping):
        rebuilt.update(zip(nest, children, strict=True))
        return rebuilt
    for field, child in zip(dataclasses.fields(nest), children, strict=True):
        object.__setattr__(rebuilt, field.name, child)  # frozen ones too
    return rebuilt


def leaves(nest: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Walk the leaves of a nest, by path."""
    children = children_of(nest)
    if children is None:
        yield path, nest
        return
    for key, child in children:
        yield from leaves(child, f"{path}{key}")


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts, in order."""
    found, stack = list[Tensor](), [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            stack += item[::-1]
        elif isinstance(item, dict):
            stack += reversed(item.values())
    return found


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Rebuild a nest of tuples, lists and dicts with ``function`` of each tensor in its place."""
    if isinstance(tree, Tensor):
        return function(tree)
    # a class derived from these may hold more than its items, as a miner's tuples do
    if type(tree) not in (tuple, list, dict) and not _is_named_tuple(tree):
        return tree
    items = tree.values() if isinstance(tree, dict) else tree
    return rebuild_nest(tree, [map_tensors(function, item) for item in items])


def is_array(leaf: Any) -> bool:
    """Return whether this is a tensor, or an array of numpy (which need not be imported for that)."""
    kinds = type(leaf).__mro__
    return isinstance(leaf, Tensor) or any(kind.__module__ == "numpy" and kind.__name__ == "ndarray" for kind in kinds)


def _is_named_tuple(nest: Any) -> bool:
    return isinstance(nest, tuple) and hasattr(nest, "_fields")


def _is_nest_or_array(part: Any) -> bool:
    return is_array(part) or children_of(part) is not None
