"""Deals each row of an evaluation once, and joins the predictions of all ranks in the order of one process.

No padding (`EvaluationSampler`): torch's ``DistributedSampler`` repeats rows until the ranks divide them, and every metric counts those
twice. Without the padding ranks may have different numbers of batches, and a collective in the step (a global loss, a logged value, DDP's
buffers) waits for ever. Both are avoided by cutting the order of one process into *global batches*. Every rank gets its contiguous part of
each:

* Step ``k`` sees the rows ``k W B`` to ``(k + 1) W B``, rank after rank, as one process in a batch of ``W B`` rows.
* The rows that are left for the last step are shared as evenly as possible.
* If they are fewer than the ranks, they take rows from the batch before. A rank's batch then has one row less.
* Only if that batch has none to give (``B = 1``), the ranks ``rest`` and above have one batch less.

The way back (`gather_predictions`): a distributed sampler deals rows in turn (rank 0 has rows 0, W, 2 W, ...) and may repeat some so that
all ranks have the same number. So predictions have to be put back into the order of the data set, each row once, before they are compared
with those of one process: a metric that searches for a query's neighbours among one rank's rows is another metric.

Legend: ``W`` ranks, ``B`` rows of a rank's batch, ``N`` or ``G`` rows of the data set.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_ddp_losses.core import compat, inputs
from lightning_ddp_losses.distributed import handshake, messages, process_groups
from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.samplers.global_batch import GlobalBatches, GlobalBatchSampler
from lightning_ddp_losses.samplers.global_draw import draw_digest, draw_seeded, share

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_TITLE = "gather_predictions"


class EvaluationSampler(DistributedSampler[Any]):
    """This rank's rows of another sampler's draw, each row on one rank.

    The order is that of the sampler. A random one draws epoch ``e`` from ``seed + e``, so that all ranks draw the same.
    (Rank and world size are those at the time it is made.)

    Args:
        sampler: Sampler that one process would use, with a length.
        batch_size: Rows of a rank's batch, B. None if the loader makes no batches.
        drop_last: Leave out a last global batch of fewer than ``W B`` rows.
        seed: Seed, as ``DistributedSampler``'s.

    Raises:
        ConfigurationError: for a sampler without a length.
        InputError: if the sampler draws another number of rows than its length.

    Communication: none.
    """

    def __init__(self, sampler: Any, batch_size: int | None, *, drop_last: bool = False, seed: int = 0) -> None:
        rows = len_of(sampler)
        W, rank = process_groups.world_size(), process_groups.rank()
        super().__init__(sampler, num_replicas=W, rank=rank, shuffle=False, seed=seed, drop_last=drop_last)
        self.source, self.batch_size, self.global_rows = sampler, batch_size or 1, rows
        self.num_samples, self.total_size = len(self), rows
        if drop_last:
            self.total_size = self._steps * W * self.batch_size
        self._drawn: tuple[int, Sequence[Any]] | None = None  # the epoch that was drawn last, and its order

    # ------------------------------------------------------------------ numbers

    @property
    def counts(self) -> list[int]:
        """Number of batches of each rank."""
        rows_of_last = self._global_batch(self._steps - 1)[1] if self._steps else 0
        return [self._steps - (0 < rows_of_last <= rank) for rank in range(self.num_replicas)]

    def __len__(self) -> int:
        # only the last two global batches may have other sizes
        first = max(0, self._steps - 2)
        sizes = [len(self._local_part(*self._global_batch(step))) for step in range(first, self._steps)]
        return first * self.batch_size + sum(sizes)

    @property
    def _steps(self) -> int:
        """Return the number of global batches."""
        full, rest = divmod(self.global_rows, self.num_replicas * self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def _global_batch(self, step: int) -> tuple[int, int]:
        """Return the first row of a global batch, and its number of rows."""
        W, size = self.num_replicas, self.num_replicas * self.batch_size
        full, rest = divmod(self.global_rows, size)
        start, rows = step * size, size
        if step == full:
            rows = rest
        # too few rows for the last step: each rank gets one of these, or of the rows before
        if 0 < rest < W and full and self.batch_size > 1 and not self.drop_last:
            lent = W - rest
            if step == full - 1:
                rows -= lent
            elif step == full:
                start, rows = start - lent, rows + lent
        return start, rows

    def _local_part(self, start: int, rows: int) -> range:
        """Return the places of this rank's part of a global batch in the order of all rows."""
        return range(start, start + rows)[share(rows, self.num_replicas, self.rank)]

    # ------------------------------------------------------------------ rows

    @property
    def is_sequential(self) -> bool:
        """Whether rows come in the order of the data set, so that no random numbers are needed."""
        return type(self.source) is SequentialSampler

    def order(self) -> Sequence[Any]:
        """Return the draw of one process in this epoch, the same on every rank."""
        if self.is_sequential:
            return range(self.global_rows)
        if self._drawn is None or self._drawn[0] != self.epoch:
            drawn = draw_seeded(self.source, self.seed + self.epoch)
            what = f"rows that {type(self.source).__name__} drew for an evaluation"
            expected = f"{self.global_rows}, its length when the loader was set up"
            is_whole, fix = len(drawn) == self.global_rows, "Let its __len__ return the rows of every epoch."
            expect(is_whole, what, expected=expected, got=len(drawn), fix=fix, error=InputError)
            self._drawn = (self.epoch, drawn)
        return self._drawn[1]

    def digest(self) -> str:
        """Return a hash of this epoch's order: ranks that draw differently would repeat some rows and leave out others."""
        return draw_digest([list(self.order())]).hex()

    def batches(self) -> Iterator[list[Any]]:
        """Yield this rank's batches."""
        order = self.order()
        for step in range(self.counts[self.rank]):
            yield [order[place] for place in self._local_part(*self._global_batch(step))]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch


def len_of(sampler: Any) -> int:
    """Return the number of rows that a sampler draws.

    Raises:
        ConfigurationError: for a sampler without a length.
    """
    try:
        return len(sampler)
    except TypeError:
        what = f"{type(sampler).__name__} in an evaluation that counts each row once"
        fix = "Give it __len__, or set evaluation='padded'."
        raise ConfigurationError(what, expected="a sampler with a length", got="none", fix=fix) from None


class EvaluationBatches(BatchSampler):
    """The batches of an ``EvaluationSampler``, for a DataLoader.

    Args:
        sampler: The sampler.
    """

    def __init__(self, sampler: EvaluationSampler) -> None:
        super().__init__(sampler, sampler.batch_size, sampler.drop_last)
        self.sampler: EvaluationSampler = sampler  # Lightning calls its set_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.counts[self.sampler.rank]


def repeated_rows(loader: DataLoader[Any]) -> int:
    """Return the number of rows that a padding sampler hands out twice, all ranks together."""
    # Lightning builds the user's batch sampler around its own sampler
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    is_exact = isinstance(sampler, (EvaluationSampler, GlobalBatchSampler))  # ranks may have different numbers of rows
    if is_exact or not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    try:
        rows = len(sampler.dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0
    return max(0, len(sampler) * sampler.num_replicas - rows)


# ---------------------------------------------------------------------- the way back


def gather_predictions(trainer: Trainer, predictions: Any, *, dst: int | None = None) -> Any:
    """Join the predictions of all ranks in the order of the data set, each row once.

    Equivalent to: ``trainer.predict`` in one process without shuffling, its batches concatenated. If rows were left out
    (``limit_predict_batches``), the remaining ones in ascending order.

    After ``trainer.predict`` it takes the returned predictions. In ``on_validation_epoch_end`` and ``on_test_epoch_end`` it takes one entry
    for each batch that the step has seen, for loaders with a known order: those that do not shuffle, ``DistributedSampler``,
    ``GlobalBatchSampler``, and all loaders under ``DDPLossStrategy(evaluation="exact")``.

    Args:
        trainer: Trainer that made the predictions. Its loaders give their rows.
        predictions: This rank's predictions: a list with an entry per batch, or a list of such lists for several loaders. An entry is a
            tensor (B, ...) or a nest of dicts, lists and tuples of tensors.
        dst: The only rank that keeps them. None: every rank.

    Returns:
        (G, ...) in the place of each (B, ...), on its device, without graph. A list of these for several loaders. None on ranks other than
        ``dst``.

    Communication: one handshake, and a handshake and a gather for each loader. All ranks hold the rows of one loader for a while.

    Raises:
        ConfigurationError: if the processes that predicted are gone (``ddp_spawn``, ``ddp_fork``).
        InputError: on every rank, for entries without one row for each row of their batch, that are not tensors, or that differ
            between ranks, for loaders with an unknown order, and for ranks that drew from different orders.

    Example:
        >>> import torch
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader
        >>> class Double(LightningModule):
        ...     def predict_step(self, batch, batch_idx):
        ...         return {"twice": 2 * batch}
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        >>> trainer = Trainer(devices=1, **options)
        >>> predictions = trainer.predict(Double(), DataLoader(torch.arange(5), batch_size=2, num_workers=0))
        >>> gather_predictions(trainer, predictions)
        {'twice': tensor([0, 2, 4, 6, 8])}
    """
    # without a group the ranks are gone: only the main process is here
    expect(
        trainer.world_size == 1 or process_groups.is_distributed(),
        f"{_TITLE}: process group",
        expected=f"that of the {trainer.world_size} ranks that predicted",
        got=f"none: the processes of {type(trainer.strategy).__name__} are gone",
        fix="Write each rank's rows in its own process, with lightning.pytorch.callbacks.BasePredictionWriter, or use a strategy "
        "with processes that stay, as 'ddp_losses'.",
    )
    # 1. the rows of this rank, by loader
    with handshake.raising_on_all_ranks(_TITLE):
        ranks = range(process_groups.world_size())
        is_rank = dst is None or (isinstance(dst, int) and not isinstance(dst, bool) and dst in ranks)
        expect(is_rank, f"{_TITLE}: dst", expected=f"a rank from 0 to {ranks[-1]}, or None", got=repr(dst))
        loaders = current_loaders(trainer)
        local_rows = [_local_rows(*each) for each in zip(loaders, _by_loader(predictions, loaders), strict=True)]
        payload = messages.pack([tuple(rows.without_values()) for rows in local_rows])
    # 2. places and form of the rows of all ranks
    payloads = handshake.all_gather(_TITLE, {"dst": dst, "loaders": len(loaders)}, payload, of_user=True)
    try:
        rows_by_rank = [list(starmap(_LoaderRows, messages.unpack(payload))) for payload in payloads]
    except pickle.UnpicklingError as error:
        expected = "tensors in dicts, lists, tuples and dataclasses of modules that every rank has imported"
        got = str(error).partition("WeightsUnpickler error: ")[2].splitlines()[0]
        handshake.raise_on_all_ranks(InputError("predictions", expected=expected, got=got), _TITLE)
    # 3. the rows themselves
    is_kept = dst is None or process_groups.rank() == dst
    joined = []
    for number, rows in enumerate(local_rows):
        of_loader = [of_rank[number] for of_rank in rows_by_rank]
        gathered = _gather_rows(trainer, rows, of_loader, f"loader {number}")
        if is_kept:
            joined.append(gathered)
    if not is_kept:
        return None
    return joined if len(loaders) > 1 else joined[0]


class _LoaderRows(NamedTuple):
    """One rank's rows of one loader.

    Attributes:
        nest: Tensors (B, ...), all batches together. None if the rank has no batch.
        places: (B,), places of the rows in the data set.
        rows_of_set: Number of rows in the data set, if all of them were dealt, else 0.
        device: Type of the tensors' device. Empty if the rank has no batch.
    """

    nest: Any
    places: Tensor
    rows_of_set: int = 0
    device: str = ""

    def without_values(self) -> _LoaderRows:
        """Return the same with no rows in the tensors, on the CPU: the form of the rows."""

        def empty(tensor: Tensor) -> Tensor:
            # a slice would be sent with the whole storage
            return tensor.new_empty((0, *tensor.shape[1:]), device="cpu")

        return self._replace(nest=inputs.map_tensors(empty, self.nest))


# ---------------------------------------------------------------------- this rank's rows


def current_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the trainer's present stage, or of its last one."""
    if trainer.validating or trainer.sanity_checking or trainer.training:
        found = compat.validation_loaders(trainer)
    elif trainer.testing:
        found = trainer.test_dataloaders
    else:
        found = trainer.predict_dataloaders
    fix = "Call it after trainer.predict, or in on_validation_epoch_end or on_test_epoch_end."
    what, expected = f"{_TITLE}: loaders of the trainer", "those that were predicted"
    expect(found is not None, what, expected=expected, got="none", fix=fix, error=InputError)
    if isinstance(found, dict):
        return list(found.values())
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _by_loader(predictions: Any, loaders: Sequence[Any]) -> list[Any]:
    """Return the predictions of each loader. Lightning returns None on a rank without batches."""
    if predictions is None and not any(map(len, loaders)):
        return [[] for _ in loaders]
    found, expected = [predictions], "a list with an entry per batch"
    if len(loaders) > 1:
        expected = f"{len(loaders)} lists, one for each loader, with an entry per batch"
        found = list(predictions) if isinstance(predictions, (list, tuple)) else []
    is_list = len(found) == len(loaders) and all(isinstance(batches, (list, tuple)) for batches in found)
    expect(is_list, f"{_TITLE}: predictions", expected=expected, got=type(predictions).__name__, error=InputError)
    return found


def _local_rows(loader: Any, batches: Sequence[Any]) -> _LoaderRows:
    """Put a rank's batches of one loader together, with the places of their rows."""
    if not batches:
        return _LoaderRows(None, torch.empty(0, dtype=torch.int64))
    drawn = _drawn_batches(loader)
    expected = f"{len(drawn)} batches, as were drawn"
    expect(len(batches) <= len(drawn), f"{_TITLE}: predictions", expected=expected, got=len(batches), error=InputError)
    # each batch has a row for each row that was drawn for it, all on one device
    for number, (batch, indices) in enumerate(zip(batches, drawn, strict=False)):
        what, expected = f"{_TITLE}: predictions of batch {number}", f"{len(indices)} rows, as the batch has"
        _refuse_other_leaves(batch, what)
        tensors, form = inputs.tensors_in(batch), _form_of(batch)
        counts = {len(tensor) for tensor in tensors}
        got, fix = ", ".join(map(str, sorted(counts))) or "none", "Return one row for each row of the batch."
        expect(counts == {len(indices)}, what, expected=expected, got=got, fix=fix, error=InputError)
        is_on_one = len({tensor.device for tensor in tensors}) == 1
        expect(is_on_one, what, expected="tensors on one device", got=form, error=InputError)
        first = _form_of(batches[0])
        expect(form == first, what, expected=f"as of batch 0: {first}", got=form, error=InputError)
    # the tensors of all batches as one
    parts = zip(*map(inputs.tensors_in, batches), strict=True)
    joined = [torch.cat(part).detach() for part in parts]
    nest = _like(batches[0], joined)
    places = list(chain.from_iterable(drawn[: len(batches)]))
    is_whole, what = all(isinstance(place, int) for place in places), f"{_TITLE}: indices of the sampler"
    expect(is_whole, what, expected="whole numbers", got=type(places[0]).__name__, error=InputError)
    places_tensor = torch.tensor(places, dtype=torch.int64)
    return _LoaderRows(nest, places_tensor, _rows_of_set(loader, len(batches)), joined[0].device.type)


def _like(nest: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a nest of the same form with other tensors."""
    remaining = iter(tensors)
    return inputs.map_tensors(lambda _: next(remaining), nest)


def _rows_of_set(loader: Any, batches: int) -> int:
    """Return the number of rows that were dealt to the ranks together, 0 if it is unknown."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    # limits leave out some
    if not isinstance(sampler, DistributedSampler) or isinstance(sampler, GlobalBatchSampler) or batches < len(loader):
        return 0
    return 0 if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]


def _drawn_batches(loader: Any) -> list[list[Any]]:
    """Return the indices of each batch of this rank, in order, including batches that a loader has read ahead.

    Lightning notes them in predict. Else they are drawn once more, if a second draw is the same.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    noted: list[list[Any]] | None = getattr(batch_sampler, "seen_batch_indices", None)
    if noted is not None:
        return noted
    # ours remember the epoch that they drew, or draw it again
    if isinstance(batch_sampler, GlobalBatches):
        return batch_sampler.sampler.latest_batches()
    if isinstance(batch_sampler, EvaluationBatches):
        return list(batch_sampler)
    if type(batch_sampler) is BatchSampler:
        if isinstance(sampler, GlobalBatchSampler):
            indices = list(chain.from_iterable(sampler.latest_batches()))
            size = batch_sampler.batch_size
            return [indices[start : start + size] for start in range(0, len(indices), size)]
        # others only if a second draw is the same
        inner = compat.wrapped_sampler(getattr(sampler, "dataset", None))  # Lightning's wrapper cuts it by rank
        if type(sampler if inner is None else inner) in (SequentialSampler, DistributedSampler):
            return list(batch_sampler)
    unknown = sampler if type(batch_sampler) is BatchSampler else batch_sampler
    raise InputError(
        f"{_TITLE}: order of {type(loader).__name__}",
        expected="one that is known: shuffle=False, DistributedSampler, or GlobalBatchSampler",
        got=type(unknown).__name__,
        fix="Use trainer.predict: Lightning notes its order.",
    )


def _refuse_other_leaves(batch: Any, what: str) -> None:
    """Refuse leaves that are not strided tensors with rows."""
    if type(batch) in (dict, list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        for value in batch.values() if isinstance(batch, dict) else batch:
            _refuse_other_leaves(value, what)
        return
    is_tensor = isinstance(batch, Tensor)
    is_rows = is_tensor and batch.ndim > 0 and batch.layout == torch.strided
    got = f"a {batch.ndim}-dim {batch.layout} tensor" if is_tensor else type(batch).__name__
    expected = "tensors (B, ...), also in plain dicts, lists and tuples"
    expect(is_rows, what, expected=expected, got=got, error=InputError)


def _form_of(nest: Any) -> str:
    """Return the nest with the dtype, shape and device of a tensor in its place, as text."""

    def described(tensor: Tensor) -> str:
        return f"{tensor.dtype} {('rows', *tensor.shape[1:])} {tensor.device.type}"

    return repr(inputs.map_tensors(described, nest))


# ---------------------------------------------------------------------- rows of all ranks


def _gather_rows(trainer: Trainer, own: _LoaderRows, by_rank: Sequence[_LoaderRows], name: str) -> Any:
    """Gather the rows of one loader, each row once, in the order of the data set."""
    forms = ["no batch" if rows.nest is None else f"{_form_of(rows.nest)} {rows.device}" for rows in by_rank]
    if len(set(forms) - {"no batch"}) != 1:
        expected = "the same tensors on every rank, on one at least"
        raise InputError(f"{_TITLE}: predictions of {name}", expected=expected, ranks=forms, collective=True)
    # a rank without batches takes part with tensors without rows
    nest = own.nest
    if nest is None:
        peer = next(rows for rows in by_rank if rows.nest is not None)
        device = trainer.strategy.root_device if peer.device != "cpu" else torch.device("cpu")
        nest = inputs.map_tensors(lambda tensor: tensor.to(device), peer.nest)
    given = {f"tensor {number}": tensor for number, tensor in enumerate(inputs.tensors_in(nest))}
    with torch.no_grad():
        gathered = gather_batch(f"{_TITLE}, {name}", given, {}).tensors
    # every rank knows all places, so all ranks raise or none does
    order = _first_places(torch.cat([rows.places for rows in by_rank]))
    _refuse_other_draws(len(order), by_rank, name)
    return _like(nest, [tensor[order.to(tensor.device)] for tensor in gathered])


def _refuse_other_draws(different: int, by_rank: Sequence[_LoaderRows], name: str) -> None:
    """Refuse rows of ranks that drew from different orders: some rows came to several ranks, and others to none.

    Args:
        different: Number of different rows that the ranks have together.
        by_rank: Rows of each rank.
        name: Name of the loader in errors.
    """
    counts = [len(torch.unique(rows.places)) for rows in by_rank]
    repeated = sum(counts) - different
    # with replacement, a row may come to several ranks
    with_replacement = any(len(rows.places) != count for rows, count in zip(by_rank, counts, strict=True))
    is_all_on_each = all(count == different for count in counts)
    if with_replacement or is_all_on_each or not repeated:
        return
    rows_of_set = max(rows.rows_of_set for rows in by_rank)
    # a sampler that pads repeats fewer rows than there are ranks, and leaves out none
    if repeated < len(by_rank) and different >= rows_of_set:
        return
    missing = f", and {rows_of_set - different} to none" if rows_of_set > different else ""
    raise InputError(
        f"{_TITLE}: rows of {name}",
        expected="each on one rank, cut from one order",
        got=f"{repeated} that came to several ranks{missing}",
        fix="Use the same seed on every rank, or predict under DDPLossStrategy, where ranks draw one order.",
        collective=True,
    )


def _first_places(places: Tensor) -> Tensor:
    """Return the index of the first occurrence of each place, in ascending order of the places."""
    ascending, order = torch.sort(places, stable=True)
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return order[is_first]
