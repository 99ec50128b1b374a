"""Options of `GlobalBatchLoss` and of its relatives that cannot work, alone or together, refused when a loss is wrapped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_ddp_losses.core.compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.errors import ConfigurationError, expect
from lightning_ddp_losses.losses.call_arguments import labelled_loss
from lightning_ddp_losses.losses.pml_registry import (
    MODES,
    allowed_modes,
    gathers_by_itself,
    returns_no_number,
)
from lightning_ddp_losses.losses.products import ProductChoice, refuse_products
from lightning_ddp_losses.losses.tiled import tiled_plan
from lightning_ddp_losses.losses.tiled.distances import is_one_product


def refuse_unfit(loss: nn.Module, mode: str, backward: str) -> None:
    """Refuse what cannot be made global, by name.

    Raises:
        ConfigurationError: no module, an unknown mode, a reduction that happens later, a mode that is not exact for the loss.
    """
    if not isinstance(loss, nn.Module):
        raise ConfigurationError("GlobalBatchLoss: loss", expected="a torch.nn.Module", got=repr(loss))
    title = f"GlobalBatchLoss({type(loss).__name__})"
    if mode not in ("auto", *MODES):
        raise ConfigurationError("GlobalBatchLoss: mode", expected=f"'auto' or one of {MODES}", got=repr(mode))
    if backward not in ("own_slice", "sum"):
        raise ConfigurationError("GlobalBatchLoss: backward", expected="'own_slice' or 'sum'", got=repr(backward))
    # what is reduced later cannot be made global here
    if any(returns_no_number(getattr(module, "reducer", None)) for module in loss.modules()):
        raise ConfigurationError(
            f"{title}: reducer",
            expected="one that returns a number",
            got="DoNothingReducer, which returns a dict",
            fix="Give the loss the reducer that you apply afterwards.",
        )
    _refuse_global_parts(loss)
    if isinstance(loss, TORCH_LOSS_TYPES) and getattr(loss, "reduction", "mean") == "none":
        raise ConfigurationError(
            f"{title}: reduction",
            expected="'mean' or 'sum'",
            got="'none'",
            fix="What is reduced later cannot be made global here; let the loss reduce.",
        )
    allowed = allowed_modes(labelled_loss(loss))
    if mode != "auto" and mode not in allowed:
        raise not_exact(title, mode, allowed)


def _refuse_global_parts(loss: nn.Module) -> None:
    """Refuse parts that gather by themselves: rows gathered once more would count W times."""
    for name, module in loss.named_modules():
        if gathers_by_itself(module):
            place = f" in {name}" if name else ""
            raise ConfigurationError(
                f"GlobalBatchLoss({type(loss).__name__})",
                expected="losses and miners that look at the rows they are given",
                got=f"{type(module).__name__}{place}, which gathers the rows of all ranks by itself",
                fix="Leave out one of the two wrappers.",
            )


def refuse_tiles(loss: nn.Module, tile_bytes: int | None, gather: str) -> None:
    """Refuse a tile of no size, and rows that travel in a ring, as those of the two-tower losses can."""
    title = f"GlobalBatchLoss({type(loss).__name__})"
    if tile_bytes is not None and (isinstance(tile_bytes, bool) or not isinstance(tile_bytes, int) or tile_bytes < 1):
        raise ConfigurationError(
            f"{title}: tile_bytes", expected="a positive number of bytes, or None", got=repr(tile_bytes)
        )
    expect(
        gather == "all",
        f"{title}: gather",
        expected="'all'",
        got=repr(gather),
        fix="Leave it out: a rank holds the rows of all ranks, and `tile_bytes` bounds the distances between them. Only ClipLoss and "
        "SigLipLoss pass rows round a ring.",
    )


def refuse_tensor_cores(loss: nn.Module, mode: str, products: ProductChoice) -> None:
    """Refuse tensor cores for a loss whose tiles are not products of rows."""
    title = f"GlobalBatchLoss({type(loss).__name__})"
    refuse_products(title, products)
    if products in ("float32", "auto"):
        return
    inner = labelled_loss(loss)
    is_tiled = mode in ("auto", "rows") and tiled_plan(inner) is not None
    if not is_tiled or not is_one_product(inner.distance):
        raise ConfigurationError(
            f"{title}: products",
            expected="'float32' or 'auto' for a loss that is not evaluated in tiles of products (cosine similarity or dot product)",
            got=repr(products),
        )


def not_exact(title: str, mode: str, modes: Sequence[str]) -> ConfigurationError:
    """Return the error for a mode that is not exact for a loss."""
    return ConfigurationError(
        f"{title}: mode",
        expected=f"one that is exact for this loss as configured: {', '.join(modes)}",
        got=repr(mode),
        fix="Use mode='auto', or declare the class with register_row_separable / register_element_wise.",
    )
