"""The plan of a class-sharded loss's call: rules that follow from kinds of arguments and weights, and from options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import compat, precision
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.partial_fc import ClassSampler
from lightning_ddp_losses.losses.products import ProductChoice, ProductForm, choose_form


@dataclass(frozen=True)
class ShardPlan:
    """Rules for the calls of one signature.

    Attributes:
        form: How rows and weight rows are multiplied.
        given_dtype: bfloat16 or float16 if the embeddings have it. They travel in it. None: they travel in the dtype of the computation.
        is_full: The call computes in its dtype already: no context has to be entered, and nothing cast.
        trained: True if the loss has a parameter that needs a gradient, and a graph is recorded.
        must_match: Values that must be equal on all ranks, as text, by name.
    """

    form: ProductForm
    given_dtype: torch.dtype | None
    is_full: bool
    trained: bool
    must_match: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        title: str,
        module: nn.Module,
        head: Head,
        products: ProductChoice,
        given: tuple[Tensor, Tensor, Any],
        parameters: Sequence[Tensor],
    ) -> ShardPlan:
        """Make the plan of a call.

        Args:
            title: Name of the loss in messages.
            module: The loss.
            head: Its head.
            products: Its option.
            given: Embeddings, labels and a miner's tuples.
            parameters: Parameters of the loss, its weight first.

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
            and not compat.is_any_autocast_on()
            and precision.is_full(dtype, [], [*parameters, embeddings, labels])
            and not precision.narrow_buffers(precision.modules_of(module), dtype)
        )
        trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        must_match = {"products": f"{products}, here {form}", "miner": type(indices_tuple).__name__}
        given_dtype = precision.narrow_dtype([embeddings])
        return cls(form, given_dtype, is_full, trained, tuple(must_match.items()))


def described_sampling(sampler: ClassSampler | None) -> str:
    """Return how a call samples classes, as text that ranks compare."""
    return "none" if sampler is None else f"{sampler.rate} {sampler.unbiased}"
