"""`hf_loss`: a loss of one process for Hugging Face's ``Trainer``, under DDP and accumulation.

The Trainer multiplies the result of ``compute_loss_func`` by the number of processes if it has summed their items. DDP then takes the mean
over ranks. ``hf_loss`` divides by that factor beforehand. The first backward reveals the factor that the Trainer has applied, and an
unexpected factor is an error.

| ``average_tokens_across_devices`` | ``num_items_in_batch`` | factor |
|---|---|---|
| True | items of all ranks and micro-batches | number of processes |
| False | items of all micro-batches of this rank | 1 |
| either, without labels that can be counted | None | 1 |

Legend: ``W`` ranks, ``f`` the factor. An item is a label that is not -100.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from lightning_ddp_losses.core.torch_compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.global_values import recent_global_values
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.integrations import warn_untested
from lightning_ddp_losses.losses.partial_sums import global_mean

IGNORED = -100  # the label that the Trainer does not count

warn_untested("transformers", "The first backward decides: a factor that hf_loss does not expect is an error there.")


def hf_loss(
    loss_or_sum: Callable[[Any, Any], Tensor], count: Callable[[Any, Any], float | Tensor] | None = None
) -> TrainerLoss:
    """Return a loss for ``Trainer(compute_loss_func=loss, callbacks=[loss])``. It has to be passed in both places.

    Equivalent to: in one process, the sum over the rows of all ranks and micro-batches, divided by the number of items in them.

    Args:
        loss_or_sum: Called with the model's outputs and the labels. It returns the sum over this micro-batch, 0-dim, or the value of one
            of this package's losses over all ranks (``GlobalBatchLoss``, ``ClipLoss``), which is used unchanged.
        count: Called with the same arguments. It returns the divisor of this micro-batch's sum. If None, labels other than -100 are
            counted, as by the Trainer. Under accumulation it must be None.

    Returns:
        The loss and callback. The value that the Trainer logs is the global loss, equal on every rank.

    Communication: one handshake per micro-batch, and a gather on an accelerator.

    Raises:
        ConfigurationError: without the callback, for a loss of ``torch.nn`` that is not a sum, for trainable parameters of a loss that are
            not part of the model, under accumulation for a loss over all ranks and for ``count``, and in the first backward if the Trainer
            has applied a different factor.

    Example:
        >>> from torch.nn.functional import cross_entropy
        >>> loss = hf_loss(lambda outputs, labels: cross_entropy(outputs["logits"], labels, reduction="sum"))
    """
    if isinstance(loss_or_sum, TORCH_LOSS_TYPES):
        expect(
            loss_or_sum.reduction == "sum",
            f"hf_loss({type(loss_or_sum).__name__})",
            expected="reduction='sum'",
            got=f"reduction={loss_or_sum.reduction!r}",
            fix="The sum is divided by the items of all ranks and micro-batches.",
        )
    return TrainerLoss(loss_or_sum, count)


class TrainerLoss(TrainerCallback):  # type: ignore[misc]  # no types there
    """Computes the loss of a Trainer, and receives the Trainer's arguments as a callback. ``hf_loss`` creates it."""

    def __init__(
        self, loss_or_sum: Callable[[Any, Any], Tensor], count: Callable[[Any, Any], float | Tensor] | None
    ) -> None:
        self._loss, self._count = loss_or_sum, count
        self._args: Any = None
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._is_verified = False

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Store the arguments of the Trainer."""
        self._args = args

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reject parameters of the loss that the model does not contain. The Trainer would neither train nor reduce them."""
        self._optimizer, self._is_verified = kwargs.get("optimizer"), False
        self._model = kwargs.get("model")
        if not isinstance(self._loss, nn.Module):
            return
        known = set(map(id, kwargs["model"].parameters()))
        alone = [name for name, p in self._loss.named_parameters() if p.requires_grad and id(p) not in known]
        expect(
            not alone,
            f"hf_loss({type(self._loss).__name__})",
            expected="trainable parameters that the model holds",
            got=", ".join(alone),
            fix="Make the loss a submodule of the model, so that the Trainer gives them to the optimizer and to DDP.",
        )

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: float | Tensor | None = None) -> Tensor:
        """Return the loss that the Trainer then multiplies by its factor and logs."""
        expect(
            self._args is not None,
            "hf_loss",
            expected="Trainer(compute_loss_func=loss, callbacks=[loss])",
            got="compute_loss_func alone, so the arguments of the Trainer are unknown",
            fix="Pass the object as both.",
        )
        value = self._loss(outputs, labels)
        # the value of one of our losses is recorded when it is computed
        if any(value.data_ptr() == known.data_ptr() for known in recent_global_values()):
            self._refuse_accumulation(
                "a loss that compares the rows of one batch",
                "With gradient_accumulation_steps=1 and a larger batch, microbatched(model, rows) runs the encoder in pieces.",
            )
        else:
            own_count = self._own_count(outputs, labels, num_items_in_batch)
            # the Trainer averages over ranks. A model that fully_shard reduces in another way is an error
            value = global_mean(value, own_count, name="hf_loss", reduces="mean", module=self._model)
        factor = 1
        if self._args.average_tokens_across_devices and num_items_in_batch is not None:
            factor = process_groups.world_size()
        value = value / factor
        if value.requires_grad and not self._is_verified:
            value.register_hook(partial(self._verify, factor))  # type: ignore[no-untyped-call]
        return value

    def _own_count(self, outputs: Any, labels: Any, num_items: float | Tensor | None) -> float | Tensor:
        """Return this rank's part of the divisor."""
        if self._count is not None:
            self._refuse_accumulation(
                "count=, which is not known before the last micro-batch",
                "Leave it out: labels that are not -100 count.",
            )
            return self._count(outputs, labels)
        if num_items is not None:
            # items of all ranks are counted once
            is_other = self._args.average_tokens_across_devices and process_groups.rank() > 0
            return 0.0 if is_other else float(num_items)
        is_tensor, got = isinstance(labels, Tensor), type(labels).__name__
        expect(is_tensor, "hf_loss: labels", expected="a tensor", got=got, fix="Give count=.", error=InputError)
        self._refuse_accumulation("no num_items_in_batch", "Name the labels `labels`, which the Trainer counts.")
        return (labels != IGNORED).sum()  # type: ignore[no-any-return]

    def _refuse_accumulation(self, got: str, fix: str) -> None:
        steps = self._args.gradient_accumulation_steps
        is_single = steps == 1 or not torch.is_grad_enabled()
        expect(is_single, f"hf_loss: gradient_accumulation_steps={steps}", expected="1", got=got, fix=fix)

    def _verify(self, factor: int, grad: Tensor) -> None:
        """Compare the factor applied by the Trainer with the expected one, once."""
        scaler = getattr(self._optimizer, "scaler", None)
        applied = grad.item() / (1.0 if scaler is None else scaler.get_scale())
        self._is_verified = True
        if not math.isclose(applied, factor, rel_tol=1e-6):
            raise ConfigurationError(
                "hf_loss: factor that the Trainer has applied to the loss",
                expected=factor,
                got=f"{applied:g}",
                fix="A Trainer that overrides compute_loss or training_step, loss_is_scaled_for_ga=False, several GPUs in one process or "
                "another release of transformers multiplies the loss otherwise. Nothing was reduced.",
            )
