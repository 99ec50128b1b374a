"""`LossParallelism`: what a strategy does for learnable losses beside the model, whatever parallelises the model.

A strategy has one and asks it from Lightning's hooks (``loss_hooks``). It holds the options, the parts of one fit, and what needs
several of them: the order of the set-up, one reduction after backward, errors on every rank.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_ddp_losses.core import compat, inputs
from lightning_ddp_losses.core.compat import attached_trainer, combined_loader, injects_distributed_sampler
from lightning_ddp_losses.core.precision import PrecisionKeeper
from lightning_ddp_losses.distributed import handshake, liveness, process_groups
from lightning_ddp_losses.distributed.upstream_grad import forget_late_notes, take_late_notes
from lightning_ddp_losses.errors import ConfigurationError, PeerError
from lightning_ddp_losses.strategies import ddp_setup, same_setup
from lightning_ddp_losses.strategies.adoption import Adoption
from lightning_ddp_losses.strategies.advice import Advice
from lightning_ddp_losses.strategies.after_errors import AfterError
from lightning_ddp_losses.strategies.call_check import CallCheck, refuse_other_upstream_grads
from lightning_ddp_losses.strategies.checkpoint_files import LOSS_KINDS
from lightning_ddp_losses.strategies.evaluation_ends import EvaluationEnds
from lightning_ddp_losses.strategies.evaluation_loaders import EvaluationLoaders, refuse_evaluation
from lightning_ddp_losses.strategies.global_batch_option import wrap_global
from lightning_ddp_losses.strategies.global_sampler_option import GlobalSamplerOption
from lightning_ddp_losses.strategies.loader_states import LoaderStates, state_holder, warn_of_workers
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, find_losses, is_loss, loss_kinds
from lightning_ddp_losses.strategies.loss_forward import LossForwardPatch, UnregisteredLossPatch
from lightning_ddp_losses.strategies.loss_reducer import LossReducer, ReducedParameters
from lightning_ddp_losses.strategies.random_states import RandomStates, is_requeued
from lightning_ddp_losses.strategies.requeue import Requeue
from lightning_ddp_losses.strategies.sampler_places import SamplerPlaces
from lightning_ddp_losses.strategies.sharded_ddp import ShardedDDP
from lightning_ddp_losses.strategies.termination import Termination
from lightning_ddp_losses.strategies.undivided_data import UndividedData
from lightning_ddp_losses.strategies.uneven_ends import UnevenEnds, refuse_uneven
from lightning_ddp_losses.strategies.windows import LightningWindows, corrected_parameters

_log = logging.getLogger(__name__)
T = TypeVar("T")


class HostStrategy(Protocol):
    """What the losses need of the strategy that parallelises the model."""

    @property
    def lightning_module(self) -> pl.LightningModule | None:
        """The module as the user sees it."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of the fit."""

    @property
    def wrapped_model(self) -> Any:
        """The model's DDP; None without one."""

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether each forward of the model, in evaluation too, waits for all ranks."""

    @property
    def divides_model(self) -> bool:
        """Whether a rank holds parts of the model only."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients."""


