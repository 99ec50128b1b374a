"""Collectives that carry the pretended device's tensors by themselves, as NCCL carries CUDA's: nothing travels through the host.

In place of the staging that two ranks on one device need over gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils import _pytree

# as torch names them in several releases
_CARRIED = (
    *("all_reduce", "broadcast", "all_gather", "all_to_all_single"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    "P2POp",  # what a ring sends and receives
)
_carries = _stuck = False


def carry(*, carries: bool) -> None:
    """Says whether torch names a backend that carries the device's tensors, or gloo; to be said before our groups are made."""
    global _carries
    _carries = carries


def get_stuck(*, stuck: bool) -> None:
    """Says whether this rank's device waits for a peer that does not come, behind which its collectives never run; the host goes on."""
    global _stuck
    _stuck = stuck


class _NeverRun:
    """A collective that waits on the device behind another one."""

    def wait(self) -> None:
        """Lets the device wait, as NCCL's does."""


def install() -> None:
    """Lets torch's collectives take the device's tensors, for good; before our package is imported, which keeps some of them."""
    for name in _CARRIED:
        if hasattr(dist, name):
            setattr(dist, name, _carrying(getattr(dist, name)))
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "pretend" if _carries else backend(group)


def _carrying(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def carried(*args: Any, **kwargs: Any) -> Any:
        if _stuck and any(hasattr(value, "_host") for value in args):
            return _NeverRun()
        host_args, host_kwargs = _pytree.tree_map(lambda value: getattr(value, "_host", value), (args, kwargs))
        return collective(*host_args, **host_kwargs)

    return carried
