"""`DDPLossStrategy`: distributed data parallelism for learnable losses, next to the model's own DDP.

The model's DDP ignores the losses' parameters. `LossReducer` does for them what DDP does, in one place and by name. The user's module keeps
its attributes, parameter names and checkpoint keys.

This file contains only the parts that are specific to DDP: the wrap, the start of the world, and checkpoints of whole modules. The part
that all strategies share is in ``loss_hooks`` (Lightning's hooks) and ``loss_parallelism`` (their implementation).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import expect
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.fit_part import LossOptions
from lightning_ddp_losses.strategies.loss_hooks import LossHooks, with_losses
from lightning_ddp_losses.strategies.loss_parallelism import LossParallelism


class DDPLossStrategy(LossHooks, DDPStrategy):
    """DDP that gives every learnable loss the mean of its gradients, regardless of the calls of each rank and their order.

    Equivalent to: ``Trainer(strategy="ddp")`` on a module that calls all its losses once on every rank. It is also correct for losses that
    alternate, or are called several times or in a different order on each rank, for parameters that are created, replaced, frozen or
    unfrozen later, for a frozen encoder, and in half precision.

    Args:
        losses: ``"auto"`` finds losses by type (pytorch-metric-learning, torch.nn, metrics with trainable parameters,
            ``register_loss_type``). A list contains names of modules. Any other string is a regular expression for whole paths. A log
            message is shown for a named loss without parameters. ``[]`` is plain ``ddp``.
        adopt: Register an unregistered loss whose parameters are in an optimizer (``_adopted_losses.<path>``) instead of rejecting it.
        check_calls: Exchange one handshake in each synchronising backward, in which ranks that called different losses raise the same
            error. Without it they may hang, and only gradients that are missing after backward are detected.
        loss_reduce_dtype: dtype in which the losses' gradients are communicated (``torch.bfloat16`` or its name). If None, their own dtype,
            and at least float32 if small gradients share a buffer.
        global_batch: ``"auto"`` evaluates the PML losses that it finds over the rows of all ranks, like ``GlobalBatchLoss``, without a
            change to the module.
        sharded_checkpoints: Save a folder of ``torch.distributed.checkpoint`` if there is a ``ClassShardedLoss``. Each rank writes its
            classes, and no rank needs memory for the whole weight. ``whole_checkpoint`` converts the folder to one file. In both formats, a
            checkpoint that is damaged or mixed up is an error on every rank when it is loaded.
        accumulation: ``"mean"``: Lightning's meaning of ``accumulate_grad_batches``, the mean of the micro-batches' losses, each divided by
            its own count. ``"window"``: the loss of one process on all rows of all ranks and micro-batches, divided by their joint count,
            also in a shorter window at the end of an epoch. This requires losses with a known divisor: ``GlobalBatchLoss`` in mode
            ``elements``, ``global_mean``, ``ClassShardedLoss``, differentiable MeanSquaredError and MeanAbsoluteError. Any other term is an
            error that names it. Layers that depend on the batch (batch norm) still process one micro-batch at a time. In manual
            optimisation, use ``window``.

            If the module has a method ``loss_counts(batch)``, the counts are known in advance, which is the normal case for language models
            and detection. Gradients are then divided by the correct number from the first backward on, losses do not have to count in
            proportion, other terms may be added, and weights of losses may be learned. In this case the mean over the window's
            micro-batches is back-propagated, also in a shorter window, so a term that each micro-batch adds counts once. The value of a
            loss is its share times their number, so the mean of the values that are logged in a window is the window's loss.

            The method receives a batch of this rank from the loader, before hooks and the transfer to the device. For this batch it returns
            a value that ``counts`` of ``accumulation_window`` accepts. The batches of a window are read and stored on the host before its
            first step, so a loader must not reuse their memory. Their counts are exchanged in one handshake. In this case, a
            ``training_step`` that returns None, which Lightning allows on one rank, is an error, because its batch has been counted.
            Without the method, such a batch does not count. A checkpoint inside a window resumes at its first batch.
        use_global_sampler: Use the batches of ``GlobalBatchSampler`` (G is ``batch_size`` times W) instead of Lightning's
            ``DistributedSampler`` in training loaders without a custom sampler. Each row is used once per epoch, in the loader's order or
            shuffled (by a different permutation than in plain ``ddp``), and training resumes at the same position on any number of ranks
            with the same G. This also applies with ``devices=1``.
        evaluation: ``"exact"``: validation, test and prediction use each row once. If Lightning would inject a sampler that repeats rows,
            every rank receives its contiguous part of each global batch, in the order of the dataset. All ranks have the same number of
            batches, some of which may have one row less. (With batches of one row, some ranks may have one batch less. A step that
            communicates is rejected in that case, as is a loader with fewer rows than ranks.) Custom samplers, including batch samplers,
            and iterable datasets are not changed. ``"padded"``: Lightning's behaviour, in which some rows count twice.
        uneven: Treatment of different numbers of training batches on the ranks. ``"error"``: the same error on every rank, before the
            first batch if lengths are known, otherwise one batch before a rank runs out. ``"stop"``: an epoch ends on every rank when the
            first rank runs out. Rank 0 lists the batches that are dropped, once. ``"join"``: ranks that ran out continue with batches of 0
            rows until all ranks have finished. This is exact if every loss is over the rows of all ranks. Any other loss, and plain batch
            norm, is an error on every rank at the first empty batch, before its gradient is reduced.
        randomness: ``"rank"``: each rank draws dropout and noise from its generators, which ``seed_everything`` sets to the same state on
            all ranks. ``"global"``: in ``training_step`` and backward, ranks draw the numbers that one process draws for all rows
            (``global_randomness``). Rows must be in dimension 0 of every tensor of the batch. Steps have separate generators, which are
            seeded with the run's seed and saved in the checkpoint, so a different number of ranks continues with the same numbers. A draw
            for which this is impossible is the same error on every rank, with the user's line. This takes one handshake at the beginning of
            a step and one at its end. ``"by_row"``: the same, but a rank draws for its own rows only. Numbers then differ from those of
            plain torch, and training on any number of ranks, including one, is equal to training in one process with this option. A draw
            in another hook between a batch and its step (``on_before_batch_transfer``, ``on_after_batch_transfer``,
            ``on_train_batch_start``) is an error, and so is one in ``on_after_backward``. Later hooks (``on_before_optimizer_step``,
            ``optimizer_step``, ``on_train_batch_end``) draw from the generators of each rank, which changes no training step. The length
            of a tensor without rows in the batch must differ from the number of rows.
        **ddp_kwargs: Options of ``lightning.pytorch.strategies.DDPStrategy``.
            ``ddp_comm_hook`` (PowerSGD, fp16, bf16, ...) only applies to the model's DDP. Gradients of losses and class shards, and
            gradients that global losses and metrics exchange in backward, bypass the hook and remain exact. To halve the bytes of the
            losses' own reduction, use ``loss_reduce_dtype``.

    Gradient: after backward, and before the hooks ``on_after_backward``, the gradient of every parameter is the mean over ranks, once per
        synchronising backward.

    Communication: per synchronising backward, in addition to the model's DDP: one handshake (``check_calls``), one all-reduce for all small
        gradients of losses together (on the CPU a few bytes are sent in the handshake), one for each gradient over 1 MiB. None in a step of
        validation, test or prediction. One handshake when an evaluation loader is set up, and one after the last batch of an evaluation.
        For ``uneven``: one handshake at the start of a training epoch, and one per fetch if a training loader does not have a length. Three
        additional handshakes for each checkpoint that is saved, and two for each checkpoint that is loaded. One before each ``barrier``,
        ``broadcast``, ``reduce`` and ``all_gather`` of the strategy over all ranks (``self.log(..., sync_dist=True)``).

    Raises:
        ConfigurationError: options or names that cannot work.
        HiddenLossError: on every rank, for a trainable loss that is not registered.
        LossCallError: on every rank, for a loss that ran only on some ranks.
        InputError: on every rank, for inputs that a loss on any rank does not accept, and for numbers of training batches that differ
            between ranks (``uneven``) or from ``len()`` of a loader. Also for a checkpoint saved in an epoch of another
            ``GlobalBatchSampler`` (including a different seed, length or global batch), and for a checkpoint that is damaged or truncated,
            or has other sizes or another loss.
        DDPLossError: on every rank, for a checkpoint that one rank could not write. Earlier checkpoints are unchanged.
        PeerError: on every remaining rank, naming a rank that failed, was killed, or stalled.
        RankMismatchError: on every rank, if only some ranks make a Lightning call that all ranks must make (``trainer.save_checkpoint``
            or ``self.log(..., sync_dist=True)`` inside ``if trainer.is_global_zero``), with the user's line.
        RankMismatchError: on every rank, before anything is reduced, for a global loss or metric that ranks weight differently (on an
            accelerator: at the next call).

    Example:
        >>> import lightning_ddp_losses
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(strategy="ddp_losses", accelerator="cpu", devices=2)
    """

    strategy_name = "ddp_losses"

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
        randomness: Literal["rank", "global", "by_row"] = "rank",
        **ddp_kwargs: Any,
    ) -> None:
        options = LossOptions.from_arguments({**locals(), **ddp_setup.without_defaults(ddp_kwargs)})
        super().__init__(**ddp_kwargs)
        if ddp_kwargs.get("checkpoint_io") is not None:
            self.checkpoint_io = ddp_kwargs["checkpoint_io"]
        self._ddp_kwargs = ddp_setup.without_defaults(self._ddp_kwargs)
        ddp_setup.refuse_unknown_options(type(self), self._ddp_kwargs)
        expect(
            accumulation == "mean" or not self._ddp_kwargs.get("static_graph", False),
            "accumulation='window'",
            expected="static_graph=False",
            got="static_graph=True, with which torch's DDP cannot accumulate",
            fix="Leave static_graph out.",
        )
        self._losses = LossParallelism(self, options)
        self._graph_is_recorded = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register an alias of every name under which Lightning registers ``ddp``."""
        ddp_setup.register_aliases(strategy_registry, DDPStrategy, cls)

    # ------------------------------------------------------------------ set-up

    def _configure_launcher(self) -> None:
        """Choose Lightning's launcher. A launcher that starts processes returns whole weights instead of shards."""
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = ddp_setup.WholeStateLauncher(self, start_method=self._start_method)
        ddp_setup.refuse_notebook(self._launcher, "ddp_losses")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are restored after ``setup``, which registers the adopted losses that they may contain."""
        return self._losses.options.adopt or super().restore_checkpoint_after_setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Find the losses, wrap the module without them, and synchronise both."""
        self._layer_sync = ddp_setup.choose_layer_sync(self.root_device, self._layer_sync)
        super().setup(trainer)

    def refuse_module(self, module: pl.LightningModule) -> None:
        """Reject divided parameters, and a static graph in manual optimisation."""
        ddp_setup.refuse_sharded_parameters(module)
        ddp_setup.refuse_static_graph_by_hand(module, self._ddp_kwargs)

    @with_losses
    def configure_ddp(self) -> None:
        """Compare names, wrap the model without the losses' parameters, and broadcast these parameters."""
        self._losses.compare_ranks()
        plan = self._wrap()
        ddp_setup.broadcast_unsynchronised(plan.unsynchronised, self._ddp_kwargs)
        first_bucket = self._first_bucket(plan)
        self._losses.start_reducing(plan.reduced, plan.ignored_by_user, first_bucket=first_bucket)
        self._losses.note_unusual()

    def _wrap(self) -> ddp_setup.WrapPlan:
        """Let Lightning wrap the module in DDP without the losses' parameters, unless there are no other parameters."""
        module = self._losses.module
        self._graph_is_recorded = False
        plan = ddp_setup.plan(module, self._losses.found)
        if plan.reduced:  # otherwise DDP would reject the module
            with ddp_setup.ignoring(module, plan.ignored):
                super().configure_ddp()
            if self._sends_late:
                assert self.wrapped_model is not None
                ddp_setup.reduce_after_backward(self.wrapped_model, self._losses.exchange_calls)
        return plan

    def _first_bucket(self, plan: ddp_setup.WrapPlan) -> float:
        """Return the number of gradient bytes that must be ready before the model's DDP sends any."""
        return math.inf if self._sends_late else ddp_setup.first_bucket(plan.reduced, self._ddp_kwargs)

    @property
    def _sends_late(self) -> bool:
        """Whether ranks may use different parts of the model next to a loss that communicates in backward."""
        is_global = bool(self._losses.options.global_batch) or any(
            loss.sees_global_batch for loss in self._losses.found
        )
        has_hook = lightning_compat.has_ddp_comm_hook(self)
        return is_global and not has_hook and bool(self._ddp_kwargs.get("find_unused_parameters", False))

    # ------------------------------------------------------------------ steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Find parameters that were frozen after the model was wrapped."""
        super().on_train_batch_start(batch, batch_idx)
        frozen = self._frozen_names()
        # if the communication hook has a state, ``pre_backward`` raises the error and informs the peers
        if frozen and lightning_compat.ddp_comm_state(self) is None:
            self._leave_out_frozen(frozen)

    def _frozen_names(self) -> list[str]:
        """Return the names of frozen parameters whose gradients the model's DDP would wait for."""
        reducer = self._losses.reducer
        if reducer is None or self.wrapped_model is None:
            return []
        return ddp_setup.frozen_names(self._losses.module, reducer.parameters.elsewhere.values())

    def _leave_out_frozen(self, frozen: list[str]) -> None:
        """Wrap the model again without frozen parameters, because DDP would wait for their gradients.

        (Lightning's ``BaseFinetuning`` and hooks freeze before this hook, and outside ``no_sync``.) It does not communicate, because other
        ranks may already be inside DDP's forward, which broadcasts buffers. The call check compares the names of frozen parameters.

        Communication: none. Without ``check_calls``, one handshake if parameters were frozen.
        """
        assert self._losses.reducer is not None
        parameters = self._losses.reducer.parameters
        if not self._losses.options.check_calls:
            with self._losses.raise_on_all_ranks("on_train_batch_start"):
                what = "parameters frozen since the model was wrapped"
                handshake.all_gather_between_steps(what, {"names": ", ".join(frozen)})
        self.model = self._losses.module  # the old DDP removes its hooks when its last reference is dropped
        # do not broadcast again, which would hide a difference between ranks
        kwargs, self._ddp_kwargs = self._ddp_kwargs, {**self._ddp_kwargs, "init_sync": False}
        try:
            plan = self._wrap()
        finally:
            self._ddp_kwargs = kwargs
        parameters.leave_out(plan.reduced, self._first_bucket(plan), frozen)
        if self._losses.call_check is not None:
            self._losses.call_check.watch_gradients()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Reject parameters that were frozen after the step began, then prepare the call check."""
        wrapped = self.wrapped_model
        if wrapped is not None and self.sync_gradients and not wrapped.find_unused_parameters:
            frozen = self._frozen_names()
            if frozen:
                with self._losses.raise_on_all_ranks("training_step"):
                    ddp_setup.refuse_frozen(frozen, lightning_compat.ddp_comm_state(self))
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Record that DDP has recorded a static graph."""
        super().post_backward(closure_loss)
        self._graph_is_recorded = self._graph_is_recorded or self.sync_gradients

    def broadcast_buffers(self) -> None:
        """Broadcast buffers like DDP's forward if the model is not wrapped in DDP."""
        if self.wrapped_model is None and self.sync_gradients:
            ddp_setup.broadcast_buffers(self._losses.module, self._losses.found, self._ddp_kwargs)

    @with_losses
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Suspend reduction inside the block. Accumulated gradients are reduced at the next synchronising backward.

        The first backward of a static graph always synchronises, because torch's DDP records the graph in it and otherwise fails with an
        internal assertion (torch 2.13). The result is the same, because the mean of a sum is the sum of the means.
        """
        ddp = self.wrapped_model
        if ddp is not None and ddp.static_graph and not self._graph_is_recorded:
            yield
            return
        with super().block_backward_sync():
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Replace the strategy's name in Lightning's advice about unused parameters, which would otherwise suggest plain DDP."""
        super().on_exception(exception)
        theirs, ours = "'ddp_find_unused_parameters_true'", f"'{self.strategy_name}_find_unused_parameters_true'"
        if any(theirs in str(argument) for argument in exception.args):
            text = str(exception.args[0]).replace(theirs, ours).replace("=DDPStrategy(", f"={type(self).__name__}(")
            exception.args = (text, *exception.args[1:])

    @property
    def wrapped_model(self) -> DistributedDataParallel | None:
        """The model's DDP wrapper, or None if only losses are trained."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients. False in a step that only accumulates."""
        ddp = self.wrapped_model
        return not self._sync_blocked if ddp is None else bool(ddp.require_backward_grad_sync)
