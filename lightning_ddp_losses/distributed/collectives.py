"""Differentiable collectives for rows whose number may differ per rank, usable with or without Lightning.

torch's own differentiable collectives (``torch.distributed.nn.functional``, ``_functional_collectives``) are deprecated, fail on uneven
rows and do not document their gradient scale (measured with torch 2.13, 2026). Ours begin with a handshake, so that ranks that disagree
raise the same error, and they specify the gradient. Rows are always gathered in rank order: with the local rows first, losses that depend
on the order, and queues, would differ by rank.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ), ``G`` their sum. Backward, for an upstream gradient g_s on each
rank s:

| function | forward | ``backward="sum"`` | ``backward="own_slice"`` (every rank holds the same g) |
|---|---|---|---|
| ``all_gather_with_grad`` | (B, ...) -> (G, ...) in rank order | own rows of sum_s g_s, 1 collective | own rows of g, times W, none |
| ``all_reduce_with_grad`` | sum_s x_s | sum_s g_s, 1 collective | g times W, none |
| ``reduce_scatter_with_grad`` | (G, ...) -> own rows of sum_s x_s | all rows of g in rank order, 1 collective | - |

Tensors must be dense (strided). Gathered rows may have any dtype. Sums accept floats (float8 included), signed integers of up to 64 bits,
unsigned integers of up to 16 bits, booleans (any), and complex64 and complex128. Conjugated and negated views are used with the values
that they represent. A complex gradient follows torch's convention (dL/dRe + i dL/dIm). Sparse, nested and quantised tensors, tensors
without memory (``meta``), and ``torch.func``'s transforms (grad, vjp, jacrev, vmap, jvp, hessian) over a collective of several ranks
raise an error on every rank: the ranks cannot communicate in the backward of such a transform. ``torch.func.functional_call`` is
supported, and so is ``torch.autograd.grad``, except for second derivatives.

Both modes give the derivative of the SUM of the values that the ranks back-propagate. DDP's mean over ranks then divides by W.

Each exchange in backward (``BackwardExchange``) begins with a handshake that names the corresponding exchange in forward. autograd runs
backward in the order in which a rank requests it: two losses back-propagated in a different order on one rank would silently swap their
gradients, or abort gloo if sizes differ (torch 2.13, measured 2026). Therefore every exchange in forward is numbered. All ranks agree on
the number, because they perform its handshake in the same order. Small gradients on the CPU are sent inside the handshake of backward,
which is then the only collective. Otherwise the handshake is an additional collective, which does not wait for a device.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.precision import without_autocast
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    all_gather_rows,
    host_bytes,
    reduce_scatter_rows,
    sum_over_ranks,
    tensor_of_bytes,
    wide_dtype,
)
from lightning_ddp_losses.errors import ConfigurationError, InputError, is_whole

Backward = Literal["sum", "own_slice"]

_NOT_ADDED = {torch.uint32, torch.uint64, torch.complex32}  # not supported by any backend, or not by torch itself
_ROWS = struct.Struct("<q?")  # number of rows of a rank, and whether it needs the gradient


@eager_recursive
def all_gather_with_grad(tensor: Tensor, *, group: Group = None, backward: Backward = "sum") -> Tensor:
    """Gather the rows of all ranks, concatenated along dim 0 in rank order.

    Equivalent to: ``torch.cat([x_0, x_1, ..., x_{W-1}])`` in one process.

    Args:
        tensor: (B, ...), dense, of any dtype. B may differ per rank and be 0, whereas the other dimensions and the dtype must match. A
            0-dim tensor counts as one row.
        group: Process group. None is the world. Without torch.distributed the tensor itself is returned.
        backward: ``"sum"``: each rank receives its own rows of the sum over ranks of their gradients, which is correct for any use.
            ``"own_slice"``: each rank receives its own rows of its local gradient, times W. This is correct only if every rank computes
            the same value from the gathered rows, and does not communicate.

    Returns:
        (G, ...), equal on every rank.

    Communication:
        Forward one handshake and one gather of W x max(B) rows per rank. Backward one exchange of G rows per rank
        (``"sum"``), or none (``"own_slice"``). If any rank needs the gradient, all ranks must run backward under "sum".

    Raises:
        RankMismatchError: on every rank, when ranks disagree on dtype, width, number of dimensions or ``backward``.
        InputError: on every rank, for a tensor that is sparse, nested, quantised, without memory or inside a transform of ``torch.func``.

    Example:
        >>> import torch
        >>> rows = torch.randn(4, 8, requires_grad=True)
        >>> all_gather_with_grad(rows).shape  # with one rank. On two ranks with 4 and 6 rows it is (10, 8)
        torch.Size([4, 8])
    """
    _refuse_tensor("all_gather_with_grad", tensor, backward, group, adds=False)
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if process_groups.world_size(group) == 1:
        return rows
    counts, needs_grad = _exchange_rows("all_gather_with_grad", rows, rows.shape[0], backward, group)
    gathered = all_gather_rows(rows, counts, group)
    if not needs_grad:
        return gathered
    rows = match_requires_grad(rows, True)
    return gather_with_grad("all_gather_with_grad", [gathered], [rows], [counts], backward, group)[0]


@eager_recursive
def all_reduce_with_grad(tensor: Tensor, *, group: Group = None, backward: Backward = "sum") -> Tensor:
    """Add a tensor over ranks, element by element.

    Equivalent to: ``torch.stack([x_0, ..., x_{W-1}]).sum(0)`` in one process.

    Args:
        tensor: Any shape, dense, of a dtype that can be added (see ``distributed.collectives``), equal on all ranks.
        group: Process group. None is the world.
        backward: Gradient, as in ``all_gather_with_grad``: ``"sum"`` of the ranks' gradients, or ``"own_slice"``, W times this rank's own
            gradient, if all ranks back-propagate the same value.

    Returns:
        The sum, same shape, equal on every rank.

    Communication:
        Forward one handshake and one all-reduce. Backward one all-reduce (``"sum"``) or none.

    Raises:
        RankMismatchError: on every rank, when shapes, dtypes or ``backward`` differ.
        InputError: on every rank, as ``all_gather_with_grad``, and for a dtype that cannot be added.

    Example:
        >>> import torch
        >>> count = all_reduce_with_grad(torch.tensor([3.0]))  # how many rows all ranks have together
        >>> count.tolist()
        [3.0]
    """
    _refuse_tensor("all_reduce_with_grad", tensor, backward, group)
    if process_groups.world_size(group) == 1:
        return tensor
    _, needs_grad = _exchange_rows("all_reduce_with_grad", tensor, None, backward, group)
    tensor = match_requires_grad(tensor, needs_grad)
    if backward == "own_slice":
        return sum_with_grad(tensor, group)
    exchange = BackwardExchange("all_reduce_with_grad", group)
    return _with_grad(sum_over_ranks(tensor, group), exchange.all_reduce, tensor)


@eager_recursive
def reduce_scatter_with_grad(tensor: Tensor, rows: int | None = None, *, group: Group = None) -> Tensor:
    """Add a tensor over ranks and keep this rank's rows of the sum.

    Equivalent to: ``torch.stack([x_0, ..., x_{W-1}]).sum(0).split(rows_of_each_rank)[rank]`` in one process.

    Args:
        tensor: (G, ...), dense, of a dtype that can be added (see ``distributed.collectives``), same shape and dtype on all ranks.
        rows: Number of rows that this rank keeps. Over all ranks they must sum to G. If None, each rank keeps G / W.
        group: Process group. None is the world.

    Returns:
        (rows, ...), different on each rank.

    Communication:
        Forward one handshake and one exchange of G rows. Backward one gather of G rows.

    Raises:
        RankMismatchError: on every rank, when shapes or dtypes differ.
        InputError: on every rank, when the rows do not sum to G, and as ``all_reduce_with_grad``.

    Example:
        >>> import torch
        >>> parts = torch.randn(6, 8, requires_grad=True)
        >>> reduce_scatter_with_grad(parts).shape  # with one rank. On two ranks each keeps (3, 8)
        torch.Size([6, 8])
    """
    _refuse_tensor("reduce_scatter_with_grad", tensor, "sum", group)
    _refuse_rows("reduce_scatter_with_grad", tensor, rows, group)
    world_size = process_groups.world_size(group)
    total = tensor.shape[0]
    own = total // world_size if rows is None else rows
    counts, needs_grad = [own], tensor.requires_grad
    if world_size > 1:
        counts, needs_grad = _exchange_rows("reduce_scatter_with_grad", tensor, own, "sum", group, same_shape=True)
    if sum(counts) != total or min(counts) < 0:
        raise InputError(
            "reduce_scatter_with_grad: rows",
            expected=f"non-negative numbers that sum to the {total} rows of the tensor",
            ranks=counts,
            fix="Pass rows= on every rank, or a first dimension that the number of ranks divides.",
            collective=True,
        )
    if world_size == 1:
        return tensor
    tensor = match_requires_grad(tensor, needs_grad)
    run_backward = partial(BackwardExchange("reduce_scatter_with_grad", group).all_gather, counts=counts)
    return _with_grad(reduce_scatter_rows(tensor, counts, group), run_backward, tensor)


def _refuse_tensor(what: str, tensor: object, backward: str, group: Group, *, adds: bool = True) -> None:
    """Reject, on all ranks, a tensor that cannot be sent, or cannot be added."""
    error = None
    if not isinstance(tensor, Tensor):
        got = type(tensor).__name__
        error = InputError(what, expected="a torch.Tensor", got=got, fix="Pass one tensor per call.")
    elif backward not in ("sum", "own_slice"):
        error = InputError(
            f"{what}: backward", expected="'sum' or 'own_slice'", got=repr(backward), fix="Choose 'sum' or 'own_slice'."
        )
    elif process_groups.world_size(group) == 1:
        return
    elif torch_compat.is_in_transform():
        error = handshake.transform_error(what)
    elif tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        got = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        fix = "Make it dense first (to_dense, dequantize, to_padded_tensor)."
        error = InputError(f"{what}: tensor", expected="a dense tensor with memory", got=got, fix=fix)
    elif adds and tensor.dtype in _NOT_ADDED:
        fix = "Convert it to a dtype that holds the sum, for instance int64 or complex64."
        error = InputError(f"{what}: dtype", expected="one that can be added", got=str(tensor.dtype), fix=fix)
    if error is not None:
        handshake.raise_on_all_ranks(error, what, group=group)


def _refuse_rows(what: str, tensor: Tensor, rows: object, group: Group) -> None:
    error = None
    if tensor.ndim == 0:
        error = InputError(f"{what}: tensor", expected="rows along dim 0", got="a 0-dim tensor", fix="Reshape it.")
    elif rows is not None and not is_whole(rows):
        error = InputError(
            f"{what}: rows",
            expected="an int or None",
            got=repr(rows),
            fix="Pass the number of rows that this rank keeps, or None for equal parts.",
        )
    if error is not None:
        handshake.raise_on_all_ranks(error, what, group=group)


def _exchange_rows(
    what: str, tensor: Tensor, rows: int | None, backward: str, group: Group, *, same_shape: bool = False
) -> tuple[list[int], bool]:
    """Start a collective with a handshake, and return the number of rows of each rank and whether any rank needs the gradient."""
    shape: tuple[object, ...] = tuple(tensor.shape)
    if rows is not None and not same_shape:
        shape = ("rows", *tensor.shape[1:])
    must_match = {"shape": str(shape), "dtype": tensor.dtype, "device": tensor.device.type, "backward": backward}
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    payloads = handshake.all_gather(what, must_match, _ROWS.pack(rows or 0, needs_grad), group=group)
    offers = [_ROWS.unpack(payload) for payload in payloads]
    counts = [rows for rows, _ in offers]
    return counts, any(needs for _, needs in offers)


# ---------------------------------------------------------------------- second derivatives are rejected

Grads = tuple[Tensor | None, ...]

_SECOND_FIX = "Penalise the gradient of what each rank computes by itself (the encoder's, a plain loss's), not of a value over all ranks."


def once_differentiable_strict(what: str) -> Callable[[Callable[..., Grads]], Callable[..., Grads]]:
    """Make differentiating the result of an autograd function's ``backward`` an error. The function must save its inputs.

    torch's ``once_differentiable`` reports this only if the upstream gradient has a graph. Directly below a loss it does not have one,
    and the result would be treated as a constant.

    Args:
        what: Name in the message.
    """

    def decorate(backward: Callable[..., Grads]) -> Callable[..., Grads]:
        @functools.wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor | None) -> Grads:
            makes_graph = torch.is_grad_enabled()
            if not makes_graph and not torch_compat.is_any_autocast_on():
                return backward(ctx, *grads)
            devices = {"cpu", *(grad.device.type for grad in grads if grad is not None)}
            # a manual call of backward may run inside the autocast of a training step, but must keep the precision of forward
            with torch.no_grad(), without_autocast(devices):
                found = backward(ctx, *grads)
            if not makes_graph:
                return found
            return forbid_second_derivative(found, (*grads, *ctx.saved_tensors), what)

        # a compiled training step would trace the exchange in its backward
        return eager_recursive(wrapped)

    return decorate


def forbid_second_derivative(gradients: Grads, depends_on: Grads, what: str, fix: str = _SECOND_FIX) -> Grads:
    """Return the same gradients in a graph that raises an error if they are differentiated.

    Args:
        gradients: Results of a ``backward`` without a graph, with ``create_graph=True``.
        depends_on: Tensors, with their graph, from which they were computed.
        what: Name in the message.
        fix: Advice, as a sentence.
    """
    return tuple(None if g is None else _Once.apply(g, what, fix, *depends_on) for g in gradients)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, what: str, fix: str, *depends_on: Tensor | None) -> Tensor:
        ctx.what, ctx.fix = what, fix
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        raise ConfigurationError(
            f"second derivative of {ctx.what}",
            expected="first derivatives only",
            got="a backward through a gradient made with create_graph=True",
            fix=ctx.fix,
        )


# ---------------------------------------------------------------------- the autograd function


_FIXED = 3  # number of arguments of _Exchanged before the tensors


class _Exchanged(torch.autograd.Function):
    """Adds tensors of all ranks to the graph of this rank's own tensors, whose gradients are computed by ``run_backward``."""

    @staticmethod
    def forward(
        ctx: Any, whole: Sequence[Tensor], run_backward: Callable[..., Grads], needs_all: bool, *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run_backward = run_backward
        ctx.set_materialize_grads(False)
        # saved only to reject second derivatives: a constant gradient would be W times the gradient of a single process
        ctx.save_for_backward(*own)
        ctx.zeros = []
        if needs_all:
            ctx.zeros = [partial(torch.zeros, t.shape, dtype=t.dtype, device=t.device) for t in whole]
        return tuple(whole)

    @staticmethod
    @once_differentiable_strict("rows of all ranks")
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        if ctx.zeros:
            # a missing gradient is zero on this rank
            grads = tuple(zeros() if grad is None else grad for grad, zeros in zip(grads, ctx.zeros, strict=True))
        return *[None] * _FIXED, *ctx.run_backward(*grads)


def _with_grad(whole: Tensor, run_backward: Callable[[Tensor], Tensor], own: Tensor) -> Tensor:
    """Add one exchanged tensor to the graph of this rank's tensor."""
    exchanged: tuple[Tensor] = _Exchanged.apply([whole], lambda grad: (run_backward(grad),), True, own)  # type: ignore[no-untyped-call]
    return exchanged[0]


Place: TypeAlias = "tuple[int, int | None, int]"
"""Position of a local tensor: index of the gathered tensor that contains it, its first row and number of rows. None: the whole tensor."""


def own_slices_with_grad(
    whole: Sequence[Tensor], own: Sequence[Tensor], places: Sequence[Place], *, group: Group = None
) -> tuple[Tensor, ...]:
    """Add tensors that are already gathered to the graph, as if ``backward="own_slice"`` had gathered them.

    Args:
        whole: Rows of all ranks, floating point, without a graph.
        own: This rank's tensors, with their graph.
        places: Position of each of ``own``.
        group: Process group. None is the world.

    Returns:
        ``whole``, in the graph of ``own``.

    Communication: none.
    """
    run_backward = partial(_own_slices, process_groups.world_size(group), places, [t.shape for t in own])
    joined: tuple[Tensor, ...] = _Exchanged.apply(whole, run_backward, False, *own)  # type: ignore[no-untyped-call]
    return joined


def _own_slices(world_size: int, places: Sequence[Place], shapes: Sequence[torch.Size], *grads: Tensor | None) -> Grads:
    """Return this rank's rows of gradients that are equal on all ranks, times W, which is their sum over ranks."""
    found: list[Tensor | None] = []
    for (index, start, rows), shape in zip(places, shapes, strict=True):
        grad = grads[index]
        if grad is not None and start is not None:
            grad = grad.narrow(0, start, rows)
        # autograd would sum a gradient of another shape to the shape of the tensor that was sent
        found.append(None if grad is None else (grad * world_size).reshape(shape))
    return tuple(found)


def sum_with_grad(tensor: Tensor, group: Group) -> Tensor:
    """Sum a tensor of agreed shape over ranks, if every rank computes the same function of the sum.

    Returns:
        The sum, equal on every rank. Its gradient is W times this rank's own gradient.

    Communication: one all-reduce in forward, none in backward.
    """
    if process_groups.world_size(group) == 1:
        return tensor
    return own_slices_with_grad([sum_over_ranks(tensor, group)], [tensor], [(0, None, 0)], group=group)[0]


def gather_with_grad(
    what: str,
    whole: Sequence[Tensor],
    tensors: Sequence[Tensor],
    counts: list[list[int]],
    backward: Backward,
    group: Group,
) -> tuple[Tensor, ...]:
    """Add the gathered rows of several tensors that need a gradient on any rank to the graph of this rank's tensors.

    Args:
        what: Operation, for the handshake of backward.
        whole: Rows of all ranks, of each tensor, without a graph.
        tensors: Tensors of this rank.
        counts: Rows of each rank, per tensor.
        backward: Gradient mode, as in ``all_gather_with_grad``.
        group: Process group. None is the world.
    """
    if backward == "own_slice":
        rank = process_groups.rank(group)
        places = [(i, sum(rows[:rank]), rows[rank]) for i, rows in enumerate(counts)]
        return own_slices_with_grad(whole, tensors, places, group=group)
    run_backward = partial(_rows_of_sum, BackwardExchange(what, group), counts)
    gathered: tuple[Tensor, ...] = _Exchanged.apply(whole, run_backward, True, *tensors)  # type: ignore[no-untyped-call]
    return gathered


def _rows_of_sum(exchange: BackwardExchange, counts: list[list[int]], *grads: Tensor) -> Grads:
    """Return this rank's rows of the gradients' sum over ranks."""
    return tuple(exchange.reduce_scatter(grads, counts))


# ---------------------------------------------------------------------- exchanges in backward

_NUMBER = "number of the forward call whose gradient this is (back-propagate in the same order on all ranks)"


class BackwardExchange:
    """The exchange in backward that corresponds to one in forward. Construct it directly after the handshake of the forward exchange.

    Args:
        title: Name of the loss or layer in messages, the same on every rank.
        group: Process group. None is the world.
    """

    def __init__(self, title: str, group: Group) -> None:
        self._title, self._group = title, group
        self._number, self._times = 0, 0
        if process_groups.world_size(group) > 1:
            notes = process_groups.internal_groups(group).notes
            self._number = notes[BackwardExchange] = notes.get(BackwardExchange, 0) + 1

    def open(self, payload: bytes = b"") -> list[bytes]:
        """Perform the handshake of this exchange's backward, and return the ranks' payloads in rank order.

        Raises:
            RankMismatchError: on every rank, when a rank back-propagates something else, or this exchange once more.

        Communication: one handshake.
        """
        self._times += 1
        must_match = {_NUMBER: self._number, "times back-propagated": self._times}
        return handshake.all_gather(f"backward of {self._title}", must_match, payload, group=self._group)

    def reduce_scatter(self, gradients: Sequence[Tensor], counts: Sequence[list[int]]) -> list[Tensor]:
        """Return this rank's rows of each gradient's sum over ranks, added in rank order on the CPU, in NCCL's own order on a device.

        Args:
            gradients: (G, ...) each, of the same shapes and dtypes on all ranks.
            counts: Rows of every rank, for each gradient.

        Communication: one handshake, which also carries small gradients on the CPU. Otherwise one exchange of the rows per dtype follows.
        """
        if not self._fits(gradients):
            self.open()
            return _reduce_scatter_packed(gradients, counts, self._group)
        payloads = self.open(b"".join(map(host_bytes, gradients)))
        return sums_of_own_rows(payloads, gradients, counts, process_groups.rank(self._group))

    def all_reduce(self, gradient: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order if it is sent in the handshake. Communication: as ``reduce_scatter``."""
        if not self._fits([gradient]):
            self.open()
            return sum_over_ranks(gradient, self._group)
        return _sum_of_parts(self.open(host_bytes(gradient)), gradient.shape, gradient.dtype)

    def all_gather(self, gradient: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of all ranks in rank order, with ``counts`` rows per rank. Communication: as ``reduce_scatter``."""
        # size on the rank with the most rows, equal on all ranks
        longest = max(counts) * gradient.shape[1:].numel() * gradient.element_size()
        if gradient.device.type != "cpu" or longest > handshake.inline_capacity(self._group):
            self.open()
            return all_gather_rows(gradient, counts, self._group)
        everyone = tensor_of_bytes(self.open(host_bytes(gradient)))
        return everyone.view(gradient.dtype).view(sum(counts), *gradient.shape[1:])

    def _fits(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether the gradients fit in the handshake, which is the same decision on every rank."""
        on_host = all(gradient.device.type == "cpu" for gradient in gradients)
        return on_host and sum(gradient.nbytes for gradient in gradients) <= handshake.inline_capacity(self._group)


def sums_of_own_rows(
    payloads: Sequence[bytes], tensors: Sequence[Tensor], counts: Sequence[Sequence[int]], rank: int, start: int = 0
) -> list[Tensor]:
    """Return one rank's rows of the sums of some tensors over ranks, added in rank order, from the ranks' bytes.

    Args:
        payloads: Bytes of each rank.
        tensors: (G, ...), this rank's tensors, whose bytes follow each other in its payload.
        counts: Rows of every rank, for each tensor.
        rank: Rank that owns the rows.
        start: Offset of the first tensor in a payload.
    """
    found = []
    for tensor, rows in zip(tensors, counts, strict=True):
        shape = torch.Size([rows[rank], *tensor.shape[1:]])
        row_bytes = tensor.shape[1:].numel() * tensor.element_size()
        first = start + sum(rows[:rank]) * row_bytes
        parts = [payload[first : first + rows[rank] * row_bytes] for payload in payloads]
        found.append(_sum_of_parts(parts, shape, tensor.dtype))
        start += tensor.nbytes
    return found


def _sum_of_parts(parts: Sequence[bytes], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Sum one tensor over ranks, given as bytes of each rank, in at least float32."""
    everyone = tensor_of_bytes(parts).view(dtype).view(len(parts), *shape)
    return everyone.sum(0, dtype=wide_dtype(dtype)).to(dtype)


def _reduce_scatter_packed(gradients: Sequence[Tensor], counts: Sequence[list[int]], group: Group) -> list[Tensor]:
    """Return this rank's rows of each gradient's sum over ranks. Gradients of one dtype are sent together."""
    dtypes = {gradient.dtype for gradient in gradients}
    if len(gradients) < 2 or len(dtypes) > 1:
        return [reduce_scatter_rows(gradient, rows, group) for gradient, rows in zip(gradients, counts, strict=True)]
    # each rank's rows of all gradients, concatenated
    rank, world_size = process_groups.rank(group), len(counts[0])
    parts = [torch.split(gradient, rows) for gradient, rows in zip(gradients, counts, strict=True)]
    pieces, sizes = [], []
    for receiver in range(world_size):
        own = [part[receiver].reshape(-1) for part in parts]
        pieces += own
        sizes.append([piece.numel() for piece in own])
    received = reduce_scatter_rows(torch.cat(pieces), [sum(each) for each in sizes], group)
    flat = torch.split(received, sizes[rank])
    return [piece.view(part[rank].shape) for piece, part in zip(flat, parts, strict=True)]
