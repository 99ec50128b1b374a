"""`DrawNote` and `Refusal`: what a rank records during a step, with the user's line, and functions that inspect operators for it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed.user_line import callers


class DrawNote(NamedTuple):
    """A draw of this rank.

    Attributes:
        what: Operator, shape and dtype, with ``rows`` instead of the number of rows. Equal on all ranks.
        line: The user's line.
    """

    what: str
    line: str


class Refusal(NamedTuple):
    """Something that cannot be made equal to one process.

    Attributes:
        what: The operator and the user's line.
        got: Description of the problem.
        fix: What to do.
    """

    what: str
    got: str
    fix: str


def arguments_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, including defaults."""
    names, defaults = _arguments_of(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@functools.cache
def _arguments_of(func: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an operator's arguments, and the defaults."""
    arguments = torch_compat.operator_schema(func).arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return [argument.name for argument in arguments], defaults


_LIBRARIES = (
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_ddp_losses", "contextlib"),
    *("torchmetrics", "pytorch_metric_learning"),  # compare shapes to check them
)


def line_of_user() -> str:
    """Return the file and line of the innermost frame of the user's code."""
    for frame in callers(inspect.currentframe()):
        if is_of_user(frame):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return "an unknown line"


def is_of_user(frame: Any) -> bool:
    """Return whether a frame belongs to none of these libraries, judged by module because folders may have any name."""
    module = str(frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] not in _LIBRARIES
