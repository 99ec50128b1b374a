"""`DividedWeights`: Lightning's DDP strategy, with parameters of which each rank holds its own classes.

Between DDP and `DDPLossStrategy`: what there is to do about shards at set-up, after backward and in checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.shard import Shardable
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.shard_files import REST, ShardFiles, is_sharded, refuse_other_sizes
from lightning_ddp_losses.strategies.sharded_parameters import Shards, divide, unshared


class DividedWeights(DDPStrategy):
    """DDP that divides class weights over the ranks and puts them together in checkpoints.

    Args:
        sharded_checkpoints: Write each rank's part by itself.
        **ddp_kwargs: What ``lightning.pytorch.strategies.DDPStrategy`` takes.
    """

    def __init__(self, *, sharded_checkpoints: bool = False, **ddp_kwargs: Any) -> None:
        super().__init__(**ddp_kwargs)
        self._sharded_checkpoints = sharded_checkpoints
        self._loaded_from: Any = None
        self._shards: Shards | None = None
        self._files: ShardFiles | None = None

    @property
    def _plain(self) -> bool:
        return False

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        return True

    def meet_shards(self) -> ShardFiles:
        """Divide the classes of losses that can be divided, once the ranks exist."""
        if self._files is None:
            module = self.lightning_module
            assert module is not None
            divide(module)
            self._shards = Shards(module, self._own_parameters())
            self._files = ShardFiles(self._shards, sharded=self._sharded_checkpoints)
        return self._files

    def setup(self, trainer: pl.Trainer) -> None:
        """Divide, set up, and keep the parts out of every broadcast."""
        module = self.lightning_module
        assert module is not None
        if self._plain:
            self._refuse_shards(module)
            super().setup(trainer)
            return
        self.meet_shards()
        fitting = trainer.state.fn == TrainerFn.FITTING
        with contextlib.nullcontext() if fitting else unshared(module, ddp_setup.ignoring):
            super().setup(trainer)
        if fitting:
            self._install_shards()

    def _install_shards(self) -> None:
        if self._shards:
            self._shards.attach(self.optimizers)
            self._shards.install_clipping(self.precision_plugin)

    def meet_new_shards(self) -> None:
        """Divide and install once more, after losses were registered in the middle of set-up."""
        if self._shards is not None:
            self._shards.remove()
        self._files = None
        self.meet_shards()
        self._install_shards()

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that checkpoints hold."""
        assert self.lightning_module is not None
        return self.lightning_module.named_parameters()

    def _own_state(self) -> dict[str, Any]:
        """The state that checkpoints hold, what is divided as this rank has it."""
        return super().lightning_module_state_dict()

    @staticmethod
    def _refuse_shards(module: pl.LightningModule) -> None:
        found = [name for name, inner in module.named_modules() if isinstance(inner, Shardable)]
        if found:
            raise ConfigurationError(
                "losses=[]",
                expected="no loss whose classes are divided over the ranks",
                got=", ".join(found),
                fix="Plain DDP would broadcast one rank's rows to all; leave losses at 'auto'.",
            )

    def post_backward(self, closure_loss: Tensor) -> None:
        """Let a gradient that overflowed on one rank count on all."""
        super().post_backward(closure_loss)
        if self._shards and self.sync_gradients and getattr(self.precision_plugin, "scaler", None) is not None:
            self._shards.share_overflow()

    def teardown(self) -> None:
        """Take back what was installed."""
        if self._shards is not None:
            self._shards.remove()
        self._shards = self._files = None
        super().teardown()

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain module's state, with the whole of what is divided."""
        state = self._own_state()
        return state if self._plain else self.meet_shards().module_state(state)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """An optimizer's state, that of divided weights as the whole."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._plain or "state" not in state:
            return state
        inner = getattr(optimizer, "_optimizer", optimizer)
        number = next(i for i, known in enumerate(self.optimizers) if known is inner)
        return self.meet_shards().optimizer_state(inner, number, state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a file, or a folder of shards."""
        rest = super().save_checkpoint
        if not self._plain:
            checkpoint = {**checkpoint, "state_dict": self.meet_shards().completed(checkpoint["state_dict"])}
        if self._sharded_checkpoints and self._shards:
            self.meet_shards().write(filepath, lambda path: rest(checkpoint, path, storage_options))
        else:
            rest(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file, or what is not divided of a folder of shards."""
        self._loaded_from = checkpoint_path if is_sharded(checkpoint_path) else None
        path = checkpoint_path if self._loaded_from is None else Path(checkpoint_path) / REST
        return super().load_checkpoint(path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load, this rank's part of what is divided; a checkpoint of other sizes before anything is loaded."""
        module = self.lightning_module
        assert module is not None
        if self._plain:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        try:
            files = self.meet_shards()
            refuse_other_sizes(module, checkpoint["state_dict"])
        except Exception as error:
            handshake.raise_on_all_ranks(error, "loading a checkpoint")
        state = files.read(self._loaded_from, checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load, this rank's part of what belongs to divided weights."""
        if self._plain:
            super().load_optimizer_state_dict(checkpoint)
            return
        files, states = self.meet_shards(), checkpoint["optimizer_states"]
        pairs = zip(self.optimizers, states, strict=False)
        own = [files.own_optimizer_state(optimizer, state, self._loaded_from) for optimizer, state in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": own})
