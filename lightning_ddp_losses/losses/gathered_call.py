"""The arguments of one call over all ranks: named, gathered, checked, with one seed and one numbering of rows for all.

``PMLCall`` is a call of a pytorch-metric-learning (PML) loss or miner. Its arguments have meanings: labels, references, a miner's
tuples. ``TensorCall`` is one of any other loss: every tensor is a batch. With them come the random numbers that are the same
on every rank (``SeedCounter``, ``shared_seed``, ``same_draws``).

PML's ``SelfSupervisedLoss`` is no separate formula: row i of one view has the identity of row i of the other, and the loss inside it
compares rows by these labels. PML numbers the rows of one process, so each rank would count from 0 again. Here the rows of both views are
one batch per rank, and the identities are counted over all ranks. Then every evaluation of labelled rows evaluates two views.

* symmetric: the loss inside gets both views as rows of one batch (SimCLR's objective with ``NTXentLoss``).
* one way (``symmetric=False``): the rows of one view are anchors, those of the other references.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` rows over all ranks, ``G'`` references over all ranks (the rows themselves where there
are no others).
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from pytorch_metric_learning.losses import SelfSupervisedLoss, VICRegLoss
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.random_state import CountedDraws, preserve_random_state, torch_generators
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses import pml_registry
from lightning_ddp_losses.losses import tuples as row_tuples
from lightning_ddp_losses.losses.plans.sample_layout import SampleLayout
from lightning_ddp_losses.losses.pml_registry import LossFacts

_SEED = struct.Struct("<QQ")
# PML asks whether the references are the very same tensors as the rows
_REFERENCES = {"ref_emb": "embeddings", "ref_labels": "labels"}


_SHAPES = (("embeddings", "(n, D)", 2), ("labels", "(n,)", 1), ("ref_emb", "(n, D)", 2), ("ref_labels", "(n,)", 1))
_TWO_VIEWS = ("embeddings", "ref_emb")  # how ``SelfSupervisedLoss`` calls its views


# ---------------------------------------------------------------------- arguments of this rank, by name


class ArgumentRules(NamedTuple):
    """What the arguments of a loss or miner may be.

    Attributes:
        names: Names of the positional ones.
        are_class_labels: True if labels are compared for equality.
        are_of_pml: True if embeddings and labels have the shapes that pytorch-metric-learning expects.
    """

    names: tuple[str, ...]
    are_class_labels: bool
    are_of_pml: bool

    @classmethod
    def of(cls, inner: nn.Module, names: Sequence[str]) -> ArgumentRules:
        """Return the rules of a loss or miner, whose positional arguments have these names."""
        return cls(tuple(names), pml_registry.takes_class_labels(inner), pml_registry.is_of_pml(inner))


def by_name(
    title: str, inner: nn.Module, rules: ArgumentRules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name, without those that are None.

    Args:
        title: Name of the call in messages.
        inner: The loss or miner.
        rules: What its arguments may be.
        args: Positional arguments.
        kwargs: Arguments by name.

    Raises:
        InputError: for more positional arguments than names, for one that is given twice, for labels that are no classes, and for
            embeddings that are not (n, D).
    """
    names = rules.names
    twice = [name for name in names[: len(args)] if name in kwargs]
    are_too_many = len(args) > len(names)
    if are_too_many or twice:
        got = f"{', '.join(twice)} twice" if twice else f"{len(args)} positional ones"
        fix = None
        if are_too_many and names == _TWO_VIEWS:
            fix = (
                "It compares two views. For more, hand in torch.cat(views) with labels that are unique over all ranks."
            )
        raise InputError(f"{title}: arguments", expected=f"{', '.join(names)}, each once", got=got, fix=fix)
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    if rules.are_class_labels:
        refuse_labels(title, inner, given)
    if rules.are_of_pml:
        _refuse_odd_shapes(title, given)
    return given


