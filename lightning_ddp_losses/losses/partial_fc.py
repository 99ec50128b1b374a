"""Sampled negatives for a class-sharded softmax, and an optimizer that steps only the rows that were looked at.

As in PartialFC (An et al. 2021, arXiv:2010.05222): each rank looks at the classes of the batch's rows that it holds, filled up with random
others. A dense optimizer would let momentum and weight decay move the other rows too; so it is handed the sampled rows of
weight and state for the length of its step.

Legend: ``c`` classes held, ``K`` weight rows per class, ``G`` rows of the batch.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_ddp_losses.distributed.shard import ClassShard
    from lightning_ddp_losses.losses.class_heads import Head


class ClassSampler:
    """Draws the classes of a step.

    Args:
        rate: Share of the held classes that a step looks at; never fewer than the batch's own.
        unbiased: Weigh each sampled negative by one over the probability with which it was drawn, so that the sum of
            exponentials is right in expectation.
    """

    def __init__(self, rate: float, unbiased: bool) -> None:
        self.rate, self.unbiased = rate, unbiased
        self.chosen: Tensor | None = None
        """Classes of the last step, as positions among those held, ascending."""

    def draw(self, labels: Tensor, classes: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose among the classes held.

        Args:
            labels: (G,) positions among the classes held, -1 for others.
            classes: c.
            seed: Of this step and rank.

        Returns:
            The classes chosen, ascending; the labels as positions among them; what to add to their logits, or None.
        """
        positive = torch.zeros(classes, dtype=torch.bool, device=labels.device)
        positive[labels[labels >= 0]] = True
        generator = torch.Generator().manual_seed(seed)
        keys = torch.rand(classes, generator=generator).to(labels.device)
        keys[positive] = 2.0
        certain = int(positive.sum())
        wanted = min(classes, max(math.ceil(self.rate * classes), certain))
        chosen = torch.topk(keys, wanted).indices.sort().values
        place = torch.full((classes,), -1, dtype=torch.long, device=labels.device)
        place[chosen] = torch.arange(wanted, device=labels.device)
        self.chosen = chosen
        log_weight = None
        if self.unbiased and wanted > certain:
            correction = math.log((classes - certain) / (wanted - certain))
            log_weight = torch.where(positive[chosen], 0.0, correction)
        own = labels >= 0
        positions = torch.full_like(labels, -1)
        positions[own] = place[labels[own]]
        return chosen, positions, log_weight


