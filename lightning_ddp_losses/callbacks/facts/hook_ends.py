"""Stages of the run immediately before Lightning reduces logged values.

Lightning reduces the values of an epoch when they are first read. Some code, such as a progress bar, reads them only on rank 0. The other
ranks take part in the reduction when Lightning reads the values, and must not wait for rank 0 in another operation before that. Therefore
all values are compared and reduced

* at the end of the batches, before any hook,
* when an epoch-end hook that has logged further values returns (`HookEnd`), or when a rank reads values inside the hook (`EpochEnd`).

After reading in the middle of a hook, a rank may log further values, which the hooks of other ranks may already have logged. Therefore
ranks compare and reduce in rounds. A round reduces the values that are pending on all ranks. A rank with further values takes part in
another round. All ranks leave the end of the epoch in the same round, with the same values. A round without a common value is the fault
F46.

The runner of checks uses `EpochEnds`.
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
from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.core.modules import MethodPatch
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.distributed.user_line import users_line

_LOGGED_IN = {
    "on_train_epoch_end": CheckStage.TRAIN_LOGGED,
    "on_validation_epoch_end": CheckStage.VALIDATION_LOGGED,
    "on_test_epoch_end": CheckStage.VALIDATION_LOGGED,
}
"""Hooks whose logged values Lightning reduces when all of them have returned, and the stage before the reduction."""


def needs_all_ranks(result: Any) -> bool:
    """Return whether a logged value is reduced over ranks, because it has ``sync_dist`` or is a metric."""
    sync = result.meta.sync
    return not result.is_tensor or (sync.should and not sync.rank_zero_only)


def name_of_log(key: str, result: Any) -> str:
    """Return the name of a logged value in messages: Lightning's key and the hook."""
    return f"{key} ({result.meta.fx})"


