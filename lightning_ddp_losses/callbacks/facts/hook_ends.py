"""`HookEnds`: a place of the run right after a hook of the module.

Lightning calls the hooks of callbacks before the module's hook, and reduces what the module logs in it as soon as the hook returns. The
only place between both is the return of the hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule


class HookEnds:
    """Calls functions at the end of hooks of a module, until ``remove``.

    Args:
        module: Module of a fit. Its hooks are replaced in the object, so that its class, its copies and its pickles keep theirs.
    """

    def __init__(self, module: LightningModule) -> None:
        self._attributes = vars(module)
        self._given: dict[str, Any] = {}  # hooks that the object had itself. None for those of the class
        self._module = module

    def add(self, name: str, at_end: Callable[[], None]) -> None:
        """Call a function whenever the hook of this name has returned."""
        self._given[name] = self._attributes.get(name)
        self._attributes[name] = _HookWithEnd(getattr(self._module, name), at_end)

    def remove(self) -> None:
        """Give the module its hooks back."""
        for name, given in self._given.items():
            if given is None:
                self._attributes.pop(name, None)
            else:
                self._attributes[name] = given
        self._given.clear()


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
