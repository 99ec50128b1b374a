"""The one table of pytorch-metric-learning (PML) by class: losses, reducers, distances, regularisers. It recognises
lightly's losses by name. Other files use its functions.

A new loss is one row in ``LOSSES``, and a ``PairLoss`` in ``tiled/pair_losses.py`` if it runs in tiles. The rows were measured on PML
2.9 in float64: sums and counts of two unequal halves against one process. ``evaluations.check_separable`` repeats that for any instance.

| mode | exact for |
|---|---|
| ``replicated`` | every deterministic loss, without a row |
| ``rows`` | losses that are a sum over anchors |
| ``elements`` | losses that are a sum over samples |
| ``moments`` | lightly's losses that are a function of mean and covariance |

The class is not enough: ``is_separable`` also inspects an instance's configuration (regulariser, distance, reducer, random triplets).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.reducers.per_anchor_reducer import aggregation_func
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor, nn

from lightning_ddp_losses.core.function_loss import FunctionLoss
from lightning_ddp_losses.core.torch_compat import TORCH_LOSS_TYPES, child_modules
from lightning_ddp_losses.errors import expect

Mode = Literal["replicated", "rows", "elements", "moments"]
MODES: tuple[Mode, ...] = ("elements", "moments", "rows", "replicated")  # cheapest first

PML_NAMES = ("embeddings", "labels", "indices_tuple", "ref_emb", "ref_labels", "enqueue_mask")
"""Arguments of PML's losses and miners, in the order of most of them."""

T = TypeVar("T", bound=type[nn.Module])

_FEW_ROWS = 256


# ---------------------------------------------------------------------- losses


@dataclass(frozen=True)
class LossFacts:
    """Known properties of a loss, by its class.

    Attributes:
        mode: The cheapest mode that is exact. ``replicated`` always is.
        few_rows: Global rows up to which the full loss on every rank is faster than one more exchange (measured, W = 2).
        memory: Numbers that PML's formula holds for each anchor: one per column, one per positive and column, one per positive and
            negative, or every triplet. ``"triplets"`` also says that it compares triplets, not pairs.
        pair_loss: File and class of its evaluation in tiles, in this folder (named, not imported: those files import this one), or a
            registered class.
        head: File and class of its logits if its classes are split over ranks.
        column_elements: Its element losses have the shape (n, 1), which PML 2.9 multiplies with a row of class weights: a product of two
            means, which no split gives.
        arguments: Names of its positional arguments.
        pairs_views: Without labels it pairs row i of ``embeddings`` with row i of ``ref_emb``.
        writes_distances: It writes into the distances that it gets, which backward needs (without labels, PML 2.9 on torch 2.13).
        own_references: It compares with rows in its memory, and not with references of the call.
        draws: It draws random numbers in every call.
    """

    mode: Mode = "replicated"
    few_rows: int = _FEW_ROWS
    memory: Literal["columns", "positives x columns", "pairs x pairs", "triplets"] = "columns"
    pair_loss: str | type | None = None
    head: str | None = None
    column_elements: bool = False
    arguments: tuple[str, ...] = PML_NAMES
    pairs_views: bool = False
    writes_distances: bool = False
    own_references: bool = False
    draws: bool = False

    @property
    def compares_triplets(self) -> bool:
        """Whether its tuples are triplets, not pairs."""
        return self.memory == "triplets"


