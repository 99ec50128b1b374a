"""`ModelParallelLossStrategy`: FSDP2 for the model, next to exact learnable losses.

Lightning's ``ModelParallelStrategy`` runs the user's ``configure_model``, in which ``fully_shard`` converts each parameter of a module to a
``DTensor``, of which a rank stores a part. ``fully_shard`` gathers parameters around forward and backward, and scatters the mean of their
gradients. All other parameters (of losses, and of modules that the user has not sharded) remain whole on every rank, and this strategy
reduces their gradients.

| parameter | its gradient |
|---|---|
| ``DTensor`` over all ranks | FSDP2's reduce-scatter: the mean, of this rank's part |
| ``DTensor`` over some, on several replicas (HSDP) | the same, and FSDP2's all-reduce between the replicas |
| class shard (``ClassShardedLoss``) | for this rank's classes, and over all rows without a reduction |
| any other | the mean of ``LossReducer`` |

The part that all strategies share is in ``loss_hooks`` and ``loss_parallelism``.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.modules import ModuleContents, eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.fingerprint import fingerprints, hash_lines
from lightning_ddp_losses.distributed.shard import local_part, shard_of
from lightning_ddp_losses.errors import expect, listed
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.fit_part import FitPart, LossOptions
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, find_losses, named_tensors
from lightning_ddp_losses.strategies.loss_hooks import LossHooks, with_losses
from lightning_ddp_losses.strategies.loss_parallelism import PARTS, LossParallelism

_NAMES = "_ddp_losses_names"  # attribute of a parameter between the start of ``configure_model`` and the check after it


class _ShardedBackward(FitPart):
    """Exchanges the call check when backward reaches a sharded module, before anything is gathered and any gradient leaves."""

    def on_model_ready(self) -> None:
        """Register a hook on each sharded module, any of which backward may reach first, and prepare optimizers for mixed groups."""
        for number, optimizer in enumerate(self.fit.strategy.optimizers):
            _refuse_mixed_groups(self.fit.module, number, optimizer)
            if isinstance(optimizer, torch.optim.Optimizer):  # Lightning also accepts objects without `foreach`
                self._step_mixed_groups_singly(optimizer)
        # before fully_shard's own hook, which registers what gathers
        for inner in _sharded_modules(self.fit.module):
            hook = inner.register_forward_hook(self._watch, prepend=True)  # type: ignore[attr-defined]
            self.undo.callback(hook.remove)

    def _step_mixed_groups_singly(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer step the parameters of mixed groups one by one, because ``foreach``, the default on GPUs, cannot mix them."""
        groups: list[dict[str, Any]] = []

        def before(*_: Any) -> None:
            # loading a checkpoint replaces the groups
            groups[:] = [g for g in optimizer.param_groups if g.get("foreach", False) is None and _whole_among_parts(g)]
            for group in groups:
                group["foreach"] = False

        def after(*_: Any) -> None:
            for group in groups:
                group["foreach"] = None

        for hook in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
            self.undo.callback(hook.remove)

    @eager_recursive
    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        leaves = [output] if isinstance(output, Tensor) else torch_compat.tree_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.fit.exchange_calls())  # type: ignore[no-untyped-call]


