"""The call of the user's program that leads to a collective of Lightning: the call, its source line, and advice for messages.

The line is the innermost one outside of libraries. Lightning reduces a value that was logged for an epoch after the hook that logged it.
In this case the line is found by searching the source of the hook for the name of the value.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lightning_ddp_losses.core import lightning_compat, metrics_compat

_OURS = Path(__file__).parents[1]
_EVERYWHERE = "Call it on every rank, outside of `if trainer.is_global_zero` and of branches on local data."
_ADVICE = {
    "trainer.save_checkpoint": "Call `trainer.save_checkpoint` on every rank; Lightning writes on rank 0.",
    "self.log": "Call `self.log(..., sync_dist=True)` on every rank. To log on rank 0 only: sync_dist=False, rank_zero_only=True.",
    "metric.compute": "Call `compute()` on every rank, and print or log its value on rank 0.",
    "strategy.broadcast": f"{_EVERYWHERE} (`trainer.log_dir` is a broadcast too.)",
}
_METHODS = ("barrier", "broadcast", "reduce", "all_gather")


class ProgramCall(NamedTuple):
    """A call of the program that every rank must make.

    Attributes:
        operation: The call, the same on every rank.
        line: The user's source line, or an empty text.
    """

    operation: str
    line: str

    @property
    def advice(self) -> str:
        """What to do if some rank does not make this call."""
        return _ADVICE.get(self.operation.partition("(")[0], _EVERYWHERE)

    def __str__(self) -> str:
        return f"{self.operation}, at {self.line}" if self.line else self.operation


def call_on_stack(frame: FrameType | None) -> ProgramCall | None:
    """Return the call that leads to a frame, or None if it is not one that every rank must make.

    Args:
        frame: Innermost frame, of any thread.
    """
    frames = [*callers(frame)]
    logged = logged_value(frames)
    if logged is not None:
        return logged
    if any(map(lightning_compat.is_saving_frame, frames)):
        return ProgramCall("trainer.save_checkpoint", users_line(frame))
    for each in frames:
        metric = metrics_compat.metric_of_frame(each)
        if metric is not None:
            return ProgramCall(f"metric.compute() of {type(metric).__name__}", users_line(frame))
        name = each.f_code.co_name
        if name in _METHODS and lightning_compat.is_strategy_frame(each):
            return ProgramCall(f"strategy.{name}", users_line(frame))
    return None


def collective_of(error: BaseException) -> ProgramCall | None:
    """Return the collective of ``torch.distributed`` that the user's own line called and that raised an error, or None."""
    call, line = None, ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not package_of(code.co_filename):
            call, line = None, shown_line(traceback.tb_frame, traceback.tb_lineno)
        elif os.path.join("torch", "distributed") not in code.co_filename:
            call, line = None, ""  # a library calls it
        elif line and call is None and code.co_name != "wrapper":  # torch's logger of calls
            call = ProgramCall(f"torch.distributed.{code.co_name}", line)
        traceback = traceback.tb_next
    return call


def logged_value(frames: list[FrameType]) -> ProgramCall | None:
    """Return the call of ``self.log`` whose value is reduced in these frames at the end of an epoch, or None."""
    logged = next(filter(None, map(lightning_compat.name_and_hook_of_log, frames)), None)
    if logged is None:
        return None
    name, hook = logged
    owners: list[Any] = next(filter(None, map(lightning_compat.hook_owners, frames)), [])
    lines = [_line_with_name(type(owner), name, hook) for owner in owners]  # type: ignore[arg-type]  # a class can be hashed
    line = next(filter(None, lines), f"hook {hook}")
    return ProgramCall(f"self.log({name!r}, sync_dist=True)", line)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, from the inside outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=256)
def _line_with_name(owner: Hashable, name: str, hook: str) -> str:
    """Return the first line of a class's hook that contains a name as a string, or an empty text."""
    try:
        method = getattr(owner, hook)
        lines, first = inspect.getsourcelines(method)
        path = Path(inspect.getsourcefile(method) or "").name
    except (AttributeError, OSError, TypeError):
        return ""
    for number, text in enumerate(lines, start=first):
        if f'"{name}"' in text or f"'{name}'" in text:
            return f"{path}:{number}, in {hook}: {text.strip()}"
    return ""


def users_line(frame: FrameType | None) -> str:
    """Return the user's source line that a frame was called from: file, number, function and text, or an empty text.

    Args:
        frame: Frame of the call. Its callers are searched from the inside outwards.
    """
    for each in callers(frame):
        if not package_of(each.f_code.co_filename):
            return shown_line(each, each.f_lineno)
    return ""


def shown_line(frame: FrameType, number: int) -> str:
    """Return a line of a frame's file in the format of messages."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
    return f"{os.path.basename(code.co_filename)}:{number}, in {code.co_name}: {text}"


@functools.lru_cache(maxsize=4096)
def package_of(path: str) -> str:
    """Return the name of the library that contains a file, or an empty text for the user's own code."""
    if Path(path).is_relative_to(_OURS):
        return _OURS.name
    parts = Path(path).parts
    for folder in {"site-packages", "dist-packages"}.intersection(parts):
        return parts[parts.index(folder) + 1]
    is_python = path.startswith("<frozen") or Path(path).is_relative_to(sysconfig.get_path("stdlib"))
    return "python" if is_python else ""
