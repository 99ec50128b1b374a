"""Arguments of operators: tensors and numbers in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import inputs

_NUMBERS = frozenset({int, float, bool, str, type(None), torch.dtype})


def mapped(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """Return a nest with a function applied to its tensors: lists, dicts, tuples, and torch's named results."""
    if isinstance(nest, Tensor):
        return function(nest)
    if type(nest) in _NUMBERS:
        return nest
    if isinstance(nest, (list, tuple)):
        found = [mapped(function, each) for each in nest]
        return type(nest)(*found) if hasattr(nest, "_fields") else type(nest)(found)
    if isinstance(nest, dict):
        return {key: mapped(function, each) for key, each in nest.items()}
    return nest


def tensors_in(nest: Any) -> list[Tensor]:
    """Return the tensors of a nest."""
    found: list[Tensor] = []
    _add_tensors_(found, nest)
    return found


def _add_tensors_(found: list[Tensor], nest: Any) -> None:
    if isinstance(nest, Tensor):
        found.append(nest)
    elif isinstance(nest, (list, tuple)):
        for each in nest:
            _add_tensors_(found, each)
    elif isinstance(nest, dict):
        for each in nest.values():
            _add_tensors_(found, each)


def numbers_in(values: Any) -> str:
    """Return the numbers of a nest, as text that ranks compare."""
    texts = []
    for value in values:
        if isinstance(value, Tensor):
            continue
        if isinstance(value, (tuple, list)):
            texts.append(f"({numbers_in(value)})")
        elif isinstance(value, float):
            texts.append(f"{value:.9g}")
        elif isinstance(value, (int, str, slice, torch.dtype)):
            texts.append(str(value))
        elif isinstance(value, complex) or inputs.is_array(value):
            texts.append(f"{value}")
        elif hasattr(value, "dtype") and hasattr(value, "item"):  # a number of numpy
            texts.append(numbers_in([value.item()]))
    return " ".join(texts)
