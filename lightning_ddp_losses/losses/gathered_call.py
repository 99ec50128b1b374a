"""One call of a pytorch-metric-learning (PML) loss or miner: what this rank gave, and the same over all ranks."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor, nn

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.random_state import preserve_random_state, torch_generators
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses import anchor_tuples as pml_rows

PML_NAMES = ("embeddings", "labels", "indices_tuple", "ref_emb", "ref_labels", "enqueue_mask")
_NO_IDENTITY = (pml.VICRegLoss, pml.SelfSupervisedLoss)


def by_name(title: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name, without those that are None.

    Args:
        title: How the message names what is called.
        names: Of the positional ones.
        args: By position.
        kwargs: By name.

    Raises:
        InputError: for more positional arguments than names, and for one that is given twice.
    """
    twice = [name for name in names[: len(args)] if name in kwargs]
    if len(args) > len(names) or twice:
        raise InputError(
            f"{title}: arguments",
            expected=f"{', '.join(names)}, each once",
            got=f"{', '.join(twice)} twice" if twice else f"{len(args)} positional ones",
        )
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: value for name, value in given.items() if value is not None}


class GlobalTuples(tuple[Tensor, ...]):
    """A miner's tuples over the global batch, the same on every rank: indices count rows of all ranks.

    Attributes:
        rows: How many rows those are.
    """

    rows: int

    @classmethod
    def of(cls, tuples: Iterable[Tensor], rows: int) -> GlobalTuples:
        """Tuples that count ``rows`` rows."""
        made = cls(tuples)
        made.rows = rows
        return made

    def check(self, title: str, rows: int) -> None:
        """Refuse tuples of another batch, or of another group's.

        Raises:
            InputError: naming both numbers of rows.
        """
        if self.rows != rows:
            raise InputError(
                f"{title}: indices_tuple of GlobalBatchMiner",
                expected=f"of the {rows} rows that the loss gets",
                got=f"of {self.rows} rows",
                fix="Mine the embeddings that the loss gets, over the same process group.",
            )


