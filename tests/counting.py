"""How many collectives a piece of code runs: the operations that reach torch's c10d dispatcher in this thread."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.doors import handshake


def nothing_rides() -> contextlib.AbstractContextManager[Any]:
    """Inside the block this rank takes no payload for small: all of them travel as those of large batches do."""
    return mock.patch.object(handshake, "inline_capacity", return_value=0)


def bytes_of(argument: Any) -> int:
    """Return the bytes of the tensors in an argument of an operation."""
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(bytes_of, argument)) if isinstance(argument, (list, tuple)) else 0


class CountCollectives(TorchDispatchMode):
    """Collects the names of all `c10d::*` operations, in order, forward and backward, and the bytes that they exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name.removeprefix("c10d::"))
            # the larger of input and output: a gather fills W times its input
            self.num_bytes += max(bytes_of(argument) for argument in args)
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        """The names since the last call."""
        names, self.names = self.names, []
        return names


class StepCollectives(Callback):
    """The collectives of each training batch, from its start to its end."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.counter = CountCollectives()
        self.counter.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)
        self.steps.append(self.counter.take())
