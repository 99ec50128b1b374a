"""A pretended accelerator: a device of its own with real values on a machine that has none, which counts what a GPU would pay for.

Its tensors hold host tensors and compute with torch's CPU kernels, so every number is that of the CPU. What differs is what differs on a
GPU: a tensor of the CPU beside one of the device is refused (a number as a tensor of no dimension is not, where CUDA takes it), ``numpy``
is refused, and these are counted:

| count | what |
|---|---|
| launches | operators that a GPU would run as one kernel or more; views and empty memory are free |
| own waits | those that a line of ours asked for, not one of a library that it calls |
| waits | the host needs a value now: ``item``, ``tolist``, ``bool``, ``nonzero``, a boolean index, a blocking copy to the host |
| uploads | values that travel from the host to the device |
| products | products of matrices, among the launches; of bf16 into float32 too, as CUDA has them |
| passes, bytes | the other launches on tensors of at least ``counting(large=...)`` entries, and the bytes that they read and write |

``peak_bytes`` is the most memory that its tensors have held since ``counting`` began.

A copy to the host with ``non_blocking=True`` is no wait, and its memory holds rubbish until an event that was recorded behind it is
waited for. ``catch_up`` is the moment in which the device has done all that was asked of it (between two steps); an event that is waited
for before that is a wait.

``install`` changes ``torch.tensor`` and others for the whole process and cannot be undone: use a process of its own.

An error in a hook of a tensor ends the process in backward ("terminate called without an active exception"): as it leaves the node, torch's
guard for devices that are written in Python (``torch::acc::PythonDeviceGuard::exchangeStream``, torch 2.13) calls Python, which it must not
with an error on its way. That needs no line of ours, and CUDA's guard is none of those. Errors anywhere else arrive.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree, backend_registration

# The private names of torch that this file needs, all of them here; read in this release, and used in no other.
RELEASE = "2.13"
_setup_backend = backend_registration._setup_privateuseone_for_python_backend
_make_wrapper = torch.Tensor._make_wrapper_subclass
_tree_map = _pytree.tree_map

DEVICE = "pretend"
_COPIES = ("copy_", "_to_copy")
_FREE = (
    *("view", "_unsafe_view", "as_strided", "detach", "expand", "permute", "transpose", "t.", "slice."),
    *("select.", "squeeze", "unsqueeze", "split", "alias", "unbind", "unfold", "diagonal.", "lift_fresh"),
    *("empty", "new_empty", "_reshape_alias", "real", "imag", "resize_", "is_same_size", "set_"),
)
_WAITS = (
    *("_local_scalar_dense", "nonzero", "_unique", "unique_", "masked_select", "equal.", "is_nonzero"),
    *("bincount", "isin.", "repeat_interleave.Tensor", "_linalg_check_errors"),
)
# beside tensors of the device these take no tensor of the CPU, not even a number
_ONE_DEVICE = (
    *("cat", "stack", "mm", "addmm", "bmm", "index_add", "index_fill_.int_Tensor", "index_copy", "gather"),
    "scatter",
)


class Counts(Counter[str]):
    """What a piece of code cost: ``launches``, ``waits``, ``own_waits`` and ``uploads``, and which operators waited."""

    launches = property(lambda self: self["launches"])
    uploads = property(lambda self: self["uploads"])
    own_waits = property(lambda self: self["own waits"])
    waits = property(lambda self: sum(number for name, number in self.items() if name.startswith("wait ")))


def _count_wait(what: str) -> None:
    """Counts a wait, and whether a line of ours asked for it: not one of a library that our code calls, nor of its backward."""
    _counts[f"wait {what}"] += 1
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        if frame.f_code.co_name == "__torch_dispatch__":  # a mode that looks on asks for nothing
            frame = frame.f_back
            continue
        if name in _OTHERS:
            return
        if name == "lightning_ddp_losses":
            _counts["own waits"] += 1
            return
        frame = frame.f_back


# whose formulas, loggers and loops wait by themselves
_OTHERS = ("pytorch_metric_learning", "torchmetrics", "lightning")
_counts = Counts()
_large = [0]
_storages: dict[int, list[int]] = {}  # by address: tensors that share it, and its bytes
_memory = {"live": 0, "peak": 0}
_on_their_way: list[tuple[Tensor, Tensor]] = []  # host memory, and what will be in it


@contextlib.contextmanager
def counting(large: int = 1) -> Iterator[Counts]:
    """Counts what the block costs; passes and bytes of tensors of at least so many entries."""
    before, found = Counts(_counts), Counts()
    _large[0], _memory["peak"] = large, _memory["live"]
    yield found
    found.update(_counts - before)


def peak_bytes() -> int:
    """Returns the most memory that tensors of the device have held since ``counting`` began."""
    return _memory["peak"]


def live_bytes() -> int:
    """Returns the memory that tensors of the device hold, without those that only cycles keep."""
    gc.collect()
    return _memory["live"]


def _hold(tensor: PretendTensor) -> None:
    """Counts the memory of a tensor until it is gone."""
    storage = tensor._host.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if not size:
        return
    held = _storages.setdefault(address, [0, size])
    held[0] += 1
    if held[0] == 1:
        _memory["live"] += size
        _memory["peak"] = max(_memory["peak"], _memory["live"])
    weakref.finalize(tensor, _release, address)


def _release(address: int) -> None:
    held = _storages[address]
    held[0] -= 1
    if not held[0]:
        _memory["live"] -= held[1]
        del _storages[address]


def catch_up() -> None:
    """Lets the device finish all that was asked of it: whoever then waits for an event waits no time."""
    _Event.settle_all()


class PretendTensor(torch.Tensor):
    """A tensor of the device: size, dtype and graph are its own, the values those of a host tensor."""

    _host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> PretendTensor:
        made = _make_wrapper(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(DEVICE, 0),
        )
        made._host = host
        _hold(made)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        same = isinstance(value, PretendTensor) and value.dtype == self.dtype and value.shape == self.shape
        assert same, "the pretended device cannot change the dtype, shape or device of a tensor"
        self._host = value._host  # type: ignore[attr-defined]

    def __getitem__(self, index: Any) -> Any:
        # a list in an index becomes a tensor without the dispatcher
        return super().__getitem__(_uploaded_lists(index))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._host.untyped_storage()

    def set_(self, storage: Any, *place: Any) -> Tensor:  # type: ignore[override]
        # the size of a wrapper is fixed: another one takes its place
        return PretendTensor(self._host.set_(storage, *place))

    def tolist(self) -> Any:
        _count_wait("tolist")
        return self._host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of the pretended device to numpy; copy it to the host first")

    __array__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # in a file it is the host's, where checkpoints are loaded to
        return self._host.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = to_device(self._host.clone()).requires_grad_(self.requires_grad)
        memo[id(self)] = copied = torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied
        return copied


def _uploaded_lists(index: Any) -> Any:
    """Makes tensors of the device of the lists of numbers in an index."""
    if isinstance(index, list) and not any(isinstance(part, (Tensor, list, slice)) for part in index):
        return torch.tensor(index, device=DEVICE)
    if isinstance(index, (tuple, list)):  # a list of indices is one for each dimension
        return tuple(_uploaded_lists(part) for part in index)
    return index


def to_device(tensor: Tensor) -> Tensor:
    """Copies a host tensor to the device, uncounted, without its graph."""
    return PretendTensor(tensor.detach().clone())


def to_host(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor of either, uncounted, without its graph."""
    return tensor._host.detach() if isinstance(tensor, PretendTensor) else tensor.detach()


# ---------------------------------------------------------------------- one operator


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an operator on the host and counts what it would cost."""
    func = _MATERIALISED.get(func, func)
    name: str = str(func).removeprefix("aten.")
    inputs = [value for value in _pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    on_device = [value for value in inputs if isinstance(value, PretendTensor)]
    to = kwargs.get("device")
    leaves = bool(on_device) and to is not None and torch.device(to).type == "cpu"
    _refuse_mixture(name, args, inputs, on_device)
    _refuse_what_cuda_asserts(name, args)
    # on the host, with the same arguments
    if to is not None:
        kwargs = {**kwargs, "device": "cpu"}
    host_args, host_kwargs = _tree_map(_unwrapped, (args, kwargs))
    result = (_bf16_product if ".dtype" in name and "mm." in name else func)(*host_args, **host_kwargs)
    # what it costs
    if name.startswith("copy_"):
        return _copied(args, kwargs, on_device)
    if leaves and name.startswith("_to_copy"):
        return _sent_to_host(result, non_blocking=kwargs.get("non_blocking", False))
    if (name.startswith(_WAITS) and not _knows_its_size(name, kwargs)) or _has_mask(name, args):
        _count_wait(name)
    if not name.startswith(_FREE):
        _counts["launches"] += 1
        _count_pass(name, _read_by(name, args, kwargs), result)
    if name.startswith(("_local_scalar_dense", "equal.", "is_nonzero", "is_same_size")):
        return result
    # what is written into keeps its tensor
    if func._schema.name.endswith("_") and args and isinstance(args[0], Tensor):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return _tree_map(_wrapped, result)


def _bf16_product(*args: Any, out: Tensor | None = None, **factors: Any) -> Tensor:
    """Multiplies bf16 matrices into float32, as CUDA does and the CPU cannot."""
    *added, left, right, _ = args
    if added:
        return torch.addmm(*added, left.float(), right.float(), out=out, **factors)
    return torch.mm(left.float(), right.float(), out=out)


def _read_by(name: str, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that an operator reads: all that it is given but for memory that it only writes."""
    read = (args[1:] if name.startswith("copy_") else args, {**kwargs, "out": None})
    return [value for value in _pytree.tree_leaves(read) if isinstance(value, Tensor)]


def _count_pass(name: str, read: list[Tensor], result: Any) -> None:
    """Counts a product, or a pass over large tensors and its bytes."""
    if name.startswith(("mm.", "addmm", "bmm.")):
        _counts["products"] += 1
        return
    made = [value for value in _pytree.tree_leaves(result) if isinstance(value, Tensor)]
    if max((value.numel() for value in (*read, *made)), default=0) >= _large[0]:
        _counts["passes"] += 1
        _counts["bytes"] += sum(value.numel() * value.element_size() for value in (*read, *made))


# a view that is conjugated or negated only when it is read: down here nobody would read it so
_MATERIALISED = {
    torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def _unwrapped(value: Any) -> Any:
    return value._host if isinstance(value, PretendTensor) else value


def _wrapped(value: Any) -> Any:
    return PretendTensor(value) if isinstance(value, Tensor) and not isinstance(value, PretendTensor) else value


def _refuse_mixture(name: str, args: Any, inputs: list[Tensor], on_device: list[Tensor]) -> None:
    """Refuses a tensor of the CPU beside the device's, where CUDA does."""
    if not on_device or len(on_device) == len(inputs) or name.startswith(_COPIES):
        return
    for value in inputs:
        if isinstance(value, PretendTensor):
            continue
        # numbers are taken along, indices too; but nothing is written into, or read from, a tensor of the CPU
        is_number = value.ndim == 0 and not name.startswith(_ONE_DEVICE)
        is_index = name.startswith(("index.", "index_put", "_index_put")) and any(value is index for index in args[1])
        is_written = bool(args) and value is args[0] and name.split(".", maxsplit=1)[0].endswith("_")
        if is_written or not (is_number or is_index):
            where = f"{name} got one of the CPU, {tuple(value.shape)}, beside {on_device[0].device}"
            raise RuntimeError(f"Expected all tensors to be on the same device: {where}")
        if is_index:
            _counts["uploads"] += 1


def _refuse_what_cuda_asserts(name: str, args: Any) -> None:
    """Refuses arguments that CUDA's kernels assert where the CPU's do without."""
    if name.startswith("native_batch_norm_backward") and (args[5] is None or args[6] is None):
        raise RuntimeError("native_batch_norm_backward: save_mean and save_invstd should always be defined")


def _copied(args: Any, kwargs: Any, on_device: list[Tensor]) -> Tensor:
    """Counts a copy into memory that is there; the host has copied already."""
    target, source = args[0], args[1]
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if isinstance(target, PretendTensor):
        _counts["launches" if isinstance(source, PretendTensor) else "uploads"] += 1
        _count_pass("copy_", [source], target)
    elif on_device:
        _sent_to_host(target, non_blocking=non_blocking)
    return target  # type: ignore[no-any-return]


def _sent_to_host(values: Tensor, *, non_blocking: bool) -> Tensor:
    """Counts a copy to the host: a wait, or memory that fills later."""
    if not non_blocking:
        _count_wait("copy to the host")
        return values
    _counts["launches"] += 1
    _on_their_way.append((values, values.clone()))
    # what is read too early is plainly wrong
    rubbish = torch.nan if values.is_floating_point() else 77
    values.fill_(rubbish)
    return values


def _knows_its_size(name: str, kwargs: Any) -> bool:
    return name.startswith("repeat_interleave") and kwargs.get("output_size") is not None


def _has_mask(name: str, args: Any) -> bool:
    """Tells whether an index is a mask, whose size the host has to learn; one number in place of it needs no size."""
    if not name.startswith(("index.", "index_put", "_index_put", "_unsafe_index")):
        return False
    if not any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        return False
    fills = name.startswith("index_put") and args[2].numel() == 1 and len(args[1]) == 1
    return not fills


# ---------------------------------------------------------------------- what torch's C++ does without the dispatcher


class _Event:
    """``torch.Event`` of the device: done once the device has caught up."""

    _open: ClassVar[list[_Event]] = []

    def __init__(self) -> None:
        self._done, self._copies = True, list[tuple[Tensor, Tensor]]()

    def record(self, stream: Any = None) -> None:
        self._done, self._copies = False, _on_their_way.copy()
        _on_their_way.clear()
        _Event._open.append(self)

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'torch.Event' object")  # as that of CUDA

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        if not self._done:
            _count_wait("Event.synchronize")
            self._settle()

    def _settle(self) -> None:
        for memory, values in self._copies:
            memory.copy_(values)
        self._done, self._copies = True, []

    @classmethod
    def settle_all(cls) -> None:
        for event in cls._open:
            event._settle()
        cls._open.clear()


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE


def _uploaded(data: Any, make: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
    """Makes a tensor of numbers of the host."""
    _counts["uploads"] += 1
    requires_grad = options.pop("requires_grad", False)
    return PretendTensor(make(data, **{**options, "device": "cpu"})).requires_grad_(requires_grad)


def install() -> None:
    """Brings the device into this process, for good."""
    _setup_backend(DEVICE)
    _register_operators()
    tensor, as_tensor, new_tensor = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor

    def pretend_tensor(data: Any, **options: Any) -> Tensor:
        if isinstance(data, PretendTensor) and not _is_ours(options.get("device", DEVICE)):
            return tensor(data.cpu(), **options)
        return _uploaded(data, tensor, options) if _is_ours(options.get("device")) else tensor(data, **options)

    def pretend_as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor):
            return data.to(dtype=dtype, device=device)
        if _is_ours(device):
            return _uploaded(data, as_tensor, {"dtype": dtype})
        return as_tensor(data, dtype=dtype, device=device)

    def pretend_new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        if not _is_ours(options.get("device", self.device)):
            return new_tensor(self, data, **options)
        return _uploaded(data, tensor, {"dtype": self.dtype, **options})

    class Event(torch.Event):  # a class, since torch subclasses it
        def __new__(cls, device: Any = None, **options: Any) -> Any:
            return _Event() if _is_ours(device) else super().__new__(cls, device, **options)

    torch.tensor, torch.as_tensor = pretend_tensor, pretend_as_tensor  # type: ignore[assignment]
    torch.Tensor.new_tensor = pretend_new_tensor  # type: ignore[assignment, method-assign]
    torch.Event = Event  # type: ignore[assignment, misc]


_libraries: list[torch.library.Library] = []  # what is registered lives as long as these


def _register_operators() -> None:
    """Gives the device all operators that have no tensor among their arguments; the others come to the class."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda op, *args, **kwargs: _run(op, *args, **kwargs), "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    # these have kernels for several devices at once, which stand before a fallback
    for overload in ("default", "start", "start_step"):
        operator = getattr(torch.ops.aten.arange, overload)
        name = "arange" if overload == "default" else f"arange.{overload}"
        aten.impl(name, lambda *args, _op=operator, **kwargs: _run(_op, *args, **kwargs), "PrivateUse1")
    _libraries.extend((everything, aten))
