"""Parameters of which each rank holds its own classes: divided at set-up, left alone by DDP, scaled, clipped and saved as one.

Losses divide themselves (``sharding.Shardable``) and tag their parameters; everything else that treats parameters as equal on all
ranks is put right here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.shard import ClassShard, Shardable, shard_of
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError

Owners = list[tuple[int, ClassShard]]
"""Who holds the classes of a parameter: one rank for each block, in the order of the classes."""

# norms, factors or directions of a whole weight, or of all weights together
_OF_WHOLE_WEIGHTS = frozenset({"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"})


def divide(module: nn.Module) -> None:
    """Let every loss that can divide its classes over the ranks do so; all ranks come here."""
    for inner in module.modules():
        if isinstance(inner, Shardable):
            inner.shard_classes()


class Shards:
    """The class shards of a module.

    Args:
        module: The live LightningModule, its losses divided.
        parameters: Its parameters and those that belong to it, by name.

    Attributes:
        parameters: By name.
        owners: By name, who holds which classes.

    Raises:
        RankMismatchError: on every rank, when the blocks of a parameter leave classes out or overlap.
        ConfigurationError: on every rank, for gradient clipping of the user's own, which would see one rank's rows.

    Communication: one frame where there are shards.
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
        own = [[name, s.start, s.stop, s.num_classes, s.dim, s.per_class] for name, (_, s) in tagged.items()]
        everyone = [json.loads(p) for p in handshake.all_gather("class shards", {}, json.dumps(own).encode())]
        for index, name in enumerate(tagged):
            column = [ClassShard(*row[index][1:]) for row in everyone]
            self.owners[name] = _tile(name, column)
            self._replicas[name] = sum(s.classes for s in column) // column[0].num_classes
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

    def of(self, parameter: Tensor) -> str | None:
        """The name of a shard, None for another parameter."""
        return next((name for name, p in self.parameters.items() if p is parameter), None)

    def attach(self, optimizers: Iterable[Any]) -> None:
        """Tell the losses which optimizers step their weights.

        Raises:
            ConfigurationError: on every rank, for one that computes with a weight as a whole.
        """
        for optimizer in optimizers:
            self._refuse_whole(optimizer)
        for inner in self._module.modules():
            if isinstance(inner, Shardable):
                for optimizer in optimizers:
                    inner.attach(optimizer)

    def _refuse_whole(self, optimizer: Any) -> None:
        name = type(optimizer).__name__
        held = [p for group in optimizer.param_groups for p in group["params"] if self.of(p) is not None]
        if held and process_groups.world_size() > 1 and name.lower() in _OF_WHOLE_WEIGHTS:
            raise ConfigurationError(
                f"optimizer of {self.of(held[0])}",
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
        sizes = [torch.linalg.vector_norm(g, ord=torch.inf) if g.numel() else g.new_zeros(()) for g in grads]
        own = torch.stack([(~torch.isfinite(s)).float() for s in sizes])
        bad = raw_collectives.sum_over_ranks(own, None) > 0
        for grad, flag in zip(grads, bad, strict=True):
            first = grad.view(-1)[:1] if grad.is_contiguous() else grad[:1, :1]
            first.copy_(torch.where(flag, torch.inf, first))

    # ------------------------------------------------------------------ clipping

    def install_clipping(self, plugin: Any) -> None:
        """Let the precision plugin clip by the norm over the rows of all ranks."""

        def clip(optimizer: Any, clip_val: float) -> None:
            self._clip(list(plugin.main_params(optimizer)), float(clip_val))

        plugin.clip_grad_by_norm = clip
        self._restore.append(lambda: plugin.__dict__.pop("clip_grad_by_norm", None))

    def remove(self) -> None:
        """Give back what was installed."""
        for undo in self._restore:
            undo()
        self._restore.clear()

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> None:
        """As ``torch.nn.utils.clip_grad_norm_`` in one process that holds every class."""
        grads = [(p.grad, self.of(p)) for p in parameters if p.grad is not None]
        if not grads:
            return
        device = grads[0][0].device
        equal = [torch.linalg.vector_norm(g).to(device) for g, name in grads if name is None]
        total = torch.stack(equal).square().sum() if equal else torch.zeros((), device=device)
        held = torch.zeros_like(total)
        for grad, name in grads:
            if name is not None:
                held += torch.linalg.vector_norm(grad).to(device).square() / self._replicas[name]
        norm = (total + raw_collectives.sum_over_ranks(held.reshape(1), None)[0]).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for grad, _ in grads:
            grad.mul_(factor.to(grad.device))


@contextlib.contextmanager
def unshared(module: nn.Module, ignoring: Callable[..., Any]) -> Iterator[None]:
    """Keep the shards out of a broadcast of the module's states."""
    names = {name for name, p in module.named_parameters() if shard_of(p) is not None}
    with ignoring(module, names) if names else contextlib.nullcontext():
        yield


def _tile(name: str, column: list[ClassShard]) -> Owners:
    """One holder per block; the blocks must follow each other from the first class to the last."""
    blocks: dict[tuple[int, int], int] = {}
    for rank, shard in enumerate(column):
        if shard.classes:
            blocks.setdefault((shard.start, shard.stop), rank)
    edges, whole = sorted(blocks), column[0].num_classes
    starts, stops = [0, *(stop for _, stop in edges)], [*(start for start, _ in edges), whole]
    copies = {sum((s.start, s.stop) == edge for s in column) for edge in edges}
    if starts != stops or len(copies) > 1 or any(s.num_classes != whole for s in column):
        raise RankMismatchError(
            f"classes of `{name}`",
            expected=f"each of {whole} classes on one rank (on as many as every other class)",
            ranks=[f"{s.start} to {s.stop} of {s.num_classes}" for s in column],
            fix="Build the loss with the same group and the same classes on every rank.",
            collective=True,
        )
    return [(blocks[edge], ClassShard(*edge, whole, column[0].dim, column[0].per_class)) for edge in edges]
