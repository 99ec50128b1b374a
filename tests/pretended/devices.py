"""What runs on a device need of it: the pretended accelerator, CUDA, and the CPU, which both are compared with."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

# what torch says where `set_sync_debug_mode` sees the host wait
_WAIT = "called a synchronizing CUDA operation"
_PACKAGE = Path(__file__).parent.parent.parent / "lightning_ddp_losses"

Counting = Callable[[], contextlib.AbstractContextManager["Counter[str]"]]


@dataclass(frozen=True)
class Device:
    """A device as the runs see it.

    Attributes:
        name: As ``Module.to`` takes it.
        to_device: Copies a host tensor to it, without its graph.
        to_host: Copies a tensor of it, or of the host, to the host, likewise.
        counting: Counts what a block costs: ``launches``, ``uploads``, ``wait ...``.
        catch_up: Lets the device finish all that was asked of it.
        draws_as_the_host: Whether the same seed draws the same numbers there as on the CPU.
    """

    name: str
    to_device: Callable[[Tensor], Tensor]
    to_host: Callable[[Tensor], Tensor]
    counting: Counting
    catch_up: Callable[[], None]
    draws_as_the_host: bool = True


def waits_in(counts: dict[str, int]) -> dict[str, int]:
    """Takes the waits of the host out of what a block cost."""
    return {name: number for name, number in counts.items() if name.startswith("wait ")}


@contextlib.contextmanager
def _nothing_counted() -> Iterator[Counter[str]]:
    yield Counter()


HOST = Device("cpu", lambda t: t.detach().clone(), Tensor.detach, _nothing_counted, lambda: None)


def pretended() -> Device:
    """Brings the pretended accelerator into this process, for good; before modules are imported that take names of torch it replaces."""
    # it stands on private names of one release of torch
    from tests.pretended import backend

    backend.install()
    return Device(
        backend.DEVICE,
        backend.to_device,
        backend.to_host,
        backend.counting,
        backend.catch_up,
    )


def cuda(*, counts: bool = False) -> Device:
    """Returns the current CUDA device.

    Args:
        counts: Blocks are counted, by torch's profiler and its mode for synchronizing operations; both cost time.
    """
    name = f"cuda:{torch.cuda.current_device()}"
    return Device(
        name,
        lambda tensor: tensor.detach().to(name, copy=True),
        lambda tensor: tensor.detach().cpu(),
        counted_on_cuda if counts else _nothing_counted,
        torch.cuda.synchronize,
        draws_as_the_host=False,
    )


@contextlib.contextmanager
def counted_on_cuda() -> Iterator[Counter[str]]:
    """Counts the kernels and copies on the device that a block starts, and the places where the host waits.

    A wait for an event is not seen: torch's mode knows operators and copies. A blocking upload is a wait there too.
    """
    found = Counter[str]()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
    for warning in heard:
        if _WAIT in str(warning.message):
            found[f"wait {warning.filename.rpartition('/')[2]}:{warning.lineno}"] += 1
            found["own waits"] += _PACKAGE in Path(warning.filename).parents
    # what ran on the device: kernels and its own copies are launches, copies to it uploads
    for event in profiled.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        if "HtoD" in event.name:
            found["uploads"] += 1
        elif "DtoH" not in event.name:
            found["launches"] += 1