LOSSES: dict[type[nn.Module], LossFacts] = {
    # sums over samples
    pml.ArcFaceLoss: LossFacts("elements", head="class_heads.MarginHead"),
    pml.CosFaceLoss: LossFacts("elements", head="class_heads.MarginHead"),
    pml.LargeMarginSoftmaxLoss: LossFacts("elements", head="class_heads.LargeMarginHead"),
    pml.NormalizedSoftmaxLoss: LossFacts("elements", head="class_heads.NormalizedSoftmaxHead"),
    pml.ProxyNCALoss: LossFacts("elements", head="class_heads.ProxyHead"),
    pml.SoftTripleLoss: LossFacts("elements", head="class_heads.SoftTripleHead"),
    pml.SphereFaceLoss: LossFacts("elements", head="class_heads.SphereFaceHead"),
    pml.SubCenterArcFaceLoss: LossFacts("elements", head="class_heads.MarginHead"),
    # sums over anchors. Formulas over every pair of pairs, or every triplet, are worth sharing for fewer rows
    pml.AngularLoss: LossFacts("rows", few_rows=128, memory="positives x columns", column_elements=True),
    pml.CircleLoss: LossFacts("rows", column_elements=True),
    pml.ContrastiveLoss: LossFacts("rows", pair_loss="tiled.pair_losses.Contrastive", few_rows=192),
    pml.GeneralizedLiftedStructureLoss: LossFacts("rows", column_elements=True),
    pml.MarginLoss: LossFacts("rows", few_rows=64, memory="triplets"),
    pml.MultiSimilarityLoss: LossFacts(
        "rows", pair_loss="tiled.pair_losses.MultiSimilarity", few_rows=192, column_elements=True
    ),
    pml.NTXentLoss: LossFacts("rows", pair_loss="tiled.pair_losses.NTXent", few_rows=32, memory="pairs x pairs"),
    pml.SignalToNoiseRatioContrastiveLoss: LossFacts("rows", pair_loss="tiled.pair_losses.Contrastive"),
    pml.SupConLoss: LossFacts("rows", pair_loss="tiled.pair_losses.SupCon", few_rows=192),
    pml.TripletMarginLoss: LossFacts(
        "rows", pair_loss="tiled.pair_losses.TripletMargin", few_rows=64, memory="triplets"
    ),
    pml.TupletMarginLoss: LossFacts("rows", few_rows=32, memory="pairs x pairs", column_elements=True),
    # replicated like classes that are not listed, but called differently
    pml.CrossBatchMemory: LossFacts(
        arguments=("embeddings", "labels", "indices_tuple", "enqueue_mask"), own_references=True
    ),
    pml.ManifoldLoss: LossFacts(draws=True),
    pml.SelfSupervisedLoss: LossFacts(arguments=("embeddings", "ref_emb"), pairs_views=True),
    pml.DynamicSoftMarginLoss: LossFacts(pairs_views=True, writes_distances=True),
    pml.VICRegLoss: LossFacts(pairs_views=True),
}
_NO_FACTS = LossFacts()
_registrations = 0
_OF_MOMENTS = ("BarlowTwinsLoss", "VICRegLoss")  # of lightly
# torch losses with a mean that is not a sum over elements divided by a count or a weight
_TORCH_REPLICATED: set[type] = {nn.CTCLoss}


def facts_of(loss: nn.Module) -> LossFacts:
    """Return the row of a loss's class. A subclass inherits the way it is called, but not its exact mode."""
    cls = type(two_views_loss(loss) or loss)
    return LOSSES.get(cls) or _inherited(cls)


def allowed_modes(loss: nn.Module) -> tuple[Mode, ...]:
    """Return the exact modes of a loss by its class, the mode of ``auto`` first. A subclass needs its own row."""
    cls = type(loss)
    facts = LOSSES.get(cls)
    if facts is not None and facts.mode != "replicated":
        return (facts.mode, "replicated")
    if is_pml_loss(loss):
        return ("replicated",)
    if name_in_lightly(loss) in _OF_MOMENTS:
        return ("moments", "replicated", "rows")
    if cls is FunctionLoss:
        return ("rows", "replicated")
    if issubclass(cls, TORCH_LOSS_TYPES) and cls.__module__.startswith("torch.") and cls not in _TORCH_REPLICATED:
        return ("elements", "replicated", "rows")
    return ("replicated", "rows")


def register_element_wise(cls: T) -> T:
    """Declare that a loss is a sum over samples: each term depends on one row only (usable as a decorator).

    The class must offer PML's ``compute_loss`` with a reducer, or torch's ``reduction`` attribute. Verify the claim with
    ``check_separable``.

    Example:
        >>> from torch import nn
        >>> @register_element_wise
        ... class Squared(nn.MSELoss):
        ...     pass
    """
    return _register(cls, "elements", "register_element_wise")


def register_row_separable(cls: T, *, pair_loss: type | None = None) -> T:
    """Declare that a PML-style loss is a sum over anchors, and that each anchor may look at all rows (usable as a decorator).

    The class must accept ``ref_emb`` and ``ref_labels`` in ``compute_loss``. Verify the claim with ``check_separable``.

    Args:
        cls: The class of the loss.
        pair_loss: Its evaluation in tiles, a subclass of ``losses.tiled.pair_losses.PairLoss``, which grows with the rows and not with
            their square. If None, PML's formula is used, a few anchors at a time.

    Raises:
        ConfigurationError: if the class is not a module, or ``pair_loss`` not a ``PairLoss``.

    Example:
        >>> from pytorch_metric_learning.losses import ContrastiveLoss
        >>> @register_row_separable
        ... class OwnContrastive(ContrastiveLoss):
        ...     pass
    """
    if pair_loss is None:
        return _register(cls, "rows", "register_row_separable")
    base = _class_named("tiled.pair_losses.PairLoss")
    is_pair_loss = isinstance(pair_loss, type) and issubclass(pair_loss, base)
    expect(
        is_pair_loss,
        "register_row_separable: pair_loss",
        expected="a subclass of PairLoss",
        got=repr(pair_loss),
        fix="Pass the class, not an object of it.",
    )
    _register(cls, "rows", "register_row_separable")
    LOSSES[cls] = replace(LOSSES[cls], pair_loss=pair_loss)
    return cls


