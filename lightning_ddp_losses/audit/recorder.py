"""The callback that writes down what a run does, in whatever process and under whatever strategy it runs.

Gradients are taken where the optimizer will see them: after the module's own ``on_before_optimizer_step``, which runs after
the callbacks' one, and before clipping. Parameters are taken when the batch that stepped has ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelSummary, ProgressBar, Timer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.audit import ablations, batches, facts
from lightning_ddp_losses.audit.rank_record import Recording, Writer, digest_of
from lightning_ddp_losses.audit.replay import Run
from lightning_ddp_losses.audit.trace import Trace

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
        self.page["norms_wrapped"] = facts.batch_norms(pl_module)
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
        self.page |= facts.describe(trainer, pl_module)
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
            if facts.is_metric(child):
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
            batches.save(batch, path)
            logged |= {"file": str(path), "digest": batches.digest(batch)}
        logged["rows"] = batches.rows_of(batch, hint)
        self.page["batches"].append(logged)
        if "batch_norm" in self.run.without:
            ablations.still_batch_norm(pl_module)
        self.page.setdefault("norms_training", facts.batch_norms(pl_module))
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
        named = facts.named_parameters(trainer, module)
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
            self.writer.write(self._pending, "parameter", facts.named_parameters(trainer, pl_module).items())
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