class ModelParallelLossStrategy(LossHooks, ModelParallelStrategy):
    """FSDP2 with the gradient of one process for every learnable loss next to the sharded model.

    The encoder is divided over all ranks, by the user's ``configure_model``::

        def configure_model(self):
            fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])

    Losses remain whole on every rank, with the mean of their gradients, or are divided by class (``ClassShardedLoss``). Gradients of any
    other parameter that is not divided are averaged too. A mesh of all ranks with two dimensions, replicas and parts (HSDP), is also
    supported, and all replicas start with the values of the first one. Parameters that exist before ``configure_model`` start with rank 0's
    values, as under DDP. Parameters created inside it are created by each rank, and should be initialised from the same seed.

    Equivalent to: one process on the rows of all ranks, as under ``DDPLossStrategy``, with the memory of FSDP2.

    Args:
        losses: See ``DDPLossStrategy``, also for all options down to ``randomness``. ``[]`` is plain ``ModelParallelStrategy``.
        adopt: See ``DDPLossStrategy``.
        check_calls: See ``DDPLossStrategy``. The handshake is exchanged when backward reaches the first sharded module, before it gathers
            anything.
        loss_reduce_dtype: See ``DDPLossStrategy``.
        global_batch: See ``DDPLossStrategy``.
        accumulation: See ``DDPLossStrategy``.
        use_global_sampler: See ``DDPLossStrategy``.
        evaluation: See ``DDPLossStrategy``.
        uneven: See ``DDPLossStrategy``.
        randomness: See ``DDPLossStrategy``.
        data_parallel_size: Number of ranks over which the model is divided, which must be all ranks.
        tensor_parallel_size: Must be 1, because tensor parallelism is not supported. (Lightning's default is all devices of a node.)
        save_distributed_checkpoint: If True, a checkpoint is a folder into which each rank writes its part. Otherwise it is one file.
        process_group_backend: Backend of torch.distributed. If None, it is chosen by the device.
        timeout: Timeout of collectives.

    Attributes:
        divided_parameters: Names of parameters that are divided over the ranks.

    Gradient: as under ``DDPLossStrategy``, after backward the gradient of every parameter is the mean over ranks, or this rank's part of it
        for a divided parameter. With ``accumulate_grad_batches`` nothing is reduced before the last micro-batch, and each rank stores the
        whole gradient until then.

    Communication: per synchronising backward, in addition to FSDP2: one handshake (``check_calls``), one all-reduce for all small gradients
        of losses together (on the CPU a few bytes are sent in the handshake), one for each gradient over 1 MiB.

    Raises:
        ConfigurationError: on every rank, for a module that is not sharded or is sharded in another way, a loss inside a sharded module,
            and a loss that shares a parameter with a sharded module. Versions of torch before 2.13 do not mark shared parameters. With
            these, creating the parameters of a loss in ``configure_model`` is also rejected.
        HiddenLossError, LossCallError, InputError, RankMismatchError: same as in ``DDPLossStrategy``.

    Example:
        >>> import lightning_ddp_losses
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="fsdp2_ddp_losses", accelerator="cpu", devices=2)
    """

    strategy_name = "fsdp2_ddp_losses"
    kinds_of_parts = (*PARTS, _ShardedBackward)
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
        randomness: Literal["rank", "global", "by_row"] = "rank",
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        options = LossOptions.from_arguments({**locals(), "sharded_checkpoints": save_distributed_checkpoint})
        expect(
            tensor_parallel_size in ("auto", 1),
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
        self._sharded: list[FSDPModule] = []  # cached, because each step uses them and the search is slow
        self._parts = ModuleContents(nn.Module())  # contents of the module when no parameter was gathered

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name."""
        strategy_registry.register(cls.strategy_name, cls, "FSDP2, with learnable losses next to it", override=True)

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        """Choose Lightning's launcher, which restarts the program."""
        super()._configure_launcher()
        ddp_setup.refuse_notebook(self._launcher, self.strategy_name)

    def setup_environment(self) -> None:
        """Start the process group, and a mesh in which all ranks divide the model."""
        self.set_world_ranks()
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.world_size
        super().setup_environment()

    @with_losses
    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Make parameters equal on all ranks before ``configure_model``, which runs inside the block, divides them."""
        _share_whole_parameters(self._losses.module)
        _note_names_(self._losses.module)
        with super().model_sharded_context():
            yield

    def refuse_module(self, module: nn.Module) -> None:
        """Reject a module that ``fully_shard`` has not divided over all ranks, and losses that it has divided."""
        _refuse_other_parallelism(module)
        _refuse_losses(module, find_losses(module, self._losses.options.losses))

    def model_to_device(self) -> None:
        """Undo the precision plugin's halving of the losses, move the module, and synchronise whole parameters."""
        super().model_to_device()
        module = self._losses.module
        # no parameter is gathered at this time
        self.divided_parameters = frozenset(name for name, p in module.named_parameters() if isinstance(p, DTensor))
        self._sharded = _sharded_modules(module)
        self._parts = ModuleContents(module)
        if not self._losses.parts:
            return
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._apply_layer_sync()
            self._losses.compare_ranks()
            # parameters are identified by name, because fully_shard replaces the objects between forward and backward
            self._losses.start_reducing((), self.divided_parameters)
        _broadcast_whole_tensors(module)

    def _apply_layer_sync(self) -> None:
        """Synchronise batch norm with a plugin that does not replace modules, which fully_shard references."""
        if type(self._layer_sync) is TorchSyncBatchNorm:
            self._layer_sync = ddp_setup.exact_layer_sync()
        if self._layer_sync is not None:
            self._layer_sync.apply(self._losses.module)

    # ------------------------------------------------------------------ steps

    def broadcast_buffers(self) -> None:
        """Broadcast rank 0's buffers before a synchronising step, like DDP, and free gathered parameters."""
        module = self._losses.module
        # fully_shard replaces the parts with other objects while they are gathered
        if self._parts.refresh():
            self._reshard()
            self._parts.refresh()
        if self.sync_gradients:
            ddp_setup.broadcast_buffers(module, self._losses.found, {})

    def _reshard(self) -> None:
        """Free gathered parameters, which a forward without a backward may have left."""
        for module in self._sharded:
            module.reshard()

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether each forward waits for all ranks, as forwards of sharded modules do."""
        return bool(self._sharded)

    @with_losses
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Suspend reduction inside the block. Accumulated gradients are reduced at the next synchronising backward."""
        before = self._sync_blocked
        self._set_gradient_sync(enabled=False)
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._set_gradient_sync(enabled=not before)

    def _set_gradient_sync(self, *, enabled: bool) -> None:
        """Set whether FSDP2 reduces gradients in backward, or accumulates whole gradients on each rank."""
        for module in self._sharded:
            module.set_requires_gradient_sync(enabled, recurse=False)

    def on_validation_end(self) -> None:
        """Free the parameters of the outermost sharded modules, which remain gathered after a forward without a backward."""
        super().on_validation_end()
        self._reshard()

    # ------------------------------------------------------------------ checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizers are restored at Lightning's usual place, as under DDP, and not while the checkpoint is read."""
        return bool(self._losses.parts) or super().lightning_restore_optimizer

    def _own_state(self) -> dict[str, Any]:
        self._reshard()
        return super()._own_state()

    @with_losses
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder from the path given on rank 0."""
        return super().load_checkpoint(Path(self.broadcast(checkpoint_path)), weights_only=weights_only)

    def _read_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        # mapped, so that a rank reads only its parts
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return found

    @with_losses
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, and only this rank's part of divided parameters."""
        self._reshard()
        super().load_model_state_dict(checkpoint, strict=strict)

    # ------------------------------------------------------------------ end

    def teardown(self) -> None:
        """Restore the module, except for parameters that fully_shard has divided."""
        if self._layer_sync is not None:
            self._layer_sync.revert(self._losses.module)
        self._reshard()
        super().teardown()
        self._sharded, self.divided_parameters = [], frozenset()
        self._parts = ModuleContents(nn.Module())


def _sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all modules with ``fully_shard``."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


# ---------------------------------------------------------------------- refusals


def _refuse_other_parallelism(module: nn.Module) -> None:
    """Reject a module without divided parameters, or with parameters that are not divided over all ranks.

    Raises:
        ConfigurationError: naming parameters.
    """
    found = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    expect(
        found,
        "ModelParallelLossStrategy",
        expected="a module whose configure_model shards something",
        got="no parameter that fully_shard has divided",
        fix='Write fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"]) in configure_model, or take "ddp_losses".',
    )
    inside = {id(p) for inner in _sharded_modules(module) for p in inner.parameters()}  # type: ignore[attr-defined]
    wrong = {name: p for name, p in found.items() if id(p) not in inside or not _is_over_all_ranks(p)}
    expect(
        not wrong,
        "parameters of the model",
        expected=f"each divided by fully_shard over all {process_groups.world_size()} ranks",
        got=listed([f"{name} ({_placement(p)})" for name, p in wrong.items()]),
        fix='Write fully_shard(module, mesh=self.device_mesh["data_parallel"]). Of other meshes, replicas x parts '
        "of all ranks are supported; tensor parallelism is not.",
    )

    # parameters with replicas must be on one mesh, so that all parts of a rank are replicated on the same ranks
    meshes = {name: p.device_mesh for name, p in found.items() if replicated_dim(p) is not None}
    texts = [f"{name} over {mesh.mesh.tolist()}" for name, mesh in meshes.items()]
    expect(
        len(set(meshes.values())) <= 1,
        "parameters of the model with replicas",
        expected="all on one mesh",
        got=listed(texts),
        fix="Make the mesh of replicas and parts once, in configure_model, and give it to each fully_shard.",
    )


def _note_names_(module: nn.Module) -> None:
    """Store on each parameter its names before ``configure_model``, for ``_refuse_losses``."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, found in names.items():
        setattr(parameter, _NAMES, found)


def _refuse_losses(module: nn.Module, losses: Iterable[FoundLoss]) -> None:
    """Reject losses that ``fully_shard`` has divided, and losses that share a parameter with a divided module.

    Raises:
        ConfigurationError: naming losses and parameters.
    """
    for loss in losses:
        divided = [name for name, p in loss.module.named_parameters() if isinstance(p, DTensor)]
        expect(
            not divided,
            loss.title,
            expected="beside the modules that fully_shard divides: its own parameters are averaged, or divided by class",
            got=f"{listed(divided)} inside one of them",
            fix="Make the loss an attribute of the LightningModule, and shard the encoder alone; a weight that is too large for one "
            "rank goes into ClassShardedLoss.",
        )
        unknown = [name for name, p in loss.module.named_parameters() if not hasattr(p, _NAMES)]
        expect(
            not unknown or torch_compat.marks_sharded(),
            f"parameters of {loss.title}",
            expected="made before configure_model: this torch does not show which of them fully_shard divides elsewhere",
            got=f"{listed(unknown)} made inside it",
            fix="Make the loss in __init__, or install torch 2.13.",
        )
    # fully_shard replaces a module's parameter, which is then no longer shared
    tensors = dict(module.named_parameters(remove_duplicate=False))
    torn = []
    for name, parameter in tensors.items():
        names_before = vars(parameter).pop(_NAMES, ())
        is_divided = any(isinstance(tensors.get(other), DTensor) for other in names_before)
        if not isinstance(parameter, DTensor) and (is_divided or torch_compat.was_sharded(parameter)):
            torn.append(name)
    expect(
        not torn,
        f"parameters {listed(torn)}",
        expected="of their own: fully_shard divides a parameter where it is, and what shared it keeps the whole",
        got="shared with a module that fully_shard has divided",
        fix="Give the loss a parameter of its own, or leave the shared module out of fully_shard.",
    )


def _whole_among_parts(group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters of an optimizer's group that are whole, if others are divided."""
    whole = [p for p in group["params"] if not isinstance(p, DTensor)]
    return whole if len(whole) < len(group["params"]) else []


def _refuse_mixed_groups(module: nn.Module, number: int, optimizer: torch.optim.Optimizer) -> None:
    """Reject a parameter group that steps divided and whole parameters in one call, which torch does not support.

    Raises:
        ConfigurationError: naming parameters.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        whole = _whole_among_parts(group)
        expect(
            not whole or not (group.get("foreach") or group.get("fused")),
            f"parameter group of optimizer {number} with foreach or fused",
            expected="only parameters that fully_shard divides, or none of them",
            got=f"{listed([names.get(id(p), 'a parameter') for p in whole])} among such",
            fix='Give them a group of their own: [{"params": encoder}, {"params": the others}].',
        )


def _is_over_all_ranks(parameter: DTensor) -> bool:
    """Return whether gradients are averaged over all ranks: one dimension of the mesh is divided, any others are replicated."""
    shards = sum(placement.is_shard() for placement in parameter.placements)
    replicas = sum(placement.is_replicate() for placement in parameter.placements)
    covers = parameter.device_mesh.size() == process_groups.world_size()
    return covers and shards == 1 and shards + replicas == len(parameter.placements)


def replicated_dim(parameter: Tensor) -> int | None:
    """Return the dimension of the mesh along which a divided parameter is replicated, or None if each part is on one rank."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    dims = [
        dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate() and mesh.size(dim) > 1
    ]
    return dims[0] if dims else None


