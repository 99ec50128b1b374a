"""Which tiles are computed by hand-written kernels (``compile_tiles="auto"``), either on all ranks or on none.

In the exchange that each call performs anyway, each rank sends whether it has kernels for its rows. All ranks then know whether all of them
have kernels, and how large the call is. The first call of each kind tries the kernels on a tile of fixed size, and the ranks exchange the
outcome (``TileCompiler.rehearse``). If it failed on any rank, all ranks use the eager path from that call on, and rank 0 warns. If a kernel
fails later (when it is compiled for a new shape), that rank computes the remaining tiles of the call eagerly and warns, and all ranks use
the eager path from the next call on.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from lightning_ddp_losses.errors import expect_option
from lightning_ddp_losses.losses.tile_compiler import KernelError, TileCompiler

CompileTiles: TypeAlias = bool | Literal["auto"]
"""The user's option: eager, ``torch.compile``, or kernels if they are expected to be faster."""

FEWEST_ENTRIES = 1 << 24
"""Average number of products per rank from which kernels are used: 4,096 rows against 4,096 columns.

Not measured. Below it, a call with one tile is bound by launches, and launching a Triton kernel takes the host several times as long as
launching an operator.
"""

_KERNEL_DTYPES = (torch.float32,)
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

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return launch_of(function)(*args)


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
