"""In which precision a loss computes: never below float32, never below its parameters or inputs.

Autocast halves the products inside a loss. pytorch-metric-learning 2.9 then assigns its weight in the dtype of the embeddings, for
good: under ``bf16-mixed`` and Lightning 2.6 the next step dies with a misleading error about unused parameters, or, in a DDP of its
own, the weight's gradient silently stops being reduced (measured 2026). So a loss runs with autocast off, in
``promote(float32, parameters, inputs)``, and its parameters and buffers keep the dtype they have. If that is lower, the loss sees
casts of them for the length of the call (class weights in bf16 with rows in float32 are an error of torch's). ``PrecisionKeeper``
keeps them out of a precision plugin's halving (``bf16-true``, ``16-true``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import compat, inputs

_CROSS_BATCH_MEMORY = "pytorch_metric_learning.losses.cross_batch_memory.CrossBatchMemory"


def compute_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return ``promote(float32, ...)`` over the floating tensors. Integers, booleans and complex numbers do not count."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def narrow_dtype(tensors: Iterable[object]) -> torch.dtype | None:
    """Return bfloat16 or float16 if all floating tensors are of that dtype, else None."""
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


@dataclass(frozen=True)
class CallTensors:
    """The tensors of one call of a module, found in one walk over both.

    Attributes:
        given: Tensors among the arguments.
        modules: The module, and all inside it.
        parameters: Their parameters.
    """

    given: list[Tensor]
    modules: list[nn.Module]
    parameters: list[Tensor]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallTensors:
        """Walk over a module and its arguments."""
        modules = modules_of(module)
        return cls(inputs.tensors_in((args, kwargs)), modules, parameters_in(modules))

    def are_on_one_device(self, others: Iterable[Tensor] = ()) -> bool:
        """Return whether all tensors with a dimension, all parameters and some other tensors lie on one device."""
        devices = {tensor.device for tensor in self.given if tensor.ndim}
        return len(devices.union(tensor.device for tensor in (*self.parameters, *others))) < 2


def is_full(dtype: torch.dtype, device_types: Iterable[str], tensors: Iterable[Tensor]) -> bool:
    """Return whether a call computes in ``dtype`` already: no autocast, no low default dtype, no floating tensor of another."""
    return (
        torch.get_default_dtype().itemsize >= torch.float32.itemsize
        and not any(map(_autocasts, device_types))
        and all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in tensors)
    )


def _autocasts(device_type: str) -> bool:
    """Return whether autocast is on. Torch refuses the question for some devices (``meta``)."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def modules_of(module: nn.Module, left_out: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return a module and all inside it, each once, level by level: in a tenth of the time of ``module.modules()``.

    Each step asks, so that modules replaced, added or removed in between are seen. The work is done per level and not per module.

    Args:
        module: The outermost one.
        left_out: Modules that are not visited, with all that is inside them alone.
    """
    skipped = set(map(id, left_out))  # a metric's own hash reads all of its states
    found: dict[int, nn.Module] = {}
    slots: list[nn.Module | None] = [module]
    while slots:
        level = {id(m): m for m in slots if m is not None and id(m) not in found and id(m) not in skipped}
        found.update(level)
        slots = [*compat.all_slots(level.values(), "modules")]
    return [*found.values()]


def parameters_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters that some modules hold themselves, one that is held twice twice."""
    return [parameter for parameter in compat.all_slots(modules, "parameters") if parameter is not None]


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return all parameters, one that is held twice twice: in a tenth of the time of ``module.parameters()``."""
    return parameters_in(modules_of(module))


def has_buffers(module: nn.Module, left_out: Iterable[nn.Module]) -> bool:
    """Return whether a module has buffers, apart from those of some modules inside it."""
    return any(buffer is not None for buffer in compat.all_slots(modules_of(module, left_out), "buffers"))


def narrow_buffers(modules: Sequence[nn.Module], dtype: torch.dtype) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the floating buffers of some modules that are lower than ``dtype``: owner, name, buffer.

    Wider ones stay: they may add up what must not lose digits. So do those of a class that casts its own.
    """
    found = list[tuple[nn.Module, str, Tensor]]()
    if not [*compat.all_slots(modules, "buffers")]:
        return found
    for owner in modules:
        for name, buffer in compat.buffer_slots(owner).items():
            if buffer is None or not buffer.is_floating_point() or buffer.dtype.itemsize >= dtype.itemsize:
                continue
            if not _casts_its_buffers(owner):
                found.append((owner, name, buffer))
    return found


