"""Checks that reject invalid options, and invalid combinations of options, of `GlobalBatchLoss` and related losses at construction."""

from __future__ import annotations

from collections.abc import Sequence

from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.reducers import DoNothingReducer
from torch import nn

from lightning_ddp_losses.core.function_loss import FunctionLoss, name_of_loss
from lightning_ddp_losses.core.metrics_compat import torchmetrics_states
from lightning_ddp_losses.core.torch_compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.errors import ConfigurationError, expect, expect_count, expect_option, explained_by
from lightning_ddp_losses.losses import pml_registry
from lightning_ddp_losses.losses.products.forms import ProductChoice, refuse_products
from lightning_ddp_losses.losses.tiled import tiled_plan
from lightning_ddp_losses.losses.tiled.distances import is_one_product


def refuse_options(
    loss: nn.Module, *, mode: str, backward: str, tile_bytes: int | None, gather: str, products: ProductChoice
) -> None:
    """Refuse a loss that cannot be made global, and options that do not fit it.

    Raises:
        ConfigurationError: naming the option.
    """
    refuse_unfit(loss)
    title = f"GlobalBatchLoss({name_of_loss(loss)})"
    expect_option("GlobalBatchLoss: mode", mode, ("auto", *pml_registry.MODES))
    expect_option("GlobalBatchLoss: backward", backward, ("own_slice", "sum"))
    allowed = pml_registry.allowed_modes(pml_registry.labelled_loss(loss))
    if mode != "auto" and mode not in allowed:
        raise not_exact(title, mode, allowed)
    # tiles
    if tile_bytes is not None:
        expect_count(f"{title}: tile_bytes", tile_bytes)
    expect(
        gather == "all",
        f"{title}: gather",
        expected="'all'",
        got=repr(gather),
        fix="Leave it out: a rank holds the rows of all ranks, and `tile_bytes` bounds the distances between them. Only ClipLoss and "
        "SigLipLoss pass rows round a ring.",
    )
    refuse_products(title, products)
    expect(
        products in ("float32", "auto") or _has_tiles_of_products(pml_registry.labelled_loss(loss), mode),
        f"{title}: products",
        expected="'float32' or 'auto' for a loss that is not evaluated in tiles of products (cosine similarity or dot product)",
        got=repr(products),
        fix="Leave `products` out.",
    )


def refuse_unfit(loss: nn.Module) -> None:
    """Refuse a loss that cannot be made global."""
    _refuse_no_loss(loss)
    title = f"GlobalBatchLoss({name_of_loss(loss)})"
    # a loss that is reduced later cannot be made global here
    expect(
        not any(isinstance(getattr(module, "reducer", None), DoNothingReducer) for module in loss.modules()),
        f"{title}: reducer",
        expected="one that returns a number",
        got="DoNothingReducer, which returns a dict",
        fix="Give the loss the reducer that you apply afterwards.",
    )
    # rows that a part gathers once more would count W times
    for name, module in loss.named_modules():
        place = f" in {name}" if name else ""
        expect(
            not pml_registry.gathers_by_itself(module),
            title,
            expected="losses and miners that look at the rows they are given",
            got=f"{type(module).__name__}{place}, which gathers the rows of all ranks by itself",
            fix="Leave out one of the two wrappers.",
        )
        option = pml_registry.gathering_option(module)
        expect(
            not option,
            f"{title}: {option}{place}",
            expected="False in GlobalBatchLoss, which hands in the rows of all ranks",
            got="True",
            fix=f"Make the loss with {option}=False.",
        )
    expect(
        not isinstance(loss, TORCH_LOSS_TYPES) or getattr(loss, "reduction", "mean") != "none",
        f"{title}: reduction",
        expected="'mean' or 'sum'",
        got="'none'",
        fix="What is reduced later cannot be made global here; let the loss reduce.",
    )


def _refuse_no_loss(loss: object) -> None:
    """Refuse what is not a loss module, and a loss that takes texts in place of embeddings."""
    name = type(loss).__name__
    if isinstance(loss, type):
        got = f"the class {loss.__name__}"
        fix = f"Make an instance: GlobalBatchLoss({loss.__name__}(...))."
    elif isinstance(loss, FunctionLoss):
        _refuse_hidden_weights(loss.function)
        return
    elif not isinstance(loss, nn.Module):
        got = repr(loss)
        fix = "Give the function that computes the loss. A sum over rows goes to global_mean(sum, rows)."
    elif isinstance(loss, BaseMiner):
        got = f"the miner {name}"
        fix = f"Mine with GlobalBatchMiner({name}(...)), and pass its tuples to the loss as indices_tuple."
    elif torchmetrics_states(loss) is not None:
        got = f"the metric {name}"
        fix = f"Train with differentiable({name}(...)). Evaluate with synced({name}(...))."
    elif type(loss).__module__.startswith("sentence_transformers."):
        got = f"{name}, which embeds texts itself, so that every rank would embed those of all ranks"
        fix = (
            "Embed this rank's texts first: first, second = model(torch.cat([queries, answers])).chunk(2). Then call "
            "GlobalBatchLoss(SelfSupervisedLoss(NTXentLoss(temperature=1 / 20), symmetric=False))(first, second). "
            + explained_by("sentence_transformers")
        )
    else:
        return
    raise ConfigurationError(
        "GlobalBatchLoss: loss", expected="a loss module, or a function of tensors", got=got, fix=fix
    )


def _refuse_hidden_weights(function: object) -> None:
    """Refuse the forward of a module in place of the module, whose weights nobody would find."""
    module = getattr(function, "__self__", None)
    is_forward = getattr(function, "__name__", "") in ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
    expect(
        not (isinstance(module, nn.Module) and is_forward),
        "GlobalBatchLoss: loss",
        expected="the module itself",
        got=f"the method {name_of_loss(module)}.{getattr(function, '__name__', '')}",
        fix="Its weights would be found by nobody. Give the module: GlobalBatchLoss(module).",
    )


def _has_tiles_of_products(loss: nn.Module, mode: str) -> bool:
    is_tiled = mode in ("auto", "rows") and tiled_plan(loss) is not None
    return is_tiled and is_one_product(loss.distance)


def not_exact(title: str, mode: str, modes: Sequence[str]) -> ConfigurationError:
    """Return the error for a mode that is not exact for a loss."""
    return ConfigurationError(
        f"{title}: mode",
        expected=f"one that is exact for this loss as configured: {', '.join(modes)}",
        got=repr(mode),
        fix="Use mode='auto', or declare the class with register_row_separable / register_element_wise.",
    )
