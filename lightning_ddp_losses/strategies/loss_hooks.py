"""`LossHooks`: Lightning's hooks that are common to all strategies with learnable losses, in the order of a fit.

The hooks call ``LossParallelism``. The strategies themselves parallelise the model (``ddp_losses``, ``fsdp_losses``).

A checkpoint is a file that one process could have written, or a folder into which each rank writes its parts (``checkpoint_folder``).
Training can continue from both under any strategy and on any number of ranks. A file is either complete or does not exist, and an error on
one rank is an error on all ranks (``checkpoint_files``). ``shards`` joins the weights that are divided over the ranks, and divides them
again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lightning_ddp_losses.core.lightning_compat import attached_trainer, unwrapped_optimizer
from lightning_ddp_losses.core.precision import without_autocast
from lightning_ddp_losses.core.transparent import saved_names
from lightning_ddp_losses.distributed import liveness, process_groups
from lightning_ddp_losses.distributed.accumulation import AccumulationWindow
from lightning_ddp_losses.distributed.global_values import forget_late_notes
from lightning_ddp_losses.distributed.shard import tags_kept
from lightning_ddp_losses.distributed.window_terms import Counts
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.strategies import checkpoint_files, named_calls, shards
from lightning_ddp_losses.strategies.checkpoint_files import BLOCKS, METADATA, is_folder
from lightning_ddp_losses.strategies.ddp_setup import start_strategy_world
from lightning_ddp_losses.strategies.fit_part import HostStrategy
from lightning_ddp_losses.strategies.interruptions import Interruptions, refuse_alone
from lightning_ddp_losses.strategies.loss_parallelism import PARTS, LossParallelism
from lightning_ddp_losses.strategies.windows import LightningWindows

H = TypeVar("H", bound=Callable[..., Any])
TensorT = TypeVar("TensorT", bound=Tensor)


def with_losses(hook: H) -> H:
    """Run a hook only if the strategy handles losses. With ``losses=[]``, Lightning's hook runs instead."""

    @functools.wraps(hook)
    def run(self: LossHooks, *args: Any, **kwargs: Any) -> Any:
        if self._losses.parts:
            return hook(self, *args, **kwargs)
        return getattr(super(LossHooks, self), hook.__name__)(*args, **kwargs)

    return cast(H, run)


