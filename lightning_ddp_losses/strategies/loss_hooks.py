"""`LossHooks`: Lightning's hooks that all strategies with learnable losses have in common, in the order of a fit.

Each asks ``LossParallelism``; what parallelises the model stays in the strategy (``ddp_losses``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed import ReduceOp

from lightning_ddp_losses.core.precision import without_autocast
from lightning_ddp_losses.distributed import liveness
from lightning_ddp_losses.distributed.accumulation import AccumulationWindow
from lightning_ddp_losses.distributed.shard import tags_kept
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies.fit_part import FitPart
from lightning_ddp_losses.strategies.loss_parallelism import PARTS, LossParallelism
from lightning_ddp_losses.strategies.windows import LightningWindows

H = TypeVar("H", bound=Callable[..., Any])


def with_losses(hook: H) -> H:
    """Let a hook run if the strategy has losses to look after; under ``losses=[]`` Lightning's own hook runs instead."""

    @functools.wraps(hook)
    def run(self: LossHooks, *args: Any, **kwargs: Any) -> Any:
        if self._losses.parts:
            return hook(self, *args, **kwargs)
        return getattr(super(LossHooks, self), hook.__name__)(*args, **kwargs)

    return cast(H, run)


class LossHooks(ParallelStrategy):
    """Lightning's hooks around the losses' part of a step; to be named before Lightning's own strategy among the bases.

    Attributes:
        closure_loss: While its backward runs: what an attached check may look at.
    """

    kinds_of_parts: ClassVar[tuple[type[FitPart], ...]] = PARTS
    """Features of this kind of strategy."""

    _losses: LossParallelism
    closure_loss: Tensor | None = None

    def __copy__(self) -> LossHooks:
        """Return a strategy with the same options, whose losses are its own."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin._losses = LossParallelism(twin, self._losses.options)
        return twin

    @property
    def wrapped_model(self) -> Any:
        """The model's DDP; None without one."""
        return None

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether each forward of the model, in evaluation too, waits for all ranks."""
        return False

    @property
    def divides_model(self) -> bool:
        """Whether a rank holds parts of the model only."""
        return False

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        raise NotImplementedError

    def _broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers before a synchronising step, where nothing around the model does."""
        raise NotImplementedError

    # ------------------------------------------------------------------ data

    def process_dataloader(self, dataloader: object) -> object:
        """Say when Lightning destroys a sampler's structure; refuse what a global sampler cannot serve; let it resume."""
        return super().process_dataloader(self._losses.process_dataloader(dataloader))

    def on_train_start(self) -> None:
        """Begin training."""
        super().on_train_start()
        self._losses.on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Look at a training batch."""
        self._losses.call("on_train_batch_start", batch, batch_idx)
        super().on_train_batch_start(batch, batch_idx)

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step; what fails on one rank ends all of them at the peers' next handshake."""
        if self._losses.reducer is None:
            return super().training_step(*args, **kwargs)
        step = super().training_step
        return self._losses.training_step(lambda: step(*args, **kwargs), self._broadcast_buffers)

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's validation step."""
        with self._losses.evaluation_step(args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's test step."""
        with self._losses.evaluation_step(args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict step."""
        with self._losses.evaluation_step(args):
            return super().predict_step(*args, **kwargs)

    @property
    def accumulation(self) -> str:
        """What the micro-batches of a window make: the ``"mean"`` of their losses, or the loss of the whole ``"window"``."""
        return self._losses.options.accumulation

    @property
    def evaluation(self) -> str:
        """How rows are dealt in validation, test and prediction: ``"exact"`` or ``"padded"``."""
        return self._losses.options.evaluation

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
        windows = self._losses.part(LightningWindows)
        if windows is None or self._losses.reducer is None or self._losses.module.automatic_optimization:
            raise ConfigurationError(
                "strategy.window()",
                expected="accumulation='window' and automatic_optimization = False, during fit",
                got=f"accumulation={self.accumulation!r}",
                fix="In automatic optimisation the window is what accumulate_grad_batches says.",
            )
        with windows.block(micro_batches) as window:
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
        windows = self._losses.part(LightningWindows)
        if windows is None or self._losses.reducer is None:
            raise ConfigurationError("expect_counts", expected="accumulation='window', during fit", got="no window")
        modules: dict[Any, Any] = dict(self._losses.module.named_modules())
        windows.expect_counts({modules.get(name, name): count for name, count in counts.items()})

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepare the call check of a synchronising backward; backward exchanges it before its first gradients leave."""
        self.closure_loss = closure_loss
        self._losses.start_call_check()
        super().pre_backward(closure_loss)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run Lightning's backward, with the losses' gradients reduced before the hooks ``on_after_backward`` see them.

        (Lightning 2.6 calls those hooks in the precision plugin's ``post_backward``, before the strategy's.) A ``manual_backward`` runs
        inside the autocast of ``training_step``, in which even what the losses compute wide would come back in halves: it is off here,
        as it is in automatic optimisation.
        """
        plugin, module = self.precision_plugin, self._losses.module
        closure_loss = self._losses.before_backward(closure_loss)
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
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def reduce_loss_gradients(self) -> None:
        """Mean the losses' gradients over ranks, where this backward synchronises; ``backward`` calls it.

        Raises:
            LossCallError: on every rank, for a gradient on some ranks only.
        """
        self._losses.reduce_gradients()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Let a shard's gradient that overflowed on one rank count on all."""
        super().post_backward(closure_loss)
        self._losses.after_backward()
        self.closure_loss = None

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step as Lightning does, but not with gradients that an accumulation window has yet to correct."""
        windows = self._losses.part(LightningWindows)
        if windows is not None:
            closure = windows.closed(closure, optimizer)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

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

        Communication: one barrier and one all-reduce; none on the way out after an error.
        """
        if self._losses.is_alone:
            return tensor
        self._losses.advice.global_already(tensor)
        if self._losses.parts and _is_mean_of_integers(tensor, reduce_op):
            tensor = tensor.double()  # a copy; exact up to 2**53
        reduce_as_lightning = super().reduce  # type: ignore[safe-super]  # of the strategy behind this class
        return reduce_as_lightning(tensor, group, reduce_op)

    def attach_payload(self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> bool:
        """Let a check's bytes travel in the call check of each synchronising backward of this fit.

        Args:
            measure: This rank's bytes, asked for before backward; must not raise.
            judge: Gets the bytes of all ranks, in rank order, before any gradient is reduced; what it raises must be the
                same on every rank.

        Returns:
            Whether they will travel: not without ``check_calls``, nor under ``losses=[]``.
        """
        return self._losses.attach_payload(measure, judge)

    # ------------------------------------------------------------------ after an error: of what Lightning does together, this rank's part

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        if not self._losses.is_alone:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]  # of the strategy behind this class

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on all of them."""
        if self._losses.is_alone:
            return obj
        return super().broadcast(obj, src)  # type: ignore[safe-super]  # as above

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return what all ranks decide together."""
        return decision if self._losses.is_alone else super().reduce_boolean_decision(decision, all)

    # ------------------------------------------------------------------ end

    def on_train_end(self) -> None:
        """Look at what the last step left on an accelerator. Communication: there one handshake."""
        super().on_train_end()
        self._losses.on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """End the peers too, where one rank fails between two steps (a callback, an optimizer, Lightning itself)."""
        super().on_exception(exception)
        self._losses.on_exception(exception)

    def teardown(self) -> None:
        """Give the module back as it came."""
        self._losses.teardown()
        with tags_kept(self._losses.module):  # it goes back to the CPU
            super().teardown()
        self._losses.forget()
        self.closure_loss = None


def _is_mean_of_integers(tensor: Any, reduce_op: Any) -> bool:
    """Say whether Lightning would floor a reduction's result."""
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
        return False
    if isinstance(reduce_op, str):
        return reduce_op.lower() in ("mean", "avg")
    return bool(reduce_op == ReduceOp.AVG)
