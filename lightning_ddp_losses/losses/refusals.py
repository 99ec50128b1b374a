"""What `GlobalBatchLoss` refuses when it is built, and a mode that would change the gradient."""

from __future__ import annotations

from collections.abc import Sequence

from pytorch_metric_learning.reducers import DoNothingReducer
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import nn
from torch.nn.modules.loss import _Loss

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.pml_registry import MODES, allowed_modes
from lightning_ddp_losses.losses.tiled import TILED, plan_of

_PML_GATHERS = (DistributedLossWrapper, DistributedMinerWrapper)


def refuse_unfit(loss: nn.Module, mode: str, backward: str) -> None:
    """Refuse what cannot be made global, by name.

    Raises:
        ConfigurationError: no module, an unknown mode, a reduction that happens later, a mode that is not exact for the loss.
    """
    if not isinstance(loss, nn.Module):
        raise ConfigurationError("GlobalBatchLoss: loss", expected="a torch.nn.Module", got=repr(loss))
    if mode not in ("auto", *MODES):
        raise ConfigurationError("GlobalBatchLoss: mode", expected=f"'auto' or one of {MODES}", got=repr(mode))
    if backward not in ("own_slice", "sum"):
        raise ConfigurationError("GlobalBatchLoss: backward", expected="'own_slice' or 'sum'", got=repr(backward))
    inner = [m for m in loss.modules() if isinstance(getattr(m, "reducer", None), DoNothingReducer)]
    if inner:
        raise ConfigurationError(
            f"GlobalBatchLoss({type(loss).__name__}): reducer",
            expected="one that returns a number",
            got="DoNothingReducer, which returns a dict",
            fix="Give the loss the reducer that you apply afterwards.",
        )
    _refuse_global_parts(loss)
    if isinstance(loss, _Loss) and getattr(loss, "reduction", "mean") == "none":
        raise ConfigurationError(
            f"GlobalBatchLoss({type(loss).__name__}): reduction",
            expected="'mean' or 'sum'",
            got="'none'",
            fix="What is reduced later cannot be made global here; let the loss reduce.",
        )
    if mode != "auto" and mode not in allowed_modes(loss):
        raise not_exact(f"GlobalBatchLoss({type(loss).__name__})", mode, allowed_modes(loss))


def _refuse_global_parts(loss: nn.Module) -> None:
    """Rows that were gathered may not be gathered once more: every row would count W times."""
    for name, module in loss.named_modules():
        if getattr(module, "sees_global_batch", False) or isinstance(module, _PML_GATHERS):
            raise ConfigurationError(
                f"GlobalBatchLoss({type(loss).__name__})",
                expected="losses and miners that look at the rows they are given",
                got=f"{type(module).__name__}{f' in {name}' if name else ''}, which gathers the rows of all ranks by itself",
                fix="Leave out one of the two wrappers.",
            )


def refuse_tiles(loss: nn.Module, mode: str, tile_bytes: int | None, gather: str) -> None:
    """Refuse a tile of no size, and a ring that the loss cannot go round.

    Raises:
        ConfigurationError: with what, expected, got and what to do.
    """
    title = f"GlobalBatchLoss({type(loss).__name__})"
    if tile_bytes is not None and (isinstance(tile_bytes, bool) or not isinstance(tile_bytes, int) or tile_bytes < 1):
        raise ConfigurationError(
            f"{title}: tile_bytes", expected="a positive number of bytes, or None", got=repr(tile_bytes)
        )
    refuse_gather(title, gather)
    if gather == "ring":
        plan = plan_of(loss) if mode in ("auto", "rows") and allowed_modes(loss)[0] == "rows" else None
        if plan is None or not plan.symmetric or getattr(loss, "embedding_regularizer", None) is not None:
            names = sorted(cls.__name__ for cls, formula in TILED.items() if formula.symmetric)
            raise no_ring(
                title, f"one of {', '.join(names)}, mode 'rows', without regulariser", "another configuration"
            )


def refuse_gather(title: str, gather: str) -> None:
    """Refuse a way for rows to travel that is not known.

    Raises:
        ConfigurationError: with what, expected and got.
    """
    if gather not in ("all", "ring"):
        raise ConfigurationError(f"{title}: gather", expected="'all' or 'ring'", got=repr(gather))


def no_ring(title: str, expected: object, got: object) -> ConfigurationError:
    """The error for rows that cannot be passed on."""
    return ConfigurationError(f"{title}: gather='ring'", expected=expected, got=got, fix="Use gather='all'.")


def not_exact(title: str, mode: str, modes: Sequence[str]) -> ConfigurationError:
    """The error for a mode that is not exact for a loss."""
    return ConfigurationError(
        f"{title}: mode",
        expected=f"one that is exact for this loss as configured: {', '.join(modes)}",
        got=repr(mode),
        fix="Use mode='auto', or declare the class with register_row_separable / register_element_wise.",
    )
