"""Private names of Lightning, and what it does without a public name: every import or read of one goes through here.

Each function gives the reason. Names were read in Lightning 2.6. Lightning is imported inside functions, so that this layer
needs only torch.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Collection
from itertools import chain
from types import FrameType
from typing import Any, cast

import torch


def has_ddp_comm_hook(strategy: Any) -> bool:
    """Return whether Lightning's ``DDPStrategy`` gives its DDP a communication hook of the user's. DDP takes one."""
    return strategy._ddp_comm_hook is not None


def ddp_comm_state(strategy: Any) -> object:
    """Return the state of the communication hook of Lightning's ``DDPStrategy``. None if there is no such thing."""
    return strategy._ddp_comm_state


def replace_unscaling(
    scaler: Any, unscale: Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any]
) -> Callable[[], object]:
    """Let a function unscale an optimizer's gradients in the place of a ``GradScaler``. Its one step for that is private (2.13).

    Args:
        scaler: The gradient scaler.
        unscale: Gets the scaler's own function, the optimizer and further arguments. Returns by device whether something overflowed.

    Returns:
        A function that undoes it.
    """
    own = scaler._unscale_grads_
    return _patch(scaler, "_unscale_grads_", lambda optimizer, *args: unscale(own, optimizer, args))


def allow_precisions(strategy: type, precisions: Collection[str]) -> None:
    """Let the Trainer take these precisions for an instance of a strategy, as it does for a strategy that is asked for by name.

    (Lightning 2.6.6 refuses them for every instance of ``ModelParallelStrategy``, in a private method of its connector, and for none that
    comes by name.)
    """
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    own = _AcceleratorConnector._validate_precision_choice

    def validate(connector: Any) -> None:
        is_ours = isinstance(connector._strategy_flag, strategy)
        if not is_ours or connector._precision_flag not in precisions:
            own(connector)

    _AcceleratorConnector._validate_precision_choice = validate  # type: ignore[method-assign, assignment]


def explain_unknown_strategy(explain: Callable[[str], str]) -> None:
    """Let a function add to Lightning's error about an unregistered name of a strategy. A private method raises it."""
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    own = _AcceleratorConnector._check_config_and_set_final_flags

    def check(connector: Any, **arguments: Any) -> None:
        try:
            own(connector, **arguments)
        except ValueError as error:
            name = arguments["strategy"]
            if isinstance(name, str) and "invalid strategy name" in str(error):
                error.args = (f"{error} {explain(name)}".strip(),)
            raise

    _AcceleratorConnector._check_config_and_set_final_flags = check  # type: ignore[method-assign, assignment]


def replace_sigterm_notice(trainer: Any, notice: Callable[[], None]) -> None:
    """Call ``notice`` in SIGTERM's handler in place of Lightning's note of it, which broadcasts there. Other handlers stay."""
    _replace_handler(signal.SIGTERM, trainer._signal_connector._sigterm_notifier_fn, notice)


def _replace_handler(number: int, lightnings: Any, notice: Callable[[], None]) -> None:
    """Call ``notice`` in place of one of the handlers that Lightning calls in turn when a signal arrives."""
    handlers = getattr(signal.getsignal(number), "signal_handlers", [])
    for place, handler in enumerate(handlers):
        if handler == lightnings:
            handlers[place] = lambda signum, frame: notice()


def skip_sigterm_broadcast(trainer: Any) -> Callable[[], object]:
    """Spare each training batch Lightning's broadcast of whether SIGTERM reached rank 0. Return a function that undoes it."""
    return _patch(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], object]:
    """Put a function in the place of an object's method. Return a function that undoes it, the latest of several first."""
    given = vars(owner).get(name)
    setattr(owner, name, replacement)

    def undo() -> None:
        if given is None:
            vars(owner).pop(name, None)
        else:
            setattr(owner, name, given)

    return undo


def _call_before(owner: Any, name: str, before: Callable[..., object]) -> Callable[[], object]:
    """Call a function before each call of a method, with the same arguments. Return a function that undoes it."""
    method = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return method(*args, **kwargs)

    return _patch(owner, name, both)


