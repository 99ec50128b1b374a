"""Private names of torch: every import or read of one goes through here.

Each function gives the reason. Names were read in torch 2.13. Overriding a private method and subclassing stay where they are. The layer
test lists them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
    """Return whether hooks take what graphs save (checkpoint, ``save_on_cpu``). Torch shows that by a private name only (2.13)."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    except (AttributeError, TypeError, RuntimeError):
        return True


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


def foreign_comm_hook(ddp: DistributedDataParallel) -> str:
    """Describe the communication hook of a DDP whose result nobody knows: it is not torch's, and does not declare a mean. Empty if none.

    torch keeps them under a private name (2.13). A hook declares a mean by an attribute ``reduces = "mean"``.
    """
    known = ("torch.", f"{__name__.partition('.')[0]}.")
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        if not hook.__module__.startswith(known) and getattr(hook, "reduces", None) != "mean":
            return f"comm hook {hook.__qualname__} of DistributedDataParallel"
    return ""


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


innermost_transform = torch._C._functorch.peek_interpreter_stack
"""Return the transform that runs, the compiler's own one included, or None. Torch has no public word for it."""


def is_in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs, or ``vmap``. That of the compiler is none."""
    innermost = innermost_transform()
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


def is_innermost(mode: Any) -> bool:
    """Return whether a dispatch mode is the one that its ``__exit__`` would remove."""
    return _python_dispatch._get_current_dispatch_mode() is mode


def reads_scalar(function: Any) -> bool:
    """Return whether an operator that a dispatch mode sees is ``Tensor.item()``."""
    return function is torch.ops.aten._local_scalar_dense.default


def on_completion(work: Any, callback: Callable[[Any], None]) -> None:
    """Call back when a collective that a dispatch mode has seen is complete. The mode gets torch's boxed work.

    Raises:
        AttributeError, RuntimeError, TypeError: for a backend without futures.
    """
    torch._C._distributed_c10d.Work.unbox(work).get_future().add_done_callback(callback)


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


def frame_of_thread(identity: int) -> FrameType | None:
    """Return where a thread of this process is. ``threading`` does not say."""
    return sys._current_frames().get(identity)


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
