"""`FabricDDPLossStrategy`: support for learnable losses as in ``DDPLossStrategy``, in a hand-written loop of Lightning Fabric.

The parts of the Trainer's strategy are reused: the reduction of the losses' gradients and the call check in each
``fabric.backward``, full precision around each loss, and class weights that are divided over the ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_ddp_losses.core.precision import without_autocast
from lightning_ddp_losses.distributed import liveness, process_groups
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import expect
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, find_losses, is_loss, named_tensors
from lightning_ddp_losses.strategies.loss_forward import CallCheck, LossForwardPatch
from lightning_ddp_losses.strategies.loss_parallelism import Advice, compare_names, prepare_losses_
from lightning_ddp_losses.strategies.loss_reducer import LossReducer, ReducedParameters
from lightning_ddp_losses.strategies.shards import Shards, map_optimizer_state, own_part


class FabricDDPLossStrategy(DDPStrategy):
    """DDP for Fabric that also reduces every learnable loss: ``Fabric(strategy="ddp_losses")``.

    A loss may be inside the module that is passed to ``fabric.setup``, or be set up separately (``fabric.setup_module(loss)``). In both
    cases attributes, parameter names and checkpoint keys are the same as for the plain module.

    * ``fabric.backward`` reduces the losses' gradients, unless ``fabric.no_backward_sync`` blocks this for any module. Accumulated
      gradients are reduced in the next backward that synchronises.
    * ``fabric.clip_gradients(max_norm=...)`` uses the norm over the classes of all ranks.
    * ``fabric.save`` writes whole weights and ``fabric.load`` keeps this rank's classes, so a checkpoint can be moved between one process
      and any number of ranks. Collective: call both on all ranks.
    * ``accumulation_window`` and ``fabric.all_gather`` work as without this strategy.

    Options of ``DDPLossStrategy`` that concern loaders, evaluation and the Trainer's checkpoints are not available, and the hooks of
    ``DDPChecks`` are not run. Half-precision weights (``precision="bf16-true"``) stay in half precision, including the weights of losses.

    Args:
        **ddp_kwargs: Arguments of ``lightning.fabric.strategies.DDPStrategy``.

    Raises:
        ConfigurationError: for unknown options, and for a norm other than the 2-norm over divided classes.
        LossCallError: on every rank, for a loss that ran on some ranks only.
        RankMismatchError: on every rank, for modules whose names, shapes or dtypes differ between ranks.

    Example:
        >>> from lightning.fabric import Fabric
        >>> import lightning_ddp_losses
        >>> fabric = Fabric(strategy="ddp_losses", accelerator="cpu", devices=2)
    """

    def __init__(self, **ddp_kwargs: Any) -> None:
        super().__init__(**ddp_kwargs)
        ddp_setup.refuse_unknown_options(type(self), self._ddp_kwargs)
        self._blocked = self._backward_sync_control = _BlockedSync()  # type: ignore[assignment]  # their class is private
        # all modules that were set up, under internal names
        self._root = pl.LightningModule()
        self._reduced: list[nn.Parameter] = []  # reduced by the modules' DDPs
        self._ignored: set[str] = set()  # names that the user excluded from DDP
        self._first_bucket = math.inf  # bytes of gradient that must be ready before a DDP sends any
        self._patches: list[LossForwardPatch] = []
        self._reducer: LossReducer | None = None
        self._call_check: CallCheck | None = None
        self._backwards = 0
        self._advice = Advice()
        # the part of a fit that handles divided classes
        self._fit = SimpleNamespace(optimizers=[], precision_plugin=None)
        fit = SimpleNamespace(module=self._root, strategy=self._fit)
        self._sharding = Shards(cast("Any", fit), lambda root: dict(root.named_parameters()))

    def setup_environment(self) -> None:
        """Start the world, and apply its timeout to the groups of this package."""
        super().setup_environment()
        process_groups.set_timeout(self._timeout)
        self._fit.precision_plugin = self.precision

    # ------------------------------------------------------------------ set-up

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # without parameters for DDP there is no wrapper
        """Wrap a module in a DDP without the losses' parameters. A loss is not wrapped. Collective: call it on all ranks.

        Communication: one handshake for the names, one if classes are divided, a broadcast of the losses' states.
        """
        path = f"module_{len([*self._root.children()])}"
        self._root.add_module(path, module)
        compare_names(module, {})
        # 1. divide classes before anything is broadcast
        self._sharding.setup_new_shards()
        prepare_losses_(self._root)
        # 2. DDP for everything but losses
        ddp_setup.refuse_sharded_parameters(module)
        wrapped: nn.Module = module
        if is_loss(module):
            learnable = any(True for _ in module.parameters())
            found = [FoundLoss(path, module, learnable, learnable)]
            plan = ddp_setup.WrapPlan([], set(), set(), [t for _, t in named_tensors(module) if shard_of(t) is None])
        else:
            inside = find_losses(module)
            found = [replace(loss, name=f"{path}.{loss.name}") for loss in inside]
            plan = ddp_setup.plan(module, inside)
            if plan.reduced:
                with ddp_setup.ignoring(module, plan.ignored):
                    wrapped = super().setup_module(module)
        ddp_setup.broadcast_unsynchronised(plan.unsynchronised, self._ddp_kwargs)
        # 3. the losses' gradients
        for loss in found:
            patch = LossForwardPatch(loss, refuse_nan=getattr(self.precision, "scaler", None) is None)
            patch.install()
            patch.counting = True
            self._patches.append(patch)
        self._reduced += plan.reduced
        self._ignored |= {f"{path}.{name}" for name in plan.ignored_by_user}
        if plan.reduced:
            self._first_bucket = min(self._first_bucket, ddp_setup.first_bucket(plan.reduced, self._ddp_kwargs))
        # 4. parameters that none of the DDPs set up so far reduces
        parameters = ReducedParameters(self._root, self._reduced, self._ignored, first_bucket=self._first_bucket)
        self._reducer = LossReducer(parameters)
        parameters.watch([patch.loss.name for patch in self._patches])
        if self._call_check is not None:
            self._call_check.remove()
        self._call_check = CallCheck(self._reducer, self._patches)
        return wrapped

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make an optimizer step divided classes. An optimizer that computes with whole weights is rejected."""
        self._fit.optimizers.append(optimizer)
        self._sharding.undo.close()
        self._sharding.install()
        return super().setup_optimizer(optimizer)

    # ------------------------------------------------------------------ steps

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run Fabric's backward, then average the losses' gradients over ranks.

        Raises:
            LossCallError: on every rank, for a loss that ran, or that received a gradient, on some ranks only.

        Communication: in addition to DDP's, one handshake, one all-reduce for small gradients, one for each over 1 MiB.
        """
        check, reducer = self._call_check, self._reducer
        # keep the precision of losses that computed in a wider dtype
        with without_autocast(("cpu", self.root_device.type)):
            if check is None or reducer is None or self._blocked.is_blocked:
                super().backward(tensor, module, *args, **kwargs)
                return
            check.start(self._backwards)
            self._backwards += 1
            try:
                super().backward(tensor, module, *args, **kwargs)
                calls = check.finish()
                assert calls is not None
                reducer.reduce(calls.parameters, calls.expected)
            except RuntimeError as error:
                liveness.raise_lost_peer(error, "backward")
                raise
        self._advice.uneven_rows(calls.uneven)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over an optimizer's parameters, including the classes of all ranks. Communication: if divided, one sum."""
        parameters = list(self.precision.main_params(optimizer))
        if all(shard_of(parameter) is None for parameter in parameters):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        what = "clip_gradients(norm_type=...) over classes that are divided over the ranks"
        expect(norm_type == 2, what, expected=2.0, got=norm_type, fix="Leave norm_type at 2.0.")
        self.precision.unscale_gradients(optimizer)
        norm = self._sharding.clip_(parameters, float(max_norm))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of the gradients is {norm.item()}. Pass error_if_nonfinite=False to go on."
            )
        return norm

    # ------------------------------------------------------------------ checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the state of the plain module, with whole weights on rank 0. Collective: call it on all ranks."""
        if isinstance(module, DistributedDataParallel):
            module = module.module
        state = module.state_dict()
        # also covers a module around those that were set up
        places = {name: self._sharding.of(parameter) for name, parameter in module.named_parameters()}
        divided = {name: place for name, place in places.items() if place is not None}
        whole = self._sharding.whole_state({place: state[name] for name, place in divided.items()})
        return state | {name: whole[place] for name, place in divided.items()}

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, with whole divided classes on rank 0. Collective: call it on all ranks."""
        return self._sharding.whole_optimizer_state(optimizer, super().get_optimizer_state(optimizer))

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint into modules and optimizers, which keep this rank's classes."""
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        own = {name: _OwnPart(value) if isinstance(value, Optimizer) else value for name, value in state.items()}
        rest = super().load_checkpoint(path, own, *args, **kwargs)
        state.update({name: value for name, value in own.items() if not isinstance(value, _OwnPart)})
        return rest


class _OwnPart:
    """Represents an optimizer that loads this rank's part of a saved state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(map_optimizer_state(self._optimizer, state, own_part))


class _BlockedSync:
    """Blocks the reduction in backward for one module's DDP, and for all losses.

    Attributes:
        is_blocked: True while a block is open.
    """

    def __init__(self) -> None:
        self.is_blocked = False

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Skip the reduction inside the block, if enabled."""
        if not enabled:
            yield
            return
        before, self.is_blocked = self.is_blocked, True
        try:
            with module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext():
                yield
        finally:
            self.is_blocked = before
