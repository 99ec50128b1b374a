"""The set-up of DDP: its options, the start of the world, who reduces which parameter, buffers, frozen parameters, batch norm, launchers.

Batch norm: ``Trainer(sync_batchnorm=True)`` on a device where torch's ``SyncBatchNorm`` does not run gets the exact one. Layers and
strategies do not import each other: the package passes the plugin on when it is imported.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import launch_variables, lightning_compat, torch_compat
from lightning_ddp_losses.core.modules import plain_norms
from lightning_ddp_losses.core.precision import has_buffers
from lightning_ddp_losses.distributed import process_groups, raw_collectives, rendezvous
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import ConfigurationError, expect, listed
from lightning_ddp_losses.strategies.fit_part import FitPart
from lightning_ddp_losses.strategies.loss_discovery import ADOPTED, FoundLoss, named_tensors

_FIRST_BUCKET_BYTES = 1 << 20  # DDP's own (torch 2.13)
_OPTIONS_THAT_CHANGE_BUCKETS = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "delay_all_reduce_named_params",
    "find_unused_parameters",
)
_WITHOUT_TORCHS_BATCH_NORM = ("cpu", "mps")

# ---------------------------------------------------------------------- options of torch's DDP


def without_defaults(ddp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return DDP's options that differ from DDP's defaults.

    A YAML file fills in all of them with their defaults, even ``device_ids``, which Lightning passes itself. A YAML file and Python
    code without these options must give the same settings.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    changed = {}
    for name, value in ddp_kwargs.items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if value is not default and value != default:
            changed[name] = value
    return changed


def refuse_unknown_options(strategy: type, ddp_kwargs: Collection[str]) -> None:
    """Refuse options that torch's DDP would refuse when it wraps the model, each with the option that it may have meant.

    Args:
        strategy: Class of the strategy. Its own options are known too.
        ddp_kwargs: Names that are left for torch's DDP.

    Raises:
        ConfigurationError: for an unknown name, and for one that Lightning passes itself.
    """
    of_ddp = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", "device_ids"}
    unknown = sorted(set(ddp_kwargs) - of_ddp)
    # every option by name, of the strategy and of its bases
    known = set(of_ddp)
    for cls in strategy.__mro__:
        for name, parameter in inspect.signature(vars(cls).get("__init__", object)).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self":
                known.add(name)
    meant = [difflib.get_close_matches(name, sorted(known), n=1) for name in unknown]
    questions = [f"Did you mean {close[0]}?" for close in meant if close]
    expect(
        not unknown,
        f"{strategy.__name__}: options",
        expected="its own, those of Lightning's DDPStrategy, or those of torch's DistributedDataParallel",
        got=", ".join(unknown),
        fix=" ".join(questions) or None,
    )


# ---------------------------------------------------------------------- the world


def start_strategy_world(strategy: Any, timeout: timedelta | None) -> None:
    """Start the default process group of a strategy's processes like Lightning, but over separate keys (``rendezvous``)."""
    environment, device = strategy.cluster_environment, strategy.root_device
    refuse_foreign_address(environment, strategy.num_nodes)
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    backend = strategy.process_group_backend or dist.get_default_backend_for_device(device)
    rendezvous.start_world(
        address,
        port,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        backend=backend,
        timeout=timeout,
        device=None if device.type == "cpu" else device,
    )
    rank_zero_info(f"All {strategy.world_size} ranks are here (backend {backend}).")


def refuse_foreign_address(environment: Any, num_nodes: int) -> None:
    """Refuse an address of another machine for ranks that are all on this one: they would wait there until the time-out.

    Args:
        environment: Lightning's cluster environment. A cluster's and ``torchrun``'s have a correct address.
        num_nodes: Number of nodes of the Trainer.

    Raises:
        ConfigurationError: on every rank, as all of them read the same variable.
    """
    if num_nodes > 1 or not isinstance(environment, LightningEnvironment):
        return
    address = environment.main_address
    if not launch_variables.is_of_this_machine(address):
        raise ConfigurationError(
            "MASTER_ADDR",
            expected="an address of this machine, on which all ranks of one node start",
            got=address,
            fix=f"{launch_variables.ADVICE} For several nodes set num_nodes, and start the Trainer on each.",
            collective=True,
        )


# ---------------------------------------------------------------------- who reduces what


@dataclass(frozen=True)
class WrapPlan:
    """Says who reduces what.

    Attributes:
        reduced: Parameters that the model's DDP reduces. None, where DDP would refuse the module (a frozen encoder).
        ignored: Names that the model's DDP ignores: losses, class shards, and names that the user excluded.
        ignored_by_user: Names that the user excluded from DDP. Their gradients stay local.
        unsynchronised: Tensors that DDP will not broadcast and that ought to start equal.
    """

    reduced: list[nn.Parameter]
    ignored: set[str]
    ignored_by_user: set[str]
    unsynchronised: list[Tensor]


