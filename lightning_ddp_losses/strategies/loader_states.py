"""Training loaders and iterable data sets that have a ``state_dict``: their states are noted at each fetch and restored in `Resume`.

Lightning saves the state of rank 0's loaders for all, a batch too far if it fetches ahead, and none of a data set. So each rank notes the
state before each fetch, and a checkpoint takes the note of the batch with which training continues.

| owner of the state | read from and loaded into |
|---|---|
| a loader with ``state_dict`` and ``load_state_dict`` (torchdata's, one of the user's) | the loader |
| an ``IterableDataset`` with both, in a DataLoader without workers | the data set |
| such a data set in a DataLoader with workers | nothing: the workers' copies move on. A warning, inside an epoch an error |

After ``load_state_dict`` the next iterator gives what comes after the state. A state from the end of an epoch is followed by the next
epoch. Another number of ranks cannot divide a part of an epoch: that is an error. Between two epochs a warning says that loaders begin as
they are made.

Legend: ``W`` ranks, ``k`` batches of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses.core import compat, safe_payload
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.samplers.global_batch import draw_of
from lightning_ddp_losses.strategies.fit_part import Fit

TITLE = "training loaders with a state of their own"
_INSIDE = f"{TITLE}, resumed in the middle of an epoch"
_FROM_AN_END = "Resume from a checkpoint at the end of an epoch"
_REMEMBERED = 4  # places: one more than Lightning fetches ahead of the batch that it trains on
_NOTHING = object()


class StateNote(NamedTuple):
    """One rank's states of its training loaders before a fetch.

    Attributes:
        states: Copy of the state of each loader that has one. The loader may change the returned object.
        ended: True if this rank has run out of a loader, for each of them.
    """

    states: list[Any]
    ended: list[bool]


class NotingLoader(CombinedLoader):
    """A fit's combined loader that notes the states of its loaders. ``as_combined`` adds this class to the loader's own class.

    Attributes:
        take_saved: Returns the entry of a loaded checkpoint, once. None without one.
        progress: Returns the number of trained batches of this epoch, and the number of batches of a step.
        notes: Notes of the latest places in this epoch, by k.
    """

    fit: Fit
    take_saved: Callable[[], Mapping[str, Any] | None]
    progress: Callable[[], tuple[int, int]]
    notes: dict[int, StateNote]
    _place = 0
    _has_states = False  # decided with each iterator

    def __iter__(self) -> Any:
        with self.fit.raise_on_all_ranks("load_state_dict of a training loader"):
            ended = _restore_states_(self, self.take_saved())
        super().__iter__()
        for stream, has_ended in zip(self._ending_streams(), ended, strict=False):
            stream.has_ended = has_ended
        self._place, self.notes = self.progress()[0], {}
        self._has_states = bool(self.holders())
        self._note()
        with self.fit.raise_on_all_ranks("state_dict of a training loader"):
            # a state that could not be saved, before anything is trained
            for note in self.notes.values():
                safe_payload.pack_readable(note.states, TITLE)
        return self

    def __len__(self) -> int:
        if compat.mode_iterator(self) is None:  # Lightning cleans up after an error in __iter__, and asks
            raise NotImplementedError("the length is not known before there is an iterator")
        return super().__len__()

    def __next__(self) -> Any:
        batch = super().__next__()
        self._place += 1
        self._note()
        return batch

    def holders(self) -> list[Any]:
        """Return the owners of states: loaders, or their data sets."""
        found = [state_holder(loader) for loader in self.flattened]
        return [holder for holder in found if holder is not None]

    def note_now(self) -> StateNote:
        """Read the states as they are."""
        states = copy.deepcopy([holder.state_dict() for holder in self.holders()])
        return StateNote(states, [stream.has_ended for stream in self._ending_streams()])

    def note_at(self, place: int) -> StateNote:
        """Return the note from before the fetch of a batch.

        Raises:
            InputError: if that is too long ago.
        """
        expect(
            place in self.notes,
            f"{TITLE}, in a checkpoint at batch {place}",
            expected="the state before that batch",
            got=f"those before batches {', '.join(map(str, self.notes))}",
            fix="Save where a step has ended (on_train_batch_end), or at the end of an epoch.",
            error=InputError,
        )
        return self.notes[place]

    def _ending_streams(self) -> Sequence[Any]:
        return getattr(self, "_streams", ())

    def _note(self) -> None:
        # inside a window training cannot continue, so no checkpoint asks for that place
        if not self._has_states or self._place % self.progress()[1]:
            return
        with self.fit.raise_on_all_ranks("state_dict of a training loader"):
            self.notes[self._place] = self.note_now()
        if len(self.notes) > _REMEMBERED:
            del self.notes[min(self.notes)]


# ---------------------------------------------------------------------- owners of states


def state_holder(loader: Any) -> Any:
    """Return the owner of a training loader's state: itself or its data set. None if there is no state in this process."""
    if draw_of(loader) is not None:
        return None  # its place is saved for all ranks together
    if _has_state(loader):
        return loader
    return loader.dataset if _has_stateful_rows(loader) and not loader.num_workers else None


