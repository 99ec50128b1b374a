"""The losses of one rank: value, weight of each element, and the micro-batches of an accumulation window.

The copy of a loss to the host starts immediately and is read in the next step, so that reading it does not wait for a device.

The weight of one element of a rank's batch in its loss is read from the autograd graph, from the loss down to its reductions. DDP averages
over ranks, so elements count equally only if this weight is equal on all ranks. If one rank averages over 3 targets and another over 1, the
result is a mean of means. This does not happen if a sum is divided by the number of targets of all ranks. Numbers on an accelerator are
copied without waiting (``LateNumber``), and ``read_weights`` reads them later.

Legend: ``M`` micro-batches of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks.ddp_state import send_gradient_scale
from lightning_ddp_losses.callbacks.facts.loss_rules import spread
from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad
from lightning_ddp_losses.core.host_copy import HostCopy, HostNumbers, LateNumber
from lightning_ddp_losses.distributed.window_parts import counts_nothing, noted_parts

# operations that do not change a scalar
_PASSED = ("View", "UnsafeView", "Squeeze", "Reshape", "Clone", "ToCopy", "Alias", "Expand")
_MAX_NODES = 64
_MEAN, _SUM = 1, 2  # torch's codes
Number: TypeAlias = "float | LateNumber"
_MOST = 64  # largest number of micro-batches that are compared
_EQUAL = 1e-6  # relative tolerance: weights in half precision are computed in float32


# ---------------------------------------------------------------------- weights of elements


@dataclass(frozen=True)
class ElementWeight:
    """Describes one reduction in the loss.

    Attributes:
        weight: Weight of one element in the loss.
        elements: Number of elements.
        is_masked: True if a mask selected the elements (PML selects tuples with a nonzero loss in this way).
        kind: ``local`` for elements of this rank, ``global`` for elements of all ranks, ``unknown`` for a term whose reduction cannot be
            read. For the latter, weight and elements are 0.
    """

    weight: Number
    elements: Number
    is_masked: bool = False
    kind: Literal["local", "global", "unknown"] = "local"


_UNKNOWN = ElementWeight(0.0, 0.0, kind="unknown")
_NO_WEIGHT = ElementWeight(0.0, 0.0)


def read_weights(weights: Sequence[ElementWeight]) -> list[ElementWeight]:
    """Return the weights with all numbers on the host.

    A mean over zero elements of all ranks has infinite weight. A term that cannot be read is ``unknown``.
    """
    found = []
    for each in weights:
        weight, elements = float(each.weight), float(each.elements)
        if each.kind == "global" and not elements:
            weight = math.inf
        if math.isnan(weight) or (each.kind == "local" and not (weight and elements)):
            found.append(_UNKNOWN)
        else:
            found.append(replace(each, weight=weight, elements=elements))
    return found


def element_weights(loss: Tensor) -> list[ElementWeight]:
    """Return the reductions of a scalar loss in graph order, with kind ``unknown`` for each other operation."""
    found: list[ElementWeight] = []
    # nodes of the graph, each with the product of the factors between the node and the loss
    queue: list[tuple[Any, Number]] = [(loss.grad_fn, 1.0)]
    for node, factor in queue:
        if node is None:
            continue
        if len(queue) > _MAX_NODES:
            return [*found, _UNKNOWN]
        of_all_ranks = _global_reductions(node, factor)
        if of_all_ranks:
            found += of_all_ranks
            continue
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        parents = [parent for parent, _ in node.next_functions]
        sums = parents[:1] if name == "Sum" else []  # operand of a sum
        if name == "Add" or name in _PASSED:
            # torch's alpha= is ignored, because it is equal on all ranks
            queue += [(parent, factor) for parent in parents]
        elif attaches_zero_grad(node):  # its other children receive only zeros
            queue.append((parents[0], factor))
        elif name == "Sub":
            queue += list(zip(parents, (factor, -factor), strict=False))
        elif name == "Neg":
            queue += [(parent, -factor) for parent in parents]
        elif name in ("Mul", "Div"):
            behind = _through_product(node, name, parents, factor)
            queue += behind
            found += [] if behind else [_UNKNOWN]
        elif any(map(noted_parts, sums)):
            queue.append((parents[0], factor))
        elif any(type(parent).__name__.startswith("StackBackward") for parent in sums):
            queue += [(parent, factor) for parent, _ in parents[0].next_functions]
        else:
            found.append(_reduction(node, name, parents, factor) or _UNKNOWN)
    return found


def _global_reductions(node: Any, factor: Number) -> list[ElementWeight]:
    """Return the divisors recorded by a loss over the rows of all ranks, or an empty list for any other node."""
    parts = noted_parts(node)
    if type(node).__name__.startswith("SelectBackward"):  # selects one of several means
        parent, index = node.next_functions[0][0], torch_compat.saved_by_node(node, "index")
        parts = None if parent is None else noted_parts(parent)
        parts = parts and [parts[index % len(parts)]]
    found = []
    for part in parts or ():
        if part.kind == "sum":
            found.append(ElementWeight(factor, 1.0, kind="global"))
        elif part.kind == "mean":
            count = _as_number(part.count) or 0.0
            found.append(ElementWeight(factor / count if count else math.inf, count, kind="global"))
    return found


def _through_product(node: Any, name: str, parents: list[Any], factor: Number) -> list[tuple[Any, Number]]:
    """Follow a product with a number or a quotient by a number. Return an empty list for other products."""
    number = _as_number(torch_compat.saved_by_node(node, "other"))
    with_graph = [parent for parent in parents if parent is not None]
    if not number or len(with_graph) != 1:
        return []
    return [(with_graph[0], factor * number if name == "Mul" else factor / number)]


def _reduction(node: Any, name: str, parents: list[Any], factor: Number) -> ElementWeight | None:
    """Read a mean, a sum, or a torch loss with such a reduction. Return None for any other node."""
    is_masked = any(type(parent).__name__.startswith(("IndexBackward", "MaskedSelect")) for parent in parents)
    if name in ("Mean", "Sum"):
        is_mean = name == "Mean"
        elements: Number | None = math.prod(torch_compat.saved_by_node(node, "self_sym_sizes", ()) or (0,))
        elements = elements or int(torch_compat.saved_by_node(node, "self_sym_numel", 0))
    else:
        reduction = torch_compat.saved_by_node(node, "reduction")
        if reduction not in (_MEAN, _SUM):
            return None
        is_mean = reduction == _MEAN
        elements = _as_number(torch_compat.saved_by_node(node, "total_weight"))
        values = torch_compat.saved_by_node(node, "self")
        if elements is None and isinstance(values, Tensor):
            elements = float(values.numel())
    if not elements:
        return None
    if is_mean:
        factor /= elements
    return ElementWeight(factor, elements, is_masked)


def _as_number(value: Any) -> Number | None:
    """Return a number that autograd has saved, either directly or in a tensor, or None for any other value."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        return None
    if value.device.type != "cpu":
        return LateNumber.of(value)
    if not torch_compat.is_in_dispatch_mode():
        return float(value)
    # torch unwraps a wrapped Python number before passing it to a dispatch mode, which then fails (torch 2.13)
    with torch_compat.without_dispatch_modes():
        return float(value)


