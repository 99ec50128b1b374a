"""Where whole objects that an earlier release pickled find their classes: one table of former and present names.

``torch.save(module)`` writes the module that each class lived in, private ones too, so a file that moves breaks files that users
keep. (State dicts and Lightning checkpoints name no class of ours; public classes say ``lightning_ddp_losses`` since then.) Who
moves or renames a class that objects hold adds one row to ``CLASSES``; who renames an attribute of one, a row to ``ATTRIBUTES``.

``pickle`` imports the module that it finds written and asks it for the class, so this file answers in both places: a module that is
gone is made anew, empty, and a module that lost a class is asked again here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from lightning_ddp_losses.errors import ConfigurationError

_PACKAGE = __name__.partition(".")[0]

CLASSES = {
    "audit.case.Diagnosis": "audit.context.Diagnosis",
    "audit.report.StepLoss": "audit.compare.StepLoss",
    "audit.rows.Row": "audit.compare.ComparedRow",
    "callbacks.data_verdicts.SameBatches": "callbacks.batch_check.SameBatches",
    "callbacks.gradients.Gradients": "callbacks.gradient_flow.StepGradients",
    "callbacks.local_facts.LocalFacts": "callbacks.findings.LocalFindings",
    "callbacks.reach.Reach": "core.autograd_graph.UnusedParameterFinder",
    "coefficient.CoefficientWatch": "distributed.upstream_grad.UpstreamGradWatch",
    "inputs.ValueReading": "core.inputs.ValueReading",
    "losses.class_sampling.ClassSampler": "losses.partial_fc.ClassSampler",
    "losses.global_batch.QueuePosition": "losses.queue_position.QueuePosition",
    "losses.global_batch._restore": "losses.queue_position._restore",
    "losses.memory.QueuePosition": "losses.queue_position.QueuePosition",
    "losses.memory._restore": "losses.queue_position._restore",
    "losses.randomness.Draws": "losses.gathered_call.SeedCounter",
    "metrics.convert._class_of": "metrics.conversion._class_of",
    "metrics.states.Shared": "metrics.states.MetricRecord",
    "samplers.draws.GlobalDraw": "samplers.seeded_draw.GlobalDraw",
    "sharding.tag_shard": "distributed.shard.tag_shard",
    "sharding._rebuild": "distributed.shard._rebuild",
    "stand_in._plain_method": "core.forward_patch._plain_method",
    "strategies.precision.PrecisionKeeper": "core.precision.PrecisionKeeper",
}
"""Former name -> present name of each class and function that a pickle may name. What is public (``__all__`` of the package), and what
did not move, is not listed."""

ATTRIBUTES = {
    "ClipLoss": {"_coefficients": "_upstream_grads"},
    "DifferentiableMetric": {"_shared": "_record"},
    "GlobalBatchLoss": {"_coefficients": "_upstream_grad", "_draws": "_seeds", "_told": "_warned"},
    "GlobalBatchMiner": {"_draws": "_seeds"},
    "SigLipLoss": {"_coefficients": "_upstream_grads"},
    "losses.partial_fc.ClassSampler": {"_calls": "number"},
    "metrics.states.MetricRecord": {"coefficients": "upstream_grads", "ends": "update_ends", "inside": "in_forward"},
}
"""Class, by its present name -> former name of an attribute -> present name. A class that takes former states itself, in its own
``__setstate__``, is not listed."""

RESTARTED = (
    "BatchCheck",
    "BufferSyncCheck",
    "CheckpointCheck",
    "CommunicationMonitor",
    "DeviceCheck",
    "GradientFlowCheck",
    "LossCheck",
    "OptimizerCheck",
    "ParameterSyncCheck",
)
"""Classes of which a pickle with former attributes brings the options alone: what else they hold belongs to one run."""

_FORMER_MODULES = """
audit: api auditor batches case compare diagnose facts fitting page pictures processes recorder records report
    rows rules rules_local rules_torn runs switches trace
.: bundles coefficient collectives configuration errors failing fingerprint first_order frames graph groups
    inputs messages microbatch numerics sending sharding stand_in transport unregistered verdicts
callbacks: alarm batch batch_norm batches buffers causes checkpoint communication contrastive court
    data_verdicts ddp_checks device digests divisors faults findings gradient_flow gradients loaders local_facts
    logged loss loss_verdicts meeting metric_states moments optimizer_check own_data parameter_sync queues
    rank_check reach report rows scale_probe scale_verdict session tracked wrap
cli: app arrays audit data digits encoders evaluation module pictures regression report sampling
layers: agreement statistics sync_batch_norm synced
losses: class_heads class_init class_logits class_penalties class_sampling class_sharded class_softmax
    class_weight clip columns global_batch memory mined miner pml pml_call randomness reduction refusals
    row_tiles rows separable siglip statistics table torch_losses two_towers whole_call
losses.tiled: call contrastive exponentials formula geometry pairs passes plan reducing softmax tile triplets
metrics: composites convert disagreement layout meeting metric refusals stages states
samplers: arguments draws global_batch randomness
strategies: adopting adoption advice ddp_losses disagreement discovery divided globalise guard hidden layer_sync
    managed meeting packing precision reduction reshuffle shard_files shards wrapping
