"""`LossParallelism`: learnable losses next to a model that any strategy parallelises.

A strategy has one and calls it from Lightning's hooks (``loss_hooks``). It finds the losses, synchronises them, reduces their gradients
once after backward, and raises errors on every rank. All other features of a fit are its parts (``fit_part``).

Facts must be the same on every rank before anything trains: names of parameters, releases, options, precision. DDP pairs parameters by
position and would broadcast and average the wrong tensors without a word. A node with another release or option computes another gradient,
which no shape shows. All facts travel in one handshake at set-up, and a difference is an error on every rank. Facts that may differ
(Python, builds, releases of other libraries) travel along, and a difference is a warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.lightning_compat import attached_trainer
from lightning_ddp_losses.core.precision import PrecisionKeeper
from lightning_ddp_losses.distributed import handshake, liveness, process_groups
from lightning_ddp_losses.distributed.global_values import recent_global_values, take_late_notes
from lightning_ddp_losses.distributed.ledger import Ledger
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import PeerError, RankMismatchError, format_error, listed
from lightning_ddp_losses.randomness.layers import layers_that_drop
from lightning_ddp_losses.strategies.checkpoint_files import LOSS_KINDS
from lightning_ddp_losses.strategies.ddp_setup import BatchNormNote
from lightning_ddp_losses.strategies.empty_batches import name_module
from lightning_ddp_losses.strategies.epoch_ends import JoinedEnds, UnevenEnds
from lightning_ddp_losses.strategies.evaluation import EvaluationEnds, EvaluationLoaders
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart, HostStrategy, LossOptions, has_stable_repr
from lightning_ddp_losses.strategies.interruptions import Interruptions
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, find_losses, loss_kinds, named_tensors
from lightning_ddp_losses.strategies.loss_forward import Adoption, CallCheck, LossCalls, refuse_other_upstream_grads
from lightning_ddp_losses.strategies.loss_reducer import LossReducer, ModelReduction, ReducedParameters
from lightning_ddp_losses.strategies.randomness import DropoutNote, StepRandomness
from lightning_ddp_losses.strategies.resume import Resume
from lightning_ddp_losses.strategies.shards import Shards
from lightning_ddp_losses.strategies.training_data import GivenLoaders, GlobalSamplers, TrainingRows
from lightning_ddp_losses.strategies.windows import LightningWindows

PARTS: tuple[type[FitPart], ...] = (
    EvaluationEnds,
    GlobalSamplers,
    GivenLoaders,
    UnevenEnds,
    JoinedEnds,
    Resume,
    EvaluationLoaders,
    TrainingRows,
    ModelReduction,
    LightningWindows,
    Interruptions,
    StepRandomness,
    DropoutNote,
    BatchNormNote,
)
"""Features of any strategy, in the order of their hook calls."""

_HOOKS = [name for name, value in vars(FitPart).items() if callable(value) and name not in ("__init__", "is_on")]
_PACKAGE = __name__.partition(".")[0]
_TRAINER_OPTIONS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_LIBRARIES_OF_LOSSES = ("torch.", "pytorch_metric_learning.")
_MAX_SHOWN = 6  # differing names shown in an error
_log = logging.getLogger(__name__)
P = TypeVar("P", bound=FitPart)


class LossParallelism(Fit):
    """Finds, synchronises and checks the learnable losses of a strategy's module.

    Args:
        strategy: Parallelises the model.
        options: Options of the strategy.

    Attributes:
        parts: Active features of this fit. None under ``losses=[]``.
        found: The losses of this fit.
        precision: Keeps the values and dtypes that the losses had before a precision plugin converted them.
        reducer: Averages their gradients. None outside of a fit.
        call_check: Compares their calls. None outside of a fit, and without ``check_calls``.
        adoption: Losses that the module does not register.
        sharding: Weights with classes divided over the ranks.
        lacks_rows: True if some rank has zero rows in this step. All ranks then exchange a handshake before its backward.
        is_alone: True if this rank leaves the run after an error, and does not communicate any more.
        advice: Warnings.
    """

    def __init__(self, strategy: HostStrategy, options: LossOptions) -> None:
        self.strategy, self.options = strategy, options
        self.adoption = Adoption(self)
        self.sharding = Shards(self, self.adoption.parameters_with_adopted)
        self.forget()

    def forget(self) -> None:
        """Forget a fit when Lightning has torn down its own part, and make the parts of the next one."""
        self.found: list[FoundLoss] = []
        self.reducer: LossReducer | None = None
        self.call_check: CallCheck | None = None
        self.lacks_rows = self.is_alone = self._is_exception_reported = False
        self.advice = Advice()
        self.precision = PrecisionKeeper()
        self._calls = LossCalls(self)
        self.parts: list[FitPart] = []
        if self.options.losses != []:
            self.parts = [kind(self) for kind in self.strategy.kinds_of_parts if kind.is_on(self.options)]
            self.parts += [self.sharding, self.adoption, self._calls]
        # a hook that a part does not override is never called
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        for name in _HOOKS:
            own = [part for part in self.parts if getattr(type(part), name) is not getattr(FitPart, name)]
            self._hooks[name] = [getattr(part, name) for part in own]

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all parts that have it."""
        for own in self._hooks[hook]:
            own(*args)

    def has(self, hook: str) -> bool:
        """Return whether a part has a hook."""
        return bool(self._hooks[hook])

    def change(self, hook: str, value: Any) -> Any:
        """Return a value after each part with this hook has changed it, in order."""
        for own in self._hooks[hook]:
            value = own(value)
        return value

    def around(self, hook: str, *args: Any) -> AbstractContextManager[object]:
        """Return the contexts of all parts that have this hook, the first one outermost."""
        hooks = self._hooks[hook]
        if len(hooks) == 1:  # in most fits a step has one, and a stack takes time
            return hooks[0](*args)  # type: ignore[no-any-return]
        with ExitStack() as stack:
            for own in hooks:
                stack.enter_context(own(*args))
            return stack.pop_all()

    def part(self, kind: type[P]) -> P:
        """Return the part of this class, which is on."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def is_divided(self) -> bool:
        """Whether parameters are divided over the ranks."""
        return self.strategy.divides_model or self.sharding.is_divided

    # ------------------------------------------------------------------ set-up

    def setup(self, trainer: pl.Trainer, setup_model: Callable[[pl.Trainer], None]) -> None:
        """Find the losses, let Lightning set up the model, synchronise both.

        Args:
            trainer: The trainer.
            setup_model: Lightning's set-up. The strategy calls ``start_reducing`` in it.
        """
        module, fitting = self.module, self.is_fitting
        if not self.parts:
            self.sharding.refuse_shards(module)
            setup_model(trainer)
            return
        liveness.new_run()
        with self.raise_on_all_ranks("setup"):
            self.call("setup")
            self.strategy.refuse_module(module)
            # 1. the losses, sharded before their values are remembered
            self.found = find_losses(module, self.options.losses)
            self.sharding.setup_shards()
            prepare_losses_(module)
            self.precision.remember([loss.module for loss in self.found])
            # 2. Lightning moves, wraps and synchronises the remaining modules
            with contextlib.nullcontext() if fitting else self.sharding.excluded(module):
                setup_model(trainer)
            # 3. losses that the module does not register
            idle: Mapping[str, nn.Module] = {}
            if fitting:
                self.sharding.install()
                hidden = self.adoption.find()
                idle = hidden.idle
                if hidden.optimised:
                    self.found += self.adoption.adopt(hidden)
                    self.sharding.setup_new_shards()
            # 4. forward patches, then what exists now counts as synchronised
            self._calls.install(idle)
            if self.reducer is not None:
                self.reducer.parameters.watch([loss.name for loss in self.found])
                if self.options.check_calls:
                    self.call_check = CallCheck(self.reducer, self._calls.patches)
            self.call("on_model_ready")

    def compare_ranks(self) -> None:
        """Compare names, shapes and options between the ranks. Communication: one handshake.

        Raises:
            RankMismatchError: on every rank.
        """
        trainer = attached_trainer(self.module)
        facts = {
            _PACKAGE: str(getattr(sys.modules[_PACKAGE], "__version__", "")),
            "torch": torch.__version__.partition("+")[0],
            "precision": str(self.strategy.precision_plugin.precision),
        }
        facts.update({f"strategy option {name}": value for name, value in self.options.texts.items()})
        facts.update({f"Trainer({name})": repr(getattr(trainer, name, None)) for name in _TRAINER_OPTIONS})
        facts["layers that drop"] = ", ".join(layers_that_drop(self.module))
        facts.update({f"loss {loss.name}": _describe_loss(loss.module) for loss in self.found})
        compare_names(self.module, {name: " ".join(value.split()) for name, value in facts.items()})

    def start_reducing(
        self, reduced_elsewhere: Sequence[Tensor], ignored: Collection[str] = (), *, first_bucket: float = 0
    ) -> None:
        """Take over the gradients that the model's own parallelism does not reduce.

        Args:
            reduced_elsewhere: Parameters that the model's own parallelism reduces.
            ignored: Names of parameters that the user excluded.
            first_bucket: Bytes of gradient that must be ready before it sends any.
        """
        parameters = ReducedParameters(self.module, reduced_elsewhere, ignored, first_bucket=first_bucket)
        self.reducer = LossReducer(parameters, self.options.loss_reduce_dtype)

    def note_unusual(self) -> None:
        """Log losses that the strategy treats in an unusual way."""
        for loss in self.found:
            if loss.learnable and not loss.owned:
                rank_zero_info(f"{loss.title} shares a parameter with the model and stays in the model's DDP.")
            if not loss.learnable and self.options.losses != "auto":
                rank_zero_info(
                    f"{loss.title}, named in `losses`, has no parameters: there is nothing to synchronise in it."
                )

    # ------------------------------------------------------------------ steps

    @contextlib.contextmanager
    def training_step(self) -> Iterator[None]:
        """Run a training step inside the block. Its error ends all ranks at the peers' next handshake."""
        self._calls.count(on=True)
        try:
            with self.raise_on_all_ranks("training_step"):
                self.strategy.broadcast_buffers()
                self.call("before_step")
                with self.around("training_step"):
                    yield
        finally:
            self._calls.count(on=False)

    def exchange_calls(self) -> None:
        """Exchange the call check of this backward now, if it has not been exchanged yet."""
        if self.call_check is not None:
            self.call_check.exchange()

    # ------------------------------------------------------------------ checkpoints

    def with_run_states(self, checkpoint: dict[str, Any], *, together: bool) -> dict[str, Any]:
        """Return a checkpoint with the class of each loss and the entries of all parts.

        Args:
            checkpoint: Lightning's checkpoint.
            together: True if every rank calls this, False after an error or in a signal handler.
        """
        checkpoint = {**checkpoint, LOSS_KINDS: self.kinds()}
        for state_dict in self._hooks["state_dict"]:
            checkpoint = {**checkpoint, **state_dict(checkpoint, together=together)}
        return checkpoint

    def kinds(self) -> list[str]:
        """Return the class of each loss. Before set-up and after teardown too."""
        return loss_kinds(find_losses(self.module, self.options.losses))

    # ------------------------------------------------------------------ end

    def on_train_end(self) -> None:
        """Raise errors that the last step left and no later call will read.

        Communication: one handshake, and one for each loss with class shards.
        """
        liveness.end_run()
        if not self.parts:
            return
        with self.raise_on_all_ranks("the end of training"):
            for reading in (*inputs.readings_in(self.module), *(patch.value_reading for patch in self._calls.patches)):
                reading.raise_late()
            self.call("on_train_end")
            # if another subgroup reports an error in this handshake, this rank forwards it to its own subgroups
            upstream_grads = handshake.all_gather("the end of training", {}, take_late_notes().encode())
            texts = [text.decode() for text in upstream_grads]
            # ranks that ran out of rows, or replaced another rank's rows, have recorded a different number
            numbers = {text.count(",") for text in texts}
            if len(numbers) == 1 and "none" not in texts:
                refuse_other_upstream_grads(texts)

    def on_exception(self, exception: BaseException) -> None:
        """End the peers too, if one rank fails between two steps (a callback, an optimizer, Lightning itself)."""
        if self._is_exception_reported:
            return
        self._is_exception_reported = True
        lost = liveness.lost_peer_error(exception, "its program")
        if lost is not None:
            _log.error("%s", lost)
        liveness.report(exception)
        # before anything touches a device on which a kernel waits for a peer
        if process_groups.abort_stuck(self.strategy.root_device):
            _log.error("Work on %s did not complete: NCCL's communicators were aborted.", self.strategy.root_device)
        if lost is not None:
            return
        module = self.strategy.lightning_module
        trainer = attached_trainer(module) if module is not None else None
        if trainer is None or not isinstance(exception, Exception):
            return
        if getattr(exception, "collective", False):
            # an error of the whole world (from a backward, for example) has not reached its subgroups yet
            handshake.notify_subgroups(exception, "training")
            return
        with contextlib.suppress(Exception):  # Lightning raises the exception itself
            self.call("on_exception", exception)
            # without check_calls the peers open no handshake that could inform them
            if trainer.training and self.call_check is not None:
                handshake.raise_in_all_groups(exception, "training")

    def teardown(self) -> None:
        """Restore the module to its state before the fit."""
        if self.call_check is not None:
            self.call_check.remove()
        if self.reducer is not None:
            take_late_notes()  # of a fit that has failed: other ranks may have noted more or less
        for part in reversed(self.parts):
            part.teardown()

    # ------------------------------------------------------------------ help

    @contextlib.contextmanager
    def raise_on_all_ranks(self, where: str) -> Iterator[None]:
        """Raise on every rank any error that one of them has inside the block: the peers get it at their next handshake."""
        try:
            yield
        except Exception as error:
            try:
                liveness.raise_lost_peer(error, where)
            except PeerError as named:
                error = named
            if where == "training_step" and self.lacks_rows:
                error = name_module(error, self.module)
            if where == "training_step" and not (self.options.check_calls or self.lacks_rows):
                handshake.notify_subgroups(error, where)
                raise error  # the world opens no handshake that could inform it
            handshake.raise_in_all_groups(error, where)


