"""Which tiles are computed by hand-written kernels (``compile_tiles="auto"``), either on all ranks or on none.

In the exchange that each call performs anyway, each rank sends whether it has kernels for its rows. All ranks thus receive whether all of
them have kernels, and how large the call is. The first call of each kind tries the kernels on a tile of fixed size and compares their
numbers with torch's operators, and the ranks exchange the outcome (``TileKernels.rehearse``). If it failed on any rank, all ranks are
eager from that call on, and rank 0 warns. If a kernel fails later, when it is compiled for another shape, that rank computes the remaining
tiles of the call eagerly and warns, and all ranks are eager from the next call on.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import expect_option
from lightning_ddp_losses.losses.tile_compiler import KernelError, Rehearsal, TileCompiler

CompileTiles: TypeAlias = bool | Literal["auto"]
"""The user's option: eager, ``torch.compile``, or kernels if they are expected to be faster."""

FEWEST_ENTRIES = 1 << 24
"""Average number of products per rank from which kernels are used: 4,096 rows against 4,096 columns.

Not measured. Below it, a call with one tile is bound by launches, and launching a Triton kernel takes the host several times as long as
launching an operator.
"""

_KERNEL_DTYPES = (torch.float32,)
_LARGEST_DIFFERENCE = (
    1e-3  # of a kernel's numbers, relative to the largest: far above the rounding of float32 and of two terms of bf16
)
_NO_ENTRY = -(2.0**20)  # entries that do not count are the lowest number of the dtype, which is not compared
_OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16


@functools.cache
def have_kernels(device: torch.device) -> bool:
    """Return whether a device can run the kernels: an NVIDIA GPU with bfloat16, with triton installed."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


class TileKernels(TileCompiler):
    """Computes tiles with hand-written kernels, for all calls of one loss."""

    compiler = "a kernel"
    takes_masks = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the kernel of a function, or the function itself if a kernel has failed or does not support the arguments."""
        if self.has_failed or not args[0].numel() or args[0].dtype == torch.float64:
            return function(*args)
        try:
            return self._run(function, *args)
        except KernelError as error:
            self.has_failed = True
            warnings.warn(
                f"compile_tiles: {function.__name__} is computed eagerly on this rank, which gives the same numbers, and on all ranks "
                f"from the next call on: {error}",
                stacklevel=2,
            )
            return function(*args)

    def rehearse(self, title: str, kind: object, rehearsal: Rehearsal, group: Group) -> None:
        """Try the kernels of a kind of call in the first such call, and compare their numbers with those of the functions. Collective.

        Args:
            title: Name of the loss in messages.
            kind: Values on which the kernels depend, equal on all ranks.
            rehearsal: Calls the functions, through the callable that it is given, on a ``rehearsed_tile``.
            group: Process group.

        Communication: one handshake for a new kind.
        """
        super().rehearse(title, kind, lambda _: rehearsal(self._run_compared), group)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return launch_of(function)(*args)

    def _run_compared(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a kernel and its function, and return the result of the kernel.

        Raises:
            KernelError: if their numbers differ by more than rounding.
        """
        # both may overwrite the tile
        expected = _numbers(function(args[0].clone(), *args[1:]))
        result = self._run(function, *args)
        for place, (ours, theirs) in enumerate(zip(_numbers(result), expected, strict=True)):
            difference = float((ours - theirs).abs().max())
            allowed = _LARGEST_DIFFERENCE * float(theirs.abs().max())
            if not difference <= allowed:
                raise KernelError(
                    f"{function.__name__}: result {place} of its kernel differs by {difference:.1e}, more than rounding ({allowed:.1e})"
                )
        return result


def _numbers(result: Any) -> list[Tensor]:
    """Return the tensors of a function's result in float32. A gradient in two terms of bf16 is their sum."""
    if result is None:
        return []
    if isinstance(result, Tensor):
        return [result.float().clamp_min(_NO_ENTRY)]
    if all(isinstance(term, Tensor) and term.dtype == torch.bfloat16 for term in result):
        return [torch.stack([term.float() for term in result]).sum(0)]
    return [number for part in result for number in _numbers(part)]


def launch_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the launch that replaces a function of a tile, or the function itself if there is no kernel for it."""
    # imported here because it imports triton
    from lightning_ddp_losses.losses.kernels.launches import LAUNCHES

    return LAUNCHES.get(function.__name__, function)


def tile_compiler(title: str, option: CompileTiles) -> TileCompiler | None:
    """Return what computes the functions of tiles according to the user's option, or None to call them directly.

    Raises:
        ConfigurationError: for an invalid option.
    """
    expect_option(f"{title}: compile_tiles", option, (False, True, "auto"))
    if option == "auto":
        return TileKernels()
    return TileCompiler() if option else None


def option_of(compiler: TileCompiler | None) -> CompileTiles:
    """Return the user's option that corresponds to a compiler."""
    if compiler is None:
        return False
    return "auto" if isinstance(compiler, TileKernels) else True


def serves(compiler: TileCompiler | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this rank has kernels for a call that computes in a dtype on a device."""
    if not isinstance(compiler, TileKernels) or compiler.has_failed:
        return False
    return dtype in _KERNEL_DTYPES and have_kernels(device)


def chosen(compiler: TileCompiler | None, all_serve: bool, entries: int) -> TileCompiler | None:
    """Return what computes the tiles of a call, equal on all ranks.

    Args:
        compiler: From ``tile_compiler``.
        all_serve: Whether all ranks have kernels for the call.
        entries: Average number of products per rank.
    """
    if not isinstance(compiler, TileKernels):
        return compiler
    return compiler if all_serve and entries >= FEWEST_ENTRIES else None
