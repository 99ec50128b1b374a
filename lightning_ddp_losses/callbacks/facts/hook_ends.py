"""`HookEnd` and `EpochValues`: places of the run right before Lightning reduces logged values.

Lightning calls the hooks of callbacks before the module's hook, and reduces what the module logs in it as soon as the hook returns. The
only place between both is the return of the hook. What an evaluation logs in its batches is reduced before any hook of its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule

from lightning_ddp_losses.core import compat


class EpochValues:
    """Calls a function before an evaluation reduces its epoch values, until ``remove``.

    Args:
        loop: Loop of the evaluation.
        function: Function to call.
    """

    def __init__(self, loop: Any, function: Callable[[], None]) -> None:
        self.remove = compat.before_epoch_values(loop, function)


class HookEnd:
    """Calls a function whenever a hook of a module has returned, until ``remove``.

    Args:
        module: Module of a fit. Its hook is replaced in the object, so that its class, its copies and its pickles keep theirs.
        name: Name of the hook.
        at_end: Function to call.
    """

    def __init__(self, module: LightningModule, name: str, at_end: Callable[[], None]) -> None:
        self._attributes, self._name = vars(module), name
        self._given = self._attributes.get(name)  # None if the hook is that of the class
        self._attributes[name] = _HookWithEnd(getattr(module, name), at_end)

    def remove(self) -> None:
        """Give the module its hook back."""
        if self._given is None:
            self._attributes.pop(self._name, None)
        else:
            self._attributes[self._name] = self._given


class _HookWithEnd:
    """A hook, and what is called after it. A copy or a pickle of it is the hook."""

    def __init__(self, hook: Callable[..., Any], at_end: Callable[[], None]) -> None:
        self._hook, self._at_end = hook, at_end

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._hook(*args, **kwargs)
        self._at_end()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._hook,)


def _same(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook
