"""`LossOptions` of a strategy. `FitPart`, one feature of it as the hooks of a fit that it needs; `Fit`, which all parts share.

A new option is a field of ``LossOptions``, which validates all of them, a keyword of the strategies, and its use in a part.

``LossParallelism`` has a list of parts and calls them in order. ``teardown`` goes through the list backwards. A feature that is switched
off is not in the list, and a hook that no part overrides does not add time to a step. ``losses=[]`` has no parts.

| hook | when |
|---|---|
| ``setup_environment`` | the ranks exist; the user's ``setup`` hooks and the loaders follow |
| ``setup`` | every run (fit, validate, ...), before Lightning sets up the model |
| ``on_model_ready`` | model and optimizers exist, and the losses were found |
| ``process_dataloader`` | Lightning hands over a loader, of training or evaluation |
| ``on_train_start`` | the checkpoint is loaded, the iterators are made |
| ``on_train_batch_start`` | a training batch is there |
| ``before_step`` | before each ``training_step``, on every rank |
| ``training_step`` | around each ``training_step`` |
| ``before_backward`` | before each backward, with the value that is back-propagated |
| ``backward_pass`` | around each backward |
| ``on_gradients_reduced`` | after a synchronising backward, before the hooks ``on_after_backward`` |
| ``evaluation_step`` | around each step of validation, test and prediction |
| ``state_dict``, ``load_state_dict`` | a checkpoint of the fit is saved or loaded |
| ``on_exception`` | this rank failed, outside the blocks that inform the peers |
| ``on_train_end``, ``teardown`` | the end of a healthy fit, and of any run |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError, expect, expect_option
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss

_ALLOWED: dict[str, tuple[object, ...]] = {
    "global_batch": (False, "auto"),
    "accumulation": ("mean", "window"),
    "use_global_sampler": (True, False),
    "evaluation": ("exact", "padded"),
    "uneven": ("error", "join", "stop"),
    "randomness": ("rank", "global", "by_row"),
}
_MAY_DIFFER = ("timeout", "start_method")  # the timeout and the start method do not change gradients
_NEED_LOSSES = {
    "accumulation": "mean",
    "use_global_sampler": False,
    "uneven": "error",
    "randomness": "rank",
}  # with their defaults


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of one strategy. ``DDPLossStrategy`` explains them.

    Attributes:
        texts: All arguments of the strategy that ranks must have in common, by name (``stable_texts``).

    Raises:
        ConfigurationError: for values that cannot work.
    """

    losses: str | Sequence[str] = "auto"
    adopt: bool = False
    check_calls: bool = True
    loss_reduce_dtype: torch.dtype | None = None
    global_batch: bool | str = False
    sharded_checkpoints: bool = False
    accumulation: str = "mean"
    use_global_sampler: bool = False
    evaluation: str = "exact"
    uneven: str = "error"
    randomness: str = "rank"
    texts: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> LossOptions:
        """Return the options among the arguments of a strategy."""
        options = {each.name: arguments[each.name] for each in fields(cls) if each.name in arguments}
        options["loss_reduce_dtype"] = _parse_dtype(arguments["loss_reduce_dtype"])
        if isinstance(options["losses"], Sequence) and not isinstance(options["losses"], str):
            options["losses"] = list(options["losses"])
        return cls(**options, texts=stable_texts(arguments))

    def __post_init__(self) -> None:
        # a string is a sequence of strings too
        only_names = isinstance(self.losses, Sequence) and all(isinstance(name, str) for name in self.losses)
        expected = "'auto', a list of names, or a regular expression"
        expect(only_names, "losses", expected=expected, got=repr(self.losses))
        for name, allowed in _ALLOWED.items():
            expect_option(name, getattr(self, name), allowed)
        for name, default in _NEED_LOSSES.items():
            value = getattr(self, name)
            expect(
                self.losses != [] or value == default,
                f"{name}={value!r}",
                expected="losses that are looked after",
                got="losses=[], which is plain ddp",
                fix=f"Leave {name} out, or leave losses at 'auto'.",
            )


def _parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating dtype from itself or its name (``"bfloat16"``, ``"torch.bfloat16"``)."""
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        expected = "a floating torch.dtype or its name, or None"
        raise ConfigurationError("loss_reduce_dtype", expected=expected, got=repr(dtype))
    return found


def stable_texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a strategy's arguments as text, which two nodes can compare.

    Args:
        arguments: Arguments of its ``__init__`` by name, including ``**ddp_kwargs``. Objects (a plugin, a hook) and Lightning's
            defaults are left out.
    """
    defaults = inspect.signature(DDPStrategy.__init__).parameters
    found = {}
    for name, value in sorted(arguments.items()):
        is_default = name in defaults and value == defaults[name].default
        if name not in _MAY_DIFFER and not is_default and has_stable_repr(value):
            found[name] = repr(value)
    return found


def has_stable_repr(value: object) -> bool:
    """Return whether equal values have the same text in every process."""
    if isinstance(value, (list, tuple)):
        return all(map(has_stable_repr, value))
    return isinstance(value, (bool, int, float, str, torch.dtype, timedelta))


