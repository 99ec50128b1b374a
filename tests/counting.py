"""How many collectives a piece of code runs: the operations that reach torch's c10d dispatcher in this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ddp_losses.testing import CountCollectives
from tests.doors import handshake


def nothing_rides() -> contextlib.AbstractContextManager[Any]:
    """Inside the block this rank takes no payload for small: all of them travel as those of large batches do."""
    return mock.patch.object(handshake, "inline_capacity", return_value=0)


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


class Operators(TorchDispatchMode):
    """Calls `seen(operator, arguments, tensors of the result)` after each operator inside the block."""

    def __init__(self, seen: Callable[[Any, tuple[Any, ...], list[Tensor]], object]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen(func, args, [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        return result


@contextlib.contextmanager
def sizes_of_results() -> Iterator[list[int]]:
    """The numbers of elements of all tensors that operators return inside the block."""
    sizes: list[int] = []
    with Operators(lambda operator, arguments, results: sizes.extend(each.numel() for each in results)):
        yield sizes
