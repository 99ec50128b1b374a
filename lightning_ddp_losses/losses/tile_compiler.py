"""Compiled functions of tiles (``compile_tiles=True``): all ranks or none.

To compile takes seconds, and may fail on one machine and not on another. So the functions that a call will need are compiled on a tile of
fixed size first, on every rank at the same place. The ranks then exchange the outcome: one handshake if a call needs something new, else
none. If it failed anywhere, all ranks compute eagerly, and rank 0 warns. Torch compiles once more for sizes that it takes for special. If
that fails, the rank computes eagerly: the same numbers, but for rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group

Rehearsal = Callable[[Callable[..., Any]], object]

_HOST_TILE, _DEVICE_TILE = (500, 1000), (2000, 4000)  # torch takes equal sizes for one


def rehearsed_tile(like: Tensor) -> Tensor:
    """Return a tile (T, C) for a rehearsal, of the dtype and on the device of ``like``.

    Kernels serve all sizes, but the compiler chooses how much each of their blocks does by the first one. Compiled on a few entries, they
    took 20 times as long for 64 MiB.
    """
    rows, columns = _HOST_TILE if like.device.type == "cpu" else _DEVICE_TILE
    return torch.linspace(-1, 1, rows * columns, dtype=like.dtype, device=like.device).view(rows, columns)


class KernelError(RuntimeError):
    """A hand-written kernel could not be compiled or launched. It has written nothing."""


class TileCompiler:
    """Compiles functions of tiles once, for all calls of one loss.

    Attributes:
        has_failed: The ranks have agreed that tiles are computed eagerly.
    """

    compiler: ClassVar[str] = "torch.compile"
    """How messages name what compiles."""

    takes_masks: ClassVar[bool] = True
    """Whether functions find own pairs and positives by masks that they make themselves."""

    def __init__(self) -> None:
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._rehearsed: set[object] = set()
        self.has_failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy compiles for itself

    def rehearse(self, title: str, kind: object, rehearsal: Rehearsal, group: Group) -> None:
        """Compile the functions of a kind of call at the first such call. All ranks together.

        Args:
            title: How messages name the loss.
            kind: Dependencies of the graphs. The same on all ranks.
            rehearsal: Calls the functions that it is given on a ``rehearsed_tile``.
            group: Process group.

        Communication: one handshake for a new kind.
        """
        if self.has_failed or kind in self._rehearsed:
            return
        failed = b""
        try:
            rehearsal(self._run)
        except Exception as error:
            failed = f"{type(error).__name__}: {str(error)[:300]}".encode()
        reasons = handshake.all_gather(f"{title}: compile_tiles", {"kind": kind}, failed, group=group)
        self._rehearsed.add(kind)
        self.has_failed = any(reasons)
        if self.has_failed and process_groups.rank(group) == 0:
            rank = next(rank for rank, reason in enumerate(reasons) if reason)
            warnings.warn(
                f"{title}: compile_tiles: {self.compiler} failed on rank {rank} ({reasons[rank].decode(errors='replace')}). "
                "All ranks compute tiles eagerly, which gives the same numbers.",
                stacklevel=2,
            )

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with its arguments, compiled unless that has failed."""
        if self.has_failed:
            return function(*args)
        try:
            return self._run(function, *args)
        except Exception as error:
            warnings.warn(
                f"compile_tiles: {function.__name__} is computed eagerly on this rank, which gives the same numbers: "
                f"{type(error).__name__}: {str(error)[:300]}",
                stacklevel=2,
            )
            self._compiled[function] = function  # the ranks agree on everything else
            return function(*args)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if function not in self._compiled:
            self._compiled[function] = compiled(function)
        # torch compiles once more for a tensor that needs a gradient, or is a view of another one
        return self._compiled[function](*inputs.map_tensors(Tensor.detach, args))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for tiles of any size, in one graph. Kernels count rows and columns apart, as to divide is dear on a GPU."""
    return torch.compile(function, dynamic=True, fullgraph=True, options={"triton.prefer_nd_tiling": True})