def refuse_labels(title: str, inner: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse labels that are no class indices: a second view in their place, one-hot rows, flags, or floating numbers."""
    for name in ("labels", "ref_labels"):
        labels = given.get(name)
        if not isinstance(labels, Tensor):
            continue
        is_one_hot = labels.ndim == 2 and _is_one_hot(labels)
        is_index = labels.dtype != torch.bool and not labels.is_floating_point() and not labels.is_complex()
        if is_index and not is_one_hot:
            continue
        fix = fix_for_views(inner)
        if is_one_hot:
            fix = "Pass class indices in place of one-hot rows: labels.int().argmax(1)."
        elif labels.ndim < 2:
            fix = "Pass class indices: labels.long()."
        kind = "a floating dtype" if labels.is_floating_point() or labels.is_complex() else str(labels.dtype)
        got = f"{kind} of shape {tuple(labels.shape)}"
        raise InputError(f"{title}: {name}", expected="an integer per row (torch.int64)", got=got, fix=fix)


def has_label_rows(given: Mapping[str, Any]) -> bool:
    """Return whether labels have several columns. Whether they are one-hot rows depends on their values."""
    labels = (given.get("labels"), given.get("ref_labels"))
    return any(isinstance(each, Tensor) and each.ndim == 2 for each in labels)


def _is_one_hot(rows: Tensor) -> bool:
    """Return whether each row is a single 1 among zeros."""
    are_flags = bool(((rows == 0) | (rows == 1)).all())
    return len(rows) > 0 and are_flags and bool((rows.sum(1) == 1).all())


def _refuse_odd_shapes(title: str, given: Mapping[str, Any]) -> None:
    """Refuse embeddings and labels of other shapes than PML's."""
    for name, shape, dimensions in _SHAPES:
        value = given.get(name)
        if value is None or (isinstance(value, Tensor) and value.ndim == dimensions):
            continue
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{title}: {name}", expected=f"a tensor of shape {shape}", got=got)


# ---------------------------------------------------------------------- two views without labels


def labelled_arguments(loss: nn.Module, title: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as ``labelled_loss(loss)`` takes them. ``PMLCall`` adds the labels.

    Args:
        loss: The loss that was called, which takes two views.
        title: Its name in messages.
        given: Its arguments by name.

    Returns:
        Both views as (2 B, D) ``embeddings`` if ``stacks_views``, else the arguments as they are.

    Raises:
        InputError: for a view that is missing, no tensor, or of another shape than the other.
    """
    _refuse_views(title, given)
    if not pml_registry.stacks_views(loss):
        return given
    return {"embeddings": torch.cat([given[name] for name in _TWO_VIEWS])}


def identities_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return labels of the rows of all ranks, each rank's first view before its second.

    Args:
        counts: Rows of each rank, both views together.
        device: Their device.

    Returns:
        (2 G,) int64, a sample's number over all ranks, for both of its rows.
    """
    samples = torch.arange(sum(counts) // 2, device=device)
    parts = torch.split(samples, [rows // 2 for rows in counts])
    return torch.cat([part.repeat(2) for part in parts])


def by_view(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of one process, the first view of all ranks before the second, from rows in the order of ``identities_of``."""
    sizes = [both // 2 for both in counts for _ in _TWO_VIEWS]
    parts = torch.split(rows, sizes)
    return torch.cat([*parts[0::2], *parts[1::2]])


def fix_for_views(loss: nn.Module) -> str:
    """Return advice how two views are given to a loss that was called with the second in the place of labels."""
    name = type(loss).__name__
    if name in SelfSupervisedLoss.supported_losses():
        return f"Two views without labels: GlobalBatchLoss(SelfSupervisedLoss({name}(...)))(view1, view2)."
    if isinstance(loss, VICRegLoss):
        return "Pass the second view as ref_emb."
    return "Pass class indices, one per row."


def _refuse_views(title: str, given: Mapping[str, Any]) -> None:
    shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in given.items()}
    first, second = (shapes.get(name) for name in _TWO_VIEWS)
    expect(
        len(shapes) == 2 and first is not None and first == second and len(first) == 2,
        f"{title}: views",
        expected="embeddings and ref_emb, (n, D) each: row i of one belongs to row i of the other",
        got=", ".join(f"{name} {shape or type(given[name]).__name__}" for name, shape in shapes.items()),
        error=InputError,
    )


# ---------------------------------------------------------------------- a call of PML's


def refuse_half_labelled(inner: nn.Module, facts: LossFacts, given: Mapping[str, Any]) -> None:
    """Refuse labels of the references if the rows have none."""
    is_half_labelled = "labels" not in given and "ref_labels" in given and "ref_emb" in given
    expect(
        not is_half_labelled or facts.pairs_views,
        f"{type(inner).__name__}: labels",
        expected="labels and ref_labels, or neither (each row its own identity)",
        got="ref_labels only",
        error=InputError,
    )


class CallBatches(NamedTuple):
    """What is gathered of a call's arguments.

    Attributes:
        tensors: Batches by name, each tensor once, then the index tensors of this rank's own tuples.
        aliases: Names of arguments that are the same tensor as another one, whose name follows.
        num_indices: Number of index tensors.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    num_indices: int

    @classmethod
    def of(cls, inner: nn.Module, given: Mapping[str, Any]) -> CallBatches:
        """Return the batches of a call.

        Args:
            inner: The loss or miner.
            given: Its arguments by name, none of them None.

        Raises:
            InputError: for tuples of a wrong form.
        """
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                continue
            own = _REFERENCES.get(name)
            if own is not None and given.get(own) is value:
                aliases[name] = own
            else:
                tensors[name] = value
        # a tensor is no tuple of indices but a value per row (ManifoldLoss's classes), and is gathered like any batch
        tuples = given.get("indices_tuple")
        if tuples is None or isinstance(tuples, (row_tuples.GlobalTuples, Tensor)):
            return cls(tensors, aliases, 0)
        if len(tuples) and pml_registry.compares_named_rows(inner):
            row_tuples.refuse_malformed_tuples(f"{type(inner).__name__}: indices_tuple", tuples)
        for place, index in enumerate(tuples):
            tensors[f"index {place}"] = _on_device_of(given.get("embeddings"), index)
        return cls(tensors, aliases, len(tuples))


class PMLCall:
    """The arguments of a call over all ranks. Tensors that one process keeps apart stay apart.

    Args:
        inner: The loss or miner.
        facts: Facts of its class.
        given: Its arguments by name, none of them None.
        batches: What was gathered of them.
        gathered: The same of all ranks.
        rank: This rank.
        two_views: The embeddings are both views of each sample, the first view's rows before the second's.

    Attributes:
        given: Arguments of this rank.
        arguments: The arguments over all ranks, for ``inner(**arguments)``.
        args: Those without a name: none.
        counts: Rows of each rank, per gathered tensor.
        extras: The bytes that each rank has sent next to them.
        local_labels: This rank's labels, or its identities if no labels were given.
    """

    def __init__(
        self,
        inner: nn.Module,
        facts: LossFacts,
        given: dict[str, Any],
        batches: CallBatches,
        gathered: GatheredBatch,
        rank: int,
        *,
        two_views: bool = False,
    ) -> None:
        self.given = given
        self._inner, self._facts, self._rank, self._two_views = inner, facts, rank, two_views
        self._gathered = gathered
        without_labels = "labels" not in given and ("ref_emb" in given or two_views)
        self._identities_wanted = without_labels and not facts.pairs_views
        names = list(batches.tensors)
        self.counts = dict(zip(names, gathered.counts, strict=True))
        self.extras = gathered.extras
        # every rank sees every rank's numbers of rows
        self._refuse_lengths()
        tuples = given.get("indices_tuple")
        if isinstance(tuples, row_tuples.GlobalTuples):
            references = None if facts.own_references else self.total_references
            tuples.check(type(inner).__name__, self.total_rows, references)
        # the loss gets the rows of all ranks, with tuples that count them
        arguments: dict[str, Any] = dict(zip(names, gathered.tensors, strict=True))
        if batches.num_indices:
            indices = [arguments.pop(f"index {place}") for place in range(batches.num_indices)]
            tuples = self._renumbered(indices)
        self.local_labels: Tensor | None = given.get("labels")
        if self._identities_wanted:
            self._add_identities_(arguments)
        for name, own in batches.aliases.items():
            arguments[name] = arguments[own]
        if tuples is not None and not isinstance(tuples, Tensor):
            rows = given.get("embeddings")
            arguments["indices_tuple"] = tuple(_on_device_of(rows, index) for index in tuples)
        # other arguments (a flag, a number) do not travel
        for name, value in given.items():
            arguments.setdefault(name, value)
        self.arguments = arguments
        self.args: tuple[Any, ...] = ()

    @property
    def seed(self) -> int:
        """Seed of random draws, the same on every rank."""
        return shared_seed(self._gathered)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments by name over all ranks, in the order of one process."""
        if not self._two_views:
            return self.arguments
        # a loss that draws random numbers draws by the order of rows
        counts = self.counts["embeddings"]
        return {name: by_view(self.arguments[name], counts) for name in ("embeddings", "labels")}

    @property
    def batches(self) -> Iterable[Any]:
        """Gathered tensors, and the other arguments."""
        return self.arguments.values()

    def is_bf16_on_all_ranks(self) -> bool:
        """Return whether every rank gave its rows in bfloat16. Known where several ranks have gathered them."""
        by_name = zip(self.counts, self._gathered.dtypes, strict=True)
        of_rows = [dtypes for name, dtypes in by_name if name in ("embeddings", "ref_emb")]
        return all(len(dtypes) == 1 or {*dtypes} == {torch.bfloat16} for dtypes in of_rows)

    @cached_property
    def total_rows(self) -> int:
        """G."""
        return sum(self.counts["embeddings"])

    @cached_property
    def total_references(self) -> int:
        """G'."""
        return sum(self.counts.get("ref_emb", self.counts["embeddings"]))

    @cached_property
    def bound(self) -> tuple[int, int]:
        """Global rows of this rank: first, one past the last."""
        counts = self.counts["embeddings"]
        start = sum(counts[: self._rank])
        return start, start + counts[self._rank]

    @cached_property
    def references(self) -> Tensor:
        """Rows of the references over all ranks, or the anchors."""
        return self.arguments.get("ref_emb", self.arguments["embeddings"])  # type: ignore[no-any-return]

    @cached_property
    def ref_labels(self) -> Tensor | None:
        """Labels of the references, or of the anchors if there are no others."""
        labels = self.arguments.get("labels")
        if "ref_emb" in self.arguments:
            return self.arguments.get("ref_labels", labels)
        return labels

    def bounds(self, name: str = "embeddings") -> list[tuple[int, int]]:
        """Return the global rows of each rank: first, one past the last."""
        stops = itertools.accumulate(self.counts[name])
        return [(stop - rows, stop) for rows, stop in zip(self.counts[name], stops, strict=True)]

    def rows_possible(self) -> bool:
        """Return whether each rank may evaluate its own anchors. All ranks get the same answer."""
        labels, ref_labels = self.arguments.get("labels"), self.ref_labels
        if labels is None or ref_labels is None:
            return False
        mined = self.arguments.get("indices_tuple")
        matching = self._matching if mined is None else None
        return row_tuples.are_ordinary(matching, len(ref_labels), self.bounds(), mined, same=ref_labels is labels)

    def global_pair_counts(self) -> tuple[int, int]:
        """Return how many positive and negative pairs the labels of all ranks make."""
        labels, ref_labels = self._all_labels()
        matching = int(self._matching.sum())
        self_pairs = len(labels) * (ref_labels is labels)
        return matching - self_pairs, len(labels) * len(ref_labels) - matching

    def local_pair_counts(self) -> tuple[Tensor, Tensor]:
        """Return, (B,) each, the numbers of positives and negatives of this rank's anchors, on the host."""
        labels, ref_labels = self._all_labels()
        mined, (start, stop) = self.arguments.get("indices_tuple"), self.bound
        if mined is not None:
            counts = torch.stack(
                [row_tuples.count_indices(anchors, len(labels)) for anchors in row_tuples.named_anchors(mined)]
            )
            on_host = counts[:, start:stop].cpu()
            # those of pairs are two kinds, a triplet has both
            return on_host[0], on_host[-1]
        # a row has its own label, but is no partner of itself
        matching = self._matching[start:stop]
        return matching - int(ref_labels is labels), len(ref_labels) - matching

    def local_tuples(self, part: slice | None = None) -> tuple[Tensor, ...]:
        """Return pairs or triplets of this rank's anchors, or of some of its rows, counted from the first of them."""
        labels, ref_labels = self._all_labels()
        mined, bounds = self.arguments.get("indices_tuple"), self.bound
        if part is not None:
            bounds = (bounds[0] + part.start, bounds[0] + part.stop)
        triplets, same, positives = self._facts.compares_triplets, ref_labels is labels, None
        if mined is None and labels.device.type != "cpu":
            positives = self._matching[slice(*bounds)] - int(same)
        return row_tuples.anchor_tuples(
            labels, ref_labels, bounds, mined, triplets=triplets, same=same, positives=positives
        )

    def ranks_with_local_identities(self) -> int:
        """Return on how many ranks the labels are 0, 1, 2, ... (once, or once per view)."""
        labels = self.arguments["labels"]
        return sum(_counts_from_zero(labels[start:stop]) for start, stop in self.bounds("labels"))

    def moves_pairs(self) -> bool:
        """Return whether rows are paired by their place, and a rank's other number of references moves those of the ranks after it."""
        if not self._facts.pairs_views or "labels" in self.given or "ref_emb" not in self.counts:
            return False
        starts = [start for start, _ in self.bounds()]
        return starts != [start for start, _ in self.bounds("ref_emb")]

    def rows_to_remember(self) -> int:
        """Return how many rows go to a cross-batch memory: all, or those that ``enqueue_mask`` marks."""
        mask = self.arguments.get("enqueue_mask")
        return self.total_rows if mask is None else int(mask.sum())

    @cached_property
    def _matching(self) -> Tensor:
        """(G,), how many references have each row's label, on the host."""
        return row_tuples.same_label_counts(*self._all_labels())

    def _all_labels(self) -> tuple[Tensor, Tensor]:
        ref_labels = self.ref_labels
        assert ref_labels is not None
        return self.arguments["labels"], ref_labels

    def _refuse_lengths(self) -> None:
        """Refuse labels or a mask of another length than their rows. Every rank sees every rank's numbers."""
        pairs_of_names = [("labels", "embeddings"), ("ref_labels", "ref_emb"), ("enqueue_mask", "embeddings")]
        if self._identities_wanted:
            pairs_of_names.append(("ref_emb", "embeddings"))
        for name, of in pairs_of_names:
            if name in self.counts and self.counts[name] != self.counts.get(of, self.counts[name]):
                by_rank = zip(self.counts[name], self.counts[of], strict=True)
                raise InputError(
                    f"{type(self._inner).__name__}: {name}",
                    expected=f"one per row of {of}",
                    ranks=[f"{count} for {rows} rows" for count, rows in by_rank],
                    collective=True,
                )

    def _add_identities_(self, arguments: dict[str, Any]) -> None:
        """Number the rows of two views without labels: row i of one belongs to row i of the other, over all ranks."""
        device = arguments["embeddings"].device
        if self._two_views:
            labels = identities_of(self.counts["embeddings"], device)
        else:
            labels = torch.arange(self.total_rows, device=device)
            arguments.setdefault("ref_labels", labels.clone())
        start, stop = self.bound
        self.local_labels = labels[start:stop]
        arguments["labels"] = labels

    def _renumbered(self, indices: list[Tensor]) -> list[Tensor]:
        """Return local tuples of all ranks as global ones: anchors count rows, the others count references."""
        references = "ref_emb" if "ref_emb" in self.counts else "embeddings"
        # of pairs, of positives and of negatives, or of triplets
        names = ["embeddings", references] * 2 if len(indices) == 4 else ["embeddings", references, references]
        # of each rank: where its rows begin, their number, and that of its indices
        starts = [[start for start, _ in self.bounds(of)] for of in names]
        rows = [self.counts[of] for of in names]
        counts = [self.counts[f"index {position}"] for position in range(len(indices))]
        table = torch.tensor([starts, rows, counts]).to(indices[0].device, non_blocking=True)
        renumbered, are_of_others = [], []
        for index, *numbers, times in zip(indices, *table.unbind(), strict=True):
            # those of the rank that each index comes from
            start, limit = (number.repeat_interleave(times, output_size=len(index)) for number in numbers)
            are_of_others.append(((index < 0) | (index >= limit)).any())
            renumbered.append(index + start)
        # out-of-range indices would address another rank's rows: one wait for an accelerator, as the miner has forced one already
        if not self._facts.own_references and bool(torch.stack(are_of_others).any()):
            for are_wrong, index, times, of in zip(are_of_others, indices, counts, names, strict=True):
                if are_wrong:
                    self._refuse_indices(index, times, of)
        return renumbered

    def _refuse_indices(self, index: Tensor, counts: list[int], of: str) -> NoReturn:
        """Refuse tuples of rows that a rank has not: it mined something else."""
        lines = []
        for own, rows in zip(torch.split(index.cpu(), counts), self.counts[of], strict=True):
            # a rank without tuples has no range
            lines.append(f"{int(own.min())} to {int(own.max())} for {rows} rows" if own.numel() else "none")
        raise InputError(
            f"{type(self._inner).__name__}: indices_tuple",
            expected=f"rows of {of} on the same rank",
            ranks=lines,
            fix="Mine this rank's rows with the miner itself, or pass on what GlobalBatchMiner returns as it is.",
            collective=True,
        )


def _on_device_of(rows: Any, index: Tensor) -> Tensor:
    """Return a miner's indices on the device of the rows: some miners make them on the host, where torch's indexing takes them too."""
    return index.to(rows.device) if isinstance(rows, Tensor) else index


def _counts_from_zero(labels: Tensor) -> bool:
    """Return whether labels are 0, 1, 2, ..., or that twice (two views)."""
    rows = len(labels)
    if rows < 3:
        return False
    numbers = torch.arange(rows, device=labels.device).to(labels)
    if torch.equal(labels, numbers):
        return True
    return rows % 2 == 0 and torch.equal(labels, numbers[: rows // 2].repeat(2))


# ---------------------------------------------------------------------- a call of any other loss


def batches_in(title: str, values: Mapping[int | str, Any], layout: SampleLayout) -> dict[str, Tensor]:
    """Return the batches of a call by path, their samples along dim 0.

    Args:
        title: Name of the loss in messages.
        values: Arguments by position and name. Batches may also be inside lists, tuples and dicts.
        layout: Where their samples are.

    Raises:
        InputError: for a batch in a container that is no plain list, tuple or dict, and for rows that are not views of samples.
    """
    batches: dict[str, Tensor] = {}
    for name, value in values.items():
        if layout.batch_dims.get(name, 0) is None:
            continue
        found = dict(_tensors_by_path(value, str(name)))
        expect(
            len(found) == len(inputs.tensors_in(value)),
            f"{title}: argument {name}",
            expected="tensors, or lists, tuples and dicts of them",
            got=f"a {type(value).__name__} of tensors, whose rows would stay on this rank",
            fix="Pass the tensors one by one, or in a list.",
            error=InputError,
        )
        for path, tensor in found.items():
            if tensor.ndim:
                batches[path] = layout.samples_first(name, tensor, title)
    return batches


def _tensors_by_path(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that ``inputs.map_tensors`` finds, in its order, with their paths."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) is dict:
        parts = value.items()
    elif type(value) in (tuple, list) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        parts = enumerate(value)
    for key, part in parts:
        yield from _tensors_by_path(part, f"{path}[{key!r}]")


class TensorCall:
    """The arguments of a call over all ranks, also in lists, tuples and dicts. 0-dim tensors and other values stay as they are.

    Args:
        args: Positional arguments of this rank.
        kwargs: The same by name.
        layout: Where the samples of the arguments are.
        gathered: The batches of all ranks, in the order of ``batches_in``.

    Attributes:
        args: The arguments over all ranks.
        kwargs: The same by name.
        batches: Those that were gathered.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layout: SampleLayout,
        gathered: GatheredBatch,
    ) -> None:
        everyone = iter(gathered.tensors)
        values: dict[int | str, Any] = dict(enumerate(args))
        values.update(kwargs)
        for name, value in values.items():
            if layout.batch_dims.get(name, 0) is not None:
                values[name] = inputs.map_tensors(partial(_next_of, everyone, layout, name), value)
        self.args = tuple(values[position] for position in range(len(args)))
        self.kwargs = {name: values[name] for name in kwargs}
        self.batches: Iterable[Any] = gathered.tensors
        self._gathered = gathered

    @property
    def seed(self) -> int:
        """Seed of random draws, the same on every rank."""
        return shared_seed(self._gathered)


def _next_of(everyone: Iterator[Tensor], layout: SampleLayout, name: int | str, own: Tensor) -> Tensor:
    """Return the next gathered tensor in place of this rank's. A 0-dim tensor was not gathered."""
    return layout.as_given(name, next(everyone)) if own.ndim else own


# ---------------------------------------------------------------------- the same random numbers on every rank


class SeedCounter(CountedDraws):
    """Seeds each call of a module."""

    def next(self) -> bytes:
        """Return this rank's seed for one more call, to travel with the call's handshake."""
        self.number += 1
        return _SEED.pack(torch.initial_seed() % (1 << 63), self.number)


def shared_seed(gathered: GatheredBatch) -> int:
    """Return rank 0's seed for this call."""
    return seed_of(gathered.extras[0])


def seed_of(sent: bytes) -> int:
    """Return the seed that a rank has sent (``SeedCounter``)."""
    seed, calls = _SEED.unpack_from(sent)
    return int((seed * 1_000_003 + calls) % (1 << 63))


@contextlib.contextmanager
def same_draws(seed: int, tensors: Iterable[object]) -> Iterator[None]:
    """Seed torch's generators (CPU and the tensors' devices) and PML's numpy generator, and restore them afterwards.

    Args:
        seed: The same on every rank.
        tensors: Inputs of the call. Generators of their devices are seeded too.
    """
    generators = torch_generators(t.device for t in tensors if isinstance(t, Tensor))
    with preserve_random_state([*generators, c_f.NUMPY_RANDOM], seed=seed):
        yield
