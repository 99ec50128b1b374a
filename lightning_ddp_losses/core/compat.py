"""Private names of torch, Lightning, torchmetrics and pytorch-metric-learning: every import or read of one goes through here.

Each function says why no public name serves, and in which release the private one was read. Libraries above torch are imported
inside functions, so that this layer needs torch alone. Overriding a private method and subclassing stay where they are; the layer
test lists them.
"""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import batchnorm, dropout, loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree

# ---------------------------------------------------------------------- torch 2.13

BATCH_NORM_TYPES: tuple[type[nn.Module], ...] = (batchnorm._BatchNorm,)
"""The base of all batch norms; torch has no public one."""

NORM_TYPES: tuple[type[nn.Module], ...] = (batchnorm._NormBase,)
"""The base of all norms with running statistics (batch norm, instance norm); torch has no public one."""

DROPOUT_TYPES: tuple[type[nn.Module], ...] = (dropout._DropoutNd,)
"""The base of all dropouts; torch has no public one."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operator of a thread; documented, in a module whose name is private."""

TORCH_LOSS_TYPES: tuple[type[nn.Module], ...] = (loss._Loss,)
"""The base of ``torch.nn``'s losses; torch has no public one."""

DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""What a subclass of Tensor takes as ``__torch_function__`` when its operations shall be plain ones; torch's documentation names it so."""


def device_generators(kind: str) -> Sequence[torch.Generator]:
    """Return the default generators of an accelerator's devices; none where it has no such thing.

    CUDA, XPU and others keep them in their module under a public name; MPS has one device, and one generator under a private name.
    """
    module: Any = torch.get_device_module(kind)
    if kind == "mps":
        return (module._get_default_mps_generator(),)
    return cast("Sequence[torch.Generator]", getattr(module, "default_generators", ()))


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; autograd's own counter, which has no public reader."""
    return tensor._version


def stops_recomputation(error: BaseException) -> bool:
    """Say whether this is how ``torch.utils.checkpoint`` leaves a forward that it runs again, once it has what backward needs."""
    return type(error).__name__ == "_StopRecomputationError" and type(error).__module__ == "torch.utils.checkpoint"


def is_transformed(tensor: Tensor) -> bool:
    """Say whether a tensor is one that a transform of ``torch.func`` (grad, vjp, vmap, jvp) wraps; torch has no public word for it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def outside_transforms() -> AbstractContextManager[object]:
    """Return a block in which no transform of ``torch.func`` is at work, so that plain tensors stay plain; torch has no public way."""
    from torch._functorch import pyfunctorch

    return cast("AbstractContextManager[object]", pyfunctorch.temporarily_clear_interpreter_stack())


def sparse_entries(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor as they lie there; torch's public readers refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the slots of submodules; ``children()`` leaves out repeated ones and takes ten times as long."""
    return module._modules


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the slots of a module's own parameters, which may be assigned a tensor for the length of a call."""
    return module._parameters


_SUBMODULES, _PARAMETERS, _BUFFERS = map(attrgetter, ("_modules", "_parameters", "_buffers"))
_VALUES = methodcaller("values")


def all_child_modules(modules: Iterable[nn.Module]) -> Iterator[nn.Module | None]:
    """Visit the slots of submodules of several modules, in a loop that runs in C: for what is done in every step."""
    return chain.from_iterable(map(_VALUES, map(_SUBMODULES, modules)))


def all_parameter_slots(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter | None]:
    """Visit the slots of several modules' own parameters, as ``all_child_modules``."""
    return chain.from_iterable(map(_VALUES, map(_PARAMETERS, modules)))


def all_buffer_slots(modules: Iterable[nn.Module]) -> Iterator[Tensor | None]:
    """Visit the slots of several modules' own buffers, as ``all_child_modules``."""
    return chain.from_iterable(map(_VALUES, map(_BUFFERS, modules)))


def without_parameter(module: nn.Module, name: str) -> nn.Module:
    """Return a shallow copy of a module that lacks one of its parameters; a copy shares its dict of slots, which has no public setter."""
    bare = copy.copy(module)
    bare._parameters = {key: value for key, value in module._parameters.items() if key != name}
    return bare


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the slots of a module's own buffers, those without a value too; ``named_buffers()`` leaves them out."""
    return module._buffers


