"""`SyncBatchNorm`: the Lightning plugin that makes every batch norm normalise over the rows of all ranks, on any device.

torch's own ``SyncBatchNorm`` runs on accelerators only, changes the modules' type, waits for ever where ranks disagree, and lets
one row over all ranks pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core.forward_patch import MethodPatch
from lightning_ddp_losses.core.module_search import unregistered_modules
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.layers.agreement import BackwardMeeting, agree_on_names
from lightning_ddp_losses.layers.batch_norm_function import Scope
from lightning_ddp_losses.layers.synced import SyncedForward, UnregisteredSentinel


class SyncBatchNorm(LayerSync):
    """Batch norm over the group, exact on any device, for ranks with different numbers of rows too.

    Equivalent to: each ``torch.nn.BatchNorm*`` in one process on ``torch.cat([x of all ranks])``: output, gradients, running
    averages.

    The modules stay what they are (type, parameters, buffers, ``state_dict``): while a fit lasts, their ``forward`` is another
    one, and in evaluation mode not even that. It must be applied before the wrap in DistributedDataParallel, as Lightning does.

    Args:
        group_size: Normalise over this many neighbouring ranks each (ranks 0 to k - 1, k to 2 k - 1, ...); it must divide the
            world. The frames still go to all, so that an error in one part ends all of them. None: over all.
        process_group: Normalise over this group, and meet in it alone: a group, or a function that makes it once
            torch.distributed runs (each rank must be a member of its own). None: the world.

    Gradient: of the sum over ranks of what they back-propagate, as DDP's mean over ranks needs it. A second derivative is an
        error.

    Communication: per layer and call in training, forward one frame and, where count, mean and M2 (2 C + 1 numbers) do not fit
        into it, one gather; backward one gather of 2 C numbers. Before each backward one frame, in which ranks whose losses
        depend on different layers get an error. None in evaluation mode and in a world of one.

    Raises:
        ConfigurationError: applied after a DDP wrap, or twice; a batch norm that is not registered (where it trains); a group
            size that does not divide the world.
        RankMismatchError: on every rank, when channels, dtypes, settings or the number of calls differ.
        InputError: on every rank, for one value per channel over all ranks (a ``ValueError`` too, as in one process).

    Source: Ioffe and Szegedy, "Batch Normalization" (2015); merging: Chan, Golub and LeVeque (1979).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[SyncBatchNorm()], accelerator="cpu", logger=False)
    """

    def __init__(
        self, group_size: int | None = None, process_group: Group | Callable[[], dist.ProcessGroup] = None
    ) -> None:
        if group_size is not None and (not isinstance(group_size, int) or group_size < 1):
            raise ConfigurationError("group_size", expected="a number of ranks", got=repr(group_size))
        if group_size is not None and process_group is not None:
            raise ConfigurationError("SyncBatchNorm", expected="group_size= or process_group=, or neither", got="both")
        self.group_size, self.process_group = group_size, process_group
        self._stand_ins: list[MethodPatch] = []
        self._layers: list[SyncedForward] = []
        self._made: tuple[Any, Scope] = (None, Scope())

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise every batch norm in ``model``, in place; every rank of the world must come here. Communication: one frame."""
        try:
            found = list(_named_layers(model))
            self._refuse_wrong_order(model, found)
            self._scope()
        except Exception as error:
            handshake.raise_on_all_ranks(error, "SyncBatchNorm.apply")
        agree_on_names(
            "batch norms to synchronise",
            [f"{title} {type(layer).__name__}" for title, layer in found],
            "Build the same modules on every rank.",
        )
        self._layers = [SyncedForward(layer, title, self._scope) for title, layer in found]
        sentinels = [
            UnregisteredSentinel(layer, path, lambda layer: self._adopt(model, layer))
            for path, layer in _unregistered_layers(model, {id(layer) for _, layer in found})
        ]
        self._stand_ins = [*self._layers, *sentinels]
        if isinstance(model, pl.LightningModule):
            self._stand_ins.append(BackwardMeeting(model, self._layers, self._scope))
        for patch in self._stand_ins:
            patch.install()
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give the modules back as they came."""
        for patch in self._stand_ins:
            patch.remove()
        self._stand_ins, self._layers = [], []
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        return type(self)(self.group_size, self.process_group)  # a group of processes has no copy

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.group_size, self.process_group)  # what it is at work on stays with the model

    def _scope(self) -> Scope:
        """Who normalises together, once torch.distributed runs.

        Raises:
            ConfigurationError: a group size that does not divide the world, a group that this rank is not in.
        """
        world = dist.group.WORLD if process_groups.is_distributed() else None
        if self._made[0] is not world or world is None:
            self._made = (world, Scope() if world is None else self._make_scope())
        return self._made[1]

    def _make_scope(self) -> Scope:
        if self.group_size is not None:
            if process_groups.world_size() % self.group_size:
                raise ConfigurationError(
                    "SyncBatchNorm(group_size=)",
                    expected=f"a divisor of the {process_groups.world_size()} ranks",
                    got=self.group_size,
                    fix="Leave it out to normalise over all ranks.",
                )
            if self.group_size == process_groups.world_size():
                return Scope()
            return Scope(process_groups.subgroup_of_size(self.group_size), None, self.group_size)
        group = self.process_group() if callable(self.process_group) else self.process_group
        if group is not None and process_groups.rank(group) < 0:
            raise ConfigurationError(
                "SyncBatchNorm(process_group=)",
                expected="a group that this rank is a member of",
                got=f"one without rank {process_groups.rank()}",
                fix="Make a group for every rank, and hand each rank its own.",
            )
        return Scope(group, group)

    def _refuse_wrong_order(self, model: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
        inside = [
            f"`{name}`" if name else "the model itself"
            for name, module in model.named_modules()
            if isinstance(module, DistributedDataParallel) and any(isinstance(m, _BatchNorm) for m in module.modules())
        ]
        if inside:
            raise ConfigurationError(
                "SyncBatchNorm",
                expected="modules before the wrap in DistributedDataParallel",
                got=f"{', '.join(inside)}, wrapped already",
                fix="Synchronise first, wrap then; under Lightning's Trainer leave both to the strategy.",
            )
        ours = [title for title, layer in found if isinstance(layer.__dict__.get("forward"), SyncedForward)]
        torchs = [title for title, layer in found if isinstance(layer, nn.SyncBatchNorm)]
        if ours or torchs:
            raise ConfigurationError(
                "SyncBatchNorm",
                expected="batch norms that nobody has converted",
                got=f"{', '.join((ours or torchs)[:6])}, converted already"
                + ("" if ours else " by torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
                fix="Convert once: build the model with plain batch norms and leave the rest to the plugin.",
            )
        scripted = [
            f"`{name}`"
            for name, module in model.named_modules()
            if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", "")
        ]
        if scripted:
            raise ConfigurationError(
                "SyncBatchNorm",
                expected="batch norms in plain modules",
                got=f"{', '.join(scripted[:6])} in TorchScript, which nobody can reach into",
                fix="Script the model after training.",
            )

    def _adopt(self, model: nn.Module, layer: nn.Module) -> SyncedForward | None:
        """Synchronise a layer that was registered after ``apply``; None for one that still is not."""
        for title, known in _named_layers(model):
            if known is layer:
                sentinel = layer.__dict__["forward"]
                sentinel.remove()
                synced = SyncedForward(layer, title, self._scope)
                synced.install()
                self._layers.append(synced)
                self._stand_ins = [s for s in self._stand_ins if s is not sentinel] + [synced]
                return synced
        return None


def batch_norms(model: nn.Module) -> dict[str, str]:
    """Every registered batch norm by path, and whose rows its training statistics are of.

    Returns:
        ``"group"`` (this package's plugin), ``"group (torch)"`` (torch's own conversion), or ``"rank"``.
    """
    kinds = {}
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            ours = isinstance(module.__dict__.get("forward"), SyncedForward)
            kinds[name] = "group" if ours else "group (torch)" if isinstance(module, nn.SyncBatchNorm) else "rank"
    return kinds


def _named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield f"SyncBatchNorm `{name}`" if name else "SyncBatchNorm", module


def _unregistered_layers(model: nn.Module, known: set[int]) -> Iterator[tuple[str, nn.Module]]:
    trainer = getattr(model, "_trainer", None)
    callbacks = getattr(trainer, "callbacks", None) or []
    elsewhere: dict[str, Any] = {f"callbacks[{i}] ({type(c).__name__})": c for i, c in enumerate(callbacks)}
    elsewhere["datamodule"] = getattr(trainer, "datamodule", None)
    for path, outer in unregistered_modules(model, elsewhere):
        for name, module in outer.named_modules():
            if isinstance(module, _BatchNorm) and id(module) not in known:
                known.add(id(module))
                yield f"{path}.{name}" if name else path, module
