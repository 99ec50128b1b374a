"""`SyncBatchNorm`: the Lightning plugin that makes every batch norm normalise over the rows of all ranks, on any device.

torch's own ``SyncBatchNorm`` only runs on accelerators, changes the modules' type, hangs if ranks disagree, and accepts
one row over all ranks (torch 2.13, measured 2026).

With this plugin a layer keeps its type. Its own forward runs, including its checks, its counter and its momentum. Only the
``torch.nn.functional.batch_norm`` at its end is replaced, so that subclasses with additional operations (an activation, a dropout) work
unchanged.

In backward each layer exchanges sums with its peers once. The autograd engine runs the layers in the reverse order of their calls, which
forward has made the same on all ranks. It is therefore sufficient that every rank's graph contains the same calls. A handshake before
backward checks this, at a point where a difference is still an error and not a hang. After it, sums on an accelerator do not need a
handshake.

| W = 2, 5 layers, per rank | handshakes forward, before backward, backward | collectives in total |
|---|---|---|
| CPU: statistics and sums are sent in the handshakes | 5, 1, 5 | 11 |
| accelerator, a handshake for each exchange | 5, 1, 5 | 21 |
| accelerator, in a plan (``forward_plan``) | 1, 1, 0 | 12 |
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.core.lightning_compat import attached_trainer
from lightning_ddp_losses.core.modules import MethodPatch, eager_recursive, objects_beside_module, unregistered_modules
from lightning_ddp_losses.core.torch_compat import BATCH_NORM_TYPES
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError, expect, expect_count, listed
from lightning_ddp_losses.layers.batch_norm_function import (
    Call,
    Scope,
    gather_statistics,
    normalise,
    refuse_earlier_calls,
)
from lightning_ddp_losses.layers.forward_plan import ForwardPlan
from lightning_ddp_losses.randomness.step_draws import keep_rows


class SyncBatchNorm(LayerSync):
    """Batch norm over the group, exact on any device, even if ranks have different numbers of rows.

    Equivalent to: each ``torch.nn.BatchNorm*`` in one process on ``torch.cat([x of all ranks])``: output, gradients, running
    averages.

    The modules keep type, parameters, buffers and ``state_dict``. During a fit their ``forward`` is replaced, and in evaluation mode it
    behaves as before, except for a layer without running statistics that is called with gradients enabled: it takes those of all ranks'
    rows. Apply the plugin before the wrap in DistributedDataParallel, as Lightning does.

    Args:
        group_size: Number of neighbouring ranks that normalise together (ranks 0 to k - 1, k to 2 k - 1, ...). It must divide the
            world. The handshakes still include all ranks, so that an error in one part ends all of them. If None, all ranks normalise
            together.
        process_group: Group that normalises together and performs the handshakes: a group, or a function that creates it once
            torch.distributed is initialised (each rank must be a member of the group that it passes). If None, the world.

    Gradient: the gradient of the sum of all ranks' losses, as required for DDP's mean over ranks. A second derivative is an error.

    Communication: per layer and call in training, forward one handshake and, if count, mean and M2 (2 C + 1 numbers) do not fit
        into it, one gather. Backward one exchange of 2 C numbers, which begins with a handshake. Before each backward of a
        LightningModule one handshake, which is an error if the ranks' losses depend on different layers. On accelerators (NCCL) a
        forward with the calls of the two before it performs one handshake for all layers, and a backward after that comparison none.
        None in evaluation mode (but for the exception above) and in a world of one rank.

    Raises:
        ConfigurationError: if applied after a DDP wrap, or twice. For an unregistered batch norm that trains. For a group size that does
            not divide the world.
        RankMismatchError: on every rank, if channels, dtypes, settings or the number of calls differ.
        InputError: on every rank, for one value per channel over all ranks (also a ``ValueError``, as in one process). In a forward
            without a handshake for each layer it is raised some forwards later, or at the end of the fit.

    Source: Ioffe and Szegedy, "Batch Normalization" (2015). Merging: Chan, Golub and LeVeque (1979).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[SyncBatchNorm()], accelerator="cpu", logger=False)
    """

    def __init__(
        self, group_size: int | None = None, process_group: Group | Callable[[], dist.ProcessGroup] = None
    ) -> None:
        if group_size is not None:
            expect_count("group_size", group_size)
        is_one_way = group_size is None or process_group is None
        expect(
            is_one_way,
            "SyncBatchNorm",
            expected="group_size= or process_group=, or neither",
            got="both",
            fix="Give one of them.",
        )
        self.group_size, self.process_group = group_size, process_group
        self._patches: list[MethodPatch] = []
        self._plan: ForwardPlan | None = None
        self._scope_of_world: tuple[Any, Scope] = (None, Scope())

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise every batch norm in ``model``, in place.

        Communication: one handshake of the world. Collective: every rank must call this.
        """
        # reject invalid models on every rank
        with handshake.raising_on_all_ranks("SyncBatchNorm.apply"):
            found = list(_named_layers(model))
            self._refuse_wrong_order(model, found)
            self._scope()
        check_same_names(
            "batch norms to synchronise",
            [f"{title} {type(layer).__name__}" for title, layer in found],
            "Build the same modules on every rank.",
        )

        # replace the forward of each layer, including layers that the model has not registered yet
        known = {id(layer) for _, layer in found}
        self._plan = ForwardPlan(model)
        layers = [SyncedForward(layer, title, self._scope, self._plan) for title, layer in found]
        layers += [
            SyncedForward(layer, path, self._scope, self._plan, not_yet_in=model)
            for path, layer in _unregistered_layers(model, known)
        ]
        self._patches = [*layers]
        if isinstance(model, pl.LightningModule):
            self._patches.append(BeforeBackwardPatch(model, layers, self._scope))
            self._patches.append(TrainEndPatch(model, self._plan, self._scope))
        for patch in self._patches:
            patch.install()
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Restore the modules. If this rank fails inside a forward with a plan, its peers receive the error.

        Raises:
            InputError: on every rank, for one value per channel in a last forward that was not checked by ``on_train_end``.
        """
        for patch in self._patches:
            patch.remove()
        plan, error = self._plan, sys.exc_info()[1]
        self._patches, self._plan = [], None
        if plan is not None and plan.is_open:
            with contextlib.suppress(Exception):  # this rank continues with the original error
                if isinstance(error, Exception):
                    raise_in_scope(self._scope(), error, "a forward with batch norms")
            plan.receive()
        elif plan is not None and error is None:
            refuse_earlier_calls(plan, self._scope(), of_all=True)
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        return type(self)(self.group_size, self.process_group)  # a process group cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.group_size, self.process_group)  # the patches are not copied

    def _scope(self) -> Scope:
        """Return the ranks that normalise together, once torch.distributed is initialised.

        Raises:
            ConfigurationError: for a group size that does not divide the world, or a group that does not contain this rank.
        """
        if not process_groups.is_distributed():
            return Scope()
        world = dist.group.WORLD
        if self._scope_of_world[0] is not world:
            self._scope_of_world = (world, self._make_scope())
        return self._scope_of_world[1]

    def _make_scope(self) -> Scope:
        if self.group_size is not None:
            world_size = process_groups.world_size()
            expect(
                world_size % self.group_size == 0,
                "SyncBatchNorm(group_size=)",
                expected=f"a divisor of the {world_size} ranks",
                got=self.group_size,
                fix="Leave it out to normalise over all ranks.",
            )
            if self.group_size == world_size:
                return Scope()
            return Scope(process_groups.subgroup_of_size(self.group_size), None, self.group_size)
        group = self.process_group() if callable(self.process_group) else self.process_group
        expect(
            group is None or process_groups.rank(group) >= 0,
            "SyncBatchNorm(process_group=)",
            expected="a group that this rank is a member of",
            got=f"one without rank {process_groups.rank()}",
            fix="Make a group for every rank, and hand each rank its own.",
        )
        return Scope(group, group)

    def _refuse_wrong_order(self, model: nn.Module, found: list[tuple[str, nn.Module]]) -> None:
        """Reject batch norms that are already wrapped, converted or scripted."""
        wrapped, scripted = [], []
        for path, module in model.named_modules():
            name = f"`{path}`" if path else "the model itself"
            if isinstance(module, DistributedDataParallel) and next(_named_layers(module), None) is not None:
                wrapped.append(name)
            if isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in getattr(module, "original_name", ""):
                scripted.append(name)
        by_us = [title for title, layer in found if is_synced(layer)]
        by_torch = [title for title, layer in found if isinstance(layer, nn.SyncBatchNorm)]
        ddp_fix = "Synchronise first, wrap then; under Lightning's Trainer leave both to the strategy."
        twice = "batch norms that are not converted yet"
        twice_fix = "Convert once: build the model with plain batch norms and leave the rest to the plugin."
        torchs = ", converted already by torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        for names, expected, got, fix in (
            (wrapped, "modules before the wrap in DistributedDataParallel", ", wrapped already", ddp_fix),
            (by_us, twice, ", converted already", twice_fix),
            (by_torch, twice, torchs, twice_fix),
            (scripted, "batch norms in plain modules", " in TorchScript", "Script the model after training."),
        ):
            expect(not names, "SyncBatchNorm", expected=expected, got=listed(names) + got, fix=fix)


# ---------------------------------------------------------------------- finding layers


def batch_norms(model: nn.Module) -> dict[str, str]:
    """Return every registered batch norm by path, with the scope of its training statistics.

    Returns:
        ``"group"`` (this package's plugin), ``"group (torch)"`` (torch's own conversion), or ``"rank"``.

    Example:
        >>> from torch import nn
        >>> batch_norms(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        {'1': 'rank'}
    """
    kinds = {}
    for name, module in model.named_modules():
        if not isinstance(module, BATCH_NORM_TYPES):
            continue
        kinds[name] = "rank"
        if is_synced(module):
            kinds[name] = "group"
        elif isinstance(module, nn.SyncBatchNorm):
            kinds[name] = "group (torch)"
    return kinds


def is_synced(layer: nn.Module) -> bool:
    """Return whether this package's plugin runs the layer."""
    return isinstance(layer.__dict__.get("forward"), SyncedForward)


def _named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every registered batch norm, with its name in messages."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORM_TYPES):
            yield f"SyncBatchNorm `{name}`" if name else "SyncBatchNorm", module


def _unregistered_layers(model: nn.Module, known: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the batch norms in lists, dicts, callbacks or the data module, with their paths."""
    for path, outer in unregistered_modules(model, objects_beside_module(attached_trainer(model))):
        for name, module in outer.named_modules():
            if isinstance(module, BATCH_NORM_TYPES) and id(module) not in known:
                known.add(id(module))
                yield f"{path}.{name}" if name else path, module


# ---------------------------------------------------------------------- one layer


class SyncedForward(MethodPatch):
    """Runs one layer over the rows of all ranks while it trains.

    Args:
        layer: A batch norm.
        title: Name in messages, or path if the model has not registered the layer.
        scope: Function that returns the ranks that normalise together, once torch.distributed is initialised.
        plan: Plan of the model's batch norms.
        not_yet_in: The model, if it has not registered the layer. If the layer is still not registered when it trains, this is an error.

    Attributes:
        calls: Number of calls over more than one rank.
        rows: Rows (dimension 0) of the last call on this rank.
    """

    synchronises = True

    def __init__(
        self,
        layer: nn.Module,
        title: str,
        scope: Callable[[], Scope],
        plan: ForwardPlan,
        *,
        not_yet_in: nn.Module | None = None,
    ) -> None:
        super().__init__(layer)
        self.title, self.scope, self._plan = title, scope, plan
        self.calls = self.rows = 0
        self._not_yet_in = not_yet_in

    @eager_recursive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, unchanged in evaluation mode, in a world of one rank, and if the input already has all rows."""
        if not self._takes_statistics() or not process_groups.is_distributed():
            return self.original(*args, **kwargs)
        if self._not_yet_in is not None and process_groups.world_size() > 1:
            self._find_registered(self._not_yet_in)
        if autograd_graph.is_inside_global_batch():
            return self.original(*args, **kwargs)
        scope = self.scope()
        if process_groups.world_size(scope.handshake_group) == 1 or scope.subgroup_size == 1:
            return self.original(*args, **kwargs)
        try:
            with _ReplacedBatchNorm(self, scope) as replaced:
                output = self.original(*args, **kwargs)
            if not replaced.was_called:
                raise ConfigurationError(
                    f"{self.title}: {type(self.module).__name__}.forward",
                    expected="a call of torch.nn.functional.batch_norm",
                    got="none: it computes the statistics of this rank's rows by itself",
                    fix="Leave the layer out, or let its forward end in torch.nn.functional.batch_norm.",
                )
        except Exception as error:  # an error that all ranks raise passes through
            raise_in_scope(scope, error, self.title)
        return output

    def _takes_statistics(self) -> bool:
        """Return whether the layer normalises by the statistics of its input and trains something by them.

        A layer without running statistics also does so in evaluation mode, in which a part of a model may be frozen. Without gradients
        that is an evaluation, in which ranks may have different numbers of batches.
        """
        layer: Any = self.module
        if layer.training:
            return True
        return layer.running_mean is None and layer.running_var is None and torch.is_grad_enabled()

    def _find_registered(self, model: nn.Module) -> None:
        """Update the title to the name under which the model has registered the layer in the meantime.

        Raises:
            ConfigurationError: if it has not.
        """
        title = next((title for title, known in _named_layers(model) if known is self.module), None)
        expect(
            title is not None,
            f"{type(self.module).__name__} at {self.title}",
            expected="a batch norm in a registered submodule",
            got="one that trains on this rank's rows alone: the model has not registered it, so it is not synchronised",
            fix="Assign the module that holds it to an attribute of the LightningModule (nn.ModuleList or nn.ModuleDict for "
            "several), or put it into evaluation mode.",
        )
        self.title, self._not_yet_in = str(title), None

    def batch_norm(
        self,
        scope: Scope,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Compute ``torch.nn.functional.batch_norm`` over the rows of all ranks."""
        plain = (input, running_mean, running_var, weight, bias, training, momentum, eps)
        if not training or not input.is_floating_point() or eps <= 0:
            return functional.batch_norm(*plain)  # torch's result or error
        self.calls += 1
        self.rows = input.shape[0]
        # statistics of all ranks' rows
        call = Call(self.title, self.calls, scope)
        statistics = gather_statistics(call, input, f"eps={eps}, momentum={momentum}", self._plan)
        # without rows, or for mismatched channels, torch's result or error
        known = next((t for t in (running_mean, weight) if t is not None), None)
        is_empty = not isinstance(statistics.total, Tensor) and statistics.total == 0
        if is_empty or (known is not None and known.numel() != input.shape[1]):
            return functional.batch_norm(*plain)
        # running averages, equal on every rank, then the rows. Without rows the averages do not change
        share = momentum * (statistics.total > 0)
        if isinstance(share, Tensor):
            share = share.to(statistics.mean.dtype)
        with torch.no_grad():
            _update_average_(running_mean, statistics.mean, share)
            _update_average_(running_var, statistics.unbiased, share)
        return normalise(call, input, statistics, weight, bias, eps)


class _ReplacedBatchNorm(TorchFunctionMode):
    """Replaces torch's batch norm by the synchronised one inside a block."""

    def __init__(self, layer: SyncedForward, scope: Scope) -> None:
        super().__init__()
        self._layer, self._scope = layer, scope
        self.was_called = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.was_called = True
        kwargs = kwargs or {}
        rows = args[0] if args else kwargs["input"]
        return keep_rows(rows, lambda: self._layer.batch_norm(self._scope, *args, **kwargs))


def _update_average_(running: Tensor | None, value: Tensor, share: float | Tensor) -> None:
    if running is None:
        return
    if running.dtype == value.dtype:
        running.lerp_(value, share)
    else:
        running.copy_(running.to(value.dtype).lerp(value, share))


# ---------------------------------------------------------------------- before backward


class BeforeBackwardPatch(MethodPatch):
    """Replaces the LightningModule's ``on_before_backward``, which Lightning calls in each backward, including manual ones.

    Args:
        module: The LightningModule.
        layers: The synchronised layers.
        scope: Function that returns the ranks that exchange statistics.
    """

    def __init__(self, module: pl.LightningModule, layers: Sequence[SyncedForward], scope: Callable[[], Scope]) -> None:
        super().__init__(module, "on_before_backward")
        self._layers, self._scope = layers, scope

    def __call__(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compare the layers in the ranks' graphs, then call the module's own hook."""
        if any(layer.calls for layer in self._layers):
            scope = self._scope()
            nodes = synced_nodes(loss)
            try:
                check_same_names(
                    "batch norms that the loss depends on",
                    sorted(node.synced_call for node in nodes),
                    "Use the output of every batch norm in the loss of every rank (times 0 if it should not count).",
                    group=scope.handshake_group,
                )
            except Exception as error:
                raise_in_scope(scope, error, "backward")
            for node in nodes:
                node.is_agreed = True
        return self.original(loss, *args, **kwargs)


class TrainEndPatch(MethodPatch):
    """Replaces the LightningModule's ``on_train_end`` to check the last forward, which is not followed by another one.

    Args:
        module: The LightningModule.
        plan: Plan of its batch norms.
        scope: Function that returns the ranks that exchange statistics.
    """

    def __init__(self, module: pl.LightningModule, plan: ForwardPlan, scope: Callable[[], Scope]) -> None:
        super().__init__(module, "on_train_end")
        self._plan, self._scope = plan, scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the last forward, then call the module's own hook. Communication: one handshake, if there are subgroups."""
        scope = self._scope()
        try:
            refuse_earlier_calls(self._plan, scope, of_all=True)
            if scope.subgroup_size is not None:  # the other subgroups do not have its counts
                handshake.all_gather("batch norms at the end of training", {}, group=scope.handshake_group)
        except Exception as error:
            raise_in_scope(scope, error, "the end of training")
        return self.original(*args, **kwargs)


def synced_nodes(loss: Tensor) -> list[Any]:
    """Return the nodes of synchronised layers in the graph of ``loss``."""
    return [node for node, _ in autograd_graph.walk_graph([loss]) if hasattr(node, "synced_call")]


def check_same_names(what: str, names: Iterable[str], fix: str, *, group: Group = None) -> None:
    """Compare lists of names between ranks.

    Raises:
        RankMismatchError: on every rank, with the first names that some ranks do not have.

    Communication: one handshake, and one more if ranks differ.
    """
    own = list(names)
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    if process_groups.world_size(group) == 1 or len(set(handshake.all_gather(what, {}, digest, group=group))) == 1:
        return
    gathered = handshake.all_gather_json(f"all {what}", {}, own, group=group)
    common = set.intersection(*map(set, gathered))
    others = [[name for name in of_rank if name not in common] for of_rank in gathered]
    ranks = [f"{len(common)} in common" + "; ".join(["", listed(names)] if names else []) for names in others]
    raise RankMismatchError(what, expected="the same on every rank", ranks=ranks, fix=fix, collective=True, page="F61")


def raise_in_scope(scope: Scope, error: Exception, where: str) -> NoReturn:
    """Raise on every rank of the handshakes' group. If it is a part of the world, a later handshake may report it to the other ranks."""
    try:
        handshake.raise_on_all_ranks(error, where, group=scope.handshake_group)
    except Exception as raised:
        if process_groups.world_size(scope.handshake_group) < process_groups.world_size():
            handshake.note_on(raised, collective=False)
        raise
