"""The plan of a class-sharded loss's call: rules that follow from kinds of arguments and weights, and from options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import precision, torch_compat
from lightning_ddp_losses.distributed.gathered_batch import BatchLayout
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.partial_fc import ClassSampler
from lightning_ddp_losses.losses.products.forms import ProductChoice, ProductForm, choose_form
from lightning_ddp_losses.losses.tuples import GlobalTuples

NAMED = "rows named by the miner"
"""Name of the numbers of times in the gather."""


@dataclass(frozen=True)
class ShardPlan:
    """Rules for the calls of one signature.

    Attributes:
        form: How rows and weight rows are multiplied.
        given_dtype: bfloat16 or float16 if the embeddings have this dtype, in which they are then sent. If None, they are sent in the dtype
            of the computation.
        is_full: True if the call already computes in its dtype, without entering a context or casting.
        trained: True if the loss has a parameter that requires a gradient, and a graph is recorded.
        layout: Layout of the gathered rows, with values that must be equal on all ranks.
    """

    form: ProductForm
    given_dtype: torch.dtype | None
    is_full: bool
    trained: bool
    layout: BatchLayout

    @classmethod
    def of(
        cls,
        title: str,
        module: nn.Module,
        head: Head,
        products: ProductChoice,
        given: tuple[Tensor, Tensor, Any],
        parameters: Sequence[Tensor],
        must_match: Mapping[str, object],
    ) -> ShardPlan:
        """Make the plan of a call.

        Args:
            title: Name of the loss in messages.
            module: The loss.
            head: Its head.
            products: Its option.
            given: Embeddings, labels and a miner's tuples.
            parameters: Parameters of the loss, its weight first.
            must_match: Values that must be equal on all ranks.

        Raises:
            ConfigurationError: for products that the device does not have.
        """
        embeddings, labels, indices_tuple = given
        form: ProductForm = "float32"
        if head.is_one_product:
            form = choose_form(title, products, [embeddings, parameters[0]])
        dtype = precision.compute_dtype([*parameters, embeddings])
        # a miner's tuples are not looked into
        is_full = (
            indices_tuple is None
            and not torch_compat.is_any_autocast_on()
            and precision.is_full(dtype, [], [*parameters, embeddings, labels])
            and not precision.narrow_buffers(precision.modules_of(module), dtype)
        )
        trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        # the rows in the form in which they are gathered
        rows = {"embeddings": embeddings.detach()[:0].to(dtype), "labels": labels.detach()[:0].to(torch.int64)}
        if indices_tuple is not None and not isinstance(indices_tuple, GlobalTuples):
            rows[NAMED] = rows["labels"]
        options = {**must_match, "products": f"{products}, here {form}", "miner": type(indices_tuple).__name__}
        layout = BatchLayout.of(title, rows, options)
        return cls(form, precision.narrow_dtype([embeddings]), is_full, trained, layout)


def described_sampling(sampler: ClassSampler | None) -> str:
    """Return how a call samples classes, as text that ranks compare."""
    return "none" if sampler is None else f"{sampler.rate} {sampler.unbiased}"