def state_dict_metadata(state: Any, prefix: str) -> dict[str, Any]:
    """Return what a state dict notes of a module beside its tensors; torch hands it to ``_load_from_state_dict``, but gives it no name."""
    metadata: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})  # a plain dict has none
    return metadata.get(prefix.removesuffix("."), {})


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrapper, or the module itself."""
    return cast("nn.Module", getattr(module, "_orig_mod", module))


def is_ddp_ignored(tensor: Tensor) -> bool:
    """Say whether DDP was told to leave a tensor alone; it marks the tensor itself."""
    return bool(getattr(tensor, "_ddp_ignored", False))


@contextlib.contextmanager
def ddp_ignoring(module: nn.Module, names: Collection[str], marked: Sequence[Tensor]) -> Iterator[None]:
    """Let DDP be built inside the block without some tensors; it takes no list of names, but reads marks that it documents nowhere.

    The marks are gone afterwards (DDP copies the names): one that stayed would follow a copy of the module into another strategy.

    Args:
        module: That DDP will wrap.
        names: Of parameters and buffers to leave alone.
        marked: Those tensors.
    """
    attribute = "_ddp_params_and_buffers_to_ignore"
    before = module.__dict__.get(attribute)
    unmarked = [tensor for tensor in marked if not hasattr(tensor, "_ddp_ignored")]
    # a parameter of the module itself goes by its name in one part of DDP, and by "." and its name in another
    listed = {*names, *(f".{name}" for name in names if "." not in name)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(listed))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for tensor in unmarked:
            del tensor._ddp_ignored  # type: ignore[attr-defined]
        if before is None:
            delattr(module, attribute)
        else:
            setattr(module, attribute, before)


def ddp_comm_state(strategy: Any) -> object:
    """Return what the communication hook of Lightning's ``DDPStrategy`` keeps between steps; None where there is no such thing."""
    return strategy._ddp_comm_state


def broadcast_as_ddp_does(buffers: Sequence[Tensor], group: Any = None) -> None:
    """Overwrite buffers with rank 0's, in the messages in which DDP's forward does (torch 2.13).

    Args:
        buffers: In the order of the module.
        group: DDP's; None is the world.
    """
    at_a_time = 250 << 20
    carrier = group or dist.group.WORLD
    assert carrier is not None
    dist._broadcast_coalesced(carrier, list(buffers), at_a_time, 0)  # type: ignore[attr-defined]


def ddp_ignored_names(module: nn.Module) -> set[str]:
    """Return the names that a user told DDP to leave alone, which it keeps in a private attribute of the module."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def replace_unscaling(
    scaler: Any, unscale: Callable[[Callable[..., Any], Any, tuple[Any, ...]], Any]
) -> Callable[[], object]:
    """Let a function unscale an optimizer's gradients in the place of a ``GradScaler``, whose one step for that is private (2.13).

    Args:
        scaler: The gradient scaler.
        unscale: Gets the scaler's own function, the optimizer and further arguments; returns by device whether something overflowed.

    Returns:
        What undoes it.
    """
    own = scaler._unscale_grads_
    return _patch(scaler, "_unscale_grads_", lambda optimizer, *args: unscale(own, optimizer, args))


def allow_precisions(strategy: type, precisions: Collection[str]) -> None:
    """Let the Trainer take these precisions for an instance of a strategy, as it does where that is asked for by name.

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


def gathered_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return by name the tensors into which ``fully_shard`` gathers its parameters, once it has; they are in graphs, not in the module."""
    found: dict[str, Tensor] = {}
    for parameter in _divided(module):
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            found[str(getattr(parameter, "_param_fqn", len(found)))] = whole
    return found


def sharded_reductions(module: FSDPModule) -> Iterator[tuple[float | None, bool, Any, int]]:
    """Yield how gradients of one module are reduced that ``fully_shard`` divides; its setters have no getters.

    Args:
        module: It alone: each module inside has its own.

    Yields:
        The divide factor (None: a mean), whether only sums travel, the mesh, and the number of ranks that divide a parameter.
    """
    for group in _parameter_groups(module):
        mesh = group.mesh_info
        own_ranks = getattr(mesh, "shard_mesh_size", 1)
        yield group.gradient_divide_factor, group.force_sum_reduction_for_comms, mesh.mesh, own_ranks


def foreign_comm_hooks(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the communication hooks of a DDP that are not torch's; torch keeps them under a private name (2.13)."""
    hooks = [hook for hook, _ in getattr(ddp, "_comm_hooks", ())]
    return [hook.__qualname__ for hook in hooks if not hook.__module__.startswith("torch.")]


def local_parts(module: nn.Module) -> list[Tensor]:
    """Return the tensors that hold this rank's parts of what ``fully_shard`` divides, also while it is gathered."""
    return [parameter.sharded_param._local_tensor for parameter in _divided(module)]


def _divided(module: nn.Module) -> Iterator[Any]:
    """Yield what ``fully_shard`` keeps of each parameter that it divides."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            for group in _parameter_groups(inner):
                yield from group.fsdp_params


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    # torch 2.11 knows one group, or none
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def was_sharded(parameter: Tensor) -> bool:
    """Say of a parameter that is whole whether ``fully_shard`` has divided it in another module; it marks what it replaces (2.13)."""
    return hasattr(parameter, "_fsdp_orig_uid")


def marks_sharded() -> bool:
    """Say whether this torch marks a parameter that ``fully_shard`` replaces, which ``was_sharded`` reads."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param
    except ImportError:
        return False
    return hasattr(_fsdp_param, "_get_orig_param_uid")


def graph_task_id() -> int:
    """Return the number of the backward that runs in this thread, -1 outside of one."""
    return torch._C._current_graph_task_id()


def saved_by_node(node: Any, name: str, default: Any = None) -> Any:
    """Return what an autograd node saved in forward (``_saved_<name>``); torch documents these for built-in nodes only in passing."""
    return getattr(node, f"_saved_{name}", default)


def function_of_node(node: Any) -> type | None:
    """Return the ``torch.autograd.Function`` whose backward a node is, None for torch's own nodes; torch 2.13 keeps it private."""
    return getattr(type(node), "_forward_cls", None)


def operator_schema(function: Any) -> Any:
    """Return the schema of an operator that a dispatch mode sees; torch gives it no public name."""
    return function._schema


def memory_reference(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's memory, whose address is ``cdata``; None for a tensor without one memory (a sparse one)."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return None


def write_count(tensor: Tensor) -> int:
    """Return how often somebody wrote into a tensor in place; torch gives the number no public name."""
    return tensor._version


def tree_leaves(nest: Any) -> list[Any]:
    """Return what a nest of lists, tuples and dicts holds; torch's own walk, which has no public name."""
    return _pytree.tree_leaves(nest)


def is_in_dispatch_mode() -> bool:
    """Say whether a dispatch mode sees the operators of this thread."""
    return bool(_python_dispatch.is_in_torch_dispatch_mode())


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Return a block in which no dispatch mode sees anything; torch offers no public way out of one."""
    return cast("AbstractContextManager[object]", _python_dispatch._disable_current_modes())


def reads_scalar(function: Any) -> bool:
    """Say whether an operator that a dispatch mode sees is ``Tensor.item()``."""
    return function is torch.ops.aten._local_scalar_dense.default


def on_completion(work: Any, callback: Callable[[Any], None]) -> None:
    """Call back when a collective that a dispatch mode has seen is complete; the mode gets torch's boxed work.

    Raises:
        AttributeError, RuntimeError, TypeError: a backend whose works have no future.
    """
    torch._C._distributed_c10d.Work.unbox(work).get_future().add_done_callback(callback)


def has_saved_tensor_hooks() -> bool:
    """Say whether hooks take what graphs save (checkpoint, ``save_on_cpu``); torch shows that by a private name only (2.13)."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    except (AttributeError, TypeError, RuntimeError):
        return True


def multiply_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place; dense ones of a device and dtype in one launch, where this torch has that."""
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided]
    for tensor in tensors:
        if tensor.layout != torch.strided:
            tensor.mul_(factor)
    if dense:
        torch._foreach_mul_(dense, factor)


def is_inside_backward() -> bool:
    """Return whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def default_store() -> Any:
    """Return the store of the default process group; None where there is none, or torch does not show it."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


@contextlib.contextmanager
def world_store_prefixed(prefix: str) -> Iterator[None]:
    """Let groups that are made inside the block write their keys under a prefix; ``new_group`` takes no store but the world's (2.13)."""
    stores = dist.distributed_c10d._world.pg_map
    world = dist.group.WORLD
    assert world is not None
    before = stores[world]
    stores[world] = (before[0], PrefixStore(prefix, before[1]))
    try:
        yield
    finally:
        stores[world] = before


def group_timeout(group: Any) -> timedelta | None:
    """Return how long a process group waits for peers; ``new_group`` does not take it over. None where this torch does not show it.

    A group of NCCL alone has no backend for the CPU; it is asked for that of its own devices.
    """
    for device in (torch.device("cpu"), *getattr(group, "_device_types", ())):
        with contextlib.suppress(AttributeError, RuntimeError):
            options = group._get_backend(device).options
            return timedelta(seconds=options._timeout.total_seconds())
    return None


def ddp_logging_data(ddp: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's own record of buckets and times; collectives on autograd's threads are seen nowhere else."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return data


# ---------------------------------------------------------------------- Lightning 2.6


def replace_sigterm_notice(trainer: Any, notice: Callable[[], None]) -> None:
    """Call ``notice`` in SIGTERM's handler in place of Lightning's note of it, which broadcasts there; other handlers stay."""
    _replace_handler(signal.SIGTERM, trainer._signal_connector._sigterm_notifier_fn, notice)


def _replace_handler(number: int, lightnings: Any, notice: Callable[[], None]) -> None:
    """Call ``notice`` in place of one of the handlers that Lightning calls in turn when a signal arrives."""
    handlers = getattr(signal.getsignal(number), "signal_handlers", [])
    for place, handler in enumerate(handlers):
        if handler == lightnings:
            handlers[place] = lambda signum, frame: notice()


def skip_sigterm_broadcast(trainer: Any) -> Callable[[], object]:
    """Spare each training batch Lightning's broadcast of whether SIGTERM reached rank 0; return what undoes that."""
    return _patch(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], object]:
    """Put a function in the place of an object's method; return what undoes that."""
    setattr(owner, name, replacement)
    return lambda: vars(owner).pop(name, None)


def mark_sigterm_(trainer: Any) -> None:
    """Let Lightning end the run after this batch, as after SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def requeues_on_signal(trainer: Any) -> bool:
    """Say whether Lightning saves and queues the job again when SLURM sends a signal (``SLURMEnvironment(auto_requeue=True)``)."""
    cluster = trainer._accelerator_connector.cluster_environment
    return bool(getattr(cluster, "auto_requeue", False)) and getattr(cluster, "requeue_signal", None) is not None


def replace_requeue_handler(trainer: Any, notice: Callable[[], None]) -> Callable[[], None]:
    """Call ``notice`` where SLURM's signal arrives, and return what Lightning would have done there; a user's own handler stays."""
    number = trainer._accelerator_connector.cluster_environment.requeue_signal
    lightnings = trainer._signal_connector._slurm_sigusr_handler_fn
    _replace_handler(number, lightnings, notice)
    return lambda: lightnings(number, None)


def steps_as_logged(trainer: Any) -> int:
    """Return the number of batches that stepped, which loggers count by; ``global_step`` counts each optimizer."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def teardown_trainer(trainer: Any) -> None:
    """Clean up as Lightning does after an error; it leaves that out where a hook raises another one."""
    trainer._teardown()


def attach_trainer(module: Any, trainer: Any) -> None:
    """Give a copy of a module its trainer, without the checks of the public setter, which looks at submodules too."""
    module._trainer = trainer


def combined_loader(loop: Any) -> Any:
    """Return the loader that a loop draws from, with Lightning's samplers; None before there is one."""
    return loop._combined_loader


def replace_training_loaders(trainer: Any, replacement: Callable[[object], object | None]) -> Callable[[], object]:
    """Let a function replace training loaders before Lightning gives them a sampler; it has no hook there.

    ``Strategy.process_dataloader`` comes later, when nobody can tell any more whether the loader shuffled.

    Args:
        trainer: The trainer.
        replacement: Gets each training loader; None leaves it to Lightning.

    Returns:
        What undoes it.
    """
    connector = trainer._data_connector
    lightnings = connector._prepare_dataloader

    def prepare(dataloader: object, shuffle: bool, mode: Any) -> object:
        ours = replacement(dataloader) if mode == "train" else None
        return lightnings(dataloader, shuffle=shuffle, mode=mode) if ours is None else ours

    return _patch(connector, "_prepare_dataloader", prepare)


def with_batch_sampler(dataloader: Any, batch_sampler: Any) -> Any:
    """Return a DataLoader's twin with other batches: all else, also of a subclass, is kept; torch refuses to set it, and has no copy."""
    twin = copy.copy(dataloader)
    # what a DataLoader has that is built with batch_sampler=
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
    source.dataloader = lambda: replacement(request)
    return lambda: vars(source).pop("dataloader", None)


def prefetched_batches(loop: Any) -> int:
    """Return how many batches a fit has fetched ahead of the one that it trains on; its fetcher has no public name."""
    return len(getattr(loop._data_fetcher, "batches", ()))


def mode_iterator(combined: Any) -> Any:
    """Return what combines the loaders of a combined loader; no public method puts anything between the two."""
    return combined._iterator


def cycles(combined: Any) -> bool:
    """Say whether a combined loader begins its shorter loaders again while the longest goes on; it keeps its mode in a private name."""
    return bool(combined._mode == "max_size_cycle")


def make_iterator_anew(loop: Any) -> None:
    """Let the fit loop forget what it has fetched ahead; it makes its iterator once, when it gets the loaders."""
    if loop._data_fetcher is not None:
        loop._combined_loader.reset()
        iter(loop._data_fetcher)


def makes_loaders_anew(loop: Any) -> bool:
    """Say whether the fit loop gets its loaders anew at its next epoch."""
    return bool(loop._should_reload_train_dl)


def loaders_made_in(loop: Any) -> Any:
    """Return the epoch in which the fit loop got its loaders, from which ``reload_dataloaders_every_n_epochs`` counts."""
    return loop._last_train_dl_reload_epoch


def set_loaders_made_in_(loop: Any, epoch: Any) -> None:
    """Let the fit loop count from another epoch when it gets its loaders anew."""
    loop._last_train_dl_reload_epoch = epoch


def validation_loaders(trainer: Any) -> Any:
    """Return the loaders that are validated; ``trainer.val_dataloaders`` names those of an earlier fit also in ``trainer.validate``."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if trainer.state.fn == "validate":
        loop = trainer.validate_loop
    combined = loop._combined_loader
    return None if combined is None else combined.iterables


def set_up_validation_(trainer: Any) -> list[Any]:
    """Let a fit set its validation loaders up as for a validation, also where it will make none, and return them."""
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
    """Return the indices that Lightning drew from the user's sampler in this epoch; empty before the first."""
    return getattr(dataset, "_sampler_list", None) or []


def logged_results(loop: Any) -> Any:
    """Return what a loop has logged, with how each value is reduced; ``callback_metrics`` does not say."""
    return loop._results


def is_reduced(result: Any) -> bool:
    """Say whether an epoch's value of what was logged has been computed; Lightning then has reduced the number of rows in place."""
    return result._computed is not None


def epoch_name(results: Any, result: Any) -> str:
    """Return the name under which ``callback_metrics`` holds an epoch's value, with the loader's number where there are several."""
    return cast("str", results._forked_name(result, on_step=False)[1])


def has_layer_sync(strategy: Any) -> bool:
    """Say whether a strategy converts batch norm (``sync_batchnorm``)."""
    return getattr(strategy, "_layer_sync", None) is not None


def averages_models(strategy: Any) -> bool:
    """Say whether parameters differ between ranks by intent (local SGD, which averages models now and then)."""
    return getattr(strategy, "_model_averager", None) is not None


def injects_distributed_sampler(trainer: Any) -> bool:
    """Say whether the trainer replaces samplers (``use_distributed_sampler``); it keeps the option in a private part."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def without_injected_sampler(trainer: Any, is_served: Callable[[Any], bool]) -> Callable[[], object]:
    """Let the trainer inject no sampler into some loaders, and return what undoes that; it offers one switch for all loaders only.

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
    """Call back before the batches of each evaluation and once after the last of them, ahead of everything in which ranks may wait.

    Lightning has a hook of the strategy after all that (``on_validation_end``): epoch values of what was logged are reduced before it, in
    a private method. Several loaders in turn are reduced in turn.

    Args:
        trainer: The trainer.
        before: Gets the loop.
        after: Gets the loop.

    Returns:
        What undoes it.
    """
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    for loop in loops:
        _surround_evaluation(loop, before, after)

    def undo() -> None:
        for loop in loops:
            for name in ("reset", "on_run_end", "_store_dataloader_outputs"):
                vars(loop).pop(name, None)

    return undo


def _surround_evaluation(loop: Any, before: Callable[[Any], object], after: Callable[[Any], object]) -> None:
    reset, on_run_end = loop.reset, loop.on_run_end
    store: Callable[[], object] = getattr(loop, "_store_dataloader_outputs", lambda: None)  # predictions have none
    is_over = False

    def end_once() -> None:
        nonlocal is_over
        if not is_over:
            is_over = True
            after(loop)

    def reset_after_before() -> None:
        nonlocal is_over
        is_over = False
        before(loop)
        reset()

    def store_after_end() -> None:
        # of several loaders nobody knows here which one is the last
        if len(loop._combined_loader.flattened) == 1 or loop._combined_loader._mode != "sequential":
            end_once()
        store()

    def end_after_end() -> Any:
        end_once()
        return on_run_end()

    loop.reset, loop.on_run_end, loop._store_dataloader_outputs = reset_after_before, end_after_end, store_after_end


def inner_batch_sampler(loader: Any) -> Any:
    """Return what makes a loader's batches, None where nothing does; in prediction Lightning wraps it to note the indices."""
    batches = loader.batch_sampler
    return getattr(batches, "_batch_sampler", batches)


def set_samplers_(loader: Any, sampler: Any, batch_sampler: Any) -> None:
    """Give a DataLoader that was copied other samplers; torch takes them in the constructor only, which a subclass may have changed.

    Args:
        loader: The copy; written to.
        sampler: Its sampler.
        batch_sampler: Its batch sampler, around it; None where the loader makes no batches.
    """
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    if isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper):
        batch_sampler = _IndexBatchSamplerWrapper(batch_sampler)
    # workers that persist have begun with the samplers before
    vars(loader).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)