def _placement(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    return f"{', '.join(map(str, parameter.placements))} over {' x '.join(map(str, mesh.shape))} ranks"


# ---------------------------------------------------------------------- what starts equal


def _share_whole_parameters(module: nn.Module) -> None:
    """Broadcast rank 0's values of parameters that ``fully_shard`` will divide, if they differ.

    Otherwise each rank would keep its part of its own values. If weights were loaded only on rank 0 or drawn with different seeds, the
    parts would not form a consistent model. (DDP's first broadcast does the same for its module.)

    Communication: one handshake. One broadcast per 64 MiB of parameters that differ.
    """
    names, whole = [], []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta or is_lazy(parameter) or shard_of(parameter) is not None:
            continue
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
        whole.append(parameter)
    # 1. exchange a hash of the names, followed by hashes of the values
    own = array("q", [hash_lines(names), *fingerprints(whole)]).tobytes()
    tables = [array("q", sent) for sent in handshake.all_gather_between_steps("parameters to be divided", {}, own)]
    if len({table[0] for table in tables}) > 1:
        return  # the names of all tensors are compared later
    # 2. broadcast rank 0's values of parameters that differ
    columns = list(zip(*tables, strict=True))[1:]
    differ = [p for p, column in zip(whole, columns, strict=True) if len(set(column)) > 1]
    raw_collectives.broadcast_(differ)


def _broadcast_whole_tensors(module: nn.Module) -> None:
    """Broadcast rank 0's values of whole parameters and buffers, but not of parts of the model or class shards.

    If parts have replicas (HSDP), the values of the first replica are broadcast to the others.

    Communication: one broadcast per 64 MiB of whole parameters, and one for each part that has replicas.
    """
    whole = [t for _, t in named_tensors(module) if not isinstance(t, DTensor) and shard_of(t) is None]
    raw_collectives.broadcast_(whole)
    for parameter in module.parameters():
        dim = replicated_dim(parameter)
        if dim is not None:
            assert isinstance(parameter, DTensor)
            replicas = parameter.device_mesh.get_group(dim)
            raw_collectives.broadcast_between_replicas_(local_part(parameter.detach()), replicas)
