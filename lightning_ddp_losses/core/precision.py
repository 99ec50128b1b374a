"""The precision in which a loss computes: never below float32, and never below the precision of its parameters or inputs.

Autocast reduces the precision of products inside a loss. pytorch-metric-learning 2.9 then permanently assigns its weight in the dtype of
the embeddings: under ``bf16-mixed`` and Lightning 2.6 the next step fails with a misleading error about unused parameters, or, in a
separate DDP, the weight's gradient silently stops being reduced (measured 2026). Therefore a loss runs with autocast off, in
``promote(float32, parameters, inputs)``, and its parameters and buffers keep their dtype. If that is lower, the loss computes with casts of
them for the duration of the call (class weights in bf16 with rows in float32 are an error in torch). ``PrecisionKeeper``
protects them from a precision plugin that would convert them to half precision (``bf16-true``, ``16-true``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs, torch_compat

_CROSS_BATCH_MEMORY = "pytorch_metric_learning.losses.cross_batch_memory.CrossBatchMemory"


def compute_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return ``promote(float32, ...)`` over the floating-point tensors, ignoring integers, booleans and complex numbers."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def narrow_dtype(tensors: Iterable[object]) -> torch.dtype | None:
    """Return bfloat16 or float16 if all floating-point tensors have that dtype, otherwise None."""
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point()}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


@dataclass(frozen=True)
class CallTensors:
    """The tensors of one call of a module, found in one walk over the module and the arguments.

    Attributes:
        given: Tensors among the arguments.
        modules: The module, and all modules inside it.
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


def is_full(dtype: torch.dtype, device_types: Iterable[str], tensors: Iterable[Tensor]) -> bool:
    """Return whether a call already computes in ``dtype``: no autocast, no low default dtype, no floating-point tensor of another dtype."""
    return (
        torch.get_default_dtype().itemsize >= torch.float32.itemsize
        and not any(map(_autocasts, device_types))
        and all(tensor.dtype == dtype or not tensor.is_floating_point() for tensor in tensors)
    )


def _autocasts(device_type: str) -> bool:
    """Return whether autocast is enabled. For some devices (``meta``) torch raises an error for this query."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def modules_of(module: nn.Module, left_out: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """Return a module and all modules inside it, each once, level by level: in a tenth of the time of ``module.modules()``.

    Each step calls this, so that modules replaced, added or removed in between are found. The work is done per level and not per module.

    Args:
        module: The outermost module.
        left_out: Modules that are not visited, together with modules that are only inside them.
    """
    skipped = set(map(id, left_out))  # a metric's own hash reads all of its states
    found: dict[int, nn.Module] = {}
    slots: list[nn.Module | None] = [module]
    while slots:
        level = {id(m): m for m in slots if m is not None and id(m) not in found and id(m) not in skipped}
        found.update(level)
        slots = [*torch_compat.all_slots(level.values(), "modules")]
    return [*found.values()]


def parameters_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters that some modules hold directly. A shared parameter appears once for each slot."""
    return [parameter for parameter in torch_compat.all_slots(modules, "parameters") if parameter is not None]


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return all parameters, shared ones once for each slot: in a tenth of the time of ``module.parameters()``."""
    return parameters_in(modules_of(module))


def has_buffers(module: nn.Module, left_out: Iterable[nn.Module]) -> bool:
    """Return whether a module has buffers, apart from the buffers of some modules inside it."""
    return any(buffer is not None for buffer in torch_compat.all_slots(modules_of(module, left_out), "buffers"))


def narrow_buffers(modules: Sequence[nn.Module], dtype: torch.dtype) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the floating-point buffers of some modules that are lower than ``dtype``: owner, name, buffer.

    Wider buffers are excluded, because they may accumulate values without losing digits, and so are buffers that their class casts itself.
    """
    found = list[tuple[nn.Module, str, Tensor]]()
    if not [*torch_compat.all_slots(modules, "buffers")]:
        return found
    for owner in modules:
        for name, buffer in torch_compat.buffer_slots(owner).items():
            if buffer is None or not buffer.is_floating_point() or buffer.dtype.itemsize >= dtype.itemsize:
                continue
            if not _casts_its_buffers(owner):
                found.append((owner, name, buffer))
    return found


