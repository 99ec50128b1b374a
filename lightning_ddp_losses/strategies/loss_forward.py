"""What a fit adds to its losses: patches around each call, the call check, and the adoption of hidden losses.

* Patches handle precision, input checks, unused parameters in the graph, and a count around each call of a loss. A patch replaces
  ``forward`` in the loss's instance during a fit, so attributes, parameter names and hooks are unchanged. Copies and pickles of the loss
  contain the plain ``forward``, so they do not communicate. The computation of a loss is planned once (``FullPrecisionPlan``). A call
  makes a new plan if dtypes, devices, autocast, or the modules and parameters inside the loss differ from the last call.
* The call check is one handshake in each synchronising backward with the number of calls and rows of each loss on each rank. It is always
  exchanged at the same point, before the first gradients of the model are sent, where a missing peer would cause a hang. A hook on the
  model's parameters, which runs before DDP's hook, determines this point by counting bytes, in the same way on all ranks. Without such
  gradients, it is the end of autograd's backward. At this point, backward has passed through the losses. The upstream gradients of their
  global values are sent in the same handshake and compared before anything is reduced. If a loss has failed in backward on one rank, its
  peers receive the error in this handshake. It also contains payloads of checks, and small gradients of the losses (``LossReducer``).
* A hidden loss, which is not registered in the module, raises the same error on every rank, or is registered under ``_adopted_losses``
  during a fit. Checkpoints also contain adopted losses after the fit.
* With ``global_batch="auto"``, the patch passes the call to a wrapper that evaluates the loss over the rows of all ranks. Losses and
  strategies do not import each other. The package sets the wrapper when it is imported.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pytorch_metric_learning.losses as pml
import torch
from lightning.pytorch.utilities import rank_zero_info
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_ddp_losses.core import inputs, precision
from lightning_ddp_losses.core.autograd_graph import FullPrecisionPlan
from lightning_ddp_losses.core.modules import (
    Hidden,
    MethodPatch,
    ModuleContents,
    eager,
    eager_recursive,
    find_hidden,
    objects_beside_module,
)
from lightning_ddp_losses.core.torch_compat import all_slots, is_any_autocast_on, uncompiled
from lightning_ddp_losses.core.transparent import all_modules
from lightning_ddp_losses.distributed import handshake, raw_collectives
from lightning_ddp_losses.distributed.global_values import UpstreamGradRecorder
from lightning_ddp_losses.distributed.ledger import Ledger
from lightning_ddp_losses.distributed.process_groups import WithProcessGroup
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import HiddenLossError, LossCallError, RankMismatchError, expect, format_error
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.loss_discovery import ADOPTED, FoundLoss, is_loss, named_tensors
from lightning_ddp_losses.strategies.loss_reducer import Gradients, LossReducer, ReductionPlan
from lightning_ddp_losses.strategies.shards import shard_losses

_CALL = struct.Struct("<IQ?")  # calls, rows, whether a gradient already exists
_CALLS, _UPSTREAM_GRADIENTS, _GRADIENTS = "calls", "upstream gradients", "gradients"  # notes of the call check
_KIND = attrgetter("dtype", "device", "requires_grad")
_WRAPPED = (pml.BaseMetricLossFunction, pml.MultipleLosses, pml.SelfSupervisedLoss)
_wrapper: list[Callable[[nn.Module], nn.Module]] = []


class LossForwardPatch(MethodPatch):
    """Runs one loss in full precision on checked inputs and counts its calls.

    Attributes:
        sees_global_batch: True if the loss evaluates the rows of all ranks.
        counting: True if calls are counted (only inside ``training_step``, with gradients enabled).
        calls: Number of calls since the last call check.
        rows: Total number of rows in these calls.
    """

    def __init__(self, loss: FoundLoss, *, refuse_nan: bool, global_loss: nn.Module | None = None) -> None:
        super().__init__(loss.module)
        self.loss = loss
        self._inner = uncompiled(loss.module)
        self._title = loss.title
        self.sees_global_batch = loss.sees_global_batch or global_loss is not None
        # global losses of this package compute in full precision themselves, and send rows in their dtype
        self._computes_wide = loss.sees_global_batch and isinstance(self._inner, WithProcessGroup)
        self._global_loss = global_loss  # evaluates the loss over all ranks, and calls this patch for the loss itself
        self._in_global_loss = False
        self.counting = False
        self.calls = self.rows = 0
        self._refuse_nan = refuse_nan
        self.value_reading = inputs.ValueReading()
        self._contents = ModuleContents(loss.module)
        self._signature: tuple[object, ...] = ()
        self._plan: FullPrecisionPlan | None = None

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the loss, in ``promote(float32, parameters, inputs)`` with autocast off."""
        if self._in_global_loss:  # the global loss evaluates this one
            return self.original(*args, **kwargs)
        # 1. count
        if self.counting and torch.is_grad_enabled():
            self.calls += 1
            self.rows += inputs.num_rows(args, kwargs)
        # 2. check the inputs. Reading values on an accelerator waits for it
        given = inputs.tensors_in((args, kwargs))
        read = self.value_reading.next_call(given)
        self.value_reading.raise_late()
        inputs.check_inputs(
            self._inner,
            self._title,
            args,
            kwargs,
            read_values=read,
            refuse_nan=read and self._refuse_nan,
            allow_empty=self.sees_global_batch,
        )
        if not read and self._refuse_nan:
            self.value_reading.note_nan(self._title, args, kwargs)
        # 3. evaluate
        if self._global_loss is not None:
            self._in_global_loss = True
            try:
                return self._global_loss(*args, **kwargs)
            finally:
                self._in_global_loss = False
        if not read:
            args, kwargs = inputs.clamp_labels(self._inner, self._title, args, kwargs, self.value_reading)
        if self._computes_wide:
            return self.original(*args, **kwargs)
        plan = self._plan_for(given)
        return plan.run(self.module, self.original, args, kwargs, self._contents.parameters, given)

    @eager_recursive  # if compiled, it would be recompiled for each plan
    def _plan_for(self, given: Sequence[Tensor]) -> FullPrecisionPlan:
        """Return the plan of a call, which is the last one unless the contents of the loss or the kinds of its tensors have changed.

        (pytorch-metric-learning assigns the data of its weights in forward, converted to the dtype of the inputs.)
        """
        contents = self._contents
        is_other = contents.refresh()
        buffers = [buffer for buffer in all_slots(contents.modules, "buffers") if buffer is not None]
        tensors = [*contents.parameters, *buffers, *given]
        signature = (torch.get_default_dtype(), is_any_autocast_on(), len(given), *map(_KIND, tensors))
        if self._plan is None or is_other or signature != self._signature:
            self._plan = FullPrecisionPlan.of(contents.modules, contents.parameters, given)
            self._signature = signature
        return self._plan


