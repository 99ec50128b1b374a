"""`LastRows`: when a rank fails, pending rows are judged before its error is raised, and findings are added before its text.

Rows of a step are pending until their checks are due again. For example, a row may contain a NaN in the gradient of one rank, and the next
step may raise an error that does not mention it. Therefore each rank that ends with an error writes its rows into the store of the run
(``StoreExchange``), informs its peers, and judges the rows of all ranks when they have been written. Every rank has the same findings.
Ranks that do not write their rows in time wait in a foreign collective, or have exited. In this case, the error states that the rows were
not judged, and the last known position of those ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.row_exchange import RowExchange, StageFacts
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.handshake import note_on
from lightning_ddp_losses.distributed.store_exchange import StoreExchange
from lightning_ddp_losses.errors import DDPLossError

_log = logging.getLogger(__name__)


class LastRows:
    """Judges the rows that are pending at the time of an error. Created on every rank that has an error.

    Args:
        row_exchange: Exchanges the rows.
        facts: Facts of a step, equal on all ranks.
        seconds: Limit of the wait for the peers.

    Communication: one exchange through the store. One more for each new finding.
    """

    def __init__(self, row_exchange: RowExchange, facts: Sequence[StageFacts], seconds: float) -> None:
        self._row_exchange, self._facts = row_exchange, facts
        self._is_waiting = any(of_check.numbers is not None for of_check in facts)
        # ranks that failed in different steps have rows of different steps, which cannot be compared
        self._steps = json.dumps([of_check.step for of_check in facts]).encode()
        self._row = row_exchange.pack(facts)
        self._exchange: StoreExchange | None = None
        if process_groups.world_size() > 1 and row_exchange.watch is not None:
            self._exchange = StoreExchange(row_exchange.watch, seconds)
            self._exchange.post(self._steps + b"\n" + self._row)

    def judge_before_(self, error: BaseException, step: int) -> None:
        """Judge the rows of all ranks, and add findings before the text of an error that is about to be raised.

        Args:
            error: The error of this rank. Its text and ``findings`` are changed.
            step: Optimizer steps so far.
        """
        if not self._is_waiting:
            return
        try:
            self._judge(step)
        except TimeoutError as late:
            add_to_error_(error, after=f"DDPChecks: the last step was not judged: {late}.")
        except DDPLossError as fault:
            add_to_error_(error, before=str(fault), findings=fault.findings)
        except Exception as problem:
            _log.debug("The step before the error was not judged: %s", problem)

    def _judge(self, step: int) -> None:
        rows = [self._row]
        if process_groups.world_size() > 1:
            rows = self._rows_of_all()
        self._row_exchange.judge(self._facts, rows, step, place="an error")

    def _rows_of_all(self) -> list[bytes]:
        if self._exchange is None:
            raise TimeoutError("torch does not show the store of the run")
        offers = [offer.partition(b"\n") for offer in self._exchange.collect()]
        if any(steps != self._steps for steps, _, _ in offers):
            raise TimeoutError("ranks have made different steps")
        self._row_exchange.after_error = self._exchange
        return [row for _, _, row in offers]


def add_to_error_(error: BaseException, *, before: str = "", after: str = "", findings: Sequence[Finding] = ()) -> None:
    """Add lines before and after the text of an error, and findings before its ``findings``.

    The error remains the same object with the same class, so that an ``except`` in the user's program catches it. Some classes build their
    text from other attributes (``OSError`` with a number). In this case, the lines are added as notes, which a traceback shows after the
    text.

    Args:
        error: Any error.
        before: Lines before its text.
        after: Lines after its text.
        findings: Findings that the lines describe.
    """
    lines = [line for line in (before, str(error), after) if line]
    text = "\n".join(lines)
    given = error.args
    error.args = (_Text(text), *given[1:])
    if str(error) != text:
        error.args = given
        added = [line for line in (before, after) if line]
        note_on(error, __notes__=[*getattr(error, "__notes__", ()), *added])
    if findings:
        note_on(error, findings=[*findings, *getattr(error, "findings", ())])


class _Text(str):
    """A text that ``KeyError`` shows unchanged instead of quoting it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