def _casts_its_buffers(module: nn.Module) -> bool:
    """Return whether a class of pytorch-metric-learning gives its buffers the dtype of its inputs by itself, for good."""
    return any(f"{cls.__module__}.{cls.__name__}" == _CROSS_BATCH_MEMORY for cls in type(module).__mro__)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Rebuild a nest with its floating tensors in ``dtype``. One tensor that appears twice stays one tensor.

    (A loss may ask whether ``ref_emb is embeddings``.)
    """
    done: dict[int, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor.to(dtype)
        return done[id(tensor)]

    return inputs.map_tensors(cast, tree)


_switched_off: list[None] = []  # one for each block, inside another, that has switched autocast off


def is_autocast_on() -> bool:
    """Return whether the program is inside autocast. Here it may be off, as a loss computes without it."""
    return bool(_switched_off) or compat.is_any_autocast_on()


def without_autocast(device_types: Iterable[str]) -> AbstractContextManager[object]:
    """Return a block that switches autocast off if it is on now. Contexts take time, and usually none is needed."""
    on = [device_type for device_type in set(device_types) if _autocasts(device_type)]
    if not on:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    _switched_off.append(None)
    stack.callback(_switched_off.pop)
    for device_type in on:
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


@contextlib.contextmanager
def full_precision(dtype: torch.dtype, device_types: Iterable[str]) -> Iterator[None]:
    """Switch autocast off, and keep torch's default dtype from being below ``dtype``, for the length of the block."""
    default = torch.get_default_dtype()
    wide = torch.promote_types(default, dtype)
    with without_autocast(device_types), contextlib.ExitStack() as stack:
        if default.itemsize < torch.float32.itemsize:
            torch.set_default_dtype(wide)
            stack.callback(torch.set_default_dtype, default)
        yield


@contextlib.contextmanager
def cast_module(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let ``module`` see its lower floating parameters and buffers in ``dtype``. Gradients reach the parameters themselves.

    An assignment to ``parameter.data`` inside the block touches the cast only. A write into a buffer reaches the
    buffer, in the buffer's dtype. A buffer that it replaces stays replaced.
    """
    parameters = []
    for owner in module.modules():
        for name, parameter in compat.parameter_slots(owner).items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                parameters.append((owner, name, parameter))
    buffers = narrow_buffers(modules_of(module), dtype)
    # a tensor that lies in two slots has one cast
    cast: dict[int, Tensor] = {id(parameter): parameter.to(dtype) for _, _, parameter in parameters}
    with torch.inference_mode(False):  # here tensors count writes
        cast |= {id(buffer): buffer.to(dtype) for _, _, buffer in buffers}
    versions = {id(buffer): compat.tensor_version(cast[id(buffer)]) for _, _, buffer in buffers}
    try:
        for owner, name, parameter in parameters:
            # a registered slot only takes a Parameter by assignment. The module reads any tensor in it
            compat.parameter_slots(owner)[name] = cast[id(parameter)]  # type: ignore[assignment]
        for owner, name, buffer in buffers:
            compat.buffer_slots(owner)[name] = cast[id(buffer)]
        yield
    finally:
        for owner, name, parameter in parameters:
            compat.parameter_slots(owner)[name] = parameter
        for owner, name, buffer in buffers:
            seen = cast[id(buffer)]
            if compat.buffer_slots(owner).get(name) is not seen:
                continue
            compat.buffer_slots(owner)[name] = buffer
            if compat.tensor_version(seen) != versions[id(buffer)]:
                with torch.no_grad():
                    buffer.copy_(seen)


class PrecisionKeeper:
    """Remembers floating parameters and buffers, and restores those that came back in a lower precision."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def remember(self, modules: Iterable[nn.Module]) -> None:
        """Note values and dtypes as they are now."""
        self._before = []
        for module in modules:
            tensors = [*module.parameters(), *module.buffers()]
            self._before += [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]

    def restore(self) -> None:
        """Give back the remembered values wherever the dtype went down. A wider dtype stays."""
        for tensor, before in self._before:
            if torch.promote_types(tensor.dtype, before.dtype) != tensor.dtype:
                tensor.data = before
        self._before = []
