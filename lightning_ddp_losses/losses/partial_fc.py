"""Sampled negatives for a class-sharded softmax, and an optimizer that steps only the rows that were sampled.

As in PartialFC (An et al. 2021, arXiv:2010.05222), each rank uses those classes of the batch that it holds, and random other classes. With
a dense optimizer, momentum and weight decay would also change the remaining rows. During its step, the optimizer is therefore given only
the sampled rows of weight and state, or None as the gradient if no row has a gradient.

Legend: ``c`` classes on this rank, ``K`` weight rows per class, ``G`` rows of the batch.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.random_state import CountedDraws
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.sharded_weight import rows_of_classes

_ROWS_AT_A_TIME = 4096  # rows searched at a time for a nonzero number, which is nearly always in the first ones


class ClassSampler(CountedDraws):
    """Draws the classes of a call.

    Args:
        rate: Fraction of this rank's classes that a call uses. The classes of the batch are always used.
        unbiased: Weight each sampled negative by the inverse of the probability with which it was drawn, so that the sum of
            exponentials is correct in expectation.

    Attributes:
        sampled: Classes of the last call, as ascending positions among this rank's classes. None before the first call.
        gradient: Records which classes have a gradient.
    """

    def __init__(self, rate: float, unbiased: bool) -> None:
        super().__init__()
        self.rate, self.unbiased = rate, unbiased
        self.sampled: Tensor | None = None
        self.gradient = SampledGradient()

    def draw_next(self, labels: Tensor, shard: ClassShard, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draw the classes of the next call, from torch's seed, this rank's shard and the number of calls.

        Args:
            labels: (G,) positions among this rank's classes, which are negative or beyond the last class if another rank holds the class.
            shard: This rank's classes.
            dtype: Dtype of the logits.

        Returns:
            The sampled classes, as ascending positions among this rank's classes. The labels as positions among the sampled classes, -1 for
            classes of other ranks. The logarithm of each class's weight in the sum, 0 for a target, or None unless ``unbiased``.
        """
        self.number += 1
        text = f"{torch.initial_seed()} {shard.start} {self.number}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        classes, device = shard.classes, labels.device
        # the classes of the batch. Rows with classes of other ranks mark a position after the last class
        places = torch.where((labels >= 0) & (labels < classes), labels, classes)
        is_target = torch.zeros(classes + 1, dtype=torch.bool, device=device).index_fill_(0, places, True)[:classes]
        targets = is_target.sum()
        # as many as the rate specifies, and at least the classes of the batch. On an accelerator the host does not wait for their number
        at_least = int(targets) if device.type == "cpu" else min(classes, len(labels))
        wanted = min(classes, max(math.ceil(self.rate * classes), at_least))
        # the classes of the batch are first, followed by other classes in random order
        keys = _random_keys(classes, seed, device).masked_fill_(is_target, torch.iinfo(torch.int64).max)
        sampled = torch.topk(keys, wanted).indices.sort().values
        self.sampled = sampled
        # positions of the labels among the sampled classes
        place = torch.full((classes + 1,), -1, device=device)
        place.index_copy_(0, sampled, torch.arange(wanted, device=device))
        log_weight = None
        if self.unbiased:
            # the inverse of the probability of a negative
            negatives = (wanted - targets).clamp(min=1)
            correction = ((classes - targets).to(dtype) / negatives).log()
            log_weight = torch.where(is_target[sampled], 0.0, correction)
        return sampled, place[places], log_weight


def _random_keys(number: int, seed: int, device: torch.device) -> Tensor:
    """Return random int64 (number,) that are equal on every device: the finalizer of splitmix64 on consecutive counts."""
    keys = torch.arange(number, device=device) * -0x61C8864680B583EB + seed
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        keys = torch.bitwise_xor(keys, torch.bitwise_right_shift(keys, shift)) * factor
    return keys


class SampledGradient:
    """Records which classes of a weight have a gradient that no optimizer step has used.

    A gradient that was set to zeros in place (``zero_grad(set_to_none=False)``) is distinguished from a gradient that is zero: backward has
    written a nonzero number, which is no longer present. Such a gradient counts as dropped.
    """

    def __init__(self) -> None:
        self._sampled: list[Tensor] = []  # by call
        self._backward = -1
        self._had_nonzero: bool | Tensor = False

    def add_(self, sampled: Tensor, grad_rows: Tensor, weight: Tensor, shard: ClassShard) -> None:
        """Record that the running backward adds a gradient to these classes.

        Gradients of earlier backward passes count until they are dropped.

        Args:
            sampled: Positions among this rank's classes.
            grad_rows: (c * K, D), the gradient of the weight rows, which is not yet in ``weight.grad``.
            weight: The parameter.
            shard: This rank's classes.
        """
        backward = torch_compat.graph_task_id()
        if backward != self._backward and self._is_dropped(weight, shard):
            self._sampled, self._had_nonzero = [], False
        self._sampled.append(sampled)
        self._backward = backward
        self._had_nonzero |= _any_nonzero(grad_rows, 0, rows_of_classes(sampled, shard.per_class))

    def clear_(self) -> None:
        """Clear the record, after a step has used the gradient."""
        self._sampled, self._had_nonzero = [], False

    def rows(self, weight: Tensor, shard: ClassShard) -> Tensor | None:
        """Return the indices of weight rows with a gradient, or None if there are none. The host waits for an accelerator once."""
        return None if not self._sampled or self._is_dropped(weight, shard) else self._rows(shard)

    def _rows(self, shard: ClassShard) -> Tensor:
        # several calls may have sampled the same classes
        several = len(self._sampled) > 1
        sampled = torch.unique(torch.cat(self._sampled)) if several else self._sampled[0]
        return rows_of_classes(sampled, shard.per_class)

    def _is_dropped(self, weight: Tensor, shard: ClassShard) -> bool:
        if weight.grad is None:
            return True
        if not self._sampled or bool(_any_nonzero(weight.grad, shard.dim, self._rows(shard))):
            return False
        return bool(self._had_nonzero)


