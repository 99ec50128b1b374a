"""The line of the user's program that an operator runs for."""

from __future__ import annotations

import inspect
import linecache
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from lightning_ddp_losses.distributed.user_line import callers, package_of
from lightning_ddp_losses.losses.certificates.certificate import Reason

_FOLDER = str(Path(__file__).parent)
ENTRY = "run_loss"
"""Name of the function that calls the loss. Lines outside of it are not the loss's."""


class Blame(NamedTuple):
    """Makes reasons of one operator.

    Attributes:
        file: File of the line that calls it.
        line: Number of that line.
        text: Its source.
        operator: Name of the operator.
    """

    file: str
    line: int
    text: str
    operator: str

    def __call__(self, why: str) -> Reason:
        """Return a reason."""
        return Reason(self.file, self.line, self.text, self.operator, why)


def blame_here(operator: str) -> Blame:
    """Return the maker of reasons of an operator that runs now.

    The line is the user's innermost one, else the innermost one of another library than torch, else torch's own that the loss calls first.

    Args:
        operator: Name of the operator.
    """
    others: list[tuple[str, FrameType]] = []
    for each in callers(inspect.currentframe()):
        file, name = each.f_code.co_filename, each.f_code.co_name
        if file.startswith(_FOLDER):
            if name == ENTRY:
                break
            continue
        package = package_of(file)
        if not package:
            return _blame_of(each, each.f_lineno, operator)
        others.append((package, each))
    of_libraries = [each for package, each in others if package not in ("torch", "python")]
    of_torch = [each for _, each in others if not each.f_code.co_name.endswith("_call_impl")]
    found = of_libraries[:1] or of_torch[-1:]
    if not found:
        return Blame("", 0, "", operator)
    return _blame_of(found[0], found[0].f_lineno, operator)


def blame_of_error(error: BaseException, operator: str) -> Blame:
    """Return a ``Blame``, which creates reasons, for the user's innermost line in the traceback of an error.

    Args:
        error: The error.
        operator: The operator to blame.
    """
    found = Blame("", 0, "", operator)
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not package_of(frame.f_code.co_filename):
            found = _blame_of(frame, number, operator)
    return found


def _blame_of(frame: FrameType, number: int, operator: str) -> Blame:
    file = frame.f_code.co_filename
    text = linecache.getline(file, number, frame.f_globals).strip()
    return Blame(file, number, text, operator)
