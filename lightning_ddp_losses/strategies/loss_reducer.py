"""The losses' gradients: one mean over ranks, by name, once per synchronising backward.

Whatever this rank called, and in whatever order: gradients are read from the live module after backward, so parameters
that were created, replaced or unfrozen after the wrap take part, and no hook can be lost. It covers every trainable
parameter that the model's own DDP does not reduce (nor a shard, nor one the user told DDP to ignore).

Three steps per synchronising backward:

1. ``open``, before backward: one frame is made. Which losses ran, how often, on how many rows; whether they hold a gradient
   already. It leaves as soon as backward has come back into all global values, with the coefficients; and where all gradients are
   few bytes on the CPU, when backward has passed through the last loss, with them aboard.
2. ``agree``, before the first gradients of the model's DDP leave, or any of our collectives waits in backward: the peers' frames
   are read. All ranks then know which
   losses are *expected* to have gradients, or raise together while nobody waits inside DDP.
3. ``reduce``, after backward: one all-reduce of [a has-gradient flag per parameter | small gradients of expected losses], one
   in place for each gradient over ``LARGE_BYTES``. They are started during backward, when that has passed through the last
   loss. Gradients that rode in the frame need none. Flags must sum to 0 or W.

On an accelerator the flags travel by frame (host to host), so nothing waits for the device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives, upstream_grad
from lightning_ddp_losses.strategies.disagreement import partial_gradients
from lightning_ddp_losses.strategies.gradient_buckets import Departure, Passengers, gradient_flag
from lightning_ddp_losses.strategies.managed import Managed, ManagedParameters
from lightning_ddp_losses.strategies.meeting import CallCount, Calls, Meeting, Rider

LARGE_BYTES = 1 << 20


class LossReducer:
    """Means the gradients of the parameters that the model's DDP leaves out.

    Args:
        module: The live LightningModule.
        reduced_elsewhere: Parameters that the model's DDP reduces.
        ignored: Names that the user told DDP to leave alone.
        reduce_dtype: dtype on the wire; None: each gradient's own, and at least float32 for small ones.
        first_bucket: Bytes of gradient of which the model's DDP sends nothing before all are ready.
    """

    def __init__(
        self,
        module: nn.Module,
        reduced_elsewhere: Sequence[Tensor],
        ignored: Sequence[str] = (),
        reduce_dtype: torch.dtype | None = None,
        first_bucket: int = 0,
    ) -> None:
        self._first_bucket = first_bucket
        self._parameters = ManagedParameters(module, reduced_elsewhere, ignored)
        self._reduce_dtype = reduce_dtype
        self._counts: list[CallCount] = []
        self._riders: list[Rider] = []
        self._hooks: list[RemovableHandle] = []
        self._close()

    def _close(self) -> None:
        self._opened: list[Managed] | None = None
        self._fresh: list[Managed] = []
        self._meeting: Meeting | None = None
        self._calls: Calls | None = None
        self._outstanding, self._ready, self._idle, self._holds = -1, 0, False, False
        self._departure: Departure | Passengers | None = None
        self._passengers: Passengers | None = None

    def watch(self, counts: Sequence[CallCount]) -> None:
        """Say which losses there are; call after the first broadcast: what exists now counts as synchronised."""
        self._counts = list(counts)
        self._parameters.watch([count.loss.name for count in counts])
        # a gradient reaches this hook before it reaches DDP
        self._hooks = [
            p.register_hook(partial(self._gradient, p.nbytes))  # type: ignore[no-untyped-call]
            for p in self._parameters.elsewhere.values()
        ]

    def unwatch(self) -> None:
        """Leave no hook behind."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        upstream_grad.on_note(None)
        raw_collectives.on_wait(None)

    def attach_payload(self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> None:
        """Let a check's bytes travel in each frame."""
        self._riders.append(Rider(measure, judge))

    def open(self, step: int) -> None:
        """Make the frame that meets the peers before a synchronising backward. Communication: one frame, now or in backward."""
        self._close()
        managed = self._opened = self._parameters.now()
        self._fresh = self._parameters.fresh(managed)
        must_match = {
            "step": step,
            "trainable parameters outside the model's DDP": self._parameters.describe(managed),
            "new parameters": ", ".join(m.name for m in self._fresh) or "none",
        }
        self._outstanding = sum(count.awaited for count in self._counts) or -1
        self._idle = not any(count.calls for count in self._counts)
        has_grad = {m.owner for m in managed if m.parameter.grad is not None}
        self._meeting = Meeting(self._counts, has_grad, must_match, self._riders)
        self._holds = self._may_hold(managed)
        upstream_grad.on_note(self._leave)
        raw_collectives.on_wait(self.agree)
        self._leave()

    def _may_hold(self, managed: list[Managed]) -> bool:
        if not managed or process_groups.world_size() == 1:
            return False
        # what belongs to no loss gets its gradient later
        if not self._flags_ride(managed) or any(m.owner < 0 for m in managed):
            return False
        parameters = [m.parameter for m in managed]
        few = all(p.nbytes <= LARGE_BYTES for p in parameters)
        return few and Passengers.size(parameters, self._wire_dtype(parameters)) <= handshake.inline_capacity()

    def _leave(self) -> None:
        """Send the frame, if nothing that it takes along is still to come."""
        if self._meeting is None or self._meeting.sent or upstream_grad.expected():
            return
        if not self._holds:
            self._meeting.send()
        elif self._outstanding == 0:
            self._send(self._opened or [])

    def _send(self, managed: list[Managed]) -> None:
        """Let the frame leave with all gradients aboard; they are complete."""
        assert self._meeting is not None
        parameters = [m.parameter for m in managed]
        self._passengers = Passengers(parameters, self._wire_dtype(parameters))
        self._meeting.send(self._passengers.ticket())

    def agree(self) -> None:
        """Read the peers' frames, once per backward.

        Raises:
            LossCallError: on every rank, when a learnable loss ran on some ranks only.
            RankMismatchError: on every rank, when parameters differ by name, shape or dtype, or a parameter created after
                the wrap does not start equal.

        Communication: none, but one frame in a step in which parameters appeared.
        """
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            return
        raw_collectives.on_wait(None)
        if not meeting.sent:
            meeting.send()
        upstream_grad.on_note(None)
        self._calls = meeting.read()
        if self._fresh:
            self._parameters.admit(self._fresh)
        if self._passengers is not None and all(self._calls.gradients):
            self._passengers.board(self._calls.gradients)
            self._departure = self._passengers
        else:
            self._depart_early()

    def _gradient(self, num_bytes: int, _: Tensor) -> None:
        if self._meeting is not None:
            self._ready += num_bytes
            if self._ready >= self._first_bucket:
                if self._holds and self._idle and not self._meeting.sent:  # nothing of the losses is to come
                    self._send(self._opened or [])
                self.agree()

    def returned(self) -> bool:
        """Backward has passed through one call of a loss; after the last one the gradients may leave.

        Returns:
            Whether a backward is open that the call belongs to.
        """
        if self._opened is None:
            return False
        self._outstanding -= 1
        if self._outstanding == 0:
            if self._meeting is None:
                self._depart_early()
            elif not self._meeting.sent:
                self._leave()
            elif self._meeting.arrived():
                self.agree()
        return True

    def _depart_early(self) -> None:
        managed = self._opened or []
        # what belongs to no loss gets its gradient later
        complete = self._outstanding == 0 and all(m.owner >= 0 for m in managed)
        if managed and complete and process_groups.world_size() > 1 and self._flags_ride(managed):
            self._departure = self._depart_expected(managed)

    def reduce(self) -> Calls | None:
        """Replace each gradient by its mean over ranks.

        Returns:
            What the ranks said of their calls; None where no frame was opened.

        Raises:
            LossCallError: on every rank, when a parameter has a gradient on some ranks only.

        Communication: one all-reduce, one more for each gradient over ``LARGE_BYTES``; on an accelerator one frame.
        """
        if self._meeting is not None and not self._meeting.sent and self._holds:  # no gradient reached the encoder
            self._send(self._opened or [])
        self.agree()
        # nothing is created or replaced between the two ends of a backward
        managed, calls, departure = self._opened or self._parameters.now(), self._calls, self._departure
        if managed and process_groups.world_size() > 1:
            grown = departure.grown() if departure is not None else []
            if grown:
                names = ", ".join(managed[i].name for i in grown)
                handshake.all_gather("gradients that grew after their losses", {"parameters": names})
            if departure is not None or self._flags_ride(managed):
                departure = departure or self._depart_expected(managed)
                counts = departure.finish(grown)
                flags, aboard = departure.flags, departure.aboard
            else:
                flags = [gradient_flag(m.parameter.grad) for m in managed]
                everyone = handshake.all_gather(
                    "gradients", {"parameters": self._parameters.describe(managed)}, json.dumps(flags).encode()
                )
                counts = [sum(column) for column in zip(*map(json.loads, everyone), strict=True)]
                aboard = [False] * len(managed)
            if set(counts) - {0, process_groups.world_size()}:
                raise partial_gradients([m.name for m in managed], flags)
            rest = [m for m, count, gone in zip(managed, counts, aboard, strict=True) if count and not gone]
            if rest:
                self._depart_present(rest).finish()
        self._close()
        return calls

    @staticmethod
    def _flags_ride(managed: list[Managed]) -> bool:
        # to read them back from an accelerator would wait for it
        return all(m.parameter.device.type == "cpu" for m in managed)

    def _depart_expected(self, managed: list[Managed]) -> Departure:
        """Send the gradients that may be there; a large one only where the ranks have agreed that its loss ran."""
        calls = self._calls
        expected = [calls is None or m.owner < 0 or calls.expected[m.owner] for m in managed]
        few = [m.parameter.nbytes <= LARGE_BYTES for m in managed]
        small = [e and f for e, f in zip(expected, few, strict=True)]
        large = [
            e and not f and calls is not None and m.owner >= 0 for m, e, f in zip(managed, expected, few, strict=True)
        ]
        return self._depart(managed, small, large, with_flags=True)

    def _depart_present(self, managed: list[Managed]) -> Departure:
        """Send gradients that are there on all ranks."""
        few = [m.parameter.nbytes <= LARGE_BYTES for m in managed]
        return self._depart(managed, few, [not f for f in few], with_flags=False)

    def _depart(self, managed: list[Managed], small: list[bool], large: list[bool], *, with_flags: bool) -> Departure:
        parameters = [m.parameter for m in managed]
        dtype = self._wire_dtype(list(compress(parameters, small)))
        return Departure(parameters, small, large, dtype, self._reduce_dtype, with_flags=with_flags)

    def _wire_dtype(self, parameters: Sequence[Tensor]) -> torch.dtype:
        if (
            self._reduce_dtype is not None and process_groups.world_size() <= 256
        ):  # bfloat16 counts flags exactly up to 256
            return self._reduce_dtype
        dtype = torch.float32
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype
