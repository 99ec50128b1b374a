"""Joins the predictions of all ranks in the order of one process.

A distributed sampler distributes rows in turn (rank 0 has rows 0, W, 2 W, ...) and may repeat some so that all ranks have the same number.
Predictions therefore have to be restored to the order of the dataset, each row once, before they are compared with the predictions of one
process: a metric that only searches for a query's neighbours among one rank's rows is a different metric.

Legend: ``W`` ranks, ``B`` rows of a rank's batch, ``G`` rows of the dataset.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import chain, starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from lightning_ddp_losses.core import inputs, lightning_compat, safe_values
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.errors import InputError, expect, is_whole
from lightning_ddp_losses.samplers import row_lists
from lightning_ddp_losses.samplers.evaluation import EvaluationBatches
from lightning_ddp_losses.samplers.global_batch import GlobalBatches, GlobalBatchSampler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_TITLE = "gather_predictions"
_OTHER_SHAPES = "Pad to one shape in all batches, or return a list with one tensor for each row."


def gather_predictions(trainer: Trainer, predictions: Any, *, dst: int | None = None) -> Any:
    """Join the predictions of all ranks in the order of the dataset, each row once.

    Equivalent to: ``trainer.predict`` in one process without shuffling, its batches concatenated. If rows were skipped
    (``limit_predict_batches``), the remaining ones in ascending order.

    After ``trainer.predict``, pass the returned predictions. In ``on_validation_epoch_end`` and ``on_test_epoch_end``, pass one entry
    for each batch of the step, for loaders with a known order: loaders that do not shuffle, ``DistributedSampler``,
    ``GlobalBatchSampler``, and all loaders under ``DDPLossStrategy(evaluation="exact")``.

    Args:
        trainer: Trainer that made the predictions. The positions of the rows are determined from its loaders.
        predictions: This rank's predictions: a list with an entry per batch, or a list of such lists for several loaders. An entry is a
            tensor (B, ...), a list with one tensor of any length or one nest of tensors for each of the B rows, or a nest of dicts, lists
            and tuples of these.
        dst: The only rank that receives the result. If None, every rank.

    Returns:
        (G, ...) in place of each (B, ...), and a list of G rows in place of a list of B rows, on their device, without graph.
        A list of these for several loaders. None on ranks other than ``dst``.

    Communication: two handshakes, and a handshake and a gather for each loader. All ranks temporarily hold the rows of one loader.

    Raises:
        ConfigurationError: if the processes that predicted have exited (``ddp_spawn``, ``ddp_fork``).
        InputError: on every rank, for entries without one row for each row of their batch, that are not tensors, or that differ between
            ranks, for lists that contain as many tensors as rows, each equally long (return a tuple), for loaders with an unknown order,
            and for ranks that drew from different orders.

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
    # without a group the ranks have exited, and only the main process is left
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
        is_rank = dst is None or (is_whole(dst) and dst in ranks)
        expect(
            is_rank,
            f"{_TITLE}: dst",
            expected=f"a rank from 0 to {ranks[-1]}, or None",
            got=repr(dst),
            fix="Choose a rank of the run, or None for every rank.",
        )
        loaders = current_loaders(trainer)
        drawn = [_drawn_rows(*each) for each in zip(loaders, _by_loader(predictions, loaders), strict=True)]
        payload = safe_values.pack([batches.kinds_of_lists() for batches in drawn])
    # 2. lists with one entry per row, as determined by the batches of all ranks
    payloads = handshake.all_gather(f"{_TITLE}: lists", {"loaders": len(loaders)}, payload, of_user=True)
    kinds_by_rank = list(map(safe_values.unpack, payloads))
    lists = []
    for number in range(len(loaders)):
        kinds = chain.from_iterable(of_rank[number] for of_rank in kinds_by_rank)
        lists.append(row_lists.agreed_lists(kinds, f"{_TITLE}: predictions of loader {number}"))
    with handshake.raising_on_all_ranks(_TITLE):
        local_rows = [_local_rows(*each) for each in zip(loaders, drawn, lists, strict=True)]
        payload = safe_values.pack([tuple(rows.without_values()) for rows in local_rows])
    # 3. positions and form of the rows of all ranks
    payloads = handshake.all_gather(_TITLE, {"dst": dst, "loaders": len(loaders)}, payload, of_user=True)
    try:
        rows_by_rank = [list(starmap(_LoaderRows, safe_values.unpack(payload))) for payload in payloads]
    except pickle.UnpicklingError as error:
        expected = "tensors in dicts, lists, tuples and dataclasses of modules that every rank has imported"
        got = str(error).partition("WeightsUnpickler error: ")[2].splitlines()[0]
        handshake.raise_on_all_ranks(
            InputError(
                "predictions",
                expected=expected,
                got=got,
                fix="Return plain containers, or import the module of the dataclass on every rank.",
            ),
            _TITLE,
        )
    # 4. the rows themselves
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
        nest: Tensors (B, ...), all batches joined. None if the rank does not have batches.
        places: (B,), positions of the rows in the dataset.
        rows_of_set: Number of rows in the dataset if all of them were distributed, otherwise 0.
        device: Type of the tensors' device. Empty if the rank does not have batches.
    """

    nest: Any
    places: Tensor
    rows_of_set: int = 0
    device: str = ""

    def without_values(self) -> _LoaderRows:
        """Return the same form with empty tensors on the CPU."""

        def empty(tensor: Tensor) -> Tensor:
            # a slice would be sent with its whole storage
            return tensor.new_empty((0, *tensor.shape[1:]), device="cpu")

        return self._replace(nest=inputs.map_tensors(empty, self.nest))


# ---------------------------------------------------------------------- this rank's rows


def current_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the trainer's current stage, or of its last one."""
    if trainer.validating or trainer.sanity_checking or trainer.training:
        found = lightning_compat.validation_loaders(trainer)
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
    expect(
        is_list,
        f"{_TITLE}: predictions",
        expected=expected,
        got=type(predictions).__name__,
        error=InputError,
        fix="Pass the list that Trainer.predict returns.",
    )
    return found


class _DrawnBatches(NamedTuple):
    """One rank's batches of one loader, without empty batches.

    Attributes:
        predictions: Return values of the step.
        places: Positions of the rows in the dataset.
        number: Number of batches, including empty ones.
    """

    predictions: list[Any]
    places: list[list[Any]]
    number: int

    def kinds_of_lists(self) -> list[dict[str, list[str]]]:
        """Return what each list may hold, by path, for each batch."""
        return list(starmap(row_lists.possible_kinds, zip(self.predictions, map(len, self.places), strict=True)))


def _drawn_rows(loader: Any, batches: Sequence[Any]) -> _DrawnBatches:
    """Return a rank's batches of one loader, with the positions of their rows."""
    if not batches:
        return _DrawnBatches([], [], 0)
    drawn = _drawn_batches(loader)
    expected = f"{len(drawn)} batches, as were drawn"
    expect(
        len(batches) <= len(drawn),
        f"{_TITLE}: predictions",
        expected=expected,
        got=len(batches),
        error=InputError,
        fix="Pass the predictions of one Trainer.predict, each batch once.",
    )
    found = _DrawnBatches([], [], len(batches))
    for batch, places in zip(batches, drawn, strict=False):
        if places:
            found.predictions.append(batch)
            found.places.append(places)
    return found


def _local_rows(loader: Any, drawn: _DrawnBatches, lists: set[str]) -> _LoaderRows:
    """Join a rank's batches of one loader, with the positions of their rows."""
    if not drawn.predictions:
        return _LoaderRows(None, torch.empty(0, dtype=torch.int64))
    # each batch must have a row for each row that was drawn for it, all on one device
    batches: list[Any] = []
    for number, (given, indices) in enumerate(zip(drawn.predictions, drawn.places, strict=True)):
        what, expected = f"{_TITLE}: predictions of batch {number}", f"{len(indices)} rows, as the batch has"
        batch = row_lists.pack_lists(given, lists, what)
        _refuse_other_leaves(batch, what)
        form = _text_of_forms(batch)
        counts = _counts_of_rows(batch)
        got = ", ".join(map(str, sorted(counts))) or "none"
        fix = "Return one row for each row of the batch: a tensor (B, ...), or a list with one tensor for each row."
        expect(counts == {len(indices)}, what, expected=expected, got=got, fix=fix, error=InputError)
        is_on_one = len({tensor.device for tensor in inputs.tensors_in(batch)}) == 1
        expect(
            is_on_one,
            what,
            expected="tensors on one device",
            got=form,
            error=InputError,
            fix="Move them to one device in predict_step.",
        )
        batches.append(batch)
        first = _text_of_forms(batches[0])
        expected = f"as of batch 0: {first}"
        expect(form == first, what, expected=expected, got=form, fix=_OTHER_SHAPES, error=InputError)
    # join the tensors of all batches
    parts = zip(*map(inputs.tensors_in, batches), strict=True)
    joined = [torch.cat(part).detach() for part in parts]
    nest = row_lists.like_nest(batches[0], joined)
    places = list(chain.from_iterable(drawn.places))
    is_whole, what = all(isinstance(place, int) for place in places), f"{_TITLE}: indices of the sampler"
    expect(
        is_whole,
        what,
        expected="whole numbers",
        got=type(places[0]).__name__,
        error=InputError,
        fix="Let the sampler yield positions in the data set.",
    )
    places_tensor = torch.tensor(places, dtype=torch.int64)
    return _LoaderRows(nest, places_tensor, _rows_of_set(loader, drawn.number), joined[0].device.type)


def _counts_of_rows(batch: Any) -> set[int]:
    """Return the different numbers of rows of a batch's tensors and lists."""
    if isinstance(batch, row_lists.RowList):
        return {len(shapes) for shapes in inputs.tensors_in(batch.shapes)}
    if isinstance(batch, Tensor):
        return {len(batch)}
    children = inputs.children_of(batch) or ()
    return set().union(*(_counts_of_rows(child) for _, child in children))


def _rows_of_set(loader: Any, batches: int) -> int:
    """Return the number of rows that were distributed over all ranks, or 0 if unknown."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    # limits skip some rows
    if not isinstance(sampler, DistributedSampler) or isinstance(sampler, GlobalBatchSampler) or batches < len(loader):
        return 0
    return 0 if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]


def _drawn_batches(loader: Any) -> list[list[Any]]:
    """Return the indices of each batch of this rank, in order, including batches that a loader has read ahead.

    Lightning records them in predict. Otherwise they are drawn again, if a second draw is the same.
    """
    batch_sampler, sampler = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    noted: list[list[Any]] | None = getattr(batch_sampler, "seen_batch_indices", None)
    if noted is not None:
        return noted
    # our samplers store the epoch that they drew, or draw it again
    if isinstance(batch_sampler, GlobalBatches):
        return batch_sampler.sampler.latest_batches()
    if isinstance(batch_sampler, EvaluationBatches):
        return list(batch_sampler)
    if type(batch_sampler) is BatchSampler:
        if isinstance(sampler, GlobalBatchSampler):
            indices = list(chain.from_iterable(sampler.latest_batches()))
            size = batch_sampler.batch_size
            return [indices[start : start + size] for start in range(0, len(indices), size)]
        # other samplers only if a second draw is the same
        inner = lightning_compat.wrapped_sampler(
            getattr(sampler, "dataset", None)
        )  # Lightning's wrapper divides it by rank
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
    """Reject leaves that are not strided tensors with rows."""
    if type(batch) in (dict, list, tuple) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        for value in batch.values() if isinstance(batch, dict) else batch:
            _refuse_other_leaves(value, what)
        return
    is_tensor = isinstance(batch, Tensor)
    is_rows = is_tensor and batch.ndim > 0 and batch.layout == torch.strided
    got = f"a {batch.ndim}-dim {batch.layout} tensor" if is_tensor else type(batch).__name__
    expected = "tensors (B, ...), also in plain dicts, lists and tuples"
    expect(
        is_rows,
        what,
        expected=expected,
        got=got,
        error=InputError,
        fix="Convert numbers to tensors, and look up texts after the predictions are joined.",
    )


def _text_of_forms(nest: Any) -> str:
    """Return the nest as text, with each tensor replaced by its dtype, shape and device."""

    def described(tensor: Tensor) -> str:
        return f"{tensor.dtype} {('rows', *tensor.shape[1:])} {tensor.device.type}"

    return repr(inputs.map_tensors(described, nest))


# ---------------------------------------------------------------------- rows of all ranks


def _gather_rows(trainer: Trainer, own: _LoaderRows, by_rank: Sequence[_LoaderRows], name: str) -> Any:
    """Gather the rows of one loader, each row once, in the order of the dataset."""
    forms = ["no batch" if rows.nest is None else f"{_text_of_forms(rows.nest)} {rows.device}" for rows in by_rank]
    if len(set(forms) - {"no batch"}) != 1:
        expected = "the same tensors on every rank, on one at least"
        what = f"{_TITLE}: predictions of {name}"
        raise InputError(what, expected=expected, ranks=forms, fix=_OTHER_SHAPES, collective=True)
    # a rank without batches takes part with empty tensors
    nest = own.nest
    if nest is None:
        peer = next(rows for rows in by_rank if rows.nest is not None)
        device = trainer.strategy.root_device if peer.device != "cpu" else torch.device("cpu")
        nest = inputs.map_tensors(lambda tensor: tensor.to(device), peer.nest)
    given = {f"tensor {number}": tensor for number, tensor in enumerate(inputs.tensors_in(nest))}
    with torch.no_grad():
        gathered = gather_batch(f"{_TITLE}, {name}", given, {}).tensors
    # every rank has all positions, so either all ranks raise or none does
    order = _first_places(torch.cat([rows.places for rows in by_rank]))
    _refuse_other_draws(len(order), by_rank, name)
    return row_lists.unpack_rows(row_lists.like_nest(nest, gathered), order)


def _refuse_other_draws(different: int, by_rank: Sequence[_LoaderRows], name: str) -> None:
    """Reject rows of ranks that drew from different orders, so that some rows are on several ranks and others on none.

    Args:
        different: Number of distinct rows over all ranks.
        by_rank: Rows of each rank.
        name: Name of the loader in errors.
    """
    counts = [len(torch.unique(rows.places)) for rows in by_rank]
    repeated = sum(counts) - different
    # with replacement, a row may be on several ranks
    with_replacement = any(len(rows.places) != count for rows, count in zip(by_rank, counts, strict=True))
    is_all_on_each = all(count == different for count in counts)
    if with_replacement or is_all_on_each or not repeated:
        return
    rows_of_set = max(rows.rows_of_set for rows in by_rank)
    # a padding sampler repeats fewer rows than there are ranks, and does not skip any
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
    """Return the index of the first occurrence of each position, in ascending order of the positions."""
    ascending, order = torch.sort(places, stable=True)
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return order[is_first]
