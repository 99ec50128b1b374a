"""`ShardedDDP`: what a DDP strategy does about parameters of which each rank holds its own classes.

At set-up, after backward and in checkpoints; the strategy has one and asks it from its hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from lightning_ddp_losses.core.compat import unwrapped_optimizer
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.shard import Shardable, tags_kept
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.shard_files import (
    REST,
    ShardFiles,
    folder_of_blocks,
    is_sharded,
    refuse_other_sizes,
)
from lightning_ddp_losses.strategies.shard_records import RECORDS, ShardRecord, problems_of_wholes, read_records
from lightning_ddp_losses.strategies.sharded_parameters import ShardedParameters, excluding_shards, shard_losses

_LOADING = "loading a checkpoint"

ParametersOf = Callable[[nn.Module], Mapping[str, nn.Parameter]]
"""The parameters that checkpoints of a module hold, by name."""


class ShardedDDP:
    """Shards class weights over the ranks, and puts them together in checkpoints.

    Args:
        sharded_checkpoints: Write each rank's part by itself.
        parameters_of: Which parameters checkpoints hold.
    """

    def __init__(self, parameters_of: ParametersOf, *, sharded_checkpoints: bool) -> None:
        self._parameters_of, self._sharded_checkpoints = parameters_of, sharded_checkpoints
        self._loaded_from: Any = None
        self._records: dict[str, ShardRecord] = {}
        self._problems: list[str] = []
        self._shards: ShardedParameters | None = None
        self._files: ShardFiles | None = None

    # ------------------------------------------------------------------ set-up and steps

    def setup_shards(self, module: LightningModule) -> ShardFiles:
        """Shard the losses that can be sharded, once the ranks exist; once per fit."""
        if self._files is None:
            shard_losses(module)
            self._shards = ShardedParameters(module, self._parameters_of(module).items())
            self._files = ShardFiles(self._shards, sharded=self._sharded_checkpoints)
        return self._files

    @contextlib.contextmanager
    def moving(self, module: LightningModule) -> Iterator[None]:
        """Let the module be moved to another device inside the block; its shards stay shards."""
        with tags_kept(module):
            yield
        if self._shards:
            self._shards.find_again(self._parameters_of(module))

    def setup_new_shards(self, module: LightningModule, optimizers: Sequence[Optimizer], precision_plugin: Any) -> None:
        """Shard and install once more, after losses were registered in the middle of set-up."""
        self.remove()
        self.setup_shards(module)
        self.install(optimizers, precision_plugin)

    def install(self, optimizers: Sequence[Optimizer], precision_plugin: Any) -> None:
        """Let optimizers and gradient clipping treat shards as parts of a whole."""
        if self._shards:
            self._shards.attach(optimizers)
        if self._shards is not None and self._shards.has_parts():
            self._shards.install_clipping(precision_plugin)

    def refuse_equal_shards(self) -> None:
        """Refuse shards that something has broadcast since their last call. Communication: one handshake for each loss with shards."""
        if self._shards:
            self._shards.refuse_equal_shards()

    def share_overflow(self, precision_plugin: Any) -> None:
        """Let a gradient that overflowed on one rank count on all, where a scaler looks at it."""
        if self._shards and getattr(precision_plugin, "scaler", None) is not None:
            self._shards.share_overflow()

    def remove(self) -> None:
        """Take back what was installed."""
        if self._shards is not None:
            self._shards.remove()
        self._shards = self._files = None

    @staticmethod
    @contextlib.contextmanager
    def excluded(module: nn.Module) -> Iterator[None]:
        """Keep the shards out of a broadcast of the module's states."""
        with excluding_shards(module, ddp_setup.ignoring):
            yield

    @staticmethod
    def refuse_shards(module: nn.Module) -> None:
        """Refuse losses that shard themselves where the strategy is plain DDP.

        Raises:
            ConfigurationError: naming them.
        """
        found = [name for name, inner in module.named_modules() if isinstance(inner, Shardable)]
        if found:
            raise ConfigurationError(
                "losses=[]",
                expected="no loss whose classes are divided over the ranks",
                got=", ".join(found),
                fix="Plain DDP would broadcast one rank's rows to all; leave losses at 'auto'.",
            )

    @property
    def is_divided(self) -> bool:
        """Whether there are weights of which no rank holds all classes."""
        return bool(self._shards)

    # ------------------------------------------------------------------ checkpoints, out

    def module_state(self, module: LightningModule, state: dict[str, Any]) -> dict[str, Any]:
        """Return the module's state with the whole of what is sharded."""
        return self.setup_shards(module).module_state(state)

    def whole_state(self, module: LightningModule, state: dict[str, Any], receivers: Iterable[int]) -> dict[str, Any]:
        """Return the module's state with the whole of what is sharded on some ranks; no checkpoint is meant."""
        return self.setup_shards(module).whole_state(state, receivers)

    def optimizer_state(
        self, module: LightningModule, optimizer: Any, optimizers: Sequence[Optimizer], state: dict[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state, that of sharded weights as the whole."""
        if "state" not in state:
            return state
        inner = unwrapped_optimizer(optimizer)
        number = next(i for i, known in enumerate(optimizers) if known is inner)
        return self.setup_shards(module).optimizer_state(inner, number, state)

    def save(
        self,
        module: LightningModule,
        checkpoint: dict[str, Any],
        path: Any,
        write: Callable[[dict[str, Any], Any], None],
    ) -> None:
        """Write a file, or a folder of shards.

        Args:
            module: The LightningModule.
            checkpoint: As Lightning collected it.
            path: Of the file or folder.
            write: Writes a checkpoint to a file.
        """
        files = self.setup_shards(module)
        if not self._shards:
            write(checkpoint, path)
            return
        if self._sharded_checkpoints:
            files.make_folder(path)
        # two handshakes: all ranks find the folder made
        checkpoint = {**checkpoint, "state_dict": files.completed(checkpoint["state_dict"])}
        checkpoint[RECORDS] = files.records(checkpoint)
        if self._sharded_checkpoints:
            files.write(path, checkpoint, write)
        else:
            write(checkpoint, path)
        files.forget_saved()

    # ------------------------------------------------------------------ checkpoints, in

    def file_to_load(self, path: Any) -> Any:
        """Return the file that Lightning shall load, of a folder of shards the rest; the shards are read later."""
        self._loaded_from = path if is_sharded(path) else None
        return path if self._loaded_from is None else Path(path) / REST

    def compare_wholes(self, checkpoint: Mapping[str, Any]) -> None:
        """Compare a loaded checkpoint with its records of shards, before any hook changes it; ``own_module_state`` raises."""
        if self._loaded_from is not None:
            self._loaded_from = folder_of_blocks(self._loaded_from, checkpoint)
        self._records, self._problems = read_records(checkpoint)
        self._problems += problems_of_wholes(checkpoint, self._records)

    def own_module_state(self, module: LightningModule, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loaded state with this rank's part of what is sharded.

        Raises:
            InputError: on every rank, for a checkpoint of other sizes or one that is not as it was saved, before anything is loaded.

        Communication: one handshake.
        """
        try:
            files = self.setup_shards(module)
            refuse_other_sizes(module, state, self._records)
        except Exception as error:
            handshake.raise_on_all_ranks(error, _LOADING)
        own_state, problems = files.read(self._loaded_from, state, self._records)
        _raise_problems(self._problems + problems)
        return own_state

    def own_optimizer_states(
        self, module: LightningModule, optimizers: Iterable[Optimizer], states: Iterable[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return loaded optimizer states with this rank's part of what belongs to sharded weights.

        Raises:
            InputError: on every rank, for shards that are not as they were saved.

        Communication: one handshake.
        """
        files = self.setup_shards(module)
        own_states: list[dict[str, Any]] = []
        problems: list[str] = []
        for optimizer, state in zip(optimizers, states, strict=False):
            own_state, wrong = files.own_optimizer_state(optimizer, state, self._loaded_from, self._records)
            own_states.append(own_state)
            problems += wrong
        _raise_problems(problems)
        return own_states


def _raise_problems(problems: Sequence[str]) -> None:
    """Raise on every rank what any rank found wrong with a checkpoint; every rank comes here.

    Raises:
        InputError: naming tensors and classes, by rank.

    Communication: one handshake.
    """
    text = "; ".join(problems)
    of_ranks = [found.decode() for found in handshake.all_gather(_LOADING, {}, text.encode())]
    if any(of_ranks):
        raise InputError(
            "checkpoint: class shards",
            expected="each as it was saved",
            ranks=[found or "nothing wrong in what it read" for found in of_ranks],
            fix="The files are damaged, or of different checkpoints; load another one. (Who changed a tensor of a checkpoint on purpose "
            f"removes its entry from checkpoint['{RECORDS}'].)",
            collective=True,
        )
