"""The pool of rank processes under the name that the tests have for it; it is the package's own."""

from __future__ import annotations

from lightning_ddp_losses.testing.rank_pool import PRELOAD, RankFailure, RankPool
from lightning_ddp_losses.testing.rank_worker import RankError

__all__ = ["PRELOAD", "RankError", "RankFailure", "RankPool"]