def mark_sigterm_(trainer: Any) -> None:
    """Let Lightning end the run after this batch, as after SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def requeues_on_signal(trainer: Any) -> bool:
    """Return whether Lightning saves and queues the job again when SLURM sends a signal (``SLURMEnvironment(auto_requeue=True)``)."""
    cluster = trainer._accelerator_connector.cluster_environment
    return bool(getattr(cluster, "auto_requeue", False)) and getattr(cluster, "requeue_signal", None) is not None


def replace_requeue_handler(trainer: Any, notice: Callable[[], None]) -> Callable[[], None]:
    """Call ``notice`` where SLURM's signal arrives, and return what Lightning would have done there. A user's own handler stays."""
    number = trainer._accelerator_connector.cluster_environment.requeue_signal
    lightnings = trainer._signal_connector._slurm_sigusr_handler_fn
    _replace_handler(number, lightnings, notice)
    return lambda: lightnings(number, None)


def steps_as_logged(trainer: Any) -> int:
    """Return the number of batches that stepped, which loggers count by. ``global_step`` counts each optimizer."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def teardown_trainer(trainer: Any) -> None:
    """Clean up as Lightning does after an error. It leaves that out if a hook raises another one."""
    trainer._teardown()


def attach_trainer(module: Any, trainer: Any) -> None:
    """Give a copy of a module its trainer, without the checks of the public setter, which looks at submodules too."""
    module._trainer = trainer


def combined_loader(loop: Any) -> Any:
    """Return the loader that a loop draws from, with Lightning's samplers. None before there is one."""
    return loop._combined_loader


def replace_training_loaders(trainer: Any, replacement: Callable[[object], object | None]) -> Callable[[], object]:
    """Let a function replace training loaders before Lightning gives them a sampler. It has no hook there.

    ``Strategy.process_dataloader`` comes later, when it is no longer known whether the loader shuffled.

    Args:
        trainer: The trainer.
        replacement: Gets each training loader. None leaves it to Lightning.

    Returns:
        A function that undoes it.
    """
    connector = trainer._data_connector
    lightnings = connector._prepare_dataloader

    def prepare(dataloader: object, shuffle: bool, mode: Any) -> object:
        ours = replacement(dataloader) if mode == "train" else None
        return lightnings(dataloader, shuffle=shuffle, mode=mode) if ours is None else ours

    return _patch(connector, "_prepare_dataloader", prepare)


def before_batch_hooks(trainer: Any, function: Callable[[], object]) -> Callable[[], object]:
    """Call a function between the loading of each batch and the module's or data module's hooks of the batch. Returns the undo function."""

    def before(hook_name: str) -> None:
        if hook_name == "on_before_batch_transfer":  # the first of them
            function()

    return _call_before(trainer._data_connector._datahook_selector, "get_instance", before)


def with_batch_sampler(dataloader: Any, batch_sampler: Any) -> Any:
    """Return a DataLoader's twin with other batches: all else, also of a subclass, is kept. Torch refuses to set it, and has no copy."""
    twin = copy.copy(dataloader)
    # the sampler of a DataLoader that is built with batch_sampler=
    placeholder = torch.utils.data.SequentialSampler(dataloader.dataset)
    vars(twin).update(
        batch_sampler=batch_sampler, sampler=placeholder, batch_size=None, drop_last=False, _iterator=None
    )
    return twin


def replace_training_source(trainer: Any, replacement: Callable[[Callable[[], Any]], Any]) -> Callable[[], object]:
    """Let a function replace the training loaders that a fit gets from the user, before Lightning reads their lengths.

    Args:
        trainer: The trainer.
        replacement: Gets a function that returns the user's loaders, and returns the fit's.

    Returns:
        A function that undoes all replacements.
    """
    source = trainer.fit_loop._data_source
    request = source.dataloader
    return _patch(source, "dataloader", lambda: replacement(request))


def prefetched_batches(loop: Any) -> int:
    """Return how many batches a fit has fetched ahead of the one that it trains on. Its fetcher has no public name."""
    return len(getattr(loop._data_fetcher, "batches", ()))


