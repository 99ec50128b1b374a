"""Switches that separate causes: runs without random draws, batch statistics, low precision, or exactness of the last bit.

Counterfactual runs switch the first ones off on the ranks and in one process. Perturbed runs move everything by one rounding
unit, which measures how far rounding alone moves each gradient.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.audit.replay import map_batch_tensors
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.random_state import devices_in_use, global_generators, random_source
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.losses.products import ProductChoice, rounding_of

ABLATIONS = {
    "randomness": "every random draw inside a step replaced by its mean (dropout: identity; noise: zero)",
    "batch_norm": "batch norm normalises with its running statistics",
    "precision": "float64",
    "uneven": "the same rows, divided evenly among the ranks",
}
"""Parts that can be switched off, and their replacements."""

# ---------------------------------------------------------------------- randomness


class MeanDraws(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random draws by their mean, and so dropout by the identity. Random integers stay random."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return the mean of its draws."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        mean = _MEANS.get(func)
        if mean is None:
            return func(*args, **kwargs)
        # the tensor to fill, or the operator's new one
        in_place = compat.operator_schema(func).name.endswith("_")
        made = args[0] if in_place else func(*args, **kwargs)
        arguments = compat.operator_schema(func).arguments
        given = {argument.name: argument.default_value for argument in arguments}
        given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        return made.copy_(torch.as_tensor(mean(given)).to(made))


_aten = torch.ops.aten
# operators that draw, with the mean of each as a function of its arguments
_MEANS: dict[Any, Callable[[dict[str, Any]], Any]] = {
    _aten.bernoulli_.float: itemgetter("p"),
    _aten.bernoulli_.Tensor: itemgetter("p"),
    _aten.bernoulli.default: itemgetter("self"),
    _aten.bernoulli.p: itemgetter("p"),
    _aten.normal_.default: itemgetter("mean"),
    _aten.uniform_.default: lambda given: (given["from"] + given["to"]) / 2,
    _aten.exponential_.default: lambda given: 1 / given["lambd"],
    _aten.normal.float_float: itemgetter("mean"),
    _aten.normal.Tensor_float: itemgetter("mean"),
    _aten.normal.Tensor_Tensor: itemgetter("mean"),
    **dict.fromkeys((_aten.randn.default, _aten.randn.generator, _aten.randn_like.default), lambda given: 0.0),
    **dict.fromkeys((_aten.rand.default, _aten.rand.generator, _aten.rand_like.default), lambda given: 0.5),
}


def rng_digest() -> str:
    """Digest the random states that a training step may draw from: two that differ mean that something was drawn."""
    found = hashlib.blake2b(digest_size=12)
    for generator in global_generators(devices_in_use()):
        source = random_source(generator)
        assert source is not None
        state = source.get_state()
        found.update(state.numpy().data if isinstance(state, Tensor) else pickle.dumps(state))
    return found.hexdigest()


# ---------------------------------------------------------------------- batch statistics


def batch_norm_to_eval_mode_(module: nn.Module) -> None:
    """Let batch norm use its running statistics, and leave them alone."""
    for child in module.modules():
        if isinstance(child, compat.BATCH_NORM_TYPES):
            child.eval()


# ---------------------------------------------------------------------- rounding

_WITH_PRODUCTS = (ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss)
_ROUNDOFF = {"64": 2.0**-53, "32": 2.0**-24, "16": 2.0**-11, "bf16": 2.0**-8}
_PIECE = 1 << 20  # elements that are perturbed at a time


def unit_roundoff(module: nn.Module, precision: str) -> float:
    """Return the largest relative rounding error of one operation.

    Args:
        module: Its parameters' dtypes count where ``precision`` is that of plain float32 training.
        precision: Lightning's name (``"bf16-mixed"``).
    """
    name = precision.split("-", maxsplit=1)[0]
    if name not in _ROUNDOFF:
        name = "bf16"  # 8-bit floats and other transformer precisions: at most as good
    if name != "32":
        return _ROUNDOFF[name]
    of_parameters = [torch.finfo(p.dtype).eps / 2 for p in module.parameters() if p.is_floating_point()]
    unit = max(of_parameters, default=_ROUNDOFF[name])
    # float64 is never multiplied in less
    if unit < _ROUNDOFF["32"]:
        return unit
    return max([unit, *map(rounding_of, product_choices(module))])


def product_choices(module: nn.Module) -> list[ProductChoice]:
    """Return how the losses inside a module multiply rows, if that is less exact than float32, sorted and without repeats."""
    found: set[ProductChoice] = {child.products for child in module.modules() if isinstance(child, _WITH_PRODUCTS)}
    return sorted(found - {"float32", "auto"})


@torch.no_grad()
def _perturb_(tensor: Tensor, unit: float, generator: torch.Generator) -> None:
    """Move each element by one rounding unit, up or down at random, a piece at a time."""
    eps = torch.finfo(tensor.dtype).eps
    step = eps if unit <= eps / 2 else unit  # a factor of 1 + eps / 2 would round to 1
    pieces: tuple[Tensor, ...] = (tensor,)
    if tensor.is_contiguous():
        pieces = tensor.view(-1).split(_PIECE)  # type: ignore[no-untyped-call]
    for piece in pieces:
        bits = torch.randint(0, 2, piece.shape, generator=generator, dtype=torch.int8).to(piece.device)
        signs = (2 * bits - 1).to(piece.dtype)
        piece.mul_(signs.mul_(step).add_(1))


def perturb_module_(module: nn.Module, unit: float, seed: int) -> None:
    """Move each parameter by one rounding unit, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            _perturb_(parameter, unit, generator)


def perturb_batch(batch: Any, unit: float, seed: int) -> Any:
    """Return the batch with its floating tensors moved by one rounding unit."""
    generator = torch.Generator().manual_seed(seed)

    def perturbed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        moved = tensor.detach().clone()
        _perturb_(moved, unit, generator)
        return moved

    return map_batch_tensors(batch, perturbed)
