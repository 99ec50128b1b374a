"""`microbatched`: an encoder over a large batch in pieces, each computed again in backward: the large batch's gradient at a piece's memory.

A contrastive loss needs the embeddings of the whole batch at once, the encoder's activations it does not. Forward keeps no activations;
backward computes one piece after the other again, with the random numbers and autocast of its forward, and passes on. It is one graph: each
parameter's gradient arrives once, so DDP reduces it once.

Held at the peak: the activations of one piece; the results of all rows, once; their gradient; the encoder's gradient, complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.errors import ConfigurationError, InputError


def microbatched(
    encoder: nn.Module, chunk_size: int, *, batch_norm: Literal["refuse", "eval"] = "refuse"
) -> Callable[..., Any]:
    """An encoder that runs over its batch in pieces.

    Equivalent to: ``encoder(x)``, value and gradient, for an encoder that treats each row by itself. The pieces draw their random
    numbers one after the other, and draw them again in backward.

    Args:
        encoder: Any module; also one inside a LightningModule or a ``DistributedDataParallel`` (whose own wrapper may be given).
            It is not wrapped: parameter names and checkpoints stay.
        chunk_size: Rows at a time, at least 1; the last piece may be smaller.
        batch_norm: Batch norm in training would normalise each piece by itself. ``"refuse"``: an error that names it. ``"eval"``:
            it uses its running statistics, and leaves them.

    Returns:
        A function with the arguments of ``encoder``; tensors with as many rows (dim 0) as the first are batches, everything else goes to
        each piece as it is. Its results, tensors or nests of them, are joined along dim 0.

    Raises:
        ConfigurationError: for batch norm in training and other layers that write their buffers, by name; a bad chunk size; in
            backward, where a parameter has changed since forward.
        InputError: for a call without a batch.

    Source: the aim of Gao et al. 2021, arXiv:2101.06983 (GradCache), by recomputation.

    Example:
        >>> import torch
        >>> encoder = torch.nn.Linear(3, 2)
        >>> embeddings = microbatched(encoder, 4)(torch.randn(10, 3))
    """
    if not isinstance(encoder, nn.Module):
        raise ConfigurationError("microbatched: encoder", expected="a torch.nn.Module", got=type(encoder).__name__)
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ConfigurationError("microbatched: chunk_size", expected="an int, 1 or more", got=repr(chunk_size))
    if batch_norm not in ("refuse", "eval"):
        raise ConfigurationError("microbatched: batch_norm", expected="'refuse' or 'eval'", got=repr(batch_norm))
    if isinstance(encoder, nn.parallel.DistributedDataParallel):
        return _InsideDDP(encoder, _Pieces(encoder.module, chunk_size, batch_norm))
    return _Pieces(encoder, chunk_size, batch_norm)


class _Pieces:
    """Not a module: an attribute of this kind adds no parameter names."""

    def __init__(self, encoder: nn.Module, chunk_size: int, batch_norm: str) -> None:
        self.encoder, self.chunk_size, self.batch_norm = encoder, chunk_size, batch_norm
        self.forward: Callable[..., Any] = encoder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = next((t.shape[0] for t in precision.tensors_in((args, kwargs)) if t.ndim), None)
        if rows is None:
            raise InputError("microbatched", expected="a batch along dim 0", got="no tensor with rows")
        self._refuse_batch_norm()
        joined, weights = _Joined(rows), self._weights()
        for start in range(0, max(rows, 1), self.chunk_size):  # a rank without rows still runs its encoder
            piece = slice(start, min(start + self.chunk_size, rows))
            own = _cut((args, kwargs), rows, piece)
            if torch.is_grad_enabled():
                # its backward runs the piece again; what the piece draws is drawn again
                joined.add(checkpoint(self._run, weights, *own, use_reentrant=False, preserve_rng_state=True), piece)
            else:
                joined.add(self._run(weights, *own), piece)
        return joined.result()

    def _weights(self) -> list[int]:
        """How often each parameter was changed so far."""
        return [parameter._version for parameter in precision.parameters_of(self.encoder)]

    def _run(self, weights: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._weights() != weights:
            raise ConfigurationError(
                f"microbatched({type(self.encoder).__name__})",
                expected="the same parameters in backward as in forward",
                got="some that were changed in between",
                fix="Step the optimizer after the last backward through this call.",
            )
        before = {name: buffer._version for name, buffer in self.encoder.named_buffers()}
        with self._norms_at_rest():
            result = self.forward(*args, **kwargs)
        written = [name for name, b in self.encoder.named_buffers() if before.get(name, b._version) != b._version]
        if written and torch.is_grad_enabled():
            raise ConfigurationError(
                f"microbatched({type(self.encoder).__name__})",
                expected="layers that leave their buffers alone",
                got=f"{', '.join(written)} written in forward",
                fix="Each piece would write them, and once more in backward. Put the layer into eval() mode, or replace it.",
            )
        return result

    def _norms(self) -> list[tuple[str, nn.Module]]:
        """Layers in training that normalise over the rows of a piece, or remember them."""
        return [
            (name or type(module).__name__, module)
            for name, module in self.encoder.named_modules()
            if module.training
            and isinstance(module, _NormBase)
            and (module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm))
        ]

    def _refuse_batch_norm(self) -> None:
        found = self._norms() if self.batch_norm == "refuse" else []
        if found:
            raise ConfigurationError(
                f"microbatched({type(self.encoder).__name__})",
                expected="no batch norm in training mode",
                got=", ".join(f"{name} ({type(module).__name__})" for name, module in found),
                fix="Its statistics would be those of a piece. Use GroupNorm or LayerNorm, put it into eval() mode, or pass "
                "batch_norm='eval'.",
            )

    @contextmanager
    def _norms_at_rest(self) -> Iterator[None]:
        found = [module for _, module in self._norms()] if self.batch_norm == "eval" else []
        for module in found:
            module.training = False
        try:
            yield
        finally:
            for module in found:
                module.training = True


class _InsideDDP:
    """Runs the pieces inside DDP's own forward, which prepares its reduction there."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, pieces: _Pieces) -> None:
        self._ddp, self._pieces = ddp, pieces
        pieces.forward = type(ddp.module).forward.__get__(ddp.module)

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
    """The nest with a slice of each tensor that has as many rows."""
    return _rebuilt(lambda t: t[piece] if isinstance(t, Tensor) and t.ndim and t.shape[0] == rows else t, tree)