def mode_iterator(combined: Any) -> Any:
    """Return the object that combines the loaders of a combined loader. No public method puts anything between the two."""
    return combined._iterator


def cycles(combined: Any) -> bool:
    """Return whether a combined loader begins its shorter loaders again while the longest goes on. It keeps its mode in a private name."""
    return bool(combined._mode == "max_size_cycle")


def make_iterator_anew(loop: Any) -> None:
    """Let the fit loop forget its prefetched batches. It makes its iterator once, when it gets the loaders."""
    if loop._data_fetcher is not None:
        loop._combined_loader.reset()
        iter(loop._data_fetcher)


def makes_loaders_anew(loop: Any) -> bool:
    """Return whether the fit loop gets its loaders again at its next epoch."""
    return bool(loop._should_reload_train_dl)


def loaders_made_in(loop: Any) -> Any:
    """Return the epoch of the fit loop's loaders. ``reload_dataloaders_every_n_epochs`` counts from it."""
    return loop._last_train_dl_reload_epoch


def set_loaders_made_in_(loop: Any, epoch: Any) -> None:
    """Let the fit loop count from another epoch when it gets its loaders again."""
    loop._last_train_dl_reload_epoch = epoch


def validation_loop(trainer: Any) -> Any:
    """Return the loop that validates: that of ``trainer.validate`` or ``trainer.test`` while it runs, else that of the fit."""
    if trainer.state.fn == "test":
        return trainer.test_loop
    return trainer.validate_loop if trainer.state.fn == "validate" else trainer.fit_loop.epoch_loop.val_loop


def validation_loaders(trainer: Any) -> Any:
    """Return the loaders that are validated. ``trainer.val_dataloaders`` names those of an earlier fit also in ``trainer.validate``."""
    combined = validation_loop(trainer)._combined_loader
    return None if combined is None else combined.iterables


def set_up_validation_(trainer: Any) -> list[Any]:
    """Let a fit set its validation loaders up as for a validation, even if it will make none, and return them."""
    loop, limit = trainer.fit_loop.epoch_loop.val_loop, trainer.limit_val_batches
    if not loop._data_source.is_defined():
        return []
    trainer.limit_val_batches, trainer.validating = 1.0, True
    try:
        loop.setup_data()
    finally:
        trainer.limit_val_batches, trainer.training = limit, True
    combined = loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def wrapped_sampler(dataset: Any) -> Any:
    """Return the user's sampler inside the data set that Lightning makes of one."""
    return getattr(dataset, "_sampler", None)


def drawn_indices(dataset: Any) -> list[Any]:
    """Return the indices that Lightning drew from the user's sampler in this epoch. Empty before the first."""
    return getattr(dataset, "_sampler_list", None) or []


def logged_results(loop: Any) -> Any:
    """Return the logged values of a loop, with how each is reduced. ``callback_metrics`` does not say."""
    return loop._results


def is_reduced(result: Any) -> bool:
    """Return whether an epoch's value of a logged result has been computed. Lightning then has reduced the number of rows in place."""
    return result._computed is not None


def name_and_hook_of_log(frame: FrameType) -> tuple[str, str] | None:
    """Return the name of a logged value and the hook that logged it, if this frame reduces one at the end of an epoch."""
    code = frame.f_code
    if code.co_name != "compute" or not code.co_filename.endswith(os.path.join("logger_connector", "result.py")):
        return None
    metadata = frame.f_locals["self"].meta
    return metadata.name, metadata.fx


def is_saving_frame(frame: FrameType) -> bool:
    """Return whether this is the frame of ``Trainer.save_checkpoint``."""
    code = frame.f_code
    return code.co_name == "save_checkpoint" and code.co_filename.endswith(os.path.join("trainer", "trainer.py"))


def is_strategy_frame(frame: FrameType) -> bool:
    """Return whether this is the frame of a method of one of Lightning's strategies."""
    return os.path.join("pytorch", "strategies", "") in frame.f_code.co_filename


def hook_owners(frame: FrameType) -> list[Any]:
    """Return the module and the callbacks of the trainer that runs a frame. Empty if the frame is not of one of its loops."""
    trainer = getattr(frame.f_locals.get("self"), "trainer", None)
    module = getattr(trainer, "lightning_module", None)
    return [] if trainer is None or module is None else [module, *trainer.callbacks]


def is_signal_frame(frame: FrameType) -> bool:
    """Return whether this is the frame of Lightning's handler of SLURM's signal, which a rank may enter at any place."""
    return frame.f_code.co_name == "_slurm_sigusr_handler_fn"


def epoch_name(results: Any, result: Any) -> str:
    """Return the name under which ``callback_metrics`` holds an epoch's value, with the loader's number if there are several."""
    return cast("str", results._forked_name(result, on_step=False)[1])


def has_layer_sync(strategy: Any) -> bool:
    """Return whether a strategy converts batch norm (``sync_batchnorm``)."""
    return getattr(strategy, "_layer_sync", None) is not None


def averages_models(strategy: Any) -> bool:
    """Return whether parameters differ between ranks by intent (local SGD, which averages models now and then)."""
    return getattr(strategy, "_model_averager", None) is not None


def injects_distributed_sampler(trainer: Any) -> bool:
    """Return whether the trainer replaces samplers (``use_distributed_sampler``). It keeps the option in a private part."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def without_injected_sampler(trainer: Any, is_served: Callable[[Any], bool]) -> Callable[[], object]:
    """Let the trainer inject no sampler into some loaders, and return a function that undoes it. It offers one switch for all loaders only.

    Args:
        trainer: The trainer.
        is_served: Says of a loader that it needs none.
    """
    connector = trainer._data_connector
    requires = connector._requires_distributed_sampler
    return _patch(connector, "_requires_distributed_sampler", lambda loader: requires(loader) and not is_served(loader))


def around_evaluations(
    trainer: Any, before: Callable[[Any], object], after: Callable[[Any], object]
) -> Callable[[], object]:
    """Call back before the batches of each evaluation and once after the last of them, before ranks may wait for anything.

    Lightning has a hook of the strategy after all that (``on_validation_end``): epoch values of logged results are reduced before it, in
    a private method. Several loaders in turn are reduced in turn.

    Args:
        trainer: The trainer.
        before: Gets the loop.
        after: Gets the loop.

    Returns:
        A function that undoes it.
    """
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    undo = list(chain.from_iterable(_surround_evaluation(loop, before, after) for loop in loops))
    return lambda: [each() for each in undo]


def _surround_evaluation(
    loop: Any, before: Callable[[Any], object], after: Callable[[Any], object]
) -> list[Callable[[], object]]:
    """Call back around the batches of one loop. Return the functions that undo it."""
    is_over = False

    def end_once() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            after(loop)

    def begin() -> None:
        nonlocal is_over
        is_over = False
        before(loop)

    undo = [_call_before(loop, "reset", begin), _call_before(loop, "on_run_end", end_once)]
    if hasattr(loop, "_store_dataloader_outputs"):  # predictions have none
        undo.append(before_epoch_values(loop, end_once))
    return undo


def _is_one_run(loop: Any) -> bool:
    """Return whether an evaluation stores its epoch values once. Several loaders in turn do so one by one, and the last is not known."""
    return len(loop._combined_loader.flattened) == 1 or loop._combined_loader._mode != "sequential"


def before_epoch_values(loop: Any, function: Callable[[], object]) -> Callable[[], object]:
    """Call a function before an evaluation reduces its epoch values. Lightning does so before the hooks at the end of the epoch.

    Several loaders in turn are reduced in turn, and the function is not called.

    Returns:
        A function that undoes it.
    """

    def before() -> None:
        if _is_one_run(loop):
            function()

    return _call_before(loop, "_store_dataloader_outputs", before)


def before_training_epoch_end(trainer: Any, function: Callable[[], object]) -> Callable[[], object]:
    """Call a function when a training epoch has ended, before any hook of its end. Return a function that undoes it."""
    connector = trainer._logger_connector
    reach_end = connector.epoch_end_reached

    def reach_end_and_call() -> None:
        reach_end()
        if trainer.training:  # validation inside a fit comes here too
            function()

    return _patch(connector, "epoch_end_reached", reach_end_and_call)


def before_evaluation_epoch_end(trainer: Any, function: Callable[[], object]) -> Callable[[], object]:
    """Call a function when all loaders of an evaluation have ended, before any hook of its end. Return a function that undoes it."""
    connector = trainer._logger_connector
    end_epoch = connector._evaluation_epoch_end

    def end_and_call() -> None:
        end_epoch()
        function()

    return _patch(connector, "_evaluation_epoch_end", end_and_call)


def before_reading_epoch(results: Any, function: Callable[[], object]) -> Callable[[], object]:
    """Call a function before epoch values of logged results are read, which reduces them. Return a function that undoes it."""

    def before(on_step: bool) -> None:
        if not on_step:
            function()

    return _call_before(results, "metrics", before)


def after_new_log(results: Any, function: Callable[[str, Any], object]) -> Callable[[], object]:
    """Call a function, with key and result, after a value was logged for the first time. Return a function that undoes it."""
    log = results.log

    def log_and_call(*args: Any, **options: Any) -> None:
        known = len(results)
        log(*args, **options)
        if len(results) > known:
            key = next(reversed(results))
            function(key, results[key])

    return _patch(results, "log", log_and_call)


def unread_epoch_values(results: Any) -> dict[str, Any]:
    """Return the logged results that have an epoch value which was not computed since they were logged, by Lightning's key."""
    return {key: result for key, result in results.valid_items() if result.meta.on_epoch and not is_reduced(result)}


