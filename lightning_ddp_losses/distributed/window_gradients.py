"""The gradients of an accumulation window, as left by its last backward.

When the window ends they are corrected by one factor. Nothing may change them between two backwards or before the end: neither a
``zero_grad`` that drops a micro-batch, whose counts would remain, nor clipping, which would use gradients that are not corrected yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed.shard import local_part
from lightning_ddp_losses.errors import ConfigurationError, expect, listed

_Seen = tuple[Tensor | None, int]


class WindowGradients:
    """The gradients that a window corrects.

    Args:
        parameters: Parameters by name. A parameter with several names is counted once.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        by_id = {id(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._parameters = list(by_id.values())
        # weak, because an input of one micro-batch does not outlive it
        self._leaves = WeakTensorKeyDictionary()
        self._seen: list[_Seen] | None = None

    def refuse_left(self) -> None:
        """Reject gradients from before the window, which would be corrected together with the window's gradients.

        Raises:
            ConfigurationError: naming a parameter.
        """
        for i, (name, parameter) in enumerate(self._parameters):
            # a gradient that was checked and has not changed since is not read again
            if self._seen is None or not _is_same_gradient(self._seen[i], _gradient_of(parameter)):
                _refuse_left_gradient(f"that of `{name}`", parameter)

    def take_leaves_(self, leaves: Sequence[Tensor]) -> None:
        """Also correct the gradients of further tensors.

        Raises:
            ConfigurationError: for a tensor with a gradient from before the window.
        """
        for leaf in leaves:
            if leaf not in self._leaves:
                _refuse_left_gradient(f"that of a tensor of shape {tuple(leaf.shape)}", leaf)
                self._leaves[leaf] = True

    def note(self) -> None:
        """Record the gradients after a backward. The tensors are held, because the id of a freed tensor may be reused."""
        self._seen = [_gradient_of(parameter) for _, parameter in self._parameters]

    def refuse_changed(self) -> None:
        """Reject gradients that were dropped or changed since the last backward.

        Raises:
            ConfigurationError: naming parameters.
        """
        seen = self._seen
        if seen is None:
            return
        changed = []
        for (name, parameter), before in zip(self._parameters, seen, strict=True):
            if not _is_same_gradient(before, _gradient_of(parameter)):
                changed.append(f"`{name}`")
        if changed:
            self._seen = None
            raise ConfigurationError(
                "accumulation window: gradients since its last backward",
                expected="as it left them, until the window corrects them",
                got=f"dropped or changed gradients of {listed(changed)}",
                fix="Clip, scale, reduce or drop gradients after the window. To leave out a micro-batch, do not call backward for it.",
            )

    def multiply_(self, factor: float, *, divided_by: float) -> None:
        """Multiply all gradients.

        Args:
            factor: Factor of the window.
            divided_by: Factor for the reduction by ``fully_shard``, which is removed from gradients that ``fully_shard`` does not divide.
        """
        found = [parameter.grad for _, parameter in self._parameters]
        found += [leaf.grad for leaf in self._leaves]
        grads = [grad for grad in found if grad is not None]
        if factor != 1.0:
            torch_compat.multiply_([local_part(grad) for grad in grads], factor)
        if divided_by != 1.0:
            torch_compat.multiply_([grad for grad in grads if local_part(grad) is grad], 1 / divided_by)
        self._seen = None

    def drop_(self) -> None:
        """Drop the gradients of a failed window, which did not exist or were zero before it."""
        for parameter in (*(parameter for _, parameter in self._parameters), *self._leaves):
            parameter.grad = None
        self._seen = None


def _gradient_of(parameter: Tensor) -> _Seen:
    grad = parameter.grad
    return grad, -1 if grad is None else torch_compat.tensor_version(local_part(grad))


def _is_same_gradient(before: _Seen, now: _Seen) -> bool:
    return before[0] is now[0] and before[1] == now[1]


def _refuse_left_gradient(title: str, tensor: Tensor) -> None:
    grad = tensor.grad
    if grad is None:
        return
    values = grad.coalesce().values() if grad.is_sparse else local_part(grad)
    expect(
        not values.any(),
        "accumulation window: gradients before it",
        expected="none, or zeros",
        got=title,
        fix="Call optimizer.zero_grad() before the window.",
    )
