"""`AdoptingStrategy`: checkpoints of a module that has adopted losses which it never registered.

Between `DividedWeights` and `DDPLossStrategy`. Adopted losses leave the module with the fit; checkpoints hold them also after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_ddp_losses.strategies.adoption import NAME
from lightning_ddp_losses.strategies.sharded_ddp import DividedWeights


class AdoptingStrategy(DividedWeights):
    """A strategy whose checkpoints hold adopted losses.

    Args:
        adopt: Whether hidden losses are adopted.
        **kwargs: What ``DividedWeights`` takes.
    """

    def __init__(self, *, adopt: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._adopt = adopt
        self._adopted: nn.ModuleDict | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Adopted losses are registered in ``setup``; a checkpoint that holds them must wait for that."""
        return self._adopt or super().restore_checkpoint_after_setup

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load, leaving out adopted losses where none are registered (validate, test, predict)."""
        state = checkpoint["state_dict"]
        if not hasattr(self.lightning_module, NAME):
            state = {k: v for k, v in state.items() if not k.startswith(f"{NAME}.")}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)

    def _own_state(self) -> dict[str, Any]:
        """The plain module's state, and that of adopted losses also after the fit."""
        state = super()._own_state()
        if self._adopted is not None:
            state.update(self._adopted.state_dict(prefix=f"{NAME}."))
        return state

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = dict(super()._own_parameters())
        if self._adopted is not None:
            named.update(self._adopted.named_parameters(prefix=NAME))
        yield from named.items()