def is_separable(loss: nn.Module, mode: Mode) -> bool:
    """Return whether this instance, of a class that allows ``mode``, is a sum that can be divided over ranks as configured."""
    if mode == "elements" and getattr(loss, "embedding_regularizer", None) is not None:
        return False  # a regulariser may look at the full batch (zero mean)
    options = vars(loss)  # getattr of a missing attribute of a module is slow
    if options.get("triplets_per_anchor", "all") != "all":
        return False  # random: all ranks must draw the same
    if options.get("swap", False):
        return False  # uses the distance of a positive, which may be on another rank
    distance = getattr(loss, "distance", None)
    if distance is not None and type(distance) not in DISTANCES:
        return False  # a user's distance may look at the full batch
    reductions = all_reductions(getattr(loss, "reducer", None))
    if facts_of(loss).column_elements and any(r is not None and r.weights is not None for r in reductions):
        return False
    return None not in reductions


def is_pml_loss(loss: object) -> bool:
    """Return whether a loss has PML's arguments: embeddings, labels, tuples, references."""
    is_theirs = isinstance(loss, (pml.BaseMetricLossFunction, pml.BaseLossWrapper, pml.MultipleLosses))
    return is_theirs or two_views_loss(loss) is not None


def name_in_lightly(module: object) -> str:
    """Return the name of a class of lightly's losses, which is not imported. It is empty for any other."""
    cls = type(module)
    return cls.__name__ if cls.__module__.startswith("lightly.loss.") else ""


def two_views_loss(loss: object) -> Any:
    """Return a loss as ``SelfSupervisedLoss``, also for lightly's ``NTXentLoss`` without a memory bank. None for other losses."""
    if type(loss) is pml.SelfSupervisedLoss:
        return loss
    if name_in_lightly(loss) == "NTXentLoss" and loss.memory_bank.size[0] == 0:  # type: ignore[attr-defined]
        return _nt_xent(float(loss.temperature))  # type: ignore[attr-defined]
    return None


def labelled_loss(loss: nn.Module) -> Any:
    """Return the loss that compares rows by their labels: the one in a ``SelfSupervisedLoss``, which only makes labels, else the loss.

    A subclass may make something else of its views, and is then a different loss.
    """
    two_views = two_views_loss(loss)
    return loss if two_views is None else two_views.loss


def stacks_views(loss: nn.Module) -> bool:
    """Return whether a loss compares the rows of both views as one batch."""
    two_views = two_views_loss(loss)
    return two_views is not None and bool(two_views.symmetric)


def compares_one_way(loss: nn.Module) -> bool:
    """Return whether a loss compares only rows of one view with rows of the other view."""
    return two_views_loss(loss) is not None and not stacks_views(loss)


@lru_cache(maxsize=64)
def _nt_xent(temperature: float) -> nn.Module:
    loss: nn.Module = pml.SelfSupervisedLoss(pml.NTXentLoss(temperature))
    return loss


def takes_class_labels(inner: nn.Module) -> bool:
    """Return whether PML's own loss or miner is in it, which compares labels for equality. A user's may read them as numbers."""
    own = (pml.BaseMetricLossFunction, miners.BaseMiner)
    return any(isinstance(module, own) and is_of_pml(module) for module in inner.modules())


def is_of_pml(module: object) -> bool:
    """Return whether a module's class is PML's own, and not one that a user has made of it."""
    return type(module).__module__.startswith("pytorch_metric_learning.")


def compares_named_rows(inner: nn.Module) -> bool:
    """Return whether tuples of a loss name rows that it compares. Other tuples may be anything, as counts of rows."""
    mode = facts_of(inner).mode
    return mode == "rows" or (mode != "elements" and takes_class_labels(inner))


def compares_rows(loss: object) -> bool:
    """Return whether a loss is known to compare the rows of a batch with each other, and not with its class weights."""
    if not isinstance(loss, pml.BaseMetricLossFunction) or next(loss.parameters(), None) is not None:
        return False
    return facts_of(loss).mode != "elements"


