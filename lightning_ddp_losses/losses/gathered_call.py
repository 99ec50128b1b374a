"""The arguments of one call over all ranks: named, gathered and checked, with a shared seed and a global numbering of rows.

``PMLCall`` is a call of a pytorch-metric-learning (PML) loss or miner, whose arguments have fixed meanings: labels, references, index
tuples. ``TensorCall`` is a call of any other loss, where every tensor is a batch. This module also provides random numbers that are equal
on every rank (``SeedCounter``, ``shared_seed``, ``same_draws``).

PML's ``SelfSupervisedLoss`` does not have a formula of its own. Row i of one view gets the same label as row i of the other view, and the
wrapped loss compares rows by these labels. PML numbers the rows of one process, so each rank would start again at 0. Here the rows of both
views form one batch per rank, and labels are numbered over all ranks. Every evaluation of labelled rows can then evaluate two views.

* symmetric: the wrapped loss receives both views as rows of one batch (SimCLR's objective with ``NTXentLoss``).
* one way (``symmetric=False``): the rows of one view are anchors, and the rows of the other view are references.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` rows over all ranks, ``G'`` references over all ranks (the rows themselves if there are
no separate references).
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
# PML checks whether references and rows are the same tensor objects
_REFERENCES = {"ref_emb": "embeddings", "ref_labels": "labels"}


_SHAPES = (("embeddings", "(n, D)", 2), ("labels", "(n,)", 1), ("ref_emb", "(n, D)", 2), ("ref_labels", "(n,)", 1))
_TWO_VIEWS = ("embeddings", "ref_emb")  # names of the views in ``SelfSupervisedLoss``


# ---------------------------------------------------------------------- arguments of this rank, by name


class ArgumentRules(NamedTuple):
    """Rules for the arguments of a loss or miner.

    Attributes:
        names: Names of the positional arguments.
        are_class_labels: True if labels are compared for equality.
        are_of_pml: True if embeddings and labels have the shapes that pytorch-metric-learning expects.
    """

    names: tuple[str, ...]
    are_class_labels: bool
    are_of_pml: bool

    @classmethod
    def of(cls, inner: nn.Module, names: Sequence[str]) -> ArgumentRules:
        """Return the rules of a loss or miner whose positional arguments are called ``names``."""
        return cls(tuple(names), pml_registry.takes_class_labels(inner), pml_registry.is_of_pml(inner))


def by_name(
    title: str, inner: nn.Module, rules: ArgumentRules, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name, leaving out arguments that are None.

    Args:
        title: Name of the call in messages.
        inner: The loss or miner.
        rules: Rules for its arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.

    Raises:
        InputError: for more positional arguments than names, for an argument that is given twice, for labels that are not class indices,
            and for embeddings that are not (n, D).
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
    """Reject labels that are not class indices: a second view passed as labels, one-hot rows, booleans, or floating-point numbers."""
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
    """Return whether labels are 2-dim, in which case their values determine whether they are one-hot rows."""
    labels = (given.get("labels"), given.get("ref_labels"))
    return any(isinstance(each, Tensor) and each.ndim == 2 for each in labels)


def _is_one_hot(rows: Tensor) -> bool:
    """Return whether each row is a single 1 among zeros."""
    are_flags = bool(((rows == 0) | (rows == 1)).all())
    return len(rows) > 0 and are_flags and bool((rows.sum(1) == 1).all())


def _refuse_odd_shapes(title: str, given: Mapping[str, Any]) -> None:
    """Reject embeddings and labels whose shapes PML does not support."""
    for name, shape, dimensions in _SHAPES:
        value = given.get(name)
        if value is None or (isinstance(value, Tensor) and value.ndim == dimensions):
            continue
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"{title}: {name}",
            expected=f"a tensor of shape {shape}",
            got=got,
            fix="Reshape it: one row of features, or one class number, for each sample.",
        )


# ---------------------------------------------------------------------- two views without labels


def labelled_arguments(loss: nn.Module, title: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments in the form that ``labelled_loss(loss)`` expects. ``PMLCall`` adds the labels.

    Args:
        loss: The loss that was called, which takes two views.
        title: Its name in messages.
        given: Its arguments by name.

    Returns:
        Both views as (2 B, D) ``embeddings`` if ``stacks_views``, else the unchanged arguments.

    Raises:
        InputError: if a view is missing or not a tensor, or if the shapes of the views differ.
    """
    _refuse_views(title, given)
    if not pml_registry.stacks_views(loss):
        return given
    return {"embeddings": torch.cat([given[name] for name in _TWO_VIEWS])}


def identities_of(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return labels of the rows of all ranks, each rank's first view before its second.

    Args:
        counts: Rows of each rank, both views together.
        device: Device of the labels.

    Returns:
        (2 G,) int64, the global index of each row's sample, equal for both views of the sample.
    """
    samples = torch.arange(sum(counts) // 2, device=device)
    parts = torch.split(samples, [rows // 2 for rows in counts])
    return torch.cat([part.repeat(2) for part in parts])


def by_view(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Reorder rows from the order of ``identities_of`` to that of one process, where the first view of all ranks precedes the second."""
    sizes = [both // 2 for both in counts for _ in _TWO_VIEWS]
    parts = torch.split(rows, sizes)
    return torch.cat([*parts[0::2], *parts[1::2]])


def fix_for_views(loss: nn.Module) -> str:
    """Return advice on how to pass two views to a loss that was called with the second view instead of labels."""
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
        fix="Pass both views of the same samples in the same order.",
    )


# ---------------------------------------------------------------------- a call of PML's


def refuse_half_labelled(inner: nn.Module, facts: LossFacts, given: Mapping[str, Any]) -> None:
    """Reject labels of the references if the rows do not have labels."""
    is_half_labelled = "labels" not in given and "ref_labels" in given and "ref_emb" in given
    if is_half_labelled and not facts.pairs_views:
        raise InputError(
            f"{type(inner).__name__}: labels",
            expected="labels and ref_labels, or neither (each row its own identity)",
            got="ref_labels only",
            fix="Pass the labels of the embeddings as well, or leave ref_labels out.",
        )


class CallBatches(NamedTuple):
    """The arguments of a call that are gathered.

    Attributes:
        tensors: Batches by name, each tensor once, followed by the index tensors of tuples that this rank mined locally.
        aliases: Maps names of arguments to the name of another argument that is the same tensor.
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
            InputError: for malformed tuples.
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
        # a tensor is not a tuple of indices but contains a value per row (ManifoldLoss's classes), and is gathered like any batch
        tuples = given.get("indices_tuple")
        if tuples is None or isinstance(tuples, (row_tuples.GlobalTuples, Tensor)):
            return cls(tensors, aliases, 0)
        if len(tuples) and pml_registry.compares_named_rows(inner):
            row_tuples.refuse_malformed_tuples(f"{type(inner).__name__}: indices_tuple", tuples)
        for place, index in enumerate(tuples):
            tensors[f"index {place}"] = _on_device_of(given.get("embeddings"), index)
        return cls(tensors, aliases, len(tuples))


class PMLCall:
    """The arguments of a call over all ranks. Arguments that are different tensors in one process remain different tensors.

    Args:
        inner: The loss or miner.
        facts: Facts of its class.
        given: Its arguments by name, none of them None.
        batches: The arguments that were gathered.
        gathered: The gathered batches of all ranks.
        rank: This rank.
        two_views: True if the embeddings are both views of each sample, where all rows of the first view precede the second view.

    Attributes:
        given: Arguments of this rank.
        arguments: The arguments over all ranks, for ``inner(**arguments)``.
        args: Positional arguments: always empty.
        counts: Rows of each rank, per gathered tensor.
        extras: The additional bytes that each rank has sent.
        local_labels: This rank's labels, or its generated labels if no labels were given.
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
        # every rank has the row counts of all ranks, so all ranks raise the same error
        self._refuse_lengths()
        tuples = given.get("indices_tuple")
        if isinstance(tuples, row_tuples.GlobalTuples):
            references = None if facts.own_references else self.total_references
            tuples.check(type(inner).__name__, self.total_rows, references)
        # the loss receives the rows of all ranks, and tuples with global indices
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
        # other arguments (a flag, a number) are not sent
        for name, value in given.items():
            arguments.setdefault(name, value)
        self.arguments = arguments
        self.args: tuple[Any, ...] = ()

    @property
    def seed(self) -> int:
        """Seed of random draws, equal on every rank."""
        return shared_seed(self._gathered)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Arguments by name over all ranks, with rows in the order of one process."""
        if not self._two_views:
            return self.arguments
        # random numbers that a loss draws depend on the order of rows
        counts = self.counts["embeddings"]
        return {name: by_view(self.arguments[name], counts) for name in ("embeddings", "labels")}

    @property
    def batches(self) -> Iterable[Any]:
        """Gathered tensors and all other arguments."""
        return self.arguments.values()

    def is_bf16_on_all_ranks(self) -> bool:
        """Return whether every rank passed its rows in bfloat16. In a group of one rank, always True."""
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
        """Range of this rank's rows among the global rows: first, one past the last."""
        counts = self.counts["embeddings"]
        start = sum(counts[: self._rank])
        return start, start + counts[self._rank]

    @cached_property
    def references(self) -> Tensor:
        """Rows of the references over all ranks, or the anchors if there are no separate references."""
        return self.arguments.get("ref_emb", self.arguments["embeddings"])  # type: ignore[no-any-return]

    @cached_property
    def ref_labels(self) -> Tensor | None:
        """Labels of the references, or of the anchors if there are no separate references."""
        labels = self.arguments.get("labels")
        if "ref_emb" in self.arguments:
            return self.arguments.get("ref_labels", labels)
        return labels

    def bounds(self, name: str = "embeddings") -> list[tuple[int, int]]:
        """Return the range of each rank's rows among the global rows: first, one past the last."""
        stops = itertools.accumulate(self.counts[name])
        return [(stop - rows, stop) for rows, stop in zip(self.counts[name], stops, strict=True)]

    def rows_possible(self) -> bool:
        """Return whether each rank may evaluate its own anchors. Equal on all ranks."""
        labels, ref_labels = self.arguments.get("labels"), self.ref_labels
        if labels is None or ref_labels is None:
            return False
        mined = self.arguments.get("indices_tuple")
        matching = self._matching if mined is None else None
        return row_tuples.are_ordinary(matching, len(ref_labels), self.bounds(), mined, same=ref_labels is labels)

    def global_pair_counts(self) -> tuple[int, int]:
        """Return the numbers of positive and negative pairs among the rows of all ranks, according to labels."""
        labels, ref_labels = self._all_labels()
        matching = int(self._matching.sum())
        self_pairs = len(labels) * (ref_labels is labels)
        return matching - self_pairs, len(labels) * len(ref_labels) - matching

    def local_pair_counts(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of positives and negatives of this rank's anchors, (B,) each, on the host."""
        labels, ref_labels = self._all_labels()
        mined, (start, stop) = self.arguments.get("indices_tuple"), self.bound
        if mined is not None:
            counts = torch.stack(
                [row_tuples.count_indices(anchors, len(labels)) for anchors in row_tuples.named_anchors(mined)]
            )
            on_host = counts[:, start:stop].cpu()
            # pairs have two lists of anchors, triplets have one
            return on_host[0], on_host[-1]
        # a row matches its own label but is not its own partner
        matching = self._matching[start:stop]
        return matching - int(ref_labels is labels), len(ref_labels) - matching

    def local_tuples(self, part: slice | None = None) -> tuple[Tensor, ...]:
        """Return pairs or triplets of this rank's anchors, or of the rows in ``part``, with anchors numbered from the first row."""
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
        """Return the number of ranks whose labels are 0, 1, 2, ... (once, or once per view)."""
        labels = self.arguments["labels"]
        return sum(_counts_from_zero(labels[start:stop]) for start, stop in self.bounds("labels"))

    def moves_pairs(self) -> bool:
        """Return whether rows are paired by index, and different numbers of rows and references on a rank shift pairs of later ranks."""
        if not self._facts.pairs_views or "labels" in self.given or "ref_emb" not in self.counts:
            return False
        starts = [start for start, _ in self.bounds()]
        return starts != [start for start, _ in self.bounds("ref_emb")]

    def rows_to_remember(self) -> int:
        """Return how many rows are added to a cross-batch memory: all rows, or the rows selected by ``enqueue_mask``."""
        mask = self.arguments.get("enqueue_mask")
        return self.total_rows if mask is None else int(mask.sum())

    @cached_property
    def _matching(self) -> Tensor:
        """(G,), the number of references with each row's label, on the host."""
        return row_tuples.same_label_counts(*self._all_labels())

    def _all_labels(self) -> tuple[Tensor, Tensor]:
        ref_labels = self.ref_labels
        assert ref_labels is not None
        return self.arguments["labels"], ref_labels

    def _refuse_lengths(self) -> None:
        """Reject labels or masks whose length differs from the number of rows on any rank. All ranks raise the same error."""
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
                    fix="Select both by the same rows of the batch.",
                )

    def _add_identities_(self, arguments: dict[str, Any]) -> None:
        """Add labels to two unlabelled views, so that row i of one view matches row i of the other, unique over all ranks."""
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
        """Convert local tuples of all ranks to global indices: anchors index rows, and positives and negatives index references."""
        references = "ref_emb" if "ref_emb" in self.counts else "embeddings"
        # four tensors are positive pairs and negative pairs, three are triplets
        names = ["embeddings", references] * 2 if len(indices) == 4 else ["embeddings", references, references]
        # for each rank: offset and number of its rows, and number of its indices
        starts = [[start for start, _ in self.bounds(of)] for of in names]
        rows = [self.counts[of] for of in names]
        counts = [self.counts[f"index {position}"] for position in range(len(indices))]
        table = torch.tensor([starts, rows, counts]).to(indices[0].device, non_blocking=True)
        renumbered, are_of_others = [], []
        for index, *numbers, times in zip(indices, *table.unbind(), strict=True):
            # values of the rank from which each index was received
            start, limit = (number.repeat_interleave(times, output_size=len(index)) for number in numbers)
            are_of_others.append(((index < 0) | (index >= limit)).any())
            renumbered.append(index + start)
        # out-of-range indices would address another rank's rows. On an accelerator this synchronizes once, as the miner already has
        if not self._facts.own_references and bool(torch.stack(are_of_others).any()):
            for are_wrong, index, times, of in zip(are_of_others, indices, counts, names, strict=True):
                if are_wrong:
                    self._refuse_indices(index, times, of)
        return renumbered

    def _refuse_indices(self, index: Tensor, counts: list[int], of: str) -> NoReturn:
        """Reject index tuples that point outside this rank's rows."""
        lines = []
        for own, rows in zip(torch.split(index.cpu(), counts), self.counts[of], strict=True):
            # a rank without tuples does not have a range
            lines.append(f"{int(own.min())} to {int(own.max())} for {rows} rows" if own.numel() else "none")
        raise InputError(
            f"{type(self._inner).__name__}: indices_tuple",
            expected=f"rows of {of} on the same rank",
            ranks=lines,
            fix="Mine this rank's rows with the miner itself, or pass on what GlobalBatchMiner returns as it is.",
            collective=True,
        )


def _on_device_of(rows: Any, index: Tensor) -> Tensor:
    """Move a miner's indices to the device of the rows. Some miners return them on the host, which torch's indexing also accepts."""
    return index.to(rows.device) if isinstance(rows, Tensor) else index


def _counts_from_zero(labels: Tensor) -> bool:
    """Return whether labels are 0, 1, 2, ..., either once or twice in a row (two views)."""
    rows = len(labels)
    if rows < 3:
        return False
    numbers = torch.arange(rows, device=labels.device).to(labels)
    if torch.equal(labels, numbers):
        return True
    return rows % 2 == 0 and torch.equal(labels, numbers[: rows // 2].repeat(2))


# ---------------------------------------------------------------------- a call of any other loss


def batches_in(title: str, values: Mapping[int | str, Any], layout: SampleLayout) -> dict[str, Tensor]:
    """Return the batches of a call by path, with samples along dim 0.

    Args:
        title: Name of the loss in messages.
        values: Arguments by position and name. Batches may also be inside lists, tuples and dicts.
        layout: The dimension and views of samples in each argument.

    Raises:
        InputError: for a batch in a container that is not a plain list, tuple or dict, and for rows that are not views of samples.
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
    """Yield the tensors that ``inputs.map_tensors`` finds, with their paths and in the same order."""
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
    """The arguments of a call over all ranks, also in lists, tuples and dicts. 0-dim tensors and other values are not changed.

    Args:
        args: Positional arguments of this rank.
        kwargs: Keyword arguments of this rank.
        layout: The dimension and views of samples in each argument.
        gathered: The batches of all ranks, in the order of ``batches_in``.

    Attributes:
        args: Positional arguments over all ranks.
        kwargs: Keyword arguments over all ranks.
        batches: The gathered tensors.
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
        """Seed of random draws, equal on every rank."""
        return shared_seed(self._gathered)


def _next_of(everyone: Iterator[Tensor], layout: SampleLayout, name: int | str, own: Tensor) -> Tensor:
    """Return the next gathered tensor to replace this rank's tensor. 0-dim tensors were not gathered and are returned unchanged."""
    return layout.as_given(name, next(everyone)) if own.ndim else own


# ---------------------------------------------------------------------- the same random numbers on every rank


class SeedCounter(CountedDraws):
    """Seeds each call of a module."""

    def next(self) -> bytes:
        """Return this rank's seed for the next call, which is sent in the call's handshake."""
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
        seed: Must be equal on every rank.
        tensors: Inputs of the call. Generators of their devices are also seeded.
    """
    generators = torch_generators(t.device for t in tensors if isinstance(t, Tensor))
    with preserve_random_state([*generators, c_f.NUMPY_RANDOM], seed=seed):
        yield
