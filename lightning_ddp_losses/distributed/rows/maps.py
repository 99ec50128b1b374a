"""The linear maps that lead from rows to plain tensors and back, each with the transposed one as its backward (``call`` has the table).

Sums of backward are exchanged together, as those of forward are. The gradient of a plain tensor that rows were computed with is a sum over
ranks. It is noted where this rank's part is known (``_Share``), and exchanged where the gradient is used (``_Await``), together with all
that were noted until then. autograd runs nodes in the reverse order of their numbers, so ``_Await`` gets the lowest of the call: it runs
when nothing else of the call can. The means of two views are so one exchange, whatever lies between them.

Second derivatives, and a checkpoint that computes once more, exchange each sum where its part is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.raw_collectives import (
    all_gather_rows,
    host_bytes,
    reduce_scatter_rows,
    tensor_of_bytes,
)
from lightning_ddp_losses.distributed.rows.call import Exchanged, Place, RowsCall, line_of_loss
from lightning_ddp_losses.distributed.rows.exchange import SUM, Part, SharedExchange

# ---------------------------------------------------------------------- from rows to plain tensors and back


def share(call: RowsCall, plain: Tensor, operator: str) -> Tensor:
    """Return a plain tensor as an operand of this rank's rows. Communication: a share of one exchange in backward, if it has a gradient."""
    call.note_plain(plain)
    if not plain.requires_grad or not torch.is_grad_enabled():
        return plain
    place = Place(call, operator, line_of_loss())
    if call.is_over:
        return shared_now(plain, place)
    later = LaterSum(place)
    awaited: Tensor = _Await.apply(plain, later)  # type: ignore[no-untyped-call]
    compat.number_node_(awaited, call.waiting.first_node)
    return _Share.apply(awaited, place, later)  # type: ignore[no-any-return, no-untyped-call]


def shared_now(plain: Tensor, place: Place) -> Tensor:
    """Return a plain tensor as an operand of this rank's rows. Communication: one exchange in backward."""
    return _Share.apply(plain, place, None)  # type: ignore[no-any-return, no-untyped-call]


def added_now(part: Tensor, place: Place) -> Tensor:
    """Return the sum over ranks of this rank's part. Communication: one exchange, none in backward."""
    return _Add.apply(part, place)  # type: ignore[no-any-return, no-untyped-call]


def stacked_now(part: Tensor, place: Place) -> Tensor:
    """Return a tensor of each rank, (W, ...). Communication: one exchange, none in backward."""
    counts = (1,) * place.call.world_size
    return _Gather.apply(part.unsqueeze(0), counts, 0, place)  # type: ignore[no-any-return, no-untyped-call]


def gather(call: RowsCall, rows: Tensor, counts: tuple[int, ...], dim: int, operator: str) -> Tensor:
    """Return the rows of all ranks. Communication: one handshake, and one gather of what does not fit into it."""
    place = Place(call, operator, line_of_loss())
    return _Gather.apply(rows, counts, dim, place)  # type: ignore[no-any-return, no-untyped-call]


def cut(call: RowsCall, plain: Tensor, counts: tuple[int, ...], dim: int, operator: str) -> Tensor:
    """Return this rank's rows of a plain tensor. Communication: that of ``gather`` in backward, if it has a gradient."""
    call.note_plain(plain)
    if not plain.requires_grad or not torch.is_grad_enabled():
        return plain.narrow(dim, sum(counts[: call.rank]), counts[call.rank])
    return cut_at(plain, counts, dim, Place(call, operator, line_of_loss()))