class HostStrategy(ParallelStrategy):
    """Lightning's strategy with the properties that losses need of the one that parallelises the model.

    Attributes:
        kinds_of_parts: Features of this kind of strategy.
        divides_model: Whether a rank holds parts of the model only.
        divided_parameters: Names of parameters that are divided over the ranks.
        run_seed: Seed of the run that was resumed, also for a checkpoint after the fit. None if the run was not resumed.
    """

    kinds_of_parts: ClassVar[tuple[type[FitPart], ...]]
    divides_model: ClassVar[bool] = False
    divided_parameters: frozenset[str] = frozenset()
    run_seed: int | None = None
    _sync_blocked = False

    @property
    def wrapped_model(self) -> Any:
        """The model's DDP. None without one."""
        return None

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether each forward of the model, in evaluation too, waits for all ranks."""
        return False

    @property
    def sync_gradients(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        return not self._sync_blocked

    def refuse_module(self, module: pl.LightningModule) -> None:
        """Raise for a module that the strategy cannot train."""

    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers before a synchronising step, if no DDP around the model does."""

    def attach_payload(
        self, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None], *, name: str = "payload"
    ) -> bool:
        """Let a part's bytes travel in the call check of each synchronising backward of this fit.

        Args:
            measure: This rank's bytes, asked for before backward. Must not raise.
            judge: Gets the bytes of all ranks, in rank order, before any gradient is reduced. Its errors must be the
                same on every rank.
            name: What they are, for the error if ranks attach other things.

        Returns:
            Whether they will travel: not without ``check_calls``, nor under ``losses=[]``.
        """
        raise NotImplementedError


class Fit(Protocol):
    """Describes the fit to its parts.

    Attributes:
        options: Options of the strategy.
        strategy: Parallelises the model.
        found: Losses of this fit. Known in ``on_model_ready``.
        lacks_rows: True if some rank has zero rows in this step. All ranks then exchange a handshake before its backward.
        is_alone: True if this rank leaves the run after an error, and does not communicate any more.
    """

    options: LossOptions
    strategy: HostStrategy
    found: list[FoundLoss]
    lacks_rows: bool
    is_alone: bool

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule."""
        module = self.strategy.lightning_module
        assert module is not None
        return module

    @property
    def trainer(self) -> pl.Trainer:
        """The trainer of this run."""
        return self.module.trainer

    @property
    def is_fitting(self) -> bool:
        """Whether this run trains, and does not only validate, test or predict."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def is_divided(self) -> bool:
        """Whether parameters are divided over the ranks. The same on every rank."""

    def exchange_calls(self) -> None:
        """Exchange the call check of this backward now, if it has not been exchanged yet."""

    def on_exception(self, exception: BaseException) -> None:
        """Inform peers of an error of this rank, once."""

    def raise_on_all_ranks(self, where: str) -> AbstractContextManager[None]:
        """Raise on every rank any error that one of them has inside the block."""


class FitPart:
    """A feature of the strategy. Each hook is empty unless a part overrides it.

    Args:
        fit: The fit that it belongs to.

    Attributes:
        needs: Option and its value without which a strategy does not have this part.
        undo: Undoes changes outside of this part, in ``teardown``.
    """

    needs: ClassVar[tuple[str, object] | None] = None

    def __init__(self, fit: Fit) -> None:
        self.fit, self.undo = fit, ExitStack()

    @classmethod
    def is_on(cls, options: LossOptions) -> bool:
        """Return whether a strategy with these options has this part."""
        return cls.needs is None or getattr(options, cls.needs[0]) == cls.needs[1]

    def setup_environment(self) -> None:
        """Install the objects that the user's ``setup`` hooks and loaders must find."""

    def setup(self) -> None:
        """Install what Lightning's set-up of the model must find."""

    def on_model_ready(self) -> None:
        """Complete the set-up with model, optimizers and losses."""

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader as this rank should have it."""
        return dataloader

    def on_train_start(self) -> None:
        """Begin training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Look at a training batch."""

    def before_step(self) -> None:
        """Prepare a training step."""

    def training_step(self) -> AbstractContextManager[None]:
        """Return the context of a training step."""
        return nullcontext()

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the value that is back-propagated."""
        return loss

    def backward_pass(self) -> AbstractContextManager[None]:
        """Return the context of a backward."""
        return nullcontext()

    def on_gradients_reduced(self) -> None:
        """Inspect gradients after their reduction over ranks."""

    def evaluation_step(self, args: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Return the context of a step of validation, test or prediction.

        Args:
            args: The batch, its index, and the index of its loader if there are several.
        """
        return nullcontext()

    def state_dict(self, checkpoint: Mapping[str, Any], *, together: bool) -> Mapping[str, Any]:
        """Return this part's entries of a checkpoint.

        Args:
            checkpoint: Lightning's checkpoint.
            together: True if every rank calls this, False after an error or in a signal handler. Collectives are allowed only if True.
        """
        return {}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remember this part's entries of a loaded checkpoint, and return the checkpoint that Lightning restores."""
        return checkpoint

    def on_exception(self, exception: Exception) -> None:
        """Inform peers of an error of this rank, if this part communicates with them."""

    def on_train_end(self) -> None:
        """End a healthy fit."""

    def teardown(self) -> None:
        """Restore trainer and module to their state before the run."""
        self.undo.close()