class LossParallelism:
    """Finds, synchronises, checks and saves the learnable losses of a strategy's module.

    Args:
        strategy: Parallelises the model.
        options: Of the strategy, which all ranks must have in common.
        others: See ``DDPLossStrategy``.

    Attributes:
        found: The losses of this fit.
        reducer: Means their gradients; None outside of a fit.
        accumulation: ``"mean"`` or ``"window"``.
        after_error: Says with whom this rank saves after an error.
        is_plain: Whether the strategy shall do nothing of its own (``losses=[]``).

    Raises:
        ConfigurationError: for options that cannot work.
    """

    def __init__(
        self,
        strategy: HostStrategy,
        options: Mapping[str, str],
        *,
        losses: str | Sequence[str],
        adopt: bool,
        check_calls: bool,
        loss_reduce_dtype: torch.dtype | str | None,
        global_batch: bool | str,
        sharded_checkpoints: bool,
        accumulation: str,
        use_global_sampler: bool,
        evaluation: str,
        uneven: str,
        ddp_kwargs: Mapping[str, Any],
    ) -> None:
        names_only = isinstance(losses, Sequence) and all(isinstance(name, str) for name in losses)
        if not names_only:  # a string is a sequence of strings too
            expected = "'auto', a list of names, or a regular expression"
            raise ConfigurationError("losses", expected=expected, got=repr(losses))
        if global_batch not in (False, "auto"):
            raise ConfigurationError("global_batch", expected="False or 'auto'", got=repr(global_batch))
        self.serve(strategy)
        self._options = dict(options)
        self.selection = losses if isinstance(losses, str) else list(losses)
        ddp_setup.refuse_accumulation(accumulation, is_plain_ddp=self.is_plain, ddp_kwargs=ddp_kwargs)
        ddp_setup.refuse_global_sampler(use_global_sampler, is_plain_ddp=self.is_plain)
        self.global_samplers = GlobalSamplerOption(enabled=use_global_sampler)
        refuse_evaluation(evaluation)
        self.evaluation = EvaluationLoaders(evaluation)
        refuse_uneven(uneven, is_plain_ddp=self.is_plain)
        self.accumulation, self._uneven = accumulation, uneven
        self.check_calls = check_calls
        self._wire_dtype = ddp_setup.parse_dtype(loss_reduce_dtype)
        self._global_batch = global_batch
        self.adoption = Adoption(enabled=adopt)
        self.sharding = ShardedDDP(self.adoption.parameters_with_adopted, sharded_checkpoints=sharded_checkpoints)
        self._reset()

    def serve(self, strategy: HostStrategy) -> None:
        """Say whose losses these are."""
        self._strategy = strategy

    def _reset(self) -> None:
        """Forget what belongs to one fit."""
        self.found: list[FoundLoss] = []
        self._loss_patches: list[LossForwardPatch] = []
        self._unregistered_patches: list[UnregisteredLossPatch] = []
        self.parameters: ReducedParameters | None = None
        self.reducer: LossReducer | None = None
        self.call_check: CallCheck | None = None
        self.windows: LightningWindows | None = None
        self._precision = PrecisionKeeper()
        self.advice = Advice()
        self._first_bucket_bytes = 0
        self._in_training_step = False
        self._ends: UnevenEnds | None = None
        self._places = SamplerPlaces()
        self._random_states = RandomStates()
        self._requeue = Requeue()
        self._loader_states = LoaderStates()
        self._evaluation_ends = EvaluationEnds()
        self._training_data = UndividedData("training")
        self._termination = Termination()
        self.after_error = AfterError()
        self._is_exception_told = False

    @property
    def is_plain(self) -> bool:
        """Whether the strategy shall do nothing of its own."""
        return self.selection == []

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule."""
        module = self._strategy.lightning_module
        assert module is not None
        return module

    # ------------------------------------------------------------------ set-up

    def setup(
        self,
        trainer: pl.Trainer,
        setup_model: Callable[[pl.Trainer], None],
        refuse: Callable[[pl.LightningModule], None],
        refuse_optimizers: Callable[[nn.Module, Iterable[torch.optim.Optimizer]], None] | None = None,
    ) -> None:
        """Find the losses, let Lightning set up the model, synchronise both.

        Args:
            trainer: The trainer.
            setup_model: Lightning's set-up, in which the strategy calls ``start_reducing``.
            refuse: Raises for a module that the strategy cannot train.
            refuse_optimizers: Raises for optimizers that cannot step it.
        """
        module = self.module
        self.evaluation.setup(trainer)
        self._evaluation_ends.install(trainer)
        self.after_error.install(trainer, self.on_exception, self._is_divided, self._termination)
        liveness.new_run()
        with self.raise_on_all_ranks("setup"):
            refuse(module)
            # 1. the losses, sharded before their values are remembered
            self.found = find_losses(module, self.selection)
            self.sharding.setup_shards(module)
            for inner in module.modules():
                if isinstance(inner, process_groups.WithProcessGroup):
                    inner.create_internal_groups()  # a rank may fail before it has ever used it
            self._precision.remember([loss.module for loss in self.found])
            # 2. Lightning moves, wraps and synchronises the rest
            fitting = trainer.state.fn == TrainerFn.FITTING
            if fitting:  # before configure_optimizers, which may ask for the loaders
                self._ends = UnevenEnds(trainer, self._uneven)
                self._loader_states.install(trainer)
            with contextlib.nullcontext() if fitting else self.sharding.excluded(module):
                setup_model(trainer)
            # 3. what needs the optimizers
            if fitting:
                if refuse_optimizers is not None:
                    refuse_optimizers(module, self._strategy.optimizers)
                self.sharding.install(self._strategy.optimizers, self._strategy.precision_plugin)
                self._handle_hidden_losses(trainer)
            # 4. what surrounds each call of a loss
            self._install_patches()
            if fitting:
                self._watch_losses()
                if self.accumulation == "window":
                    self.windows = LightningWindows(
                        lambda: corrected_parameters(module, self._strategy.optimizers),
                        lambda: compat.gathered_parameters(module),
                    )

    def restore_precision(self) -> None:
        """Undo what the precision plugin halved in the losses."""
        self._precision.restore()

    def compare_ranks(self) -> None:
        """Compare names, shapes and options between the ranks. Communication: one handshake.

        Raises:
            RankMismatchError: on every rank.
        """
        precision, trainer = self._strategy.precision_plugin.precision, attached_trainer(self.module)
        facts = same_setup.setup_facts(self.found, self._options, precision=precision, trainer=trainer)
        ddp_setup.compare_names(self.module, facts)

    def start_reducing(
        self, reduced_elsewhere: Sequence[Tensor], ignored: Sequence[str] = (), *, first_bucket: int = 0
    ) -> None:
        """Take over the gradients of what nobody else reduces.

        Args:
            reduced_elsewhere: Parameters that the model's own parallelism reduces.
            ignored: Names of parameters that the user told it to leave alone.
            first_bucket: Bytes of gradient of which it sends nothing before all are ready.
        """
        self._first_bucket_bytes = first_bucket
        self.parameters = ReducedParameters(self.module, reduced_elsewhere, sorted(ignored))
        self.reducer = LossReducer(self.parameters, self._wire_dtype)

    def note_unusual(self) -> None:
        """Say of which losses something else than usual is true."""
        for loss in self.found:
            if loss.learnable and not loss.owned:
                rank_zero_info(f"{loss.title} shares a parameter with the model and stays in the model's DDP.")
            if not loss.learnable and self.selection != "auto":
                rank_zero_info(
                    f"{loss.title}, named in `losses`, has no parameters: there is nothing to synchronise in it."
                )

    def _handle_hidden_losses(self, trainer: pl.Trainer) -> None:
        """Adopt or refuse trainable losses that are not registered; watch those that no optimizer holds."""
        module, host = self.module, self._strategy
        hidden = self.adoption.find(trainer, module, host.optimizers)
        self._unregistered_patches = [
            UnregisteredLossPatch(idle, path, lambda: self._in_training_step)
            for path, idle in hidden.idle.items()
            if is_loss(idle)
        ]
        if hidden.optimised:
            self.found += self.adoption.adopt(
                module, hidden, host.precision_plugin, host.root_device, host.wrapped_model
            )
            self.sharding.setup_new_shards(module, host.optimizers, host.precision_plugin)

    def _install_patches(self) -> None:
        # where a scaler looks for overflow, NaN is its business
        refuse_nan = getattr(self._strategy.precision_plugin, "scaler", None) is None
        for loss in self.found:
            global_loss = wrap_global(loss, self.module) if self._global_batch else None
            self._loss_patches.append(LossForwardPatch(loss, refuse_nan=refuse_nan, global_loss=global_loss))
        for patch in (*self._loss_patches, *self._unregistered_patches):
            patch.install()

    def _watch_losses(self) -> None:
        """Start the call check; what exists now counts as synchronised."""
        parameters, reducer = self.parameters, self.reducer
        assert parameters is not None
        assert reducer is not None
        parameters.watch([loss.name for loss in self.found])
        if self.check_calls:
            self.call_check = CallCheck(parameters, reducer, self._loss_patches, self._first_bucket_bytes)
            trainer, data = self.module.trainer, self._training_data
            self.call_check.attach(data.take, lambda payloads: data.judge(trainer, payloads))

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader as this rank shall have it: structured samplers kept, a saved place found again, evaluation exact."""
        trainer = attached_trainer(self.module)
        if self.is_plain or trainer is None:
            return dataloader
        ddp_setup.warn_of_reshuffle(dataloader, injecting=injects_distributed_sampler(trainer))
        ddp_setup.refuse_other_batches(dataloader)
        with self.raise_on_all_ranks("train_dataloader"):
            self._places.place(trainer, dataloader)
            if trainer.training:
                warn_of_workers(dataloader)
        with self.raise_on_all_ranks("evaluation loader"):
            return self.evaluation.process(trainer, dataloader)

    def on_train_start(self) -> None:
        """Make sure that all samplers stand where the checkpoint says, and random numbers go on."""
        forget_late_notes()
        with self.raise_on_all_ranks("on_train_start"):
            self._places.start(self.module.trainer, keeps_state=state_holder)
            self._loader_states.start(self.module.trainer)
            self._random_states.restore(self.module.trainer, self._strategy.root_device)
        # Lightning has its handlers in place by now
        if self.call_check is not None and process_groups.world_size() > 1:
            self._termination.install(self.module.trainer, self.call_check)
            self._requeue.install(self.module.trainer, self.call_check)

    def on_batch(self, batch: Any, batch_idx: int) -> None:
        """Forget what was resumed from: a batch is there. Read the first ones of an epoch."""
        self._places.on_first_batch()
        if batch_idx == 0:
            self._training_data.begin()
        if self.call_check is not None and self._training_data.is_looking:
            combined = combined_loader(self.module.trainer.fit_loop)
            self._training_data.see([] if combined is None else combined.flattened, batch)

    # ------------------------------------------------------------------ steps

    def training_step(self, step: Callable[[], T], broadcast_buffers: Callable[[], None]) -> T:
        """Run a training step; what fails on one rank ends all of them at the peers' next handshake.

        Args:
            step: Lightning's own; this is no block around it, as each block takes time in each step.
            broadcast_buffers: Gives all ranks rank 0's, where nothing around the model does.
        """
        self._count_calls(True)
        try:
            broadcast_buffers()
            if self._ends is not None:
                self._ends.before_step()
            with self._micro_batch():
                return step()
        except Exception as error:
            self._raise_on_all_ranks(error, "training_step")
        finally:
            self._count_calls(False)

    def _count_calls(self, on: bool) -> None:
        self._in_training_step = on
        for patch in self._loss_patches:
            patch.counting = on

    def _micro_batch(self) -> AbstractContextManager[None]:
        """Return what a training step runs in: the next micro-batch of an accumulation window, where there are windows."""
        if self.windows is None or not self.module.automatic_optimization:
            return contextlib.nullcontext()
        return self.windows.micro_batch(self.module.trainer, is_last=self._strategy.sync_gradients)

    @contextlib.contextmanager
    def evaluation_step(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Run a step of validation, test or prediction inside the block; what fails on one rank ends all of them after their last batch."""
        trainer, host = self.module.trainer, self._strategy
        with (
            self._evaluation_ends.step(trainer, args),
            self.evaluation.step(trainer, host.wrapped_model, args, must_exchange=host.exchanges_in_forward),
        ):
            yield

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return what is back-propagated: Lightning's division undone in an accumulation window; refused where a rank lacks rows."""
        module = self.module
        if self._ends is not None:
            self._ends.before_backward(loss)
        if self.windows is not None:
            divided_by = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
            loss = self.windows.before_backward(loss, divided_by)
        return loss

    def start_call_check(self) -> None:
        """Prepare the call check of a synchronising backward; backward exchanges it before its first gradients leave."""
        if self.call_check is not None and self._strategy.sync_gradients:
            self.call_check.start(self.module.global_step)

    def reduce_gradients(self) -> None:
        """Mean the losses' gradients over ranks, where this backward synchronises.

        Raises:
            LossCallError: on every rank, for a gradient on some ranks only.
        """
        if self.reducer is None or not self._strategy.sync_gradients:
            return
        calls = None if self.call_check is None else self.call_check.finish()
        if calls is None:
            self.reducer.reduce()
        else:
            self.reducer.reduce(calls.parameters, calls.expected)
            self.advice.uneven_rows(calls.uneven)
        if self.call_check is not None:
            self.call_check.end()
        if self.windows is not None and self.module.automatic_optimization:
            self.windows.close()

    def after_backward(self) -> None:
        """Let a shard's gradient that overflowed on one rank count on all."""
        if self._strategy.sync_gradients:
            self.sharding.share_overflow(self._strategy.precision_plugin)

    def closed(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        """Return a closure after which an optimizer may step."""
        return closure if self.windows is None else self.windows.closed(closure, optimizer)

    # ------------------------------------------------------------------ checkpoints

    def with_run_states(self, checkpoint: dict[str, Any], path: Any) -> dict[str, Any]:
        """Return a checkpoint with the places of global samplers, the random states of all ranks, and of which class each loss is."""
        trainer = self.module.trainer
        checkpoint = {**checkpoint, LOSS_KINDS: self.kinds()}
        checkpoint = self._places.with_places(trainer, checkpoint)
        together = self.comes_together(path)
        checkpoint = self._loader_states.with_states(trainer, checkpoint, together=together)
        return self._random_states.with_states(trainer, checkpoint, self._strategy.root_device, together=together)

    @property
    def saves_together(self) -> bool:
        """Whether every rank that saves now is at the same place: not after an error, when each of them may be anywhere."""
        trainer = attached_trainer(self.module)
        if trainer is None or not trainer.interrupted:
            return True
        return self._termination.is_together and not self.after_error.is_alone

    def _is_divided(self) -> bool:
        return self._strategy.divides_model or self.sharding.is_divided

    def comes_together(self, path: Any) -> bool:
        """Say whether every rank comes to save this file; not in SLURM's signal either, but where ``Requeue`` has taken its place."""
        return self.saves_together and (self._requeue.is_together or not is_requeued(path))

    def kinds(self) -> list[str]:
        """Return of which class each loss is; before set-up and after teardown too."""
        return loss_kinds(find_losses(self.module, self.selection))

    def loaded(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remember the places and random states of a loaded checkpoint, and return it as Lightning shall see it."""
        trainer = attached_trainer(self.module)
        if self.is_plain or trainer is None:
            return checkpoint
        self._random_states.loaded(trainer, checkpoint)
        return self._loader_states.loaded(trainer, self._places.loaded(trainer, checkpoint))

    # ------------------------------------------------------------------ end

    def on_train_end(self) -> None:
        """Look at what the last step left and no later call will read.

        Communication: one handshake, and one for each loss with class shards.
        """
        liveness.end_run()
        if self.is_plain:
            return
        with self.raise_on_all_ranks("the end of training"):
            inputs.raise_late_values()
            self.sharding.refuse_equal_shards()
            # who learns here of an error in another part of the world tells the parts that it belongs to
            upstream_grads = handshake.all_gather("the end of training", {}, take_late_notes().encode())
            texts = [text.decode() for text in upstream_grads]
            # a rank that ran out of rows, or stood in for one, has noted another number of them
            numbers = {text.count(",") for text in texts}
            if len(numbers) == 1 and "none" not in texts:
                refuse_other_upstream_grads(texts)

    def on_exception(self, exception: BaseException) -> None:
        """End the peers too, where one rank fails between two steps (a callback, an optimizer, Lightning itself)."""
        if self._is_exception_told:
            return
        self._is_exception_told = True
        who = liveness.explain() if liveness.is_lost_connection(exception) else None
        if who is not None:
            _log.error("%s", liveness.lost_peer_error("its program", who, exception))
        liveness.report(exception)
        if who is not None:
            return
        module = self._strategy.lightning_module
        trainer = attached_trainer(module) if module is not None else None
        if trainer is None or not isinstance(exception, Exception):
            return
        if getattr(exception, "collective", False):
            # learnt from the whole world, by a backward for instance: parts of it that were told apart are still to be met
            handshake.notify_subgroups(exception, "training")
            return
        with contextlib.suppress(Exception):  # Lightning goes on with the exception itself
            if self._evaluation_ends.is_inside:
                self._evaluation_ends.fail(trainer, exception)
            # without check_calls the peers open no handshake in which they could be told
            if trainer.training and self.call_check is not None:
                handshake.raise_in_all_groups(exception, "training")

    def teardown(self) -> None:
        """Give the module back as it came."""
        liveness.end_run()
        for patch in (*self._loss_patches, *self._unregistered_patches):
            patch.remove()
        if self.call_check is not None:
            self.call_check.remove()
        self.adoption.remove(self._strategy.lightning_module)
        self.sharding.remove()
        self._places.teardown()
        self.global_samplers.remove()
        self.evaluation.teardown()
        self._evaluation_ends.remove()
        self._loader_states.remove()
        self._requeue.remove(attached_trainer(self.module))
        self._termination.remove()
        self.after_error.remove(attached_trainer(self.module))
        if self._ends is not None:
            self._ends.remove()

    def forget(self) -> None:
        """Forget the fit, when Lightning has torn down its own part."""
        self._reset()

    # ------------------------------------------------------------------ help

    @contextlib.contextmanager
    def raise_on_all_ranks(self, where: str) -> Iterator[None]:
        """Raise on every rank what fails on one inside the block."""
        try:
            yield
        except Exception as error:
            self._raise_on_all_ranks(error, where)

    def _raise_on_all_ranks(self, error: Exception, where: str) -> NoReturn:
        """Raise this rank's error, and let the peers have it at their next handshake."""
        try:
            liveness.raise_lost_peer(error, where)
        except PeerError as named:
            error = named
        meet_in_backward = self.check_calls or (self._ends is not None and self._ends.lacks_rows)
        if where == "training_step" and not meet_in_backward:
            handshake.notify_subgroups(error, where)
            raise error  # the world opens no handshake in which it could be told
        handshake.raise_in_all_groups(error, where)