def reduce_epoch_value(results: Any, result: Any) -> None:
    """Let Lightning compute and keep the epoch value of a logged result. A hook may still log more under its name.

    Communication: reductions as of ``self.log``.
    """
    rows = result.cumulated_batch_size.clone() if hasattr(result, "cumulated_batch_size") else None
    results._get_cache(result, False)
    if rows is not None:  # Lightning reduces it in place
        result.cumulated_batch_size = rows


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside a ``LightningOptimizer``, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def start_method(strategy: Any) -> str | None:
    """Return how a strategy starts its processes (``popen``, ``spawn``, ``fork``). None if it does not say."""
    return cast("str | None", getattr(strategy, "_start_method", None))


def multiprocessing_launcher() -> Any:
    """Return the class that starts ranks as processes of the main one. Lightning exports it under this name only, for strategies."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return _MultiProcessingLauncher


def is_interactive() -> bool:
    """Return whether Lightning takes this process for a notebook or an interactive interpreter, where not every launcher works."""
    from lightning.fabric.utilities import imports

    return bool(imports._IS_INTERACTIVE)


def use_existing_processes_(strategy: Any, timeout: Any) -> None:
    """Let a strategy start no processes and wait ``timeout`` for other ranks. Lightning takes the second in constructors only.

    It has no launcher: Lightning's for existing processes is refused in a notebook, and gives a rank more threads, which a forked
    process must not use.
    """
    if hasattr(strategy, "_start_method"):
        strategy._start_method = "popen"  # read by whatever asks how the processes were started
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout
    strategy._launcher = None
    strategy._configure_launcher = lambda: None


def syncs_batch_norm(trainer: Any) -> bool:
    """Return whether the trainer was asked to synchronise batch norm. It keeps the plugin in a private part."""
    return trainer._accelerator_connector._layer_sync is not None


def attached_trainer(module: Any) -> Any:
    """Return the trainer that a module is attached to, None without one. ``LightningModule.trainer`` raises there."""
    return getattr(module, "_trainer", None)


def fitting_trainer() -> Any:
    """Return the trainer with a fit loop among the callers, None without one. Lightning gives a sampler no reference to it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "_FitLoop":
            return owner.trainer
        frame = frame.f_back
    return None


def is_made_by_command_line() -> bool:
    """Return whether LightningCLI builds the module now. It hands the plain config to ``save_hyperparameters`` in a private context."""
    from lightning.pytorch.core.mixins import hparams_mixin

    return hparams_mixin._given_hyperparameters.get() is not None
