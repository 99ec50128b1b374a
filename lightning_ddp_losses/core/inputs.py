"""Validation of a call's inputs before the call fails on them, and nests of tensors, which inputs and batches consist of.

A nest is a dict, list, tuple, named tuple or dataclass. Its parts are identified by path.

The losses of pytorch-metric-learning (PML) that hold one weight per class share attribute names: ``num_classes`` and ``W``,
``fc`` or ``proxies``. Other losses are only checked for rows and NaN, because the same names may have another layout in them.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.errors import ConfigurationError, InputError

# dimension of a class weight that corresponds to the embedding
_WIDTH_DIM = {"W": 0, "fc": 0, "proxies": 1}
_WIDTH_FIX = "Set the loss's embedding_size to the encoder's output width."
_NAN_FIX = "Look for the first layer or sample that gives NaN; lower the learning rate or clip gradients."


# ---------------------------------------------------------------------- nests of tensors


def children_of(nest: Any) -> list[tuple[str, Any]] | None:
    """List the parts of a nest by key, or return None for a leaf, including a list of plain values (a column of strings)."""
    if isinstance(nest, Mapping):
        return [(f"[{key!r}]", nest[key]) for key in nest]
    if _is_named_tuple(nest):
        return [(f".{name}", child) for name, child in zip(nest._fields, nest, strict=True)]
    if isinstance(nest, tuple) or (isinstance(nest, list) and any(map(_is_nest_or_array, nest))):
        return [(f"[{index}]", child) for index, child in enumerate(nest)]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [(f".{field.name}", getattr(nest, field.name)) for field in dataclasses.fields(nest)]
    return None


def rebuild_nest(nest: Any, children: Sequence[Any]) -> Any:
    """Return a nest like ``nest`` with other children, in the order of ``children_of``."""
    if _is_named_tuple(nest):
        return type(nest)(*children)
    if isinstance(nest, (tuple, list)):
        return type(nest)(children)
    if isinstance(nest, Mapping) and not isinstance(nest, MutableMapping):
        return type(nest)(dict(zip(nest, children, strict=True)))  # type: ignore[call-arg]
    # a copy keeps the factory of a defaultdict, and attributes of a dataclass that are not fields
    rebuilt: Any = copy.copy(nest)
    if isinstance(nest, MutableMapping):
        rebuilt.update(zip(nest, children, strict=True))
        return rebuilt
    for field, child in zip(dataclasses.fields(nest), children, strict=True):
        object.__setattr__(rebuilt, field.name, child)  # also works for frozen dataclasses
    return rebuilt


def leaves(nest: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest, with their paths."""
    children = children_of(nest)
    if children is None:
        yield path, nest
        return
    for key, child in children:
        yield from leaves(child, f"{path}{key}")


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested tuples, lists and dicts, in order."""
    found, stack = list[Tensor](), [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            stack += item[::-1]
        elif isinstance(item, dict):
            stack += reversed(item.values())
    return found


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Rebuild a nest of tuples, lists and dicts with each tensor replaced by the result of ``function``."""
    if isinstance(tree, Tensor):
        return function(tree)
    # a subclass of these may hold more than its items, such as a miner's tuples
    if type(tree) not in (tuple, list, dict) and not _is_named_tuple(tree):
        return tree
    items = tree.values() if isinstance(tree, dict) else tree
    return rebuild_nest(tree, [map_tensors(function, item) for item in items])


def is_array(leaf: Any) -> bool:
    """Return whether this is a tensor or a numpy array, without importing numpy."""
    kinds = type(leaf).__mro__
    return isinstance(leaf, Tensor) or any(kind.__module__ == "numpy" and kind.__name__ == "ndarray" for kind in kinds)


def _is_named_tuple(nest: Any) -> bool:
    return isinstance(nest, tuple) and hasattr(nest, "_fields")


def _is_nest_or_array(part: Any) -> bool:
    return is_array(part) or children_of(part) is not None


# ---------------------------------------------------------------------- captured calls


def is_capturing() -> bool:
    """Return whether the kernels of this thread are captured instead of run."""
    # the second call raises an error if torch is built without CUDA
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse_capture(title: str) -> None:
    """Reject a call inside a capture.

    Args:
        title: Name of the called function in the message.

    Raises:
        ConfigurationError: inside ``torch.cuda.graph`` and functions that use it.
    """
    if is_capturing():
        raise capture_error(title)


def capture_error(title: str) -> ConfigurationError:
    """Return the error of a call inside a capture."""
    return ConfigurationError(
        f"{title}: captured graph",
        expected="a call that runs each time, since ranks exchange messages on the host",
        got='a call inside torch.cuda.graph, torch.cuda.make_graphed_callables or torch.compile(mode="reduce-overhead")',
        fix="Capture the encoder alone and call this outside of it, or compile with mode='default'.",
    )


# ---------------------------------------------------------------------- values of inputs


class ValueReading:
    """Decides when the values of a loss's inputs are inspected, which waits for the device.

    On the CPU they are inspected in every call, elsewhere in the first one. In later calls on a device, labels are clamped to their
    range, because an index out of range would kill the process. Their extremes, and whether embeddings contain NaN, are read one call
    later.
    """

    def __init__(self) -> None:
        self._number = 0
        # copies that were not inspected yet, each with the function that rejects bad ones
        self._late: list[tuple[HostCopy, Callable[[Tensor], None]]] = []

    def next_call(self, given: Iterable[Tensor]) -> bool:
        """Count a call with these tensors, and return whether its values are inspected."""
        self._number += 1
        return self._number == 1 or on_host(given)

    def clamp_labels(self, title: str, labels: Tensor, num_classes: int) -> Tensor:
        """Return labels clamped to 0 ... C - 1. ``raise_late`` checks the original labels."""
        if not labels.numel():
            return labels
        extremes = labels.new_empty(2)
        torch.aminmax(labels.detach(), out=(extremes[0], extremes[1]))
        judge = partial(_refuse_out_of_range, f"{title}: labels of call {self._number}", num_classes)
        self._late.append((HostCopy(extremes), judge))
        return labels.clamp(0, num_classes - 1)

    def note_nan(self, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Search the embeddings of a call, which are on an accelerator, for NaN. ``raise_late`` reads the result."""
        embeddings = given_argument(args, kwargs, 0, "embeddings")
        if is_floating(embeddings) and embeddings.numel():
            judge = partial(_refuse_late_nan, f"{title}: embeddings of call {self._number}")
            self._late.append((HostCopy(embeddings.detach().isnan().any()), judge))

    def raise_late(self) -> None:
        """Reject the embeddings of the previous call if they contained NaN, and its labels if they had to be clamped.

        Raises:
            InputError: naming that call.
        """
        if not self._late:
            return
        late = self._late
        self._late = []
        for values, judge in late:
            judge(values.read())

    def __getstate__(self) -> dict[str, Any]:
        # copies in transit from a device cannot be pickled
        return {**vars(self), "_late": []}


def _refuse_late_nan(what: str, found: Tensor) -> None:
    if bool(found):
        _refuse(what, "numbers", "NaN", _NAN_FIX)


def readings_in(module: nn.Module) -> list[ValueReading]:
    """Return the readings that losses inside a module store as ``value_reading``."""
    found = [vars(inner).get("value_reading") for inner in module.modules()]
    return [reading for reading in found if isinstance(reading, ValueReading)]


def on_host(given: Iterable[Tensor]) -> bool:
    """Return whether all of these tensors are on the CPU."""
    return all(tensor.is_cpu for tensor in given)


def check_devices(
    title: str,
    given: Mapping[str, Any],
    parameters: Iterable[Tensor],
    *,
    buffers: Iterable[Tensor] = (),
    states: Mapping[str, Tensor] | None = None,
) -> None:
    """Reject tensors of a call that are on several devices, or on a different device than the loss or metric.

    Args:
        title: Name of the loss or metric in messages.
        given: Arguments of the call, by name. Numbers, and tensors of one number, may be on any device.
        parameters: Parameters of the loss or metric.
        buffers: Buffers that must also be on the device of the rows. pytorch-metric-learning moves its own buffers.
        states: Accumulated states of a metric, by name.

    Raises:
        InputError: naming both devices.
    """
    rows = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.ndim}
    if not rows:
        return
    devices = {name: value.device for name, value in rows.items()}
    device = next(iter(devices.values()))
    if any(other != device for other in devices.values()):
        shown = ", ".join(f"{name} on {other}" for name, other in devices.items())
        fix = "Move them to the device of the encoder's output: `tensor.to(embeddings.device)`."
        _refuse(f"{title}: devices", "all tensors of a call on one device", shown, fix)
    owner, moved = (
        ("loss", "before the optimizer is made; as part of") if states is None else ("metric", "as an attribute of")
    )
    held = [("parameter", parameter) for parameter in parameters]
    held += [("buffer", buffer) for buffer in buffers]
    held += [(f"state `{name}`", state) for name, state in (states or {}).items()]
    for kind, tensor in held:
        if tensor.device != device:
            shown = f"{next(iter(devices))} on {device}, its {kind} {tuple(tensor.shape)} on {tensor.device}"
            fix = f"Move the {owner}: `{owner}.to({str(device)!r})`, {moved} the LightningModule it moves along."
            _refuse(f"{title}: devices", f"the {owner} on the device of its rows", shown, fix)


def is_floating(value: object) -> bool:
    """Return whether a value is a tensor of a floating-point dtype."""
    return isinstance(value, Tensor) and value.is_floating_point()


def num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of rows of the first tensor argument, or 0 without one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.shape[0] if value.ndim else 1
    return 0


def check_inputs(
    loss: nn.Module,
    title: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    read_values: bool,
    refuse_nan: bool,
    allow_empty: bool,
) -> None:
    """Reject inputs that the loss does not support.

    Args:
        loss: The loss module.
        title: Name in messages, class and path.
        args: Positional arguments of the call: embeddings (n, D), labels (n,), ...
        kwargs: Keyword arguments of the call.
        read_values: Whether to also check the range of the labels, which waits for the device.
        refuse_nan: Whether to also reject NaN in the embeddings, which waits for the device.
        allow_empty: Whether a rank without rows takes part (in a loss over all ranks).

    Raises:
        InputError: naming the input, the expected value, and the fix.
    """
    embeddings = given_argument(args, kwargs, 0, "embeddings")
    if not isinstance(embeddings, Tensor):
        return
    # 1. rows
    is_empty = embeddings.ndim and embeddings.shape[0] == 0 and not allow_empty
    if is_empty and getattr(loss, "reduction", "mean") == "mean":
        fix = "Give every rank at least one sample (drop_last=True); the mean over no rows is not a number."
        _refuse(f"{title}: rows", "at least one", "an empty batch", fix)
    # 2. NaN
    if refuse_nan and embeddings.is_floating_point() and _has_nan(embeddings):
        rows = embeddings.shape[0] if embeddings.ndim else 1
        bad = torch.isnan(embeddings).reshape(rows, -1).any(1)
        got = f"NaN in {int(bad.sum())} of {bad.numel()} rows (first: row {int(bad.nonzero()[0])})"
        _refuse(f"{title}: embeddings", "numbers", got, _NAN_FIX)
    # 3. width, and labels, against a class weight of pytorch-metric-learning
    weight = _class_weight(loss)
    num_classes = _classes_of_pml(loss, weight)
    if weight is None or num_classes is None:
        return
    name, parameter = weight
    width = parameter.shape[_WIDTH_DIM[name]]
    if embeddings.ndim != 2 or embeddings.shape[1] != width:
        expected = f"shape (n, {width}), the width of its {name} {tuple(parameter.shape)}"
        _refuse(f"{title}: embeddings", expected, tuple(embeddings.shape), _WIDTH_FIX)
    labels = given_argument(args, kwargs, 1, "labels")
    if isinstance(labels, Tensor):
        check_labels(title, labels, embeddings.shape[0], num_classes, read_values=read_values)


def clamp_labels(
    loss: nn.Module, title: str, args: tuple[Any, ...], kwargs: dict[str, Any], reading: ValueReading
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with its labels clamped to the loss's classes. The original labels are checked in the next call.

    Args:
        loss: The loss module.
        title: Name in messages.
        args: Positional arguments of the call, after ``check_inputs``.
        kwargs: Keyword arguments.
        reading: State of this loss.
    """
    classes = classes_of(loss)
    labels = given_argument(args, kwargs, 1, "labels")
    if classes is None or not isinstance(labels, Tensor):
        return args, kwargs
    clamped = reading.clamp_labels(title, labels, classes)
    if len(args) > 1:
        return (args[0], clamped, *args[2:]), kwargs
    return args, {**kwargs, "labels": clamped}


def classes_of(loss: nn.Module) -> int | None:
    """Return the number of classes that labels are checked against, or None if the loss does not have a weight per class."""
    return _classes_of_pml(loss, _class_weight(loss))


def _classes_of_pml(loss: nn.Module, weight: tuple[str, Tensor] | None) -> int | None:
    """Return C of a loss of pytorch-metric-learning that holds a weight per class (``_class_weight``), or None for another loss."""
    if weight is None or not isinstance(getattr(loss, "num_classes", None), int):
        return None
    name, parameter = weight
    # some of PML's losses leave the attribute at 0
    return int(loss.num_classes) or parameter.shape[1 - _WIDTH_DIM[name]]  # type: ignore[arg-type]


def given_argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """Return an argument of a call, passed by position or by name, or None if it was not passed."""
    return args[position] if len(args) > position else kwargs.get(name)


def check_embeddings(title: str, embeddings: Tensor, width: int) -> None:
    """Reject embeddings that are not (n, width) of a floating-point dtype.

    Raises:
        InputError: naming the input, the expected value, and the fix.
    """
    if not isinstance(embeddings, Tensor) or embeddings.ndim != 2 or embeddings.shape[1] != width:
        got = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        _refuse(f"{title}: embeddings", f"shape (n, {width})", got, _WIDTH_FIX)
    if not embeddings.is_floating_point():
        _refuse(f"{title}: embeddings", "a floating dtype", embeddings.dtype, "Pass the encoder's output.")


def _has_nan(values: Tensor) -> bool:
    # if the sum is not NaN, the values do not contain NaN. This costs a tenth
    return math.isnan(values.detach().sum().item()) and bool(values.isnan().any())


def check_labels(title: str, labels: object, rows: int, num_classes: int, *, read_values: bool) -> None:
    """Reject labels that are not one integer class per row.

    Args:
        title: Name of the loss in messages.
        labels: (rows,) integers from 0 to ``num_classes - 1`` expected.
        rows: Number of embeddings.
        num_classes: C.
        read_values: Whether to also check their range, which waits for the device.

    Raises:
        InputError: naming the input, the expected value, and the fix.
    """
    if not isinstance(labels, Tensor):
        _refuse(f"{title}: labels", "a tensor", type(labels).__name__, "Pass class indices, one per row.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        expected, fix = "an integer dtype (torch.int64)", "Pass class indices: labels.long()."
        _refuse(f"{title}: labels", expected, labels.dtype, fix)
    if labels.ndim != 1 or labels.shape[0] != rows:
        expected, fix = f"shape ({rows},), one per embedding", "Pass one label per row."
        _refuse(f"{title}: labels", expected, tuple(labels.shape), fix)
    if read_values and labels.numel():
        _refuse_out_of_range(f"{title}: labels", num_classes, torch.stack(torch.aminmax(labels)))


def _class_weight(loss: nn.Module) -> tuple[str, Tensor] | None:
    if not any(cls.__module__.startswith("pytorch_metric_learning.") for cls in type(loss).__mro__):
        return None
    for name in _WIDTH_DIM:
        parameter = getattr(loss, name, None)
        if isinstance(parameter, Tensor) and parameter.ndim == 2:
            return name, parameter
    return None


def _refuse_out_of_range(what: str, num_classes: int, extremes: Tensor) -> None:
    """Reject labels by their smallest and largest value, unless both are in 0 ... C - 1."""
    low, high = extremes.tolist()
    if low < 0 or high >= num_classes:
        expected = f"0 to {num_classes - 1} (num_classes={num_classes})"
        _refuse(what, expected, f"{low} to {high}", "Map labels to 0 ... num_classes - 1, or raise num_classes.")


def _refuse(what: str, expected: object, got: object, fix: str) -> NoReturn:
    raise InputError(what, expected=expected, got=got, fix=fix)