class LossCalls(FitPart):
    """The forward patches of all losses of a fit.

    Attributes:
        patches: One patch for each loss of the fit.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self.patches: list[LossForwardPatch] = []
        self._installed: list[LossForwardPatch | UnregisteredLossPatch] = []

    def install(self, idle: Mapping[str, nn.Module]) -> None:
        """Patch the losses that have been found, and watch hidden modules that are losses.

        Args:
            idle: Hidden modules whose parameters are not in any optimizer, by path.
        """
        # a gradient scaler handles NaN itself
        refuse_nan = getattr(self.fit.strategy.precision_plugin, "scaler", None) is None
        for loss in self.fit.found:
            global_loss = _wrap_global(loss, self.fit.module) if self.fit.options.global_batch else None
            self.patches.append(LossForwardPatch(loss, refuse_nan=refuse_nan, global_loss=global_loss))
        watched = [UnregisteredLossPatch(module, path) for path, module in idle.items() if is_loss(module)]
        self._installed = [*self.patches, *watched]
        for patch in self._installed:
            patch.install()
            self.undo.callback(patch.remove)

    def count(self, *, on: bool) -> None:
        """Start or stop counting calls."""
        for patch in self._installed:
            patch.counting = on


# ---------------------------------------------------------------------- the calls of all ranks


@dataclass
class Calls:
    """Calls of all ranks since the last synchronising backward.

    Attributes:
        parameters: Parameters that the strategy reduces in this backward.
        step: Number of the step.
        expected: For each loss, whether its parameters may have gradients.
        uneven: Rows of each rank for losses with different numbers, by title.
    """

    parameters: ReductionPlan
    step: int
    expected: list[bool] = field(default_factory=list)
    uneven: dict[str, list[int]] = field(default_factory=dict)


class Attached(NamedTuple):
    """A note that code outside this file sends in each call check.

    Attributes:
        name: Name of the note.
        measure: Returns this rank's bytes. Must not raise.
        judge: Receives the bytes of all ranks in rank order. Its errors must be equal on all ranks.
    """

    name: str
    measure: Callable[[], bytes]
    judge: Callable[[list[bytes]], None]


class CallCheck:
    """Compares the ranks' calls in each synchronising backward.

    Args:
        reducer: Averages gradients, and sends small ones in the handshake.
        counters: Patches that count the calls of each loss.

    Communication: one handshake per synchronising backward, and one more in a step with new parameters.
    """

    def __init__(self, reducer: LossReducer, counters: Sequence[LossForwardPatch]) -> None:
        self._parameters, self._reducer = reducer.parameters, reducer
        self._counters = list(counters)
        self._attached: list[Attached] = []
        self._ledger = Ledger()
        self._upstream_grads = UpstreamGradRecorder()
        self._calls: Calls | None = None
        self._is_unsent = False
        self._ready_bytes = 0
        self._hooks: list[RemovableHandle] = []
        self.watch_gradients()

    def watch_gradients(self) -> None:
        """Count the gradient bytes that the model's DDP receives. Call this again when DDP reduces other parameters."""
        self.remove()
        # this hook is called before DDP's hook
        self._hooks = [
            p.register_hook(partial(self._on_gradient, p.nbytes))  # type: ignore[no-untyped-call]
            for p in self._parameters.elsewhere.values()
        ]

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def attach(self, name: str, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> None:
        """Send a note in each call check, as described in ``Attached``. A number is added to a name that is already used."""
        names = {attached.name for attached in self._attached}
        if name in names:
            name = f"{name} {len(names)}"
        self._attached.append(Attached(name, measure, judge))

    def start(self, step: int) -> None:
        """Prepare the handshake of a synchronising backward with the calls on this rank, and reset the counts."""
        plan = self._parameters.plan()
        before = Gradients(plan)
        self._reducer.start_backward(before, [counter.calls > 0 for counter in self._counters])
        has_grad = {p.owner for p in itertools.compress(plan.reduced, before.flags)}
        self._ledger.drop()
        calls = b""
        for index, counter in enumerate(self._counters):
            calls += _CALL.pack(counter.calls, counter.rows, index in has_grad)
            counter.calls = counter.rows = 0
        self._ledger.post(_CALLS, calls)
        for attached in self._attached:
            self._ledger.post(attached.name, attached.measure())
        self._calls = Calls(plan, step)
        self._is_unsent = True
        self._ready_bytes = 0
        # record upstream gradients of global values, which are sent in the same handshake
        self._upstream_grads.start()

    def _on_gradient(self, num_bytes: int, _: Tensor) -> None:
        self._ready_bytes += num_bytes
        if self._is_unsent and self._ready_bytes >= self._parameters.first_bucket:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the handshake of this backward, once.

        Raises:
            LossCallError: on every rank, when a learnable loss ran only on some ranks.
            RankMismatchError: on every rank, when parameters differ by name, shape or dtype, when the ranks weight a global value
                differently, or when the initial values of a parameter created after the wrap differ.
        """
        calls = self._calls
        if calls is None or not self._is_unsent:
            return
        self._is_unsent = False
        plan = calls.parameters
        # 1. post small gradients and upstream gradients, which were computed in this backward
        self._ledger.post(_GRADIENTS, self._reducer.pack(plan))
        self._ledger.post(_UPSTREAM_GRADIENTS, self._upstream_grads.take().encode())
        # 2. exchange all notes
        notes = self._ledger.meet(plan.calls, {"step": calls.step})
        # 3. compare the notes of all ranks
        self._compare_calls_(calls, notes[_CALLS])
        refuse_other_upstream_grads([noted.decode() for noted in notes[_UPSTREAM_GRADIENTS]])
        for attached in self._attached:
            attached.judge(notes[attached.name])
        self._reducer.receive(notes[_GRADIENTS])
        if plan.new:
            self._parameters.admit(plan.new)

    def finish(self) -> Calls | None:
        """Return the calls of all ranks, after exchanging them unless backward has done so. None if no handshake was prepared."""
        self.exchange()
        calls, self._calls = self._calls, None
        return calls

    def _compare_calls_(self, calls: Calls, packed: Sequence[bytes]) -> None:
        """Add the numbers of all ranks to the calls, or raise an error for losses that ran only on some ranks."""
        by_rank = [list(_CALL.iter_unpack(own)) for own in packed]
        missing: list[str] = []
        for counter, of_ranks in zip(self._counters, zip(*by_rank, strict=True), strict=True):
            counts, num_rows, grads = zip(*of_ranks, strict=True)
            calls.expected.append(any(counts) or any(grads))
            if counter.loss.learnable and any(counts) and not all(counts):
                missing.append(_missing_text(counter.loss.title, counts, num_rows))
            elif len(set(num_rows)) > 1 and not counter.sees_global_batch:
                calls.uneven[counter.loss.title] = list(num_rows)
        if missing:
            fix = "Call it on every rank (times 0 where it should not count), or decide on all ranks together."
            raise LossCallError("\n".join([*missing, fix]), collective=True)


def _missing_text(title: str, calls: Sequence[int], rows: Sequence[int]) -> str:
    """Return the text for a loss that ran only on some ranks."""
    ranks = [f"{c} call{'s' * (c > 1)} on {r} rows" if c else "not called" for c, r in zip(calls, rows, strict=True)]
    return format_error(f"{title} ran on some ranks only", expected="every rank or none", ranks=ranks)


def refuse_other_upstream_grads(noted: Sequence[str]) -> None:
    """Reject global values whose upstream gradients, as recorded by each rank, differ.

    Raises:
        RankMismatchError: on every rank.
    """
    if len(set(noted)) > 1:
        raise RankMismatchError(
            "coefficients of global losses and metrics in this backward",
            expected="the same on every rank, which holds the gradient for all of them",
            ranks=noted,
            fix="Multiply a global value by the same number on every rank; or give GlobalBatchLoss(backward='sum') where ranks shall "
            "differ. Nothing was reduced.",
            collective=True,
            page="GlobalBatchLoss",
        )


# ---------------------------------------------------------------------- losses that the module does not register


class UnregisteredLossPatch(MethodPatch):
    """Raises an error if an unregistered loss that is not in any optimizer is called in ``training_step`` with gradients."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module)
        self.path, self.counting = path, False

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, unless it runs with gradients inside ``training_step``."""
        if self.counting and torch.is_grad_enabled():
            raise HiddenLossError(
                f"{type(uncompiled(self.module)).__name__} at {self.path}",
                expected="a registered submodule whose parameters are in an optimizer",
                got="an unregistered loss with trainable parameters, in no optimizer",
                fix="Assign it to an attribute of the LightningModule (nn.ModuleList or nn.ModuleDict for several) "
                "and give its parameters to an optimizer.",
            )
        return self.original(*args, **kwargs)


class Adoption(FitPart):
    """Registers hidden losses during a fit, and keeps them for checkpoints. Without ``adopt`` they are rejected."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._modules: nn.ModuleDict | None = None

    def setup(self) -> None:
        """Reset the losses of an earlier fit, which checkpoints contain until the next fit."""
        if self.fit.is_fitting:
            self._modules = None

    def find(self) -> Hidden:
        """Search the module, the callbacks and the data module for hidden losses. Reject losses that will not be adopted.

        Raises:
            HiddenLossError: on every rank, with the paths.
            RankMismatchError: on every rank, when ranks would adopt different modules.

        Communication: one handshake.
        """
        adopt = self.fit.options.adopt
        elsewhere = objects_beside_module(self.fit.trainer)
        hidden = find_hidden(self.fit.module, self.fit.strategy.optimizers, elsewhere)
        named = [f"{type(m).__name__} at {path}" for path, m in hidden.optimised.items()]
        refused, must_match = named + hidden.loose, {}
        if adopt:
            refused, must_match = hidden.loose, {"modules to adopt": "; ".join(named) or "none"}
        refused_everywhere = handshake.all_gather_json("hidden losses", must_match, refused)
        if any(refused_everywhere):
            raise _hidden_loss_error(refused_everywhere, adopt=adopt)
        return hidden

    def adopt(self, hidden: Hidden) -> list[FoundLoss]:
        """Register the optimised hidden modules under ``module._adopted_losses``, on the device, sharded or equal on all ranks.

        Returns:
            Descriptions of the adopted losses.

        Communication: one broadcast, and the communication of ``shard_losses``. (``find`` has checked that ranks adopt the same modules.)
        """
        strategy, adopted = self.fit.strategy, nn.ModuleDict()
        for path, found in hidden.optimised.items():
            key = re.sub(r"\W+", "_", path.removeprefix("self.")).strip("_")
            adopted[key if key not in adopted else f"{key}_{len(adopted)}"] = found
        shard_losses(adopted)  # before the original values are stored
        keeper = precision.PrecisionKeeper()
        keeper.remember([adopted])
        strategy.precision_plugin.convert_module(adopted)
        keeper.restore()
        adopted.to(strategy.root_device)
        self.fit.module.add_module(ADOPTED, adopted)
        self.undo.callback(delattr, self.fit.module, ADOPTED)
        ddp = strategy.wrapped_model
        if ddp is not None:  # DDP reads the buffers of the current module in each step
            ddp.parameters_to_ignore |= {f"{ADOPTED}.{name}" for name, _ in adopted.named_buffers()}
        raw_collectives.broadcast_([tensor for _, tensor in named_tensors(adopted) if shard_of(tensor) is None])
        rank_zero_info(f"Adopted as submodules: {', '.join(hidden.optimised)}.")
        self._modules = adopted
        return [FoundLoss(f"{ADOPTED}.{key}", found, learnable=True, owned=True) for key, found in adopted.items()]

    # ------------------------------------------------------------------ checkpoints

    def parameters_with_adopted(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of the module and of adopted losses, also after the fit."""
        named = dict(module.named_parameters())
        if self._modules is not None:
            named.update(self._modules.named_parameters(prefix=ADOPTED))
        return named

    def state_with_adopted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the module and of adopted losses, also after the fit."""
        if self._modules is None:
            return dict(state)
        return {**state, **self._modules.state_dict(prefix=f"{ADOPTED}.")}

    def state_to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state, without adopted losses if none are registered (validate, test, predict)."""
        if hasattr(self.fit.module, ADOPTED):
            return dict(state)
        return {key: value for key, value in state.items() if not key.startswith(f"{ADOPTED}.")}


def _hidden_loss_error(refused: list[list[str]], *, adopt: bool) -> HiddenLossError:
    """Return the error that names the hidden modules of each rank."""
    fix = (
        "They would not be moved, synchronised or saved. Assign them to attributes of the LightningModule (nn.ModuleList or "
        "nn.ModuleDict for several), or pass DDPLossStrategy(adopt=True)."
    )
    if adopt:
        fix = "Only modules that can be reached by attributes, containers, closures or callbacks can be adopted."
    got: str | None = "; ".join(refused[0])
    ranks: list[str] | None = None
    if any(own != refused[0] for own in refused):
        got, ranks = None, ["; ".join(own) or "none hidden" for own in refused]
    return HiddenLossError(
        "parameters in an optimizer",
        expected="parameters of registered submodules",
        got=got,
        ranks=ranks,
        fix=fix,
        collective=True,
    )


# ---------------------------------------------------------------------- global_batch="auto"


def use_global_wrapper(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Set the wrapper that makes a loss global (``GlobalBatchLoss``).

    Example:
        >>> from lightning_ddp_losses import GlobalBatchLoss
        >>> use_global_wrapper(GlobalBatchLoss)  # as importing the package does
    """
    _wrapper[:] = [wrapper]


def _wrap_global(loss: FoundLoss, root: nn.Module) -> nn.Module | None:
    """Return a wrapper that evaluates the loss over all ranks, or None if the loss is not a PML loss or is already global.

    Args:
        loss: Loss found in ``root``.
        root: The LightningModule.

    Raises:
        ConfigurationError: for a cross-batch memory, whose position only an explicit wrapper can save, and for a loss inside a wrapper that
            already gathers.
    """
    inner = uncompiled(loss.module)
    if loss.sees_global_batch:
        return None
    expect(
        not any(isinstance(module, pml.CrossBatchMemory) for module in all_modules(inner)),
        f"global_batch='auto': {loss.title}",
        expected="losses without a memory",
        got="a CrossBatchMemory, whose queue position would not be saved",
        fix="Write GlobalBatchLoss(CrossBatchMemory(...)) in the module.",
    )
    # reject a loss inside a PML wrapper that gathers
    path = loss.name.split(".")
    for depth in range(1, len(path)):
        expect(
            not isinstance(root.get_submodule(".".join(path[:depth])), DistributedLossWrapper),
            f"global_batch='auto': {loss.title}",
            expected="losses that look at the rows they are given",
            got="one in pytorch-metric-learning's DistributedLossWrapper, which gathers by itself",
            fix="Leave the wrapper out.",
        )
    if not isinstance(inner, _WRAPPED):
        return None
    return _wrapper[0](loss.module)