class LossHooks(HostStrategy):
    """Lightning's hooks around steps and checkpoints. This class must precede Lightning's strategy in the list of base classes.

    Attributes:
        closure_loss: The loss while its backward runs, for attached checks. Otherwise None.
    """

    kinds_of_parts = PARTS

    _losses: LossParallelism
    closure_loss: Tensor | None = None
    _loaded_from: Any = None  # path of the checkpoint, quoted in errors

    def __copy__(self) -> LossHooks:
        """Return a strategy with the same options and separate losses."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin._losses = LossParallelism(twin, self._losses.options)
        return twin

    @property
    def _writes_folder(self) -> bool:
        """Whether a checkpoint is a folder."""
        return self._losses.options.sharded_checkpoints and self._losses.is_divided

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        """Create the process group, with keys that no earlier attempt has written. Internal groups use its timeout."""
        is_external, timeout = process_groups.is_distributed(), self._timeout  # type: ignore[attr-defined]  # of both strategies
        self.set_world_ranks()  # type: ignore[attr-defined]  # as above
        if not is_external and self.world_size > 1:
            start_strategy_world(self, timeout)
        super().setup_environment()
        process_groups.set_timeout(timeout)
        if not is_external:
            atexit.register(process_groups.close, world=True)
        self._losses.call("setup_environment")

    def setup(self, trainer: pl.Trainer) -> None:
        """Find the losses, let Lightning set up the model without their parameters, and synchronise both."""
        self._losses.setup(trainer, super().setup)

    def model_to_device(self) -> None:
        """Undo the precision plugin's conversion of the losses, then move the module."""
        self._losses.precision.restore()
        with self._losses.sharding.moving(self._losses.module):
            super().model_to_device()  # type: ignore[safe-super]  # of the strategy behind this class

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader that this rank should use."""
        return super().process_dataloader(self._losses.change("process_dataloader", dataloader))

    def on_train_start(self) -> None:
        """Begin training."""
        super().on_train_start()
        forget_late_notes()
        self._losses.call("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Process the start of a training batch."""
        self._losses.call("on_train_batch_start", batch, batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step. If it fails on one rank, the other ranks raise the error in their next handshake."""
        if self._losses.reducer is None:
            return super().training_step(*args, **kwargs)
        with self._losses.training_step():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's validation step."""
        with self._losses.around("evaluation_step", args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's test step."""
        with self._losses.around("evaluation_step", args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step."""
        with self._losses.around("evaluation_step", args):
            return super().predict_step(*args, **kwargs)

    @property
    def accumulation(self) -> str:
        """Reduction over the micro-batches of a window: the ``"mean"`` of their losses, or the loss of the whole ``"window"``."""
        return self._losses.options.accumulation

    @property
    def randomness(self) -> str:
        """The random numbers that training steps draw: ``"rank"`` or ``"global"``."""
        return self._losses.options.randomness

    @property
    def evaluation(self) -> str:
        """How rows are distributed in validation, test and prediction: ``"exact"`` or ``"padded"``."""
        return self._losses.options.evaluation

    @contextlib.contextmanager
    def window(self, micro_batches: int = 1) -> Iterator[AccumulationWindow]:
        """Treat the micro-batches inside the block as one batch, in manual optimisation with ``accumulation="window"``.

        Run the forward of each in ``with window.micro_batch():``, unless ``expect_counts`` was called before and ``micro_batches`` is the
        number of calls of each loss. After the block, all gradients equal the gradients of one process on the rows of all ranks and
        micro-batches. Call the optimizer's step after the block.

        Args:
            micro_batches: Approximate number of micro-batches, which only affects the size of gradients inside the block.

        Yields:
            The window.

        Raises:
            ConfigurationError: without ``accumulation="window"``, and in all cases that ``accumulation_window`` rejects.

        Communication: one handshake at the end of the block.
        """
        if self.accumulation != "window" or self._losses.reducer is None or self._losses.module.automatic_optimization:
            raise ConfigurationError(
                "strategy.window()",
                expected="accumulation='window' and automatic_optimization = False, during fit",
                got=f"accumulation={self.accumulation!r}",
                fix="In automatic optimisation the window is what accumulate_grad_batches says.",
            )
        with self._losses.part(LightningWindows).block(micro_batches) as window:
            yield window

    def expect_counts(
        self, counts: Counts | None = None, totals: Mapping[str, float | Sequence[float]] | None = None
    ) -> None:
        """Set the counts of losses for the whole accumulation window.

        Gradients are then divided by the correct number from the start, without a correction at the end. This is required if the counts of
        losses are not in the same proportion in each micro-batch. In automatic optimisation, a method ``loss_counts(batch)`` of the module
        has the same effect. Otherwise call this on every rank before the window's first backward, in ``training_step`` or an earlier hook.

        Args:
            counts: This rank's count over all micro-batches of the window: one number for all losses, or numbers by the path of a loss in
                the module, or by the name of a ``global_mean``. A list if the loss is called several times in a micro-batch, or has several
                means.
            totals: By name of a ``global_mean``, this rank's sums over all micro-batches, for terms that are not linear in its mean.

        Raises:
            ConfigurationError: without ``accumulation="window"``.
            InputError: on every rank, for counts that are negative or not finite, or that are set too late.

        Communication: one handshake.
        """
        if self.accumulation != "window" or self._losses.reducer is None:
            raise ConfigurationError(
                "expect_counts",
                expected="accumulation='window', during fit",
                got="no window",
                fix="Remove the call, or pass accumulation='window' to the strategy.",
            )
        self._losses.part(LightningWindows).expect_counts(counts, totals)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare the call check of a synchronising backward, which is exchanged before its first gradients are sent."""
        self.closure_loss = closure_loss
        check = self._losses.call_check
        if check is not None and self.sync_gradients:
            check.start(self._losses.module.global_step)
        super().pre_backward(closure_loss)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward, and reduce the losses' gradients before the hooks ``on_after_backward`` are called.

        (Lightning 2.6 calls those hooks in the precision plugin's ``post_backward``, before the strategy's.) A ``manual_backward`` runs
        inside the autocast of ``training_step``, in which the gradients of full-precision values would be computed in half precision.
        Autocast is therefore disabled in backward, as in automatic optimisation.
        """
        if self._losses.has("backward_pass"):
            with self._losses.around("backward_pass"):
                return self._run_backward(closure_loss, optimizer, *args, **kwargs)
        return self._run_backward(closure_loss, optimizer, *args, **kwargs)

    def _run_backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        plugin, module = self.precision_plugin, self._losses.module
        closure_loss = self._losses.change("before_backward", closure_loss)
        devices = ("cpu", self.root_device.type) if self._losses.parts else ()
        try:
            self.pre_backward(closure_loss)
            closure_loss = plugin.pre_backward(closure_loss, module)
            with without_autocast(devices):
                plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            self.reduce_loss_gradients()
        except RuntimeError as error:
            liveness.raise_lost_peer(error, "backward")
            raise
        if self.accumulation == "window":
            self._losses.part(LightningWindows).after_backward()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def reduce_loss_gradients(self) -> None:
        """Average the losses' gradients over ranks if this backward synchronises. Called by ``backward``.

        Raises:
            LossCallError: on every rank, for a gradient on some ranks only.
        """
        losses = self._losses
        if losses.reducer is None or not self.sync_gradients:
            return
        calls = None if losses.call_check is None else losses.call_check.finish()
        if calls is None:
            losses.reducer.reduce()
        else:
            losses.reducer.reduce(calls.parameters, calls.expected)
            losses.advice.uneven_rows(calls.uneven)
        losses.call("on_gradients_reduced")

    def post_backward(self, closure_loss: Tensor) -> None:
        """End a backward."""
        super().post_backward(closure_loss)
        self.closure_loss = None

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Suspend reduction inside the block."""
        before, self._sync_blocked = self._sync_blocked, True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._sync_blocked = before

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step like Lightning, but after the gradients of an accumulation window have been corrected."""
        if self.accumulation == "window":
            closure = self._losses.part(LightningWindows).closed(closure, optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce like Lightning, but return the mean of integers in float64. Advise once against reducing a value that is already global.

        Lightning writes the mean of integers back into an integer tensor, which floors it. A logged epoch mean is the mean over ranks of
        their sums divided by the mean of their numbers of rows, and therefore too large if W does not divide the number of rows. (Lightning
        2.6.6, issue 21859)

        Args:
            tensor: Tensor to reduce in place. An integer tensor is not changed if its mean is computed. Other objects are returned.
            group: The process group. If None, all ranks.
            reduce_op: ``"mean"``, ``"sum"`` and so on, or one of ``torch.distributed.ReduceOp``.

        Returns:
            The reduced tensor, equal on every rank of the group.

        Raises:
            RankMismatchError: on every rank, if some rank does not call this, or reduces another logged value.

        Communication: one handshake, one barrier and one all-reduce. None after an error.
        """
        if self._losses.is_alone:
            return tensor
        self._losses.advice.global_already(tensor)
        if isinstance(tensor, Tensor) and self._meets_by_name(group):
            named_calls.meet_to_reduce(tensor, reduce_op)
        if self._losses.parts and _is_mean_of_integers(tensor, reduce_op):
            tensor = tensor.double()  # a copy; exact up to 2**53
        reduce_as_lightning = super().reduce  # type: ignore[safe-super]  # of the strategy behind this class
        return reduce_as_lightning(tensor, group, reduce_op)

    def attach_payload(
        self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None], *, name: str = "payload"
    ) -> bool:
        """Send a check's bytes in each call check, as described in ``HostStrategy.attach_payload``."""
        check = self._losses.call_check
        if check is not None:
            check.attach(name, measure, judge)
        return check is not None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads files. Lightning's default is replaced by one that never leaves incomplete files."""
        plugin: CheckpointIO = super().checkpoint_io
        # replaced only when it is used, because a strategy with a plugin would reject the Trainer's
        used = checkpoint_files.use_whole_files(plugin)
        if used is not plugin:
            self.checkpoint_io = used
        return used

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        ParallelStrategy.checkpoint_io.fset(self, checkpoint_files.use_whole_files(io))  # type: ignore[attr-defined]

    # ------------------------------------------------------------------ into a checkpoint

    @with_losses
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, which is whole on rank 0 for a file, and this rank's part for a folder. Collective."""
        losses = self._losses
        refuse_alone(losses)
        if not losses.is_alone and self._meets_by_name():
            named_calls.meet_to_save()
        losses.sharding.setup_shards()
        return self._own_state() if self._writes_folder else losses.sharding.whole_state(self._own_state())

    def whole_module_state(self, receivers: Iterable[int]) -> dict[str, Any]:
        """Return the plain module's state with adopted losses, and on ``receivers`` with whole divided parameters. Collective.

        Args:
            receivers: Ranks that receive whole parameters. Other ranks receive tensors of the same shape without memory.

        Communication: each rank sends its parts to each receiver.
        """
        self._losses.sharding.setup_shards()
        return self._losses.sharding.whole_state(self._own_state(), receivers)

    def _own_state(self) -> dict[str, Any]:
        return self._losses.adoption.state_with_adopted(self._losses.module.state_dict())

    @with_losses
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state: whole on rank 0 for a file, or this rank's part with names of parameters for a folder."""
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
        """Write a file or a folder, with the positions of global samplers and the random states of all ranks."""
        losses = self._losses
        interruptions = losses.part(Interruptions)
        with checkpoint_files.saved_on_all_ranks(filepath, is_collective=interruptions.saves_together(filepath)):
            checkpoint = losses.with_run_states(checkpoint, together=interruptions.is_collective(filepath))
            losses.sharding.setup_shards()
            as_folder = self._writes_folder
            checkpoint = losses.sharding.completed(checkpoint, as_folder=as_folder)
            if as_folder:
                _folders().write_folder(Path(filepath), checkpoint, losses.sharding.parameters)
                return
            if self.is_global_zero and is_folder(filepath):
                shutil.rmtree(filepath, ignore_errors=True)
            ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    # ------------------------------------------------------------------ out of a checkpoint

    @with_losses
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file or a folder from any strategy and number of ranks. The tensors of a folder are read later.

        A file that one rank cannot read is an error on every rank.
        """
        file, read = checkpoint_path, self._read_file
        if is_folder(checkpoint_path):
            file, read = Path(checkpoint_path) / METADATA, _folders().read_rest
        load = functools.partial(read, checkpoint_path, weights_only)
        checkpoint = checkpoint_files.load_on_all_ranks(file, load, checks_bits=self.local_rank == 0)
        self._loaded_from = checkpoint_path
        trainer = attached_trainer(self._losses.module)
        return checkpoint if trainer is None else self._losses.change("load_state_dict", checkpoint)

    def _read_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, path, weights_only=weights_only)

    @with_losses
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, only this rank's part of divided parameters, and adopted losses only if they are registered.

        Raises:
            InputError: on every rank, for a checkpoint of another module or of other classes.
        """
        losses, module = self._losses, self._losses.module
        state = losses.adoption.state_to_load(checkpoint["state_dict"])
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
            likes = _as_saved(module, checkpoint, likes)
            if BLOCKS in checkpoint:
                found = {**checkpoint, "state_dict": state}
                state = _folders().read_state(self._loaded_from, found, likes)
            else:
                state = {name: shards.own_part(value, likes.get(name)) for name, value in state.items()}
            module.load_state_dict(state, strict=strict)

    @with_losses
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of optimizers, and only this rank's part for divided parameters."""
        path, states = self._loaded_from, []
        with checkpoint_files.loaded_on_all_ranks(path, "states of optimizers"):
            pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
            parameters = _as_saved(self._losses.module, checkpoint, self._parameters)
            for number, (optimizer, saved) in enumerate(pairs):
                if BLOCKS in checkpoint:
                    own = _folders().read_optimizer_state(path, checkpoint, number, optimizer, parameters)
                else:
                    own = shards.map_optimizer_state(optimizer, saved, shards.own_part)
                states.append(own)
            ParallelStrategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the module and of adopted losses, by name."""
        return self._losses.adoption.parameters_with_adopted(self._losses.module)

    # ------------------------------------------------------------------ collective calls, which are local after an error

    def _meets_by_name(self, group: Any = None) -> bool:
        """Return whether ranks exchange a handshake before a call on a group."""
        return bool(self._losses.parts) and named_calls.is_of_all_ranks(group)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, or raise an error on every rank if some rank does not call this."""
        if self._losses.is_alone:
            return
        if self._meets_by_name():
            named_calls.meet_in("strategy.barrier", {})
        super().barrier(*args, **kwargs)  # type: ignore[safe-super]  # of the strategy behind this class

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on all ranks, or raise an error on every rank if some rank does not call this."""
        if self._losses.is_alone:
            return obj
        if self._meets_by_name():
            named_calls.meet_in("strategy.broadcast", {"src": src})
        return super().broadcast(obj, src)  # type: ignore[safe-super]  # as above

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, or raise an error on every rank if some rank does not call this or shapes differ."""
        if self._meets_by_name(group):
            named_calls.meet_in("strategy.all_gather", named_calls.shape_and_dtype(tensor))
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the ranks' joint decision."""
        return decision if self._losses.is_alone else super().reduce_boolean_decision(decision, all)

    # ------------------------------------------------------------------ end

    def on_train_end(self) -> None:
        """Check values that the last step left on an accelerator. Communication: one handshake on an accelerator."""
        super().on_train_end()
        self._losses.on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """Raise the error on the peers too if a rank fails between two steps (in a callback, an optimizer, or Lightning)."""
        super().on_exception(exception)
        self._losses.on_exception(exception)

    def teardown(self) -> None:
        """Restore the module."""
        try:
            self._losses.teardown()
            with tags_kept(self._losses.module):  # the module is moved to the CPU
                super().teardown()
        finally:
            liveness.end_run()
            self._losses.forget()
        self.closure_loss = None


def _as_saved(module: nn.Module, checkpoint: Mapping[str, Any], tensors: Mapping[str, TensorT]) -> dict[str, TensorT]:
    """Return tensors of a module by their names in a checkpoint, which may have been written by an earlier version."""
    names = saved_names(module, checkpoint["state_dict"])
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def _folders() -> Any:
    """Import and return ``checkpoint_folder`` lazily, because importing torch's checkpoint package takes half a second."""
    from lightning_ddp_losses.strategies import checkpoint_folder

    return checkpoint_folder


def _is_mean_of_integers(tensor: Any, reduce_op: Any) -> bool:
    """Return whether Lightning would floor the result of a reduction."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return False
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return bool(reduce_op == ReduceOp.AVG)


def whole_checkpoint(folder: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint in a folder that ranks wrote together, with whole tensors, on the CPU.

    Such folders are written by ``ModelParallelLossStrategy`` and ``DDPLossStrategy(sharded_checkpoints=True)``. To convert a folder to a
    file for one process without a strategy::

        from lightning_ddp_losses.strategies import whole_checkpoint

        torch.save(whole_checkpoint("logs/epoch=3.ckpt"), "epoch=3-whole.ckpt")
        module = MyModule.load_from_checkpoint("epoch=3-whole.ckpt")

    (Lightning's ``consolidate_checkpoint`` also writes a file, but in it an optimizer's state is stored by name and cannot be loaded into
    an optimizer.)

    Equivalent to: ``torch.load`` of the file that the strategy would have written instead of a folder: ``state_dict`` with whole
    parameters, including divided classes, and ``optimizer_states`` with numbered parameters.

    Args:
        folder: Path of the checkpoint. It must be trusted, because torch's format is read with pickle.
        weights_only: Passed to ``torch.load`` for everything except tensors.

    Returns:
        The checkpoint. It requires the memory of all parameters and optimizer states.

    Raises:
        InputError: if the path is not a folder of this kind.

    Communication: none. Each process that calls this reads the folder separately.
    """
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
    whole: dict[str, Any] = _folders().read_whole(path, weights_only)
    return whole
