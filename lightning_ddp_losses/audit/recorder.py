"""The callback that writes down what a run does, in whatever process and under whatever strategy it runs.

Gradients are taken where the optimizer will see them: after the module's own ``on_before_optimizer_step`` and before clipping.
Parameters are taken when the batch that stepped has ended.

Measured with Lightning 2.6.6 in 2026: ``on_fit_start`` runs after the model was wrapped; ``on_before_optimizer_step`` of callbacks
runs before the module's own, so a callback's hook alone would see gradients that the module changes afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_ddp_losses.audit import ablations
from lightning_ddp_losses.audit.rank_record import (
    BatchRecord,
    LoaderRows,
    ModuleCall,
    ModuleInfo,
    RankRecord,
    Recording,
    Writer,
    tensor_digest,
)
from lightning_ddp_losses.audit.replay import Run, batch_digest, count_loader_rows, save_batch
from lightning_ddp_losses.core import compat, nests
from lightning_ddp_losses.core.autograd_graph import accumulation_node
from lightning_ddp_losses.core.forward_patch import synchronises
from lightning_ddp_losses.core.module_search import find_hidden
from lightning_ddp_losses.core.random_state import devices_in_use, global_generators, preserve_random_state
from lightning_ddp_losses.distributed.collective_trace import CollectiveTrace
from lightning_ddp_losses.distributed.fingerprint import fingerprints
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.losses.pml_registry import compares_rows, gathers_by_itself
from lightning_ddp_losses.samplers.evaluation import repeated_rows
from lightning_ddp_losses.strategies.loss_discovery import find_losses
from lightning_ddp_losses.strategies.training_data import describe_reshuffle

LEFT_OUT = (Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer)
"""Callbacks that have no part in an audit."""

_LOSS_NAME = re.compile(r"(loss|criterion|proxy)(wrapper)?$", re.IGNORECASE)
_ADOPTED = "_adopted_losses."
_PROJECTIONS = 4  # numbers that a trace keeps of each row


class _WrappedParameter(NamedTuple):
    """One parameter as it was when DDP was built; ``node`` is the graph's node with DDP's hook, None without one."""

    parameter: nn.Parameter
    dtype: torch.dtype
    trainable: bool
    node: Any

    def event(self, now: nn.Parameter) -> str:
        """Return the first thing that has happened to the parameter since; empty if nothing has."""
        if now is not self.parameter:
            return "replaced after the wrap"
        if now.dtype != self.dtype:
            return f"changed from {self.dtype} to {now.dtype}"
        if now.requires_grad and self.node is not None and accumulation_node(now) is not self.node:
            return "changed its dtype or device and back after the wrap"  # gradients no longer pass DDP's hook
        if now.requires_grad and not self.trainable:
            return "unfrozen after the wrap"
        if self.trainable and not now.requires_grad:
            return "frozen after the wrap"
        return ""


class Recorder(Callback):
    """Records one rank of a run.

    Args:
        run: What the run is.
        folder: Where it is recorded.
        rank: This process's.

    Attributes:
        faults: Those that the strategy leaves to what is made of the recording.
    """

    faults = ("F71",)

    def __init__(self, run: Run, folder: Path, rank: int) -> None:
        self.run = run
        self.writer = Writer(folder, rank)
        self.record = RankRecord()
        self._hooks = contextlib.ExitStack()  # what is undone when the run ends
        self._ablations = contextlib.ExitStack()  # what is switched off for the length of a batch
        self._trace: CollectiveTrace | None = None  # of the batch that is being trained on
        self._unwritten_step = 0  # the step whose parameters are still to be written; 0: none
        self._inside_strategy_step = False
        self._rng_before = ""
        self._wrapped: dict[str, _WrappedParameter] = {}
        # gradients of the step to come, by stage
        self._fingerprints: dict[str, dict[str, int]] = {}
        self._stepping: dict[str, nn.Parameter] = {}  # of the step that is being made

    # ------------------------------------------------------------------ before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave out callbacks that want a validation, files or a terminal; the module may have brought some."""
        kept = [each for each in trainer.callbacks if not isinstance(each, LEFT_OUT)]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the module as it is right after the wrap, and hook what Lightning has no callback for."""
        has_hooks = isinstance(trainer.strategy.model, DistributedDataParallel)
        for name, parameter in pl_module.named_parameters():
            node = accumulation_node(parameter) if has_hooks and parameter.requires_grad else None
            self._wrapped[name] = _WrappedParameter(parameter, parameter.dtype, parameter.requires_grad, node)
        self.record.parameter_order = list(self._wrapped)
        self.record.parameter_count = sum(wrapped.parameter.numel() for wrapped in self._wrapped.values())
        self.record.norms_at_wrap = norm_classes(pl_module)
        self._hook_steps(trainer, pl_module)
        self._hook_backwards(trainer, pl_module)
        self._hook_metrics(pl_module)
        if self.run.trace:
            self._hooks.enter_context(followed_layers(pl_module, self.record, self.run.trace))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the weights of the ranks' run, and write them down."""
        if self.run.start:
            load_start_(pl_module, self.run, self.writer.rank)
        if self.run.perturb is not None:
            unit = ablations.unit_roundoff(pl_module, str(trainer.precision))
            ablations.perturb_module_(pl_module, unit, self.run.perturb)
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False  # what it monitors may come from a validation
        self.writer.write(0, "initial", [*pl_module.named_parameters(), *pl_module.named_buffers()])
        repeated = repeated_validation_rows(trainer) if self.run.validates else []
        self.record.module_info = dataclasses.replace(describe_module(trainer, pl_module), repeated_rows=repeated)
        if self.run.seed is not None:
            seed_everything(self.run.seed, verbose=False)

    # ------------------------------------------------------------------ hooks on these objects only

    def _hook_steps(self, trainer: Trainer, module: LightningModule) -> None:
        """Record gradients before each optimizer step, Lightning's own or one behind its back."""

        def record(optimizer: Any) -> None:
            self._record_step(trainer, module, optimizer)

        def set_inside(inside: bool, *_: Any) -> None:
            self._inside_strategy_step = inside

        def record_used(*_: Any) -> None:
            if self._stepping:
                self.record.fingerprints[-1]["used"] = self._gradient_fingerprints(self._stepping)
            self._stepping = {}

        def record_unhooked(optimizer: Any, *_: Any) -> None:
            # manual optimisation with optimizer.step() of torch's own calls none of Lightning's hooks
            if not module.automatic_optimization and not self._inside_strategy_step:
                record(optimizer)

        self._wrap_method(module, "on_before_optimizer_step", after=record)
        enter, leave = functools.partial(set_inside, True), functools.partial(set_inside, False)
        self._wrap_method(trainer.strategy, "optimizer_step", before=enter, after=leave)
        for optimizer in trainer.optimizers:
            self._hooks.callback(optimizer.register_step_pre_hook(record_unhooked).remove)
            # what clipping left; Lightning runs the closure inside the step, so before it there is nothing to see
            self._hooks.callback(optimizer.register_step_post_hook(record_used).remove)

    def _hook_backwards(self, trainer: Trainer, module: LightningModule) -> None:
        """Count backward calls: those through Lightning, and all; see what the strategy's own leave."""

        def record_reduced(*_: Any) -> None:
            self._fingerprints["reduced"] = self._gradient_fingerprints(parameters_by_name(trainer, module))

        def count_lightning() -> None:
            self.record.lightning_backwards += 1

        plain_backward = Tensor.backward

        @functools.wraps(plain_backward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.record.tensor_backwards += 1
            return plain_backward(*args, **kwargs)  # type: ignore[no-untyped-call]

        self._wrap_method(trainer.strategy, "backward", before=count_lightning, after=record_reduced)
        Tensor.backward = counted  # type: ignore[method-assign]
        self._hooks.callback(setattr, Tensor, "backward", plain_backward)

    def _hook_metrics(self, module: LightningModule) -> None:
        """Note metrics that return a value with gradient."""

        def note(name: str, metric: Any, args: Any, output: Any) -> None:
            has_gradient = isinstance(output, Tensor) and output.requires_grad
            if has_gradient and name not in self.record.metric_losses:
                self.record.metric_losses.append(name)

        for name, child in module.named_modules():
            if is_metric(child):
                self._hooks.callback(child.register_forward_hook(functools.partial(note, name)).remove)

    def _wrap_method(
        self, owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[..., None] | None = None
    ) -> None:
        """Call ``before`` and ``after`` around a method of one object, until ``close``."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = method(*args, **kwargs)
            if after is not None:
                after(*args)
            return result

        owner.__dict__[name] = wrapped
        self._hooks.callback(owner.__dict__.pop, name, None)

    # ------------------------------------------------------------------ steps

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See the gradients that DDP has reduced, before the module's own hook does."""
        self._fingerprints["backward"] = self._gradient_fingerprints(parameters_by_name(trainer, pl_module))

    def _gradient_fingerprints(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
        """Return what gradients are now, by name; nothing in one process, which has nobody to compare them with."""
        return gradient_fingerprints(parameters) if self.run.ranks else {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch, and switch off what the run is without."""
        step = self.record.steps + 1
        is_first = not self.record.batches
        self._record_batch(trainer, batch, step)
        if "batch_norm" in self.run.without:
            ablations.batch_norm_to_eval_mode_(pl_module)
        if is_first:
            self.record.norms_in_training = norm_classes(pl_module)
        self._rng_before = ablations.rng_digest()
        if step == self.run.trace and self.run.ranks:
            self._trace = self._ablations.enter_context(CollectiveTrace())
        if "randomness" in self.run.without:
            self._ablations.enter_context(ablations.MeanDraws())  # type: ignore[no-untyped-call]

    def _record_batch(self, trainer: Trainer, batch: Any, step: int) -> None:
        if self.run.plans:  # a replay runs through its plan from the start
            planned = list(chain.from_iterable(self.run.plans[self.writer.rank]))
            hints = planned[min(len(self.record.batches), len(planned) - 1)].row_count
        else:
            hints = _loader_sizes(trainer.train_dataloader)
        found = BatchRecord(trainer.current_epoch, step, count_loader_rows(batch, hints))
        if not self.run.plans:  # the user's own data: what replays will need
            path = self.writer.home / f"batch-{len(self.record.batches)}.pkl"
            save_batch(batch, path)
            found.file, found.digest = str(path), batch_digest(batch)
        self.record.batches.append(found)

    def _record_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Write the gradients that an optimizer is about to use."""
        if self.record.steps == self.run.steps:
            return  # the rest of a batch that steps several times
        optimizer = compat.unwrapped_optimizer(optimizer)
        self.record.steps += 1
        self._unwritten_step = self.record.steps
        # gradients of this optimizer's parameters and of those that nobody optimises
        stepping = _parameter_ids([optimizer])
        of_others = _parameter_ids(trainer.optimizers) - stepping
        parameters = parameters_by_name(trainer, module)
        self._stepping = {n: p for n, p in parameters.items() if p.requires_grad and id(p) not in of_others}
        gradients = [(name, parameter.grad) for name, parameter in self._stepping.items()]
        self.writer.write(self.record.steps, "gradient", gradients)
        # their way here; what the step makes of them is added to the same entry
        hooked = self._gradient_fingerprints(self._stepping)
        self.record.fingerprints.append({**self._fingerprints, "hooked": hooked})
        # what the step depends on besides
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.record.learning_rates.append(rates)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.record.loss_scales.append(None if scaler is None else float(scaler.get_scale()))
        self._note_events(module)

    def _note_events(self, module: LightningModule) -> None:
        """Note the first thing that happened to each parameter since the wrap."""
        events = self.record.parameter_events
        for name, parameter in module.named_parameters():
            wrapped = self._wrapped.get(name)
            event = "created after the wrap" if wrapped is None else wrapped.event(parameter)
            if event:
                events.setdefault(name, event)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss and, after a step, parameters and buffers."""
        self._ablations.close()
        self.record.used_rng.append(ablations.rng_digest() != self._rng_before)
        self.record.losses.append(_loss_value(trainer, pl_module, outputs))
        loss = _loss_of(outputs)
        if self._trace is not None and loss is not None:
            self.record.cut_lines += [[cut.kind, cut.line] for cut in self._trace.reaching(loss)]
        self._trace = None
        if self._unwritten_step:
            parameters = parameters_by_name(trainer, pl_module)
            self.writer.write(self._unwritten_step, "parameter", parameters.items())
            self.writer.write(self._unwritten_step, "buffer", pl_module.named_buffers())
            self._unwritten_step = 0
        if self.record.steps >= self.run.steps:
            trainer.should_stop = True  # Lightning does not count steps behind its back

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Undo what was hooked; write the record."""
        self._ablations.close()
        self._hooks.close()
        self.writer.write_record(self.record)


# ---------------------------------------------------------------------- of any training loop


def load_start_(module: nn.Module, run: Run, rank: int) -> None:
    """Copy the initial weights of another run into the module: rank 0's, or this rank's block."""
    # a block of a sharded parameter is this rank's own; one process takes all blocks joined
    start = Path(run.start)
    source = Recording(start, len(list(start.glob("rank-*"))))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        sharded = source.shard_places(name) is not None
        if sharded and not run.ranks:
            entry = source.joined_shards(0, "initial", name)
        else:
            entry = source.entries(rank if sharded else 0, 0, "initial").get(name)
        if entry is None or not entry.exists or entry.shape != tuple(tensor.shape):
            continue
        with torch.no_grad():
            if isinstance(tensor, DTensor):  # this rank's part, which no other has to send
                mesh, placements = tensor.device_mesh, tensor.placements
                tensor.copy_(distribute_tensor(entry.tensor(), mesh, placements, src_data_rank=None))
            elif entry.digest != tensor_digest(tensor):
                tensor.copy_(entry.tensor())


@contextlib.contextmanager
def followed_layers(module: nn.Module, record: RankRecord, step: int) -> Iterator[None]:
    """Follow one step: a few numbers for each row of each layer's output and of its gradient, in forward order."""

    def record_call(name: str, layer: nn.Module, args: Any, output: Any) -> None:
        first = next(iter(nests.tensors_in(output)), None)
        is_traced = record.steps + 1 == step
        if not is_traced or first is None or not first.is_floating_point():
            return
        call = ModuleCall(name, type(layer).__name__, _projections(first))
        record.trace.append(call)

        def record_gradient(gradient: Tensor) -> None:
            call.gradient = _projections(gradient)

        if first.requires_grad:
            first.register_hook(record_gradient)  # type: ignore[no-untyped-call]

    with contextlib.ExitStack() as hooks:
        for name, child in module.named_modules():
            if name and next(child.children(), None) is None:
                hooks.callback(child.register_forward_hook(functools.partial(record_call, name)).remove)
        yield


def gradient_fingerprints(parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """Return what gradients are now, by name; of what fully_shard divides, each rank has another part, which says nothing."""
    given = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    gradients = {n: g for n, g in given.items() if g.layout == torch.strided and not isinstance(g, DTensor)}
    return dict(zip(gradients, fingerprints(gradients.values()), strict=True))


# ---------------------------------------------------------------------- what can be known by looking


def _projections(values: Tensor) -> list[list[float]]:
    """Return a few random projections of each row, the same ones in every process; a scalar is one row."""
    wide = values.detach().double().cpu()
    rows = wide.reshape(len(wide) if wide.ndim else 1, -1)
    generator = torch.Generator().manual_seed(rows.shape[1])
    directions = torch.randn(rows.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float64)
    found: list[list[float]] = (rows @ directions).tolist()
    return found


def is_metric(module: nn.Module) -> bool:
    """Say whether the module is a metric of torchmetrics."""
    bases = [cls for cls in type(module).__mro__ if cls.__name__ == "Metric"]
    return any(cls.__module__.startswith("torchmetrics.") for cls in bases)


def norm_classes(module: nn.Module) -> dict[str, str]:
    """Return the class of each batch norm, by name; ``SyncBatchNorm`` for a layer that this package synchronises."""
    found = {}
    for name, child in module.named_modules():
        cls = type(child).__name__
        if name and (isinstance(child, compat.BATCH_NORM_TYPES) or "BatchNorm" in cls):
            found[name] = "SyncBatchNorm" if synchronises(child) else cls
    return found


def parameters_by_name(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """Return the module's parameters, and those that only an optimizer holds, by the same names in every run.

    Unregistered ones, also where a strategy has adopted them, are named by their place in the optimizer.
    """
    found = {name: p for name, p in module.named_parameters() if not name.startswith(_ADOPTED)}
    known = set(map(id, found.values()))
    held = _optimized(trainer.optimizers)
    return found | {path: parameter for path, parameter in held.items() if id(parameter) not in known}


def _optimized(optimizers: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that optimizers hold, by their place."""
    found = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                found[f"optimizers[{i}].param_groups[{j}][{k}]"] = parameter
    return found


def _parameter_ids(optimizers: Any) -> set[int]:
    return set(map(id, _optimized(optimizers).values()))


def _loader_sizes(loaders: Any) -> LoaderRows:
    """Return the batch size of a loader, or those of each where batches of several come together; None where unknown."""
    if isinstance(loaders, (Mapping, list, tuple)):
        each = loaders.values() if isinstance(loaders, Mapping) else loaders
        return list(map(_loader_sizes, each))
    sampler = getattr(loaders, "batch_sampler", None)
    size: int | None = getattr(loaders, "batch_size", None) or getattr(sampler, "batch_size", None)
    return size


def _loss_value(trainer: Trainer, module: LightningModule, outputs: Any) -> float | None:
    """Return the loss that ``training_step`` returned; None where that was no tensor."""
    loss = _loss_of(outputs)
    if loss is None:
        return None
    value = float(loss.mean())
    if module.automatic_optimization:
        value *= trainer.accumulate_grad_batches  # Lightning has divided by it
    return value


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if isinstance(loss, Tensor) else None


def parameter_owners(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Return ``encoder``, ``unregistered`` or the name of the loss that a parameter belongs to, for each name."""
    # losses that the strategies know, and what is called one
    losses = [loss.name for loss in find_losses(module)]
    for name, child in module.named_modules():
        if name and _LOSS_NAME.search(type(compat.uncompiled(child)).__name__):
            losses.append(name)
    found = {}
    for name in names:
        parents = [loss for loss in losses if name.startswith(f"{loss}.")]
        rest = "unregistered" if name.startswith("optimizers[") else "encoder"
        found[name] = min(parents, key=len, default=rest)  # the outermost
    return found


def local_pair_losses(module: nn.Module) -> list[str]:
    """List the losses that compare rows, by name, but those inside something that gathers the rows of all ranks."""
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


def repeated_validation_rows(trainer: Trainer) -> list[int]:
    """Return how many rows each validation loader would hand out twice; random numbers are left as they are."""
    with preserve_random_state(global_generators(devices_in_use())):
        loaders = compat.set_up_validation_(trainer)
    return [repeated_rows(loader) for loader in loaders if isinstance(loader, DataLoader)]


def describe_module(trainer: Trainer, module: LightningModule) -> ModuleInfo:
    """Describe what does not change during a run."""
    parameters = parameters_by_name(trainer, module)
    optimized = _parameter_ids(trainer.optimizers)
    # unregistered parameters by the path where they were found
    callbacks = enumerate(trainer.callbacks)  # type: ignore[attr-defined]
    elsewhere = {f"callbacks[{index}]": each for index, each in callbacks if not isinstance(each, Recorder)}
    paths: dict[int, str] = {}
    for path, found in find_hidden(module, trainer.optimizers, elsewhere).optimised.items():
        paths |= {id(parameter): f"{path}.{name}" for name, parameter in found.named_parameters()}
    aliases = {name: paths[id(parameter)] for name, parameter in parameters.items() if id(parameter) in paths}
    # blocks that ranks hold by design
    tagged = {name: shard_of(parameter) for name, parameter in parameters.items()}
    shards = {name: [shard.start, shard.dim] for name, shard in tagged.items() if shard is not None}

    modules = {name: child for name, child in module.named_modules() if name}
    injecting = compat.injects_distributed_sampler(trainer)
    return ModuleInfo(
        owners=parameter_owners(module, list(parameters)),
        aliases=aliases,
        unoptimized=[n for n, p in module.named_parameters() if p.requires_grad and id(p) not in optimized],
        shards=shards,
        module_types={name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in modules.items()},
        pair_losses=local_pair_losses(module),
        dropout=[name for name, m in modules.items() if isinstance(m, compat.DROPOUT_TYPES) and getattr(m, "p", False)],
        automatic=module.automatic_optimization,
        accumulate=trainer.accumulate_grad_batches,
        clip=trainer.gradient_clip_val,
        precision=str(trainer.precision),
        sync_batchnorm=compat.syncs_batch_norm(trainer),
        optimizers=[type(optimizer).__name__ for optimizer in trainer.optimizers],
        reshuffled=describe_reshuffle(trainer.train_dataloader, injecting=injecting) or "",
    )