def is_any_autocast_on() -> bool:
    """Say whether autocast is on for any device; the public reader answers for one."""
    return torch._C._is_any_autocast_enabled()


def collectives_started() -> int:
    """Return how many collectives this rank has started in the default group, 0 where the backend does not count; no public reader."""
    group = torch.distributed.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return 0


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside a ``LightningOptimizer``, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def start_method(strategy: Any) -> str | None:
    """Return how a strategy starts its processes (``popen``, ``spawn``, ``fork``); None where it does not say."""
    return cast("str | None", getattr(strategy, "_start_method", None))


def multiprocessing_launcher() -> Any:
    """Return the class that starts ranks as processes of the main one; Lightning exports it under this name only, for strategies."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return _MultiProcessingLauncher


def use_existing_processes_(strategy: Any, timeout: Any) -> None:
    """Let a strategy start no processes and wait ``timeout`` for other ranks; Lightning takes the second in constructors only.

    It has no launcher: Lightning's for existing processes is refused in a notebook, and gives a rank more threads, which a forked
    process must not use.
    """
    if hasattr(strategy, "_start_method"):
        strategy._start_method = "popen"  # of what asks how the processes came to be
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout
    strategy._launcher = None
    strategy._configure_launcher = lambda: None


def syncs_batch_norm(trainer: Any) -> bool:
    """Say whether the trainer was asked to synchronise batch norm; it keeps the plugin in a private part."""
    return trainer._accelerator_connector._layer_sync is not None


def attached_trainer(module: Any) -> Any:
    """Return the trainer that a module is attached to, None without one; ``LightningModule.trainer`` raises there."""
    return getattr(module, "_trainer", None)


def is_made_by_command_line() -> bool:
    """Say whether LightningCLI builds the module now; it hands the plain config to ``save_hyperparameters`` in a private context."""
    from lightning.pytorch.core.mixins import hparams_mixin

    return hparams_mixin._given_hyperparameters.get() is not None


# ---------------------------------------------------------------------- torchmetrics 1.9


def torchmetrics_states(module: Any) -> dict[str, Any] | None:
    """Return the states of a metric with their defaults, by name; None for what is no metric."""
    return cast("dict[str, Any] | None", getattr(module, "_defaults", None))


def state_reductions(metric: Any) -> dict[str, Any] | None:
    """Return how each state of a metric is reduced over ranks, by name; None for what is no metric."""
    return cast("dict[str, Any] | None", getattr(metric, "_reductions", None))


# ---------------------------------------------------------------------- pytorch-metric-learning 2.9


def recorded_statistics(module: Any) -> Collection[str]:
    """Return the attributes in which a loss, miner or distance records what it saw of its last batch."""
    return cast("Collection[str]", getattr(module, "_record_these_stats", ()))
