"""One process's part of a run of `audit`: a fit of the LightningModule, with a callback that records it.

Gradients are recorded after the module's ``on_before_optimizer_step`` and before clipping. Parameters are recorded at the end of the batch
in which the optimizer stepped.

Measured with Lightning 2.6.6 in 2026: ``on_fit_start`` is called after the model was wrapped. ``on_before_optimizer_step`` of callbacks is
called before the module's hook, so a callback's hook would record gradients that the module changes afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_ddp_losses.audit.loss_verdicts import FirstCalls
from lightning_ddp_losses.audit.rank_record import LoaderRows, RankRecord
from lightning_ddp_losses.audit.recorder import CLIPS, Inside, Recorder, loss_of, norm_classes, optimized, wrap_function
from lightning_ddp_losses.audit.replay import Plan, Run, Target, count_loader_rows
from lightning_ddp_losses.core import lightning_compat, metrics_compat
from lightning_ddp_losses.core.autograd_graph import WrappedParameter, event_after_wrap
from lightning_ddp_losses.core.modules import find_hidden
from lightning_ddp_losses.core.random_state import devices_in_use, global_generators, preserve_random_state
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.samplers.evaluation import repeated_rows
from lightning_ddp_losses.strategies import ModelParallelLossStrategy
from lightning_ddp_losses.strategies.randomness.part import STEP_STATES
from lightning_ddp_losses.strategies.training_data import describe_reshuffle, foreign_loader


class _ReplayData(LightningDataModule):
    """Recorded batches, epoch by epoch."""

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        super().__init__()
        self.plan, self.recorder = plan, recorder
        self._first_epoch: int | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the batches of the trainer's epoch. The first epoch of the plan is the one in which the ranks trained first."""
        trainer = self.trainer
        assert trainer is not None
        progress, done = trainer.fit_loop.epoch_loop.batch_progress, 0
        if self._first_epoch is None:
            # a checkpoint inside an epoch: Lightning ends the epoch after the batches that are left, counted from its length
            self._first_epoch, done = trainer.current_epoch, progress.current.completed
            if progress.is_last_batch:
                self._first_epoch, done = self._first_epoch + 1, 0
        number = min(max(trainer.current_epoch - self._first_epoch, 0), len(self.plan) - 1)
        indexed: Any = list(enumerate(self.plan[number]))
        return DataLoader(indexed + indexed[-1:] * done, batch_size=None, collate_fn=self.recorder.replayed_batch)


@dataclass
class FitTarget(Target):
    """A LightningModule and its Trainer.

    Attributes:
        model: The LightningModule.
        data: Data module, data loaders, or None for the module's own loaders.
        options: Further options of the Trainer.
        deterministic: Use deterministic algorithms in torch.
        ckpt_path: Checkpoint to start from.
    """

    model: Any
    data: Any
    options: dict[str, Any]
    deterministic: bool
    ckpt_path: Any

    @property
    def backend(self) -> str:  # type: ignore[override]
        """Backend of the world."""
        return "gloo" if self.options.get("accelerator") == "cpu" else "cpu:gloo,cuda:nccl"

    def train(self, run: Run, folder: Path, rank: int) -> RankRecord:
        """Train ``run.steps`` optimizer steps and return their record."""
        if run.ranks or run.group:  # the processes exist, so Lightning starts none
            os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
        validates = not run.plans and self.options.get("limit_val_batches") != 0
        recorder = FitRecorder(run, folder, rank, validates=validates)
        trainer = Trainer(**_trainer_options(self, run, recorder))
        data = self.data
        if run.plans:
            data = _ReplayData(run.plans[rank], recorder)
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                # these hooks have already been applied to the recorded batch
                self.model.__dict__[hook] = lambda batch, dataloader_idx: batch
        trainer.fit(self.model, data, ckpt_path=self.ckpt_path)
        recorder.end_draws()
        expect(
            recorder.record.steps,
            "training steps",
            expected=f"{run.steps} optimizer steps",
            got="none",
            fix="Is the training data empty on this rank (fewer rows than ranks, drop_last), or does no optimizer ever step?",
            error=InputError,
        )
        recorder.certify_losses()
        return recorder.record


