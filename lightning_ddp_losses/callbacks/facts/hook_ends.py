"""Places of the run right before Lightning reduces logged values.

Lightning reduces the values of an epoch when they are read for the first time. Code may do so on rank 0 alone, as a progress bar does. The
other ranks then join when Lightning reads them, and may not wait for rank 0 anywhere before. So all values are compared and reduced

* at the end of the batches, before any hook,
* when a hook of the end that has logged more returns (`HookEnd`), and on a rank that reads in the hook when it reads (`EpochEnd`).

A rank that reads in the middle of a hook may log more after it, which the hooks of other ranks have logged by then. So ranks compare and
reduce in rounds. A round reduces the values that wait on all ranks. A rank with further ones takes part in another round. All ranks leave
the end of the epoch in the same round, with the same values. A round without a common value is the fault F46.

`EpochEnds` is what the runner of checks uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lightning_ddp_losses.callbacks.facts.fact import Columns
from lightning_ddp_losses.callbacks.findings import CheckStage
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.distributed.user_line import users_line

_LOGGED_IN = {
    "on_train_epoch_end": CheckStage.TRAIN_LOGGED,
    "on_validation_epoch_end": CheckStage.VALIDATION_LOGGED,
    "on_test_epoch_end": CheckStage.VALIDATION_LOGGED,
}
"""Hooks whose logged values Lightning reduces when all of them have returned, and the stage before it does."""


def needs_all_ranks(result: Any) -> bool:
    """Return whether a logged value is reduced over ranks: with ``sync_dist``, or a metric."""
    sync = result.meta.sync
    return not result.is_tensor or (sync.should and not sync.rank_zero_only)


def name_of_log(key: str, result: Any) -> str:
    """Return a logged value as messages name it: Lightning's key and the hook."""
    return f"{key} ({result.meta.fx})"


class EpochEnds:
    """Runs the stages at the ends of the epochs of a fit or an evaluation, each where no rank can be in a reduction yet.

    Args:
        trainer: Trainer of the run.
        module: Its module.
        run_stage: Function that judges the facts of a stage.

    Attributes:
        lines: The user's line of each name that this rank has logged.
        ends: The end of each epoch, by the stage that compares its values.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, run_stage: Callable[[CheckStage], None]) -> None:
        self.lines: dict[str, str] = {}
        self._trainer, self._module, self._run_stage = trainer, module, run_stage
        self.ends: dict[CheckStage, EpochEnd] = {}
        self._undo: list[Callable[[], object]] = []
        self._undo_evaluation: Callable[[], object] | None = None

    def follow(self) -> None:
        """Watch both loops, and the hooks of all callbacks and of the module."""
        loops = {
            CheckStage.TRAIN_LOGGED: self._trainer.fit_loop.epoch_loop,
            CheckStage.VALIDATION_LOGGED: compat.validation_loop(self._trainer),
        }
        for stage, loop in loops.items():
            end = EpochEnd(compat.logged_results(loop), partial(self._run_stage, stage), self.lines)
            self.ends[stage] = end
            self._undo.append(end.remove)
        self._undo.append(compat.before_training_epoch_end(self._trainer, self._judge_training))
        # after several loaders in turn. The values of one are reduced before
        self._undo.append(compat.before_evaluation_epoch_end(self._trainer, self._judge_evaluation))
        for hook, stage in _LOGGED_IN.items():
            end = self.ends[stage]
            for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                if getattr(type(callback), hook) is not getattr(Callback, hook):
                    self._undo.append(HookEnd(callback, hook, end.hook_end).remove)
            self._undo.append(HookEnd(self._module, hook, end.module_hook_end).remove)

    def remove(self) -> None:
        """Give all objects their methods back."""
        while self._undo:
            self._undo.pop()()
        if self._undo_evaluation is not None:
            self._undo_evaluation()

    def close(self, stage: CheckStage) -> None:
        """Another epoch begins: its values are read in steps."""
        self.ends[stage].close()

    def _judge_training(self) -> None:
        """Judge metrics and names of logged values before any hook of the end of the epoch may read them."""
        self._run_stage(CheckStage.TRAIN_EPOCH_END)
        self.ends[CheckStage.TRAIN_LOGGED].begin()

    def start_evaluation(self) -> None:
        """Judge this evaluation before its values are reduced."""
        loop = compat.validation_loop(self._trainer)
        self._undo_evaluation = compat.before_epoch_values(loop, self._judge_evaluation)

    def _judge_evaluation(self) -> None:
        """Judge metrics and names of logged values once, before they are computed and reduced."""
        undo, self._undo_evaluation = self._undo_evaluation, None
        if undo is not None:
            undo()
            self._run_stage(CheckStage.VALIDATION_EPOCH_END)
            if not self._trainer.sanity_checking:
                self.ends[CheckStage.VALIDATION_LOGGED].begin()


class EpochEnd:
    """Compares what the hooks at the end of an epoch log, and reduces it, on all ranks at once.

    Args:
        results: Logged values of a loop.
        judge: Function that compares them on all ranks. It calls ``take`` with the columns, if a check compares names.
        lines: Gets the user's line of each name that is logged.

    Attributes:
        waiting: Values that wait to be reduced, by name.
        is_last: True if this rank's last hook has returned.
    """

    def __init__(self, results: Any, judge: Callable[[], None], lines: dict[str, str]) -> None:
        self._results, self._judge, self._lines = results, judge, lines
        self._is_open = False
        self.waiting: dict[str, Any] = {}
        self.is_last = False
        self._common: set[str] = set()  # names that wait on all ranks
        self._is_over = False
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
        self._is_open = True
        self._find_waiting()
        self._reduce()

    def close(self) -> None:
        """Another epoch begins."""
        self._is_open = False

    def hook_end(self) -> None:
        """Compare and reduce values that were logged since the last call, if there are any."""
        self.is_last = False
        self._find_waiting()
        while self._is_open and self.waiting:
            self._meet()

    def module_hook_end(self) -> None:
        """Do the same in the last hook, until all ranks are there. What ranks log alone is compared there too."""
        self.is_last, self._is_over = True, not self._is_open
        self._find_waiting()
        while not self._is_over:
            self._meet()

    def _meet(self) -> None:
        """Compare the names that wait, and reduce those that wait on all ranks. It is over if all ranks are in their last hook."""
        self._is_over = True  # unless a check that compares names finds otherwise
        self._judge()
        self._reduce()
        done = self._common
        self._find_waiting()
        # a value that has no number stays unread, and waits no more
        for name in done:
            self.waiting.pop(name, None)
        self._common -= done

    def numbers(self) -> dict[str, Any]:
        """Return hashes of the names that wait on this rank, and whether its last hook has returned."""
        return {"waiting": sorted(map(hash_text, self.waiting)), "is_last": self.is_last}

    def take(self, columns: Columns) -> None:
        """Take the names that wait on all ranks."""
        names = columns["waiting"]
        common = set.intersection(*map(set, names))
        self._common = {name for name in self.waiting if hash_text(name) in common}
        self._is_over = all(columns["is_last"]) and len(set(names)) == 1

    def _find_waiting(self) -> None:
        unread = compat.unread_epoch_values(self._results)
        self.waiting = {name_of_log(key, value): value for key, value in unread.items() if needs_all_ranks(value)}
        self._common = set(self.waiting)

    def _reduce(self) -> None:
        for name in sorted(self._common):
            compat.reduce_epoch_value(self._results, self.waiting[name])


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
