"""What a run can be without: randomness, batch statistics, exactness of the last bit. Counter-runs use these to separate causes."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_losses.audit import replay

SWITCHES = {
    "randomness": "every random draw inside a step replaced by its mean (dropout: identity; noise: zero)",
    "batch_norm": "batch norm normalises with its running statistics",
    "precision": "float64",
    "uneven": "the same rows, dealt evenly to the ranks",
}
"""What can be switched off, and what is then there instead."""

_PIECE = 1 << 20
_ROUNDOFF = {"64": 2.0**-53, "32": 2.0**-24, "16": 2.0**-11, "bf16": 2.0**-8}


class MeanDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random draws by their mean, and so dropout by the identity; random integers stay random."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or fill with the mean of what it draws."""
        kwargs = kwargs or {}
        mean = _MEANS.get(func)
        return func(*args, **kwargs) if mean is None else mean(func, args, kwargs)


def _argument(func: Any, args: Any, kwargs: Any, name: str, default: Any = None) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value if argument.has_default_value() else default)
    return default


def _fill(value: Callable[[Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """In place: ``value`` reads the operator's own arguments."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return args[0].copy_(torch.as_tensor(value(lambda n, d=None: _argument(func, args, kwargs, n, d))).to(args[0]))

    return run


def _constant(value: float) -> Callable[[Any, Any, Any], Any]:
    """A new tensor: what the operator makes, filled."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs).fill_(value)

    return run


def _same_as_mean(name: str) -> Callable[[Any, Any, Any], Any]:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        return made.copy_(torch.as_tensor(_argument(func, args, kwargs, name)).to(made))

    return run


def _identity_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


def _means() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    aten = torch.ops.aten
    halfway = _fill(lambda get: (get("from") + get("to")) / 2)
    return {
        aten.native_dropout.default: _identity_dropout,
        aten.bernoulli_.float: _fill(lambda get: get("p")),
        aten.bernoulli_.Tensor: _fill(lambda get: get("p")),
        aten.bernoulli.default: _same_as_mean("self"),
        aten.bernoulli.p: _same_as_mean("p"),
        aten.normal_.default: _fill(lambda get: get("mean")),
        aten.uniform_.default: halfway,
        aten.exponential_.default: _fill(lambda get: 1 / get("lambd")),
        aten.normal.float_float: _same_as_mean("mean"),
        aten.normal.Tensor_float: _same_as_mean("mean"),
        aten.normal.Tensor_Tensor: _same_as_mean("mean"),
        aten.randn.default: _constant(0.0),
        aten.randn.generator: _constant(0.0),
        aten.randn_like.default: _constant(0.0),
        aten.rand.default: _constant(0.5),
        aten.rand.generator: _constant(0.5),
        aten.rand_like.default: _constant(0.5),
    }


_MEANS = _means()


def random_state() -> str:
    """A digest of the random states that a training step may draw from."""
    found = hashlib.blake2b(digest_size=12)
    found.update(torch.get_rng_state().numpy().data)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for state in torch.cuda.get_rng_state_all():
            found.update(state.numpy().data)
    found.update(repr(random.getstate()).encode())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.update(pickle.dumps(numpy.get_state()))
    return found.hexdigest()


def still_batch_norm(module: nn.Module) -> None:
    """Let batch norm use its running statistics, and leave them alone."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.eval()


# ---------------------------------------------------------------------- rounding


def unit_roundoff(module: nn.Module, precision: str) -> float:
    """The largest relative rounding error of one operation.

    Args:
        module: Its parameters' dtypes count where ``precision`` is that of plain float32 training.
        precision: Lightning's name (``"bf16-mixed"``).
    """
    name = precision.split("-", maxsplit=1)[0]
    if name not in _ROUNDOFF:
        name = "bf16"  # 8-bit floats and other transformer precisions: at most as good
    own = [torch.finfo(p.dtype).eps / 2 for p in module.parameters() if p.is_floating_point()]
    return max(own, default=_ROUNDOFF[name]) if name == "32" else _ROUNDOFF[name]


@torch.no_grad()
def _nudge_(tensor: Tensor, unit: float, generator: torch.Generator) -> None:
    """Move each element by one rounding unit, up or down at random; a piece at a time."""
    own = torch.finfo(tensor.dtype).eps
    step = own if unit <= own / 2 else unit  # a factor of 1 + eps / 2 would round to 1
    flat = tensor.view(-1) if tensor.is_contiguous() else None
    for piece in (tensor,) if flat is None else flat.split(_PIECE):  # type: ignore[no-untyped-call]
        signs = torch.randint(0, 2, piece.shape, generator=generator, dtype=torch.int8).to(piece.device)
        piece.mul_((2 * signs - 1).to(piece.dtype).mul_(step).add_(1))


def perturb_module(module: nn.Module, unit: float, seed: int) -> None:
    """Move each parameter by one rounding unit, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.is_floating_point():
            _nudge_(parameter, unit, generator)


def perturb_batch(batch: Any, unit: float, seed: int) -> Any:
    """The batch with its floating tensors moved by one rounding unit."""
    generator = torch.Generator().manual_seed(seed)

    def nudged(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        moved = tensor.detach().clone()
        _nudge_(moved, unit, generator)
        return moved

    return replay.map_tensors(batch, nudged)