# ---------------------------------------------------------------------- losses


class LossReader:
    """Reads the losses of a fit.

    Args:
        is_divided: True if Lightning divides a loss by the number of micro-batches.
        compares_rows: True if the module has a loss that compares rows of this rank.
        has_windows: True if micro-batches are compared. A loss that compares rows is not a mean over several micro-batches.

    Attributes:
        pending: Losses that have not been read yet: optimizer steps before each, and the function that reads it.
    """

    def __init__(self, *, is_divided: bool = True, compares_rows: bool = False, has_windows: bool = False) -> None:
        self.pending: list[tuple[int, Callable[[], None]]] = []
        # values read since the last row. A loss that is not finite is kept until it is reported, even if other losses follow
        self._loss, self._bad_batch, self._step, self._zero_steps = math.nan, -1, -1, 0
        self._weights: list[ElementWeight] = []
        self._is_divided, self._compares_rows = is_divided, compares_rows
        self._accumulated = 1  # micro-batches of the window that was read last
        self._micro_batches = MicroBatches() if has_windows else None

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor, step: int) -> None:
        """Start to copy the loss and its reductions to the host."""
        batch_idx, accumulated = trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches
        window = trainer.current_epoch, batch_idx // accumulated
        # this factor undoes the division for accumulation
        factor = 1.0
        if module.automatic_optimization and self._is_divided:
            factor *= accumulated
        is_scaled = loss is not getattr(trainer.strategy, "closure_loss", None)
        # the graph no longer exists when the loss is read. Outside a window, a mean over zero elements is an error
        asks = not self._is_divided
        if loss.device.type == "cpu":  # the value is available without waiting
            asks = not math.isfinite(float(loss.detach()))
        may_be_nan = asks and counts_nothing(loss)
        copied, scale = HostCopy(loss), send_gradient_scale(trainer) if is_scaled else HostNumbers([])
        weights = element_weights(loss)

        def read() -> None:
            scales = scale.read()
            unscaled = factor / math.prod(map(float, scales))
            value = float(copied.read()) * unscaled
            if self._bad_batch < 0:
                self._loss, self._step = value, step
                # ignore an overflow due to the scale, for which the scaler skips the step on every rank, and a mean over zero elements
                if not (math.isfinite(value) or (scales and math.isinf(value)) or may_be_nan):
                    self._bad_batch = batch_idx
            # count steps as long as the loss has been zero in every step
            self._zero_steps = self._zero_steps + 1 if value == 0 and self._zero_steps >= 0 else -1
            found = read_weights(weights)
            local = [weight for weight in found if weight.kind == "local"]
            self._weights = [weight for weight in local if not (weight.is_masked and self._compares_rows)]
            self._accumulated = accumulated
            if self._micro_batches is not None and accumulated > 1:
                self._micro_batches.add(window, value, found, unscaled)

        self.pending.append((step, read))

    def read(self, before: float) -> None:
        """Read the losses of steps before ``before``, whose copies have been completed.

        Args:
            before: Number of the step. Infinity for all losses.
        """
        while self.pending and self.pending[0][0] < before:
            _, read = self.pending.pop(0)
            read()

    def numbers(self) -> dict[str, Any]:
        """Return the numbers read since the last call.

        Returns:
            ``loss``: value of the loss. For several batches in a step, the first loss that is not finite, otherwise the last one.
            ``bad_batch``: first batch of this step with a loss that was not finite. -1 if all losses were finite.
            ``weight``, ``elements``: weight of one element in the first reduction of the loss, 0 if not known, and number of elements.
            ``second_weight``: weight of one element in the second reduction.
            ``zero_steps``: number of steps with a loss of exactly zero since the start. -1 after any other loss.
            ``step``: step of the loss and of the other numbers. -1 if no loss was read.
            ``micro_batches``, ``divisors``: values and divisors of the micro-batches of a window.
        """
        # the first two reductions are enough, because a loss is rarely a sum of more than two
        first, second = (*self._weights, _NO_WEIGHT, _NO_WEIGHT)[:2]
        values: list[float] = []
        divisors: list[float] = []
        if self._micro_batches is not None and self._accumulated > 1 and self._step >= 0:
            values, divisors = self._micro_batches.numbers()
        numbers = {
            "loss": self._loss,
            "bad_batch": self._bad_batch,
            "weight": float(first.weight),
            "elements": float(first.elements),
            "second_weight": float(second.weight),
            "zero_steps": self._zero_steps,
            "step": self._step,
            "micro_batches": values,
            "divisors": divisors,
        }
        self._bad_batch, self._step = -1, -1
        return numbers

    def stop_windows(self) -> None:
        """Stop comparing micro-batches after a window was reported."""
        self._micro_batches = None