def _rebuilt(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nest, also of classes derived from tuple, list and dict, with ``function`` of each leaf in its place."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_rebuilt(function, item) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_rebuilt(function, item) for item in tree)
    if isinstance(tree, dict):
        return type(tree)((key, _rebuilt(function, item)) for key, item in tree.items())
    return function(tree)


class _Joined:
    """Nests of equal build as one, their tensors joined along dim 0; what is no tensor comes from the first.

    Each piece is copied to its place at once and not kept, so the results exist once.

    Args:
        rows: Of all pieces together.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._build: Any = None
        self._wholes: list[Tensor] = []
        self._edges: list[list[Tensor]] = []
        self._sizes: list[int] = []

    def add(self, result: Any, piece: slice) -> None:
        """Take the result of the next piece."""
        tensors, size = list(precision.tensors_in(result)), piece.stop - piece.start
        if not self._sizes:
            places = iter(range(len(tensors)))
            self._build = _rebuilt(
                lambda leaf: _Place(next(places)) if isinstance(leaf, Tensor) else _plain(leaf), result
            )
            self._wholes = [t.new_empty((self._rows, *t.shape[1:])) for t in tensors]
            self._edges = [[] for _ in tensors]
        self._sizes.append(size)
        for tensor, whole, edges in zip(tensors, self._wholes, self._edges, strict=True):
            if tuple(tensor.shape) != (size, *whole.shape[1:]) or tensor.dtype != whole.dtype:
                raise InputError(
                    "microbatched: result",
                    expected=f"a row for each row of the batch: shape {(size, *whole.shape[1:])}, {whole.dtype}",
                    got=f"shape {tuple(tensor.shape)}, {tensor.dtype} from {size} rows",
                    fix="What is reduced over the batch, or differs between pieces, cannot be computed in pieces.",
                )
            edges.append(_Write.apply(tensor, whole[piece]))  # type: ignore[no-untyped-call]

    def result(self) -> Any:
        """The whole."""
        joined = [
            _Whole.apply(whole, self._sizes, *edges)  # type: ignore[no-untyped-call]
            for whole, edges in zip(self._wholes, self._edges, strict=True)
        ]
        return _rebuilt(lambda leaf: joined[leaf.index] if isinstance(leaf, _Place) else leaf, self._build)


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the result goes."""

    index: int


def _plain(leaf: Any) -> Any:
    if any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()):
        raise InputError(
            "microbatched: result",
            expected="tensors in tuples, lists and dicts",
            got=f"tensors inside a {type(leaf).__name__}, whose pieces cannot be joined",
            fix="Return a tuple or a dict.",
        )
    return leaf


class _Write(torch.autograd.Function):
    """Copies a piece to its place; what comes back stands for it in the graph and holds one number."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, place: Tensor) -> Tensor:
        place.copy_(piece)
        return piece.new_zeros(()).expand_as(piece)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Whole(torch.autograd.Function):
    """The tensor that the pieces were copied into, in their graph."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: list[int], *pieces: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.mark_dirty(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *torch.split(grad, ctx.sizes)