"""
# every module of release 0.1 by its folder: what is not among ``CLASSES`` gets an error that says what to do


def install() -> None:
    """Let ``pickle`` find former names; called once, when the package is imported."""
    finder = _FormerModules()
    sys.meta_path.append(finder)  # behind the others: asked for modules that are not there
    importlib.import_module(f"{_PACKAGE}.sharding")  # a documented path that nobody imports here
    for name in list(sys.modules):
        if name in finder.known:  # it is still there, and may have lost a class
            vars(sys.modules[name]).setdefault("__getattr__", _asker(name.removeprefix(f"{_PACKAGE}.")))
    for name, renamed in ATTRIBUTES.items():
        _upgrade_state(present(name), renamed)
    for name in RESTARTED:
        _restart_from_options(present(name))
    _restart_strategy(present("DDPLossStrategy"))


class _FormerModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of earlier releases as empty ones, which are asked for the names of ``CLASSES``.

    Attributes:
        known: Full names of all modules of release 0.1.
    """

    def __init__(self) -> None:
        self.known, folder = set[str](), ""
        for word in _FORMER_MODULES.split():
            if word.endswith(":"):
                folder = f"{_PACKAGE}.{word[:-1]}".rstrip(".")
            else:
                self.known.add(f"{folder}.{word}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Know the former modules."""
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in self.known else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill a former module, which has nothing of its own."""
        former = module.__name__.removeprefix(f"{_PACKAGE}.")
        module.__doc__ = f"A module of an earlier release, for the objects that it pickled; see {__name__}."
        vars(module)["__getattr__"] = _asker(former, gone=True)


def _asker(module: str, *, gone: bool = False) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``."""

    def get_former(name: str) -> Any:
        former = f"{module}.{name}"
        if former in CLASSES:
            return present(CLASSES[former])
        package = sys.modules[_PACKAGE]
        if name in package.__all__:
            return getattr(package, name)
        # what is not found here is asked for with hasattr, too, which takes an AttributeError for an answer and no other error
        if not gone or name.startswith("__"):
            raise AttributeError(f"module {_PACKAGE}.{module} has no attribute {name!r}")
        raise ConfigurationError(
            "an object pickled by an earlier release",
            expected=f"classes that {_PACKAGE} still has",
            got=f"{_PACKAGE}.{former}",
            fix="Load it with the release that wrote it, save its state_dict(), and load that into a new object.",
        )

    return get_former


def present(name: str) -> Any:
    """Return what a row of the tables names: ``module.name`` below the package, or a public name."""
    module, _, own = f"{_PACKAGE}.{name}".rpartition(".")
    return getattr(importlib.import_module(module), own)


def _upgrade_state(cls: Any, renamed: dict[str, str]) -> None:
    """Let a class take states with former names of its attributes."""
    set_state = getattr(cls, "__setstate__", None)

    def __setstate__(self: Any, state: dict[str, Any]) -> None:  # noqa: N807 - what pickle calls
        present = {renamed.get(name, name): value for name, value in state.items()}
        if set_state is None:
            self.__dict__.update(present)
        else:
            set_state(self, present)

    cls.__setstate__ = __setstate__


def _restart_from_options(cls: Any) -> None:
    """Let a class take a state with other attributes than it has now for the options of a new object."""
    options = inspect.signature(cls).parameters

    def __setstate__(self: Any, state: dict[str, Any]) -> None:  # noqa: N807 - what pickle calls
        if type(self) is cls:
            fresh = cls(**{name: value for name, value in state.items() if name in options})
            if vars(fresh).keys() != state.keys():
                state = vars(fresh)
        self.__dict__.update(state)

    cls.__setstate__ = __setstate__


def _restart_strategy(cls: Any) -> None:
    """Let the strategy take a state from before its losses had a part of their own: its options, and what Lightning's own class keeps."""

    def __setstate__(self: Any, state: dict[str, Any]) -> None:  # noqa: N807 - what pickle calls
        if type(self) is cls and "_selection" in state:
            fresh = cls(state["_selection"], **_former_options(state))
            fresh._losses.serve(self)
            state = {name: state.get(name, value) for name, value in vars(fresh).items()} | {"_losses": fresh._losses}
        self.__dict__.update(state)

    cls.__setstate__ = __setstate__


def _former_options(state: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a pickled strategy: as release 0.1 kept them, or as the parts of a later one did."""
    same = {name: state[f"_{name}"] for name in ("check_calls", "global_batch")}
    if "_adopt" in state:
        return {
            **same,
            "adopt": state["_adopt"],
            "loss_reduce_dtype": state["_reduce_dtype"],
            "sharded_checkpoints": state["_sharded_checkpoints"],
        }
    return {
        **same,
        "adopt": state["_adoption"].enabled,
        "loss_reduce_dtype": state["_wire_dtype"],
        "sharded_checkpoints": vars(state["_sharding"])["_sharded_checkpoints"],
        "accumulation": state["_accumulation"],
        "use_global_sampler": vars(state["_global_samplers"])["_enabled"],
        "evaluation": state["_evaluation"].mode,
        "uneven": state["_uneven"],
    }
