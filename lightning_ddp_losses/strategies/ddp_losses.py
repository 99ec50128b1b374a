"""`DDPLossStrategy`: distributed data parallelism for learnable losses, beside the model's own DDP.

The model's DDP ignores the losses' parameters; `LossReducer` does for them what DDP does, at one place and by name. The
module that the user sees keeps its attributes, parameter names and checkpoint keys.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core.precision import PrecisionKeeper
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives, upstream_grad
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies import adoption, ddp_setup
from lightning_ddp_losses.strategies.adopting import AdoptingStrategy
from lightning_ddp_losses.strategies.advice import Advice
from lightning_ddp_losses.strategies.ddp_setup import refuse_other_batches, warn_of_reshuffle
from lightning_ddp_losses.strategies.global_batch_option import globalised
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, find_losses, is_loss
from lightning_ddp_losses.strategies.loss_forward import LossForwardPatch, UnregisteredLossPatch
from lightning_ddp_losses.strategies.loss_reducer import LossReducer


class DDPLossStrategy(AdoptingStrategy):
    """DDP in which every learnable loss gets the mean of its gradients, whatever each rank called and in which order.

    Equivalent to: ``Trainer(strategy="ddp")`` on a module whose losses are all called once on every rank, but right also
    where that is not so: losses that alternate, that are called several times or in another order per rank, parameters
    that are created, replaced or unfrozen later, a frozen encoder, half precision.

    Args:
        losses: ``"auto"`` finds them by type (pytorch-metric-learning, torch.nn, metrics with trainable parameters,
            ``register_loss_type``). A list names modules; another string is a regular expression over whole paths. ``[]``
            is plain ``ddp``.
        adopt: Register an unregistered loss that an optimizer holds (``_adopted_losses.<path>``) instead of refusing it.
        check_calls: Open one frame before each synchronising backward: ranks that called different losses get the same
            error there. Without it they may hang, and only gradients missing after backward are noticed.
        loss_reduce_dtype: dtype of the losses' gradients on the wire (``torch.bfloat16`` or its name). None: their own,
            and at least float32 where small gradients share a buffer.
        global_batch: ``"auto"`` evaluates the PML losses it finds over the rows of all ranks, as ``GlobalBatchLoss`` does, without
            a change to the module.
        sharded_checkpoints: Save the classes of a ``ClassShardedLoss`` as each rank holds them (a folder, written with
            ``torch.distributed.checkpoint``) instead of the whole weight.
        **ddp_kwargs: What ``lightning.pytorch.strategies.DDPStrategy`` takes.

    Gradient: after backward every parameter holds the mean over ranks, once per synchronising backward.

    Communication: per synchronising backward, beside the model's DDP: one frame (``check_calls``), one all-reduce for
        all small gradients of losses together, one for each gradient over 1 MiB. None in validation, test, predict.

    Raises:
        ConfigurationError: options or names that cannot work.
        HiddenLossError: on every rank, for a trainable loss that is not registered.
        LossCallError: on every rank, for a loss that ran on some ranks only.
        InputError: on every rank, for inputs that a loss on any rank cannot take.
        RankMismatchError: on every rank, before anything is reduced, for a global loss or metric that ranks weigh differently (on an
            accelerator, or beside ``SyncBatchNorm``: at the next call).

    Example:
        >>> import lightning_ddp_losses
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="ddp_losses", accelerator="cpu", devices=2)
    """

    strategy_name = "ddp_losses"

    def __init__(
        self,
        losses: str | Sequence[str] = "auto",
        adopt: bool = False,
        check_calls: bool = True,
        loss_reduce_dtype: torch.dtype | str | None = None,
        global_batch: bool | str = False,
        sharded_checkpoints: bool = False,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(adopt=adopt, sharded_checkpoints=sharded_checkpoints, **ddp_kwargs)
        self._ddp_kwargs = ddp_setup.without_defaults(self._ddp_kwargs)
        if not isinstance(losses, str) and not (
            isinstance(losses, Sequence) and all(isinstance(name, str) for name in losses)
        ):
            raise ConfigurationError(
                "losses", expected="'auto', a list of names, or a regular expression", got=repr(losses)
            )
        self._selection = losses if isinstance(losses, str) else list(losses)
        self._check_calls = check_calls
        self._reduce_dtype = ddp_setup.as_dtype(loss_reduce_dtype)
        if global_batch not in (False, "auto"):
            raise ConfigurationError("global_batch", expected="False or 'auto'", got=repr(global_batch))
        self._global_batch = global_batch
        self._reset()

    def _reset(self) -> None:
        self._losses: list[FoundLoss] = []
        self._guards: list[LossForwardPatch] = []
        self._sentinels: list[UnregisteredLossPatch] = []
        self._reducer: LossReducer | None = None
        self._precision = PrecisionKeeper()
        self._blocked = False
        self._in_training_step = False
        self.closure_loss: Tensor | None = None  # while its backward runs: what a rider may look at
        self._advice = Advice()

    # ------------------------------------------------------------------ options

    @property
    def _plain(self) -> bool:
        return self._selection == []

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register a twin of every name under which Lightning registers ``ddp``."""
        for name, entry in list(strategy_registry.items()):
            if entry["strategy"] is DDPStrategy:
                twin = name.replace("ddp", cls.strategy_name, 1)
                if twin not in strategy_registry:
                    description = f"{entry['description']}, with learnable losses beside it"
                    strategy_registry.register(twin, cls, description=description, **entry["init_params"])

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Start the process group; ours follow its time-out."""
        external = process_groups.is_distributed()
        super().setup_environment()
        process_groups.set_timeout(self._timeout)
        if not external:
            atexit.register(process_groups.close, world=True)

    def setup(self, trainer: pl.Trainer) -> None:
        """Find the losses, wrap the rest of the module, synchronise both."""
        self._layer_sync = ddp_setup.choose_layer_sync(self.root_device, self._layer_sync)
        if self._plain:
            super().setup(trainer)
            return
        with self._together("setup"):
            module = self._module
            self._losses = find_losses(module, self._selection)
            self.meet_shards()  # before their values are remembered
            for part in module.modules():
                if isinstance(part, process_groups.WithProcessGroup):
                    part.create_internal_groups()  # a rank may fail before it has ever used it
            self._precision.remember([loss.module for loss in self._losses])
            super().setup(trainer)
            refuse_nan = getattr(self.precision_plugin, "scaler", None) is None
            fitting = trainer.state.fn == TrainerFn.FITTING
            if fitting:
                self._meet_hidden(trainer)
            self._guards = [
                LossForwardPatch(
                    loss, refuse_nan=refuse_nan, whole=globalised(loss, module) if self._global_batch else None
                )
                for loss in self._losses
            ]
            for patch in (*self._guards, *self._sentinels):
                patch.install()
            if fitting:
                assert self._reducer is not None
                self._reducer.watch(self._guards)
                for guard in self._guards:
                    guard.on_return = self._reducer.returned

    def model_to_device(self) -> None:
        """Undo what the precision plugin halved in the losses, then move the module."""
        self._precision.restore()
        super().model_to_device()

    def configure_ddp(self) -> None:
        """Compare names, wrap the model without the losses' parameters, broadcast those."""
        if self._plain:
            super().configure_ddp()
            return
        module = self._module
        ddp_setup.compare_names(module)
        plan = ddp_setup.plan(module, self._losses)
        if plan.reduced:  # else DDP would refuse the module
            with ddp_setup.ignoring(module, plan.ignored):
                super().configure_ddp()
        if self._ddp_kwargs.get("init_sync", True):
            buffers = self._ddp_kwargs.get("broadcast_buffers", True) is not False
            raw_collectives.broadcast_([t for t in plan.unsynchronised if buffers or isinstance(t, nn.Parameter)])
        first_bucket = ddp_setup.first_bucket(plan.reduced, self._ddp_kwargs)
        self._reducer = LossReducer(module, plan.reduced, sorted(plan.theirs), self._reduce_dtype, first_bucket)
        for loss in self._losses:
            if loss.learnable and not loss.owned:
                rank_zero_info(f"{loss.title} shares a parameter with the model and stays in the model's DDP.")

    def _meet_hidden(self, trainer: pl.Trainer) -> None:
        hidden = adoption.find(trainer, self._module, self.optimizers, adopt=self._adopt)
        self._sentinels = [
            UnregisteredLossPatch(module, path, lambda: self._in_training_step)
            for path, module in hidden.idle.items()
            if is_loss(module)
        ]
        if hidden.optimised:
            self._adopted = adoption.adopt(self._module, hidden, self.precision_plugin, self.root_device, self._ddp)
            self._losses += adoption.as_losses(self._adopted)
            self.meet_new_shards()

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Say when Lightning destroys a sampler's structure, and refuse a loader that a global sampler cannot serve."""
        if not self._plain and self._module._trainer is not None:
            injecting = self._module._trainer._accelerator_connector.use_distributed_sampler
            warn_of_reshuffle(dataloader, injecting=injecting)
            refuse_other_batches(dataloader)
        return super().process_dataloader(dataloader)

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's training step; what fails on one rank ends all of them at the peers' next frame."""
        if self._reducer is None:
            return super().training_step(*args, **kwargs)
        upstream_grad.expect_no_earlier()
        self._count(True)
        try:
            with self._together("training_step"):
                if self._ddp is None and self.sync_gradients:  # what DDP's forward does
                    ddp_setup.broadcast_buffers(self._module, self._losses, self._ddp_kwargs)
                return super().training_step(*args, **kwargs)
        finally:
            self._count(False)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Send the frame that meets the peers before a synchronising backward; the first gradient waits for theirs."""
        self.closure_loss = closure_loss
        if self._reducer is not None and self._check_calls and self.sync_gradients:
            self._reducer.open(self._module.global_step)
            if ddp_setup.syncs_in_backward(self._layer_sync):  # earlier than the first gradient
                self._reducer.agree()
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Reduce the losses' gradients."""
        super().post_backward(closure_loss)
        self.closure_loss = None
        if self._reducer is not None and self.sync_gradients:
            calls = self._reducer.reduce()
            if calls is not None:
                self._advice.uneven_rows(calls.uneven)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """No reduction inside the block; what accumulates is reduced at the next synchronising backward."""
        before, self._blocked = self._blocked, True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._blocked = before

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        return not self._blocked if self._ddp is None else bool(self._ddp.require_backward_grad_sync)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        """The model's DDP; None in a world where nothing but losses trains."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    def _count(self, on: bool) -> None:
        self._in_training_step = on
        for guard in self._guards:
            guard.counting = on

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning reduces; a value that is global already is called waste, once."""
        self._advice.global_already(tensor)
        return super().reduce(tensor, group, reduce_op)

    def attach_payload(self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> bool:
        """Let a check's bytes travel in the frame before each synchronising backward of this fit.

        Args:
            measure: This rank's bytes, asked for when the frame leaves; must not raise.
            judge: Gets the bytes of all ranks, in rank order, before any gradient is reduced; what it raises must be the
                same on every rank.

        Returns:
            Whether they will travel: not without ``check_calls``, nor under ``losses=[]``.
        """
        if self._reducer is None or not self._check_calls:
            return False
        self._reducer.attach_payload(measure, judge)
        return True

    # ------------------------------------------------------------------ end

    def on_exception(self, exception: BaseException) -> None:
        """What fails on one rank between two steps (a callback, an optimizer, Lightning itself) ends its peers too."""
        super().on_exception(exception)
        trainer = self._module._trainer if self.lightning_module is not None else None
        training = self._reducer is not None and trainer is not None and trainer.training
        # in validation, and without check_calls, the peers open no frame in which they could be told
        if training and self._check_calls and isinstance(exception, Exception):
            with contextlib.suppress(Exception):  # Lightning goes on with the exception itself
                if not getattr(exception, "collective", False):
                    handshake.raise_in_all_groups(exception, "training")

    def teardown(self) -> None:
        """Give the module back as it came."""
        for patch in (*self._guards, *self._sentinels):
            patch.remove()
        if self._reducer is not None:
            self._reducer.unwatch()
        module = self.lightning_module
        if module is not None and hasattr(module, adoption.NAME):
            delattr(module, adoption.NAME)
        super().teardown()
        self._reset()

    # ------------------------------------------------------------------ help

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @contextlib.contextmanager
    def _together(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if where == "training_step" and not self._check_calls:
                handshake.notify_subgroups(error, where)
                raise  # the world opens no frame in which it could be told
            handshake.raise_in_all_groups(error, where)
