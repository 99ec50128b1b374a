"""Private names of torch, Lightning, torchmetrics and pytorch-metric-learning: every import or read of one goes through here.

Each function gives the reason, and the release that its private name was read in. Libraries above torch are imported
inside functions, so that this layer needs torch alone. Overriding a private method and subclassing stay where they are. The layer
test lists them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import batchnorm, dropout, loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakTensorKeyDictionary

# ---------------------------------------------------------------------- torch 2.13

BATCH_NORM_TYPES: tuple[type[nn.Module], ...] = (batchnorm._BatchNorm,)
"""The base of all batch norms. Torch has no public one."""

NORM_TYPES: tuple[type[nn.Module], ...] = (batchnorm._NormBase,)
"""The base of all norms with running statistics (batch norm, instance norm). Torch has no public one."""

DROPOUT_TYPES: tuple[type[nn.Module], ...] = (dropout._DropoutNd,)
"""The base of all dropouts. Torch has no public one."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operator of a thread. It is documented, in a module that has a private name."""

TORCH_LOSS_TYPES: tuple[type[nn.Module], ...] = (loss._Loss,)
"""The base of ``torch.nn``'s losses. Torch has no public one."""

DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a subclass of Tensor with plain operations. Torch's documentation names it so."""


def device_generators(kind: str) -> Sequence[torch.Generator]:
    """Return the default generators of an accelerator's devices. None if it has no such thing.

    CUDA, XPU and others keep them in their module under a public name. MPS has one device, and one generator under a private name.
    """
    module: Any = torch.get_device_module(kind)
    if kind == "mps":
        return (module._get_default_mps_generator(),)
    return cast("Sequence[torch.Generator]", getattr(module, "default_generators", ()))


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place. That is autograd's own counter, which has no public reader."""
    return tensor._version


def stops_recomputation(error: BaseException) -> bool:
    """Return whether this is how ``torch.utils.checkpoint`` leaves a forward that it runs again, once it has what backward needs."""
    return type(error).__name__ == "_StopRecomputationError" and type(error).__module__ == "torch.utils.checkpoint"


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor is one that a transform of ``torch.func`` (grad, vjp, vmap, jvp) wraps. Torch has no public word for it."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def without_memory(cls: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor of a subclass that has a shape and no memory. Kernels and exports, which would read at address 0, raise.

    Args:
        cls: The subclass. It handles all operators.
        shape: The shape.
        dtype: The dtype.
        device: The device.
    """
    made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def without_torch_function() -> AbstractContextManager[object]:
    """Return a context in which subclasses do not handle functions of torch."""
    return torch._C.DisableTorchFunctionSubclass()


def is_write(operator: Any) -> bool:
    """Return whether an operator below autograd writes into an argument."""
    return bool(operator._schema.is_mutable)


def are_saved_tensors_hooked() -> bool:
    """Return whether a block, as a checkpoint, handles what autograd saves. It has no public reader."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def compiled_modules() -> list[Any]:
    """Return the modules of torch's functions that are called by other names, as ``torch.nn.functional.gelu``."""
    return [getattr(torch._C, name) for name in ("_nn", "_linalg", "_special")]


def memory_key(tensor: Tensor) -> int:
    """Return a number of the memory of a dense tensor: views have that of their base."""
    return int(tensor.untyped_storage()._cdata)


def outside_transforms() -> AbstractContextManager[object]:
    """Return a block without transforms of ``torch.func``, so that plain tensors stay plain. It has no public name."""
    from torch._functorch import pyfunctorch

    return cast("AbstractContextManager[object]", pyfunctorch.temporarily_clear_interpreter_stack())


