"""What a fit does to its losses: what surrounds each call, and a place for hidden losses.

* Around each call of a loss: precision, input checks, its parameters kept in the graph, and a count. A patch sits in the loss's instance
  as its ``forward`` for the length of a fit: attributes, parameter names and hooks stay those of the plain module. A copy or a pickle of
  the loss carries the plain ``forward`` again, so both need no peer. How the loss computes is planned once (``FullPrecisionPlan``). A call
  makes another plan if dtypes, devices, autocast, or the modules and parameters inside the loss are not those of the last call.
* The call check: one handshake in each synchronising backward with the number of calls and rows of each loss on each rank. It is exchanged
  at one point: before the first gradients of the model can leave, and wait for a peer that does not come. A hook on the model's parameters,
  which runs before DDP's own, finds that point by counting bytes, as all ranks do. Without such gradients it is the end of autograd's
  backward. By then backward has passed through the losses. The upstream gradients of their global values travel along and are compared
  before anything is reduced. Peers of a rank with a loss that failed in backward meet it here. Payloads of checks travel along too, and
  small gradients of the losses (``LossReducer``).
* A hidden loss, which the module does not register: the same refusal on every rank, or a place under ``_adopted_losses`` for the length of
  a fit. Checkpoints hold adopted losses also after it.
* With ``global_batch="auto"`` the patch hands the call to a wrapper that evaluates the loss over the rows of all ranks. Losses and
  strategies do not know each other. The package hands the wrapper over when it is imported.
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
from lightning_ddp_losses.core.compat import all_slots, is_any_autocast_on, uncompiled
from lightning_ddp_losses.core.modules import Hidden, MethodPatch, ModuleContents, eager, eager_recursive, find_hidden
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

_CALL = struct.Struct("<IQ?")  # calls, rows, whether a gradient is there already
_CALLS, _UPSTREAM_GRADIENTS, _GRADIENTS = "calls", "upstream gradients", "gradients"  # notes of the call check
_KIND = attrgetter("dtype", "device", "requires_grad")
_WRAPPED = (pml.BaseMetricLossFunction, pml.MultipleLosses, pml.SelfSupervisedLoss)
_wrapper: list[Callable[[nn.Module], nn.Module]] = []


class LossForwardPatch(MethodPatch):
    """Runs one loss in full precision on checked inputs and counts its calls.

    Attributes:
        sees_global_batch: True if the loss evaluates the rows of all ranks.
        counting: True if calls count (only inside ``training_step``, with gradients on).
        calls: Calls since the last call check.
        rows: Rows of those calls, summed.
    """

    def __init__(self, loss: FoundLoss, *, refuse_nan: bool, global_loss: nn.Module | None = None) -> None:
        super().__init__(loss.module)
        self.loss = loss
        self._inner = uncompiled(loss.module)
        self._title = loss.title
        self.sees_global_batch = loss.sees_global_batch or global_loss is not None
        # a global loss of ours computes wide, and sends rows in the dtype that they have
        self._computes_wide = loss.sees_global_batch and isinstance(self._inner, WithProcessGroup)
        self._global_loss = global_loss  # evaluates the loss over all ranks, and comes back here for the loss itself
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
        # 2. check the inputs. To look at values on an accelerator waits for it
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

    @eager_recursive  # compiled, it would be compiled again for each plan
    def _plan_for(self, given: Sequence[Tensor]) -> FullPrecisionPlan:
        """Return the plan of a call: the last one, unless the loss holds something else or its tensors are of another kind.

        (pytorch-metric-learning assigns the data of its weights in forward, in another dtype if the inputs have one.)
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
        patches: One for each loss of the fit.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self.patches: list[LossForwardPatch] = []
        self._installed: list[LossForwardPatch | UnregisteredLossPatch] = []

    def install(self, idle: Mapping[str, nn.Module]) -> None:
        """Patch the losses that are known now, and watch those hidden modules that are losses.

        Args:
            idle: By path, hidden modules that no optimizer holds.
        """
        # if a scaler looks for overflow, NaN is its business
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
        """Count calls from now on, or stop counting."""
        for patch in self._installed:
            patch.counting = on


