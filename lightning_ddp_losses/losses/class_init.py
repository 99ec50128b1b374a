"""The initial weight of a class-sharded loss: drawn block by block, so that nobody holds it whole and any number of ranks gets the same.

Each block of classes has a seed of its own; a rank draws the blocks that overlap its own classes and keeps what is its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.shard import ClassShard
from lightning_ddp_losses.errors import ConfigurationError

BLOCK = 4096  # classes; part of what a seed means
_JOINT = (torch.nn.init.orthogonal_, torch.nn.init.eye_, torch.nn.init.dirac_, torch.nn.init.sparse_)


class _Block(torch.Tensor):
    """Some classes of a weight; ``size()`` answers for all of them, because fan-in decides how some of torch's functions draw."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    whole: tuple[int, ...]

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self.whole) if dim is None else self.whole[dim]


def empty_loss(cls: type[Any], num_classes: int, embedding_size: int, options: dict[str, Any]) -> Any:
    """An instance of a loss class that says ``num_classes`` and holds the weight of one class."""
    loss = cls(num_classes=1, embedding_size=embedding_size, **options)
    loss.num_classes = num_classes
    return loss


def refuse_joint_draws(loss: Any) -> None:
    """Refuse an initialisation that looks at all classes together.

    Raises:
        ConfigurationError: naming it.
    """
    init = getattr(loss.weight_init_func, "init_func", loss.weight_init_func)
    if init in _JOINT:
        raise ConfigurationError(
            f"ClassShardedLoss.build({type(loss).__name__}): weight_init_func",
            expected="one that draws each class by itself",
            got=getattr(init, "__name__", repr(init)),
            fix="Give ClassShardedLoss an instance of the loss, whose weight is sliced.",
        )


def fill(
    weight: Tensor, shard: ClassShard, init: Callable[[Tensor], Any], seed: int, whole_shape: tuple[int, ...]
) -> None:
    """Draw the classes of ``shard`` into ``weight``.

    Args:
        weight: This rank's block, in the layout of the loss.
        shard: Which classes.
        init: Initialises a tensor of the layout in place; draws on torch's CPU generator.
        seed: The same on every rank.
        whole_shape: Of the weight over all ranks.
    """
    per, dim = shard.per_class, shard.dim
    state = torch.get_rng_state()
    try:
        for number in range(shard.start // BLOCK, -(-shard.stop // BLOCK)):
            first, last = number * BLOCK, min((number + 1) * BLOCK, shard.num_classes)
            shape = list(whole_shape)
            shape[dim] = (last - first) * per
            block = torch.empty(shape, dtype=torch.float32).as_subclass(_Block)
            block.whole = whole_shape
            torch.default_generator.manual_seed(_seed_of(seed, number))
            init(block)
            low, high = max(first, shard.start), min(last, shard.stop)
            own = block.as_subclass(Tensor).narrow(dim, (low - first) * per, (high - low) * per)
            weight.narrow(dim, (low - shard.start) * per, (high - low) * per).copy_(own)
    finally:
        torch.set_rng_state(state)


def _seed_of(seed: int, block: int) -> int:
    digest = hashlib.blake2b(f"{seed} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
