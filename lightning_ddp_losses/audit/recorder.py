"""The callback that writes down what a run does, in whatever process and under whatever strategy it runs.

Gradients are taken where the optimizer will see them: after the module's own ``on_before_optimizer_step``, which runs after
the callbacks' one, and before clipping. Parameters are taken when the batch that stepped has ended.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.audit import ablations, replay
from lightning_ddp_losses.audit.rank_record import Recording, Writer, digest_of
from lightning_ddp_losses.audit.replay import Run
from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.forward_patch import synchronises
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.strategies.hidden import find_hidden
from lightning_ddp_losses.strategies.loss_discovery import find_losses, unwrap
from lightning_ddp_losses.strategies.reshuffle import reshuffled

LEFT_OUT = (Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer)
"""Callbacks that have no part in an audit."""


class Recorder(Callback):
    """Records one rank of a run.

    Args:
        run: What the run is.
        folder: Where it is recorded.
        rank: This process's.
    """

    def __init__(self, run: Run, folder: Path, rank: int) -> None:
        self.run, self.folder = run, folder
        self.writer = Writer(folder, rank)
        self.page: dict[str, Any] = {
            "steps": 0,
            "batches": [],
            "losses": [],
            "learning_rates": [],
            "scales": [],
            "draws": [],
        }
        self._undo: list[Callable[[], None]] = []
        self._stack = contextlib.ExitStack()
        self._pending = 0
        self._by_lightning = False
        self._wrapped: dict[str, nn.Parameter] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._events: dict[str, str] = {}
        self._state = ""
        self.trace: Trace | None = None

    # ------------------------------------------------------------------ before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave out callbacks that want a validation, files or a terminal; the module may have brought some."""
        kept = [each for each in trainer.callbacks if not isinstance(each, LEFT_OUT)]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the module right after the wrap."""
        self._wrapped = dict(pl_module.named_parameters())
        self.page["order"] = list(self._wrapped)
        self.page["parameters"] = sum(p.numel() for p in self._wrapped.values())
        self._dtypes = {name: p.dtype for name, p in self._wrapped.items()}
        self._trainable = {name for name, p in self._wrapped.items() if p.requires_grad}
        self.page["norms_wrapped"] = batch_norms(pl_module)
        self._watch(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the weights of the ranks' run, and write them down."""
        if self.run.start:
            self._load(pl_module)
        if self.run.perturb is not None:
            unit = ablations.unit_roundoff(pl_module, str(trainer.precision))
            ablations.perturb_module(pl_module, unit, self.run.perturb)
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False  # what it monitors may come from a validation
        self.writer.write(0, "initial", _tensors(pl_module))
        self.page |= describe(trainer, pl_module)
        if self.run.seed is not None:
            seed_everything(self.run.seed, verbose=False)

    def _load(self, module: LightningModule) -> None:
        start = Path(self.run.start)
        source = Recording(start, len(list(start.glob("rank-*"))))
        mine = self.writer.rank if self.run.ranks else 0
        for name, tensor in _tensors(module):
            sharded = source.shards(name) is not None
            entry = source.entries(mine if sharded else 0, 0, "initial").get(name)
            if sharded and not self.run.ranks:
                entry = source.joined(0, "initial", name)
            known = entry is not None and entry.exists and entry.shape == tuple(tensor.shape)
            if entry is not None and known and entry.digest != digest_of(tensor):
                with torch.no_grad():
                    tensor.copy_(entry.tensor())

    def _watch(self, trainer: Trainer, module: LightningModule) -> None:
        """Hooks that Lightning has no callback for, on these objects only."""
        self._around(
            module, "on_before_optimizer_step", after=lambda optimizer: self._record(trainer, module, optimizer)
        )
        self.page["backwards"] = {"lightning": 0, "tensor": 0}
        self._around(trainer.strategy, "backward", before=lambda: self._count("lightning"))
        self._count_tensor_backwards()
        self.page["ddp_forwards"] = 0
        wrapper = trainer.strategy.model
        if isinstance(wrapper, DistributedDataParallel):
            self._hook(
                wrapper.register_forward_pre_hook(
                    lambda *_: self.page.update(ddp_forwards=self.page["ddp_forwards"] + 1)
                )
            )
        self.page["metric_losses"] = []
        for name, child in module.named_modules():
            if is_metric(child):
                self._hook(child.register_forward_hook(functools.partial(self._note_metric, name)))
        self._around(
            trainer.strategy, "optimizer_step", before=lambda: self._enter(True), after=lambda *_: self._enter(False)
        )
        for optimizer in trainer.optimizers:
            self._hook(optimizer.register_step_pre_hook(lambda given, *_: self._record_raw(trainer, module, given)))
        if self.run.trace:
            self.trace = Trace(module, self.writer.home)
            self._undo.append(self.trace.close)

    def _around(self, owner: Any, name: str, before: Callable[[], None] | None = None, after: Any = None) -> None:
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
        self._undo.append(lambda: owner.__dict__.pop(name, None))

    def _hook(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _count(self, which: str) -> None:
        self.page["backwards"][which] += 1

    def _count_tensor_backwards(self) -> None:
        original = Tensor.backward

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count("tensor")
            return original(*args, **kwargs)  # type: ignore[no-untyped-call]

        Tensor.backward = counted  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(Tensor, "backward", original))

    def _note_metric(self, name: str, metric: Any, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad and name not in self.page["metric_losses"]:
            self.page["metric_losses"].append(name)

    # ------------------------------------------------------------------ steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch, and switch off what the run is without."""
        step, loader = self.page["steps"] + 1, trainer.train_dataloader
        hint = getattr(loader, "batch_size", None) or getattr(
            getattr(loader, "batch_sampler", None), "batch_size", None
        )
        logged: dict[str, Any] = {"epoch": trainer.current_epoch, "step": step, "hint": hint, "file": ""}
        if not self.run.plans:
            path = self.writer.home / f"batch-{len(self.page['batches'])}.pkl"
            replay.save(batch, path)
            logged |= {"file": str(path), "digest": replay.digest(batch)}
        logged["rows"] = replay.rows_of(batch, hint)
        self.page["batches"].append(logged)
        if "batch_norm" in self.run.without:
            ablations.still_batch_norm(pl_module)
        self.page.setdefault("norms_training", batch_norms(pl_module))
        if self.trace is not None:
            self.trace.on = step == self.run.trace
        self._state = ablations.random_state()
        if "randomness" in self.run.without:
            self._stack.enter_context(ablations.MeanDraws())  # type: ignore[no-untyped-call]

    def _record(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        if self.page["steps"] == self.run.steps:
            return  # the rest of a batch that steps several times
        self.page["steps"] += 1
        self._pending = self.page["steps"]
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        others = {id(p) for each in trainer.optimizers for group in each.param_groups for p in group["params"]} - held
        named = named_parameters(trainer, module)
        gradients = [(n, p.grad) for n, p in named.items() if p.requires_grad and id(p) not in others]
        self.writer.write(self._pending, "gradient", gradients)
        self.page["learning_rates"].append([float(group["lr"]) for group in optimizer.param_groups if "lr" in group])
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.page["scales"].append(None if scaler is None else float(scaler.get_scale()))
        self._note_events(module)

    def _record_raw(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """An optimizer that is stepped behind Lightning's back (manual optimisation) calls none of its hooks."""
        if not module.automatic_optimization and not self._by_lightning:
            self._record(trainer, module, optimizer)

    def _enter(self, inside: bool) -> None:
        self._by_lightning = inside

    def _note_events(self, module: LightningModule) -> None:
        for name, parameter in module.named_parameters():
            before = self._wrapped.get(name)
            if before is None:
                self._events.setdefault(name, "created after the wrap")
            elif before is not parameter:
                self._events.setdefault(name, "replaced after the wrap")
            elif parameter.dtype != self._dtypes[name]:
                self._events.setdefault(name, f"changed from {self._dtypes[name]} to {parameter.dtype}")
            elif parameter.requires_grad and name not in self._trainable:
                self._events.setdefault(name, "unfrozen after the wrap")
            elif not parameter.requires_grad and name in self._trainable:
                self._events.setdefault(name, "frozen after the wrap")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss and, after a step, parameters and buffers."""
        self._stack.close()
        self.page["draws"].append(ablations.random_state() != self._state)
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self.page["losses"].append(float(loss.mean()) * scale if isinstance(loss, Tensor) else None)
        if self._pending:
            self.writer.write(self._pending, "parameter", named_parameters(trainer, pl_module).items())
            self.writer.write(self._pending, "buffer", _buffers(pl_module))
            self._pending = 0
        if self.page["steps"] >= self.run.steps:
            trainer.should_stop = True  # Lightning does not count steps behind its back

    # ------------------------------------------------------------------ end

    def close(self, module: LightningModule) -> None:
        """Undo what was hooked; write the facts."""
        self._stack.close()
        for undo in reversed(self._undo):
            undo()
        self.page["events"] = self._events
        if self.trace is not None:
            self.page["trace"] = self.trace.seen
        self.writer.facts(self.page)


def _tensors(module: LightningModule) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *_buffers(module)]


def _buffers(module: LightningModule) -> list[tuple[str, Tensor]]:
    return list(module.named_buffers())


# ----------------------------------------------------------------------

_LOSS_NAME = re.compile(r"(loss|criterion|proxy)(wrapper)?$", re.IGNORECASE)
_ADOPTED = "_adopted_losses."


def is_metric(module: nn.Module) -> bool:
    """Whether the module is a metric of torchmetrics."""
    return any(cls.__module__.startswith("torchmetrics.") and cls.__name__ == "Metric" for cls in type(module).__mro__)


def batch_norms(module: nn.Module) -> dict[str, str]:
    """Class of each batch norm, by name; that of a synchronised one for a layer that this package synchronises."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    return {
        n: "SyncBatchNorm" if synchronises(m) else type(m).__name__
        for n, m in module.named_modules()
        if n and (isinstance(m, kinds) or "BatchNorm" in type(m).__name__)
    }


def named_parameters(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """The module's parameters, and those that only an optimizer holds, by the same names in every run.

    Unregistered ones, also where a strategy has adopted them, are named by their place in the optimizer.
    """
    named = {n: p for n, p in module.named_parameters() if not n.startswith(_ADOPTED)}
    known = {id(p) for p in named.values()}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    named[f"optimizers[{i}].param_groups[{j}][{k}]"] = parameter
    return named


def owners(module: LightningModule, named: dict[str, nn.Parameter]) -> dict[str, str]:
    """``encoder``, or the name of the loss that a parameter belongs to."""
    losses = [loss.name for loss in find_losses(module)]
    losses += [n for n, m in module.named_modules() if n and _LOSS_NAME.search(type(unwrap(m)).__name__)]
    found = {}
    for name in named:
        mine = [loss for loss in losses if name.startswith(f"{loss}.")]
        outside = name.startswith("optimizers[")
        found[name] = min(mine, key=len) if mine else "unregistered" if outside else "encoder"
    return found


def describe(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The page of facts that do not change during a run."""
    named = named_parameters(trainer, module)
    optimised = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]}
    elsewhere = {f"callbacks[{i}]": callback for i, callback in enumerate(trainer.callbacks)}  # type: ignore[attr-defined]
    hidden = find_hidden(
        module, trainer.optimizers, {k: v for k, v in elsewhere.items() if type(v).__name__ != "Recorder"}
    )
    aliases = {id(p): f"{path}.{n}" for path, m in hidden.optimised.items() for n, p in m.named_parameters()}
    injecting = trainer._accelerator_connector.use_distributed_sampler
    return {
        "owners": owners(module, named),
        "aliases": {name: aliases[id(p)] for name, p in named.items() if id(p) in aliases},
        "unoptimised": [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in optimised],
        "shards": {name: (shard.start, shard.dim) for name, p in named.items() if (shard := shard_of(p)) is not None},
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
        "modules": {n: f"{type(m).__module__}.{type(m).__qualname__}" for n, m in module.named_modules() if n},
        "loss_modules": [loss.name for loss in find_losses(module)],
        "global_losses": [loss.name for loss in find_losses(module) if loss.sees_global_batch],
        "dropout": [n for n, m in module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p],
        "automatic": module.automatic_optimization,
        "accumulate": trainer.accumulate_grad_batches,
        "clip": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "sync_batchnorm": trainer._accelerator_connector._layer_sync is not None,
        "optimizers": [type(o).__name__ for o in trainer.optimizers],
        "reshuffled": reshuffled(trainer.train_dataloader, injecting=injecting),
    }


# ----------------------------------------------------------------------

_PROJECTIONS = 4


class Trace:
    """Hooks on all modules that have no children; they note what passes while ``on``.

    Args:
        module: The LightningModule.
        home: Where the numbers go; one file for each tensor.
    """

    def __init__(self, module: nn.Module, home: Path) -> None:
        self.home, self.on = home, False
        self.seen: list[dict[str, Any]] = []
        self._files = 0
        self._handles = [
            child.register_forward_hook(functools.partial(self._note, name))
            for name, child in module.named_modules()
            if name and next(child.children(), None) is None
        ]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = next(iter(precision.tensors_in(output)), None)
        if not self.on or first is None or not first.is_floating_point():
            return
        call = {"name": name, "kind": type(module).__name__, "output": self._store(first), "gradient": ""}
        self.seen.append(call)
        if first.requires_grad:
            first.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: call.update(gradient=self._store(gradient))
            )

    def _store(self, values: Tensor) -> str:
        """A few random projections of each row; a scalar is one row."""
        self._files += 1
        path = self.home / f"trace-{self._files}.pt"
        wide = values.detach().double().cpu()
        flat = wide.reshape(wide.shape[0] if wide.ndim else 1, -1)
        generator = torch.Generator().manual_seed(flat.shape[1])
        directions = torch.randn(flat.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float64)
        torch.save(flat @ directions, path)
        return str(path)


def part(ranks: Recording, one: Recording, allowed: float) -> str:
    """Where two traced runs part, in forward order, as a sentence.

    Args:
        ranks: Traced run of the ranks.
        one: Traced run of one process on the joined batches.
        allowed: Relative difference that is rounding.
    """
    columns = list(zip(*(page["trace"] for page in ranks.facts), strict=False))
    calls = list(zip(columns, one.facts[0]["trace"], strict=False))
    for key, what, scale in (("output", "Activations", 1.0), ("gradient", "Gradients", float(ranks.ranks))):
        order = calls if key == "output" else calls[::-1]  # gradients come from behind
        for column, call in order:
            if (
                not call[key]
                or not all(each[key] for each in column)
                or any(each["name"] != call["name"] for each in column)
            ):
                continue
            ours = torch.cat([torch.load(each[key]) for each in column]) / scale
            theirs = torch.load(call[key])
            if ours.shape != theirs.shape:
                continue  # not rows: a loss has one value on each rank
            off = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))
            if not off <= allowed:
                end = (
                    "in forward order"
                    if key == "output"
                    else "from the loss backwards; all activations that are rows agree"
                )
                return f"{what} part first at `{call['name']}` ({call['kind']}), by {off:.2g}, {end}."
    return (
        "Activations and gradients of all modules that give one row per sample agree; "
        "what parts is inside the loss or beside the modules."
    )
