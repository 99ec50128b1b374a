"""The signature of a call: the properties of its arguments, weights and modes that determine how it is computed. Plans are stored by it.

Numbers of rows and values of arguments are excluded, because they change from call to call and may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import torch_compat

MOST_PLANS = 32
"""Maximum number of plans that an object stores. The oldest plan is dropped for a new one."""

Plan = TypeVar("Plan")


class Signature(NamedTuple):
    """The properties of a call from which its plan is derived. Equal signatures have equal hashes.

    Attributes:
        arguments: The number of positional arguments, the names of keyword arguments, and for each argument its form and the position of
            the first one that is the same object.
        weights: For each parameter and buffer its dtype, device, need of a gradient and shape.
        modes: Whether gradients, inference mode and autocast are enabled, and the default dtype.
    """

    arguments: tuple[Any, ...]
    weights: tuple[Any, ...]
    modes: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: Iterable[Tensor] = (),
        batch_dims: Mapping[int | str, int | None] | None = None,
    ) -> tuple[Signature, list[Tensor]]:
        """Return the signature of a call, and the tensors among its arguments, in order.

        Args:
            args: Positional arguments.
            kwargs: Arguments by name.
            weights: Parameters and buffers of the called module.
            batch_dims: Dimension that counts samples, by position or name (default 0). With None, all dimensions are in the signature.
        """
        tensors: list[Tensor] = []
        arguments: list[Any] = [len(args), *kwargs]
        first_places: dict[int, int] = {}  # by id of each object among the arguments
        dims = batch_dims or {}
        for name, value in zip((*range(len(args)), *kwargs), (*args, *kwargs.values()), strict=True):
            first = first_places.setdefault(id(value), len(arguments))
            arguments += (first, _form(value, dims.get(name, 0), tensors))
        forms = []
        for weight in weights:
            shape = () if is_lazy(weight) else weight.shape
            forms.append((weight.dtype, weight.device, weight.requires_grad, shape))
        return cls(tuple(arguments), tuple(forms), modes_of_torch()), tensors


def modes_of_torch() -> tuple[Any, ...]:
    """Return the modes and defaults of torch that are part of a signature."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch_compat.is_any_autocast_on(),
        torch.get_default_dtype(),
    )


def _form(value: Any, batch_dim: int | None, tensors: list[Tensor]) -> Any:
    """Return the form of an argument, and append the tensors in it to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        if value.is_nested:
            return type(value), value.dtype, value.device, value.requires_grad
        shape = list(value.shape)
        if batch_dim is not None and -len(shape) <= batch_dim < len(shape):
            shape[batch_dim] = -1
        return type(value), value.dtype, value.device, value.requires_grad, *shape
    keys: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        parts: Iterable[Any] = value
    elif isinstance(value, dict):
        keys, parts = value.keys(), value.values()
    else:
        return type(value)
    forms = [_form(part, batch_dim, tensors) for part in parts]
    return type(value), *keys, *forms


class Plans(dict[tuple[Any, ...], Plan]):
    """The plans of one object, by the signature of a call. A copy or a pickle is empty."""

    def add(self, signature: tuple[Any, ...], plan: Plan) -> None:
        """Store a plan, dropping the oldest one if there are too many."""
        if len(self) == MOST_PLANS:
            del self[next(iter(self))]
        self[signature] = plan

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()