# ---------------------------------------------------------------------- the calls of all ranks


@dataclass
class Calls:
    """Calls of all ranks since the last synchronising backward.

    Attributes:
        parameters: Parameters that the strategy reduces in this backward.
        step: Number of the step.
        expected: Per loss, whether its parameters may hold gradients.
        uneven: Rows of each rank, by the title of a loss with different numbers.
    """

    parameters: ReductionPlan
    step: int
    expected: list[bool] = field(default_factory=list)
    uneven: dict[str, list[int]] = field(default_factory=dict)


class Attached(NamedTuple):
    """What a part outside this file sends in each call check.

    Attributes:
        name: Name of its note.
        measure: Returns this rank's bytes. Must not raise.
        judge: Gets the bytes of all ranks in rank order. Its errors must be the same on all ranks.
    """

    name: str
    measure: Callable[[], bytes]
    judge: Callable[[list[bytes]], None]


class CallCheck:
    """Compares the ranks' calls in each synchronising backward.

    Args:
        reducer: Averages gradients, and sends few bytes of them along.
        counters: The calls of each loss.

    Communication: one handshake per synchronising backward, one more in a step with new parameters.
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
        """Count the bytes of gradient that the model's DDP gets. Call it again when it reduces other parameters."""
        self.remove()
        # a gradient reaches this hook before it reaches DDP
        self._hooks = [
            p.register_hook(partial(self._on_gradient, p.nbytes))  # type: ignore[no-untyped-call]
            for p in self._parameters.elsewhere.values()
        ]

    def remove(self) -> None:
        """Leave no hook behind."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def attach(self, name: str, measure: Callable[[], bytes], judge: Callable[[list[bytes]], None]) -> None:
        """Send a note in each call check, as ``Attached`` describes it. A second note of a name gets a number."""
        names = {attached.name for attached in self._attached}
        if name in names:
            name = f"{name} {len(names)}"
        self._attached.append(Attached(name, measure, judge))

    def start(self, step: int) -> None:
        """Prepare the handshake of a synchronising backward: what ran on this rank. Counts start again from zero."""
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
        # upstream gradients of global values travel along
        self._upstream_grads.start()

    def _on_gradient(self, num_bytes: int, _: Tensor) -> None:
        self._ready_bytes += num_bytes
        if self._is_unsent and self._ready_bytes >= self._parameters.first_bucket:
            self.exchange()

    def exchange(self) -> None:
        """Exchange the handshake of this backward, once.

        Raises:
            LossCallError: on every rank, when a learnable loss ran on some ranks only.
            RankMismatchError: on every rank, when parameters differ by name, shape or dtype, when the ranks weigh a global value
                differently, or when a parameter created after the wrap does not start equal.
        """
        calls = self._calls
        if calls is None or not self._is_unsent:
            return
        self._is_unsent = False
        plan = calls.parameters
        # 1. what has come up since this backward began
        self._ledger.post(_GRADIENTS, self._reducer.pack(plan))
        self._ledger.post(_UPSTREAM_GRADIENTS, self._upstream_grads.take().encode())
        # 2. all notes of all ranks
        notes = self._ledger.meet(plan.calls, {"step": calls.step})
        # 3. what follows from them
        self._compare_calls_(calls, notes[_CALLS])
        refuse_other_upstream_grads([noted.decode() for noted in notes[_UPSTREAM_GRADIENTS]])
        for attached in self._attached:
            attached.judge(notes[attached.name])
        self._reducer.receive(notes[_GRADIENTS])
        if plan.new:
            self._parameters.admit(plan.new)

    def finish(self) -> Calls | None:
        """Return the calls of all ranks, and exchange them now if backward did not. None if no handshake was prepared."""
        self.exchange()
        calls, self._calls = self._calls, None
        return calls

    def _compare_calls_(self, calls: Calls, packed: Sequence[bytes]) -> None:
        """Complete the calls with the numbers of all ranks, or refuse losses that ran on some ranks only."""
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
    """Return the text for a loss that ran on some ranks only."""
    ranks = [f"{c} call{'s' * (c > 1)} on {r} rows" if c else "not called" for c, r in zip(calls, rows, strict=True)]
    return format_error(f"{title} ran on some ranks only", expected="every rank or none", ranks=ranks)


def refuse_other_upstream_grads(noted: Sequence[str]) -> None:
    """Refuse global values that came back in backward with different upstream gradients, as each rank noted them.

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
    """Watches an unregistered loss that no optimizer holds: used in ``training_step`` with gradients, it is an error."""

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
    """Registers hidden losses for the length of a fit, and keeps them for checkpoints. Without ``adopt`` they are refused."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._modules: nn.ModuleDict | None = None

    def setup(self) -> None:
        """Forget the losses of an earlier fit. Until the next one, checkpoints hold them."""
        if self.fit.is_fitting:
            self._modules = None

    def find(self) -> Hidden:
        """Search the module, the callbacks and the data module for hidden losses. Refuse those that will not be adopted.

        Raises:
            HiddenLossError: on every rank, with the paths.
            RankMismatchError: on every rank, when ranks would adopt different modules.

        Communication: one handshake.
        """
        trainer, adopt = self.fit.trainer, self.fit.options.adopt
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        elsewhere: dict[str, Any] = {f"callbacks[{i}] ({type(c).__name__})": c for i, c in enumerate(callbacks)}
        elsewhere["datamodule"] = getattr(trainer, "datamodule", None)
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
            Them, as the strategy knows losses.

        Communication: one broadcast. What ``shard_losses`` needs. (That all ranks adopt the same was compared in ``find``.)
        """
        strategy, adopted = self.fit.strategy, nn.ModuleDict()
        for path, found in hidden.optimised.items():
            key = re.sub(r"\W+", "_", path.removeprefix("self.")).strip("_")
            adopted[key if key not in adopted else f"{key}_{len(adopted)}"] = found
        shard_losses(adopted)  # before its values are remembered
        keeper = precision.PrecisionKeeper()
        keeper.remember([adopted])
        strategy.precision_plugin.convert_module(adopted)
        keeper.restore()
        adopted.to(strategy.root_device)
        self.fit.module.add_module(ADOPTED, adopted)
        self.undo.callback(delattr, self.fit.module, ADOPTED)
        ddp = strategy.wrapped_model
        if ddp is not None:  # it reads the buffers of the live module in each step
            ddp.parameters_to_ignore |= {f"{ADOPTED}.{name}" for name, _ in adopted.named_buffers()}
        raw_collectives.broadcast_([tensor for _, tensor in named_tensors(adopted) if shard_of(tensor) is None])
        rank_zero_info(f"Adopted as submodules: {', '.join(hidden.optimised)}.")
        self._modules = adopted
        return [FoundLoss(f"{ADOPTED}.{key}", found, learnable=True, owned=True) for key, found in adopted.items()]

    # ------------------------------------------------------------------ checkpoints

    def parameters_with_adopted(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's parameters, and those of adopted losses also after the fit."""
        named = dict(module.named_parameters())
        if self._modules is not None:
            named.update(self._modules.named_parameters(prefix=ADOPTED))
        return named

    def state_with_adopted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the module's state, with that of adopted losses also after the fit."""
        if self._modules is None:
            return dict(state)
        return {**state, **self._modules.state_dict(prefix=f"{ADOPTED}.")}

    def state_to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state without adopted losses where none are registered (validate, test, predict)."""
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
    """Return the loss over all ranks, around the loss itself. None for one that is no PML loss, or global already.

    Args:
        loss: Found in ``root``.
        root: The LightningModule.

    Raises:
        ConfigurationError: for a cross-batch memory: only an explicit wrapper can save its position. For a loss inside a wrapper that
            gathers already.
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
    # no loss inside a wrapper of PML's that gathers
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