def cut_at(plain: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
    """Return this rank's rows of a plain tensor."""
    return _Cut.apply(plain, counts, dim, place)  # type: ignore[no-any-return, no-untyped-call]


def collect(call: RowsCall, rows: Tensor, counts: tuple[int, ...], dim: int, operator: str) -> Tensor:
    """Return the rows of all ranks as an operand of this rank's rows.

    Communication: that of ``gather``. In backward one handshake, and one reduce-scatter of what does not fit into it.
    """
    place = Place(call, operator, line_of_loss())
    return _Collect.apply(rows, counts, dim, place)  # type: ignore[no-any-return, no-untyped-call]


# ---------------------------------------------------------------------- sums of backward


class LaterSum:
    """The sum over ranks of the gradient of one plain tensor.

    Args:
        place: What it belongs to, in forward.

    Attributes:
        part: This rank's part, from where it is known to where the sum is used.
        value: The sum, once it is exchanged.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.part: Tensor | None = None
        self.value: Tensor | None = None

    def note(self, part: Tensor) -> None:
        """Note this rank's part for the next exchange."""
        self.part, self.value = part, None
        self.place.call.waiting.in_backward.append(self)

    def take(self) -> Tensor | None:
        """Return the sum, None if no part was noted. Communication: one exchange of all parts that were noted, if it is not known yet."""
        if self.part is None:
            return None
        if self.value is None:
            _exchange_noted(self.place.call)
        found, self.part, self.value = self.value, None, None
        return found


def _exchange_noted(call: RowsCall) -> None:
    """Exchange the sums of backward that were noted."""
    waiting, call.waiting.in_backward = call.waiting.in_backward, []
    parts = [Part(each.part, each.place.backward()) for each in waiting if each.part is not None]
    for each, value in zip(waiting, SharedExchange(call, parts).run(), strict=True):
        each.value = value


class _Await(torch.autograd.Function):
    """A plain tensor. Backward returns the sum over ranks of its gradient, of which ``_Share`` has noted this rank's part."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, later: LaterSum) -> Tensor:
        ctx.later = later
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # where second derivatives are asked for, _Share has exchanged it
        found = None if torch.is_grad_enabled() else ctx.later.take()
        return grads[0] if found is None else found, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, place: Place, later: LaterSum | None) -> Tensor:
        ctx.place, ctx.later = place, later
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.later is None or torch.is_grad_enabled():
            return added_now(grads[0], ctx.place.backward()), None, None
        ctx.later.note(grads[0])
        return grads[0], None, None


# ---------------------------------------------------------------------- maps that exchange now


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return SharedExchange(place.call, [Part(part, place)]).run()[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return shared_now(grads[0], ctx.place.backward()), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
        ctx.place, ctx.counts, ctx.dim = place, counts, dim
        return _gathered(rows, counts, dim, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return cut_at(grads[0], ctx.counts, ctx.dim, ctx.place.backward()), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
        ctx.place, ctx.counts, ctx.dim = place, counts, dim
        rank = place.call.rank
        return plain.narrow(dim, sum(counts[:rank]), counts[rank])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Gather.apply(grads[0], ctx.counts, ctx.dim, ctx.place.backward()), None, None, None  # type: ignore[no-untyped-call]


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
        ctx.place, ctx.counts, ctx.dim = place, counts, dim
        return _gathered(rows, counts, dim, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Scatter.apply(grads[0], ctx.counts, ctx.dim, ctx.place.backward()), None, None, None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
        ctx.place, ctx.counts, ctx.dim = place, counts, dim
        return _own_rows_of_sum(whole, counts, dim, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Collect.apply(grads[0], ctx.counts, ctx.dim, ctx.place.backward()), None, None, None  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------- exchanges of rows


def _gathered(rows: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
    """Return (..., G, ...) of (..., B, ...)."""
    call = place.call
    own = rows.movedim(dim, 0)
    form = f"{('rows', *own.shape[1:])} {own.dtype} on {own.device.type}"
    row_numbers = own.shape[1:].numel()
    call.exchanged.append(Exchanged("rows", place.operator, place.line, sum(counts) * row_numbers))
    longest = max(counts) * row_numbers * own.element_size()
    if not own.is_cpu or longest > handshake.inline_capacity(call.group) // 2:
        _meet(place, "rows of all ranks", form)
        found = all_gather_rows(own.resolve_conj(), list(counts), call.group)
    else:
        payloads = _meet(place, "rows of all ranks", form, host_bytes(own.resolve_conj().contiguous()))
        found = tensor_of_bytes(payloads).view(own.dtype).view(sum(counts), *own.shape[1:])
    # not a view: autograd would refuse to change it in place
    return found.movedim(0, dim).contiguous().detach()


def _own_rows_of_sum(whole: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
    """Return this rank's rows (..., B, ...) of the sum over ranks of (..., G, ...)."""
    call = place.call
    start = sum(counts[: call.rank])
    if whole.is_cpu and whole.nbytes <= handshake.inline_capacity(call.group) // 2:
        total = SharedExchange(call, [Part(whole, place)]).run()[0]
        return total.narrow(dim, start, counts[call.rank])
    call.exchanged.append(Exchanged("sum", place.operator, place.line, whole.numel()))
    _meet(place, SUM, f"{tuple(whole.shape)} {whole.dtype} on {whole.device.type}")
    own = reduce_scatter_rows(whole.movedim(dim, 0), list(counts), call.group)
    return own.movedim(0, dim)


def _meet(place: Place, what: str, form: str, payload: bytes = b"") -> list[bytes]:
    gradient = "gradient of " if place.in_backward else ""
    must_match: dict[str, object] = {"of": form, "exchanges before": len(place.call.exchanged)}
    return place.call.meet(f"{gradient}{what} ({place.operator})", place.line, must_match, payload)
