"""`microbatched`: an encoder over a large batch in pieces, each computed again in backward: the large batch's gradient at a piece's memory.

A contrastive loss needs the embeddings of the whole batch at once, the encoder's activations it does not. Forward keeps no activations;
backward computes one piece after the other again, with the random numbers and autocast of its forward, and passes on. It is one graph: each
parameter's gradient arrives once, so DDP reduces it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import numerics
from lightning_ddp_losses.errors import ConfigurationError, InputError, format_error

__all__ = ["microbatched"]


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
        ConfigurationError: for batch norm in training and other layers that write their buffers, by name; a bad chunk size.
        InputError: for a call without rows.

    Source: the aim of Gao et al. 2021, arXiv:2101.06983 (GradCache), by recomputation.

    Example:
        >>> import torch
        >>> encoder = torch.nn.Linear(3, 2)
        >>> embeddings = microbatched(encoder, 4)(torch.randn(10, 3))
    """
    if not isinstance(encoder, nn.Module):
        raise ConfigurationError(
            format_error("microbatched: encoder", expected="a torch.nn.Module", got=type(encoder).__name__)
        )
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1:
        raise ConfigurationError(
            format_error("microbatched: chunk_size", expected="an int, 1 or more", got=repr(chunk_size))
        )
    if batch_norm not in ("refuse", "eval"):
        raise ConfigurationError(
            format_error("microbatched: batch_norm", expected="'refuse' or 'eval'", got=repr(batch_norm))
        )
    if isinstance(encoder, nn.parallel.DistributedDataParallel):
        return _InsideDDP(encoder, _Pieces(encoder.module, chunk_size, batch_norm))
    return _Pieces(encoder, chunk_size, batch_norm)


class _Pieces:
    """Not a module: an attribute of this kind adds no parameter names."""

    def __init__(self, encoder: nn.Module, chunk_size: int, batch_norm: str) -> None:
        self.encoder, self.chunk_size, self.batch_norm = encoder, chunk_size, batch_norm
        self.forward: Callable[..., Any] = encoder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rows = next((t.shape[0] for t in numerics.tensors_in((args, kwargs)) if t.ndim), 0)
        if rows == 0:
            raise InputError(
                format_error("microbatched: rows", expected="at least one", got="none", fix="Pass a batch along dim 0.")
            )
        self._refuse_batch_norm()
        pieces = []
        for start in range(0, rows, self.chunk_size):
            piece = slice(start, min(start + self.chunk_size, rows))
            own = _cut((args, kwargs), rows, piece)
            if torch.is_grad_enabled():
                # its backward runs the piece again; what the piece draws is drawn again
                pieces.append(checkpoint(self._run, *own, use_reentrant=False, preserve_rng_state=True))
            else:
                pieces.append(self._run(*own))
        return _join(pieces, [min(self.chunk_size, rows - s) for s in range(0, rows, self.chunk_size)])

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = {name: buffer._version for name, buffer in self.encoder.named_buffers()}
        with self._norms_at_rest():
            result = self.forward(*args, **kwargs)
        written = [name for name, b in self.encoder.named_buffers() if before.get(name, b._version) != b._version]
        if written and torch.is_grad_enabled():
            raise ConfigurationError(
                format_error(
                    f"microbatched({type(self.encoder).__name__})",
                    expected="layers that leave their buffers alone",
                    got=f"{', '.join(written)} written in forward",
                    fix="Each piece would write them, and once more in backward. Put the layer into eval() mode, or replace it.",
                )
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
                format_error(
                    f"microbatched({type(self.encoder).__name__})",
                    expected="no batch norm in training mode",
                    got=", ".join(f"{name} ({type(module).__name__})" for name, module in found),
                    fix="Its statistics would be those of a piece. Use GroupNorm or LayerNorm, put it into eval() mode, or pass "
                    "batch_norm='eval'.",
                )
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
    if isinstance(tree, Tensor):
        return tree[piece] if tree.ndim and tree.shape[0] == rows else tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_cut(item, rows, piece) for item in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_cut(item, rows, piece) for item in tree)
    if isinstance(tree, dict):
        return type(tree)((key, _cut(item, rows, piece)) for key, item in tree.items())
    return tree


def _join(pieces: list[Any], sizes: list[int]) -> Any:
    """Nests of equal build, their tensors joined along dim 0; what has no rows comes from the first."""
    first = pieces[0]
    if isinstance(first, Tensor):
        batched = all(p.ndim and p.shape[0] == n for p, n in zip(pieces, sizes, strict=True))
        if not batched:
            raise InputError(
                format_error(
                    "microbatched: result",
                    expected="a row for each row of the batch",
                    got=f"shape {tuple(first.shape)} from {sizes[0]} rows",
                    fix="What is reduced over the batch cannot be computed in pieces.",
                )
            )
        return torch.cat(pieces)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_join(list(column), sizes) for column in zip(*pieces, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(_join(list(column), sizes) for column in zip(*pieces, strict=True))
    if isinstance(first, dict):
        return type(first)((key, _join([piece[key] for piece in pieces], sizes)) for key in first)
    return first