def gathers_by_itself(module: nn.Module) -> bool:
    """Return whether a module gathers the rows of all ranks: one of our losses, or PML's own wrapper."""
    theirs = isinstance(module, (DistributedLossWrapper, DistributedMinerWrapper))
    return theirs or bool(getattr(module, "sees_global_batch", False))


def gathering_option(module: nn.Module) -> str:
    """Return the name of the option that makes a loss of lightly gather rows. The name is empty if it does not gather."""
    is_of_lightly = type(module).__module__.startswith("lightly.")
    options = [name for name, value in vars(module).items() if name.endswith("gather_distributed") and value]
    return options[0] if is_of_lightly and options else ""


def pair_loss_of(loss: nn.Module) -> Any:
    """Return the class that evaluates a loss in tiles, or None."""
    return _class_named(getattr(LOSSES.get(type(loss)), "pair_loss", None))


def head_class_of(loss: nn.Module) -> Any:
    """Return the class that computes a loss's logits if its classes are split over ranks, or None."""
    return _class_named(getattr(LOSSES.get(type(loss)), "head", None))


@cache
def _class_named(place: str | type | None) -> Any:
    """Return a class of this folder by its file and name. A class, and None, are returned unchanged."""
    if not isinstance(place, str):
        return place
    file, name = place.rsplit(".", 1)
    return getattr(import_module(f"lightning_ddp_losses.losses.{file}"), name)


def may_draw(loss: nn.Module) -> bool:
    """Return whether a call may draw random numbers. To save and restore generators takes as long as a small loss."""
    stack = [loss]
    while stack:
        module = stack.pop()
        if type(module) not in _NEVER_DRAW or vars(module).get("triplets_per_anchor", "all") != "all":
            return True
        stack += [child for child in child_modules(module).values() if child is not None]
    return False


def _classes_that_never_draw() -> set[type]:
    """Collect PML's and torch's classes, exact: a subclass, a miner, or a module or function of somebody else may draw."""
    found: set[type] = {nn.ModuleDict, nn.ModuleList, nn.Softplus}
    for package in (pml, distances, reducers, regularizers, nn.modules.loss):
        found |= {value for value in vars(package).values() if isinstance(value, type)}
    drawing = {cls for cls, facts in LOSSES.items() if facts.draws}
    return found - drawing - {nn.TripletMarginWithDistanceLoss}


_NEVER_DRAW = _classes_that_never_draw()


def _inherited(cls: type) -> LossFacts:
    """Return how the nearest known class is called, in the mode that is always exact."""
    for base in cls.__mro__:
        facts = LOSSES.get(base)
        if facts is not None:
            return replace(facts, mode="replicated", few_rows=_FEW_ROWS, pair_loss=None, head=None)
    return _NO_FACTS


def registrations() -> int:
    """Return a number that changes with each registration of a class."""
    return _registrations


def _register(cls: T, mode: Mode, what: str) -> T:
    global _registrations  # noqa: PLW0603 - the registry is one for the process
    _registrations += 1
    is_module = isinstance(cls, type) and issubclass(cls, nn.Module)
    expect(
        is_module,
        what,
        expected="a subclass of torch.nn.Module",
        got=repr(cls),
        fix="Pass the class, not an object of it.",
    )
    known = LOSSES.get(cls, _NO_FACTS)
    if MODES.index(mode) < MODES.index(known.mode):  # keep the cheaper one of two claims
        LOSSES[cls] = replace(_inherited(cls), mode=mode)
    return cls


# ---------------------------------------------------------------------- reducers


class Reduction(NamedTuple):
    """A reducer as data: how element losses become a sum and a divisor.

    Attributes:
        low: Elements must be larger. None means no lower limit.
        high: Elements must be smaller. None means no upper limit.
        plain_sum: The sum is not divided.
        given_divisor: The loss gives the divisor itself.
        weights: (classes,), by the anchor's label. None means 1.
        per_anchor: Pairs are averaged within their anchor first. The other attributes then apply to anchors.
    """

    low: float | None = None
    high: float | None = None
    plain_sum: bool = False
    given_divisor: bool = False
    weights: Tensor | None = None
    per_anchor: bool = False

    @property
    def selects(self) -> bool:
        """Whether some elements may not pass."""
        return self.low is not None or self.high is not None

    def passes(self, values: Tensor) -> Tensor:
        """Return which elements pass both limits, bool."""
        return pass_limits(values, self.low, self.high)


