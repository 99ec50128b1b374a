"""`LastRows`: the rows that wait when a rank fails are judged before its error leaves, and what is found comes first in its text.

Rows of a step wait until their checks are due again. A NaN in the gradient of one rank is seen in such a row, and the next step may end in
an error that says nothing of it. So each rank that ends with an error writes its rows into the store of the run (``StoreExchange``), then
informs its peers, and judges the rows of all ranks once they are there. Every rank has the same findings. Ranks that do not come in time
wait in a foreign collective, or are gone: the error says that the rows were not judged, and where those ranks are.
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
    """Judges the rows that wait at the time of an error. Every rank that has an error makes one.

    Args:
        row_exchange: Exchanges the rows.
        facts: Facts of a step, the same on every rank.
        seconds: Limit of the wait for the peers.

    Communication: through the store, one exchange. One more for each new finding.
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
        """Judge the rows of all ranks, and put what is found before the text of an error that is about to leave.

        Args:
            error: The error of this rank. Its text and ``findings`` change.
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
    """Put lines before and after the text of an error, and findings before its ``findings``.

    The error stays the object that it is, with its class, so that an ``except`` of the user's program catches it. Some classes make their
    text of other attributes (``OSError`` with a number). Then the lines become notes of the error, which a traceback shows after its text.

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
    """A text that ``KeyError`` shows as it is, and not as the literal of a key."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
