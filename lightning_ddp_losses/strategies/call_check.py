"""The call check: one handshake in each synchronising backward with the number of calls and rows of each loss on each rank.

It is exchanged at one point: before the first gradients of the model can leave, and wait for a peer that does not come. A hook on the
model's parameters, which runs before DDP's own, finds that point by counting bytes, as all ranks do. Without such gradients it is the end
of autograd's backward.

By then backward has passed through the losses. The upstream gradients of their global values travel along and are compared before
anything is reduced. Peers of a rank with a loss that failed in backward meet it here. Payloads of checks travel along too, and small
gradients of the losses (``LossReducer``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.handshake import read_sized, sized
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradRecorder
from lightning_ddp_losses.errors import LossCallError, RankMismatchError, format_error
from lightning_ddp_losses.strategies.loss_forward import LossForwardPatch
from lightning_ddp_losses.strategies.loss_reducer import LossReducer, ReducedParameter

_CALL = struct.Struct("<IQ?")  # calls, rows, whether a gradient is there already


@dataclass
class Calls:
    """Calls of all ranks since the last synchronising backward.

    Attributes:
        parameters: Parameters that the strategy reduces in this backward.
        new: Those of them that were created after the wrap.
        expected: Per loss, whether its parameters may hold gradients.
        uneven: Rows of each rank, by the title of a loss with different numbers.
    """

    parameters: list[ReducedParameter]
    new: list[ReducedParameter]
    expected: list[bool] = field(default_factory=list)
    uneven: dict[str, list[int]] = field(default_factory=dict)


class CallCheck:
    """Compares the ranks' calls in each synchronising backward.

    Args:
        reducer: Averages gradients, and sends few bytes of them along.
        counters: The calls of each loss.

    Communication: one handshake per synchronising backward, one more in a step with new parameters.
    """

    def __init__(self, reducer: LossReducer, counters: Sequence[LossForwardPatch]) -> None:
        self._parameters, self._reducer = reducer.parameters, reducer
        self._counters = list(counters)
        self._attached: list[tuple[Callable[[], bytes], Callable[[list[bytes]], None]]] = []
        self._upstream_grads = UpstreamGradRecorder()
        self._unsent: tuple[Mapping[str, object], bytes] | None = None  # what must match, and the payload
        self._calls: Calls | None = None
        self._ready_bytes = 0
        self._hooks: list[RemovableHandle] = []
        self.watch_gradients()

    def watch_gradients(self) -> None:
        """Count the bytes of gradient that the model's DDP gets. Call it again when it reduces other parameters."""
        self.remove()
        # a gradient reaches this hook before it reaches DDP
        self._hooks = [
            p.register_hook(partial(self._on_gradient, p.nbytes))  # type: ignore[no-untyped-call]
            for p in self._parameters.elsewhere.values()
        ]

    def remove(self) -> None:
        """Leave no hook behind."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def attach(self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> None:
        """Let a check's bytes travel along.

        Args:
            measure: Returns this rank's bytes. Must not raise.
            judge: Gets the bytes of all ranks in rank order. Its errors must be the same on all ranks.
        """
        self._attached.append((measure, judge))

    def start(self, step: int) -> None:
        """Prepare the handshake of a synchronising backward: what ran on this rank. Counts start again from zero."""
        parameters = self._parameters.now()
        new = self._parameters.find_new(parameters)
        must_match = {
            "step": step,
            "trainable parameters outside the model's DDP": self._parameters.describe(parameters),
            "new parameters": ", ".join(p.name for p in new) or "none",
            "parameters frozen since the model was wrapped": ", ".join(self._parameters.frozen) or "none",
        }
        has_grad = {p.owner for p in parameters if p.parameter.grad is not None}
        payload = b"".join(_CALL.pack(c.calls, c.rows, i in has_grad) for i, c in enumerate(self._counters))
        self._reducer.start_backward(parameters, [counter.calls > 0 for counter in self._counters])
        for counter in self._counters:
            counter.reset()
        for measure, _ in self._attached:
            payload += sized(measure())
        self._unsent = must_match, payload
        self._calls, self._ready_bytes = Calls(parameters, new), 0
        # upstream gradients of global values travel along
        self._upstream_grads.start()

    def _on_gradient(self, num_bytes: int, _: Tensor) -> None:
        if self._unsent is None:
            return
        self._ready_bytes += num_bytes
        if self._ready_bytes >= self._parameters.first_bucket:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the handshake of this backward, once.

        Raises:
            LossCallError: on every rank, when a learnable loss ran on some ranks only.
            RankMismatchError: on every rank, when parameters differ by name, shape or dtype, when the ranks weigh a global value
                differently, or when a parameter created after the wrap does not start equal.
        """
        unsent, calls, self._unsent = self._unsent, self._calls, None
        if unsent is None or calls is None:
            return
        must_match, payload = unsent
        grads = self._reducer.pack(calls.parameters)
        own = payload + sized(self._upstream_grads.take().encode()) + sized(grads)
        self._compare_(calls, handshake.all_gather("backward", must_match, own))
        if calls.new:
            self._parameters.admit(calls.new)

    def finish(self) -> Calls | None:
        """Return the calls of all ranks, and exchange them now if backward did not. None if no handshake was prepared."""
        self.exchange()
        calls, self._calls = self._calls, None
        return calls

    def _compare_(self, calls: Calls, payloads: Sequence[bytes]) -> None:
        """Complete the calls with those of all ranks, or refuse them."""
        # equal payloads are read once
        first = self._read(payloads[0])
        by_rank = [first if payload == payloads[0] else self._read(payload) for payload in payloads]
        calls_by_rank, attached, upstream_grads, gradients = zip(*by_rank, strict=True)
        missing: list[str] = []
        for index, counter in enumerate(self._counters):
            counts, num_rows, grads = zip(*[of_rank[index] for of_rank in calls_by_rank], strict=True)
            calls.expected.append(any(counts) or any(grads))
            if counter.loss.learnable and any(counts) and not all(counts):
                missing.append(_missing_text(counter.loss.title, counts, num_rows))
            elif len(set(num_rows)) > 1 and not counter.sees_global_batch:
                calls.uneven[counter.loss.title] = list(num_rows)
        if missing:
            fix = "Call it on every rank (times 0 where it should not count), or decide on all ranks together."
            raise LossCallError("\n".join([*missing, fix]), collective=True)
        refuse_other_upstream_grads(upstream_grads)
        for index, (_, judge) in enumerate(self._attached):
            judge([of_rank[index] for of_rank in attached])
        self._reducer.receive(gradients)

    def _read(self, payload: bytes) -> tuple[list[Any], list[bytes], str, bytes]:
        """Return a rank's calls, rows and presence of a gradient for each loss, the checks' bytes, upstream gradients, and gradients."""
        end = _CALL.size * len(self._counters)
        *attached, upstream_grads, gradients = read_sized(payload, end)
        return list(_CALL.iter_unpack(payload[:end])), attached, upstream_grads.decode(), gradients


def _missing_text(title: str, calls: Sequence[int], rows: Sequence[int]) -> str:
    """Return the text for a loss that ran on some ranks only."""
    ranks = [f"{c} call{'s' * (c > 1)} on {r} rows" if c else "not called" for c, r in zip(calls, rows, strict=True)]
    return format_error(f"{title} ran on some ranks only", expected="every rank or none", ranks=ranks)


def refuse_other_upstream_grads(noted: Sequence[str]) -> None:
    """Refuse global values that came back in backward with different upstream gradients, as each rank noted them.

    Raises:
        RankMismatchError: on every rank.
    """
    if len(set(noted)) > 1:
        raise RankMismatchError(
            "coefficients of global losses and metrics in this backward",
            expected="the same on every rank, which holds the gradient for all of them",
            ranks=noted,
            fix="Multiply a global value by the same number on every rank; or give GlobalBatchLoss(backward='sum') where ranks shall "
            "differ. Nothing was reduced.",
            collective=True,
        )