def _any_nonzero(tensor: Tensor, dim: int, rows: Tensor) -> bool | Tensor:
    """Return whether any of these rows contains a nonzero number, on an accelerator as a 0-dim tensor for which the host does not wait."""
    if tensor.device.type != "cpu":
        return tensor.index_select(dim, rows).any()
    pieces = torch.split(rows, _ROWS_AT_A_TIME)
    return any(bool(tensor.index_select(dim, piece).any()) for piece in pieces)


class SampledRowOptimizer:
    """Restricts the steps of an optimizer to the sampled rows of a weight, and of its state for this weight.

    Args:
        weight: The parameter, tagged as a shard.
        gradient: Records which classes have a gradient.
        optimizer: An optimizer that contains the weight.
    """

    def __init__(self, weight: nn.Parameter, gradient: SampledGradient, optimizer: torch.optim.Optimizer) -> None:
        self._weight, self._gradient = weight, gradient
        self.optimizer = weakref.ref(optimizer)
        # used during a step
        self._part: nn.Parameter | None = None  # the sampled rows, followed by a row of zeros in the first step
        self._set_aside: Tensor | None = None  # the weight's gradient, if no row has a gradient
        self._rows = torch.empty(0, dtype=torch.long)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the loss has new parameters, which are not in an optimizer yet

    def _before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace the weight by the sampled rows. If forward and backward run in a closure, this happens after the closure."""
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if closure is None:
            self._hand_over_(optimizer)
            return args, kwargs

        def closure_then_hand_over() -> Any:
            result = closure()
            self._hand_over_(optimizer)
            return result

        if is_positional:
            return (args[0], closure_then_hand_over, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_hand_over}

    def _hand_over_(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the weight by the sampled rows, with their gradient and state."""
        weight, shard = self._weight, self._shard()
        if weight.grad is None:
            return
        dim, rows = shard.dim, self._gradient.rows(weight, shard)
        # a gradient that was not computed since the last step, or was set to zeros, is treated as None
        if rows is None:
            self._set_aside, weight.grad = weight.grad, None
            return
        values, grad = weight.detach().index_select(dim, rows), weight.grad.index_select(dim, rows)
        state = optimizer.state.get(weight, {})
        # only the optimizer defines the initial state of a row, so it is copied from a row of zeros with zero gradient after the first step
        if not state:
            shape = list(weight.shape)
            shape[dim] = 1
            resting = weight.new_zeros(shape)
            values, grad = torch.cat([values, resting], dim), torch.cat([grad, resting], dim)
        part = nn.Parameter(values)
        part.grad = grad
        self._part, self._rows = part, rows
        _replace_(optimizer, weight, part)
        if state:
            part_state = dict(state)
            for key, value in state.items():
                if _is_per_number(value, weight):
                    part_state[key] = value.index_select(dim, rows)
            optimizer.state[part] = part_state

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Copy the updated rows and their state back to the weight."""
        weight, part, dim = self._weight, self._part, self._shard().dim
        if self._set_aside is not None:
            weight.grad, self._set_aside = self._set_aside, None
        if part is None:
            return
        _replace_(optimizer, part, weight)
        count = len(self._rows)
        with torch.no_grad():
            weight.index_copy_(dim, self._rows, part.narrow(dim, 0, count))
            state = optimizer.state[weight]
            for key, value in optimizer.state.pop(part, {}).items():
                if not _is_per_number(value, part):
                    state[key] = _of_all_rows(key, value, optimizer)
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(weight, dtype=value.dtype)
                    if value.shape[dim] > count:
                        state[key].copy_(value.narrow(dim, count, 1))
                state[key].index_copy_(dim, self._rows, value.narrow(dim, 0, count))
        self._part = None
        self._gradient.clear_()

    def _shard(self) -> ClassShard:
        shard = shard_of(self._weight)
        assert shard is not None
        return shard


def _replace_(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace a parameter by another one in each group of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]


def _is_per_number(value: Any, parameter: Tensor) -> bool:
    """Return whether a state has one number per element of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def _of_all_rows(key: str, value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a state that belongs to the weight as a whole, such as a count of steps.

    Raises:
        ConfigurationError: for a state that belongs to all rows of the step together.
    """
    if isinstance(value, Tensor) and value.ndim > 0:
        raise ConfigurationError(
            f"ClassShardedLoss: sample_rate with {type(optimizer).__name__}",
            expected="an optimizer whose state is one number per number of the weight",
            got=f"{key} of shape {tuple(value.shape)}, of this step's rows together",
            fix="Use one that treats each number by itself (SGD, Adam, ...), or sample_rate=1.",
        )
    return value
