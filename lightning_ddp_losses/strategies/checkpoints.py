"""`LossCheckpoints`: Lightning's hooks around checkpoints, the same for all strategies with learnable losses.

A checkpoint is a file as one process would have written it, or a folder into which each rank writes its parts
(``checkpoint_folder``). Both go on under any strategy and on any number of ranks. The file is whole or not there, and an error of one
rank is one of all (``checkpoint_files``); what is divided over the ranks is put together and divided again by ``shards``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from lightning_ddp_losses.core.compat import unwrapped_optimizer
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.strategies import checkpoint_files, shards
from lightning_ddp_losses.strategies.checkpoint_files import BLOCKS, METADATA, is_folder
from lightning_ddp_losses.strategies.interruptions import refuse_alone
from lightning_ddp_losses.strategies.loss_hooks import LossHooks, with_losses


class LossCheckpoints(LossHooks):
    """Saves and loads module, optimizers and the state of the run; to be named before Lightning's own strategy among the bases."""

    _loaded_from: Any = None  # path of the checkpoint, quoted in errors

    @property
    def _writes_folder(self) -> bool:
        """Whether a checkpoint is a folder."""
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads files: Lightning's default writes whole files or none here, a plugin of the user's stays."""
        plugin: CheckpointIO = super().checkpoint_io
        return plugin

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        ParallelStrategy.checkpoint_io.fset(self, checkpoint_files.use_whole_files(io))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ out

    @with_losses
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state: for a file whole on rank 0, for a folder each rank's own. Every rank comes here."""
        losses = self._losses
        refuse_alone(losses)
        losses.sharding.setup_shards()
        return self._own_state() if self._writes_folder else losses.sharding.whole_state(self._own_state())

    def whole_module_state(self, receivers: Iterable[int]) -> dict[str, Any]:
        """Return the plain module's state, with adopted losses, and on some ranks the whole of what is divided; every rank comes here.

        Args:
            receivers: Ranks that get the whole; others get tensors of its shape without memory.

        Communication: each rank sends its parts to each receiver.
        """
        losses = self._losses
        if not losses.parts:
            return self._own_state()
        losses.sharding.setup_shards()
        return losses.sharding.whole_state(self._own_state(), receivers)

    def _own_state(self) -> dict[str, Any]:
        return self._losses.adoption.state_with_adopted(self._losses.module.state_dict())

    @with_losses
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state: for a file whole on rank 0, for a folder each rank's own, with the names of parameters."""
        losses = self._losses
        losses.sharding.setup_shards()
        if self._writes_folder:
            return shards.named_optimizer_state(self._parameters, unwrapped_optimizer(optimizer))
        state: dict[str, Any] = ParallelStrategy.optimizer_state(self, optimizer)
        if "state" not in state:  # consolidated on rank 0
            return state
        return losses.sharding.whole_optimizer_state(unwrapped_optimizer(optimizer), state)

    @with_losses
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a file or a folder, with the places of global samplers and the random states of all ranks."""
        losses = self._losses
        with checkpoint_files.saved_on_all_ranks(filepath, is_collective=losses.saves_together(filepath)):
            checkpoint = losses.with_run_states(checkpoint, filepath)
            losses.sharding.setup_shards()
            as_folder = self._writes_folder
            checkpoint = losses.sharding.completed(checkpoint, as_folder=as_folder)
            if as_folder:
                from lightning_ddp_losses.strategies import checkpoint_folder

                checkpoint_folder.write_folder(Path(filepath), checkpoint, losses.sharding.parameters)
                return
            if self.is_global_zero and is_folder(filepath):
                checkpoint_files.remove_folder(Path(filepath))
            ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    # ------------------------------------------------------------------ in

    @with_losses
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder, of any strategy and number of ranks; of a folder, tensors are read later.

        What one rank cannot read is an error on every rank.
        """
        as_folder = is_folder(checkpoint_path)

        def load() -> dict[str, Any]:
            if as_folder:
                from lightning_ddp_losses.strategies import checkpoint_folder

                return checkpoint_folder.read_rest(Path(checkpoint_path), weights_only=weights_only)
            return self._read_file(checkpoint_path, weights_only)

        file = Path(checkpoint_path) / METADATA if as_folder else checkpoint_path
        checkpoint = checkpoint_files.load_on_all_ranks(file, load, checks_bits=self.local_rank == 0)
        self._loaded_from = checkpoint_path
        return self._losses.loaded(checkpoint)

    def _read_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, path, weights_only=weights_only)

    @with_losses
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, of what is divided this rank's part, and no adopted losses if none are registered.

        Raises:
            InputError: on every rank, for a checkpoint of another module or of other classes.
        """
        losses, module = self._losses, self._losses.module
        state = losses.adoption.state_for(module, checkpoint["state_dict"])
        losses.sharding.setup_shards()
        losses.sharding.refuse_other_classes(checkpoint, state)
        if isinstance(self.precision_plugin, DoublePrecision):
            # Lightning converts the module after it was loaded, which would round saved values to float32
            self.precision_plugin.convert_module(module)
        if losses.is_fitting:
            saved_kinds = checkpoint.get(checkpoint_files.LOSS_KINDS)
            checkpoint_files.refuse_other_losses(self._loaded_from, saved_kinds, losses.kinds())
        with checkpoint_files.loaded_on_all_ranks(self._loaded_from, "parameters and buffers"):
            likes = {**module.state_dict(), **losses.sharding.parameters}
            if BLOCKS in checkpoint:
                from lightning_ddp_losses.strategies import checkpoint_folder

                found = {**checkpoint, "state_dict": state}
                state = checkpoint_folder.read_state(Path(self._loaded_from), found, likes)
            else:
                state = {name: shards.own_part(value, likes.get(name)) for name, value in state.items()}
            module.load_state_dict(state, strict=strict)

    @with_losses
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of optimizers, this rank's part of what belongs to divided parameters."""
        path, states = self._loaded_from, []
        with checkpoint_files.loaded_on_all_ranks(path, "states of optimizers"):
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
            for number, (optimizer, saved) in enumerate(pairs):
                if BLOCKS in checkpoint:
                    from lightning_ddp_losses.strategies import checkpoint_folder

                    parameters = self._parameters
                    own = checkpoint_folder.own_optimizer_state(Path(path), checkpoint, number, parameters, optimizer)
                else:
                    own = shards.own_optimizer_state(optimizer, saved)
                states.append(own)
            ParallelStrategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the module and of adopted losses, by name."""
        return self._losses.adoption.parameters_with_adopted(self._losses.module)


def whole_checkpoint(folder: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint in a folder that ranks wrote together, with whole tensors, on the CPU.

    ``ModelParallelLossStrategy`` writes such folders, and so does ``DDPLossStrategy(sharded_checkpoints=True)``. For one process, without
    any strategy, it becomes a file::

        from lightning_ddp_losses.strategies import whole_checkpoint

        torch.save(whole_checkpoint("logs/epoch=3.ckpt"), "epoch=3-whole.ckpt")
        module = MyModule.load_from_checkpoint("epoch=3-whole.ckpt")

    (Lightning's ``consolidate_checkpoint`` makes a file too, in which an optimizer's state has names, so that no optimizer takes it.)

    Equivalent to: ``torch.load`` of the file that the strategy would have written in place of a folder: ``state_dict`` with every parameter
    whole, divided classes too, and ``optimizer_states`` in which parameters have numbers.

    Args:
        folder: Path of the checkpoint; only one that you trust, as torch's own format is read with pickle.
        weights_only: Passed to ``torch.load``, for everything but tensors.

    Returns:
        The checkpoint. It takes the memory of all parameters and optimizer states.

    Raises:
        InputError: for a path that is no such folder.

    Communication: none; each process that calls reads the folder by itself.
    """
    from lightning_ddp_losses.strategies import checkpoint_folder

    path, got = Path(folder), "nothing there"
    if path.exists():
        got = "a file" if path.is_file() else "no file of that name in it"
    expect(
        is_folder(path),
        f"checkpoint {path}",
        expected=f"a folder with {METADATA}, as save_distributed_checkpoint=True writes it",
        got=got,
        fix="A file is read by torch.load.",
        error=InputError,
    )
    return checkpoint_folder.read_whole(path, weights_only=weights_only)