class SampledSteps:
    """Lets an optimizer see only the sampled rows of a weight, and of its own state for it, while it steps.

    Args:
        parameter: The weight.
        touched: The weight rows that have a gradient, as a mask along the class dimension.
        forget: Called when a step is done.
    """

    def __init__(
        self, parameter: nn.Parameter, touched: Callable[[], Tensor | None], forget: Callable[[], None]
    ) -> None:
        self._parameter, self._touched, self._forget = parameter, touched, forget
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._part: nn.Parameter | None = None
        self._rows = torch.empty(0, dtype=torch.long)

    def attach(self, optimizer: torch.optim.Optimizer) -> bool:
        """Install on an optimizer that holds the weight; False for another."""
        if all(p is not self._parameter for group in optimizer.param_groups for p in group["params"]):
            return False
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(lambda opt, *_: self._leave(opt))
        return True

    def holds(self, optimizer: Any) -> bool:
        """Whether this is the optimizer that it was attached to."""
        return self._optimizer is not None and self._optimizer() is optimizer

    def _before(self, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hand over the rows; where forward and backward are yet to come, in a closure, after that."""
        positional = len(args) > 1
        closure = args[1] if positional else kwargs.get("closure")
        if closure is None:
            self._enter(optimizer)
            return args, kwargs

        def then_enter() -> Any:
            result = closure()
            self._enter(optimizer)
            return result

        if positional:
            return (args[0], then_enter, *args[2:]), kwargs
        return args, {**kwargs, "closure": then_enter}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the loss has other parameters, which no optimizer holds yet

    def _enter(self, optimizer: torch.optim.Optimizer) -> None:
        whole, mask = self._parameter, self._touched()
        if whole.grad is None or mask is None:
            return
        dim = self._dim()
        self._rows = mask.nonzero().squeeze(1)
        part = self._part = nn.Parameter(whole.detach().index_select(dim, self._rows))
        part.grad = whole.grad.index_select(dim, self._rows)
        self._exchange(optimizer, whole, part)
        state = optimizer.state.get(whole, {})
        if state:
            optimizer.state[part] = {
                key: value.index_select(dim, self._rows) if _is_like(value, whole) else value
                for key, value in state.items()
            }

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        whole, part = self._parameter, self._part
        if part is None:
            return
        dim = self._dim()
        self._exchange(optimizer, part, whole)
        with torch.no_grad():
            whole.index_copy_(dim, self._rows, part)
            state = optimizer.state[whole]
            for key, value in optimizer.state.pop(part, {}).items():
                if not _is_like(value, part):
                    state[key] = _of_no_row(key, value, optimizer)
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(whole, dtype=value.dtype)
                state[key].index_copy_(dim, self._rows, value)
        self._part = None
        self._forget()

    def _dim(self) -> int:
        shard = shard_of(self._parameter)
        assert shard is not None
        return shard.dim

    @staticmethod
    def _exchange(optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]


class SampledClasses:
    """What a class-sharded loss does where a step looks at some of its classes only."""

    if TYPE_CHECKING:
        _head: Head
        shard: ClassShard

        @property
        def weight(self) -> nn.Parameter:
            """This rank's."""

    def _set_up_sampling(self, rate: float, unbiased: bool) -> None:
        self.sampler = ClassSampler(rate, unbiased) if rate < 1 else None
        self._attached: SampledSteps | None = None
        self._touched: Tensor | None = None
        self._touched_in = -1
        self._draws = 0

    def attach(self, optimizer: Any) -> None:
        """Let an optimizer step only the rows that were looked at; needed with ``sample_rate`` below 1."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        if self.sampler is None or (self._attached is not None and self._attached.holds(inner)):
            return
        steps = SampledSteps(self.weight, self._touched_rows, self._forget)
        if steps.attach(inner):
            self._attached = steps

    def _forget(self) -> None:
        self._touched = None

    def _note_touched(self, chosen: Tensor) -> None:
        """A backward gave these classes a gradient; what earlier ones touched counts until the gradient is dropped."""
        backward = torch._C._current_graph_task_id()
        if self._touched is None or (self.weight.grad is None and backward != self._touched_in):
            self._touched = torch.zeros(self.shard.classes, dtype=torch.bool, device=chosen.device)
        self._touched[chosen] = True
        self._touched_in = backward

    def _touched_rows(self) -> Tensor | None:
        return None if self._touched is None else self._touched.repeat_interleave(self._head.per_class)

    @property
    def _samples(self) -> ClassSampler | None:
        # what is only looked at, in validation, is looked at whole
        return self.sampler if torch.is_grad_enabled() else None

    def _draw(self, sampler: ClassSampler, labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """As ``ClassSampler.draw``, from a seed of this rank and step."""
        self._draws += 1
        text = f"{torch.initial_seed()} {self.shard.start} {self._draws}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
        return sampler.draw(labels, self.shard.classes, seed)


def _of_no_row(key: str, value: Any, optimizer: torch.optim.Optimizer) -> Any:
    """State that belongs to the weight as a whole, such as a count of steps."""
    if isinstance(value, Tensor) and value.ndim > 0:
        raise ConfigurationError(
            f"ClassShardedLoss: sample_rate with {type(optimizer).__name__}",
            expected="an optimizer whose state is one number per number of the weight",
            got=f"{key} of shape {tuple(value.shape)}, of this step's rows together",
            fix="Use one that treats each number by itself (SGD, Adam, ...), or sample_rate=1.",
        )
    return value


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def refuse_options(classes: int, chunk_size: int | None, sample_rate: float, *, regularised: bool) -> None:
    """Refuse a chunk or a share of the classes that cannot be.

    Raises:
        ConfigurationError: naming the option.
    """
    whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (whole and 1 <= chunk_size <= classes):
        raise ConfigurationError(
            "ClassShardedLoss: chunk_size", expected=f"1 to {classes} classes, or None", got=repr(chunk_size)
        )
    if not 0 < sample_rate <= 1:
        raise ConfigurationError(
            "ClassShardedLoss: sample_rate", expected="above 0 and at most 1", got=repr(sample_rate)
        )
    if sample_rate < 1 and regularised:
        raise ConfigurationError(
            "ClassShardedLoss: weight_regularizer",
            expected="none together with sample_rate below 1",
            got=f"one, and sample_rate={sample_rate}",
            fix="It would see the sampled classes only; use the optimizer's weight_decay, which the sampled rows get.",
        )
