"""A class weight of which each rank holds a block: how it is divided, drawn, loaded and saved.

Legend: ``W`` ranks, ``D`` embedding size, ``C`` classes, ``c`` classes on this rank, ``K`` weight rows per class (sub-centers).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.configuration import configuration_digest
from lightning_ddp_losses.core.random_state import preserve_random_state
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.shard import ClassShard, tag_shard
from lightning_ddp_losses.errors import ConfigurationError, InputError, RankMismatchError
from lightning_ddp_losses.losses.class_heads import head_of


class ClassWeight(WithProcessGroup, nn.Module):
    """A loss without its weight, and this rank's block of the weight.

    Args:
        loss: Its weight is not looked at.
        whole_shape: Of the weight over all ranks, in the loss's layout.
        group: Process group that divides the classes.

    Attributes:
        loss: The loss; its weight is here and not there.
        shard: Which classes are held.
        sampler: Draws the classes of a step; None: all of them.
    """

    loss: Any
    shard: ClassShard
    sampler: Any = None

    def __init__(self, loss: Any, whole_shape: torch.Size, group: Group) -> None:
        super().__init__()
        head = head_of(loss)
        self._whole_shape = tuple(whole_shape)
        self._classes = self._whole_shape[head.class_dim] // head.per_class
        self.loss = _without_weight(loss, head.weight_name)
        self._head = head_of(self.loss)
        self._seed: int | None = None  # of the initial weight, where there is no instance to slice
        self._group = group
        self._replicas: Group = None
        self._world = 0  # ranks that the weight is divided over now; 0: not yet

    def _register(self, weight: Tensor) -> None:
        parameter = nn.Parameter(_rows_first(weight, self._head.class_dim))
        self.register_parameter(self._head.weight_name, parameter)
        held = weight.shape[self._head.class_dim] // self._head.per_class
        dim, per = self._head.class_dim, self._head.per_class
        self._tag(ClassShard(0, held, self._classes, dim, per))

    def _tag(self, shard: ClassShard) -> None:
        self.shard = shard
        tag_shard(self.weight, shard)

    @property
    def weight(self) -> nn.Parameter:
        """The weight of the classes held, in the loss's layout."""
        parameter = self._parameters[self._head.weight_name]
        assert parameter is not None
        return parameter

    @property
    def num_classes(self) -> int:
        """C."""
        return self._classes

    def extra_repr(self) -> str:
        """The classes held."""
        return f"classes {self.shard.start} to {self.shard.stop} of {self._classes}"

    # ------------------------------------------------------------------ dividing

    def shard_classes(self) -> None:
        """Divide the weight over the ranks of the group, or draw it, if that is not done; all of them must come here.

        Communication: one frame; for a loss made from an instance a broadcast of the whole weight.
        """
        world, rank = process_groups.world_size(self._group), process_groups.rank(self._group)
        if self._world == world:
            return
        if self._world > 1 or (self._world == 1 and self.shard.classes < self._classes):
            raise ConfigurationError(
                f"{self._title}: ranks",
                expected=f"the {self._world} that its classes were divided over",
                got=world,
                fix="Save a checkpoint with the strategy, which holds the whole weight, and load it into a new loss.",
            )
        must_match = {
            "classes": self._classes,
            "built": self._seed is not None,
            "configuration": configuration_digest(self.loss),
        }
        own = (self._seed or 0).to_bytes(8, "little")
        seeds = handshake.all_gather(f"{self._title} divides its classes", must_match, own, group=self._group)
        if self._classes < world:
            raise ConfigurationError(
                f"{self._title}: classes",
                expected=f"at least one for each of {world} ranks",
                got=self._classes,
                collective=True,
            )
        dim, per = self._head.class_dim, self._head.per_class
        shard = ClassShard.of_rank(self._classes, world, rank, dim=dim, per_class=per)
        parameter = self.weight
        if self.shard.classes == self._classes:
            whole = parameter.data
            raw_collectives.broadcast_([whole], group=self._group)
            if world > 1:
                parameter.data = _rows_first(shard.own_part(whole), dim)
        else:  # nothing was drawn yet
            shape = list(self._whole_shape)
            shape[dim] = shard.classes * per
            parameter.data = _rows_first(parameter.data.new_empty(shape), dim)
            seed = int.from_bytes(seeds[0], "little")
            with torch.no_grad():
                fill(parameter.data, shard, self.loss.weight_init_func, seed, self._whole_shape)
        self._tag(shard)
        parameter.grad = None
        replicas = process_groups.replica_group(self._group)
        self._replicas = None if replicas is self._group else replicas
        if self._replicas is not None:
            self._meet_replicas()
        self._world = world

    def _meet_replicas(self) -> None:
        regularizer = getattr(self.loss, "embedding_regularizer", None)
        if regularizer is not None:
            self._refuse_in_parts("embedding_regularizer", "none", type(regularizer).__name__)
        if self.sampler is not None:  # parts would draw other classes, and step other rows of what is to stay equal
            self._refuse_in_parts("sample_rate", 1, self.sampler.rate)
        raw_collectives.broadcast_(
            [self.weight.data], group=self._replicas
        )  # of several parts, the first one's weight counts

    def _refuse_in_parts(self, option: str, expected: object, got: object) -> None:
        raise ConfigurationError(
            f"{self._title}: {option}",
            expected=f"{expected} where group= is a part of the ranks",
            got=got,
            fix="Divide the classes over all ranks (group=None).",
            collective=True,
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Take the whole weight, of which this rank's part is kept, or a part of the right shape."""
        self.shard_classes()
        key = prefix + self._head.weight_name
        given = state_dict.get(key)
        if isinstance(given, Tensor) and given.shape != self.weight.shape:
            if tuple(given.shape) != self._whole_shape:
                raise InputError(
                    f"{self._title}: {key} to load",
                    expected=f"{self._whole_shape} of all classes, or the part that this rank holds",
                    got=tuple(given.shape),
                    fix="Load a checkpoint of a loss with the same classes and embedding size.",
                )
            state_dict = {**state_dict, key: self.shard.own_part(given)}
        super()._load_from_state_dict(state_dict, prefix, *args)
        tag_shard(self.weight, self.shard)  # assign=True puts another parameter in its place

    def _save_to_state_dict(self, *args: Any) -> None:
        if self._world == 0 and not self.shard.classes:
            self.shard_classes()
        super()._save_to_state_dict(*args)

    def _stamp(self) -> bytes:
        """What the first class held looks like; nothing where reading it would wait for a device, or where it says nothing."""
        weight = self.weight
        if weight.device.type != "cpu" or not self.shard.classes or self._world == 1:
            return b""
        row = weight.detach().narrow(self._head.class_dim, 0, 1).contiguous().view(-1)
        if bool((row == row[0]).all()):
            return b""  # a constant start is the same everywhere
        return hashlib.blake2b(raw_collectives.host_bytes(row), digest_size=8).digest()

    def _refuse_equal(self, stamps: Sequence[bytes]) -> None:
        """Refuse shards that look alike on all ranks, by the stamps of those that gave one."""
        told = [stamp for stamp in stamps if stamp]
        if len(told) > 1 and len(set(told)) == 1:
            raise RankMismatchError(
                f"{self._title}: weight",
                expected="other rows on every rank",
                got="the same on all of them",
                fix="Something broadcast the shards, as strategy='ddp' does. Use strategy='ddp_losses', or keep the loss out of "
                "DistributedDataParallel.",
                collective=True,
            )

    @property
    def _title(self) -> str:
        return f"ClassShardedLoss({type(self.loss).__name__})"


def _without_weight(loss: Any, name: str) -> Any:
    """The loss without its weight; the caller's own keeps it."""
    bare = copy.copy(loss)
    bare._parameters = {key: value for key, value in loss._parameters.items() if key != name}
    return bare


def _rows_first(weight: Tensor, class_dim: int) -> Tensor:
    """The same values and shape; in memory, each class's row lies in one piece."""
    if class_dim == 0:
        return weight.clone(memory_format=torch.contiguous_format)
    return weight.t().clone(memory_format=torch.contiguous_format).t()


def weight_of(loss: Any) -> Tensor:
    """The whole weight of an instance."""
    weight = getattr(loss, head_of(loss).weight_name)
    assert isinstance(weight, Tensor)
    return weight


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
    with preserve_random_state([torch.default_generator]):
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


def _seed_of(seed: int, block: int) -> int:
    digest = hashlib.blake2b(f"{seed} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
