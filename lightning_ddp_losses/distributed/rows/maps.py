"""The linear maps from rows to plain tensors and back, each with its transpose as its backward (the table is in ``call``).

Sums of backward are exchanged together, like sums of forward. The gradient of a plain tensor that was combined with rows is a sum over
ranks. This rank's part is recorded when it has been computed (``_Share``), and exchanged when the gradient is used (``_Await``), together
with all other parts recorded by then. Autograd runs nodes in the reverse order of their numbers, so ``_Await`` has the lowest number of the
call: it runs only when no other node of the call can run. As a result, the means of two views take one exchange, even if other operators
run between them.

Second derivatives, and a checkpoint that recomputes, exchange each sum as soon as its part has been computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.raw_collectives import (
    all_gather_rows,
    host_bytes,
    reduce_scatter_rows,
    tensor_of_bytes,
)
from lightning_ddp_losses.distributed.rows.call import Exchanged, Place, RowsCall, line_of_loss
from lightning_ddp_losses.distributed.rows.exchange import Part, SharedExchange
from lightning_ddp_losses.distributed.rows.listed import SUM

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
    torch_compat.number_node_(awaited, call.waiting.first_node)
    return _Share.apply(awaited, place, later)  # type: ignore[no-any-return, no-untyped-call]


def shared_now(plain: Tensor, place: Place) -> Tensor:
    """Return a plain tensor as an operand of this rank's rows. Communication: one exchange in backward."""
    return _Share.apply(plain, place, None)  # type: ignore[no-any-return, no-untyped-call]


def added_now(part: Tensor, place: Place) -> Tensor:
    """Return the sum over ranks of this rank's part. Communication: one exchange, none in backward."""
    return _Add.apply(part, place)  # type: ignore[no-any-return, no-untyped-call]


def stacked_now(part: Tensor, place: Place) -> Tensor:
    """Return the tensors of all ranks, (W, ...). Communication: one exchange, none in backward."""
    counts = (1,) * place.call.world_size
    return _Gather.apply(part.unsqueeze(0), counts, 0, place)  # type: ignore[no-any-return, no-untyped-call]


def gather(call: RowsCall, rows: Tensor, counts: tuple[int, ...], dim: int, operator: str) -> Tensor:
    """Return the rows of all ranks. Communication: one handshake, and one gather if they do not fit into it."""
    place = Place(call, operator, line_of_loss())
    return _Gather.apply(rows, counts, dim, place)  # type: ignore[no-any-return, no-untyped-call]


def cut(call: RowsCall, plain: Tensor, counts: tuple[int, ...], dim: int, operator: str) -> Tensor:
    """Return this rank's rows of a plain tensor. Communication: as ``gather`` in backward, if it requires a gradient."""
    call.note_plain(plain)
    if not plain.requires_grad or not torch.is_grad_enabled():
        return plain.narrow(dim, sum(counts[: call.rank]), counts[call.rank])
    return cut_at(plain, counts, dim, Place(call, operator, line_of_loss()))


def cut_at(plain: Tensor, counts: tuple[int, ...], dim: int, place: Place) -> Tensor:
    """Return this rank's rows of a plain tensor."""
    return _Cut.apply(plain, counts, dim, place)  # type: ignore[no-any-return, no-untyped-call]


def collect(call: RowsCall, rows: Tensor, counts: tuple[int, ...], dim: int, operator: str) -> Tensor:
    """Return the rows of all ranks as an operand of this rank's rows.

    Communication: as ``gather``. In backward one handshake, and one reduce-scatter if the gradient does not fit into it.
    """
    place = Place(call, operator, line_of_loss())
    return _Collect.apply(rows, counts, dim, place)  # type: ignore[no-any-return, no-untyped-call]


# ---------------------------------------------------------------------- sums of backward


class LaterSum:
    """The sum over ranks of the gradient of one plain tensor.

    Args:
        place: Origin of its exchange, as in forward.

    Attributes:
        part: This rank's part, from when it has been computed until the sum is used.
        value: The sum, once it has been exchanged.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.part: Tensor | None = None
        self.value: Tensor | None = None

    def note(self, part: Tensor) -> None:
        """Record this rank's part for the next exchange."""
        self.part, self.value = part, None
        self.place.call.waiting.in_backward.append(self)

    def take(self) -> Tensor | None:
        """Return the sum, or None if no part was recorded. Communication: one exchange of all recorded parts, unless already exchanged."""
        if self.part is None:
            return None
        if self.value is None:
            _exchange_noted(self.place.call)
        found, self.part, self.value = self.value, None, None
        return found


def _exchange_noted(call: RowsCall) -> None:
    """Exchange all recorded sums of backward."""
    waiting, call.waiting.in_backward = call.waiting.in_backward, []
    parts = [Part(each.part, each.place.backward()) for each in waiting if each.part is not None]
    for each, value in zip(waiting, SharedExchange(call, parts).run(), strict=True):
        each.value = value


class _Await(torch.autograd.Function):
    """A plain tensor. Backward returns the sum over ranks of its gradient, of which ``_Share`` has recorded this rank's part."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, later: LaterSum) -> Tensor:
        ctx.later = later
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # if second derivatives are requested, _Share has already exchanged it
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
    # not a view, because autograd would not allow in-place changes
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
    call = place.call
    return call.meet(call.comparison(f"{gradient}{what} ({place.operator})", place.line, must_match), payload)