class PMLCall:
    """Gathers the arguments of a call and keeps apart what one process would have kept apart.

    Args:
        inner: The loss or miner.
        given: Its arguments by name, none of them None.
        gather: Gathers named batches.
        rank: This rank.

    Attributes:
        arguments: The arguments over all ranks, for ``inner(**arguments)``.
        counts: Rows of each rank, per gathered tensor.
        own_labels: This rank's labels; its own identities where none were given.
        seed: For random draws, the same on every rank.
    """

    def __init__(
        self, inner: nn.Module, given: dict[str, Any], gather: Callable[[dict[str, Tensor]], GatheredBatch], rank: int
    ) -> None:
        self.given = given
        self._inner = inner
        self._rank = rank
        self._identities_wanted = "labels" not in given and "ref_emb" in given and not isinstance(inner, _NO_IDENTITY)
        if self._identities_wanted and "ref_labels" in given:
            raise InputError(
                f"{type(inner).__name__}: labels",
                expected="labels and ref_labels, or neither (each row its own identity)",
                got="ref_labels only",
            )
        tuples = given.get("indices_tuple")
        batches = {n: v for n, v in given.items() if isinstance(v, Tensor)}
        # PML asks whether the references are the very same tensors
        same = {
            ref: own
            for ref, own in (("ref_emb", "embeddings"), ("ref_labels", "labels"))
            if ref in batches and batches[ref] is batches.get(own)
        }
        for name in same:
            del batches[name]
        # a tensor is no tuple of indices but a value per row (ManifoldLoss's classes) and gathers like any batch
        local = () if tuples is None or isinstance(tuples, (GlobalTuples, Tensor)) else tuples
        bundle = gather(batches | {f"index {i}": index for i, index in enumerate(local)})
        self.seed = shared_seed(bundle)
        names = [*batches, *(f"index {i}" for i in range(len(local)))]
        self.counts = dict(zip(names, bundle.counts, strict=True))
        self._refuse_lengths()
        if isinstance(tuples, GlobalTuples):
            tuples.check(type(inner).__name__, self.total_rows)
        out: dict[str, Any] = dict(zip(names, bundle.tensors, strict=True))
        if local:
            tuples = self._shift([out.pop(f"index {i}") for i in range(len(local))])
        self.own_labels: Tensor | None = given.get("labels")
        if self._identities_wanted:
            self._identities(out)
        out.update({name: out[own] for name, own in same.items()})
        if tuples is not None and not isinstance(tuples, Tensor):
            out["indices_tuple"] = tuple(tuples)
        # what is no tensor travels nowhere: a flag, a number
        out.update({n: v for n, v in given.items() if n not in out})
        self.arguments = out

    @property
    def total_rows(self) -> int:
        """G."""
        return sum(self.counts["embeddings"])

    @property
    def bound(self) -> tuple[int, int]:
        """Global rows of this rank: first, one past the last."""
        return self.bounds()[self._rank]

    @property
    def references(self) -> Tensor:
        """Rows of the references over all ranks; the anchors where there are no others."""
        return self.arguments.get("ref_emb", self.arguments["embeddings"])  # type: ignore[no-any-return]

    @property
    def ref_labels(self) -> Tensor | None:
        """Labels of the references; of the anchors where there are no others."""
        own = self.arguments.get("labels")
        return self.arguments.get("ref_labels", own) if "ref_emb" in self.arguments else own

    def bounds(self, name: str = "embeddings") -> list[tuple[int, int]]:
        """Global rows of each rank."""
        stops = torch.tensor(self.counts[name]).cumsum(0).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def rows_possible(self) -> bool:
        """Whether each rank may evaluate its own anchors; the same verdict on every rank."""
        labels, ref_labels = self.arguments.get("labels"), self.ref_labels
        if labels is None or ref_labels is None:
            return False
        given = self.arguments.get("indices_tuple")
        return pml_rows.tuples_suffice(labels, ref_labels, self.bounds(), given, same=ref_labels is labels)

    def pairs(self) -> tuple[int, int]:
        """How many positive and negative pairs the labels of all ranks make."""
        labels, ref_labels = self.arguments["labels"], self.ref_labels
        assert ref_labels is not None
        near = int(pml_rows.partner_counts(labels, ref_labels).sum())
        return near - len(labels) * (ref_labels is labels), len(labels) * len(ref_labels) - near

    def own_tuples(self, part: slice | None = None) -> tuple[Tensor, ...]:
        """Pairs or triplets of this rank's anchors, or of some of its rows, counted from the first of them."""
        labels, ref_labels = self.arguments["labels"], self.ref_labels
        assert ref_labels is not None
        given, (start, stop) = self.arguments.get("indices_tuple"), self.bound
        bound = (start, stop) if part is None else (start + part.start, start + part.stop)
        return pml_rows.anchor_tuples(self._inner, labels, ref_labels, bound, given, same=ref_labels is labels)

    def partner_counts(self) -> tuple[Tensor, Tensor]:
        """(B,) each: positives and negatives of this rank's anchors."""
        labels, ref_labels = self.arguments["labels"], self.ref_labels
        assert ref_labels is not None
        given, (start, stop) = self.arguments.get("indices_tuple"), self.bound
        if given is not None:
            anchors = [given[0], given[2 if len(given) == 4 else 0]]
            first, second = (torch.bincount(a, minlength=len(labels))[start:stop] for a in anchors)
            return first, second
        near = pml_rows.partner_counts(labels, ref_labels)[start:stop]
        return near - int(ref_labels is labels), len(ref_labels) - near

    def ranks_with_local_identities(self) -> int:
        """On how many ranks the labels are 0, 1, 2, ... (once, or once per view)."""
        labels, count = self.arguments["labels"], 0
        for start, stop in self.bounds("labels"):
            own, rows = labels[start:stop], stop - start
            views = (1, 2) if rows % 2 == 0 else (1,)
            if rows > 2 and any(
                torch.equal(own, torch.arange(rows // v, device=own.device).repeat(v).to(own)) for v in views
            ):
                count += 1
        return count

    def _refuse_lengths(self) -> None:
        """Labels or a mask of another length than the rows they belong to; every rank sees every rank's numbers."""
        pairs_of_names = [("labels", "embeddings"), ("ref_labels", "ref_emb"), ("enqueue_mask", "embeddings")]
        if self._identities_wanted:
            pairs_of_names.append(("ref_emb", "embeddings"))
        for name, of in pairs_of_names:
            if name in self.counts and self.counts[name] != self.counts.get(of, self.counts[name]):
                pairs = zip(self.counts[name], self.counts[of], strict=True)
                raise InputError(
                    f"{type(self._inner).__name__}: {name}",
                    expected=f"one per row of {of}",
                    ranks=[f"{count} for {rows} rows" for count, rows in pairs],
                    collective=True,
                )

    def _identities(self, out: dict[str, Any]) -> None:
        """Two views without labels: row i of one view belongs to row i of the other, over all ranks."""
        out["labels"] = torch.arange(self.total_rows, device=out["embeddings"].device)
        start, stop = self.bound
        self.own_labels = out["labels"][start:stop]
        out.setdefault("ref_labels", out["labels"].clone())

    def _shift(self, indices: list[Tensor]) -> list[Tensor]:
        """Local tuples of all ranks as global ones: anchors count rows, the others count references."""
        refs = "ref_emb" if "ref_emb" in self.counts else "embeddings"
        anchors = (0, 2) if len(indices) == 4 else (0,)
        out = []
        for position, index in enumerate(indices):
            counts = self.counts[f"index {position}"]
            of = "embeddings" if position in anchors else refs
            self._refuse_indices(torch.split(index, counts), of)
            starts = torch.tensor([start for start, _ in self.bounds(of)], device=index.device)
            out.append(index + starts.repeat_interleave(torch.tensor(counts, device=index.device)))
        return out

    def _refuse_indices(self, by_rank: Sequence[Tensor], of: str) -> None:
        """Tuples of rows that a rank has not: it mined something else. On an accelerator, to look would wait for it."""
        if by_rank[0].device.type != "cpu" or isinstance(self._inner, pml.CrossBatchMemory):
            return  # a memory's references are its own
        ranges = [(int(own.min()), int(own.max())) if own.numel() else (0, -1) for own in by_rank]
        if any(low < 0 or high >= rows for (low, high), rows in zip(ranges, self.counts[of], strict=True)):
            pairs = zip(ranges, self.counts[of], strict=True)
            raise InputError(
                f"{type(self._inner).__name__}: indices_tuple",
                expected=f"rows of {of} on the same rank",
                ranks=[f"{low} to {high} for {rows} rows" if high >= 0 else "none" for (low, high), rows in pairs],
                fix="Mine this rank's rows with the miner itself, or pass on what GlobalBatchMiner returns as it is.",
                collective=True,
            )


_DRAW = struct.Struct("<QQ")
# of pytorch-metric-learning (PML) and torch, by exact class: a subclass, a miner or a module or function of somebody else may draw
_NEVER_DRAW = {
    cls
    for package in (losses, distances, reducers, regularizers, nn.modules.loss)
    for cls in vars(package).values()
    if isinstance(cls, type) and cls not in (losses.ManifoldLoss, nn.TripletMarginWithDistanceLoss)
} | {nn.ModuleDict, nn.ModuleList, nn.Softplus}


def may_draw(loss: nn.Module) -> bool:
    """Whether a call may draw random numbers; to save and restore generators takes as long as a small loss."""
    stack = [loss]
    while stack:
        module = stack.pop()
        if type(module) not in _NEVER_DRAW or vars(module).get("triplets_per_anchor", "all") != "all":
            return True
        stack += [child for child in module._modules.values() if child is not None]
    return False


@contextlib.contextmanager
def same_draws(inner: nn.Module, seed: int, tensors: Iterable[object]) -> Iterator[None]:
    """Seed torch's generators (CPU and the tensors' devices) and PML's numpy generator, and restore them.

    Args:
        inner: What is called; generators are left alone where it never draws.
        seed: The same on every rank.
        tensors: The call's inputs; their devices' generators are seeded too.
    """
    if not may_draw(inner):
        yield
        return
    generators = torch_generators(t.device for t in tensors if isinstance(t, Tensor))
    with preserve_random_state([*generators, c_f.NUMPY_RANDOM], seed=seed):
        yield


class Draws:
    """Counts the calls of a module: each draws anew.

    Attributes:
        number: Calls so far.
    """

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> bytes:
        """This rank's seed for one more call, to ride in a frame."""
        self.number += 1
        return _DRAW.pack(torch.initial_seed() % (1 << 63), self.number)


def shared_seed(bundle: GatheredBatch) -> int:
    """Rank 0's seed for this call."""
    base, draws = _DRAW.unpack(bundle.extras[0])
    return int((base * 1_000_003 + draws) % (1 << 63))


def miner_counts(indices_tuple: Sequence[Tensor], rows: int, *, only_anchors: bool, title: str) -> Tensor:
    """How often each of ``rows`` rows is named, int64.

    Args:
        indices_tuple: Triplets (anchor, positive, negative), or pairs (anchor, positive, anchor, negative).
        rows: Number of rows that the indices count.
        only_anchors: Count anchors alone.
        title: For the message.

    Raises:
        InputError: for an index of a row that is not there, or another number of index tensors.
    """
    if len(indices_tuple) not in (3, 4):
        raise InputError(f"{title}: indices_tuple", expected="3 or 4 index tensors", got=len(indices_tuple))
    picked = (
        indices_tuple if not only_anchors else indices_tuple[0::2] if len(indices_tuple) == 4 else indices_tuple[:1]
    )
    index = torch.cat([part.reshape(-1) for part in picked])
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise InputError(
            f"{title}: indices_tuple",
            expected=f"0 to {rows - 1}, the rows of this call",
            got=f"{int(index.min())} to {int(index.max())}",
            fix="Mine the embeddings that the loss gets.",
        )
    return torch.bincount(index.to(torch.int64), minlength=rows)


def miner_weights(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """(G,) weights from the counts over all ranks."""
    highest = counts.max()
    return torch.where(highest > 0, counts.to(dtype) / highest.clamp(min=1), torch.ones((), dtype=dtype))


class TensorCall:
    """Gathers the arguments of a call; 0-dim tensors and what is no tensor stay as they are.

    Args:
        title: How messages name the loss.
        args: What this rank gave, by position.
        kwargs: The same by name.
        batch_dims: By position or name, which dimension counts samples (0 where nothing is said); None: no batch.
        gather: Gathers named batches along dim 0.

    Attributes:
        args: The arguments over all ranks.
        kwargs: The same by name.
        batches: Those that were gathered.
        seed: For random draws, the same on every rank.

    Raises:
        InputError: for a batch inside a list, tuple or dict.
    """

    def __init__(
        self,
        title: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_dims: Mapping[int | str, int | None],
        gather: Callable[[dict[str, Tensor]], GatheredBatch],
    ) -> None:
        named: dict[int | str, Any] = dict(enumerate(args))
        named.update(kwargs)
        dims: dict[int | str, int] = {}
        for name, value in named.items():
            dim = batch_dims.get(name, 0)
            if dim is None:
                continue
            if isinstance(value, (list, tuple, dict)):
                _refuse_nested(title, name, value)
            elif isinstance(value, Tensor) and value.ndim:
                dims[name] = dim
        bundle = gather({str(name): named[name].movedim(dim, 0) for name, dim in dims.items()})
        for (name, dim), tensor in zip(dims.items(), bundle.tensors, strict=True):
            named[name] = tensor.movedim(0, dim)
        self.args = tuple(named[position] for position in range(len(args)))
        self.kwargs = {name: named[name] for name in kwargs}
        self.batches, self.seed = bundle.tensors, shared_seed(bundle)


def _refuse_nested(title: str, name: int | str, value: Any) -> None:
    if any(t.ndim for t in precision.tensors_in(value)):
        raise InputError(
            f"{title}: argument {name}",
            expected="a tensor",
            got=f"a {type(value).__name__} of tensors, whose rows would stay on this rank",
            fix=f"Pass the tensors one by one, or say that they are no batches: batch_dims={{{name!r}: None}}.",
        )