def prepare_losses_(root: nn.Module) -> None:
    """Tell losses and metrics their names, and create their process groups: a rank may fail before the first use of a group."""
    for path, inner in root.named_modules():
        instance = vars(inner).get("_instance")
        if isinstance(instance, Instance):
            instance.path = path
        if isinstance(inner, process_groups.WithProcessGroup):
            inner.create_internal_groups()


# ---------------------------------------------------------------------- facts that ranks have in common


def _describe_loss(module: nn.Module) -> str:
    """Return a loss's class, and the options with which a known library has made it. A user's own class may keep what differs by rank."""
    kind = type(module)
    known = kind.__module__.startswith(_LIBRARIES_OF_LOSSES)
    names = inspect.signature(kind.__init__).parameters if known else ()
    # a library keeps most of its arguments under their names. The others become an object
    shown = [f"{name}={getattr(module, name)!r}" for name in names if has_stable_repr(getattr(module, name, module))]
    return f"{kind.__qualname__}({', '.join(shown)})"


def compare_names(module: nn.Module, facts: Mapping[str, str]) -> None:
    """Compare what must be the same on every rank: names, shapes, dtypes and order of parameters and buffers, and what else is given.

    Args:
        module: The module that is trained.
        facts: Releases and options, by name.

    Raises:
        RankMismatchError: on every rank, with the first names that differ.

    Communication: one handshake. One more gather if ranks differ.
    """
    own = [_describe_tensor(name, tensor) for name, tensor in named_tensors(module)]
    # modules that are gathered separately: ranks must gather them in the same order
    own += [f"{name} divided by fully_shard" for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    ledger = Ledger()
    ledger.post("names", digest)
    ledger.post("environment", pack_notes())
    notes = ledger.meet("set-up", facts)
    note_differences(notes["environment"])
    if len(set(notes["names"])) == 1:
        return
    # swap all names, and show the first that differ
    tables: list[list[str]] = handshake.all_gather_json("all names", {}, own)
    columns = list(itertools.zip_longest(*tables, fillvalue="nothing"))
    places = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    first = places[:_MAX_SHOWN]
    ranks = ["; ".join(f"position {i}: {columns[i][rank]}" for i in first) for rank in range(len(tables))]
    raise RankMismatchError(
        f"parameters and buffers ({len(places)} of {len(columns)} positions)",
        expected="the same names, shapes and dtypes in the same order on every rank",
        ranks=ranks,
        fix="Register submodules in a fixed order (sort names; no iteration over sets), with the same sizes on every rank.",
        collective=True,
        page="F12",
    )


def _describe_tensor(name: str, tensor: Tensor) -> str:
    shard = shard_of(tensor)
    if is_lazy(tensor):  # the user has excluded it from DDP, or DDP refuses it
        return f"{name} uninitialized"
    shape = f"{tuple(tensor.shape)}"
    if shard is not None:  # ranks hold different rows of the same whole
        shape = f"{shard.whole_shape(tensor)} divided over ranks"
    elif isinstance(tensor, DTensor):
        shape += f" {tensor.placements} over {tuple(tensor.device_mesh.shape)}"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{name} {shape} {tensor.dtype}{' frozen' * frozen}"


def pack_notes() -> bytes:
    """Return what may differ between nodes. Short, so that it fits into a handshake."""
    notes = {"python": platform.python_version(), "torch": torch.__version__, **_releases()}
    return json.dumps(notes).encode()


@functools.cache  # a process loads a library once, and reading what is installed takes a fifth of a small fit
def _releases() -> dict[str, str]:
    """Return the releases of the libraries that training depends on."""
    found = {}
    for name in ("lightning", "pytorch-lightning", "pytorch-metric-learning", "torchmetrics"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def note_differences(payloads: Sequence[bytes]) -> None:
    """Warn once of harmless differences between nodes.

    Args:
        payloads: Result of ``pack_notes`` on each rank.
    """
    if len(set(payloads)) == 1:
        return
    notes = [json.loads(payload) for payload in payloads]
    names = sorted(set().union(*notes))
    differences = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, own in enumerate(notes):
            ranks_of.setdefault(own.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            shown = [f"{value} on rank {listed(list(map(str, ranks)), 8)}" for value, ranks in ranks_of.items()]
            differences.append(f"{name}: {', '.join(shown)}")
    rank_zero_warn(f"Nodes differ, which changes no option of this package: {'; '.join(differences)}.")


# ---------------------------------------------------------------------- warnings


class Advice:
    """Warns on rank 0, of each thing once."""

    def __init__(self) -> None:
        self._uneven: set[str] = set()
        self._waste = False

    def uneven_rows(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Warn of losses with different numbers of rows on the ranks.

        Args:
            rows: Rows of each rank, by the loss's title.
        """
        for title, per_rank in rows.items():
            if title in self._uneven:
                continue
            self._uneven.add(title)
            rank_zero_warn(
                format_error(
                    f"rows of {title} differ between ranks",
                    ranks=per_rank,
                    fix="DDP weighs ranks equally, not rows, so this is not the gradient of one process on the whole batch. Wrap "
                    "the loss in GlobalBatchLoss, or give every rank the same number of rows (drop_last=True, a batch size that "
                    "the number of ranks divides).",
                )
            )

    def global_already(self, tensor: object) -> None:
        """Warn of a value that is about to be reduced over ranks although every rank holds the same."""
        if self._waste or not isinstance(tensor, Tensor) or tensor.ndim or not tensor.is_floating_point():
            return  # Lightning reduces integers of its own, lengths of data
        # comparing values on an accelerator would synchronize it. A zero may be anything
        if tensor.device.type != "cpu" or tensor == 0:
            return
        values = [v for v in recent_global_values() if v.device.type == "cpu"]
        if any(torch.equal(tensor, value.to(tensor)) for value in values):
            self._waste = True
            rank_zero_warn("A logged value is a global loss already, equal on every rank: leave out sync_dist=True.")
