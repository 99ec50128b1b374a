"""A batch of 0 rows, for a rank whose training data has ended, and what a step with such a batch refuses.

Such a batch does not change a loss over the rows of all ranks. Any other loss would be silently wrong: the mean of 0 rows is NaN, and
a mean over one rank's rows is divided by W although fewer ranks have rows. So if some rank lacks rows, every rank inspects the graph of
the back-propagated loss: each path to a parameter must pass through a value over all ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad
from lightning_ddp_losses.core.inputs import children_of, is_array, rebuild_nest, tensors_in
from lightning_ddp_losses.core.modules import synchronises
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.global_values import is_global_value
from lightning_ddp_losses.errors import DDPLossError, InputError, expect

_EMPTY = "uneven='join': a batch of 0 rows"
_STEP = "uneven='join', a step in which some rank has no rows"
_FIX_STRUCTURE = "Let collate give tensors whose first axis are the rows, or use uneven='stop'."
_OF_A_ROW = (str, bytes, int, float)  # in a list of as many as there are rows
_KEPT = (str, bytes, bool, type(None))


def batch_without_rows(batch: Any) -> Any:
    """Return a batch of the same structure with 0 rows. Strings, bools and None remain; a list with one of them per row becomes empty.

    Raises:
        InputError: naming the entry that lacks an axis of rows, or has another number of rows than other entries.
    """
    sizes = dict(_first_axes(batch, "batch"))
    rows = set(sizes.values())
    if len(rows) != 1:
        shown = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        got = f"different lengths ({shown})" if sizes else f"no tensor in a {type(batch).__name__}"
        raise InputError(_EMPTY, expected="tensors whose first axis are the rows", got=got, fix=_FIX_STRUCTURE)
    return _emptied(batch, "batch", rows.pop())


def _first_axes(part: Any, path: str) -> Iterator[tuple[str, int]]:
    """Yield path and length of the first axis of each tensor and array."""
    if isinstance(part, PackedSequence):
        raise _no_rows(path, "a PackedSequence")
    if is_array(part):
        if isinstance(part, Tensor) and (part.layout != torch.strided or part.is_nested):
            raise _no_rows(path, f"a {type(part).__name__} that is not dense")
        if not part.ndim:
            raise _no_rows(path, "a tensor of no dimension")
        yield path, part.shape[0]
        return
    for key, child in children_of(part) or ():
        yield from _first_axes(child, f"{path}{key}")


def _emptied(part: Any, path: str, rows: int) -> Any:
    if isinstance(part, Tensor):
        return part.detach()[:0].clone()  # a slice would keep the memory of the whole tensor
    if is_array(part):
        return part[:0].copy()
    if isinstance(part, _KEPT):
        return part
    if isinstance(part, (tuple, list)):
        if len(part) == rows and all(isinstance(item, _OF_A_ROW) for item in part):
            return type(part)()  # one for each row, as collate leaves texts
        if all(isinstance(item, _KEPT) for item in part):
            return part
    children = children_of(part)
    if children is None:
        raise _no_rows(path, f"{part!r} ({type(part).__name__})")
    return rebuild_nest(part, [_emptied(child, f"{path}{key}", rows) for key, child in children])


def _no_rows(path: str, got: str) -> InputError:
    return InputError(f"{_EMPTY}: {path}", expected="rows along a first axis", got=got, fix=_FIX_STRUCTURE)


# ---------------------------------------------------------------------- the module, and its loss without rows on some rank


def _has_no_rows(frame: FrameType) -> bool:
    """Return whether the first argument of a method, after the object, is a batch of 0 rows."""
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    batch = frame.f_locals.get(names[0]) if names else None
    tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim]
    return bool(tensors) and all(len(tensor) == 0 for tensor in tensors)


def name_module(error: Exception, root: nn.Module) -> Exception:
    """Return the error of a training step, as one that names the module or the step if it has failed on 0 rows.

    Args:
        error: Error that was raised inside the step.
        root: The user's module.
    """
    if isinstance(error, DDPLossError):
        return error
    failed, is_empty = None, False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, values = frame.f_locals.get("self"), frame.f_locals.values()
        if isinstance(owner, nn.Module) and any(isinstance(value, Tensor) and 0 in value.shape for value in values):
            failed = owner
        if owner is root and frame.f_code.co_name == "training_step":
            is_empty = _has_no_rows(frame)
    if is_empty and failed in (None, root):
        got = f"{type(error).__name__} in training_step: {error}"
        fix = f"The batch of rank {process_groups.rank()} has 0 rows. Let the step return a loss of 0 rows for it, or use uneven='stop'."
        return InputError(_EMPTY, expected="a training_step that takes 0 rows", got=got, fix=fix)
    if failed is None:
        return error
    name = next((name for name, module in root.named_modules() if module is failed), "")
    shown = f"`{name}` ({type(failed).__name__})" if name else type(failed).__name__
    got = f"{type(error).__name__} in {shown}: {error}"
    fix = "Let the module return 0 rows for 0 rows, or use uneven='stop'."
    return InputError(_EMPTY, expected="modules that take 0 rows", got=got, fix=fix)


def refuse_plain_norms(module: nn.Module) -> None:
    """Refuse layers that would take their statistics from no rows, before that forward.

    Raises:
        InputError: naming them.
    """
    plain = []
    for name, layer in module.named_modules():
        is_synced = isinstance(layer, nn.SyncBatchNorm) or synchronises(layer)
        is_batch_norm = isinstance(layer, torch_compat.BATCH_NORM_TYPES)
        uses_rows = is_batch_norm or getattr(layer, "track_running_stats", False)
        if isinstance(layer, torch_compat.NORM_TYPES) and layer.training and uses_rows and not is_synced:
            plain.append(f"`{name}` ({type(layer).__name__})")
    fix = "Set Trainer(sync_batchnorm=True), or use uneven='stop'."
    expect(
        not plain, _STEP, expected="norms over the rows of all ranks", got=", ".join(plain), fix=fix, error=InputError
    )


def refuse_local_losses(loss: Tensor, module: nn.Module) -> None:
    """Refuse to back-propagate a term that is not over the rows of all ranks, on any rank.

    Args:
        loss: Value that will be back-propagated.
        module: Names the parameters.

    Raises:
        InputError: on every rank, naming a term on each rank that has one.

    Communication: one handshake.
    """
    terms = handshake.all_gather_json("backward without rows on some rank", {}, _local_term(loss, module))
    if any(terms):
        raise InputError(
            _STEP,
            expected="losses over the rows of all ranks",
            ranks=[term or "nothing else" for term in terms],
            fix="Wrap the loss in GlobalBatchLoss, write global_mean(total, count) (of a term without rows: global_mean(term, 1)), wrap a "
            "metric in differentiable, or use uneven='stop'.",
            collective=True,
        )


def _local_term(loss: Tensor, module: nn.Module) -> str:
    """Return a term of a loss that reaches a parameter and passes no value over all ranks. Empty if there is none."""
    above: dict[Any, Any] = {}
    queue: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in queue:
        if is_global_value(node):
            continue
        children = node.next_functions
        if not children and hasattr(node, "variable"):
            return _describe_leaf(node, above, module)
        if attaches_zero_grad(node):  # its other children get zeros
            children = children[:1]
        for child, _ in children:
            if child is not None and child not in above:
                above[child] = node
                queue.append(child)
    return ""


def _describe_leaf(leaf: Any, above: Mapping[Any, Any], module: nn.Module) -> str:
    """Return how a message names a term, by the operations next to the loss."""
    path = [leaf]
    while path[-1] in above:
        path.append(above[path[-1]])
    names = {id(parameter): f"`{name}`" for name, parameter in module.named_parameters()}
    reached = names.get(id(leaf.variable), f"a parameter of shape {tuple(leaf.variable.shape)}")
    operations = [node.name() for node in reversed(path[1:])]
    return f"{' of '.join(operations[:3])}, which reaches {reached}"