def warn_of_workers(loader: Any) -> None:
    """Warn if the state of a training loader's data set stays in the workers."""
    if _is_out_of_reach(loader):
        rank_zero_warn(
            f"The state_dict of {type(loader.dataset).__name__} is in {loader.num_workers} workers and not in checkpoints: training "
            "cannot go on in the middle of an epoch. Use num_workers=0, or a loader with a state_dict of its own."
        )


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _is_out_of_reach(loader: Any) -> bool:
    return not _has_state(loader) and _has_stateful_rows(loader) and bool(loader.num_workers)


def _has_stateful_rows(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset) and _has_state(loader.dataset)


# ---------------------------------------------------------------------- out of the checkpoint


def _restore_states_(combined: NotingLoader, saved: Mapping[str, Any] | None) -> Sequence[bool]:
    """Load the states of a checkpoint into the loaders, before their iterators are made.

    Args:
        combined: The loaders.
        saved: Entry of the checkpoint. Empty if it has none, None if no checkpoint was loaded.

    Returns:
        Whether each loader had ended on this rank in the epoch that continues.

    Raises:
        InputError: for states that cannot be restored in the middle of an epoch.
    """
    if saved is None:
        return ()
    is_inside = combined.progress()[0] > 0
    if is_inside:
        _refuse_part_of_epoch(combined, saved)
    holders = combined.holders()
    if not holders:
        return ()
    names = ", ".join(type(holder).__name__ for holder in holders)
    if not saved.get("states"):
        if is_inside:
            rank_zero_warn(
                f"The checkpoint holds no states of all ranks' training loaders ({names}): it was not written by DDPLossStrategy, or "
                "after an error or in a signal, when ranks could not be asked. A loader goes on from rank 0's state on every rank, "
                "and a data set begins its epoch again."
            )
        return ()
    W, rank = process_groups.world_size(), process_groups.rank()
    if len(saved["states"]) != W:
        rank_zero_warn(
            f"The checkpoint holds the states of training loaders ({names}) on {len(saved['states'])} ranks, and there are {W}: they "
            "begin the next epoch as they are made."
        )
        return ()
    for holder, state in zip(holders, saved["states"][rank], strict=True):
        holder.load_state_dict(state)
        # an iterator after the end of an epoch must be empty. If it has rows, the owner has begun again, and they are still to come.
        if saved["at_end"] and next(iter(holder), _NOTHING) is not _NOTHING:
            holder.load_state_dict(state)
    return () if saved["at_end"] else saved["ended"][rank]


def _refuse_part_of_epoch(combined: NotingLoader, saved: Mapping[str, Any]) -> None:
    """Refuse to continue in the middle of an epoch if that is not possible."""
    # 1. data sets with their state in the workers
    for loader in filter(_is_out_of_reach, combined.flattened):
        raise InputError(
            f"{type(loader.dataset).__name__}, resumed in the middle of an epoch",
            expected="its state in this process",
            got=f"its copies in {loader.num_workers} workers",
            fix=f"Use num_workers=0, a loader with a state_dict of its own, or: {_FROM_AN_END}.",
        )
    states = saved.get("states")
    if not states:
        return
    # 2. states of other ranks and loaders
    W, holders = process_groups.world_size(), combined.holders()
    expect(
        len(states) == W,
        _INSIDE,
        expected=f"{len(states)} ranks, whose states were saved",
        got=W,
        fix=f"A part of an epoch cannot be dealt anew. {_FROM_AN_END}, or use GlobalBatchSampler, which can.",
        error=InputError,
    )
    expect(
        len(states[0]) == len(holders),
        _INSIDE,
        expected=f"{len(states[0])}, as saved",
        got=len(holders),
        fix=f"Resume with the loaders that were saved. {_FROM_AN_END} where they are others.",
        error=InputError,
    )
    # 3. an epoch with an end that depends on several loaders
    ends_together = len(combined.flattened) > 1 and compat.cycles(combined)
    expect(
        not (holders and ends_together and None in map(_length, combined.flattened)),
        f"{TITLE}, several of unknown lengths, resumed in the middle of an epoch",
        expected="lengths, which say where the epoch ends",
        got="none",
        fix=f"Give the data sets a __len__, or CombinedLoader(mode='min_size'). {_FROM_AN_END}.",
        error=InputError,
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
