"""Which tiles hand-written kernels compute (``compile_tiles="auto"``): all ranks' or none's.

Each rank says in the exchange that a call has anyway whether it has kernels for its rows. All ranks then know whether all have, and how
large the call is. The first call of a kind tries the kernels on a tile of fixed size, and the ranks exchange the outcome
(``TileCompiler.rehearse``). If it failed on any, all ranks take the eager path from that call on, and rank 0 warns. If a kernel fails
later (a shape of its own is compiled then), that rank computes the rest of the call eagerly and warns, and all ranks do from the next call.
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
"""The user's option: eager, ``torch.compile``, or kernels where they pay."""

FEWEST_ENTRIES = 1 << 24
"""Products of a rank, as the mean over ranks, from which kernels are taken: 4,096 rows against 4,096 columns.

Not measured. Below it a call of one tile is bound by its launches, and to launch a kernel of Triton takes the host several times as long as
to launch an operator.
"""

_KERNEL_DTYPES = (torch.float32,)
_OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16


@functools.cache
def have_kernels(device: torch.device) -> bool:
    """Return whether a device runs the kernels: an NVIDIA GPU with bfloat16, next to triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


class TileKernels(TileCompiler):
    """Computes tiles by hand-written kernels, for all calls of one loss."""

    compiler = "a kernel"
    takes_masks = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with its arguments: its kernel, unless that has failed or there is none for them."""
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
    """Return the launch that takes the place of a function of a tile, or the function if it has none."""
    # it imports triton
    from lightning_ddp_losses.losses.kernels.launches import LAUNCHES

    return LAUNCHES.get(function.__name__, function)


def tile_compiler(title: str, option: CompileTiles) -> TileCompiler | None:
    """Return what computes the functions of tiles, by the user's option. None: they are called as they are.

    Raises:
        ConfigurationError: for another option.
    """
    expect_option(f"{title}: compile_tiles", option, (False, True, "auto"))
    if option == "auto":
        return TileKernels()
    return TileCompiler() if option else None


def option_of(compiler: TileCompiler | None) -> CompileTiles:
    """Return the user's option that gave a compiler."""
    if compiler is None:
        return False
    return "auto" if isinstance(compiler, TileKernels) else True


def serves(compiler: TileCompiler | None, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this rank has kernels for a call that computes in a dtype on a device."""
    if not isinstance(compiler, TileKernels) or compiler.has_failed:
        return False
    return dtype in _KERNEL_DTYPES and have_kernels(device)


def chosen(compiler: TileCompiler | None, all_serve: bool, entries: int) -> TileCompiler | None:
    """Return what computes the tiles of a call. The same on all ranks.

    Args:
        compiler: From ``tile_compiler``.
        all_serve: Whether kernels of all ranks serve the call.
        entries: Products of a rank, as the mean over ranks.
    """
    if not isinstance(compiler, TileKernels):
        return compiler
    return compiler if all_serve and entries >= FEWEST_ENTRIES else None