class EpochEnds:
    """Runs the stages at the end of each epoch of a fit or an evaluation, before any rank can start a reduction.

    Args:
        trainer: Trainer of the run.
        module: Module of the run.
        run_stage: Function that judges the facts of a stage.

    Attributes:
        lines: The user's line of each name that this rank has logged.
        ends: Epoch ends of the training and validation loops, by the stage that compares their values.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, run_stage: Callable[[CheckStage], None]) -> None:
        self.lines: dict[str, str] = {}
        self._trainer, self._module, self._run_stage = trainer, module, run_stage
        self.ends: dict[CheckStage, EpochEnd] = {}
        self._undo: list[Callable[[], object]] = []
        self._undo_evaluation: Callable[[], object] | None = None

    def follow(self) -> None:
        """Observe both loops, and the hooks of all callbacks and of the module."""
        loops = {
            CheckStage.TRAIN_LOGGED: self._trainer.fit_loop.epoch_loop,
            CheckStage.VALIDATION_LOGGED: lightning_compat.validation_loop(self._trainer),
        }
        for stage, loop in loops.items():
            end = EpochEnd(lightning_compat.logged_results(loop), partial(self._run_stage, stage), self.lines)
            self.ends[stage] = end
            self._undo.append(end.remove)
        self._undo.append(lightning_compat.before_training_epoch_end(self._trainer, self._judge_training))
        # called after an evaluation of several loaders in turn. The values of a single loader are reduced earlier
        self._undo.append(lightning_compat.before_evaluation_epoch_end(self._trainer, self._judge_evaluation))
        for hook, stage in _LOGGED_IN.items():
            end = self.ends[stage]
            for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                if getattr(type(callback), hook) is not getattr(Callback, hook):
                    self._undo.append(HookEnd(callback, hook, end.hook_end).remove)
            self._undo.append(HookEnd(self._module, hook, end.module_hook_end).remove)

    def remove(self) -> None:
        """Restore the methods of all objects."""
        while self._undo:
            self._undo.pop()()
        if self._undo_evaluation is not None:
            self._undo_evaluation()

    def close(self, stage: CheckStage) -> None:
        """Stop comparing at the start of another epoch, whose values are read in steps."""
        self.ends[stage].close()

    def _judge_training(self) -> None:
        """Judge metrics and names of logged values before any hook at the end of the epoch can read them."""
        self._run_stage(CheckStage.TRAIN_EPOCH_END)
        self.ends[CheckStage.TRAIN_LOGGED].begin()

    def start_evaluation(self) -> None:
        """Schedule the judgement of this evaluation before its values are reduced."""
        loop = lightning_compat.validation_loop(self._trainer)
        self._undo_evaluation = lightning_compat.before_epoch_values(loop, self._judge_evaluation)

    def _judge_evaluation(self) -> None:
        """Judge metrics and names of logged values once, before they are computed and reduced."""
        undo, self._undo_evaluation = self._undo_evaluation, None
        if undo is not None:
            undo()
            self._run_stage(CheckStage.VALIDATION_EPOCH_END)
            if not self._trainer.sanity_checking:
                self.ends[CheckStage.VALIDATION_LOGGED].begin()


class EpochEnd:
    """Compares and reduces the values logged by hooks at the end of an epoch, on all ranks together.

    Args:
        results: Logged values of a loop.
        judge: Function that compares them on all ranks. It calls ``take`` with the columns, if a check compares names.
        lines: Dictionary to which the user's line of each logged name is added.

    Attributes:
        results: Logged values of the loop.
        waiting: Pending values that have not been reduced, by name.
        is_last: True if this rank's last hook has returned.
    """

    def __init__(self, results: Any, judge: Callable[[], None], lines: dict[str, str]) -> None:
        self.results, self._judge, self._lines = results, judge, lines
        self._is_open = False
        self.waiting: dict[str, Any] = {}
        self.is_last = False
        self._common: set[str] = set()  # names that are pending on all ranks
        self._is_over = False
        undo_reading = lightning_compat.before_reading_epoch(results, self.hook_end)
        undo_log = lightning_compat.after_new_log(results, self._note_line)
        self._undo = [undo_reading, undo_log]

    def remove(self) -> None:
        """Restore the methods of the logged values."""
        for undo in self._undo:
            undo()

    def _note_line(self, key: str, result: Any) -> None:
        self._lines[name_of_log(key, result)] = users_line(inspect.currentframe())

    def begin(self) -> None:
        """Reduce the values of the batches, which have been compared, before the epoch-end hooks run."""
        self._is_open = True
        self._find_waiting()
        self._reduce()

    def close(self) -> None:
        """Stop comparing, because another epoch begins."""
        self._is_open = False

    def hook_end(self) -> None:
        """Compare and reduce values that were logged since the last call, if there are any."""
        self.is_last = False
        self._find_waiting()
        while self._is_open and self.waiting:
            self._meet()

    def module_hook_end(self) -> None:
        """Compare and reduce after the last hook, until all ranks have reached it. Values that are not reduced are compared too."""
        self.is_last, self._is_over = True, not self._is_open
        self._find_waiting()
        while not self._is_over:
            self._meet()

    def _meet(self) -> None:
        """Compare pending names, and reduce values that are pending on all ranks. Collective.

        The epoch end is over if the last hooks of all ranks have returned.
        """
        self._is_over = True  # a check that compares names may reset this in `take`
        self._judge()
        self._reduce()
        done = self._common
        self._find_waiting()
        # a value without a number remains unread, and is no longer pending
        for name in done:
            self.waiting.pop(name, None)
        self._common -= done

    def numbers(self) -> dict[str, Any]:
        """Return hashes of the names that are pending on this rank, and whether its last hook has returned."""
        return {"waiting": sorted(map(hash_text, self.waiting)), "is_last": self.is_last}

    def take(self, columns: Columns) -> None:
        """Store the names that are pending on all ranks, and whether the epoch end is over."""
        names = [tuple(of_rank) for of_rank in columns["waiting"]]
        common = set.intersection(*map(set, names))
        self._common = {name for name in self.waiting if hash_text(name) in common}
        self._is_over = all(columns["is_last"]) and len(set(names)) == 1

    def _find_waiting(self) -> None:
        unread = lightning_compat.unread_epoch_values(self.results)
        self.waiting = {name_of_log(key, value): value for key, value in unread.items() if needs_all_ranks(value)}
        self._common = set(self.waiting)

    def _reduce(self) -> None:
        for name in sorted(self._common):
            lightning_compat.reduce_epoch_value(self.results, self.waiting[name])


class HookEnd(MethodPatch):
    """Calls a function whenever a hook of a module or a callback has returned, until ``remove``.

    Args:
        module: Object with the hook. The hook is replaced only in this object, so its class, copies and pickles keep the original.
        name: Name of the hook.
        at_end: Function to call.
    """

    def __init__(self, module: Any, name: str, at_end: Callable[[], None]) -> None:
        super().__init__(module, name)
        self._at_end = at_end
        self.install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook, then the function."""
        result = self.original(*args, **kwargs)
        self._at_end()
        return result
