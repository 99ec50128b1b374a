"""`ModelParallelLossStrategy`: FSDP2 for the model, next to exact learnable losses.

Lightning's ``ModelParallelStrategy`` runs the user's ``configure_model``. There ``fully_shard`` divides the encoder. What that leaves
whole, the losses above all, is ours: compared and broadcast at the start, reduced once per synchronising backward. What any strategy does
for losses is in ``loss_hooks`` and ``loss_parallelism``. Parts particular to FSDP2 are in ``fsdp_setup``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from operator import is_
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_ddp_losses.core.precision import parameters_of
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies import ddp_setup, fsdp_setup
from lightning_ddp_losses.strategies.fit_part import LossOptions
from lightning_ddp_losses.strategies.loss_discovery import find_losses
from lightning_ddp_losses.strategies.loss_hooks import LossHooks, with_losses
from lightning_ddp_losses.strategies.loss_parallelism import PARTS, LossParallelism


class ModelParallelLossStrategy(LossHooks, ModelParallelStrategy):
    """FSDP2 with the gradient of one process for every learnable loss next to the sharded model.

    The encoder is divided over all ranks, by the user's ``configure_model``::

        def configure_model(self):
            fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])

    Losses stay whole on every rank, with the mean of their gradients, or are divided by class (``ClassShardedLoss``). Any other parameter
    that is not divided is averaged as those of losses are. A mesh of two dimensions, replicas and parts (HSDP), of all ranks is right too:
    replicas start as the first ones. Parameters that are there before ``configure_model`` start as rank 0's, as under DDP. What is made
    inside it is made by each rank, and ought to be made from one seed.

    Equivalent to: one process on the rows of all ranks, as under ``DDPLossStrategy``, at the memory of FSDP2.

    Args:
        losses: See ``DDPLossStrategy``, as for all options down to ``uneven``. ``[]`` is plain ``ModelParallelStrategy``.
        adopt: See there.
        check_calls: See there. Ranks meet when backward reaches the first sharded module, before it gathers anything.
        loss_reduce_dtype: See there.
        global_batch: See there.
        accumulation: See there.
        use_global_sampler: See there.
        evaluation: See there.
        uneven: See there.
        data_parallel_size: Ranks over which the model is divided: all of them.
        tensor_parallel_size: 1. Tensor parallelism is not supported. (Lightning's own default is all devices of a node.)
        save_distributed_checkpoint: If True, a checkpoint is a folder into which each rank writes its part. Else it is one file.
        process_group_backend: Backend of torch.distributed. None: chosen by the device.
        timeout: Time-out of collectives.

    Attributes:
        divided_parameters: Names of parameters that are divided over the ranks.

    Gradient: as under ``DDPLossStrategy``: after backward every parameter holds the mean over ranks, a divided one its part of it. With
        ``accumulate_grad_batches`` nothing is reduced before the last micro-batch, and each rank keeps the whole gradient until then.

    Communication: per synchronising backward, in addition to FSDP2's own: one handshake (``check_calls``), one all-reduce for all small
        gradients of losses together (on the CPU few bytes travel in the handshake), one for each gradient over 1 MiB.

    Raises:
        ConfigurationError: on every rank, for a module that shards nothing or shards otherwise, a loss inside a sharded module, and a
            loss that shares a parameter with one. A torch older than 2.13 does not mark shared parameters: there it is also refused that
            ``configure_model`` makes the parameters of a loss.
        HiddenLossError, LossCallError, InputError, RankMismatchError: as ``DDPLossStrategy``.

    Example:
        >>> import lightning_ddp_losses
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="fsdp2_ddp_losses", accelerator="cpu", devices=2)
    """

    strategy_name = "fsdp2_ddp_losses"
    kinds_of_parts = (*PARTS, fsdp_setup.ShardedBackward)
    divides_model = True

    def __init__(
        self,
        losses: str | Sequence[str] = "auto",
        *,
        adopt: bool = False,
        check_calls: bool = True,
        loss_reduce_dtype: torch.dtype | str | None = None,
        global_batch: bool | str = False,
        accumulation: Literal["mean", "window"] = "mean",
        use_global_sampler: bool = False,
        evaluation: Literal["exact", "padded"] = "exact",
        uneven: Literal["error", "join", "stop"] = "error",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        options = LossOptions.from_arguments({**locals(), "sharded_checkpoints": save_distributed_checkpoint})
        if tensor_parallel_size not in ("auto", 1):
            raise ConfigurationError(
                "tensor_parallel_size",
                expected="1: losses see the rows of every rank, and ranks that divide a layer have the same rows",
                got=repr(tensor_parallel_size),
                fix="Leave it out; the model is divided over all ranks by fully_shard.",
            )
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._losses = LossParallelism(self, options)
        self._roots: list[FSDPModule] = []
        self._sharded: list[FSDPModule] = []  # they, and those inside them
        self.divided_parameters: frozenset[str] = frozenset()
        self._parts: list[Tensor] = []  # what the module held in a step when each rank held its parts alone

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description="FSDP2, with learnable losses beside it")

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Start the process group, and a mesh in which all ranks divide the model."""
        self.set_world_ranks()
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.world_size
        super().setup_environment()

    @with_losses
    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Let the ranks hold the same parameters before ``configure_model``, inside the block, divides them."""
        fsdp_setup.share_whole_parameters(self._losses.module)
        fsdp_setup.note_names_(self._losses.module)
        with super().model_sharded_context():
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Find the losses, let Lightning set up the sharded module, synchronise whole parameters."""
        self._losses.setup(trainer, super().setup, self._refuse, fsdp_setup.refuse_mixed_groups)

    def _refuse(self, module: nn.Module) -> None:
        fsdp_setup.refuse_other_parallelism(module)
        fsdp_setup.refuse_losses(module, find_losses(module, self._losses.options.losses))

    def model_to_device(self) -> None:
        """Undo the precision plugin's halving of the losses, move the module, and synchronise whole parameters."""
        super().model_to_device()
        module = self._losses.module
        self._roots = list(fsdp_setup.sharded_roots(module))
        # none of them is gathered now
        self.divided_parameters = frozenset(name for name, p in module.named_parameters() if isinstance(p, DTensor))
        self._sharded = fsdp_setup.sharded_modules(module)
        if not self._losses.parts:
            return
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._apply_layer_sync()
            self._losses.compare_ranks()
            # by name: between forward and backward fully_shard puts other objects there
            self._losses.start_reducing((), sorted(self.divided_parameters))
        fsdp_setup.broadcast_whole_tensors(module)

    def _apply_layer_sync(self) -> None:
        """Synchronise batch norm with the plugin that leaves modules in their place: fully_shard knows them."""
        if type(self._layer_sync) is TorchSyncBatchNorm:
            self._layer_sync = ddp_setup.exact_layer_sync()
        if self._layer_sync is not None:
            self._layer_sync.apply(self._losses.module)

    # ------------------------------------------------------------------ steps

    def _broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers before a synchronising step, as DDP does. Parameters are this rank's parts again."""
        self._reshard_what_is_gathered()
        if self.sync_gradients:
            ddp_setup.broadcast_buffers(self._losses.module, self._losses.found, {})

    def _reshard_what_is_gathered(self) -> None:
        """Let each rank hold its parts alone: ``fully_shard`` puts other objects in their place while they are gathered."""
        module = self._losses.module
        held = parameters_of(module)
        if len(held) != len(self._parts) or not all(map(is_, held, self._parts)):
            fsdp_setup.reshard(self._sharded)
            self._parts = parameters_of(module)

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether each forward waits for all ranks: those of sharded modules do."""
        return bool(self._roots)

    @with_losses
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Suspend reduction inside the block. Accumulated gradients are reduced at the next synchronising backward."""
        before = self._sync_blocked
        fsdp_setup.set_gradient_sync(self._roots, enabled=False)
        try:
            with super().block_backward_sync():
                yield
        finally:
            fsdp_setup.set_gradient_sync(self._roots, enabled=not before)

    def on_validation_end(self) -> None:
        """Leave no parameter gathered: a forward without a backward leaves those of the outermost sharded modules so."""
        super().on_validation_end()
        fsdp_setup.reshard(self._sharded)

    # ------------------------------------------------------------------ checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizers are restored at Lightning's usual place, as under DDP, and not while the checkpoint is read."""
        return bool(self._losses.parts) or super().lightning_restore_optimizer

    @with_losses
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with this rank's parts."""
        fsdp_setup.reshard(self._sharded)
        return super().lightning_module_state_dict()

    @with_losses
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder, that of rank 0."""
        return super().load_checkpoint(Path(self.broadcast(checkpoint_path)), weights_only=weights_only)

    def _read_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        # mapped, so that a rank reads only its parts
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return found

    @with_losses
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, of divided parameters this rank's part."""
        fsdp_setup.reshard(self._sharded)
        super().load_model_state_dict(checkpoint, strict=strict)

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        """Give the module back as it came, but for what fully_shard has divided."""
        if self._layer_sync is not None:
            self._layer_sync.revert(self._losses.module)
        fsdp_setup.reshard(self._sharded)
        super().teardown()
        self._roots, self._sharded, self._parts, self.divided_parameters = [], [], [], frozenset()
