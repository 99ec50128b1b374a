"""How many collectives a piece of code runs: the operations that reach torch's c10d dispatcher in this thread."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CountCollectives"]


class CountCollectives(TorchDispatchMode):
    """Collects the names of all `c10d::*` operations, in order, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        """The names since the last call."""
        names, self.names = self.names, []
        return names