# options of the Trainer that an audit does not use
_UNUSED = frozenset({
    "min_epochs", "min_steps", "max_time", "fast_dev_run", "val_check_interval", "check_val_every_n_epoch", "num_nodes",
    "profiler", "barebones", "log_every_n_steps", "detect_anomaly",
})  # fmt: skip

# options about the user's data, which a replay does not use
_DATA_OPTIONS = frozenset({
    "limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs", "use_distributed_sampler"
})  # fmt: skip
_SPLIT_PARAMETERS = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")  # strategies without whole parameters on each rank


def _trainer_options(target: FitTarget, run: Run, recorder: FitRecorder) -> dict[str, Any]:
    """Return the Trainer's options for one run: the user's options, and options that the audit sets."""
    # options of the user
    left_out = _UNUSED | _DATA_OPTIONS if run.plans else _UNUSED
    options = {name: value for name, value in target.options.items() if name not in left_out}
    # callbacks, plugins and accumulation
    given = options.pop("callbacks", None) or []
    if isinstance(given, Callback):
        given = [given]
    kept = [callback for callback in given if not isinstance(callback, _LEFT_OUT)]
    plugins = _plugins(options.pop("plugins", None), run)
    accumulate = options.pop("accumulate_grad_batches", 1) * run.accumulate
    if not run.accumulate:
        kept = [callback for callback in kept if not isinstance(callback, callbacks.GradientAccumulationScheduler)]
    # parts that are switched off, and options that do not apply to a replay
    if "precision" in run.without:
        options["precision"] = "64-true"
    if not run.ranks:
        options.pop("sync_batchnorm", None)
    if run.plans:
        options["use_distributed_sampler"] = False
        options["reload_dataloaders_every_n_epochs"] = 1
    return options | {
        "strategy": _strategy_of(target) if run.ranks else "auto",
        "devices": run.processes,
        "plugins": plugins,
        "callbacks": [recorder, *kept],
        "accumulate_grad_batches": max(1, accumulate),
        "max_steps": run.steps,
        "max_epochs": -1,
        "logger": DummyLogger(),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "default_root_dir": str(recorder.folder),
        "deterministic": options.get("deterministic", target.deterministic or None),
    }


def _plugins(given: Any, run: Run) -> list[Any]:
    """Return the user's plugins that can be used in a run, and an environment with the existing processes."""
    if not isinstance(given, (list, tuple)):
        given = [given]
    plugins = [plugin for plugin in given if plugin is not None and not isinstance(plugin, ClusterEnvironment)]
    if not run.ranks:  # one process does not have peers with which to share statistics
        plugins = [plugin for plugin in plugins if not isinstance(plugin, LayerSync)]
    if "precision" in run.without:  # a precision plugin would contradict float64
        plugins = [plugin for plugin in plugins if isinstance(plugin, LayerSync)]
    if run.ranks or run.group:
        plugins.append(LightningEnvironment())
    return plugins


def _strategy_of(target: FitTarget) -> Any:
    """Return a strategy object that does not start processes, given an object or a name."""
    strategy = target.strategy
    if isinstance(strategy, str):
        known = strategy in StrategyRegistry
        expect(
            known,
            "strategy",
            expected="a strategy that Lightning knows",
            got=repr(strategy),
            fix="Name one of Lightning's strategies, such as 'ddp' or 'ddp_losses', or pass an object.",
        )
        entry = StrategyRegistry[strategy]
        strategy = entry["strategy"](**entry["init_params"])
    else:
        strategy = copy.copy(strategy)
    name = type(strategy).__name__
    is_split = any(word in name for word in _SPLIT_PARAMETERS) and not isinstance(strategy, ModelParallelLossStrategy)
    expected = (
        "one that keeps whole parameters on every rank ('ddp', 'ddp_losses', DDPStrategy(...)), or 'fsdp2_ddp_losses'"
    )
    expect(
        isinstance(strategy, ParallelStrategy) and not is_split,
        "strategy",
        expected=expected,
        got=name,
        fix="Audit with 'ddp_losses', or with 'fsdp2_ddp_losses' if the parameters must be divided.",
    )
    lightning_compat.use_existing_processes_(strategy, timedelta(seconds=target.seconds))
    return strategy


