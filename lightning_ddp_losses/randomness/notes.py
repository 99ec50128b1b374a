"""`DrawNote` and `Refusal`: what a rank notes of a step, with the user's line, and what it reads of an operator for that."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_losses.core import compat


class DrawNote(NamedTuple):
    """A draw of this rank.

    Attributes:
        what: Operator, shape and dtype, with ``rows`` in the place of a number of rows. Equal on all ranks.
        line: The user's line.
    """

    what: str
    line: str


class Refusal(NamedTuple):
    """Something that cannot be as it is in one process.

    Attributes:
        what: The operator and the user's line.
        got: What it is.
        fix: What to do.
    """

    what: str
    got: str
    fix: str


def arguments_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, defaults included."""
    schema = compat.operator_schema(func)
    values = {}
    for number, argument in enumerate(schema.arguments):
        if number < len(args):
            values[argument.name] = args[number]
        elif argument.name in kwargs:
            values[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


_LIBRARIES = ("/torch/", "/lightning/", "/lightning_ddp_losses/", "/contextlib.py")


def users_line() -> str:
    """Return file and line of the innermost frame that is neither torch's nor ours."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        if is_of_user(frame):
            return f"{_path_of(frame).rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"


def is_of_user(frame: Any) -> bool:
    """Return whether a frame runs code that is neither torch's nor Lightning's nor ours."""
    path = _path_of(frame)
    return not any(library in path for library in _LIBRARIES)


def _path_of(frame: Any) -> str:
    return str(frame.f_code.co_filename).replace("\\", "/")
