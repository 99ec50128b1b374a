"""How the gradients of a model are reduced: a mean over ranks, a sum, or a sum divided by the user's number.

Gradients end as ``c * sum over R of g_r``. An exact value is made for a mean, ``c = 1 / |R|``. For any other ``c`` its gradient is
multiplied by ``1 / (c |R|)``, once, at the value. So losses, metrics and ``global_mean`` follow in the same way, over any ranks.

| what reduces | c | times |
|---|---|---|
| DistributedDataParallel, ``fully_shard``, a comm hook of torch | ``1 / |R|`` | 1 |
| a sum | 1 | ``1 / |R|`` |
| ``set_gradient_divide_factor(f)`` of FSDP2 | ``1 / f`` | ``f / |R|`` |

The reduction of the strategy's module comes first, then that of an accumulation window's model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, expect, listed


@dataclass(frozen=True)
class GradientReduction:
    """How gradients end.

    Attributes:
        divisor: The sum over the ranks is divided by it. None: unknown.
        ranks: The ranks R, of the world.
        source: Name of the reduction in messages.
    """

    divisor: float | None
    ranks: tuple[int, ...]
    source: str

    @property
    def scale(self) -> float:
        """Factor of the gradient of a value that is made for a mean. 1 if the divisor is unknown."""
        return 1.0 if self.divisor is None else self.divisor / len(self.ranks)

    def __str__(self) -> str:
        divided = "a comm hook" if self.divisor is None else f"a sum divided by {self.divisor:g}"
        return f"{divided} over {len(self.ranks)} ranks ({self.source})"


_current: ContextVar[GradientReduction | None] = ContextVar("reduction", default=None)


def current_reduction() -> GradientReduction | None:
    """Return how the strategy's module, or the window's model, is reduced. None if that is unknown."""
    return _current.get()


@contextlib.contextmanager
def reduced_by(reduction: GradientReduction | None) -> Iterator[None]:
    """Let the gradients of exact values inside the block make up for a reduction."""
    before = _current.set(reduction)
    try:
        yield
    finally:
        _current.reset(before)


def with_scaled_gradient(value: Tensor, scale: float | None = None) -> Tensor:
    """Return the same value. Its gradient is multiplied.

    Args:
        value: Value made for a mean over ranks.
        scale: Factor. None: that of the current reduction.
    """
    if scale is None:
        current = _current.get()
        scale = 1.0 if current is None else current.scale
    if scale == 1.0 or not value.requires_grad:
        return value
    passed = value.view_as(value)
    passed.register_hook(lambda grad: grad * scale)  # type: ignore[no-untyped-call]
    return passed


def gradient_reduction_of(modules: Iterable[tuple[str, nn.Module]]) -> GradientReduction | None:
    """Return how modules are reduced. None if neither DistributedDataParallel nor ``fully_shard`` is among them.

    Args:
        modules: Modules by path, as ``named_modules`` gives them.

    Raises:
        ConfigurationError: for modules that are reduced differently, or by what this backend cannot.
    """
    found: dict[str, GradientReduction] = {}
    for path, module in modules:
        if isinstance(module, DistributedDataParallel):
            ranks = process_groups.members(module.process_group)
            hook = next(iter(compat.foreign_comm_hooks(module)), None)
            divisor = float(len(ranks)) if hook is None else None
            source = "DistributedDataParallel" if hook is None else f"comm hook {hook} of DistributedDataParallel"
            found[path] = GradientReduction(divisor, ranks, source)
        elif isinstance(module, FSDPModule):
            for each in _of_sharded(module, path):
                found[path] = each
    first = next(iter(found.values()), None)
    if len({each.scale for each in found.values()}) > 1:
        shown = [f"`{path}` by {each.divisor:g}" for path, each in found.items() if each.divisor is not None]
        raise ConfigurationError(
            "gradients of the model",
            expected="one divisor for all parameters under an exact loss",
            got=listed(shown),
            fix="Call set_gradient_divide_factor with the same number on every module that fully_shard divides: it does not reach the "
            "modules inside.",
        )
    return first


def _of_sharded(module: FSDPModule, path: str) -> Iterator[GradientReduction]:
    """Yield how ``fully_shard`` reduces the parameters of one module."""
    for factor, forces_sum, mesh, own_ranks in compat.sharded_reductions(module):
        ranks = tuple(mesh.mesh.flatten().tolist())
        if factor is None:
            yield GradientReduction(float(len(ranks)), ranks, "fully_shard")
            continue
        call = f"set_gradient_divide_factor({factor:g})"
        if mesh.device_type == "cpu" and not forces_sum and factor != own_ranks:
            raise ConfigurationError(
                f"{call} of `{path}`",
                expected="a sum on the wire: gloo multiplies nothing",
                got="without set_force_sum_reduction_for_comms(True)",
                fix=f"Call set_force_sum_reduction_for_comms(True) on each module beside {call}.",
            )
        yield GradientReduction(float(factor), ranks, call)


def chosen_reduction(
    reduces: str | float, module: nn.Module | None, ranks: tuple[int, ...], *, exact_ranks: bool
) -> GradientReduction | None:
    """Return how a value's gradient will be reduced. None is a mean.

    Args:
        reduces: ``"auto"``, ``"mean"``, ``"sum"``, or the divisor of the sum.
        module: Model to ask if there is neither a strategy nor a window.
        ranks: Ranks with different rows.
        exact_ranks: The model must be reduced over all of them.

    Raises:
        ConfigurationError: for what cannot be read, and for another reduction than the model's.
    """
    if isinstance(reduces, str):
        is_known = reduces in ("auto", "mean", "sum")
    else:
        is_known = math.isfinite(reduces) and reduces > 0 and not isinstance(reduces, bool)
    expect(is_known, "reduces", expected='"auto", "mean", "sum", or a number above 0', got=repr(reduces))
    model = _current.get()
    if model is None and module is not None:
        model = gradient_reduction_of(module.named_modules())
    if model is not None and exact_ranks and not set(ranks) <= set(model.ranks):
        raise ConfigurationError(
            "mesh",
            expected=f"ranks over which the model is reduced, {list(model.ranks)} ({model.source})",
            got=f"{list(ranks)}",
            fix="Hand in the dimensions of the mesh over which rows differ; the model must be reduced over all of them.",
        )
    if reduces == "auto":
        if model is not None and model.divisor is None:
            raise ConfigurationError(
                "reduces",
                expected='"mean", "sum", or a number',
                got=f'"auto" with {model.source}, whose result nobody knows',
                fix='Say what the hook returns: reduces="mean" for the mean over ranks.',
            )
        return model
    over = ranks if model is None else model.ranks
    divisor = {"mean": float(len(over)), "sum": 1.0}.get(reduces, reduces) if isinstance(reduces, str) else reduces
    chosen = GradientReduction(float(divisor), over, f"reduces={reduces!r}")
    is_models = model is None or model.divisor is None or model.divisor == chosen.divisor
    expect(is_models, "reduces", expected=f"that of the model: {model}", got=str(chosen), fix='Take "auto".')
    return chosen
