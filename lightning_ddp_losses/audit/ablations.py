"""What a run can be without, to separate causes: random draws, batch statistics, precision, exactness of the last bit.

Counterfactual runs switch the first ones off in ranks and in one process alike; perturbed runs move everything by one rounding
unit, which measures how far rounding alone moves each gradient.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
"""What can be switched off, and what is then there instead."""

# ---------------------------------------------------------------------- randomness

Reader = Callable[[str], Any]  # reads an operator's argument by name
Mean = Callable[[Reader], Any]  # the mean of what an operator draws


class MeanDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random draws by their mean, and so dropout by the identity; random integers stay random."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or return the mean of what it draws."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        mean = _MEANS.get(func)
        if mean is None:
            return func(*args, **kwargs)
        # the tensor to fill, or the operator's new one
        in_place = compat.operator_schema(func).name.endswith("_")
        made = args[0] if in_place else func(*args, **kwargs)
        value = mean(lambda name: _operator_argument(func, args, kwargs, name))
        return made.copy_(torch.as_tensor(value).to(made))


def _operator_argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an operator's argument by name, however it was given."""
    arguments = compat.operator_schema(func).arguments
    position = next(index for index, argument in enumerate(arguments) if argument.name == name)
    if position < len(args):
        return args[position]
    return kwargs.get(name, arguments[position].default_value)


def _argument(name: str) -> Mean:
    """Return the mean of an operator that has it as an argument."""
    return lambda read: read(name)


def _constant(value: float) -> Mean:
    return lambda read: value


def _means() -> dict[Any, Mean]:
    """List the operators that draw, with the mean of each."""
    aten = torch.ops.aten
    return {
        aten.bernoulli_.float: _argument("p"),
        aten.bernoulli_.Tensor: _argument("p"),
        aten.bernoulli.default: _argument("self"),
        aten.bernoulli.p: _argument("p"),
        aten.normal_.default: _argument("mean"),
        aten.uniform_.default: lambda read: (read("from") + read("to")) / 2,
        aten.exponential_.default: lambda read: 1 / read("lambd"),
        aten.normal.float_float: _argument("mean"),
        aten.normal.Tensor_float: _argument("mean"),
        aten.normal.Tensor_Tensor: _argument("mean"),
        aten.randn.default: _constant(0.0),
        aten.randn.generator: _constant(0.0),
        aten.randn_like.default: _constant(0.0),
        aten.rand.default: _constant(0.5),
        aten.rand.generator: _constant(0.5),
        aten.rand_like.default: _constant(0.5),
    }


_MEANS = _means()


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
    """Return how the losses inside a module multiply rows, where that is less exact than float32; sorted, each once."""
    found: set[ProductChoice] = {child.products for child in module.modules() if isinstance(child, _WITH_PRODUCTS)}
    return sorted(found - {"float32"})


@torch.no_grad()
def _perturb_(tensor: Tensor, unit: float, generator: torch.Generator) -> None:
    """Move each element by one rounding unit, up or down at random; a piece at a time."""
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
