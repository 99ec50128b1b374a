"""How many collectives a piece of code runs: the operations that reach torch's c10d dispatcher in this thread."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from lightning.pytorch import Callback

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
