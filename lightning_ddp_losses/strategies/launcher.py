"""Lightning's launcher of ranks as processes of the main one (``spawn``, ``fork``, a notebook), with a whole state on the way back.

After a fit the first rank of a node sends its module's ``state_dict`` to the main process there, which loads it. Of a sharded weight that
would be one rank's classes; what is sent instead is the whole, assembled by all ranks.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.forward_patch import MethodPatch
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.strategies.adoption import ADOPTED


class WholeStateLauncher(compat.multiprocessing_launcher()):  # type: ignore[misc]
    """Sends the whole of what is sharded to the main process."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        """Return what goes to the main process, None on most ranks; every rank comes here, at the healthy end of its run.

        Communication: after a fit, each rank sends its part of sharded weights to the first rank of each node.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return super()._collect_rank_zero_results(trainer, results)
        # 1. the whole, where a main process will get it
        strategy = trainer.strategy
        first_ranks = range(0, process_groups.world_size(), strategy.num_processes)
        state = strategy.whole_module_state(first_ranks)
        # 2. what has no place there
        adopted = sorted({".".join(name.split(".")[:2]) for name in state if name.startswith(f"{ADOPTED}.")})
        if adopted:
            rank_zero_warn(
                f"{', '.join(adopted)}: losses that the module does not register (adopt=True) were trained in the ranks' processes, and "
                "the main process keeps them as they were before the fit. Assign them to attributes of the LightningModule, or take "
                "them from a checkpoint."
            )
        # 3. Lightning asks the module
        patch = _KnownState(trainer.lightning_module, state)
        patch.install()
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            patch.remove()


class _KnownState(MethodPatch):
    """Answers for a module's ``state_dict``."""

    def __init__(self, module: nn.Module, state: dict[str, Any]) -> None:
        super().__init__(module, "state_dict")
        self._state = state

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._state
