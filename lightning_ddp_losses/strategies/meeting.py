"""The frame before each synchronising backward: which losses ran on each rank, how often, on how many rows.

It is read before the first gradients of the encoder leave, so that no rank can wait inside the model's DDP for one that does
not come. Checks may ride along, the coefficients with which backward came back into global values, and small gradients.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lightning_ddp_losses.distributed import handshake, upstream_grad
from lightning_ddp_losses.strategies.disagreement import missing_calls, refuse_other_coefficients
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss

_CALL = struct.Struct("<IQ?")  # calls, rows, whether a gradient is there already
_SIZE = struct.Struct("<I")


class CallCount(Protocol):
    """What the meeting needs of a guard."""

    loss: FoundLoss
    sees_global_batch: bool
    calls: int
    rows: int
    awaited: int

    def reset(self) -> None:
        """Forget the calls so far."""


@dataclass(frozen=True)
class Rider:
    """A check whose bytes travel in the frame.

    Attributes:
        measure: This rank's bytes; must not raise.
        judge: Gets the bytes of all ranks in rank order; what it raises must be the same on all ranks.
    """

    measure: Callable[[], bytes]
    judge: Callable[[list[bytes]], None]


@dataclass
class Calls:
    """What the ranks said of their calls since the last synchronising backward.

    Attributes:
        expected: Per loss, whether its parameters may hold gradients.
        uneven: By title of a loss with differing rows, the rows of each rank.
        gradients: What each rank gave to ``send``.
    """

    expected: list[bool]
    uneven: dict[str, list[int]] = field(default_factory=dict)
    gradients: tuple[bytes, ...] = ()


class Meeting:
    """One such frame; it leaves once.

    Args:
        counts: The calls of each loss; they start again from zero.
        has_grad: Indices of the losses that hold a gradient already.
        agreed: What must be equal on all ranks.
        riders: Whose bytes travel along.

    Communication: one frame.
    """

    def __init__(
        self,
        counts: Sequence[CallCount],
        has_grad: set[int],
        must_match: Mapping[str, object],
        riders: Sequence[Rider] = (),
    ) -> None:
        self._counts, self._riders, self._agreed = counts, riders, must_match
        own = b"".join(_CALL.pack(c.calls, c.rows, i in has_grad) for i, c in enumerate(counts))
        for rider in riders:
            ride = rider.measure()
            own += _SIZE.pack(len(ride)) + ride
        for count in counts:
            count.reset()
        self._agreed, self._own = must_match, own
        self._frame: handshake.PendingHandshake | None = None

    @property
    def sent(self) -> bool:
        """Whether it has left."""
        return self._frame is not None

    def send(self, gradients: bytes = b"") -> None:
        """Let it leave, with the coefficients known by now."""
        noted = upstream_grad.take_noted().encode()
        own = self._own + _SIZE.pack(len(noted)) + noted + gradients
        self._frame = handshake.start("backward", self._agreed, own)

    def arrived(self) -> bool:
        """Whether ``read`` would not wait."""
        return self._frame is not None and self._frame.is_completed()

    def read(self) -> Calls:
        """Wait for the peers' frames.

        Raises:
            LossCallError: on every rank, when a learnable loss ran on some ranks only.
            RankMismatchError: on every rank, when the ranks disagree, or weigh a global value differently.
        """
        assert self._frame is not None
        rows, rides, noted, gradients = zip(*map(self._split, self._frame.finish()), strict=True)
        table = [list(_CALL.iter_unpack(row)) for row in rows]
        expected: list[bool] = []
        uneven: dict[str, list[int]] = {}
        missing: list[tuple[str, Sequence[int], Sequence[int]]] = []
        for index, count in enumerate(self._counts):
            calls, num_rows, grads = zip(*(ranks[index] for ranks in table), strict=True)
            expected.append(any(calls) or any(grads))
            if count.loss.learnable and any(calls) and not all(calls):
                missing.append((count.loss.title, calls, num_rows))
            elif len(set(num_rows)) > 1 and not count.sees_global_batch:
                uneven[count.loss.title] = list(num_rows)
        if missing:
            raise missing_calls(missing)
        refuse_other_coefficients([text.decode() for text in noted])
        for rider, column in zip(self._riders, zip(*rides, strict=True), strict=True):
            rider.judge(list(column))
        return Calls(expected, uneven, gradients)

    def _split(self, payload: bytes) -> tuple[bytes, list[bytes], bytes, bytes]:
        offset = _CALL.size * len(self._counts)
        own, rides = payload[:offset], []
        for _ in (*self._riders, upstream_grad):
            (size,) = _SIZE.unpack_from(payload, offset)
            start = offset + _SIZE.size
            offset = start + size
            rides.append(payload[start:offset])
        return own, rides[:-1], rides[-1], payload[offset:]
