"""The autograd graph of a loss: walks over it, the parameters that it does not reach, and a run of a loss that reaches every parameter.

A zero loss often omits the weight from the graph on one rank only (pytorch-metric-learning 2.9 returns ``sum(embeddings * 0)``). In that
case the ranks' gradients cannot be averaged, and under DDP the other ranks hang. Therefore parameters on which the result does not depend
are attached to it with a zero gradient.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_ddp_losses.core import inputs, precision, torch_compat
from lightning_ddp_losses.core.modules import eager_recursive

_inside_global_batch: ContextVar[bool] = ContextVar("inside_global_batch", default=False)


@contextlib.contextmanager
def inside_global_batch() -> Iterator[None]:
    """Mark a block that computes the same on every rank from the rows of all ranks: its batch statistics are already global."""
    before = _inside_global_batch.set(True)
    try:
        yield
    finally:
        _inside_global_batch.reset(before)


def is_inside_global_batch() -> bool:
    """Return whether the caller runs inside ``inside_global_batch``."""
    return _inside_global_batch.get()


@contextlib.contextmanager
def own_graph() -> Iterator[None]:
    """Record a graph that the calling function differentiates itself, without the caller's hooks on saved tensors.

    Inside an activation checkpoint these hooks would rerun the whole checkpointed function, including its handshakes, only on the ranks
    that have a tile.
    """
    with torch.enable_grad():
        if not torch_compat.are_saved_tensors_hooked():
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def walk_graph(
    roots: Iterable[Tensor],
    *,
    until: Iterable[Tensor] = (),
    through: Callable[[Any], bool] | None = None,
    nodes: Iterable[Any] = (),
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Visit the nodes of the autograd graph below some tensors, each once, breadth first.

    A parameter's own node does not have children and holds the parameter as ``variable``. Querying the other nodes for a variable would
    cost more than the walk itself.

    Args:
        roots: Tensors at which the walk starts. Those without a graph are skipped.
        until: Tensors at which the walk ends. Their nodes are not visited.
        through: Returns whether to continue below a node. If None, the walk continues below all nodes.
        nodes: Further nodes at which the walk starts.

    Returns:
        Pairs of a node and its ``next_functions``.
    """
    seen = {tensor.grad_fn for tensor in until}
    seen.add(None)
    queue = []
    for root in (*(tensor.grad_fn for tensor in roots), *nodes):
        if root not in seen:
            seen.add(root)
            queue.append(root)
    for node in queue:
        children = node.next_functions
        yield node, children
        if through is not None and not through(node):
            continue
        for child, _ in children:
            if child not in seen:
                seen.add(child)
                queue.append(child)


def depends_on(output: Tensor, tensor: Tensor) -> bool:
    """Return whether backward from an output reaches a tensor that requires a gradient. The walk ends as soon as it is found."""
    own = tensor.grad_fn
    if own is not None:
        return any(node is own for node, _ in walk_graph([output]))
    # the only node of a leaf is the one that adds to its gradient
    ends = (node for node, children in walk_graph([output]) if not children)
    return any(getattr(node, "variable", None) is tensor for node in ends)


def accumulation_node(parameter: Tensor) -> Any:
    """Return the node that adds to a trainable parameter's gradient, to which DDP attaches its hook.

    torch creates a new node when the parameter's data change their dtype or device, even if they change back (torch 2.13, measured
    2026). The hook remains on the old node, which backward no longer reaches. Hold the node to be able to recognise it later.
    """
    return torch.autograd.graph.get_gradient_edge(parameter).node


class WrappedParameter(NamedTuple):
    """A parameter's state when DDP was constructed.

    Attributes:
        parameter: The parameter.
        dtype: Its dtype.
        device: Its device.
        trains: Its ``requires_grad``.
        node: Graph node with DDP's hook, or None without a hook.
    """

    parameter: Tensor
    dtype: torch.dtype
    device: torch.device
    trains: bool
    node: Any

    @classmethod
    def of(cls, parameter: Tensor, *, is_hooked: bool) -> WrappedParameter:
        """Record a parameter. With ``is_hooked``, DDP has attached a hook to it if it is trainable."""
        node = accumulation_node(parameter) if is_hooked and parameter.requires_grad else None
        return cls(parameter, parameter.dtype, parameter.device, parameter.requires_grad, node)


FAULTS_AFTER_WRAP = {"created": "F05", "replaced": "F06", "changed": "F07", "unfrozen": "F08"}
"""Faults that prevent DDP from reducing a gradient, by the first word of the event that leads to them."""


def event_after_wrap(wrapped: WrappedParameter | None, now: Tensor) -> str:
    """Return the first event of a parameter since DDP was constructed, or an empty text.

    Args:
        wrapped: Parameter of this name at that time, or None if it did not exist.
        now: Current parameter of this name.
    """
    if wrapped is None:
        return "created after the wrap"
    if now is not wrapped.parameter:
        return "replaced after the wrap"
    if now.dtype != wrapped.dtype:
        return f"changed from {wrapped.dtype} to {now.dtype}"
    # the node is the only trace of a cast there and back, after which gradients bypass DDP's hook
    has_lost_hook = wrapped.node is not None and now.requires_grad and accumulation_node(now) is not wrapped.node
    if has_lost_hook or now.device != wrapped.device:
        return "changed its dtype or device and back after the wrap"
    if now.requires_grad == wrapped.trains:
        return ""
    return "unfrozen after the wrap" if now.requires_grad else "frozen after the wrap"


_TOP = 64  # number of nodes by which a graph is recognised


class UnusedParameterFinder:
    """Finds, before backward, parameters that a loss will not reach in backward.

    The whole graph is walked only if the part next to the loss is new, because this is where losses and heads branch.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], frozenset[int]] = {}

    def find(self, loss: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the parameters that backward from ``loss`` will not reach."""
        if loss.grad_fn is None:
            return list(parameters)
        top = [type(node).__name__ for node, _ in itertools.islice(walk_graph([loss]), _TOP)]
        key = (*top, len(parameters))
        if key in self._known and self._known[key].issuperset(map(id, parameters.values())):
            return []
        # a new graph, or a known beginning with a different continuation
        reached = self._known[key] = frozenset(
            id(node.variable) for node, children in walk_graph([loss]) if not children and hasattr(node, "variable")
        )
        return [name for name, p in parameters.items() if id(p) not in reached]


def parameters_without_gradient(model: object) -> list[str]:
    """Return the parameters whose gradients DDP waits for in each backward and which the last one did not reach, by name.

    The result is empty for a model without DDP, and if there are no gradients, because they have been reset.
    """
    if not isinstance(model, DistributedDataParallel) or model.find_unused_parameters or model.static_graph:
        return []
    named = model.module.named_parameters()
    awaited = {name: p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore}
    absent = [name for name, parameter in awaited.items() if parameter.grad is None]
    return absent if len(absent) < len(awaited) else []


@dataclass(frozen=True)
class FullPrecisionPlan:
    """How a loss computes in ``promote(float32, parameters, inputs)``, as determined by dtypes, devices and autocast, but not by values.

    Attributes:
        dtype: Dtype of the computation.
        device_types: Types of the devices of its inputs.
        is_full: Whether a call already computes in ``dtype``. In this usual case the overhead of context managers is avoided.
    """

    dtype: torch.dtype
    device_types: frozenset[str]
    is_full: bool

    @classmethod
    def of(
        cls, modules: Sequence[nn.Module], parameters: Sequence[Tensor], given: Sequence[Tensor]
    ) -> FullPrecisionPlan:
        """Plan calls of a loss.

        Args:
            modules: All modules of the loss.
            parameters: Their parameters.
            given: Tensors among the arguments.
        """
        tensors = [*parameters, *given]
        dtype = precision.compute_dtype(tensors)
        device_types = frozenset(tensor.device.type for tensor in given)
        is_full = (
            not torch_compat.is_any_autocast_on()
            and precision.is_full(dtype, (), tensors)
            and not precision.narrow_buffers(modules, dtype)
        )
        return cls(dtype, device_types, is_full)

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Sequence[Tensor],
        given: Sequence[Tensor],
    ) -> Any:
        """Return the result of ``forward``, with every trainable parameter in its graph.

        Args:
            module: The loss. Its parameters and buffers keep their dtype.
            forward: Function to call.
            args: Positional arguments. Floating-point tensors among them are cast.
            kwargs: Keyword arguments.
            parameters: Parameters of the loss.
            given: Tensors among the arguments.
        """
        if self.is_full:
            result = forward(*args, **kwargs)
        else:
            args, kwargs = precision.cast_floating((args, kwargs), self.dtype)
            with precision.full_precision(self.dtype, self.device_types), precision.cast_module(module, self.dtype):
                result = forward(*args, **kwargs)
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if trainable and torch.is_grad_enabled():
            result = attach_zero_grad(result, trainable, given)
        return result


def run_full_precision(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    tensors: precision.CallTensors | None = None,
) -> Any:
    """Call ``forward`` in ``promote(float32, parameters, inputs)`` with autocast off.

    Args:
        module: The loss. Its parameters and buffers keep their dtype.
        forward: Function to call.
        args: Positional arguments. Floating-point tensors among them are cast.
        kwargs: Keyword arguments.
        tensors: Tensors of this call. If None, they are searched for.
    """
    if tensors is None:
        tensors = precision.CallTensors.of(module, args, kwargs)
    plan = FullPrecisionPlan.of(tensors.modules, tensors.parameters, tensors.given)
    return plan.run(module, forward, args, kwargs, tensors.parameters, tensors.given)


def match_requires_grad(tensor: Tensor, wanted: bool) -> Tensor:
    """Return the tensor with ``requires_grad`` if another rank needs its gradient, because its backward communicates."""
    if wanted and not tensor.requires_grad and torch.is_grad_enabled():
        return tensor.detach().requires_grad_()
    return tensor


def attach_zero_grad(result: Any, parameters: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    """Return the result with every parameter in its graph.

    Args:
        result: Result of the loss: a tensor, or a nest of tensors.
        parameters: The loss's trainable parameters.
        given: The loss's inputs, at which the search for parameters ends.
    """
    outputs = [tensor for tensor in inputs.tensors_in(result) if tensor.is_floating_point()]
    missing = _not_reached(outputs, given, parameters) if parameters and outputs else []
    if not missing:
        return result
    if isinstance(result, Tensor):
        return _AttachZeroGrad.apply(result, *missing)  # type: ignore[no-untyped-call]
    return inputs.map_tensors(lambda item: attach_zero_grad(item, parameters, given), result)


_last_paths = WeakTensorKeyDictionary()
"""Path at which a parameter was found last: the index of the output, then the child index at each node. Weakly keyed by parameter."""


@eager_recursive  # otherwise it would be recompiled whenever a path changes
def _not_reached(outputs: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters that the outputs do not depend on, searching no further than the inputs."""
    # a walk over all nodes takes three times as long as following the known path to a parameter
    missing = {id(p): p for p in parameters if not _is_at_last_place(p, outputs)}
    if not missing:
        return []
    came_from: dict[Any, tuple[Any, int]] = {output.grad_fn: (None, i) for i, output in enumerate(outputs)}
    for node, children in walk_graph(outputs, until=given):
        for place, (child, _) in enumerate(children):
            came_from.setdefault(child, (node, place))
        if not children and missing.pop(id(parameter := getattr(node, "variable", None)), None) is not None:
            _last_paths[parameter] = path = list[int]()
            above = node
            while above is not None:
                above, place = came_from[above]
                path.insert(0, place)
            if not missing:
                break
    return list(missing.values())


def _is_at_last_place(parameter: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Return whether the parameter is still at the last known path below the outputs, which proves that they depend on it."""
    try:
        first, *places = _last_paths[parameter]
        node: Any = outputs[first].grad_fn
        for place in places:
            node = node.next_functions[place][0]
        return node.variable is parameter
    except (KeyError, IndexError, AttributeError):  # a different graph
        return False


def attaches_zero_grad(node: Any) -> bool:
    """Return whether a graph node was created by ``attach_zero_grad``: all its children except the first receive a zero gradient."""
    return bool(node.name() == f"{_AttachZeroGrad.__name__}Backward")


class _AttachZeroGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
