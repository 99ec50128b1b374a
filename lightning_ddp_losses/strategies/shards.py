"""`Shards`: parameters with classes divided over the ranks, treated as one weight by everything around them.

Losses divide themselves (``Shardable``) and tag their parameters. Lightning, DDP, optimizers and checkpoints take parameters to be equal
on all ranks. Here is the difference: they are divided at set-up, left out of broadcasts, scaled and clipped by the norm of the whole,
and put together for a checkpoint in one file.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_ddp_losses.core import lightning_compat, torch_compat
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.shard import ClassShard, Shardable, first_holders, local_part, shard_of, tags_kept
from lightning_ddp_losses.errors import InputError, RankMismatchError, expect
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.checkpoint_files import LOADING, SAVING
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

Owners = list[tuple[int, ClassShard]]
"""Who holds the classes of a parameter: one rank for each block, in the order of the classes."""

RECORDS = "ddp_losses_shards"
"""Key of a checkpoint under which each divided weight has its number of rows per class."""

# norms, factors or directions of a whole weight, or of all weights together
_OF_WHOLE_WEIGHTS = frozenset({"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"})


class Shards(FitPart):
    """Divides class weights over the ranks, and lets everything else treat the parts as one weight.

    Args:
        fit: The fit.
        parameters_of: Returns the parameters that checkpoints of a module hold, by name.

    Attributes:
        parameters: Divided parameters by name.
        owners: By name, the rank of each block of classes.
    """

    def __init__(self, fit: Fit, parameters_of: Callable[[nn.Module], Mapping[str, nn.Parameter]]) -> None:
        super().__init__(fit)
        self.parameters: dict[str, nn.Parameter] = {}
        self.owners: dict[str, Owners] = {}
        self._parameters_of = parameters_of
        self._replicas: dict[str, int] = {}
        self._is_set_up = False

    # ------------------------------------------------------------------ set-up

    def setup_shards(self) -> None:
        """Divide the losses that can be divided, once the ranks exist. Once per fit.

        Raises:
            RankMismatchError: on every rank, when the blocks of a parameter leave classes out or overlap.
            ConfigurationError: on every rank, for custom gradient clipping, which would clip by one rank's part of the weight.

        Communication: one handshake if there are shards.
        """
        if self._is_set_up:
            return
        module = self.fit.module
        shard_losses(module)
        parameters = self._parameters_of(module)
        found = {name: shard_of(parameter) for name, parameter in parameters.items()}
        shards = {name: shard for name, shard in found.items() if shard is not None}
        if shards:
            # send to every rank which rank holds which classes
            own = [[s.start, s.stop, s.num_classes, s.dim, s.per_class] for s in shards.values()]
            by_rank = handshake.all_gather_json("class shards", {}, own)
            for name, *rows in zip(shards, *by_rank, strict=True):
                of_ranks = [ClassShard(*row) for row in rows]
                self.owners[name] = _owners_of_blocks(name, of_ranks)
                self._replicas[name] = sum(s.classes for s in of_ranks) // of_ranks[0].num_classes
            expect(
                process_groups.world_size() == 1 or not is_overridden("configure_gradient_clipping", module),
                "configure_gradient_clipping",
                expected="Lightning's own, where classes are divided over the ranks",
                got=f"an override in {type(module).__name__}, which sees one rank's rows of {', '.join(shards)}",
                fix="Use Trainer(gradient_clip_val=...): the norm then counts the rows of all ranks once.",
                collective=True,
            )
        self.parameters, self._is_set_up = {name: parameters[name] for name in shards}, True

    @contextlib.contextmanager
    def moving(self, module: LightningModule) -> Iterator[None]:
        """Keep the tags of shards while the module is moved to another device inside the block, which may make new parameters."""
        with tags_kept(module):
            yield
        parameters = self._parameters_of(module) if self.parameters else {}
        self.parameters = {name: parameters[name] for name in self.parameters}

    def install(self) -> None:
        """Let optimizers, gradient clipping and a gradient scaler treat shards as parts of a whole.

        Raises:
            ConfigurationError: on every rank, for an optimizer that computes with a weight as a whole.
        """
        module, strategy = self.fit.module, self.fit.strategy
        if self.parameters:
            for optimizer in strategy.optimizers:
                self._refuse_optimizer_of_whole_weights(optimizer)
                for loss in _shardable(module):
                    loss.attach(optimizer)
        # a rank holds a part of some parameter: classes of a loss, or of a model that ``fully_shard`` divides
        if self.parameters or any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            self._install_clipping(strategy.precision_plugin)
            scaler = getattr(strategy.precision_plugin, "scaler", None)
            if scaler is not None:
                self.undo.callback(lightning_compat.replace_unscaling(scaler, unscale_parts))

    def setup_new_shards(self) -> None:
        """Divide and install once more, after losses were registered in the middle of set-up."""
        self.teardown()
        self.setup_shards()
        self.install()

    def teardown(self) -> None:
        """Undo ``install``. The next use looks for shards again."""
        super().teardown()
        self.parameters, self.owners, self._replicas, self._is_set_up = {}, {}, {}, False

    @staticmethod
    @contextlib.contextmanager
    def excluded(module: nn.Module) -> Iterator[None]:
        """Keep the shards out of a broadcast of the module's states."""
        names = {name for name, p in module.named_parameters() if shard_of(p) is not None}
        with ddp_setup.ignoring(module, names) if names else contextlib.nullcontext():
            yield

    @staticmethod
    def refuse_shards(module: nn.Module) -> None:
        """Refuse losses that shard themselves if the strategy is plain DDP.

        Raises:
            ConfigurationError: naming them.
        """
        found = [name for name, inner in module.named_modules() if isinstance(inner, Shardable)]
        expect(
            not found,
            "losses=[]",
            expected="no loss whose classes are divided over the ranks",
            got=", ".join(found),
            fix="Plain DDP would broadcast one rank's rows to all; leave losses at 'auto'.",
        )

    def _refuse_optimizer_of_whole_weights(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        if process_groups.world_size() == 1 or name.lower() not in _OF_WHOLE_WEIGHTS:
            return
        divided = next(filter(None, map(self.of, parameters_in_order(optimizer))), None)
        expect(
            divided is None,
            f"optimizer of {divided}",
            expected="one that treats each number by itself (SGD, Adam, ...): a rank holds some of the rows",
            got=f"{name}, which computes with the weight as a whole",
            fix="Give the divided weight an optimizer of its own, or leave ClassShardedLoss out.",
            collective=True,
        )

    # ------------------------------------------------------------------ steps

    @property
    def is_divided(self) -> bool:
        """Whether there are weights with divided classes."""
        return bool(self.parameters)

    def of(self, parameter: Tensor) -> str | None:
        """Return the name of a shard, None for another parameter."""
        return next((name for name, p in self.parameters.items() if p is parameter), None)

    def on_train_end(self) -> None:
        """Refuse shards that something has broadcast since their last call. Communication: one handshake for each loss with shards."""
        for loss in _shardable(self.fit.module) if self.parameters else ():
            loss.refuse_equal_shards()

    def _install_clipping(self, plugin: Any) -> None:
        """Let the precision plugin clip by the norm over the parts of all ranks."""

        def clip(optimizer: Any, clip_val: float) -> None:
            self.clip_(list(plugin.main_params(optimizer)), float(clip_val))

        def clip_values(optimizer: Any, clip_val: float) -> None:
            # torch does not accept lists that mix DTensors and plain tensors
            for parameter in plugin.main_params(optimizer):
                if parameter.grad is not None:
                    local_part(parameter.grad).clamp_(-float(clip_val), float(clip_val))

        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = clip, clip_values
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            self.undo.callback(vars(plugin).pop, name, None)

    def clip_(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        """Clip as ``torch.nn.utils.clip_grad_norm_`` does in one process that holds every class, and return the norm, 0-dim."""
        # 1. gradients by the number of ranks that hold the same part
        by_copies: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                by_copies.setdefault(self._copies(parameter), []).append(local_part(parameter.grad))
        grads = [grad for found in by_copies.values() for grad in found]
        if not grads:
            return torch.zeros(())
        # 2. squares in float32 or wider: in float16 the square of a norm above 256 overflows
        device, dtypes = grads[0].device, {grad.dtype for grad in grads}
        dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        square = torch.zeros(1, device=device, dtype=dtype)
        for copies, found in by_copies.items():
            norms = torch.stack([norm.to(device) for norm in torch_compat.norms(found, dtype)])
            square += norms.square().sum() / copies
        # 3. the norm of the whole, to which each rank adds its share of what several hold
        norm = raw_collectives.sum_over_ranks(square, None)[0].sqrt()
        # 4. scale with torch's formula
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for place in {grad.device for grad in grads}:
            torch_compat.multiply_([grad for grad in grads if grad.device == place], factor.to(place))
        return norm

    def _copies(self, parameter: nn.Parameter) -> int:
        """Return how many ranks hold the same part of a parameter: all of them, if it is whole."""
        name = self.of(parameter)
        if name is not None:
            return self._replicas[name]
        if not isinstance(parameter, DTensor):
            return process_groups.world_size()
        mesh, placements = parameter.device_mesh, parameter.placements
        return math.prod(mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_shard())

    # ------------------------------------------------------------------ checkpoints in one file

    def whole_state(self, state: Mapping[str, Any], receivers: Iterable[int] = (0,)) -> dict[str, Any]:
        """Return the module's state with whole divided parameters, on some ranks.

        Args:
            state: State of the module, each rank's own.
            receivers: Ranks that get whole class weights. The others get tensors of that shape without memory. The whole of a
                ``DTensor`` is on rank 0.

        Communication: each rank sends its classes to each receiver. One gather for each ``DTensor``.
        """
        found = {name: _on_rank_zero(value) for name, value in state.items()}
        for receiver in receivers:
            for name in filter(state.__contains__, self.parameters):
                whole = assemble(state[name], self.owners[name], receiver)
                if found[name] is state[name] or not whole.is_meta:
                    found[name] = whole
        return found

    def whole_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state dict with the whole of what belongs to a divided parameter, on rank 0."""

        def whole(value: Any, parameter: Tensor) -> Any:
            name = self.of(parameter)
            # moments have the parameter's shape. Step counts and the like do not
            if name is not None and is_part(value, parameter):
                return assemble(value, self.owners[name])
            return _on_rank_zero(value)

        return map_optimizer_state(optimizer, state, whole)

    def completed(self, checkpoint: Mapping[str, Any], *, as_folder: bool) -> dict[str, Any]:
        """Return a checkpoint with whole averages, which a callback put in place of the weights. Collective.

        Raises:
            ConfigurationError: on every rank, for averages in a folder: the weights beside them would be one rank's.

        Communication: one handshake if there are shards.
        """
        state = dict(checkpoint["state_dict"])
        if not self.parameters:
            return dict(checkpoint)
        parts = []
        for name, parameter in self.parameters.items():
            value, shard = state.get(name), shard_of(parameter)
            if shard is None or value is None or not is_part(value, parameter):
                continue
            is_replaced = not as_folder or not value.is_set_to(parameter)
            if is_replaced and shard.classes < shard.num_classes:
                parts.append(name)
        handshake.all_gather(SAVING, {"class shards that a callback replaced": ", ".join(parts)})
        expect(
            not (parts and as_folder),
            "sharded_checkpoints",
            expected="the module's own weights in the checkpoint",
            got=f"what a callback put in the place of {', '.join(parts)}",
            fix="Save ordinary checkpoints: DDPLossStrategy(sharded_checkpoints=False).",
            collective=True,
        )
        state |= {name: assemble(state[name], self.owners[name]) for name in parts}
        records = {f"state_dict/{name}": {"per_class": own[0][1].per_class} for name, own in self.owners.items()}
        return {**checkpoint, "state_dict": state, RECORDS: records}

    def refuse_other_classes(self, checkpoint: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint with other classes before anything is loaded.

        Args:
            checkpoint: Loaded checkpoint.
            state: State of the module in it.

        Raises:
            InputError: on every rank, naming the parameter and both shapes.

        Communication: none, or one handshake that is paired with the peers' next one.
        """
        fix = "Load a checkpoint of a loss with the same classes and embedding size; nothing was loaded."
        with self.fit.raise_on_all_ranks(LOADING):
            for name, parameter in self.parameters.items():
                shard, value = shard_of(parameter), state.get(name)
                if shard is None or value is None:
                    continue
                expected, got = shard.whole_shape(parameter), tuple(value.shape)
                record = checkpoint.get(RECORDS, {}).get(f"state_dict/{name}", {})
                per_class = record.get("per_class", shard.per_class)
                classes = got[shard.dim] // per_class if len(got) > shard.dim else 0
                expect(
                    got == expected and per_class == shard.per_class,
                    f"checkpoint: {name}",
                    expected=f"{expected}, {shard.num_classes} classes of {shard.per_class} weight rows",
                    got=f"{got}, {classes} classes of {per_class}",
                    fix=fix,
                    error=InputError,
                )


# ---------------------------------------------------------------------- set-up


def shard_losses(module: nn.Module) -> None:
    """Divide the classes of every loss that supports it over the ranks. Collective."""
    for loss in _shardable(module):
        loss.shard_classes()


def _shardable(module: nn.Module) -> list[Shardable]:
    return [inner for inner in module.modules() if isinstance(inner, Shardable)]


def _owners_of_blocks(name: str, column: list[ClassShard]) -> Owners:
    """Return one holder per block. The blocks must follow each other from the first class to the last."""
    ranks = first_holders(column)
    if ranks is None:
        raise RankMismatchError(
            f"classes of `{name}`",
            expected=f"each of {column[0].num_classes} classes on one rank (on as many as every other class)",
            ranks=[f"{s.start} to {s.stop} of {s.num_classes}" for s in column],
            fix="Build the loss with the same group and the same classes on every rank.",
            collective=True,
            page="F16",
        )
    return [(rank, column[rank]) for rank in ranks]


# ---------------------------------------------------------------------- steps


def unscale_parts(own: Callable[..., Any], optimizer: Any, args: tuple[Any, ...]) -> dict[Any, Tensor]:
    """Unscale what this rank holds of an optimizer's gradients, and let what overflowed on one rank count on all.

    (Torch does not accept lists that mix ``DTensor`` and plain gradients. An overflow is found only on the rank that holds the part.)

    Args:
        own: The scaler's own function.
        optimizer: Optimizer of the gradients.
        args: Further arguments of the scaler's own function.

    Returns:
        By device, 1 if a gradient of some rank is not finite, else 0.

    Communication: one sum of a number for each device.
    """
    holders: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                holder = local_part(parameter.detach())
                holder.grad = local_part(parameter.grad)
                holders.append(holder)
    overflowed: dict[Any, Tensor] = own(SimpleNamespace(param_groups=[{"params": holders}]), *args)
    shared = {}
    for device, flag in overflowed.items():
        shared[device] = (raw_collectives.sum_over_ranks(flag.reshape(1), None) > 0).to(flag.dtype).reshape(flag.shape)
    return shared


# ---------------------------------------------------------------------- parts and wholes


def parameters_in_order(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield an optimizer's parameters in the order of its groups, as ``state_dict`` numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def names_of(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter of an optimizer, in the order of its groups."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [names.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(parameters_in_order(optimizer))]


def named_optimizer_state(parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with the names of parameters in place of their numbers."""
    names = names_of(parameters, optimizer)
    state = optimizer.state_dict()
    groups = [{**group, "params": list(map(names.__getitem__, group["params"]))} for group in state["param_groups"]]
    return {"state": {names[i]: entry for i, entry in state["state"].items()}, "param_groups": groups}


def is_part(value: Any, parameter: Tensor) -> bool:
    """Return whether a value belongs to a parameter entry by entry, as a moment does."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape


def assemble(part: Tensor, owners: Owners, receiver: int = 0) -> Tensor:
    """Return the whole tensor on one rank, and a tensor of its shape without memory on other ranks.

    (``DTensor.full_tensor`` would give every rank the memory of the whole.)

    Communication: each rank sends its part to the receiver.
    """
    shape, rank = owners[0][1].whole_shape(part), process_groups.rank()
    if len(owners) > 1:
        process_groups.internal_groups().warm_up(part.device)  # before two of all ranks need their group
    device = part.device if rank == receiver else torch.device("meta")
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.empty(shape, dtype=part.dtype, device=device)
        for owner, block in owners:
            # 1. the receiver has its own
            if rank == receiver == owner:
                block.own_part(whole).copy_(part)
            # 2. and receives the parts of other ranks
            elif rank == receiver:
                wanted = list(shape)
                wanted[block.dim] = block.classes * block.per_class
                block.own_part(whole).copy_(raw_collectives.receive(wanted, part, owner))
            elif rank == owner:
                raw_collectives.send(part, receiver)
    return whole


def _on_rank_zero(value: Any) -> Any:
    """Return the whole of a ``DTensor`` on rank 0, elsewhere a tensor of its shape without memory. Other values are returned unchanged."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor().detach()
    return whole.cpu() if process_groups.rank() == 0 else torch.empty_like(whole, device="meta")


def own_part(value: Any, like: Tensor | None) -> Any:
    """Return this rank's part of a saved whole if ``like`` is divided. Other values are returned unchanged. Communication: none."""
    if like is None or not isinstance(value, Tensor):
        return value
    if isinstance(like, DTensor) and value.shape == like.shape:
        # every rank has read the whole and keeps its part, without communication
        whole = value.to(like.to_local().device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    shard = shard_of(like)
    if shard is not None and tuple(value.shape) == shard.whole_shape(like) != tuple(like.shape):
        part = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
        return part.copy_(shard.own_part(value))
    return value


def map_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], change: Callable[[Any, nn.Parameter], Any]
) -> dict[str, Any]:
    """Return an optimizer's state dict with other values, which a function makes of each value and its parameter."""
    entries = dict(state["state"])
    for number, parameter in enumerate(parameters_in_order(optimizer)):
        if number in entries:
            entries[number] = {key: change(value, parameter) for key, value in entries[number].items()}
    return {**state, "state": entries}