def sparse_entries(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor as they lie there. Torch's public readers refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the slots of submodules. ``children()`` leaves out repeated ones and takes ten times as long."""
    return module._modules


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the slots of a module's own parameters, which may be assigned a tensor for the length of a call."""
    return module._parameters


_SLOTS = {"modules": attrgetter("_modules"), "parameters": attrgetter("_parameters"), "buffers": attrgetter("_buffers")}
_VALUES = methodcaller("values")


def all_slots(modules: Iterable[nn.Module], kind: Literal["modules", "parameters", "buffers"]) -> Iterator[Any]:
    """Visit the slots of several modules for their submodules, parameters or buffers, in a loop that runs in C, for use in every step."""
    return chain.from_iterable(map(_VALUES, map(_SLOTS[kind], modules)))


def without_parameter(module: nn.Module, name: str) -> nn.Module:
    """Return a shallow copy of a module that lacks one of its parameters. A copy shares its dict of slots, which has no public setter."""
    bare = copy.copy(module)
    bare._parameters = {key: value for key, value in module._parameters.items() if key != name}
    return bare


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the slots of a module's own buffers, those without a value too. ``named_buffers()`` leaves them out."""
    return module._buffers


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a buffer of the module's own is saved in its state dict. Torch keeps the names of the others privately."""
    return name not in module._non_persistent_buffers_set


_SHARED_TABLES = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def shared_tables(module: nn.Module) -> dict[str, Any]:
    """Return the tables of a module, by attribute, that decide its names and its state dict."""
    return {name: getattr(module, name) for name in _SHARED_TABLES}


def state_dict_metadata(state: Any, prefix: str) -> dict[str, Any]:
    """Return the notes of a state dict about a module, besides its tensors. They have no public name."""
    metadata: dict[str, dict[str, Any]] = getattr(state, "_metadata", {})  # a plain dict has none
    return metadata.get(prefix.removesuffix("."), {})


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrapper, or the module itself."""
    # not by the attribute alone: a module that shares the submodules of a compiled one has it too
    is_compiled = any(base.__name__ == "OptimizedModule" for base in type(module).__mro__)
    return cast("nn.Module", getattr(module, "_orig_mod", module)) if is_compiled else module


def is_ddp_ignored(tensor: Tensor) -> bool:
    """Return whether DDP leaves a tensor alone. It marks the tensor itself."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def has_ddp_comm_hook(strategy: Any) -> bool:
    """Return whether Lightning's ``DDPStrategy`` gives its DDP a communication hook of the user's. DDP takes one."""
    return strategy._ddp_comm_hook is not None


@contextlib.contextmanager
def ddp_ignoring(module: nn.Module, names: Collection[str], marked: Sequence[Tensor]) -> Iterator[None]:
    """Let DDP be built inside the block without some tensors. It takes no list of names, but reads marks that it documents nowhere.

    The marks are gone afterwards (DDP copies the names): one that stayed would follow a copy of the module into another strategy.

    Args:
        module: Module that DDP will wrap.
        names: Names of the parameters and buffers to leave alone.
        marked: The same tensors.
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
    """Return the state of the communication hook of Lightning's ``DDPStrategy``. None if there is no such thing."""
    return strategy._ddp_comm_state


def broadcast_as_ddp_does(buffers: Sequence[Tensor], group: Any = None) -> None:
    """Overwrite buffers with rank 0's, in messages of the same sizes as DDP's forward (torch 2.13).

    Args:
        buffers: Buffers in the order of the module.
        group: DDP's. None is the world.
    """
    at_a_time = 250 << 20
    carrier = group or dist.group.WORLD
    assert carrier is not None
    dist._broadcast_coalesced(carrier, list(buffers), at_a_time, 0)  # type: ignore[attr-defined]


def ddp_ignored_names(module: nn.Module) -> set[str]:
    """Return the names that DDP is to leave alone. It keeps them in a private attribute of the module."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


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


def gathered_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return by name the tensors into which ``fully_shard`` gathers its parameters, once it has. They are in graphs, not in the module."""
    found: dict[str, Tensor] = {}
    for parameter in _divided(module):
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None:
            found[str(getattr(parameter, "_param_fqn", len(found)))] = whole
    return found


def sharded_reductions(module: FSDPModule) -> Iterator[tuple[float | None, bool, Any, int]]:
    """Yield how the gradients of one module that ``fully_shard`` divides are reduced. Its setters have no getters.

    Args:
        module: It alone: each module inside has its own.

    Yields:
        The divide factor (None: a mean), whether only sums travel, the mesh, and the number of ranks that divide a parameter.
    """
    for group in _parameter_groups(module):
        mesh = group.mesh_info
        own_ranks = getattr(mesh, "shard_mesh_size", 1)
        yield group.gradient_divide_factor, group.force_sum_reduction_for_comms, mesh.mesh, own_ranks


def note_calls(cls: type, name: str, note: Callable[[Any], None]) -> None:
    """Let a function note each object on which a method of torch's is called. Torch has no reader for what some of its setters set."""
    own = getattr(cls, name)

    @functools.wraps(own)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self)
        return own(self, *args, **kwargs)

    setattr(cls, name, noting)


