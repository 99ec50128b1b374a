"""`microbatched`: run an encoder on a large batch in pieces that backward recomputes: the large batch's gradient with a piece's memory.

A contrastive loss needs the embeddings of the whole batch together, but not the encoder's activations. Forward does not keep activations.
Backward recomputes one piece after the other, with the random numbers and autocast of its forward, and back-propagates through it. It is a
single graph, in which each parameter's gradient is complete after one backward, so DDP reduces it once.

Peak memory: the activations of one piece, the results of all rows (once), their gradient, and the encoder's complete gradient.
No tensor allocated by a piece is kept, because a small block would pin the hole that the activations of the piece leave in the heap.
Autograd's nodes of a piece and their Python objects do stay, about 30 KiB for 13 layers, and may pin holes if there are many hundreds of
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses.core import inputs, precision, torch_compat
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.random_state import (
    PieceRuns,
    RandomStates,
    devices_in_use,
    global_generators,
    preserve_random_state,
)
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import InputError, expect, expect_count, expect_option
from lightning_ddp_losses.randomness.pieces import start_pieces
from lightning_ddp_losses.randomness.places import memory_order
from lightning_ddp_losses.randomness.step_draws import beside_the_step


def microbatched(
    encoder: nn.Module, chunk_size: int, *, batch_norm: Literal["refuse", "eval"] = "refuse"
) -> Callable[..., Any]:
    """Return a function that runs an encoder over its batch in pieces.

    Equivalent to: ``encoder(x)``, value and gradient, for an encoder that processes each row independently. The pieces draw their random
    numbers one after the other, and draw the same numbers again in backward. Inside ``global_randomness`` they draw the numbers of
    ``encoder(x)``.

    Args:
        encoder: Any module, including one inside a LightningModule or a ``DistributedDataParallel`` (or that wrapper itself).
            It is not wrapped: parameter names and checkpoints stay the same.
        chunk_size: Rows at a time, at least 1. The last piece may be smaller. If ``fully_shard`` divides the encoder, each forward waits
            for all ranks, so every rank runs as many pieces as the one with the most rows, some of them empty.
        batch_norm: Batch norm in training would normalise each piece separately. ``"refuse"``: raise an error that names it. ``"eval"``:
            use its running statistics without changing them.

    Returns:
        A function with the arguments of ``encoder``. Tensors with as many rows (dim 0) as the first are batches, and everything else is
        passed to each piece unchanged. Its results, tensors or nests of them, are joined along dim 0.

    Raises:
        ConfigurationError: for batch norm in training and other layers that write their buffers, by name. For an invalid chunk size. In
            backward, if a parameter has changed since forward.
        InputError: for a call without a batch, and for results with a first dimension that does not count rows (a sequence's time).

    Source: the aim of Gao et al. 2021, arXiv:2101.06983 (GradCache), by recomputation.

    Example:
        >>> import torch
        >>> encoder = torch.nn.Linear(3, 2)
        >>> embeddings = microbatched(encoder, 4)(torch.randn(10, 3))
    """
    is_module, got = isinstance(encoder, nn.Module), type(encoder).__name__
    expect(
        is_module, "microbatched: encoder", expected="a torch.nn.Module", got=got, fix="Pass the encoder as a module."
    )
    expect_count("microbatched: chunk_size", chunk_size)
    expect_option("microbatched: batch_norm", batch_norm, ("refuse", "eval"))
    if isinstance(encoder, nn.parallel.DistributedDataParallel):
        return _InsideDDP(encoder, _Pieces(encoder.module, chunk_size, batch_norm))
    return _Pieces(encoder, chunk_size, batch_norm)


class _Pieces:
    """Runs an encoder in pieces. It is not a module, so that an attribute of this kind does not add parameter names."""

    def __init__(self, encoder: nn.Module, chunk_size: int, batch_norm: str) -> None:
        self.encoder, self.chunk_size, self.batch_norm = encoder, chunk_size, batch_norm
        self._title = f"microbatched({type(encoder).__name__})"
        self.forward: Callable[..., Any] = encoder
        self._has_rows_first = False

    @eager_recursive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # 1. rows of the batch
        rows = next((tensor.shape[0] for tensor in inputs.tensors_in((args, kwargs)) if tensor.ndim), None)
        if rows is None:
            raise InputError(
                "microbatched",
                expected="a batch along dim 0",
                got="no tensor with rows",
                fix="Pass tensors with rows in dimension 0.",
            )
        self._refuse_batch_norm()
        versions, pieces = self._parameter_versions(), self._number_of_pieces(rows)
        if pieces > 1 and not self._has_rows_first:
            self._refuse_other_dims(versions, args, kwargs, rows)
        # 2. random numbers of the pieces
        tensors = inputs.tensors_in((args, kwargs))
        batch = [tensor for tensor in tensors if tensor.ndim and tensor.shape[0] == rows]
        runs: PieceRuns | None = start_pieces(batch, self.encoder)
        if runs is None:
            devices = {tensor.device for tensor in tensors}
            runs = RandomStates(devices, pieces if torch.is_grad_enabled() else 0)
        # 3. run one piece after the other, and join their results: a rank without rows still runs its encoder
        joined = _Joined(rows)
        run: Callable[..., Any] = self._run_again
        if torch.is_grad_enabled():  # backward reruns a piece with the same random numbers
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=not runs.are_complete)
        with runs.of_all():
            for number in range(pieces):
                start = min(number * self.chunk_size, rows)
                piece = slice(start, min(start + self.chunk_size, rows))
                piece_args, piece_kwargs = _cut((args, kwargs), rows, piece)
                runs.add(piece, tensors, inputs.tensors_in((piece_args, piece_kwargs)))
                result = run(runs, number, versions, piece_args, piece_kwargs)
                joined.add(result, piece)
                runs.note_results(inputs.tensors_in(result))
            result = joined.result()
            runs.mark(inputs.tensors_in(result))
        return result

    def _refuse_other_dims(self, versions: list[int], args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
        """Reject results with a first dimension that does not count rows, and may have the size of a piece by chance.

        Runs a piece of a different size, without a graph, in the first call with several pieces.
        """
        piece = slice(0, min(rows, self.chunk_size - 1 or 2))
        with beside_the_step(), torch.no_grad(), preserve_random_state(global_generators(devices_in_use())):
            piece_args, piece_kwargs = _cut((args, kwargs), rows, piece)
            for tensor in inputs.tensors_in(self._run(versions, piece_args, piece_kwargs)):
                if tensor.shape[:1] != (piece.stop,):
                    raise _without_rows(tensor, f"({piece.stop}, ...)", piece.stop)
        self._has_rows_first = True

    def _number_of_pieces(self, rows: int) -> int:
        """Return the number of pieces of this call, or the largest number of any rank if each forward waits for all ranks.

        Communication: one handshake for an encoder that ``fully_shard`` divides.
        """
        own = max(-(-rows // self.chunk_size), 1)
        if not self._is_divided or process_groups.world_size() == 1:
            return own
        payloads = handshake.all_gather("pieces of microbatched", {}, own.to_bytes(8, "little"))
        return max(int.from_bytes(payload, "little") for payload in payloads)

    @property
    def _is_divided(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self.encoder.modules())

    def _parameter_versions(self) -> list[int]:
        """Return how often each parameter was changed so far. For a divided parameter, only this rank's part is considered."""
        parts = torch_compat.local_parts(self.encoder) or precision.parameters_of(self.encoder)
        return [torch_compat.tensor_version(part) for part in parts]

    def _run_again(self, runs: PieceRuns, number: int, *arguments: Any) -> Any:
        """Run the encoder on one piece, always with the random numbers of the first run."""
        with runs.of_run(number):
            return self._run(*arguments)

    def _run(self, versions: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the encoder on one piece, in forward and again in backward."""
        expect(
            self._parameter_versions() == versions,
            self._title,
            expected="the same parameters in backward as in forward",
            got="some that were changed in between",
            fix="Step the optimizer after the last backward through this call.",
        )
        before = self._buffer_versions()
        with self._norms_in_eval():
            result = self.forward(*args, **kwargs)
        after = self._buffer_versions()
        written = [name for name, version in after.items() if before.get(name, version) != version]
        expect(
            not written or not torch.is_grad_enabled(),
            self._title,
            expected="layers that leave their buffers alone",
            got=f"{', '.join(written)} written in forward",
            fix="Each piece would write them, and once more in backward. Put the layer into eval() mode, or replace it.",
        )
        return result

    def _buffer_versions(self) -> dict[str, int]:
        """Return how often each buffer was changed so far."""
        return {name: torch_compat.tensor_version(buffer) for name, buffer in self.encoder.named_buffers()}

    def _norms(self) -> list[tuple[str, nn.Module]]:
        """Return the layers in training that normalise over the rows of a piece, or store statistics of them."""
        found = []
        for name, module in self.encoder.named_modules():
            is_norm = module.training and isinstance(module, torch_compat.NORM_TYPES)
            if is_norm and (module.track_running_stats or isinstance(module, torch_compat.BATCH_NORM_TYPES)):
                found.append((name or type(module).__name__, module))
        return found

    def _refuse_batch_norm(self) -> None:
        found = self._norms() if self.batch_norm == "refuse" else []
        expect(
            not found,
            self._title,
            expected="no batch norm in training mode",
            got=", ".join(f"`{name}` ({type(module).__name__})" for name, module in found),
            fix="Its statistics would be those of a piece. Use GroupNorm or LayerNorm, put it into eval() mode, or pass "
            "batch_norm='eval'.",
        )

    @contextmanager
    def _norms_in_eval(self) -> Iterator[None]:
        """Make batch norms use their running statistics, if requested."""
        norms = [module for _, module in self._norms()] if self.batch_norm == "eval" else []
        for module in norms:
            module.training = False
        try:
            yield
        finally:
            for module in norms:
                module.training = True


class _InsideDDP:
    """Runs the pieces inside DDP's own forward, in which DDP prepares its reduction."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, pieces: _Pieces) -> None:
        self._ddp, self._pieces = ddp, pieces
        pieces.forward = type(ddp.module).forward.__get__(ddp.module)

    @eager_recursive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._ddp.module
        before = inner.__dict__.get("forward")
        inner.__dict__["forward"] = self._pieces
        try:
            return self._ddp(*args, **kwargs)
        finally:
            del inner.__dict__["forward"]
            if before is not None:
                inner.__dict__["forward"] = before


def _cut(tree: Any, rows: int, piece: slice) -> Any:
    """Return the nest with a slice of each tensor that has the given number of rows."""

    def cut(leaf: Any) -> Any:
        is_batch = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows
        return leaf[piece] if is_batch else leaf

    return _rebuilt(cut, tree)


def _rebuilt(function: Callable[[Any], Any], tree: Any) -> Any:
    """Rebuild a nest, including subclasses of tuple, list and dict, with each leaf replaced by the result of ``function``."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuilt(function, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_rebuilt(function, item) for item in tree)
    if isinstance(tree, dict):
        return type(tree)((key, _rebuilt(function, item)) for key, item in tree.items())
    return function(tree)


_TENSOR = object()  # represents a tensor in the form of a result


class _Joined:
    """Joins nests of equal form into one, their tensors along dim 0. Other values are taken from the first nest.

    Each piece is immediately copied to its position and not kept, so the results are only stored once.

    Args:
        rows: Total number of rows of all pieces.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._form: Any = None  # the nest with `_TENSOR` in place of each tensor
        self._joined: list[Tensor] = []  # one for each tensor of a result
        self._zeros: list[Tensor] = []  # one for each tensor of a result, whose views represent the pieces
        self._graph_ends: list[list[Tensor]] = []  # representation of each piece in the graph
        self._sizes: list[int] = []

    def add(self, result: Any, piece: slice) -> None:
        """Add the result of the next piece."""
        tensors, size = list(inputs.tensors_in(result)), piece.stop - piece.start
        # 1. the first result determines the form of the whole
        if not self._sizes:
            self._form = _rebuilt(_placeholder, result)
            self._joined = [_empty_for(tensor, self._rows) for tensor in tensors]
            self._zeros = [tensor.new_zeros(()) for tensor in tensors]
            self._graph_ends = [[] for _ in tensors]
        # 2. copy each tensor to its position
        self._sizes.append(size)
        places = zip(tensors, self._joined, self._zeros, self._graph_ends, strict=True)
        for tensor, joined, zero, graph_ends in places:
            if tuple(tensor.shape) != (size, *joined.shape[1:]) or tensor.dtype != joined.dtype:
                raise _without_rows(tensor, f"{(size, *joined.shape[1:])}, {joined.dtype}", size)
            graph_ends.append(_Write.apply(tensor, joined[piece], zero))  # type: ignore[no-untyped-call]

    def result(self) -> Any:
        """Return the nest of all rows."""
        joined = []
        for tensor, graph_ends in zip(self._joined, self._graph_ends, strict=True):
            joined.append(_JoinedRows.apply(tensor, self._sizes, *graph_ends))  # type: ignore[no-untyped-call]
        tensors = iter(joined)
        return _rebuilt(lambda leaf: next(tensors) if leaf is _TENSOR else leaf, self._form)


def _empty_for(piece: Tensor, rows: int) -> Tensor:
    """Return an uninitialized tensor for all rows, with the dimensions in memory in the order of a piece."""
    shape = [rows, *piece.shape[1:]]
    strides, step = [0] * len(shape), 1
    for dim in reversed(memory_order(piece)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return piece.new_empty_strided(shape, strides)


def _without_rows(tensor: Tensor, shape: str, size: int) -> InputError:
    """Return the error for a tensor that cannot be joined with the tensors of other pieces."""
    return InputError(
        "microbatched: result",
        expected=f"a row for each row of the batch: shape {shape}",
        got=f"shape {tuple(tensor.shape)}, {tensor.dtype} from {size} rows",
        fix="What is reduced over the batch, or differs between pieces, cannot be computed in pieces.",
    )


def _placeholder(leaf: Any) -> Any:
    """Return a mark for a tensor, and any other leaf unchanged. Reject an object that holds tensors but is not a nest."""
    if isinstance(leaf, Tensor):
        return _TENSOR
    expect(
        not any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()),
        "microbatched: result",
        expected="tensors in tuples, lists and dicts",
        got=f"tensors inside a {type(leaf).__name__}, whose pieces cannot be joined",
        fix="Return a tuple or a dict.",
        error=InputError,
    )
    return leaf


class _Write(torch.autograd.Function):
    """Copies a piece to its position. The result represents the piece in the graph, as a view of a number that all pieces share."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, place: Tensor, zero: Tensor) -> Tensor:
        place.copy_(piece)
        return zero.expand_as(piece)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _JoinedRows(torch.autograd.Function):
    """Connects the tensor that the pieces were copied into to their graph."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor, sizes: list[int], *pieces: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.mark_dirty(joined)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch.split(grad, ctx.sizes)
