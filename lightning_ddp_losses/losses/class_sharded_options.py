"""Options of `ClassShardedLoss` that cannot work, alone or together, refused when the loss is made or its classes are divided."""

from __future__ import annotations

from typing import Any

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.partial_fc import ClassSampler
from lightning_ddp_losses.losses.products import ProductChoice, refuse_products


def refuse_options(num_classes: int, chunk_size: int | None, sample_rate: float, *, is_regularized: bool) -> None:
    """Refuse a chunk or a share of the classes that cannot be.

    Raises:
        ConfigurationError: naming the option.
    """
    is_whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    if chunk_size is not None and not (is_whole and 1 <= chunk_size <= num_classes):
        raise ConfigurationError(
            "ClassShardedLoss: chunk_size", expected=f"1 to {num_classes} classes, or None", got=repr(chunk_size)
        )
    if not 0 < sample_rate <= 1:
        raise ConfigurationError(
            "ClassShardedLoss: sample_rate", expected="above 0 and at most 1", got=repr(sample_rate)
        )
    if sample_rate < 1 and is_regularized:
        raise ConfigurationError(
            "ClassShardedLoss: weight_regularizer",
            expected="none together with sample_rate below 1",
            got=f"one, and sample_rate={sample_rate}",
            fix="It would see the sampled classes only; use the optimizer's weight_decay, which the sampled rows get.",
        )


def refuse_products_with(title: str, head: Head, products: ProductChoice) -> None:
    """Refuse what is no choice of products, and tensor cores for logits that are not one product.

    Raises:
        ConfigurationError: naming what can be chosen.
    """
    refuse_products(title, products)
    if products == "bf16" and not head.is_one_product:
        raise ConfigurationError(
            f"{title}: products",
            expected="'float32' or 'auto', since the logits of this loss are not one number times cosines",
            got=repr(products),
        )


def refuse_with_replicas(title: str, loss: Any, sampler: ClassSampler | None) -> None:
    """Refuse options that would let the parts of the world differ, where each holds all classes.

    Raises:
        ConfigurationError: on every rank.
    """
    option: str
    expected: object
    got: object
    regularizer = getattr(loss, "embedding_regularizer", None)
    if regularizer is not None:
        option, expected, got = "embedding_regularizer", "none", type(regularizer).__name__
    elif sampler is not None:  # parts would draw other classes, and step other rows of what is to stay equal
        option, expected, got = "sample_rate", 1, sampler.rate
    else:
        return
    raise ConfigurationError(
        f"{title}: {option}",
        expected=f"{expected} where group= is a part of the ranks",
        got=got,
        fix="Divide the classes over all ranks (group=None).",
        collective=True,
    )