def _casts_its_buffers(module: nn.Module) -> bool:
    """Return whether a class of pytorch-metric-learning itself permanently casts its buffers to the dtype of its inputs."""
    return any(f"{cls.__module__}.{cls.__name__}" == _CROSS_BATCH_MEMORY for cls in type(module).__mro__)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Rebuild a nest with its floating-point tensors in ``dtype``. A tensor that appears twice remains a single tensor.

    (A loss may check whether ``ref_emb is embeddings``.)
    """
    done: dict[int, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor.to(dtype)
        return done[id(tensor)]

    return inputs.map_tensors(cast, tree)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a floating-point tensor to a dtype, and a complex tensor to parts of this dtype (float32 for narrower dtypes)."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_module_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers, including complex ones, which ``Module.to`` would convert to real."""
    parts = [*module.parameters(), *module.buffers()]
    wide = {part: as_dtype(part.data, dtype) for part in parts if part.is_complex()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Complex modules are a new feature")
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        module.to(dtype)
    for part, data in wide.items():
        part.data = data


_switched_off: list[None] = []  # one entry for each nested block that has disabled autocast


def is_autocast_on() -> bool:
    """Return whether the program is inside autocast, even if a loss has disabled it for its own computation."""
    return bool(_switched_off) or torch_compat.is_any_autocast_on()


def without_autocast(device_types: Iterable[str]) -> AbstractContextManager[object]:
    """Return a block that disables autocast if it is enabled. Otherwise the overhead of context managers is avoided."""
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
    """Disable autocast, and keep torch's default dtype from being below ``dtype``, for the duration of the block."""
    default = torch.get_default_dtype()
    wide = torch.promote_types(default, dtype)
    with without_autocast(device_types), contextlib.ExitStack() as stack:
        if default.itemsize < torch.float32.itemsize:
            torch.set_default_dtype(wide)
            stack.callback(torch.set_default_dtype, default)
        yield


@contextlib.contextmanager
def cast_module(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace lower floating-point parameters and buffers of ``module`` by casts to ``dtype``. Gradients reach the original parameters.

    An assignment to ``parameter.data`` inside the block only affects the cast. A write into a buffer is copied to the buffer, in the
    buffer's dtype. A buffer that the module replaces stays replaced.
    """
    parameters = []
    for owner in module.modules():
        for name, parameter in torch_compat.parameter_slots(owner).items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                parameters.append((owner, name, parameter))
    buffers = narrow_buffers(modules_of(module), dtype)
    # a tensor in two slots has a single cast
    cast: dict[int, Tensor] = {id(parameter): parameter.to(dtype) for _, _, parameter in parameters}
    with torch.inference_mode(False):  # so that the casts count writes
        cast |= {id(buffer): buffer.to(dtype) for _, _, buffer in buffers}
    versions = {id(buffer): torch_compat.tensor_version(cast[id(buffer)]) for _, _, buffer in buffers}
    try:
        for owner, name, parameter in parameters:
            # a registered slot only accepts a Parameter by assignment, but the module can use any tensor in it
            torch_compat.parameter_slots(owner)[name] = cast[id(parameter)]  # type: ignore[assignment]
        for owner, name, buffer in buffers:
            torch_compat.buffer_slots(owner)[name] = cast[id(buffer)]
        yield
    finally:
        for owner, name, parameter in parameters:
            torch_compat.parameter_slots(owner)[name] = parameter
        for owner, name, buffer in buffers:
            seen = cast[id(buffer)]
            if torch_compat.buffer_slots(owner).get(name) is not seen:
                continue
            torch_compat.buffer_slots(owner)[name] = buffer
            if torch_compat.tensor_version(seen) != versions[id(buffer)]:
                with torch.no_grad():
                    buffer.copy_(seen)


class PrecisionKeeper:
    """Records floating-point parameters and buffers, and restores those whose precision was lowered afterwards."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def remember(self, modules: Iterable[nn.Module]) -> None:
        """Record the current values and dtypes."""
        self._before = []
        for module in modules:
            tensors = [*module.parameters(), *module.buffers()]
            self._before += [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]

    def restore(self) -> None:
        """Restore the recorded values wherever the precision was lowered. A wider dtype is kept."""
        for tensor, before in self._before:
            if torch.promote_types(tensor.dtype, before.dtype) != tensor.dtype:
                tensor.data = before
        self._before = []
