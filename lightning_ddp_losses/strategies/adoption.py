"""What happens to a hidden loss: the same refusal on every rank, or a place under ``_adopted_losses`` for the length of a fit.

Adopted losses leave the module with the fit. Checkpoints hold them also after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_ddp_losses.core.module_search import Hidden, find_hidden
from lightning_ddp_losses.core.precision import PrecisionKeeper
from lightning_ddp_losses.distributed import handshake, raw_collectives
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import HiddenLossError
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.loss_discovery import ADOPTED, FoundLoss, named_tensors
from lightning_ddp_losses.strategies.shards import shard_losses


class Adoption(FitPart):
    """Registers hidden losses for the length of a fit, and keeps them for checkpoints. Without ``adopt`` they are refused."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._modules: nn.ModuleDict | None = None

    def find(self) -> Hidden:
        """Search the module, the callbacks and the data module for hidden losses. Refuse those that will not be adopted.

        Raises:
            HiddenLossError: on every rank, with the paths.
            RankMismatchError: on every rank, when ranks would adopt different modules.

        Communication: one handshake.
        """
        trainer, adopt = self.fit.trainer, self.fit.options.adopt
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        elsewhere: dict[str, Any] = {f"callbacks[{i}] ({type(c).__name__})": c for i, c in enumerate(callbacks)}
        elsewhere["datamodule"] = getattr(trainer, "datamodule", None)
        hidden = find_hidden(self.fit.module, self.fit.strategy.optimizers, elsewhere)
        named = [f"{type(m).__name__} at {path}" for path, m in hidden.optimised.items()]
        refused, must_match = named + hidden.loose, {}
        if adopt:
            refused, must_match = hidden.loose, {"modules to adopt": "; ".join(named) or "none"}
        refused_everywhere = handshake.all_gather_json("hidden losses", must_match, refused)
        if any(refused_everywhere):
            raise _hidden_loss_error(refused_everywhere, adopt=adopt)
        return hidden

    def adopt(self, hidden: Hidden) -> list[FoundLoss]:
        """Register the optimised hidden modules under ``module._adopted_losses``, on the device, sharded or equal on all ranks.

        Returns:
            Them, as the strategy knows losses.

        Communication: one broadcast. What ``shard_losses`` needs. (That all ranks adopt the same was compared in ``find``.)
        """
        strategy, adopted = self.fit.strategy, nn.ModuleDict()
        for path, found in hidden.optimised.items():
            key = _key(path)
            adopted[key if key not in adopted else f"{key}_{len(adopted)}"] = found
        shard_losses(adopted)  # before its values are remembered
        keeper = PrecisionKeeper()
        keeper.remember([adopted])
        strategy.precision_plugin.convert_module(adopted)
        keeper.restore()
        adopted.to(strategy.root_device)
        self.fit.module.add_module(ADOPTED, adopted)
        self.undo.callback(delattr, self.fit.module, ADOPTED)
        ddp = strategy.wrapped_model
        if ddp is not None:  # it reads the buffers of the live module in each step
            ddp.parameters_to_ignore |= {f"{ADOPTED}.{name}" for name, _ in adopted.named_buffers()}
        raw_collectives.broadcast_([tensor for _, tensor in named_tensors(adopted) if shard_of(tensor) is None])
        rank_zero_info(f"Adopted as submodules: {', '.join(hidden.optimised)}.")
        self._modules = adopted
        return [FoundLoss(f"{ADOPTED}.{key}", found, learnable=True, owned=True) for key, found in adopted.items()]

    # ------------------------------------------------------------------ checkpoints

    def parameters_with_adopted(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's parameters, and those of adopted losses also after the fit."""
        named = dict(module.named_parameters())
        if self._modules is not None:
            named.update(self._modules.named_parameters(prefix=ADOPTED))
        return named

    def state_with_adopted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the module's state, with that of adopted losses also after the fit."""
        if self._modules is None:
            return dict(state)
        return {**state, **self._modules.state_dict(prefix=f"{ADOPTED}.")}

    @staticmethod
    def state_for(module: nn.Module | None, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state without adopted losses where none are registered (validate, test, predict)."""
        if hasattr(module, ADOPTED):
            return dict(state)
        return {key: value for key, value in state.items() if not key.startswith(f"{ADOPTED}.")}


def _key(path: str) -> str:
    return re.sub(r"\W+", "_", path.removeprefix("self.")).strip("_")


def _hidden_loss_error(refused: list[list[str]], *, adopt: bool) -> HiddenLossError:
    """Return the error that names the hidden modules of each rank."""
    fix = (
        "They would not be moved, synchronised or saved. Assign them to attributes of the LightningModule (nn.ModuleList or "
        "nn.ModuleDict for several), or pass DDPLossStrategy(adopt=True)."
    )
    if adopt:
        fix = "Only modules that can be reached by attributes, containers, closures or callbacks can be adopted."
    got: str | None = "; ".join(refused[0])
    ranks: list[str] | None = None
    if any(own != refused[0] for own in refused):
        got, ranks = None, ["; ".join(own) or "none hidden" for own in refused]
    return HiddenLossError(
        "parameters in an optimizer",
        expected="parameters of registered submodules",
        got=got,
        ranks=ranks,
        fix=fix,
        collective=True,
    )
