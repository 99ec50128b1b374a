"""`DDPLossStrategy`: distributed data parallelism for learnable losses, next to the model's own DDP.

The model's DDP ignores the losses' parameters. `LossReducer` does for them what DDP does, at one place and by name. The module that the
user sees keeps its attributes, parameter names and checkpoint keys.

Only the parts that are particular to DDP: the wrap, the start of the world, checkpoints of whole modules. The common part of all
strategies is in ``loss_hooks`` (Lightning's hooks) and ``loss_parallelism`` (their work).
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

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import expect
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.fit_part import LossOptions
from lightning_ddp_losses.strategies.loss_hooks import LossHooks, with_losses
from lightning_ddp_losses.strategies.loss_parallelism import LossParallelism


class DDPLossStrategy(LossHooks, DDPStrategy):
    """DDP that gives every learnable loss the mean of its gradients, regardless of the calls of each rank and their order.

    Equivalent to: ``Trainer(strategy="ddp")`` on a module that calls all its losses once on every rank, but right also
    for losses that alternate, that are called several times or in another order per rank, parameters
    that are created, replaced, frozen or unfrozen later, a frozen encoder, half precision.

    Args:
        losses: ``"auto"`` finds them by type (pytorch-metric-learning, torch.nn, metrics with trainable parameters,
            ``register_loss_type``). A list names modules. Another string is a regular expression over whole paths. A loss
            that is named and has no parameters is noted. ``[]`` is plain ``ddp``.
        adopt: Register an unregistered loss that an optimizer holds (``_adopted_losses.<path>``) instead of refusing it.
        check_calls: Exchange one handshake in each synchronising backward: ranks that called different losses get the same
            error there. Without it they may hang, and only gradients missing after backward are noticed.
        loss_reduce_dtype: dtype of the losses' gradients on the wire (``torch.bfloat16`` or its name). None: their own,
            and at least float32 where small gradients share a buffer.
        global_batch: ``"auto"`` evaluates the PML losses it finds over the rows of all ranks, as ``GlobalBatchLoss`` does, without
            a change to the module.
        sharded_checkpoints: Save a folder of ``torch.distributed.checkpoint`` if there is a ``ClassShardedLoss``: each rank writes its
            classes, and no rank needs memory for the whole weight. ``whole_checkpoint`` makes one file of it. Either way a checkpoint that
            is damaged or mixed up is an error on every rank when it is loaded.
        accumulation: ``"mean"``: what ``accumulate_grad_batches`` means in Lightning, the mean of the micro-batches' losses, each divided
            by its own count. ``"window"``: the loss of one process on all rows of all ranks and micro-batches, divided by what they
            count together. The last, shorter window of an epoch too. For losses with a known divisor: ``GlobalBatchLoss`` in mode
            ``elements``, ``global_mean``, ``ClassShardedLoss``, differentiable MeanSquaredError and MeanAbsoluteError. Any other term is
            an error that names it. Layers that look at the batch (batch norm) see a micro-batch all the same. In
            manual optimisation there is ``window``.

            With a method ``loss_counts(batch)`` of the module the counts come first, which is the normal case for language models and
            detection: gradients are divided by the right number from the first backward on, losses need not count in proportion, other
            terms may be added, and weights of losses may be learned. What is back-propagated is then the mean over the window's
            micro-batches, of a shorter window too: a term that each of them adds counts once. The value of a loss is its share times
            their number, so the mean of the values that are logged in a window is the window's loss.

            The method gets a batch of this rank as the loader gives it, before hooks and the transfer to the device, and returns what
            ``counts`` of ``accumulation_window`` takes, for this batch. The batches of a window are read, and kept on the host, before its
            first step, so a loader must not reuse their memory; their counts take one handshake. A ``training_step`` that returns None,
            which Lightning allows on one rank, is an error then, as its batch was counted. Without the method it does not count. A
            checkpoint inside a window resumes at its first batch.
        use_global_sampler: Give training loaders without a custom sampler the batches of ``GlobalBatchSampler`` (G is ``batch_size``
            times W) in place of Lightning's ``DistributedSampler``: each row once per epoch, in the loader's order or shuffled (by another
            permutation than plain ``ddp``), and resumed at its place on any number of ranks with the same G. Also with ``devices=1``.
        evaluation: ``"exact"``: validation, test and prediction see each row once. Where Lightning would inject a sampler that repeats
            rows, every rank gets its contiguous part of each global batch, in the order of the data set: as many batches as the others,
            and some may have one row less. (With batches of one row some ranks may have one batch less; a step that exchanges
            something is refused there, and so are fewer rows than ranks.) Custom samplers, batch samplers too, and iterable data
            sets are left alone. ``"padded"``: Lightning's way: some rows count twice.
        uneven: Treatment of different numbers of training batches on the ranks. ``"error"``: the same error on every rank, before the
            first batch where lengths are known, else one batch before a rank runs out. ``"stop"``: an epoch ends on every rank with the
            first that runs out. Rank 0 lists once the batches that are left out. ``"join"``: ranks that ran out go on with batches of 0
            rows until all are done. That is exact if every loss is over the rows of all ranks. Any other loss, and plain batch norm, is
            an error on every rank at the first empty batch, before its gradient is reduced.
        randomness: ``"rank"``: each rank draws dropout and noise from its generators, which ``seed_everything`` puts into one state on all
            ranks. ``"global"``: in ``training_step`` and backward they are the numbers that one process draws for all rows
            (``global_randomness``). The rows are in dimension 0 of every tensor of the batch. Steps have generators of their own, which
            begin with the run's seed and are in the checkpoint, so another number of ranks continues with the same numbers. What cannot
            be drawn so is the same error on every rank, with the user's line. One handshake at the beginning of a step and one at its end.
            Draws in other hooks are each rank's own. A tensor of the batch without rows must not have as many entries as there are rows.
        **ddp_kwargs: What ``lightning.pytorch.strategies.DDPStrategy`` takes.
            ``ddp_comm_hook`` (PowerSGD, fp16, bf16, ...) works on the model's DDP only: gradients of losses, of class shards, and those
            that global losses and metrics exchange in backward do not pass through it and stay exact. To halve the bytes of the losses'
            own reduction there is ``loss_reduce_dtype``.

    Gradient: after backward, and before the hooks ``on_after_backward``, every parameter holds the mean over ranks, once per
        synchronising backward.

    Communication: per synchronising backward, next to the model's DDP: one handshake (``check_calls``), one all-reduce for all small
        gradients of losses together (on the CPU few bytes travel in the handshake), one for each gradient over 1 MiB. None in a step of
        validation, test, predict. One handshake when an evaluation loader is set up, and one after the last batch of an evaluation. For
        ``uneven``: one handshake at the start of a training epoch. One per fetch if a training loader has no length. Three handshakes more
        for each checkpoint that is saved, two for one that is loaded. One before each ``barrier``, ``broadcast``, ``reduce`` and
        ``all_gather`` of the strategy over all ranks (``self.log(..., sync_dist=True)``).

    Raises:
        ConfigurationError: options or names that cannot work.
        HiddenLossError: on every rank, for a trainable loss that is not registered.
        LossCallError: on every rank, for a loss that ran on some ranks only.
        InputError: on every rank, for inputs that a loss on any rank cannot take, for numbers of training batches that differ
            (``uneven``) or are not those that ``len()`` of a loader says, and for a checkpoint saved in an epoch of another
            ``GlobalBatchSampler`` (its seed, length or global batch too), one that is damaged or cut off, and one of other sizes or of
            another loss.
        DDPLossError: on every rank, for a checkpoint that one rank could not write. Former ones stay as they were.
        PeerError: on every rank that is left, naming a rank that failed, was killed, or stands still.
        RankMismatchError: on every rank, if only some make a call of Lightning's that all ranks must make (``trainer.save_checkpoint``
            or ``self.log(..., sync_dist=True)`` inside ``if trainer.is_global_zero``), with the user's line.
        RankMismatchError: on every rank, before anything is reduced, for a global loss or metric that ranks weigh differently (on an
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
        randomness: Literal["rank", "global"] = "rank",
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
        """Choose Lightning's launcher. A launcher that starts processes brings back whole sharded weights."""
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = ddp_setup.WholeStateLauncher(self, start_method=self._start_method)
        ddp_setup.refuse_notebook(self._launcher, "ddp_losses")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Adopted losses are registered in ``setup``. A checkpoint that holds them must wait for that."""
        return self._losses.options.adopt or super().restore_checkpoint_after_setup

    def setup(self, trainer: pl.Trainer) -> None:
        """Find the losses, wrap the rest of the module, synchronise both."""
        self._layer_sync = ddp_setup.choose_layer_sync(self.root_device, self._layer_sync)
        super().setup(trainer)

    def refuse_module(self, module: pl.LightningModule) -> None:
        """Refuse parameters that are divided, and a static graph in manual optimisation."""
        ddp_setup.refuse_sharded_parameters(module)
        ddp_setup.refuse_static_graph_by_hand(module, self._ddp_kwargs)

    @with_losses
    def configure_ddp(self) -> None:
        """Compare names, wrap the model without the losses' parameters, broadcast those."""
        self._losses.compare_ranks()
        plan = self._wrap()
        ddp_setup.broadcast_unsynchronised(plan.unsynchronised, self._ddp_kwargs)
        first_bucket = self._first_bucket(plan)
        self._losses.start_reducing(plan.reduced, plan.ignored_by_user, first_bucket=first_bucket)
        self._losses.note_unusual()

    def _wrap(self) -> ddp_setup.WrapPlan:
        """Let Lightning wrap the module in a DDP without the losses' parameters, if any are left."""
        module = self._losses.module
        self._graph_is_recorded = False
        plan = ddp_setup.plan(module, self._losses.found)
        if plan.reduced:  # else DDP would refuse the module
            with ddp_setup.ignoring(module, plan.ignored):
                super().configure_ddp()
            if self._sends_late:
                assert self.wrapped_model is not None
                ddp_setup.reduce_after_backward(self.wrapped_model, self._losses.exchange_calls)
        return plan

    def _first_bucket(self, plan: ddp_setup.WrapPlan) -> float:
        """Return the bytes of gradient that must be ready before the model's DDP sends any."""
        return math.inf if self._sends_late else ddp_setup.first_bucket(plan.reduced, self._ddp_kwargs)

    @property
    def _sends_late(self) -> bool:
        """Whether ranks may use different parts of the model next to a loss that communicates in backward."""
        is_global = bool(self._losses.options.global_batch) or any(
            loss.sees_global_batch for loss in self._losses.found
        )
        has_hook = compat.has_ddp_comm_hook(self)
        return is_global and not has_hook and bool(self._ddp_kwargs.get("find_unused_parameters", False))

    # ------------------------------------------------------------------ steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Look for parameters frozen since the model was wrapped."""
        super().on_train_batch_start(batch, batch_idx)
        frozen = self._frozen_names()
        # with a state of the hook ``pre_backward`` refuses it and informs the peers
        if frozen and compat.ddp_comm_state(self) is None:
            self._leave_out_frozen(frozen)

    def _frozen_names(self) -> list[str]:
        """Return the names of frozen parameters whose gradients the model's DDP would wait for."""
        reducer = self._losses.reducer
        if reducer is None or self.wrapped_model is None:
            return []
        return ddp_setup.frozen_names(self._losses.module, reducer.parameters.elsewhere.values())

    def _leave_out_frozen(self, frozen: list[str]) -> None:
        """Wrap the model again without frozen parameters that its DDP reduces: DDP would wait for their gradients.

        (Lightning's ``BaseFinetuning`` and hooks freeze before this hook, and outside ``no_sync``.) No collective here: other ranks may
        already be inside DDP's forward, which broadcasts buffers. The call check compares the frozen names.

        Communication: none. Without ``check_calls`` one handshake where something was frozen.
        """
        assert self._losses.reducer is not None
        parameters = self._losses.reducer.parameters
        if not self._losses.options.check_calls:
            with self._losses.raise_on_all_ranks("on_train_batch_start"):
                what = "parameters frozen since the model was wrapped"
                handshake.all_gather_between_steps(what, {"names": ", ".join(frozen)})
        self.model = self._losses.module  # the old DDP leaves its hooks with its last reference
        # no second broadcast: it would hide a difference between ranks
        kwargs, self._ddp_kwargs = self._ddp_kwargs, {**self._ddp_kwargs, "init_sync": False}
        try:
            plan = self._wrap()
        finally:
            self._ddp_kwargs = kwargs
        parameters.leave_out(plan.reduced, self._first_bucket(plan), frozen)
        if self._losses.call_check is not None:
            self._losses.call_check.watch_gradients()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuse parameters that were frozen since the step began, then prepare the call check."""
        wrapped = self.wrapped_model
        if wrapped is not None and self.sync_gradients and not wrapped.find_unused_parameters:
            frozen = self._frozen_names()
            if frozen:
                with self._losses.raise_on_all_ranks("training_step"):
                    ddp_setup.refuse_frozen(frozen, compat.ddp_comm_state(self))
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Take note that a static graph is known now."""
        super().post_backward(closure_loss)
        self._graph_is_recorded = self._graph_is_recorded or self.sync_gradients

    def broadcast_buffers(self) -> None:
        """Do the work of DDP's forward if there is no DDP around the model."""
        if self.wrapped_model is None and self.sync_gradients:
            ddp_setup.broadcast_buffers(self._losses.module, self._losses.found, self._ddp_kwargs)

    @with_losses
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Suspend reduction inside the block. Accumulated gradients are reduced at the next synchronising backward.

        The first backward of a static graph does synchronise: torch's DDP records the graph there, and ends in an internal assertion
        otherwise (torch 2.13). The result is the same, as the mean of a sum is the sum of the means.
        """
        ddp = self.wrapped_model
        if ddp is not None and ddp.static_graph and not self._graph_is_recorded:
            yield
            return
        with super().block_backward_sync():
            yield

    def on_exception(self, exception: BaseException) -> None:
        """Name this strategy in Lightning's advice about unused parameters: its own would lead to plain DDP."""
        super().on_exception(exception)
        theirs, ours = "'ddp_find_unused_parameters_true'", f"'{self.strategy_name}_find_unused_parameters_true'"
        if any(theirs in str(argument) for argument in exception.args):
            text = str(exception.args[0]).replace(theirs, ours).replace("=DDPStrategy(", f"={type(self).__name__}(")
            exception.args = (text, *exception.args[1:])

    @property
    def wrapped_model(self) -> DistributedDataParallel | None:
        """The model's DDP. None if only losses train."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        ddp = self.wrapped_model
        return not self._sync_blocked if ddp is None else bool(ddp.require_backward_grad_sync)
