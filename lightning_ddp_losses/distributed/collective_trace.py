"""Trace the results of collectives without a gradient up to the loss, to find where the user's code cuts the graph between ranks.

``dist.all_gather`` is not differentiable. If it gathers rows that have a graph, and the loss uses the result, the ranks that sent the rows
do not receive their gradient. ``CollectiveTrace`` intercepts every operator of a forward. It marks the memory of tensors that have a
graph, and of tensors returned by a collective. An operator passes the marks of its inputs to its outputs, whether it records a graph or
not.

A stop-gradient is not a fault: ``keys.detach()`` may be gathered on purpose. ``CutCollective.is_meant`` distinguishes the two.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import inputs, torch_compat
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.user_line import package_of, shown_line

_OURS = __name__.partition(".")[0]
_PASS_ON = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "python",
)  # they call torch.distributed on behalf of other code
# gathers of these packages have a gradient, or are reported as faults of their own (F24, F27)
_KNOWN = (_OURS, "torchmetrics", "pytorch_metric_learning")


class _Mark(NamedTuple):
    """One origin of a tensor's values: rows that a collective returned, from this or other ranks, or a tensor with a graph."""

    collective: int
    is_own: bool = False


_GRAPH = _Mark(-1)
_Marks = frozenset[_Mark]


class CutCollective(NamedTuple):
    """A collective that received a tensor with a graph and returned one without.

    Attributes:
        kind: ``"gather"`` or ``"reduce"``.
        line: The user's source line: file, number, function and text.
        is_meant: True if it may be a stop-gradient: the input was detached, and this rank's own rows were not put back afterwards.
    """

    kind: str
    line: str
    is_meant: bool


class _Call(NamedTuple):
    kind: str
    line: str
    is_detached: bool
    outputs: list[Tensor]
    versions: list[int]  # to detect later writes into an output


class CollectiveTrace(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Trace one forward in this thread. ``reaching`` then lists the collectives that cut the loss's graph.

    Attributes:
        names: Names of all collectives so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._calls: list[_Call] = []
        # keyed by address: a weak reference prevents the address of freed memory from being reused
        self._marks: dict[int, tuple[Any, _Marks]] = {}

    def reaching(self, loss: Tensor) -> list[CutCollective]:
        """List the collectives that cut the graph between rows and loss, only the first one of each source line."""
        marks = self._marks_of(loss)
        found: dict[str, CutCollective] = {}
        for index, call in enumerate(self._calls):
            is_written = _versions(call.outputs) != call.versions
            got_graph = (
                call.kind == "gather" and not is_written and any(out.grad_fn is not None for out in call.outputs)
            )
            if _Mark(index) in marks and not got_graph:
                keeps_own = _Mark(index, is_own=True) in marks and not is_written
                found.setdefault(call.line, CutCollective(call.kind, call.line, call.is_detached and keeps_own))
        return [*found.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and pass marks to its outputs."""
        kwargs = kwargs or {}
        if torch_compat.reads_scalar(func) and not isinstance(args[0], Tensor):
            return args[0]  # torch passes a number saved by autograd to a mode as a plain number (torch 2.13)
        marks = _Marks().union(*map(self._marks_of, inputs.tensors_in((args, kwargs))))
        result = func(*args, **kwargs)
        name = torch_compat.operator_schema(func).name.rpartition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.names.append(name)
            self._see_collective(func.namespace, name, args, result)
        elif marks:
            self._add_marks(inputs.tensors_in(result), marks)
        return result

    def _see_collective(self, namespace: str, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record a collective of the user's code that receives a tensor with a graph, and mark its result."""
        # outputs are the result, or the first argument. Without a second argument the first one also contains the inputs
        first, second = inputs.tensors_in(args[:1]), inputs.tensors_in(args[1:2])
        sources, outputs = (first, inputs.tensors_in(result)) if namespace != "c10d" else (second or first, first)
        with_graph = [tensor for tensor in sources if tensor.is_floating_point() and _GRAPH in self._marks_of(tensor)]
        is_inference = any(tensor.is_inference() for tensor in outputs)  # these cannot be part of a graph
        line = _users_line() if with_graph and not is_inference and "broadcast" not in name else ""
        if not line:
            return

        kind = "reduce" if "reduce" in name else "gather"
        is_detached = all(tensor.grad_fn is None for tensor in with_graph)
        index = len(self._calls)
        self._calls.append(_Call(kind, line, is_detached, outputs, _versions(outputs)))
        # one output per rank, or one that contains the rows of all ranks
        own, others = _Mark(index, is_own=True), _Mark(index)
        if len(outputs) != process_groups.world_size():
            self._add_marks(outputs, _Marks([own, others]))
            return
        for rank, output in enumerate(outputs):
            self._add_marks([output], _Marks([own if rank == process_groups.rank() else others]))

    def _marks_of(self, tensor: Tensor) -> _Marks:
        memory = torch_compat.memory_reference(tensor)
        marks = _Marks() if memory is None else self._marks.get(memory.cdata, (None, _Marks()))[1]
        return marks | {_GRAPH} if tensor.grad_fn is not None else marks

    def _add_marks(self, tensors: Iterable[Tensor], marks: _Marks) -> None:
        for tensor in tensors:
            memory = torch_compat.memory_reference(tensor)
            if memory is not None:
                known, before = self._marks.get(memory.cdata, (memory, _Marks()))
                self._marks[memory.cdata] = known, before | marks


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [*map(torch_compat.tensor_version, tensors)]


# ---------------------------------------------------------------------- the user's source line


def _users_line() -> str:
    """Return the line of user code that called a collective. Empty if the call has a gradient, or belongs to a known package."""
    frames = [(frame, number) for frame, number in traceback.walk_stack(None) if frame.f_code.co_filename != __file__]
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    if any(frame.f_code is apply for frame, _ in frames) and not any(_drops_gradient(frame) for frame, _ in frames):
        return ""  # the forward of a function with a backward
    # from the collective outwards: the caller, and the first line outside of libraries
    found = ""
    for frame, number in frames:
        path = frame.f_code.co_filename
        package = package_of(path)
        if package in _PASS_ON:
            continue
        if package in _KNOWN and not found:
            return ""
        if not found or not package:
            found = shown_line(frame, number)
        if not package:
            break
    return found


def _drops_gradient(frame: FrameType) -> bool:
    """Return whether this is Lightning's gather without ``sync_grads``: it calls torch's differentiable gather under ``no_grad``."""
    return frame.f_code.co_name == "_all_gather_ddp_if_available" and not frame.f_locals["sync_grads"]
