"""Parameters of which each rank holds its own classes: divided at set-up, left alone by DDP, scaled, clipped and saved as one.

Losses divide themselves (``sharding.Shardable``) and tag their parameters; everything else that treats parameters as equal on all
ranks is put right here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.shard import ClassShard, Shardable, first_holders, local_part, shard_of
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError

Owners = list[tuple[int, ClassShard]]
"""Who holds the classes of a parameter: one rank for each block, in the order of the classes."""

# norms, factors or directions of a whole weight, or of all weights together
_OF_WHOLE_WEIGHTS = frozenset({"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"})


def shard_losses(module: nn.Module) -> None:
    """Let every loss that can divide its classes over the ranks do so; all ranks come here."""
    for inner in module.modules():
        if isinstance(inner, Shardable):
            inner.shard_classes()


class ShardedParameters:
    """Knows the class shards of a module, and lets what follows backward treat them as one weight.

    Args:
        module: The live LightningModule, its losses divided.
        parameters: Its parameters and those that belong to it, by name.

    Attributes:
        parameters: By name.
        owners: By name, who holds which classes.

    Raises:
        RankMismatchError: on every rank, when the blocks of a parameter leave classes out or overlap.
        ConfigurationError: on every rank, for gradient clipping of the user's own, which would see one rank's rows.

    Communication: one handshake where there are shards.
    """

    def __init__(self, module: pl.LightningModule, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        found = {name: (p, shard_of(p)) for name, p in parameters}
        tagged = {name: (p, shard) for name, (p, shard) in found.items() if shard is not None}
        self.parameters = {name: p for name, (p, _) in tagged.items()}
        self.owners: dict[str, Owners] = {}
        self._replicas: dict[str, int] = {}
        self._module = module
        self._restore: list[Callable[[], None]] = []
        if not tagged:
            return
        # every rank learns who holds which classes
        own = [[name, s.start, s.stop, s.num_classes, s.dim, s.per_class] for name, (_, s) in tagged.items()]
        payloads = handshake.all_gather("class shards", {}, json.dumps(own).encode())
        rows = [json.loads(payload) for payload in payloads]
        for index, name in enumerate(tagged):
            column = [ClassShard(*row[index][1:]) for row in rows]
            self.owners[name] = _owners_of_blocks(name, column)
            self._replicas[name] = sum(s.classes for s in column) // column[0].num_classes
        # a user's own clipping would see one rank's rows
        if process_groups.world_size() > 1 and is_overridden("configure_gradient_clipping", module):
            raise ConfigurationError(
                "configure_gradient_clipping",
                expected="Lightning's own, where classes are divided over the ranks",
                got=f"an override in {type(module).__name__}, which sees one rank's rows of {', '.join(self.parameters)}",
                fix="Use Trainer(gradient_clip_val=...): the norm then counts the rows of all ranks once.",
                collective=True,
            )

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def find_again(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the parameters that have these names now: a move to a device may have made new ones."""
        self.parameters = {name: parameters[name] for name in self.parameters}

    def of(self, parameter: Tensor) -> str | None:
        """Return the name of a shard, None for another parameter."""
        return next((name for name, p in self.parameters.items() if p is parameter), None)

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Tell the losses which optimizers step their weights.

        Raises:
            ConfigurationError: on every rank, for one that computes with a weight as a whole.
        """
        for optimizer in optimizers:
            self._refuse_optimizer_of_whole_weights(optimizer)
        for inner in self._module.modules():
            if isinstance(inner, Shardable):
                for optimizer in optimizers:
                    inner.attach(optimizer)

    def refuse_equal_shards(self) -> None:
        """Refuse shards that something has broadcast by mistake. Communication: one handshake for each loss with shards."""
        for inner in self._module.modules():
            if isinstance(inner, Shardable):
                inner.refuse_equal_shards()

    def _refuse_optimizer_of_whole_weights(self, optimizer: Any) -> None:
        name = type(optimizer).__name__
        if process_groups.world_size() == 1 or name.lower() not in _OF_WHOLE_WEIGHTS:
            return
        stepped: list[str] = []
        for group in optimizer.param_groups:
            stepped += filter(None, map(self.of, group["params"]))
        if stepped:
            raise ConfigurationError(
                f"optimizer of {stepped[0]}",
                expected="one that treats each number by itself (SGD, Adam, ...): a rank holds some of the rows",
                got=f"{name}, which computes with the weight as a whole",
                fix="Give the divided weight an optimizer of its own, or leave ClassShardedLoss out.",
                collective=True,
            )

    # ------------------------------------------------------------------ loss scaling

    def share_overflow(self) -> None:
        """Let a gradient that overflowed on one rank count on all, so that a gradient scaler skips the step everywhere or nowhere.

        Communication: one sum of a number per shard.
        """
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not grads or process_groups.world_size() == 1:
            return
        # 1. which shards overflowed, on any rank; a rank may hold no rows of one
        sizes = [torch.linalg.vector_norm(g, ord=torch.inf) if g.numel() else g.new_zeros(()) for g in grads]
        own = torch.stack([(~torch.isfinite(size)).float() for size in sizes])
        overflowed = raw_collectives.sum_over_ranks(own, None) > 0
        # 2. their first entry shows it, without waiting for the device
        for grad, flag in zip(grads, overflowed, strict=True):
            first = grad[(slice(1),) * grad.ndim]
            first.copy_(torch.where(flag, torch.inf, first))

    # ------------------------------------------------------------------ clipping

    def has_parts(self) -> bool:
        """Say whether a rank holds a part of some parameter: classes of a loss, or of a model that ``fully_shard`` divides."""
        return bool(self) or any(isinstance(parameter, DTensor) for parameter in self._module.parameters())

    def install_clipping(self, plugin: Any) -> None:
        """Let the precision plugin clip by the norm over what all ranks hold."""

        def clip(optimizer: Any, clip_val: float) -> None:
            self._clip_(list(plugin.main_params(optimizer)), float(clip_val))

        def clip_values(optimizer: Any, clip_val: float) -> None:
            # torch takes no list in which some tensors are DTensors
            for parameter in plugin.main_params(optimizer):
                if parameter.grad is not None:
                    local_part(parameter.grad).clamp_(-float(clip_val), float(clip_val))

        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = clip, clip_values
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            self._restore.append(partial(plugin.__dict__.pop, name, None))

    def remove(self) -> None:
        """Give back what was installed."""
        for undo in self._restore:
            undo()
        self._restore.clear()

    def _clip_(self, parameters: list[nn.Parameter], limit: float) -> None:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does in one process that holds every class."""
        held = [(local_part(p.grad), self._copies(p)) for p in parameters if p.grad is not None]
        if not held:
            return
        # 1. squares of what is equal on all ranks, and of this rank's parts (once for all their replicas)
        equal = torch.zeros((), device=held[0][0].device)
        own_parts = torch.zeros_like(equal)
        for grad, copies in held:
            square = torch.linalg.vector_norm(grad).to(equal.device).square()
            if copies is None:
                equal = equal + square
            else:
                own_parts = own_parts + square / copies
        # 2. the norm of the whole
        parts_of_all_ranks = raw_collectives.sum_over_ranks(own_parts.reshape(1), None)[0]
        norm = (equal + parts_of_all_ranks).sqrt()
        # 3. scale, as torch does
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for grad, _ in held:
            grad.mul_(factor.to(grad.device))

    def _copies(self, parameter: nn.Parameter) -> int | None:
        """Return how many ranks hold the same part of a parameter; None where all hold the whole."""
        name = self.of(parameter)
        if name is not None:
            return self._replicas[name]
        if not isinstance(parameter, DTensor):
            return None
        mesh, placements = parameter.device_mesh, parameter.placements
        return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_shard())


@contextlib.contextmanager
def excluding_shards(module: nn.Module, ignoring: Callable[..., Any]) -> Iterator[None]:
    """Keep the shards out of a broadcast of the module's states."""
    names = {name for name, p in module.named_parameters() if shard_of(p) is not None}
    with ignoring(module, names) if names else contextlib.nullcontext():
        yield


def _owners_of_blocks(name: str, column: list[ClassShard]) -> Owners:
    """Return one holder per block; the blocks must follow each other from the first class to the last."""
    ranks = first_holders(column)
    if ranks is None:
        raise RankMismatchError(
            f"classes of `{name}`",
            expected=f"each of {column[0].num_classes} classes on one rank (on as many as every other class)",
            ranks=[f"{s.start} to {s.stop} of {s.num_classes}" for s in column],
            fix="Build the loss with the same group and the same classes on every rank.",
            collective=True,
        )
    return [(rank, column[rank]) for rank in ranks]
