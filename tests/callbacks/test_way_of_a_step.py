"""A step with all checks, and a fact on its way to a finding: how many functions of the package are entered, and in how many files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_ddp_losses import DDPChecks, ParameterSyncCheck
from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import BATCHES, OneLoss
from tests.doors import RowExchange, StageFacts
from tests.fits import make_trainer
from tests.test_way_of_a_call import PACKAGE, ROOM, Followed

STEP = BATCHES - 1  # the last one: nothing is made or agreed on any more
OF_CHECKS, OF_DRIFT, FILES_OF_DRIFT = 138, 60, 8


class Supervised(OneLoss):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.odd and self.trainer.fit_loop.total_batch_idx == STEP - 2:
            nn.init.zeros_(self.head.weight)


class Follows(Callback):
    """Follows the last step, from its first hook to its last one."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == STEP:
            self.block = self.followed.functions_of()
            self.block.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == STEP and self.block is not None:
            self.block.__exit__(None, None, None)


def names_of(followed: Followed) -> list[str]:
    return sorted(f"{Path(file).relative_to(PACKAGE)}: {function}" for file, function in followed.functions)


def follow_step(with_checks: bool) -> list[str]:
    """Return the functions of a step. The callback that is last in the list ends it."""
    followed = Followed()
    first, last = Follows(followed), Follows(followed)
    first.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    last.on_train_batch_start = lambda *_: setattr(last, "block", getattr(first, "block", None))  # type: ignore[method-assign]
    checks = [DDPChecks(file=False, summary=False)] if with_checks else []
    make_trainer("ddp_losses", callbacks=[first, *checks, last]).fit(Supervised(False))
    return names_of(followed)


def test_checks_add_few_functions_to_a_step(pool: RankPool) -> None:
    bare, checked = (set(pool.run(2, follow_step, with_checks)[0]) for with_checks in (False, True))
    added = sorted(checked - bare)
    assert len(bare) > OF_CHECKS / 2
    assert OF_CHECKS / 2 < len(added) <= OF_CHECKS * ROOM, "\n".join(added)


def follow_drift() -> list[str]:
    """Return the functions between the facts of a drifted weight and the error: what is sent, judged, explained and reported."""
    exchanges: list[Followed] = []
    exchange = RowExchange.exchange

    def exchange_followed(self: RowExchange, due: list[StageFacts], step: int, **options: Any) -> None:
        exchanges.append(Followed())
        with exchanges[-1].functions_of():
            exchange(self, due, step, **options)

    trainer = make_trainer("ddp_losses", callbacks=[DDPChecks([ParameterSyncCheck()], file=False, summary=False)])
    with (
        mock.patch.object(RowExchange, "exchange", exchange_followed),
        pytest.raises(DDPLossError, match=r"SYNC[\s\S]*head.weight"),
    ):
        trainer.fit(Supervised(True))
    return names_of(exchanges[-1])


def test_a_fact_becomes_a_finding_in_few_functions(pool: RankPool) -> None:
    functions = pool.run(2, follow_drift)[0]
    of_checks = [name for name in functions if name.startswith("callbacks")]
    files = {name.partition(":")[0] for name in of_checks}
    assert OF_DRIFT / 2 < len(of_checks) <= OF_DRIFT * ROOM, "\n".join(of_checks)
    assert len(files) <= FILES_OF_DRIFT, files
