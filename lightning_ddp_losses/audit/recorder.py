"""A `Recorder` records one process of a run: gradients, parameters, losses, random numbers.

Fits of a LightningModule (``fit_run``) and other training loops (``parity``) both use it. They call it when a step begins, before the
optimizer steps, and after the step.

It follows the plan of the run. Counterfactual runs separate causes: each row has the same random numbers on any rank, or batch statistics
or low precision are switched off on the ranks and in one process. Perturbed runs change parameters and inputs by one rounding unit, which
measures the effect of rounding on each gradient.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_ddp_losses.audit import rank_record
from lightning_ddp_losses.audit.replay import Run, batch_digest, map_batch_tensors, save_batch
from lightning_ddp_losses.audit.targets import TargetTrace
from lightning_ddp_losses.audit.terms import TermSwitch, terms_off
from lightning_ddp_losses.core import inputs, torch_compat
from lightning_ddp_losses.core.modules import synchronises
from lightning_ddp_losses.core.random_state import devices_in_use, global_generators, random_source
from lightning_ddp_losses.distributed.collective_trace import CollectiveTrace
from lightning_ddp_losses.distributed.user_line import users_line
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.losses.pml_registry import compares_rows, gathers_by_itself
from lightning_ddp_losses.losses.products.forms import ProductChoice, rounding_of
from lightning_ddp_losses.randomness.layers import layers_that_drop
from lightning_ddp_losses.randomness.step import PlannedRows
from lightning_ddp_losses.randomness.step_draws import beside_the_step
from lightning_ddp_losses.randomness.training_steps import Places, TrainingSteps
from lightning_ddp_losses.strategies.loss_discovery import find_losses

CLIPS = ("clip_grad_norm_", "clip_grad_value_")
"""Functions of ``torch.nn.utils`` that clip gradients."""

_LOSS_NAME = re.compile(r"(loss|criterion|proxy)(wrapper)?$", re.IGNORECASE)
_PROJECTIONS = 4  # number of projections of each row in a trace


class Recorder:
    """Records one process of a run.

    Args:
        run: Run that it records.
        folder: Folder of the run.
        rank: Rank of this process.

    Attributes:
        record: Record so far.
    """

    def __init__(self, run: Run, folder: Path, rank: int) -> None:
        self.run, self.folder, self.rank = run, folder, rank
        self.record = rank_record.RankRecord()
        self._trace: CollectiveTrace | None = None  # trace of the batches that are being trained on
        self._stages: dict[str, dict[str, str]] = {}  # digests of the gradients of the next step, by stage
        self._terms = TermSwitch(terms_off(run.without))
        by_row = run.by_row and "randomness" not in run.without
        self._draws = TrainingSteps(takes_blocks=True, by_row=by_row)
        self._module = nn.Module()  # the one that is trained

    def write(self, step: int, kind: rank_record.Kind, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """Store the tensors of one step and kind. None denotes a tensor that does not exist.

        Communication: a gather for each tensor that is divided over the ranks.
        """
        self.record.tensors[step, kind] = {
            name: rank_record.store_tensor(tensor, self.folder) for name, tensor in tensors
        }

    def start(self, module: nn.Module, precision: str) -> None:
        """Copy the initial weights of the ranks, perturb them by one rounding unit in a perturbed run, and store them."""
        self.record.parameter_count = sum(parameter.numel() for parameter in module.parameters())
        self.record.terms = self._terms.lines
        self._module = module
        self._follow_calls(module)
        if self.run.trace or self._terms.off:
            self.before_backward(self._see_loss)
        load_start_(module, self.run, self.rank)
        if self.run.perturb is not None:
            unit = unit_roundoff(module, precision) * self.run.perturb.share
            generator = torch.Generator().manual_seed(self.run.perturb.seed)
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    _perturb_(parameter, unit, generator)
        self.write(0, "initial", [*module.named_parameters(), *module.named_buffers()])

    def _follow_calls(self, module: nn.Module) -> None:
        """Record the trainable parameters of each module whose forward is called."""
        for prefix, child in module.named_modules():
            own = [name for name, parameter in child.named_parameters(prefix, recurse=False) if parameter.requires_grad]
            if own:
                child.register_forward_pre_hook(functools.partial(self._record_call, own))

    def _record_call(self, own: list[str], *_: Any) -> None:
        known = self.record.called_parameters
        if own[0] not in known:
            known += own

    def describe(
        self, module: nn.Module, named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], **further: Any
    ) -> None:
        """Describe the module and its optimizers.

        Args:
            module: The unwrapped module.
            named: Its parameters, and parameters that are only in an optimizer.
            optimizers: All optimizers.
            **further: Further fields of ``ModuleInfo``, including ``precision``.
        """
        held = set(map(id, optimized(optimizers).values()))
        modules = {name: child for name, child in module.named_modules() if name}
        self.record.module_info = rank_record.ModuleInfo(
            owners=parameter_owners(module, list(named)),
            unoptimized=[name for name, p in named.items() if p.requires_grad and id(p) not in held],
            module_types={name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in modules.items()},
            pair_losses=local_pair_losses(module),
            dropout=layers_that_drop(module),
            optimizers=[type(optimizer).__name__ for optimizer in optimizers],
            unit=unit_roundoff(module, further["precision"]),
            products=product_choices(module),
            caches=_caches_in(module),
            **further,
        )

    def follow_layers(self, module: nn.Module) -> None:
        """In the traced step, record a few numbers for each row of each layer's output and of the output's gradient."""

        @beside_the_step()
        def record_call(name: str, layer: nn.Module, args: Any, output: Any) -> None:
            first = next(iter(inputs.tensors_in(output)), None)
            is_traced = self.record.steps + 1 == self.run.trace
            if not is_traced or first is None or not first.is_floating_point():
                return
            call = rank_record.ModuleCall(name, type(layer).__name__, _projections(first))
            self.record.trace.append(call)

            @beside_the_step()
            def record_gradient(gradient: Tensor) -> None:
                call.gradient = _projections(gradient)

            if first.requires_grad:
                first.register_hook(record_gradient)  # type: ignore[no-untyped-call]

        for name, child in module.named_modules():
            if self.run.trace and name and next(child.children(), None) is None:
                child.register_forward_hook(functools.partial(record_call, name))

    def replayed_batch(self, planned: Sequence[Any]) -> Any:
        """Load a batch of a replay, given its number and `ReplayBatch`, and perturb it by one rounding unit in a perturbed run."""
        index, source = planned
        batch, perturb = source.load(), self.run.perturb
        if perturb is None:
            return batch
        return perturb_batch(batch, self.record.module_info.unit * perturb.share, perturb.seed * 1000 + index)

    def record_batch(self, batch: Any, step: int, rows: rank_record.LoaderRows, epoch: int = 0) -> None:
        """Record a batch. In the user's run, also store it for replays."""
        found = rank_record.BatchRecord(epoch, step, rows)
        if not self.run.plans:
            path = self.folder / f"batch-{self.rank}-{len(self.record.batches)}.pkl"
            save_batch(batch, path)
            found.file, found.digest = str(path), batch_digest(batch)
        self.record.batches.append(found)

    @property
    def replaces_draws(self) -> bool:
        """Whether the audit replaces the random numbers that steps draw in this process."""
        return self.run.exact_draws or "randomness" in self.run.without

    def seed_draws(self) -> None:
        """Seed separate generators of the steps with the run's seed, unless they were loaded from a checkpoint."""
        if self.replaces_draws and not self._draws.states:
            self._draws.seed_(torch.initial_seed())

    def forward_draws(
        self, batch: Any, places: Places, numbers: Sequence[int], *, ends: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context of a forward, in which random numbers equal those of one process if the run requires it.

        Args:
            batch: The batch, which has been recorded, with its rows in dimension 0.
            places: Further tensors with the dimension of their rows.
            numbers: Number of the recorded batch, or the numbers of its micro-batches.
            ends: Whether backward is also run inside the context.
        """
        if not self.replaces_draws:
            return contextlib.nullcontext()
        planned = None
        if "randomness" in self.run.without:
            planned = self._planned_rows(numbers)
        return self._draws.forward(batch, places, ends=ends, planned=planned)

    def backward_draws(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a backward."""
        if not self.replaces_draws:
            return contextlib.nullcontext()
        return self._draws.backward()

    def end_draws(self) -> None:
        """Raise an error about the draws of the last step if it did not run a backward."""
        if self.replaces_draws:
            self._draws.end()

    def _planned_rows(self, numbers: Sequence[int]) -> PlannedRows:
        """Return the rows of a joint draw that these batches use."""
        planned = list(chain.from_iterable(self.run.plans[self.rank]))
        found = [planned[number].rows_of_draw() for number in numbers]
        expect(
            len({each.order for each in found}) == 1,
            "micro-batches of a loop",
            expected="the same rows of the draws in each",
            got="others, so that it is not known for which rows the loop draws",
            error=InputError,
            fix="Draw for the rows of each micro-batch in one order.",
        )
        return found[0]

    @contextlib.contextmanager
    def conditions(self, module: nn.Module, batches: int = 1) -> Iterator[None]:
        """Switch parts off while batches are trained on, and record whether random numbers are drawn."""
        if "batch_norm" in self.run.without:
            # batch norm uses its running statistics and does not update them
            for child in module.modules():
                if isinstance(child, torch_compat.BATCH_NORM_TYPES):
                    child.eval()
        if not self.record.used_rng:
            self.record.norms_in_training = norm_classes(module)
        self._stages = {}
        before = self._draws_digest()
        with contextlib.ExitStack() as modes:
            if self.record.steps + 1 == self.run.trace:
                # graph nodes store the line that created them
                modes.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
                if self.run.ranks:
                    targets = modes.enter_context(TargetTrace())
                    self.record.counted_targets = targets.found
                    self._trace = modes.enter_context(CollectiveTrace())
            yield
        self._trace = None
        self.record.used_rng += [self._draws_digest() != before] * batches

    def _draws_digest(self) -> str:
        """Digest the states of all generators that steps may draw from, except separate ones in a run without randomness."""
        digest = rng_digest()
        if "randomness" in self.run.without:
            return digest
        return digest + "".join(map(rank_record.tensor_digest, self._draws.states.values()))

    def before_backward(self, see: Callable[[Tensor], None]) -> None:
        """Call a function with each loss before its backward. A backward inside another one is not called on a loss."""
        original: Callable[..., None] = Tensor.backward
        depth = 0

        @functools.wraps(original)
        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            depth += 1
            try:
                if depth == 1:
                    see(loss)
                original(loss, *args, **kwargs)
            finally:
                depth -= 1

        Tensor.backward = backward  # type: ignore[method-assign, assignment]

    @beside_the_step()
    def _see_loss(self, loss: Tensor) -> None:
        """Record the terms of a loss and, in a traced step, the lines that cut its graph between ranks."""
        if self._trace is not None:
            self.record.cut_lines += [[cut.kind, cut.line] for cut in self._trace.reaching(loss)]
        if loss.grad_fn is not None:
            self._terms.see(loss, users_line(inspect.currentframe()))

    @beside_the_step()
    def see_gradients(self, stage: str, named: Mapping[str, nn.Parameter]) -> None:
        """Store digests of gradients before the step, by a stage of ``RankRecord.stages``."""
        self._stages[stage] = self._gradient_digests(named)

    @beside_the_step()
    def record_gradients(
        self, named: Mapping[str, nn.Parameter], optimizer: Optimizer, loss_scale: float | None = None
    ) -> None:
        """Record the gradients that an optimizer is about to use, with learning rates and loss scale.

        Args:
            named: Parameters with the gradients that are recorded.
            optimizer: Optimizer that steps.
            loss_scale: The GradScaler's scale.
        """
        self.record.steps += 1
        self.write(self.record.steps, "gradient", [(name, parameter.grad) for name, parameter in named.items()])
        self.write(self.record.steps, "forward buffer", self._module.named_buffers())
        self.record.stages.append({**self._stages, "hooked": self._gradient_digests(named)})
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.record.learning_rates.append(rates)
        self.record.loss_scales.append(loss_scale)

    @beside_the_step()
    def record_used(self, named: Mapping[str, nn.Parameter]) -> None:
        """Record the gradients after the step."""
        self.record.stages[-1]["used"] = self._gradient_digests(named)

    @beside_the_step()
    def record_parameters(self, step: int, named: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        """Record parameters and buffers after a step."""
        self.write(step, "parameter", named.items())
        self.write(step, "buffer", module.named_buffers())

    def _gradient_digests(self, named: Mapping[str, nn.Parameter]) -> dict[str, str]:
        """Return digests of gradients by name. The result is empty in one process, because there are no peers to compare with.

        Gradients that ``fully_shard`` divides are excluded, because each rank has a different part.
        """
        if not self.run.ranks:
            return {}
        given = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        return {name: rank_record.tensor_digest(grad) for name, grad in given.items() if not isinstance(grad, DTensor)}


def wrap_function(
    owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Call ``before``, and ``after`` with its arguments, around a function of an object, a class or a module."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = function(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, wrapped)


class Inside:
    """Whether a function of an object, a class or a module is running.

    Args:
        owner: The object.
        name: Name of the function.

    Attributes:
        is_running: True from its start to its end.
    """

    is_running = False

    def __init__(self, owner: Any, name: str) -> None:
        wrap_function(owner, name, before=self._start, after=self._end)

    def _start(self) -> None:
        self.is_running = True

    def _end(self, *_: Any) -> None:
        self.is_running = False


def load_start_(module: nn.Module, run: Run, rank: int) -> None:
    """Copy the initial weights of another run into the module: rank 0's, or this rank's block."""
    source = run.start
    if source is None:
        return
    shards = source.records[rank].module_info.shards if run.ranks else {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        entry = source.entry(0, 0, "initial", name)
        if not entry.exists:
            continue
        start = entry.tensor()
        if name in shards:
            start = shards[name].own_part(start)
        if start.shape != tensor.shape:
            continue
        with torch.no_grad():
            if isinstance(tensor, DTensor):  # copy this rank's part, without communication
                mesh, placements = tensor.device_mesh, tensor.placements
                tensor.copy_(distribute_tensor(start, mesh, placements, src_data_rank=None))
            elif entry.digest != rank_record.tensor_digest(tensor):
                tensor.copy_(start)


# ---------------------------------------------------------------------- descriptions


def _projections(values: Tensor) -> list[list[float]]:
    """Return a few random projections of each row, which are equal in every process. A scalar is one row."""
    detached = values.detach()
    if detached.is_complex():
        detached = torch.view_as_real(detached.resolve_conj())
    wide = detached.double().cpu()
    rows = wide.reshape(len(values) if values.ndim else 1, -1)
    generator = torch.Generator().manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float64)
    found: list[list[float]] = (rows @ directions).tolist()
    return found


def norm_classes(module: nn.Module) -> dict[str, str]:
    """Return the class of each batch norm by name, which is ``SyncBatchNorm`` for a layer that this package synchronises."""
    found = {}
    for name, child in module.named_modules():
        cls = type(child).__name__
        if name and (isinstance(child, torch_compat.BATCH_NORM_TYPES) or "BatchNorm" in cls):
            found[name] = "SyncBatchNorm" if synchronises(child) else cls
    return found


def parameter_owners(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Return ``encoder``, ``unregistered`` or the name of the loss that a parameter belongs to, for each name."""
    # losses that the strategies find, and modules whose class has the name of a loss
    losses = [loss.name for loss in find_losses(module)]
    for name, child in module.named_modules():
        if name and _LOSS_NAME.search(type(torch_compat.uncompiled(child)).__name__):
            losses.append(name)
    found = {}
    for name in names:
        parents = [loss for loss in losses if name.startswith(f"{loss}.")]
        rest = "unregistered" if name.startswith("optimizers[") else "encoder"
        found[name] = min(parents, key=len, default=rest)  # the outermost
    return found


def local_pair_losses(module: nn.Module) -> list[str]:
    """List the losses that compare rows by name, except losses inside a module that gathers the rows of all ranks."""
    found = []
    gathering: tuple[str, ...] = ()
    for name, child in module.named_modules():
        if name.startswith(gathering):
            continue
        if gathers_by_itself(child):
            gathering += (f"{name}.",)
        elif compares_rows(child):
            found.append(name)
    return found


def _caches_in(module: nn.Module) -> list[str]:
    """Return the paths of the buffers that are not in the state dict."""
    found = []
    for path, child in module.named_modules():
        found += [
            f"{path}.{name}".strip(".")
            for name in torch_compat.buffer_slots(child)
            if not torch_compat.is_persistent(child, name)
        ]
    return found


def optimized(optimizers: Iterable[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the parameters in optimizers by their position."""
    found = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                found[f"optimizers[{i}].param_groups[{j}][{k}]"] = parameter
    return found


def loss_of(output: Any) -> Tensor | None:
    """Return the loss that a step has returned, directly or in a dict, or None if it is not a tensor."""
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None


# ---------------------------------------------------------------------- parts that are switched off

ABLATIONS = {
    "batch_norm": "batch norm normalises with its running statistics",
    "precision": "float64",
    "uneven": "the same rows, divided evenly among the ranks",
}
"""Parts that can be switched off, and their replacements."""


def rng_digest() -> str:
    """Digest the random states that a training step may draw from. Two digests differ if random numbers were drawn in between."""
    found = hashlib.blake2b(digest_size=12)
    for generator in global_generators(devices_in_use()):
        source = random_source(generator)
        assert source is not None
        state = source.get_state()
        found.update(state.numpy().data if isinstance(state, Tensor) else pickle.dumps(state))
    return found.hexdigest()


# ---------------------------------------------------------------------- rounding

_WITH_PRODUCTS = (ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss)
_ROUNDOFF = {"64": 2.0**-53, "32": 2.0**-24, "16": 2.0**-11, "bf16": 2.0**-8}
_PIECE = 1 << 20  # elements that are perturbed at a time


def unit_roundoff(module: nn.Module, precision: str) -> float:
    """Return the largest relative rounding error of one operation.

    Args:
        module: Module whose parameters' dtypes are used if ``precision`` denotes plain float32 training.
        precision: Lightning's name of the precision (``"bf16-mixed"``).
    """
    name = precision.split("-", maxsplit=1)[0]
    if name not in _ROUNDOFF:
        name = "bf16"  # 8-bit floats and other transformer precisions: at most as good
    if name != "32":
        return _ROUNDOFF[name]
    of_parameters = [torch.finfo(p.dtype).eps / 2 for p in module.parameters() if p.is_floating_point()]
    unit = max(of_parameters, default=_ROUNDOFF[name])
    # products of float64 rows are never computed in a lower precision
    if unit < _ROUNDOFF["32"]:
        return unit
    return max([unit, *map(rounding_of, product_choices(module))])


def product_choices(module: nn.Module) -> list[ProductChoice]:
    """Return the sorted product options of losses inside a module that are less exact than float32, without repetitions."""
    found: set[ProductChoice] = {child.products for child in module.modules() if isinstance(child, _WITH_PRODUCTS)}
    return sorted(found - {"float32", "auto"})


@torch.no_grad()
def _perturb_(tensor: Tensor, unit: float, generator: torch.Generator) -> None:
    """Move each element by one rounding unit, up or down at random, piece by piece."""
    eps = torch.finfo(tensor.dtype).eps
    step = eps if unit <= eps / 2 else unit  # a factor of 1 + eps / 2 would round to 1
    pieces: tuple[Tensor, ...] = (tensor,)
    if tensor.is_contiguous():
        pieces = tensor.view(-1).split(_PIECE)  # type: ignore[no-untyped-call]
    for piece in pieces:
        bits = torch.randint(0, 2, piece.shape, generator=generator, dtype=torch.int8).to(piece.device)
        signs = (2 * bits - 1).to(piece.dtype)
        piece.mul_(signs.mul_(step).add_(1))


def perturb_batch(batch: Any, unit: float, seed: int) -> Any:
    """Return the batch with its floating-point tensors perturbed by one rounding unit."""
    generator = torch.Generator().manual_seed(seed)

    def perturbed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        moved = tensor.detach().clone()
        _perturb_(moved, unit, generator)
        return moved

    return map_batch_tensors(batch, perturbed)
