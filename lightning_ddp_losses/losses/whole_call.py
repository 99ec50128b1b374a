"""One call of a loss that is not pytorch-metric-learning's: every tensor argument is a batch, gathered and put back in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.randomness import shared_seed


class WholeCall:
    """Gathers the arguments of a call; 0-dim tensors and what is no tensor stay as they are.

    Args:
        title: How messages name the loss.
        args: What this rank gave, by position.
        kwargs: The same by name.
        batch_dims: By position or name, which dimension counts samples (0 where nothing is said); None: no batch.
        gather: Gathers named batches along dim 0.

    Attributes:
        args: The arguments over all ranks.
        kwargs: The same by name.
        batches: Those that were gathered.
        seed: For random draws, the same on every rank.

    Raises:
        InputError: for a batch inside a list, tuple or dict.
    """

    def __init__(
        self,
        title: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_dims: Mapping[int | str, int | None],
        gather: Callable[[dict[str, Tensor]], GatheredBatch],
    ) -> None:
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update(kwargs)
        dims: dict[int | str, int] = {}
        for name, value in named.items():
            dim = batch_dims.get(name, 0)
            if dim is None:
                continue
            if isinstance(value, (list, tuple, dict)):
                _refuse_nested(title, name, value)
            elif isinstance(value, Tensor) and value.ndim:
                dims[name] = dim
        bundle = gather({str(name): named[name].movedim(dim, 0) for name, dim in dims.items()})
        for (name, dim), tensor in zip(dims.items(), bundle.tensors, strict=True):
            named[name] = tensor.movedim(0, dim)
        self.args = tuple(named[position] for position in range(len(args)))
        self.kwargs = {name: named[name] for name in kwargs}
        self.batches, self.seed = bundle.tensors, shared_seed(bundle)


def _refuse_nested(title: str, name: int | str, value: Any) -> None:
    if any(t.ndim for t in precision.tensors_in(value)):
        raise InputError(
            f"{title}: argument {name}",
            expected="a tensor",
            got=f"a {type(value).__name__} of tensors, whose rows would stay on this rank",
            fix=f"Pass the tensors one by one, or say that they are no batches: batch_dims={{{name!r}: None}}.",
        )
