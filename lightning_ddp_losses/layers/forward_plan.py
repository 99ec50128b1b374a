"""One handshake for all batch norms of a forward on accelerators, if they are the same as in the previous forwards.

With a handshake for each layer, the host waits for the slowest rank in each layer. Instead, the first batch norm of a forward performs the
handshake, and proposes a *plan* in it: the calls that followed it in the previous forwards. If all ranks propose the same plan, the
remaining batch norms do not need a handshake.

From that handshake to the next one, of any kind, each rank runs exactly the gathers of the plan, regardless of its program:

* A call that is the next in the plan runs its gather.
* Before any other call, and before any handshake (of a loss, or of a rank that failed), a rank runs the remaining gathers without rows. The
  sizes of gathers therefore always match, and no device waits for a rank that skipped a layer.
* A rank that has left the plan and continues sends its position in a handshake. Ranks that left it at the same call agree in this
  handshake, and continue with a handshake for each call. If some ranks have not left it, they are at another position: the same error is
  raised on every rank.

The numbers of rows are sent with the statistics, because they may change from step to step. The host does not wait for them: one value per
channel over all ranks, which is an error, is rejected some forwards later, because a step may have several, or at the end of the fit.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.handshake import Channel, PendingHandshake
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather_stacked

NO_OFFER = bytes(16)
"""The proposal of a rank without a plan."""

_LEARNT = 2  # number of consecutive equal forwards from which a plan is made
_KEPT = 64  # number of first calls that are stored
_FORWARDS = 4  # number of forwards in a step, such as a teacher's and a student's with crops of two sizes


class PlannedCall(NamedTuple):
    """A call of a batch norm that is repeated from step to step.

    Attributes:
        title: Name of the layer.
        text: Values that are equal on every rank.
        size: Size of one value per channel, (1, C, 1, ...).
        like: Dtype and device of the statistics.
        needs_gradient: Whether this rank's input needs a gradient.
        in_backward: Whether the input of any rank does.
    """

    title: str
    text: str
    size: tuple[int, ...]
    like: tuple[torch.dtype, torch.device]
    needs_gradient: bool
    in_backward: bool = False

    def without_rows(self) -> Tensor:
        """Return mean, M2 and count of a rank without rows."""
        dtype, device = self.like
        return torch.zeros(2 * self.size[1] + 1, dtype=dtype, device=device)


class ForwardPlan(PendingHandshake):
    """The plan of one model's batch norms. While it is open, it acts as a pending handshake that the next one on the channel must finish.

    Args:
        model: The model. A plan is not used if ``fully_shard`` divides it, because it then gathers its weights in between.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._groups: tuple[Group, Group] = (None, None)
        self._first: tuple[PlannedCall, int] | None = None
        self._seen: list[PlannedCall] = []  # since the first call
        self._left: list[PlannedCall] = []
        # calls in the last plan, with the values per channel of each rank, and earlier plans, whose values are being copied to the host
        self._counted: list[tuple[PlannedCall, Tensor]] = []
        self._copied: list[tuple[list[PlannedCall], HostCopy]] = []
        self._opened = 0  # number of handshakes up to the last one of a batch norm
        # by first call and its number of rows: the calls of the last forward, and how often they occurred consecutively
        self._learnt: dict[tuple[PlannedCall, int], tuple[list[PlannedCall], int]] = {}
        self._breaks: Counter[tuple[PlannedCall, int]] = Counter()

    # ------------------------------------------------------------------ calls

    @property
    def is_open(self) -> bool:
        """Whether gathers of the plan remain."""
        return bool(self._left)

    def follow(self, call: PlannedCall) -> PlannedCall | None:
        """Return the call as agreed on by all ranks, or None if it is not the next one of a plan and needs a handshake."""
        if self._left and self._left[0]._replace(in_backward=False) == call:
            return self._left[0]
        self._leave(f"{call.title} {call.text}")
        return None

    def offer(self, call: PlannedCall, rows: int, group: Group, handshake_group: Group) -> bytes:
        """Return the digest of the plan that begins with a call, to be sent with the call's handshake."""
        self._groups = group, handshake_group
        self._channel = Channel.of(handshake_group, "handshakes")
        titles = {seen.title for seen in self._seen}
        if self._channel.opened == self._opened and call.title not in titles:
            return NO_OFFER  # in the middle of a forward
        self._remember()
        self._first = call, rows
        calls, times = self._learnt.get(self._first, ([], 0))
        if times < _LEARNT << min(self._breaks[self._first], 20):
            return NO_OFFER
        if any(isinstance(module, FSDPModule) for module in self._model.modules()):
            return NO_OFFER
        shared = [(planned.title, planned.text, planned.size, planned.in_backward) for planned in calls]
        return hashlib.blake2b(repr(shared).encode(), digest_size=len(NO_OFFER)).digest()

    def met(self, call: PlannedCall, offers: set[bytes]) -> None:
        """Record a call's handshake, and open the plan if all ranks proposed the same one."""
        self._opened = self._channel.opened
        self._seen.append(call)
        if len(offers) > 1 or NO_OFFER in offers or self._first is None:
            return
        calls, _ = self._learnt[self._first]
        if calls[0] == call and len(calls) > 1:
            self._left = calls[1:]
            self._channel.pending = self

    def count(self, call: PlannedCall, counts: Tensor) -> None:
        """Record that a call has run its gather, with the values per channel of each rank, (W,), which are not on the host yet."""
        self._seen.append(self._left.pop(0))
        self._counted.append((call, counts))
        if not self._left:
            self._channel.pending = None
            self._copy_counts()

    def _copy_counts(self) -> None:
        if self._counted:
            calls, counts = zip(*self._counted, strict=True)
            self._copied.append(([*calls], HostCopy(torch.stack(counts))))
            self._counted = []

    def counts(self, *, of_all: bool = False) -> Iterator[tuple[PlannedCall, list[int]]]:
        """Yield the calls of plans, each once, with the values per channel of each rank.

        Args:
            of_all: Whether to include all plans. If False, the last plans are excluded, so that a step with several forwards does not wait
                for the device between them.
        """
        self._copy_counts()
        kept = 0 if of_all else _FORWARDS
        while len(self._copied) > kept:
            calls, copy = self._copied.pop(0)
            for call, counts in zip(calls, copy.read().tolist(), strict=True):
                yield call, [int(count) for count in counts]

    def _remember(self) -> None:
        """Store the calls of the last forward."""
        if self._first is not None:
            calls, times = self._learnt.pop(self._first, ([], 0))
            self._learnt[self._first] = (self._seen, times + 1 if calls == self._seen else 1)
            if len(self._learnt) > _KEPT:
                del self._learnt[next(iter(self._learnt))]
        self._seen = []

    # ------------------------------------------------------------------ the end of a plan

    def finish(self) -> list[bytes]:
        """Leave the plan before another handshake, if it is open."""
        self._leave("another handshake")
        return []

    def _leave(self, instead: str) -> None:
        """Leave the plan, if it is open, and send the position to all ranks.

        Raises:
            RankMismatchError: on every rank, if ranks left it at different calls, or some did not.

        Communication: the remaining gathers, and one handshake.
        """
        if self._left:
            must_match = {"left out": self._left[0].title, "instead": instead}
            self.receive()
            handshake.all_gather("the batch norms of a forward", must_match, group=self._groups[1])

    def receive(self, timeout: timedelta | None = None) -> None:
        """Leave the plan without a handshake. Communication: the remaining gathers."""
        left, self._left = self._left, []
        if left:
            self._channel.pending = None
            assert self._first is not None
            self._breaks[self._first] += 1
            for call in left:  # peers that continue number these exchanges
                if call.in_backward:
                    BackwardExchange(call.title, self._groups[1])
            # if the peers or this rank's device are lost, the reason still has to be reported
            with torch.no_grad(), contextlib.suppress(RuntimeError):
                for call in left:
                    gather_stacked(call.without_rows(), self._groups[0])