def is_divided(trainer: Trainer) -> bool:
    """Return whether Lightning divides a loss by the number of micro-batches, and no strategy undoes that."""
    return getattr(trainer.strategy, "accumulation", "mean") == "mean"


# ---------------------------------------------------------------------- micro-batches


class MicroBatches:
    """Stores this rank's micro-batches of the current window."""

    _window: object = None

    def add(self, window: object, value: float, weights: Sequence[ElementWeight], factor: float) -> None:
        """Add a micro-batch.

        Args:
            window: Identity of its window. If it differs from the previous one, a new window begins with this micro-batch.
            value: Value that ``training_step`` returned.
            weights: Reductions of the loss that is back-propagated, with their numbers on the host.
            factor: Ratio of ``value`` to that loss, which undoes Lightning's division and the scaler's factor.
        """
        if window != self._window:
            self._window, self._is_known = window, True
            self._values: list[float] = []
            self._divisors: list[list[float]] = []  # for each micro-batch, the divisors of its known reductions
        self._values.append(value)
        sizes = [abs(float(weight.weight) * factor) for weight in weights if weight.kind != "unknown"]
        self._divisors.append([1.0 / size if size else math.nan for size in sizes])
        self._is_known &= len(sizes) == len(weights)

    def numbers(self) -> tuple[list[float], list[float]]:
        """Return M values and M divisors. Both are empty if the window has one micro-batch, or divisors are not known."""
        number = len(self._values)
        reductions = {len(divisors) for divisors in self._divisors}
        if not 1 < number <= _MOST or len(reductions) > 1 or reductions == {0}:
            return [], []
        # each column contains the divisors of one reduction. Use the column with the largest spread
        columns = list(zip(*self._divisors, strict=True))
        divisors = max(columns, key=spread)
        is_whole = all(spread(column) < 1 + _EQUAL or _in_proportion(column, divisors) for column in columns)
        if self._is_known and is_whole:
            return self._values, [*divisors]
        # a mean over all rows would need the value of each term
        return [math.nan] * number, [*divisors]


def _in_proportion(left: Sequence[float], right: Sequence[float]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(math.isclose(a * right[0], b * left[0], rel_tol=_EQUAL) for a, b in pairs)
