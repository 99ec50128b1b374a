"""`DDPLossStrategy`: distributed data parallelism for learnable losses, beside the model's own DDP.

The model's DDP ignores the losses' parameters; `LossReducer` does for them what DDP does, at one place and by name. The module that the
user sees keeps its attributes, parameter names and checkpoint keys.

Here are Lightning's hooks, in the order of a fit. What they do is in the parts that the strategy has: the call check, the reducer,
adopted losses, shards, the precision keeper, advice.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import compat, inputs
from lightning_ddp_losses.core.compat import attached_trainer, injects_distributed_sampler
from lightning_ddp_losses.core.positional_options import warn_positional_options
from lightning_ddp_losses.core.precision import PrecisionKeeper
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.accumulation import AccumulationWindow
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies import ddp_setup, same_setup
from lightning_ddp_losses.strategies.adoption import Adoption
from lightning_ddp_losses.strategies.advice import Advice
from lightning_ddp_losses.strategies.call_check import CallCheck
from lightning_ddp_losses.strategies.evaluation_loaders import EvaluationLoaders, refuse_evaluation
from lightning_ddp_losses.strategies.global_batch_option import wrap_global
from lightning_ddp_losses.strategies.global_sampler_option import GlobalSamplerOption
from lightning_ddp_losses.strategies.launcher import WholeStateLauncher
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, find_losses, is_loss
from lightning_ddp_losses.strategies.loss_forward import LossForwardPatch, UnregisteredLossPatch
from lightning_ddp_losses.strategies.loss_reducer import LossReducer, ReducedParameters
from lightning_ddp_losses.strategies.random_states import RandomStates
from lightning_ddp_losses.strategies.sampler_places import SamplerPlaces
from lightning_ddp_losses.strategies.sharded_ddp import ShardedDDP
from lightning_ddp_losses.strategies.uneven_ends import UnevenEnds, refuse_uneven
from lightning_ddp_losses.strategies.windows import LightningWindows, corrected_parameters


class DDPLossStrategy(DDPStrategy):
    """DDP in which every learnable loss gets the mean of its gradients, whatever each rank called and in which order.

    Equivalent to: ``Trainer(strategy="ddp")`` on a module whose losses are all called once on every rank, but right also
    where that is not so: losses that alternate, that are called several times or in another order per rank, parameters
    that are created, replaced, frozen or unfrozen later, a frozen encoder, half precision.

    Args:
        losses: ``"auto"`` finds them by type (pytorch-metric-learning, torch.nn, metrics with trainable parameters,
            ``register_loss_type``). A list names modules; another string is a regular expression over whole paths. A loss
            that is named and has no parameters is noted. ``[]`` is plain ``ddp``.
        adopt: Register an unregistered loss that an optimizer holds (``_adopted_losses.<path>``) instead of refusing it.
        check_calls: Exchange one handshake in each synchronising backward: ranks that called different losses get the same
            error there. Without it they may hang, and only gradients missing after backward are noticed.
        loss_reduce_dtype: dtype of the losses' gradients on the wire (``torch.bfloat16`` or its name). None: their own,
            and at least float32 where small gradients share a buffer.
        global_batch: ``"auto"`` evaluates the PML losses it finds over the rows of all ranks, as ``GlobalBatchLoss`` does, without
            a change to the module.
        sharded_checkpoints: Save the classes of a ``ClassShardedLoss`` as each rank holds them (a folder, written with
            ``torch.distributed.checkpoint``) instead of the whole weight. Either way a checkpoint records a fingerprint of each rank's
            classes, and one that is damaged or mixed up is an error on every rank when it is loaded.
        accumulation: ``"mean"``: what ``accumulate_grad_batches`` means in Lightning, the mean of the micro-batches' losses, each divided
            by its own count. ``"window"``: the loss of one process on all rows of all ranks and micro-batches, divided by what they
            count together; the last, shorter window of an epoch too. For losses whose divisor is known: ``GlobalBatchLoss`` in mode
            ``elements``, ``global_mean``, ``ClassShardedLoss``, differentiable MeanSquaredError and MeanAbsoluteError; any other term is
            an error that names it. Layers that look at the batch (batch norm) see a micro-batch all the same. In
            manual optimisation there is ``window``.
        use_global_sampler: Give training loaders without a sampler of their own the batches of ``GlobalBatchSampler`` (G is ``batch_size``
            times W) in place of Lightning's ``DistributedSampler``: each row once per epoch, in the loader's order or shuffled (by another
            permutation than plain ``ddp``), and resumed at its place on any number of ranks with the same G. Also with ``devices=1``.
        evaluation: ``"exact"``: validation, test and prediction see each row once. Where Lightning would inject a sampler that repeats
            rows, every rank gets its contiguous part of each global batch, in the order of the data set: as many batches as the others,
            some of which may have one row less. (With batches of one row some ranks may have one batch less; a step that exchanges
            something is refused there, and so are fewer rows than ranks.) Samplers of the user's own, batch samplers too, and iterable data
            sets are left alone. ``"padded"``: Lightning's way, in which some rows count twice.
        uneven: What happens where ranks have different numbers of training batches. ``"error"``: the same error on every rank, before the
            first batch where lengths are known, else one batch before a rank runs out. ``"stop"``: an epoch ends on every rank with the
            first that runs out; rank 0 says once what is left out. ``"join"``: ranks that ran out go on with batches of 0 rows until all
            are done, which is exact where every loss is over the rows of all ranks; any other loss, and plain batch norm, is an
            error on every rank at the first empty batch, before its gradient is reduced.
        **ddp_kwargs: What ``lightning.pytorch.strategies.DDPStrategy`` takes.
            ``ddp_comm_hook`` (PowerSGD, fp16, bf16, ...) works on the model's DDP only: gradients of losses, of class shards, and those
            that global losses and metrics exchange in backward do not pass through it and stay exact. To halve the bytes of the losses'
            own reduction there is ``loss_reduce_dtype``.

    Gradient: after backward, and before the hooks ``on_after_backward``, every parameter holds the mean over ranks, once per
        synchronising backward.

    Communication: per synchronising backward, beside the model's DDP: one handshake (``check_calls``), one all-reduce for
        all small gradients of losses together, one for each gradient over 1 MiB. None in a step of validation, test, predict; one handshake
        when an evaluation loader is set up. For ``uneven``: one handshake at the start of a training epoch; one per fetch where a training
        loader has no length.

    Raises:
        ConfigurationError: options or names that cannot work.
        HiddenLossError: on every rank, for a trainable loss that is not registered.
        LossCallError: on every rank, for a loss that ran on some ranks only.
        InputError: on every rank, for inputs that a loss on any rank cannot take, for numbers of training batches that differ
            (``uneven``) or are not those that ``len()`` of a loader says, and for a checkpoint saved in an epoch of another
            ``GlobalBatchSampler`` (its seed, length or global batch too).
        RankMismatchError: on every rank, before anything is reduced, for a global loss or metric that ranks weigh differently (on an
            accelerator: at the next call).

    Example:
        >>> import lightning_ddp_losses
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="ddp_losses", accelerator="cpu", devices=2)
    """

    strategy_name = "ddp_losses"

    @warn_positional_options(
        "adopt", "check_calls", "loss_reduce_dtype", "global_batch", "sharded_checkpoints", after=1
    )
    def __init__(
        self,
        losses: str | Sequence[str] = "auto",
        *,
        adopt: bool = False,
        check_calls: bool = True,
        loss_reduce_dtype: torch.dtype | str | None = None,
        global_batch: bool | str = False,
        sharded_checkpoints: bool = False,
        accumulation: Literal["mean", "window"] = "mean",
        use_global_sampler: bool = False,
        evaluation: Literal["exact", "padded"] = "exact",
        uneven: Literal["error", "join", "stop"] = "error",
        **ddp_kwargs: Any,
    ) -> None:
        given = {**locals(), **ddp_setup.without_defaults(ddp_kwargs)}
        self._options = same_setup.options_of(given)
        super().__init__(**ddp_kwargs)
        self._ddp_kwargs = ddp_setup.without_defaults(self._ddp_kwargs)
        ddp_setup.refuse_unknown_options(type(self), self._ddp_kwargs)
        names_only = isinstance(losses, Sequence) and all(isinstance(name, str) for name in losses)
        if not names_only:  # a string is a sequence of strings too
            expected = "'auto', a list of names, or a regular expression"
            raise ConfigurationError("losses", expected=expected, got=repr(losses))
        if global_batch not in (False, "auto"):
            raise ConfigurationError("global_batch", expected="False or 'auto'", got=repr(global_batch))
        self._selection = losses if isinstance(losses, str) else list(losses)
        ddp_setup.refuse_accumulation(accumulation, is_plain_ddp=self._is_plain_ddp, ddp_kwargs=self._ddp_kwargs)
        ddp_setup.refuse_global_sampler(use_global_sampler, is_plain_ddp=self._is_plain_ddp)
        self._global_samplers = GlobalSamplerOption(enabled=use_global_sampler)
        refuse_evaluation(evaluation)
        self._evaluation = EvaluationLoaders(evaluation)
        refuse_uneven(uneven, is_plain_ddp=self._is_plain_ddp)
        self._accumulation, self._uneven = accumulation, uneven
        self._check_calls = check_calls
        self._wire_dtype = ddp_setup.as_dtype(loss_reduce_dtype)
        self._global_batch = global_batch
        self._adoption = Adoption(enabled=adopt)
        self._sharding = ShardedDDP(self._adoption.parameters_with_adopted, sharded_checkpoints=sharded_checkpoints)
        self._reset()

    def _reset(self) -> None:
        """Forget what belongs to one fit."""
        self._losses: list[FoundLoss] = []
        self._loss_patches: list[LossForwardPatch] = []
        self._unregistered_patches: list[UnregisteredLossPatch] = []
        self._reduced_parameters: ReducedParameters | None = None
        self._reducer: LossReducer | None = None
        self._call_check: CallCheck | None = None
        self._precision = PrecisionKeeper()
        self._advice = Advice()
        self._first_bucket_bytes = 0
        self._sync_blocked = False
        self._in_training_step = False
        self._windows: LightningWindows | None = None
        self._ends: UnevenEnds | None = None
        self._places = SamplerPlaces()
        self._random_states = RandomStates()
        self.closure_loss: Tensor | None = None  # while its backward runs: what an attached check may look at

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register an alias of every name under which Lightning registers ``ddp``."""
        for name, entry in list(strategy_registry.items()):
            if entry["strategy"] is DDPStrategy:
                alias = name.replace("ddp", cls.strategy_name, 1)
                if alias not in strategy_registry:
                    description = f"{entry['description']}, with learnable losses beside it"
                    strategy_registry.register(alias, cls, description=description, **entry["init_params"])

    @property
    def _is_plain_ddp(self) -> bool:
        return self._selection == []

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        """Choose Lightning's launcher; one that starts processes of its own brings back the whole of what is sharded."""
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = WholeStateLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Start the process group; ours follow its time-out."""
        external = process_groups.is_distributed()
        super().setup_environment()
        process_groups.set_timeout(self._timeout)
        if not external:
            atexit.register(process_groups.close, world=True)
        self._global_samplers.install(attached_trainer(self._module))

    def setup_distributed(self) -> None:
        """Start the world over keys that no former attempt has written; Lightning finds it started."""
        self.set_world_ranks()
        if not process_groups.is_distributed() and self.world_size > 1:
            ddp_setup.start_strategy_world(self, self._timeout)
        super().setup_distributed()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Adopted losses are registered in ``setup``; a checkpoint that holds them must wait for that."""
        return self._adoption.enabled or super().restore_checkpoint_after_setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Find the losses, wrap the rest of the module, synchronise both."""
        self._layer_sync = ddp_setup.choose_layer_sync(self.root_device, self._layer_sync)
        module = self._module
        if self._is_plain_ddp:
            self._sharding.refuse_shards(module)
            super().setup(trainer)
            return
        self._evaluation.setup(trainer)
        with self._raise_on_all_ranks("setup"):
            ddp_setup.refuse_sharded_parameters(module)
            # 1. the losses, sharded before their values are remembered
            self._losses = find_losses(module, self._selection)
            self._sharding.setup_shards(module)
            for inner in module.modules():
                if isinstance(inner, process_groups.WithProcessGroup):
                    inner.create_internal_groups()  # a rank may fail before it has ever used it
            self._precision.remember([loss.module for loss in self._losses])
            # 2. Lightning moves, wraps and synchronises the rest
            fitting = trainer.state.fn == TrainerFn.FITTING
            if fitting:  # before configure_optimizers, which may ask for the loaders
                self._ends = UnevenEnds(trainer, self._uneven)
            with contextlib.nullcontext() if fitting else self._sharding.excluded(module):
                super().setup(trainer)
            # 3. what needs the optimizers
            if fitting:
                self._sharding.install(self.optimizers, self.precision_plugin)
                self._handle_hidden_losses(trainer)
            # 4. what surrounds each call of a loss
            self._install_patches()
            if fitting:
                self._watch_losses()
                if self._accumulation == "window":
                    self._windows = LightningWindows(lambda: corrected_parameters(module, self.optimizers))

    def model_to_device(self) -> None:
        """Undo what the precision plugin halved in the losses, then move the module."""
        self._precision.restore()
        super().model_to_device()

    def configure_ddp(self) -> None:
        """Compare names, wrap the model without the losses' parameters, broadcast those."""
        if self._is_plain_ddp:
            super().configure_ddp()
            return
        module = self._module
        precision, trainer = self.precision_plugin.precision, attached_trainer(module)
        facts = same_setup.setup_facts(self._losses, self._options, precision=precision, trainer=trainer)
        ddp_setup.compare_names(module, facts)
        plan = ddp_setup.plan(module, self._losses)
        if plan.reduced:  # else DDP would refuse the module
            with ddp_setup.ignoring(module, plan.ignored):
                super().configure_ddp()
        if self._ddp_kwargs.get("init_sync", True):
            buffers = self._ddp_kwargs.get("broadcast_buffers", True) is not False
            raw_collectives.broadcast_([t for t in plan.unsynchronised if buffers or isinstance(t, nn.Parameter)])
        self._first_bucket_bytes = ddp_setup.first_bucket(plan.reduced, self._ddp_kwargs)
        self._reduced_parameters = ReducedParameters(module, plan.reduced, sorted(plan.ignored_by_user))
        self._reducer = LossReducer(self._reduced_parameters, self._wire_dtype)
        for loss in self._losses:
            if loss.learnable and not loss.owned:
                rank_zero_info(f"{loss.title} shares a parameter with the model and stays in the model's DDP.")
            if not loss.learnable and self._selection != "auto":
                rank_zero_info(
                    f"{loss.title}, named in `losses`, has no parameters: there is nothing to synchronise in it."
                )

    def _handle_hidden_losses(self, trainer: pl.Trainer) -> None:
        """Adopt or refuse trainable losses that are not registered; watch those that no optimizer holds."""
        module = self._module
        hidden = self._adoption.find(trainer, module, self.optimizers)
        self._unregistered_patches = [
            UnregisteredLossPatch(idle, path, lambda: self._in_training_step)
            for path, idle in hidden.idle.items()
            if is_loss(idle)
        ]
        if hidden.optimised:
            self._losses += self._adoption.adopt(
                module, hidden, self.precision_plugin, self.root_device, self._wrapped_model
            )
            self._sharding.setup_new_shards(module, self.optimizers, self.precision_plugin)

    def _install_patches(self) -> None:
        # where a scaler looks for overflow, NaN is its business
        refuse_nan = getattr(self.precision_plugin, "scaler", None) is None
        for loss in self._losses:
            global_loss = wrap_global(loss, self._module) if self._global_batch else None
            self._loss_patches.append(LossForwardPatch(loss, refuse_nan=refuse_nan, global_loss=global_loss))
        for patch in (*self._loss_patches, *self._unregistered_patches):
            patch.install()

    def _watch_losses(self) -> None:
        """Start the call check; what exists now counts as synchronised."""
        parameters, reducer = self._reduced_parameters, self._reducer
        assert parameters is not None
        assert reducer is not None
        parameters.watch([loss.name for loss in self._losses])
        if self._check_calls:
            self._call_check = CallCheck(parameters, reducer, self._loss_patches, self._first_bucket_bytes)

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Say when Lightning destroys a sampler's structure; refuse what a global sampler cannot serve; let it resume."""
        trainer = attached_trainer(self._module)
        if not self._is_plain_ddp and trainer is not None:
            ddp_setup.warn_of_reshuffle(dataloader, injecting=injects_distributed_sampler(trainer))
            ddp_setup.refuse_other_batches(dataloader)
            with self._raise_on_all_ranks("train_dataloader"):
                self._places.place(trainer, dataloader)
            with self._raise_on_all_ranks("evaluation loader"):
                dataloader = self._evaluation.process(trainer, dataloader)
        return super().process_dataloader(dataloader)

    def on_train_start(self) -> None:
        """Make sure that all samplers stand where the checkpoint says, and random numbers go on."""
        super().on_train_start()
        with self._raise_on_all_ranks("on_train_start"):
            self._places.start(self._module.trainer)
            self._random_states.restore(self._module.trainer, self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Forget what was resumed from: the first batch is there."""
        self._places.on_first_batch()
        super().on_train_batch_start(batch, batch_idx)
        if self._reducer is not None:
            with self._raise_on_all_ranks("on_train_batch_start"):
                self._leave_out_frozen()

    def _leave_out_frozen(self) -> None:
        """Wrap the model anew where some of what its DDP reduces was frozen: DDP would wait for those gradients.

        (Lightning's ``BaseFinetuning`` and hooks freeze before this one, and outside ``no_sync``, whose state is the wrap's.)

        Communication: where something was frozen, one handshake, and what DDP does when it is made.
        """
        parameters, wrapped = self._reduced_parameters, self._wrapped_model
        if parameters is None or wrapped is None or all(p.requires_grad for p in parameters.elsewhere.values()):
            return
        ddp_setup.compare_frozen(self._module, parameters.elsewhere.values(), compat.ddp_comm_state(self))
        self.model, wrapped = self._module, None  # the old one leaves its hooks with its last reference
        plan = ddp_setup.plan(self._module, self._losses)
        # what was equal stays so: to broadcast it again would hide a difference
        kwargs, self._ddp_kwargs = self._ddp_kwargs, {**self._ddp_kwargs, "init_sync": False}
        try:
            if plan.reduced:
                with ddp_setup.ignoring(self._module, plan.ignored):
                    super().configure_ddp()
        finally:
            self._ddp_kwargs = kwargs
        parameters.leave_out(plan.reduced)
        if self._call_check is not None:
            self._call_check.watch_gradients(ddp_setup.first_bucket(plan.reduced, kwargs))

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step; what fails on one rank ends all of them at the peers' next handshake."""
        if self._reducer is None:
            return super().training_step(*args, **kwargs)
        self._count_calls(True)
        try:
            with self._raise_on_all_ranks("training_step"):
                if self._wrapped_model is None and self.sync_gradients:  # what DDP's forward does
                    ddp_setup.broadcast_buffers(self._module, self._losses, self._ddp_kwargs)
                if self._ends is not None:
                    self._ends.before_step()
                with self._micro_batch():
                    return super().training_step(*args, **kwargs)
        finally:
            self._count_calls(False)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's validation step."""
        with self._evaluation.step(self._module.trainer, self._wrapped_model, args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's test step."""
        with self._evaluation.step(self._module.trainer, self._wrapped_model, args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step."""
        with self._evaluation.step(self._module.trainer, self._wrapped_model, args):
            return super().predict_step(*args, **kwargs)

    @property
    def accumulation(self) -> str:
        """What the micro-batches of a window make: the ``"mean"`` of their losses, or the loss of the whole ``"window"``."""
        return self._accumulation

    @property
    def evaluation(self) -> str:
        """How rows are dealt in validation, test and prediction: ``"exact"`` or ``"padded"``."""
        return self._evaluation.mode

    def _micro_batch(self) -> AbstractContextManager[None]:
        """Return what a training step runs in: the next micro-batch of an accumulation window, where there are windows."""
        if self._windows is None or not self._module.automatic_optimization:
            return contextlib.nullcontext()
        return self._windows.micro_batch(self._module.trainer, is_last=self.sync_gradients)

    @contextlib.contextmanager
    def window(self, micro_batches: int = 1) -> Iterator[AccumulationWindow]:
        """Make the micro-batches inside the block one batch, in manual optimisation with ``accumulation="window"``.

        Each ``manual_backward`` ends a micro-batch. After the block all gradients are those of one process on the rows of all ranks and
        micro-batches; step then.

        Args:
            micro_batches: About how many there will be. Only the size of gradients inside the block depends on it.

        Yields:
            The window.

        Raises:
            ConfigurationError: without ``accumulation="window"``, and for what ``accumulation_window`` refuses.

        Communication: one handshake on leaving.
        """
        if self._windows is None or self._module.automatic_optimization:
            raise ConfigurationError(
                "strategy.window()",
                expected="accumulation='window' and automatic_optimization = False, during fit",
                got=f"accumulation={self._accumulation!r}",
                fix="In automatic optimisation the window is what accumulate_grad_batches says.",
            )
        with self._windows.block(micro_batches) as window:
            yield window

    def expect_counts(self, counts: Mapping[str | nn.Module, float | Sequence[float]]) -> None:
        """Say what losses count in the whole accumulation window, where their counts are not in the same proportion in each micro-batch.

        Call it on every rank before the window's first backward, in ``training_step`` or a hook before it.

        Args:
            counts: By the path of a loss in the module, or the name of a ``global_mean``: this rank's own count in all micro-batches of the
                window together; a list where the loss is called several times in a micro-batch, or has several means.

        Raises:
            ConfigurationError: without ``accumulation="window"``.
            InputError: on every rank, for counts that are negative or not finite, or that come late.

        Communication: one handshake.
        """
        if self._windows is None:
            raise ConfigurationError("expect_counts", expected="accumulation='window', during fit", got="no window")
        modules: dict[Any, Any] = dict(self._module.named_modules())
        self._windows.expect_counts({modules.get(name, name): count for name, count in counts.items()})

    def _count_calls(self, on: bool) -> None:
        self._in_training_step = on
        for patch in self._loss_patches:
            patch.counting = on

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare the call check of a synchronising backward; backward exchanges it before its first gradients leave."""
        self.closure_loss = closure_loss
        if self._call_check is not None and self.sync_gradients:
            self._call_check.start(self._module.global_step)
        super().pre_backward(closure_loss)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward, with the losses' gradients reduced before the hooks ``on_after_backward`` see them.

        (Lightning 2.6 calls those hooks in the precision plugin's ``post_backward``, before the strategy's.)
        """
        plugin, module = self.precision_plugin, self._module
        if self._ends is not None:
            self._ends.before_backward(closure_loss)
        if self._windows is not None:
            divided_by = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
            closure_loss = self._windows.before_backward(closure_loss, divided_by)
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.reduce_loss_gradients()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def reduce_loss_gradients(self) -> None:
        """Mean the losses' gradients over ranks, where this backward synchronises; ``backward`` calls it.

        Raises:
            LossCallError: on every rank, for a gradient on some ranks only.
        """
        if self._reducer is None or not self.sync_gradients:
            return
        calls = None if self._call_check is None else self._call_check.finish()
        if calls is None:
            self._reducer.reduce()
        else:
            self._reducer.reduce(calls.parameters, calls.expected)
            self._advice.uneven_rows(calls.uneven)
        if self._call_check is not None:
            self._call_check.end()
        if self._windows is not None and self._module.automatic_optimization:
            self._windows.close()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Let a shard's gradient that overflowed on one rank count on all."""
        super().post_backward(closure_loss)
        if self.sync_gradients:
            self._sharding.share_overflow(self.precision_plugin)
        self.closure_loss = None

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as Lightning does, but not with gradients that an accumulation window has yet to correct."""
        if self._windows is not None:
            closure = self._windows.closed(closure, optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Reduce nothing inside the block; what accumulates is reduced at the next synchronising backward."""
        before, self._sync_blocked = self._sync_blocked, True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sync_blocked = before

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        ddp = self._wrapped_model
        return not self._sync_blocked if ddp is None else bool(ddp.require_backward_grad_sync)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but keep the mean of integers, in float64; a value that is global already is called waste, once.

        Lightning writes the mean of integers back into their own tensor, which floors it. A logged epoch mean is the ranks' mean sum over
        their mean number of rows, hence too large where W does not divide the rows. (Lightning 2.6.6, issue 21859)

        Args:
            tensor: What is reduced, in place; integers are not changed. What is no tensor is returned.
            group: The process group; None for all ranks.
            reduce_op: ``"mean"``, ``"sum"`` and so on, or one of ``torch.distributed.ReduceOp``.

        Returns:
            The reduced tensor, equal on every rank of the group.

        Communication: one barrier and one all-reduce.
        """
        self._advice.global_already(tensor)
        if not self._is_plain_ddp and _is_mean_of_integers(tensor, reduce_op):
            tensor = tensor.double()  # a copy; exact up to 2**53
        return super().reduce(tensor, group, reduce_op)

    def attach_payload(self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> bool:
        """Let a check's bytes travel in the call check of each synchronising backward of this fit.

        Args:
            measure: This rank's bytes, asked for before backward; must not raise.
            judge: Gets the bytes of all ranks, in rank order, before any gradient is reduced; what it raises must be the
                same on every rank.

        Returns:
            Whether they will travel: not without ``check_calls``, nor under ``losses=[]``.
        """
        if self._call_check is None:
            return False
        self._call_check.attach(measure, judge)
        return True

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the plain module's state, with adopted losses and the whole of what is sharded."""
        state = self._adoption.state_with_adopted(super().lightning_module_state_dict())
        return state if self._is_plain_ddp else self._sharding.module_state(self._module, state)

    def whole_module_state(self, receivers: Iterable[int]) -> dict[str, Any]:
        """Return the plain module's state, with adopted losses, and on some ranks the whole of what is sharded; every rank comes here.

        Args:
            receivers: Ranks that get the whole; others get tensors of its shape without memory.

        Communication: each rank sends its parts to each receiver.
        """
        state = self._adoption.state_with_adopted(super().lightning_module_state_dict())
        return state if self._is_plain_ddp else self._sharding.whole_state(self._module, state, receivers)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, that of sharded weights as the whole."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if self._is_plain_ddp:
            return state
        return self._sharding.optimizer_state(self._module, optimizer, self.optimizers, state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a file, or a folder of shards, with the places of global samplers and the random states of all ranks."""
        write = super().save_checkpoint
        if self._is_plain_ddp:
            write(checkpoint, filepath, storage_options)
            return
        trainer = self._module.trainer
        checkpoint = self._places.with_places(trainer, checkpoint)
        checkpoint = self._random_states.with_states(trainer, checkpoint, filepath, self.root_device)
        self._sharding.save(self._module, checkpoint, filepath, lambda rest, path: write(rest, path, storage_options))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file, or what is not sharded of a folder of shards."""
        path = self._sharding.file_to_load(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
        self._sharding.compare_wholes(checkpoint)
        trainer = attached_trainer(self._module)
        if self._is_plain_ddp or trainer is None:
            return checkpoint
        self._random_states.loaded(trainer, checkpoint)
        return self._places.loaded(trainer, checkpoint)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's part of what is sharded, and no adopted losses where none are registered."""
        state = self._adoption.state_for(self.lightning_module, checkpoint["state_dict"])
        if not self._is_plain_ddp:
            state = self._sharding.own_module_state(self._module, state)
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of what belongs to sharded weights."""
        if not self._is_plain_ddp:
            saved = checkpoint["optimizer_states"]
            states = self._sharding.own_optimizer_states(self._module, self.optimizers, saved)
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    # ------------------------------------------------------------------ end

    def on_train_end(self) -> None:
        """Look at what the last step left on an accelerator. Communication: there one handshake."""
        super().on_train_end()
        if self._is_plain_ddp or inputs.on_host(torch.empty(0, device=self.root_device)):
            return
        with self._raise_on_all_ranks("the end of training"):
            inputs.raise_late_labels()
        handshake.all_gather("the end of training", {})

    def on_exception(self, exception: BaseException) -> None:
        """End the peers too, where one rank fails between two steps (a callback, an optimizer, Lightning itself)."""
        super().on_exception(exception)
        trainer = attached_trainer(self.lightning_module) if self.lightning_module is not None else None
        training = trainer is not None and trainer.training
        # in validation, and without check_calls, the peers open no handshake in which they could be told
        if training and self._call_check is not None and isinstance(exception, Exception):
            with contextlib.suppress(Exception):  # Lightning goes on with the exception itself
                if not getattr(exception, "collective", False):
                    handshake.raise_in_all_groups(exception, "training")

    def teardown(self) -> None:
        """Give the module back as it came."""
        for patch in (*self._loss_patches, *self._unregistered_patches):
            patch.remove()
        if self._call_check is not None:
            self._call_check.remove()
        self._adoption.remove(self.lightning_module)
        self._sharding.remove()
        self._places.teardown()
        self._global_samplers.remove()
        self._evaluation.teardown()
        if self._ends is not None:
            self._ends.remove()
        super().teardown()
        self._reset()

    # ------------------------------------------------------------------ help

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _wrapped_model(self) -> DistributedDataParallel | None:
        """The model's DDP; None in a world where nothing but losses trains."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @contextlib.contextmanager
    def _raise_on_all_ranks(self, where: str) -> Iterator[None]:
        """Raise on every rank what fails on one inside the block."""
        try:
            yield
        except Exception as error:
            meet_in_backward = self._check_calls or (self._ends is not None and self._ends.lacks_rows)
            if where == "training_step" and not meet_in_backward:
                handshake.notify_subgroups(error, where)
                raise  # the world opens no handshake in which it could be told
            handshake.raise_in_all_groups(error, where)


def _is_mean_of_integers(tensor: Any, reduce_op: Any) -> bool:
    """Say whether Lightning would floor a reduction's result."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return False
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return bool(reduce_op == ReduceOp.AVG)
