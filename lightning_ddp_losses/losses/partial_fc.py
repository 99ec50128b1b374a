"""Sampled negatives for a class-sharded softmax, and an optimizer that steps only the rows that were sampled.

As in PartialFC (An et al. 2021, arXiv:2010.05222): each rank looks at the classes of the batch's rows that it holds, filled up with random
others. A dense optimizer would let momentum and weight decay move the other rows too; so it is handed the sampled rows of
weight and state for the length of its step.

Legend: ``c`` classes on this rank, ``K`` weight rows per class, ``G`` rows of the batch.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.errors import ConfigurationError


class SampledClasses(NamedTuple):
    """The classes of one call.

    Attributes:
        classes: (c',) positions among this rank's classes, ascending.
        labels: (G,) the labels as positions among the sampled classes, -1 for those of other ranks.
        log_weight: (c',) what to add to each class's logit in the sum; None: nothing.
    """

    classes: Tensor
    labels: Tensor
    log_weight: Tensor | None


class ClassSampler:
    """Draws the classes of a call.

    Args:
        rate: Share of this rank's classes that a call looks at; never fewer than the batch's own.
        unbiased: Weigh each sampled negative by one over the probability with which it was drawn, so that the sum of
            exponentials is right in expectation.

    Attributes:
        sampled: Classes of the last call, as positions among this rank's, ascending; None before the first one.
    """

    def __init__(self, rate: float, unbiased: bool) -> None:
        self.rate, self.unbiased = rate, unbiased
        self.sampled: Tensor | None = None
        self._calls = 0

    def draw_next(self, labels: Tensor, shard: ClassShard) -> SampledClasses:
        """Draw the classes of the next call, from torch's seed, this rank's shard and the number of calls.

        Args:
            labels: (G,) positions among this rank's classes, -1 for others.
            shard: This rank's classes.
        """
        self._calls += 1
        text = f"{torch.initial_seed()} {shard.start} {self._calls}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        return self.draw(labels, shard.classes, seed)

    def draw(self, labels: Tensor, classes: int, seed: int) -> SampledClasses:
        """Draw among this rank's classes.

        Args:
            labels: (G,) positions among this rank's classes, -1 for others.
            classes: c.
            seed: Of this call and rank.
        """
        is_local = labels >= 0
        # the batch's own classes come first, others in random order
        is_target = torch.zeros(classes, dtype=torch.bool, device=labels.device)
        is_target[labels[is_local]] = True
        generator = torch.Generator().manual_seed(seed)
        keys = torch.rand(classes, generator=generator).to(labels.device)
        keys[is_target] = 2.0
        # as many as the rate says, and never fewer than the batch's own
        targets = int(is_target.sum())
        wanted = min(classes, max(math.ceil(self.rate * classes), targets))
        sampled = torch.topk(keys, wanted).indices.sort().values
        self.sampled = sampled
        # the labels' places among them
        place = torch.full((classes,), -1, dtype=torch.long, device=labels.device)
        place[sampled] = torch.arange(wanted, device=labels.device)
        positions = torch.full_like(labels, -1)
        positions[is_local] = place[labels[is_local]]
        # one over the probability of a negative
        log_weight = None
        if self.unbiased and wanted > targets:
            correction = math.log((classes - targets) / (wanted - targets))
            log_weight = torch.where(is_target[sampled], 0.0, correction)
        return SampledClasses(sampled, positions, log_weight)


class SampledGradient:
    """Remembers which classes of a weight have a gradient that no step has used."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._backward = -1

    def add_(self, sampled: Tensor, weight: Tensor, shard: ClassShard) -> None:
        """Note that the backward that runs gives these classes a gradient.

        What earlier ones gave counts until the gradient is dropped.

        Args:
            sampled: Positions among this rank's classes.
            weight: The parameter.
            shard: This rank's classes.
        """
        backward = compat.graph_task_id()
        was_dropped = weight.grad is None and backward != self._backward
        if self._mask is None or was_dropped:
            self._mask = torch.zeros(shard.classes, dtype=torch.bool, device=sampled.device)
        self._mask[sampled] = True
        self._backward = backward

    def clear_(self) -> None:
        """Forget them: a step has used the gradient."""
        self._mask = None

    def rows(self, shard: ClassShard) -> Tensor | None:
        """Return the indices of their weight rows; None where no class has a gradient."""
        if self._mask is None:
            return None
        return self._mask.repeat_interleave(shard.per_class).nonzero().squeeze(1)


class SampledRowOptimizer:
    """Lets an optimizer see only the sampled rows of a weight, and of its own state for it, while it steps.

    Args:
        weight: The parameter, tagged as a shard.
        gradient: Knows which classes have a gradient.
    """

    def __init__(self, weight: nn.Parameter, gradient: SampledGradient) -> None:
        self._weight, self._gradient = weight, gradient
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._part: nn.Parameter | None = None  # the sampled rows, while a step runs
        self._rows = torch.empty(0, dtype=torch.long)

    def attach(self, optimizer: torch.optim.Optimizer) -> bool:
        """Install on an optimizer that holds the weight; return False for another."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if all(parameter is not self._weight for parameter in parameters):
            return False
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return True

    def is_attached_to(self, optimizer: Any) -> bool:
        """Say whether this is the optimizer that it was installed on."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the loss has other parameters, which no optimizer holds yet

    def _before_step(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hand over the rows; where forward and backward are yet to come, in a closure, after that."""
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
        """Put the sampled rows, with their gradient and state, in the weight's place."""
        weight, shard = self._weight, self._shard()
        rows, dim = self._gradient.rows(shard), shard.dim
        if weight.grad is None or rows is None:
            return
        part = nn.Parameter(weight.detach().index_select(dim, rows))
        part.grad = weight.grad.index_select(dim, rows)
        self._part, self._rows = part, rows
        _replace_(optimizer, weight, part)
        state = optimizer.state.get(weight, {})
        if state:
            part_state = dict(state)
            for key, value in state.items():
                if _is_per_number(value, weight):
                    part_state[key] = value.index_select(dim, rows)
            optimizer.state[part] = part_state

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Take the stepped rows and their state back into the weight's."""
        weight, part, dim = self._weight, self._part, self._shard().dim
        if part is None:
            return
        _replace_(optimizer, part, weight)
        with torch.no_grad():
            weight.index_copy_(dim, self._rows, part)
            state = optimizer.state[weight]
            for key, value in optimizer.state.pop(part, {}).items():
                if not _is_per_number(value, part):
                    state[key] = _of_all_rows(key, value, optimizer)
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(weight, dtype=value.dtype)
                state[key].index_copy_(dim, self._rows, value)
        self._part = None
        self._gradient.clear_()

    def _shard(self) -> ClassShard:
        shard = shard_of(self._weight)
        assert shard is not None
        return shard


def _replace_(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put another parameter in the place of one, in each group of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [new if parameter is old else parameter for parameter in group["params"]]


def _is_per_number(value: Any, parameter: Tensor) -> bool:
    """Say whether state has one number per number of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def _of_all_rows(key: str, value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return state that belongs to the weight as a whole, such as a count of steps.

    Raises:
        ConfigurationError: for state of the step's rows together.
    """
    if isinstance(value, Tensor) and value.ndim > 0:
        raise ConfigurationError(
            f"ClassShardedLoss: sample_rate with {type(optimizer).__name__}",
            expected="an optimizer whose state is one number per number of the weight",
            got=f"{key} of shape {tuple(value.shape)}, of this step's rows together",
            fix="Use one that treats each number by itself (SGD, Adam, ...), or sample_rate=1.",
        )
    return value