# ---------------------------------------------------------------------- the recording

# callbacks that an audit does not run
_LEFT_OUT = (
    callbacks.Checkpoint,
    callbacks.EarlyStopping,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.Timer,
)

_ADOPTED = "_adopted_losses."


class FitRecorder(Recorder, Callback):
    """Records one process of a fit.

    Args:
        run: Run that it records.
        folder: Folder of the run.
        rank: Rank of this process.
        validates: True if the user's fit has validations. The audit does not run them, but counts the rows that they would read twice.

    Attributes:
        faults: Faults that the strategy does not check during an audit.
    """

    faults = ("F71",)

    def __init__(self, run: Run, folder: Path, rank: int, *, validates: bool) -> None:
        super().__init__(run, folder, rank)
        self.validates = validates
        self._batch = contextlib.ExitStack()  # open while a batch is trained on
        self._rows: Any = None  # the current batch
        self._unwritten_step = 0  # step whose parameters have not been written yet, or 0
        self._wrapped: dict[str, WrappedParameter] = {}
        self._stepping: dict[str, nn.Parameter] = {}  # parameters of the step that is being made
        self._first_calls: FirstCalls | None = None

    # ------------------------------------------------------------------ before the first step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove callbacks that need a validation, files or a terminal, including callbacks added by the module."""
        kept = [each for each in trainer.callbacks if not isinstance(each, _LEFT_OUT)]  # type: ignore[attr-defined]
        trainer.callbacks = kept  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the module immediately after the wrap, and hook calls for which Lightning does not have a callback."""
        has_hooks = isinstance(trainer.strategy.model, DistributedDataParallel)
        for name, parameter in pl_module.named_parameters():
            self._wrapped[name] = WrappedParameter.of(parameter, is_hooked=has_hooks)
        self.record.parameter_order = list(self._wrapped)
        self.record.norms_at_wrap = norm_classes(pl_module)
        self._hook_steps(trainer, pl_module)
        self._hook_backwards(trainer, pl_module)
        self._hook_metrics(pl_module)
        self._hook_clips(trainer, pl_module)
        self.follow_layers(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start from the weights of the ranks' run, and describe the module."""
        self.start(pl_module, str(trainer.precision))
        for scheduler in trainer.lr_scheduler_configs:
            scheduler.strict = False  # a monitored value may be logged in a validation, which is not run
        self._describe_fit(trainer, pl_module)
        self._hook_draws(trainer, pl_module)
        run = self.run
        is_one_process = run.plans and not run.ranks and not run.trace
        if is_one_process and run.perturb is None:
            self._first_calls = FirstCalls(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Count the steps from the checkpoint, and load the generators of training steps if it contains them."""
        trainer.fit_loop.epoch_loop.max_steps = checkpoint["global_step"] + self.run.steps
        if self.replaces_draws:
            self._draws.states = dict(checkpoint.get(STEP_STATES, {}))

    def certify_losses(self) -> None:
        """Record the certificates of the losses that the one process has called."""
        if self._first_calls is not None:
            self.record.verdicts = self._first_calls.verdicts()

    # ------------------------------------------------------------------ hooks, which are never removed

    def _hook_draws(self, trainer: Trainer, module: LightningModule) -> None:
        """Replace random draws in forward and backward according to the run. The strategy seeds its generators when training starts."""
        strategy = trainer.strategy
        is_done = getattr(strategy, "randomness", "rank") != "rank" and "randomness" not in self.run.without
        if is_done or not self.replaces_draws:
            return
        wrap_function(strategy, "on_train_start", after=self.seed_draws)
        run_step, run_backward = strategy.training_step, strategy.backward
        places = [(buffer, None) for buffer in module.buffers()]

        @functools.wraps(run_step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            number = len(self.record.batches) - 1
            ends = not module.automatic_optimization
            with self.forward_draws(self._rows, places, [number], ends=ends):
                return run_step(*args, **kwargs)

        @functools.wraps(run_backward)
        def backward(*args: Any, **kwargs: Any) -> Any:
            with self.backward_draws():
                return run_backward(*args, **kwargs)

        strategy.training_step, strategy.backward = training_step, backward  # type: ignore[method-assign]

    def _hook_steps(self, trainer: Trainer, module: LightningModule) -> None:
        """Record gradients before each optimizer step, including steps that bypass Lightning."""
        record = functools.partial(self._record_step, trainer, module)

        step_of_strategy = Inside(trainer.strategy, "optimizer_step")

        def record_used(*_: Any) -> None:
            if self._stepping:
                self.record_used(self._stepping)
            self._stepping = {}

        def record_unhooked(optimizer: Any, *_: Any) -> None:
            # in manual optimisation, calling step() of the torch optimizer bypasses Lightning's hooks
            if not module.automatic_optimization and not step_of_strategy.is_running:
                record(optimizer)

        wrap_function(module, "on_before_optimizer_step", after=record)
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(record_unhooked)
            # record gradients after clipping. Lightning runs the closure inside the step, so they do not exist before it
            optimizer.register_step_post_hook(record_used)

    def _hook_backwards(self, trainer: Trainer, module: LightningModule) -> None:
        """Count backward calls that bypass Lightning's strategy, and record the gradients after the strategy's backward."""

        def count(calls: int, *_: Any) -> None:
            self.record.foreign_backwards += calls

        record_reduced = functools.partial(self._record_stage, "reduced", trainer, module)
        wrap_function(trainer.strategy, "backward", before=functools.partial(count, -1), after=record_reduced)
        self.before_backward(functools.partial(count, 1))

    def _hook_clips(self, trainer: Trainer, module: LightningModule) -> None:
        """Record the gradients that ``training_step`` clips. Lightning clips later."""
        training_step = Inside(module, "training_step")

        def record() -> None:
            if training_step.is_running:
                self._record_stage("clipped", trainer, module)

        for name in CLIPS:
            wrap_function(nn.utils, name, before=record)

    def _hook_metrics(self, module: LightningModule) -> None:
        """Record metrics that return a value with gradient."""

        def note(name: str, metric: Any, args: Any, output: Any) -> None:
            has_gradient = isinstance(output, Tensor) and output.requires_grad
            if has_gradient and name not in self.record.metric_losses:
                self.record.metric_losses.append(name)

        for name, child in module.named_modules():
            if metrics_compat.state_reductions(child) is not None:  # a metric of torchmetrics
                child.register_forward_hook(functools.partial(note, name))

    # ------------------------------------------------------------------ steps

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the gradients that DDP has reduced, before the module's own hook."""
        self._record_stage("backward", trainer, pl_module)

    def _record_stage(self, stage: str, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.see_gradients(stage, parameters_by_name(trainer, module))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the batch, and enter the conditions of the run."""
        if self.run.plans:  # a replay runs through its plan from the start
            planned = list(chain.from_iterable(self.run.plans[self.rank]))
            hints = planned[min(len(self.record.batches), len(planned) - 1)].row_count
        else:
            hints = _loader_sizes(trainer.train_dataloader)
        rows = count_loader_rows(batch, hints)
        self.record_batch(batch, self.record.steps + 1, rows, trainer.current_epoch)
        self._rows = batch
        self._batch.enter_context(self.conditions(pl_module))

    def _record_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Record the gradients that an optimizer is about to use, and events of parameters since the wrap."""
        if self.record.steps == self.run.steps:
            return  # remaining steps of a batch with several steps are not recorded
        optimizer = lightning_compat.unwrapped_optimizer(optimizer)
        # record gradients of this optimizer's parameters and of parameters without an optimizer
        of_others = _parameter_ids(trainer.optimizers) - _parameter_ids([optimizer])
        parameters = parameters_by_name(trainer, module)
        self._stepping = {n: p for n, p in parameters.items() if p.requires_grad and id(p) not in of_others}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else float(scaler.get_scale())
        self.record_gradients(self._stepping, optimizer, scale)
        self._unwritten_step = self.record.steps
        # record the first event of each parameter
        for name, parameter in module.named_parameters():
            event = event_after_wrap(self._wrapped.get(name), parameter)
            if event:
                self.record.parameter_events.setdefault(name, event)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss and, after a step, parameters and buffers."""
        loss = loss_of(outputs)
        self._batch.close()
        value = None if loss is None else float(loss.mean())
        if value is not None and pl_module.automatic_optimization:
            value *= trainer.accumulate_grad_batches  # Lightning has divided by it
        self.record.losses.append(value)
        if self._unwritten_step:
            self.record_parameters(self._unwritten_step, parameters_by_name(trainer, pl_module), pl_module)
            self._unwritten_step = 0
        if self.record.steps >= self.run.steps:
            trainer.should_stop = True  # Lightning does not count steps that bypass it

    def _describe_fit(self, trainer: Trainer, module: LightningModule) -> None:
        parameters = parameters_by_name(trainer, module)
        # paths of unregistered parameters
        numbered = enumerate(trainer.callbacks)  # type: ignore[attr-defined]
        elsewhere = {f"callbacks[{index}]": each for index, each in numbered if each is not self}
        paths: dict[int, str] = {}
        for path, found in find_hidden(module, trainer.optimizers, elsewhere).optimised.items():
            paths |= {id(parameter): f"{path}.{name}" for name, parameter in found.named_parameters()}
        # blocks of parameters that are divided over the ranks by design
        tagged = {name: shard_of(parameter) for name, parameter in parameters.items()}
        injecting = lightning_compat.injects_distributed_sampler(trainer)
        self.describe(
            module,
            parameters,
            trainer.optimizers,
            aliases={name: paths[id(p)] for name, p in parameters.items() if id(p) in paths},
            shards={name: shard for name, shard in tagged.items() if shard is not None},
            automatic=module.automatic_optimization,
            accumulate=trainer.accumulate_grad_batches,
            clip=trainer.gradient_clip_val,
            precision=str(trainer.precision),
            sync_batchnorm=lightning_compat.syncs_batch_norm(trainer),
            repeated_rows=repeated_validation_rows(trainer) if self.validates else [],
            reshuffled=describe_reshuffle(trainer.train_dataloader, injecting=injecting) or "",
            foreign_loader=foreign_loader(trainer),
        )


def parameters_by_name(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """Return the parameters of the module, and parameters that are only in an optimizer, by the same names in every run.

    Unregistered parameters are named by their position in the optimizer, even if a strategy has adopted them.
    """
    found = {name: p for name, p in module.named_parameters() if not name.startswith(_ADOPTED)}
    known = set(map(id, found.values()))
    held = optimized(trainer.optimizers)
    return found | {path: parameter for path, parameter in held.items() if id(parameter) not in known}


def _parameter_ids(optimizers: Any) -> set[int]:
    return set(map(id, optimized(optimizers).values()))


def _loader_sizes(loaders: Any) -> LoaderRows:
    """Return the batch size of a loader, or a list with the batch size of each loader if several are combined. None if unknown."""
    if isinstance(loaders, (Mapping, list, tuple)):
        each = loaders.values() if isinstance(loaders, Mapping) else loaders
        return list(map(_loader_sizes, each))
    sampler = getattr(loaders, "batch_sampler", None)
    size: int | None = getattr(loaders, "batch_size", None) or getattr(sampler, "batch_size", None)
    return size


def repeated_validation_rows(trainer: Trainer) -> list[int]:
    """Return the number of rows that each validation loader would repeat, without drawing random numbers."""
    with preserve_random_state(global_generators(devices_in_use())):
        loaders = lightning_compat.set_up_validation_(trainer)
    return [repeated_rows(loader) for loader in loaders if isinstance(loader, DataLoader)]
