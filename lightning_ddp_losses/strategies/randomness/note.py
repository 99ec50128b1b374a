"""`DropoutNote`: says once whether ranks draw equal dropout masks, and which option changes it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import listed
from lightning_ddp_losses.randomness.layers import layers_that_drop
from lightning_ddp_losses.randomness.shared_states import device_of_draws, digest_of, torch_states
from lightning_ddp_losses.strategies.fit_part import FitPart


class DropoutNote(FitPart):
    """Compares the generators of the ranks when training begins, if the model has layers that drop."""

    needs = ("randomness", "rank")
    _layers: Sequence[str] = ()

    def on_model_ready(self) -> None:
        """Remember the layers that drop, which the set-up has compared between the ranks."""
        self._layers = layers_that_drop(self.fit.module)

    def on_train_start(self) -> None:
        """Log a note on rank 0. Communication: one handshake, if a layer drops and there are two ranks or more."""
        if not self._layers or process_groups.world_size() == 1:
            return
        digest = digest_of({"torch": torch_states(device_of_draws())})
        digests = handshake.all_gather_between_steps("random numbers of layers that drop", {}, digest)
        which = "different masks on each rank"
        if len(set(digests)) == 1:
            which = "equal masks on all ranks: row i of each rank loses the same units"
        elif len(set(digests)) < len(digests):
            which = "equal masks on some ranks: row i of these ranks loses the same units"
        rank_zero_info(
            f"Dropout ({listed(self._layers, 3)}) draws {which}. One process draws other masks. "
            'randomness="global" of this strategy draws the masks of one process (`ddp-losses explain F72`).'
        )
