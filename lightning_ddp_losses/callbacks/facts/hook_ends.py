"""Places of the run right before Lightning reduces logged values.

Lightning reduces the values of an epoch when they are read for the first time. Code may do so on rank 0 alone, as a progress bar does. The
other ranks then join when Lightning reads them, and may not wait for rank 0 anywhere before. So all values are compared and reduced

* at the end of the batches, before any hook,
* when a hook of the end that has logged more returns (`HookEnd`), and on a rank that reads in the hook when it reads (`EpochEnd`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.user_line import users_line


class Handle:
    """What undoes a change of Lightning's objects.

    Args:
        remove: Function that undoes it.
    """

    def __init__(self, remove: Callable[[], object]) -> None:
        self.remove = remove


def needs_all_ranks(result: Any) -> bool:
    """Return whether a logged value is reduced over ranks: with ``sync_dist``, or a metric."""
    sync = result.meta.sync
    return not result.is_tensor or (sync.should and not sync.rank_zero_only)


def name_of_log(key: str, result: Any) -> str:
    """Return a logged value as messages name it: Lightning's key and the hook."""
    return f"{key} ({result.meta.fx})"


class EpochEnd:
    """Compares what the hooks at the end of an epoch log, and reduces it, on all ranks at once.

    Args:
        results: Logged values of a loop.
        judge: Function that compares them on all ranks.
        lines: Gets the user's line of each name that is logged.
    """

    def __init__(self, results: Any, judge: Callable[[], None], lines: dict[str, str]) -> None:
        self._results, self._judge, self._lines = results, judge, lines
        self._is_open = self._was_judged = False
        undo_reading = compat.before_reading_epoch(results, self.hook_end)
        undo_log = compat.after_new_log(results, self._note_line)
        self._undo = [undo_reading, undo_log]

    def remove(self) -> None:
        """Give the logged values their methods back."""
        for undo in self._undo:
            undo()

    def _note_line(self, key: str, result: Any) -> None:
        self._lines[name_of_log(key, result)] = users_line(inspect.currentframe())

    def begin(self) -> None:
        """Reduce the values of the batches, which have been compared. The hooks of the end follow."""
        self._is_open, self._was_judged = True, False
        self._reduce()

    def close(self) -> None:
        """Another epoch begins."""
        self._is_open = False

    def hook_end(self) -> None:
        """Compare and reduce values that were logged since the last call, if there are any."""
        if self._is_open and self._unreduced():
            self._was_judged = True
            self._judge()
            self._reduce()

    def module_hook_end(self) -> None:
        """Do the same in the last hook. What ranks log alone is compared there too."""
        if not self._was_judged:
            self._was_judged = True
            self._judge()
        self.hook_end()

    def _unreduced(self) -> list[Any]:
        return [result for result in compat.unread_epoch_values(self._results) if needs_all_ranks(result)]

    def _reduce(self) -> None:
        for result in self._unreduced():
            compat.reduce_epoch_value(self._results, result)


class HookEnd:
    """Calls a function whenever a hook of a module or a callback has returned, until ``remove``.

    Args:
        module: Object with the hook. It is replaced in the object, so that its class, its copies and its pickles keep theirs.
        name: Name of the hook.
        at_end: Function to call.
    """

    def __init__(self, module: Any, name: str, at_end: Callable[[], None]) -> None:
        self._attributes, self._name = vars(module), name
        self._given = self._attributes.get(name)  # None if the hook is that of the class
        self._attributes[name] = _HookWithEnd(getattr(module, name), at_end)

    def remove(self) -> None:
        """Give the module its hook back."""
        if self._given is None:
            self._attributes.pop(self._name, None)
        else:
            self._attributes[self._name] = self._given


class _HookWithEnd:
    """A hook, and what is called after it. A copy or a pickle of it is the hook."""

    def __init__(self, hook: Callable[..., Any], at_end: Callable[[], None]) -> None:
        self._hook, self._at_end = hook, at_end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        self._at_end()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._hook,)


def _same(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook
