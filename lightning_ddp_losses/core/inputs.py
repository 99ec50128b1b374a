"""What a loss is about to be fed, checked with words before the loss itself fails on an index.

The losses of pytorch-metric-learning (PML) that hold one weight per class share attribute names: ``num_classes`` and ``W``,
``fc`` or ``proxies``. Other losses are checked for rows and NaN only: the same names may mean another layout there.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.errors import InputError

# where a class weight keeps the embedding's dimension
_WIDTH_DIM = {"W": 0, "fc": 0, "proxies": 1}


class ValueReading:
    """Decides when the values of a loss's inputs are looked at, which waits for the device.

    On the CPU that is at every call, elsewhere at the first one.
    """

    def __init__(self) -> None:
        self._called = False

    def next_call(self, tree: Any) -> bool:
        """Note a call whose inputs are ``tree``, and say whether its values are looked at."""
        if self._called:
            return on_host(tree)
        self._called = True
        return True


def on_host(tree: Any) -> bool:
    """Say whether all tensors in a nest are on the CPU."""
    return all(tensor.device.type == "cpu" for tensor in precision.tensors_in(tree))


def num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the rows of the first tensor argument; 0 where there is none."""
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
    refuse_nan: bool = True,
    allow_empty: bool = False,
) -> None:
    """Refuse inputs that the loss cannot take.

    Args:
        loss: The loss module.
        title: How messages name it: class and path.
        args: Positional arguments of the call: embeddings (n, D), labels (n,), ...
        kwargs: Keyword arguments of the call.
        read_values: Also look at the range of the labels; waits for the device.
        refuse_nan: Also refuse NaN in the embeddings; waits for the device.
        allow_empty: A rank without rows takes part (in a loss over all ranks).

    Raises:
        InputError: with what, expected, got and what to do.
    """
    embeddings = _argument(args, kwargs, 0, "embeddings")
    if not isinstance(embeddings, Tensor):
        return
    # 1. rows
    is_empty = embeddings.ndim and embeddings.shape[0] == 0 and not allow_empty
    if is_empty and getattr(loss, "reduction", "mean") == "mean":
        _refuse(
            f"{title}: rows",
            "at least one",
            "an empty batch",
            "Give every rank at least one sample (drop_last=True); the mean over no rows is not a number.",
        )
    # 2. NaN
    if refuse_nan and embeddings.is_floating_point() and _has_nan(embeddings):
        rows = embeddings.shape[0] if embeddings.ndim else 1
        bad = torch.isnan(embeddings).reshape(rows, -1).any(1)
        _refuse(
            f"{title}: embeddings",
            "numbers",
            f"NaN in {int(bad.sum())} of {bad.numel()} rows (first: row {int(bad.nonzero()[0])})",
            "Look for the first layer or sample that gives NaN; lower the learning rate or clip gradients.",
        )
    # 3. width, and labels, against a class weight of pytorch-metric-learning
    weight = _class_weight(loss)
    from_pml = any(cls.__module__.startswith("pytorch_metric_learning.") for cls in type(loss).__mro__)
    if not from_pml or weight is None or not isinstance(getattr(loss, "num_classes", None), int):
        return
    name, parameter = weight
    # some of PML's losses leave the attribute at 0
    num_classes = int(loss.num_classes) or parameter.shape[1 - _WIDTH_DIM[name]]  # type: ignore[arg-type]
    width = parameter.shape[_WIDTH_DIM[name]]
    if embeddings.ndim != 2 or embeddings.shape[1] != width:
        _refuse(
            f"{title}: embeddings",
            f"shape (n, {width}), the width of its {name} {tuple(parameter.shape)}",
            f"{tuple(embeddings.shape)}",
            "Set the loss's embedding_size to the encoder's output width.",
        )
    labels = _argument(args, kwargs, 1, "labels")
    if isinstance(labels, Tensor):
        check_labels(title, labels, embeddings.shape[0], num_classes, read_values=read_values)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """Return an argument of a call, given by position or by name; None where it is not given."""
    return args[position] if len(args) > position else kwargs.get(name)


def check_embeddings(title: str, embeddings: Tensor, width: int) -> None:
    """Refuse what is not (n, width) of a floating dtype.

    Raises:
        InputError: with what, expected, got and what to do.
    """
    if not isinstance(embeddings, Tensor) or embeddings.ndim != 2 or embeddings.shape[1] != width:
        got = tuple(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
        fix = "Set the loss's embedding_size to the encoder's output width."
        _refuse(f"{title}: embeddings", f"shape (n, {width})", got, fix)
    if not embeddings.is_floating_point():
        _refuse(f"{title}: embeddings", "a floating dtype", embeddings.dtype, "Pass the encoder's output.")


def _has_nan(values: Tensor) -> bool:
    # a sum without NaN has no NaN in it, and costs a tenth
    return math.isnan(values.detach().sum().item()) and bool(values.isnan().any())


def check_labels(title: str, labels: object, rows: int, num_classes: int, *, read_values: bool) -> None:
    """Refuse labels that are not one integer class per row.

    Args:
        title: How messages name the loss.
        labels: (rows,) integers from 0 to ``num_classes - 1`` expected.
        rows: Number of embeddings.
        num_classes: C.
        read_values: Also look at their range; waits for the device.

    Raises:
        InputError: with what, expected, got and what to do.
    """
    if not isinstance(labels, Tensor):
        _refuse(f"{title}: labels", "a tensor", type(labels).__name__, "Pass class indices, one per row.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        _refuse(
            f"{title}: labels", "an integer dtype (torch.int64)", labels.dtype, "Pass class indices: labels.long()."
        )
    if labels.ndim != 1 or labels.shape[0] != rows:
        _refuse(
            f"{title}: labels", f"shape ({rows},), one per embedding", tuple(labels.shape), "Pass one label per row."
        )
    if read_values and labels.numel():
        low, high = (int(v) for v in torch.aminmax(labels))
        if low < 0 or high >= num_classes:
            _refuse(
                f"{title}: labels",
                f"0 to {num_classes - 1} (num_classes={num_classes})",
                f"{low} to {high}",
                "Map labels to 0 ... num_classes - 1, or raise num_classes.",
            )


def _class_weight(loss: nn.Module) -> tuple[str, Tensor] | None:
    for name in _WIDTH_DIM:
        parameter = getattr(loss, name, None)
        if isinstance(parameter, Tensor) and parameter.ndim == 2:
            return name, parameter
    return None


def _refuse(what: str, expected: object, got: object, fix: str) -> NoReturn:
    raise InputError(what, expected=expected, got=got, fix=fix)