def foreign_comm_hooks(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the communication hooks of a DDP whose result nobody knows: they are not torch's, and do not declare a mean.

    torch keeps them under a private name (2.13). A hook declares a mean by an attribute ``reduces = "mean"``.
    """
    hooks = [hook for hook, _ in getattr(ddp, "_comm_hooks", ())]
    known = ("torch.", f"{__name__.partition('.')[0]}.")
    unknown = [hook for hook in hooks if not hook.__module__.startswith(known)]
    return [hook.__qualname__ for hook in unknown if getattr(hook, "reduces", None) != "mean"]


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
    """Return whether ``fully_shard`` has divided this whole parameter in another module. It marks replaced parameters (2.13)."""
    return hasattr(parameter, "_fsdp_orig_uid")


def marks_sharded() -> bool:
    """Return whether this torch marks a parameter that ``fully_shard`` replaces, which ``was_sharded`` reads."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param
    except ImportError:
        return False
    return hasattr(_fsdp_param, "_get_orig_param_uid")


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function in the thread of the backward that runs, when it is through. Those that DDP and FSDP2 leave are called in order."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


@contextlib.contextmanager
def in_backward(mode: AbstractContextManager[object]) -> Iterator[None]:
    """Enter a torch function mode in each backward that begins inside the block. Torch suspends it there, and offers no way to keep it."""
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    engine._engine_run_backward = run_in_mode
    try:
        yield
    finally:
        engine._engine_run_backward = run


_EXCHANGES = (
    "lazy_init",
    "unshard",
    "wait_for_unshard",
    "reshard",
    "post_backward",
    "finalize_backward",
)  # of fully_shard


@contextlib.contextmanager
def around_fsdp_exchanges(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a context around each exchange of ``fully_shard`` inside the block, with its copies. Torch has no hook for them."""
    group: Any = _fsdp_param_group.FSDPParamGroup
    originals = {name: getattr(group, name) for name in _EXCHANGES if hasattr(group, name)}
    for name, original in originals.items():
        setattr(group, name, _in_context(original, context))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(group, name, original)


def _in_context(original: Callable[..., Any], context: Callable[[], AbstractContextManager[object]]) -> Any:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    return run


def graph_task_id() -> int:
    """Return the number of the backward that runs in this thread, -1 outside of one."""
    return torch._C._current_graph_task_id()


def hooks_of_calls(module: nn.Module) -> list[dict[int, Any]]:
    """Return the hooks before and after the forward of a module, by number."""
    return [module._forward_pre_hooks, module._forward_hooks]


def is_in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs, or ``vmap``. That of the compiler is none."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() != torch._C._functorch.TransformType.Functionalize


def next_node() -> int:
    """Return a number below those of all nodes that this thread adds to a graph from now on. Backward runs higher numbers first."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).view(()).grad_fn
    return int(node._sequence_nr())


def number_node_(result: Tensor, number: int) -> None:
    """Give the node of a custom ``autograd.Function`` another number."""
    node: Any = result.grad_fn
    node._set_sequence_nr(number)


def saved_by_node(node: Any, name: str, default: Any = None) -> Any:
    """Return a value that an autograd node saved in forward (``_saved_<name>``). Torch barely documents these."""
    return getattr(node, f"_saved_{name}", default)


def function_of_node(node: Any) -> type | None:
    """Return the ``torch.autograd.Function`` that a node belongs to, None for torch's own nodes. Torch 2.13 keeps it private."""
    return getattr(type(node), "_forward_cls", None)


def operator_schema(function: Any) -> Any:
    """Return the schema of an operator that a dispatch mode sees. Torch gives it no public name."""
    return function._schema


MemoryReference = StorageWeakRef
"""Refers weakly to the memory of a tensor. Two are equal that refer to the same memory."""


WeakTensorKeys = WeakTensorKeyDictionary
"""A dict by tensor, each as long as the tensor is alive. Torch keeps it outside of its documentation."""


def memory_reference(tensor: Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's memory. Its address is ``cdata``. None for a tensor without one memory (a sparse one)."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return None


def tree_leaves(nest: Any) -> list[Any]:
    """Return the leaves of a nest of lists, tuples and dicts. This is torch's own walk, which has no public name."""
    return _pytree.tree_leaves(nest)


def is_in_dispatch_mode() -> bool:
    """Return whether a dispatch mode sees the operators of this thread."""
    return bool(_python_dispatch.is_in_torch_dispatch_mode())


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Return a block that dispatch modes do not see. Torch offers no public way out of one."""
    return cast("AbstractContextManager[object]", _python_dispatch._disable_current_modes())


def without_function_modes() -> AbstractContextManager[object]:
    """Return a block that modes of functions (``TorchFunctionMode``) do not see. Torch's public way leaves out subclasses only."""
    return cast("AbstractContextManager[object]", torch._C.DisableTorchFunction())


def reads_scalar(function: Any) -> bool:
    """Return whether an operator that a dispatch mode sees is ``Tensor.item()``."""
    return function is torch.ops.aten._local_scalar_dense.default


def on_completion(work: Any, callback: Callable[[Any], None]) -> None:
    """Call back when a collective that a dispatch mode has seen is complete. The mode gets torch's boxed work.

    Raises:
        AttributeError, RuntimeError, TypeError: for a backend without futures.
    """
    torch._C._distributed_c10d.Work.unbox(work).get_future().add_done_callback(callback)


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks take what graphs save (checkpoint, ``save_on_cpu``). Torch shows that by a private name only (2.13)."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    except (AttributeError, TypeError, RuntimeError):
        return True


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor, computed in a dtype. Those of one device and dtype take one launch."""
    return torch._foreach_norm(list(tensors), 2, dtype=dtype)


def multiply_(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors in place. Dense ones of one device and dtype take one launch."""
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided]
    for tensor in tensors:
        if tensor.layout != torch.strided:
            tensor.mul_(factor)
    if dense:
        torch._foreach_mul_(dense, factor)


def default_store() -> Any:
    """Return the store of the default process group. None if there is none, or torch does not show it."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


@contextlib.contextmanager
def world_store_prefixed(prefix: str) -> Iterator[None]:
    """Let groups that are made inside the block write their keys under a prefix. ``new_group`` takes no store but the world's (2.13)."""
    stores = dist.distributed_c10d._world.pg_map
    world = dist.group.WORLD
    assert world is not None
    before = stores[world]
    stores[world] = (before[0], PrefixStore(prefix, before[1]))
    try:
        yield
    finally:
        stores[world] = before


def abort_communicators(device: torch.device) -> int:
    """Abort NCCL's communicators of all process groups, so that the kernels which wait for a peer end. Return how many there were.

    Only ``_abort_process_group`` aborts several at once, and it forgets all groups, also those of gloo (torch 2.13). torch documents an
    abort for ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``. Under the default, torch's watchdog does the same after the group's time-out. It ends
    when a communicator is aborted before.
    """
    found: list[Any] = []
    for group in reversed(dist.distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # a group without a backend for this device
            backend = group._get_backend(device)
            if backend.name() == "nccl":
                found.append(backend)
    if found:
        # as one group of NCCL's calls: aborts of several communicators may wait for each other
        found[0]._group_start()
        for backend in found:
            backend.abort()
        found[0]._group_end()
    return len(found)


def group_timeout(group: Any) -> timedelta | None:
    """Return how long a process group waits for peers. ``new_group`` does not take it over. None if this torch does not show it.

    A group of NCCL alone has no backend for the CPU. It is asked for that of its devices.
    """
    for device in (torch.device("cpu"), *getattr(group, "_device_types", ())):
        with contextlib.suppress(AttributeError, RuntimeError):
            options = group._get_backend(device).options
            return timedelta(seconds=options._timeout.total_seconds())
    return None


def ddp_logging_data(ddp: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's own record of buckets and times. Collectives on autograd's threads are seen nowhere else."""
    data: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return data


# ---------------------------------------------------------------------- Lightning 2.6


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


def frame_of_thread(identity: int) -> FrameType | None:
    """Return where a thread of this process is. ``threading`` does not say."""
    return sys._current_frames().get(identity)


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
        if _is_one_run(loop):
            end_once()
        store()

    def end_after_end() -> Any:
        end_once()
        return on_run_end()

    replaced = {"reset": reset_after_before, "on_run_end": end_after_end, "_store_dataloader_outputs": store_after_end}
    return [_patch(loop, name, function) for name, function in replaced.items()]


def _is_one_run(loop: Any) -> bool:
    """Return whether an evaluation stores its epoch values once. Several loaders in turn do so one by one, and the last is not known."""
    return len(loop._combined_loader.flattened) == 1 or loop._combined_loader._mode != "sequential"


def before_epoch_values(loop: Any, function: Callable[[], object]) -> Callable[[], object]:
    """Call a function before an evaluation reduces its epoch values. Lightning does so before the hooks at the end of the epoch.

    Several loaders in turn are reduced in turn, and the function is not called.

    Returns:
        A function that undoes it.
    """
    store = loop._store_dataloader_outputs

    def store_after_function() -> None:
        if _is_one_run(loop):
            function()
        store()

    return _patch(loop, "_store_dataloader_outputs", store_after_function)


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
    metrics = results.metrics

    def metrics_after_function(on_step: bool) -> Any:
        if not on_step:
            function()
        return metrics(on_step)

    return _patch(results, "metrics", metrics_after_function)


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


def inner_batch_sampler(loader: Any) -> Any:
    """Return the sampler of a loader's batches, None if it makes none. In prediction Lightning wraps it to note the indices."""
    batches = loader.batch_sampler
    return getattr(batches, "_batch_sampler", batches)


def set_samplers_(loader: Any, sampler: Any, batch_sampler: Any) -> None:
    """Give a DataLoader that was copied other samplers. Torch takes them in the constructor only, which a subclass may have changed.

    Args:
        loader: The copy, which is written to.
        sampler: Its sampler.
        batch_sampler: Its batch sampler, around it. None if the loader makes no batches.
    """
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    if isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper):
        batch_sampler = _IndexBatchSamplerWrapper(batch_sampler)
    # workers that persist have begun with the samplers before
    vars(loader).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)


def is_any_autocast_on() -> bool:
    """Return whether autocast is on for any device. The public reader answers for one."""
    return torch._C._is_any_autocast_enabled()


def collectives_started() -> int:
    """Return how many collectives this rank has started in the default group, 0 if the backend does not count. It has no public reader."""
    group = torch.distributed.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return 0


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


# ---------------------------------------------------------------------- torchmetrics 1.9


def torchmetrics_states(module: Any) -> dict[str, Any] | None:
    """Return the states of a metric with their defaults, by name. None for anything but a metric."""
    return cast("dict[str, Any] | None", getattr(module, "_defaults", None))


def state_reductions(metric: Any) -> dict[str, Any] | None:
    """Return how each state of a metric is reduced over ranks, by name. None for anything but a metric."""
    reductions = getattr(metric, "_reductions", None)
    return reductions if isinstance(reductions, dict) else None


# ---------------------------------------------------------------------- pytorch-metric-learning 2.9


def recorded_statistics(module: Any) -> Collection[str]:
    """Return the attributes that record a loss's, miner's or distance's last batch."""
    return cast("Collection[str]", getattr(module, "_record_these_stats", ()))
