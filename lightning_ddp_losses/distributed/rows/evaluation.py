"""Evaluate a formula on the rows of all ranks, of which each rank holds its own (``GlobalRows``), with its exact value and gradient.

The rules of operators are in separate files: ``local`` (row by row), ``views``, ``sums``, ``normalization``, ``products`` and ``losses``.
This file imports them, and ``RULES`` contains all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs, torch_compat
from lightning_ddp_losses.core.autograd_graph import inside_global_batch, match_requires_grad
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.rows import local, losses, normalization, products, sums, views
from lightning_ddp_losses.distributed.rows.call import RowsCall, line_of_error
from lightning_ddp_losses.distributed.rows.nests import mapped, tensors_in
from lightning_ddp_losses.distributed.rows.pending import PendingValue, close_call, plain_of
from lightning_ddp_losses.distributed.rows.tensor import GlobalRows, memory_error
from lightning_ddp_losses.errors import InputError

RULE_FILES = (local, views, sums, normalization, products, losses)
"""The files whose rules are registered when this file is imported."""

_FORM = struct.Struct("<q?")  # number of rows of a rank, and whether they require a gradient


class OpenedRows:
    """The arguments of one call as rows of all ranks.

    Args:
        title: Name of the loss in messages.
        args: Positional arguments of this rank, which may be nests of tensors.
        kwargs: Keyword arguments of this rank.
        batch_dims: Dimension of the samples, by position or name (default 0). None marks an argument that is equal on all ranks.
        must_match: Further values that must be equal on all ranks, by name.
        extra: Bytes that this rank sends to the other ranks.
        group: Process group. None is the world.

    Attributes:
        args: Positional arguments, with tensors replaced by rows.
        kwargs: Keyword arguments, with tensors replaced by rows.
        call: Their call.
        digests: Digests of the lists of exchanges of all ranks.
        rows_of_ranks: Numbers of rows of all ranks, as bytes.
        extras: The bytes of all ranks.
        own: This rank's tensors among the arguments.
        counts: Rows of each rank, by argument (those in lists and dicts are left out).

    Raises:
        InputError: on every rank, for a tensor without the dimension, sparse, nested or without memory.
        RankMismatchError: on every rank, if shapes, dtypes, devices, numbers among the arguments or grad mode differ.

    Communication: one handshake.
    """

    def __init__(
        self,
        title: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_dims: dict[int | str, int | None],
        must_match: dict[str, object],
        extra: bytes,
        group: Group,
    ) -> None:
        own: list[Tensor] = []
        dims: list[int | None] = []
        names: list[str] = []
        given: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        for name, value in given.items():
            for tensor in inputs.tensors_in(value):
                dim = batch_dims.get(name, 0) if tensor.ndim else None
                _check_rows(f"{title}: argument {name!r}", tensor, dim)
                own.append(tensor)
                names.append(repr(name))
                dims.append(None if dim is None else dim % tensor.ndim)
        payload = b"".join(_FORM.pack(*_rows_of(tensor, dim)) for tensor, dim in zip(own, dims, strict=True))
        forms = {
            "arguments": "; ".join(_form_of(tensor, dim) for tensor, dim in zip(own, dims, strict=True)),
            "other arguments": _texts_in(given),
            "gradients": "on" if torch.is_grad_enabled() else "off",
        }
        self.call = RowsCall(title, group, "\n".join([title, *forms.values()]))
        digest = self.call.exchanges.digest
        payloads = handshake.all_gather(title, must_match | forms, payload + digest + extra, group=group)
        self.digests = [sent[len(payload) : len(payload) + len(digest)] for sent in payloads]
        self.extras = [sent[len(payload) + len(digest) :] for sent in payloads]
        self.rows_of_ranks = b"".join(sent[: len(payload)] for sent in payloads)
        rows = [self._opened(number, tensor, dims[number], payloads) for number, tensor in enumerate(own)]
        for name, tensor, dim in zip(names, own, dims, strict=True):
            if dim is not None and not tensor.is_inference():
                self.call.watch_argument(name, tensor)
        self.own = own
        following = iter(rows)
        given = inputs.map_tensors(lambda tensor: next(following), given)
        self.counts = {str(name): list(each._counts) for name, each in given.items() if isinstance(each, GlobalRows)}
        self.args = tuple(given[position] for position in range(len(args)))
        self.kwargs = {name: given[name] for name in kwargs}

    def _opened(self, number: int, tensor: Tensor, dim: int | None, payloads: Sequence[bytes]) -> Tensor:
        """Return one tensor as rows, or unchanged if it is plain."""
        sent = [_FORM.unpack_from(payload, number * _FORM.size) for payload in payloads]
        tensor = match_requires_grad(tensor, any(needs for _, needs in sent))
        if dim is None:
            self.call.note_plain(tensor)
            return tensor
        counts = tuple(count for count, _ in sent)
        return GlobalRows(_times_ranks(tensor, self.call.world_size), counts, dim, self.call)

    def close(self, value: Any) -> Any:
        """Reject a result that contains rows or differs between ranks, and writes that are lost.

        Returns:
            The result, with pending values resolved.

        Communication: one handshake, in which pending sums are exchanged.
        """
        call = self.call
        for tensor in tensors_in(value):
            if isinstance(tensor, GlobalRows):
                raise InputError(
                    f"{call.title}: result",
                    expected="values that are equal on all ranks",
                    got=f"rows of all ranks {tuple(tensor.shape)}",
                    fix="Reduce them (mean, sum): give a loss of torch reduction='mean' or 'sum'.",
                )
            # ranks compare the operations that a pending value consists of
            if type(tensor) is not PendingValue or tensor.is_known():
                call.note_plain(plain_of(tensor))
        call.refuse_lost_writes()
        close_call(call)
        return mapped(plain_of, value)


def evaluate_on_rows(opened: OpenedRows, formula: Callable[..., Any]) -> Any:
    """Return the value of a formula, whose operators on rows follow the rules."""
    call = opened.call
    call.exchanges.begin(opened.digests, opened.rows_of_ranks)
    try:
        with inside_global_batch():
            value = formula(*opened.args, **opened.kwargs)
            value = opened.close(value)
    except Exception as error:
        call.exchanges.fail(error)
        if not isinstance(error, RuntimeError) or "Cannot access data pointer" not in str(error):
            raise
        raise memory_error("a kernel or an export on rows of all ranks", line_of_error(error)) from error
    finally:
        call.exchanges.end()
        call.is_over = True
    if isinstance(formula, nn.Module):
        _resolve_buffers_(formula)
    return value


def _resolve_buffers_(module: nn.Module) -> None:
    """Replace buffers that the formula has set to a pending value by plain tensors."""
    for part in module.modules():
        slots = torch_compat.buffer_slots(part)
        for name, buffer in slots.items():
            if type(buffer) is PendingValue:
                slots[name] = buffer.resolved()


def _times_ranks(tensor: Tensor, world_size: int) -> Tensor:
    """Return a view whose gradient is multiplied by W, because DDP's mean over ranks divides it by W."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return tensor.view_as(tensor)
    scaled = tensor.view_as(tensor)
    scaled.register_hook(lambda grad: grad * world_size)  # type: ignore[no-untyped-call]
    return scaled.view_as(scaled)