def pass_limits(values: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return which values are between two limits, bool. None means no limit."""
    if low is None:
        return values < high if high is not None else torch.ones_like(values, dtype=torch.bool)
    return values > low if high is None else (values > low) & (values < high)


REDUCERS: dict[type, Callable[[Any], Reduction]] = {
    reducers.MeanReducer: lambda reducer: Reduction(),
    reducers.SumReducer: lambda reducer: Reduction(plain_sum=True),
    reducers.ThresholdReducer: lambda reducer: Reduction(low=reducer.low, high=reducer.high),
    reducers.AvgNonZeroReducer: lambda reducer: Reduction(low=reducer.low, high=reducer.high),
    reducers.ClassWeightedReducer: lambda reducer: Reduction(weights=reducer.weights),
    reducers.DivisorReducer: lambda reducer: Reduction(given_divisor=True),
}
"""Reducers that can be split, by exact class: a subclass may reduce differently."""


def reducer_of(reducer: Any, name: str) -> Any:
    """Return the reducer that PML applies to sub-loss ``name``."""
    if isinstance(reducer, reducers.MultipleReducers):
        if name in reducer.reducers:
            return reducer.reducers[name]
        return reducer.default_reducer
    return reducer


def reducer_chain(reducer: Any, name: str) -> list[Any]:
    """Return the reducers that sub-loss ``name`` passes through: those that average per anchor, then the one that makes the number."""
    chain = [reducer_of(reducer, name)]
    while isinstance(chain[-1], reducers.PerAnchorReducer):
        chain.append(reducer_of(chain[-1].reducer, "loss"))  # PML calls what it has averaged "loss"
    return chain


def reduction_of(reducer: Any, name: str = "loss") -> Reduction | None:
    """Return the reducer of sub-loss ``name`` as data. None for one that cannot be split."""
    make = REDUCERS.get(type(reducer))
    if make is not None:
        return make(reducer)
    if type(reducer) is reducers.MultipleReducers:
        return reduction_of(reducer_of(reducer, name), name)
    if type(reducer) is reducers.PerAnchorReducer and reducer.aggregation_func is aggregation_func:
        inner = reduction_of(reducer.reducer, "loss")
        if inner is not None:
            return inner._replace(per_anchor=True)
    return None


def all_reductions(reducer: Any) -> list[Reduction | None]:
    """Return the reductions that a reducer may choose among, whatever the sub-losses are called."""
    if type(reducer) is not reducers.MultipleReducers:
        return [reduction_of(reducer)]
    found = all_reductions(reducer.default_reducer)
    for inner in reducer.reducers.values():
        found += all_reductions(inner)
    return found


def can_split(reducer: Any) -> bool:
    """Return whether a reducer is a sum over a divisor, whatever the sub-losses are called."""
    return None not in all_reductions(reducer)


def has_per_anchor(reducer: Any) -> bool:
    """Return whether a reducer averages pairs within their anchor."""
    return any(reduction is not None and reduction.per_anchor for reduction in all_reductions(reducer))


def collects_counts(loss: nn.Module) -> bool:
    """Return whether a reducer of the loss records anything. Its numbers then travel through the hosts."""
    return any(module.collect_stats for module in loss.modules() if isinstance(module, reducers.BaseReducer))


# ---------------------------------------------------------------------- distances


@dataclass(frozen=True)
class DistanceFacts:
    """Known properties of a distance, by its class.

    Attributes:
        form: Computation of a matrix of distances: one product of matrices, norms of differences, which torch computes without
            making the differences, or the differences themselves, one row of D numbers for each pair.
        symmetric: The distance from x to y equals the distance from y to x.
    """

    form: Literal["product", "norm", "differences"]
    symmetric: bool = True


DISTANCES: dict[type, DistanceFacts] = {
    distances.CosineSimilarity: DistanceFacts("product"),
    distances.DotProductSimilarity: DistanceFacts("product"),
    distances.LpDistance: DistanceFacts("norm"),
    distances.SNRDistance: DistanceFacts("differences", symmetric=False),
}
"""Distances of one row to one other, by exact class: a subclass may look at the full batch."""


# ---------------------------------------------------------------------- regularisers

CLASS_REGULARIZERS: dict[type, Literal["rows", "centers"]] = {
    regularizers.LpRegularizer: "rows",
    regularizers.ZeroMeanRegularizer: "rows",
    regularizers.SparseCentersRegularizer: "centers",
}
"""Weight regularisers that are a sum over classes, by exact class: over weight rows, or over pairs of the centers of each class."""