def plan(module: nn.Module, losses: Iterable[FoundLoss]) -> WrapPlan:
    """Divide a module's parameters between the model's DDP and the losses' reduction."""
    tensors = dict(named_tensors(module))
    of_losses: set[str] = set()
    for loss in losses:
        if loss.owned:
            of_losses.update(f"{loss.name}.{name}" for name, _ in named_tensors(loss.module))
    by_user = torch_compat.ddp_ignored_names(module)
    shards = {name for name, tensor in tensors.items() if shard_of(tensor) is not None}
    ignored = of_losses | by_user | shards
    reduced = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    # without a DDP around the model nothing else broadcasts these tensors
    left = of_losses if reduced else set(tensors) - by_user
    unsynchronised = [tensor for name, tensor in tensors.items() if name in left - shards]
    return WrapPlan(reduced, ignored, by_user, unsynchronised)


@contextlib.contextmanager
def ignoring(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let DDP be built inside the block without the tensors of these names."""
    marked = [tensor for name, tensor in named_tensors(module) if name in names]
    with torch_compat.ddp_ignoring(module, names, marked):
        yield


def first_bucket(parameters: Iterable[Tensor], ddp_kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of gradient that must be ready before DDP sends any. 0 if unknown.

    DDP fills buckets of one dtype and device each, the first up to 1 MiB, and sends them in order.
    """
    if any(ddp_kwargs.get(option) for option in _OPTIONS_THAT_CHANGE_BUCKETS):
        return 0
    totals: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        totals[kind] = totals.get(kind, 0) + parameter.nbytes
    return min([_FIRST_BUCKET_BYTES, *totals.values()])


def reduce_after_backward(ddp: DistributedDataParallel, exchange_calls: Callable[[], None]) -> None:
    """Let DDP send its buckets when backward is through, in the order of the buckets, which is the same on every rank.

    With ``find_unused_parameters`` ranks may use different parts of the model. Gradients then arrive in another order on each rank. If
    buckets were sent immediately, one could be paired with a global loss's exchange in the backward of a rank with the other order.

    Args:
        ddp: The model's DDP, without a communication hook.
        exchange_calls: Exchanges the call check of this backward.
    """
    waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

    def send() -> None:
        exchange_calls()
        started = [(future, raw_collectives.start_mean(gradients)) for future, gradients in waiting]
        waiting.clear()
        for future, wait in started:
            future.set_result(wait())

    def keep(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            waiting.clear()  # of a backward that failed
            torch_compat.call_after_backward(send)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        waiting.append((future, bucket.buffer()))
        return future

    keep.__annotations__.clear()  # DDP compares them with types, not with their names
    ddp.register_comm_hook(None, keep)


def broadcast_buffers(module: nn.Module, losses: Iterable[FoundLoss], ddp_kwargs: Mapping[str, Any]) -> None:
    """Give all ranks rank 0's buffers if there is no DDP around the model. The losses keep theirs.

    The messages are those of DDP's forward, which may run on ranks with fewer frozen parameters.
    """
    if ddp_kwargs.get("forward_sync_buffers", ddp_kwargs.get("broadcast_buffers", True)) is False:
        return
    # called in each step: most models do not have buffers, and names take ten times as long
    owned = [loss for loss in losses if loss.owned]
    if not dist.is_initialized() or not has_buffers(module, [loss.module for loss in owned]):
        return
    of_losses = tuple(f"{loss.name}." for loss in owned)
    by_user = torch_compat.ddp_ignored_names(module)
    buffers = [
        buffer
        for name, buffer in module.named_buffers()
        if not name.startswith(of_losses) and name not in by_user and shard_of(buffer) is None
    ]
    if buffers:
        torch_compat.broadcast_as_ddp_does(buffers, ddp_kwargs.get("process_group"))


def broadcast_unsynchronised(tensors: Sequence[Tensor], ddp_kwargs: Mapping[str, Any]) -> None:
    """Give all ranks rank 0's values of tensors that DDP does not broadcast, unless its options forbid it."""
    if ddp_kwargs.get("init_sync", True):
        buffers = ddp_kwargs.get("broadcast_buffers", True) is not False
        raw_collectives.broadcast_([t for t in tensors if buffers or isinstance(t, nn.Parameter)])


# ---------------------------------------------------------------------- frozen parameters


def frozen_names(module: nn.Module, reduced: Iterable[Tensor]) -> list[str]:
    """Return the names of those parameters that DDP reduces and that do not train any more."""
    frozen = [id(tensor) for tensor in reduced if not tensor.requires_grad]
    if not frozen:
        return []  # called in each step, and names take long
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names.get(place, "a parameter that the module holds no more") for place in frozen]


def refuse_frozen(names: Sequence[str], comm_state: object) -> None:
    """Refuse parameters that were frozen if the model cannot be wrapped again without them.

    Args:
        names: Names of the parameters.
        comm_state: State of DDP's communication hook. None without one.

    Raises:
        ConfigurationError: naming them.
    """
    expect(
        comm_state is None,  # it keeps something of each bucket, and buckets would be others
        f"parameters frozen during the fit: {listed(names)}",
        expected="no ddp_comm_state, which is of the buckets that DDP had at the start",
        got=type(comm_state).__name__,
        fix="Set their learning rate to 0 instead, or take a hook without a state.",
    )
    raise ConfigurationError(
        f"parameters frozen inside training_step: {listed(names)}",
        expected="a gradient of each of them in this backward, as when the step began",
        got="requires_grad=False",
        fix="Freeze them before the step (on_train_batch_start, BaseFinetuning); where optimizers take turns (toggle_optimizer), set "
        "find_unused_parameters=True (strategy='ddp_losses_find_unused_parameters_true').",
    )


def refuse_sharded_parameters(module: nn.Module) -> None:
    """Refuse parameters that are divided over the ranks (``fully_shard``, tensor parallelism): DDP needs them whole.

    Raises:
        ConfigurationError: with their names.
    """
    parts = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    expect(
        not parts,
        f"parameters {listed(parts)}",
        expected="whole parameters on every rank, which DDP averages",
        got="DTensors, of which each rank holds a part (fully_shard or tensor parallelism)",
        fix='Take strategy="fsdp2_ddp_losses" (ModelParallelLossStrategy): FSDP2 beside exact losses. Or leave out fully_shard: an '
        "encoder that fits only in pieces of the batch runs in microbatched(encoder, rows).",
    )


def refuse_static_graph_by_hand(module: LightningModule, ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuse a static graph in manual optimisation: the gradients of the first backward would not be reduced.

    DDP reduces them together in that backward, which it finds through the result of ``forward``. ``manual_backward`` runs earlier.
    (torch 2.13, Lightning 2.6.6)

    Raises:
        ConfigurationError: naming the option.
    """
    expect(
        module.automatic_optimization or not ddp_kwargs.get("static_graph", False),
        "static_graph=True",
        expected="automatic optimisation",
        got="automatic_optimization=False, under which torch's DDP does not reduce the first backward",
        fix="Leave static_graph out; find_unused_parameters=True where a backward leaves out parameters.",
    )


# ---------------------------------------------------------------------- batch norm

_exact_layer_sync: list[type[LayerSync]] = []


def use_layer_sync(kind: type[LayerSync]) -> None:
    """Set the plugin that synchronises batch norm on any device (``SyncBatchNorm``).

    Example:
        >>> from lightning_ddp_losses import SyncBatchNorm
        >>> use_layer_sync(SyncBatchNorm)  # as importing the package does
    """
    _exact_layer_sync[:] = [kind]


def exact_layer_sync() -> LayerSync:
    """Return a plugin that synchronises batch norm on any device and leaves the modules in their place."""
    return _exact_layer_sync[0]()


def choose_layer_sync(device: torch.device, chosen: LayerSync | None) -> LayerSync | None:
    """Return the plugin that Lightning chose, or the exact one where torch's would fail in the first training step."""
    if type(chosen) is TorchSyncBatchNorm and device.type in _WITHOUT_TORCHS_BATCH_NORM:
        return exact_layer_sync()
    return chosen


class BatchNormNote(FitPart):
    """Names the batch norms that are not synchronised, when training begins. Those inside a loss over all rows are exact and left out."""

    def on_train_start(self) -> None:
        """Log a note on rank 0, if there are two ranks or more."""
        module = self.fit.module
        losses = [name for name, inner in module.named_modules() if getattr(inner, "sees_global_batch", False)]
        inside = tuple(f"{name}." for name in losses)
        norms = [name for name, norm in plain_norms(module).items() if norm.training]
        names = [name for name in norms if not name.startswith(inside)]
        if names and process_groups.world_size() > 1:
            rank_zero_info(
                f"Batch norm ({listed(names, 3)}) is not synchronised: if its input has the rows of one rank, gradients differ "
                "from those of one process. Trainer(sync_batchnorm=True) uses the rows of all ranks (`ddp-losses explain F59`)."
            )


# ---------------------------------------------------------------------- launchers


def refuse_notebook(launcher: Any, strategy_name: str) -> None:
    """Refuse processes that a notebook cannot start. Lightning refuses them next, and names a strategy without this package.

    Raises:
        ConfigurationError: A launcher that starts the program again, in a notebook or an interactive interpreter.
    """
    cannot_start = launcher is not None and not launcher.is_interactive_compatible and lightning_compat.is_interactive()
    expected = "a strategy that a notebook can start"
    fix = 'Use Trainer(strategy="ddp_losses_notebook"), or DDPLossStrategy(start_method="fork") with options. Or run a script.'
    if strategy_name != "ddp_losses":
        fix = f'Run a script. Use Trainer(strategy="ddp_losses_notebook") where the model fits on one device: {strategy_name} divides it.'
    expect(
        not cannot_start,
        f"{strategy_name} in a notebook",
        expected=expected,
        got="processes that run a script",
        fix=fix,
    )


class WholeStateLauncher(lightning_compat.multiprocessing_launcher()):  # type: ignore[misc]
    """Launches ranks as processes of the main one (``spawn``, ``fork``, a notebook), and sends whole tensors back.

    After a fit the first rank of a node sends its module's ``state_dict`` to the main process of that node, which loads it. A sharded
    weight in it would have only one rank's classes, so all ranks assemble the whole weight.
    """

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        """Return the data for the main process, None on most ranks. Collective, at the end of a run without errors.

        Communication: after a fit, each rank sends its part of sharded weights to the first rank of each node.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return super()._collect_rank_zero_results(trainer, results)
        # 1. the whole, if a main process will get it
        strategy = trainer.strategy
        first_ranks = range(0, process_groups.world_size(), strategy.num_processes)
        state = strategy.whole_module_state(first_ranks)
        # 2. losses that the module of the main process lacks
        adopted = sorted({".".join(name.split(".")[:2]) for name in state if name.startswith(f"{ADOPTED}.")})
        if adopted:
            rank_zero_warn(
                f"{', '.join(adopted)}: losses that the module does not register (adopt=True) were trained in the ranks' processes, and "
                "the main process keeps them as they were before the fit. Assign them to attributes of the LightningModule, or take "
                "them from a checkpoint."
            )
        # 3. Lightning calls the module's `state_dict`
        module = trainer.lightning_module
        module.state_dict = lambda *args, **kwargs: state
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict


# ---------------------------------------------------------------------- names


def register_aliases(registry: Any, theirs: type, ours: Callable[..., Any]) -> None:
    """Register an alias of every name under which Lightning registers its ``ddp``: ``ddp_losses``, ``ddp_losses_spawn`` and so on.

    Args:
        registry: Registry of the Trainer's or of Fabric's strategies.
        theirs: Lightning's strategy.
        ours: Returns the strategy with learnable losses.
    """
    for name, entry in list(registry.items()):
        if entry["strategy"] is theirs:
            description = f"{entry['description']}, with learnable losses next to it"
            registry.register(
                name.replace("ddp", "ddp_losses", 1), ours, description, override=True, **entry["init_params"]
            )


def refuse_in_fabric(*, asked: str, **_: Any) -> NoReturn:
    """Refuse the name of a strategy that exists for the Trainer but not for Fabric.

    Args:
        asked: The name under which it is registered.

    Raises:
        ConfigurationError: always, with what to do instead.
    """
    raise ConfigurationError(
        f"Fabric(strategy={asked!r})",
        expected="a strategy of Fabric: ours is for lightning.pytorch.Trainer",
        got="a hand-written loop, in which nothing calls a Trainer's hooks",
        fix='Take Fabric(strategy="ddp_losses"), wrap losses in GlobalBatchLoss, and hand learnable ones to fabric.setup_module like a '
        "model. "
        "Loops whose gradients are those of one process: ddp-losses explain migrate fabric, for FSDP2 migrate fabric-fsdp2.",
    )


def nearest_names(name: str) -> str:
    """Return the registered strategy with the nearest name, and our names. An empty text if none is near."""
    near = difflib.get_close_matches(name, StrategyRegistry, n=1)
    ours = ", ".join(known for known in StrategyRegistry if "ddp_losses" in known)
    return f"Did you mean {near[0]}? Names of ours: {ours}." if near else ""


def register_refusals(names: list[str], registry: Any) -> None:
    """Register the refusal under each name of this package that is not registered in Fabric."""
    for name in names:
        if name not in registry:
            registry.register(name, refuse_in_fabric, description="for lightning.pytorch.Trainer only", asked=name)