def _check_rows(what: str, tensor: Tensor, dim: int | None) -> None:
    is_dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    if isinstance(tensor, GlobalRows) or not is_dense:
        got = f"{type(tensor).__name__} {tensor.dtype}, {tensor.layout}"
        raise InputError(what, expected="a dense tensor with memory", got=got, fix="Make it dense first.")
    if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
        got = f"{tensor.ndim} dimensions and batch_dims {dim}"
        raise InputError(
            what,
            expected="a dimension of rows that the tensor has",
            got=got,
            fix="Correct batch_dims of this argument, or pass None if all ranks give it an equal value.",
        )


def _rows_of(tensor: Tensor, dim: int | None) -> tuple[int, bool]:
    needs_grad = tensor.requires_grad and torch.is_grad_enabled()
    return (0 if dim is None else tensor.shape[dim]), needs_grad


def _form_of(tensor: Tensor, dim: int | None) -> str:
    shape = ["rows" if each == dim else str(size) for each, size in enumerate(tensor.shape)]
    return f"({', '.join(shape)}) {tensor.dtype} on {tensor.device.type}"


def _texts_in(given: dict[int | str, Any]) -> str:
    """Return the arguments that are neither tensors nor nests, as text."""
    texts = []
    for name, leaf in inputs.leaves(given, ""):
        if isinstance(leaf, (int, float, str, bool)) or leaf is None:
            texts.append(f"{name}={leaf!r}")
    return ", ".join(texts)
