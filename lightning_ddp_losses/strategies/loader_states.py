"""States of training loaders and of iterable data sets, in the checkpoint: each rank's own, put back on as many ranks.

Lightning saves the state of rank 0's loaders for all, a batch too far where it fetches ahead, and none of a data set. So the state is
noted at each fetch, by the batch that comes next, and a checkpoint holds what every rank noted for the batch with which training goes on.

| whose state | where it is read and loaded |
|---|---|
| a loader with ``state_dict`` and ``load_state_dict`` (torchdata's, one of the user's) | the loader |
| an ``IterableDataset`` with both, in a DataLoader without workers | the data set |
| such a data set in a DataLoader with workers | nowhere: what goes on are the workers' copies; said, and inside an epoch refused |

After ``load_state_dict`` the next iterator gives what comes after the state. A state from the end of an epoch, after which nothing comes,
is followed by the next epoch. On another number of ranks a part of an epoch cannot be dealt anew: that is an error, and between two
epochs it is said that loaders begin as they are made.

Legend: ``W`` ranks, ``k`` batches of an epoch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses.core import compat, safe_payload
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import InputError, PeerError
from lightning_ddp_losses.samplers.global_batch import draw_of
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.random_states import RandomStates, iterator_follows
from lightning_ddp_losses.strategies.sampler_places import SamplerPlaces, TrainedBatches, rewound, trained_batches

LOADER_STATES = "training_loader_states"
"""Key of a checkpoint under which the states of all ranks' training loaders are."""

_TITLE = "training loaders with a state of their own"
_FROM_AN_END = "Resume from a checkpoint at the end of an epoch"
_REMEMBERED = 4  # places: one more than Lightning fetches ahead of the batch that it trains on
_NOTHING = object()


class LoaderStates:
    """States of the training loaders of all ranks, on their way into a checkpoint and out of it."""

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._undo: Any = None
        self._loaded: Mapping[str, Any] | None = (
            None  # what a checkpoint says; None: nothing was loaded, or it is put back
        )

    def install(self, trainer: pl.Trainer) -> None:
        """Note the states of a fit's training loaders; call it after ``UnevenEnds`` was made, which asks for the same loaders."""
        self._trainer = trainer
        source = compat.training_source(trainer.fit_loop)
        request, was_replaced = source.dataloader, "dataloader" in vars(source)
        source.dataloader = lambda: _noting(request(), self)

        def undo() -> None:
            del source.dataloader
            if was_replaced:
                source.dataloader = request

        self._undo = undo

    def remove(self) -> None:
        """Let the trainer's next fit have its own loaders."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    # ------------------------------------------------------------------ into the checkpoint

    def with_states(self, trainer: pl.Trainer, checkpoint: dict[str, Any], *, together: bool) -> dict[str, Any]:
        """Return a checkpoint that holds the states of all ranks; the same where no training loader has one.

        Args:
            trainer: The trainer.
            checkpoint: As Lightning collected it.
            together: Every rank comes here; not after an error or in a signal, where ranks may be anywhere. The checkpoint says then
                that it holds none.

        Communication: one handshake, as long as the states, where ``together``.
        """
        combined = compat.combined_loader(trainer.fit_loop)
        is_fit = "loops" in checkpoint and trainer.state.fn == TrainerFn.FITTING
        if not is_fit or not isinstance(combined, _NotingLoader) or not combined.holders():
            return checkpoint
        trained, ranks = trained_batches(trainer), []
        at_end = iterator_follows(trainer)
        if together:
            own = combined.note_now() if at_end else combined.note_at(trained.batches)
            facts = {"loaders": [type(holder).__name__ for holder in combined.holders()]}
            ranks = _states_of_all_ranks(own, facts)
        saved = {
            **trained._asdict(),
            "at_end": at_end,
            "states": [note.states for note in ranks],
            "ended": [note.ended for note in ranks],
        }
        return {**checkpoint, LOADER_STATES: saved}

    # ------------------------------------------------------------------ out of the checkpoint

    def loaded(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remember what a checkpoint says, for a fit; return it with the counters and loader states that Lightning shall restore."""
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return checkpoint
        self._loaded = saved = checkpoint.get(LOADER_STATES, {})
        if not saved:
            return checkpoint
        if saved["rewinds"]:
            checkpoint = rewound(checkpoint, TrainedBatches(saved["epoch"], saved["batches"], rewinds=True))
        if saved["states"]:
            # what Lightning would give all ranks is rank 0's
            fit_loop = {**checkpoint["loops"]["fit_loop"]}
            fit_loop["state_dict"] = {**fit_loop["state_dict"], "combined_loader": []}
            checkpoint = {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": fit_loop}}
        return checkpoint

    def start(self, trainer: pl.Trainer) -> None:
        """Put states back where loaders were asked for before the checkpoint was loaded (``estimated_stepping_batches``)."""
        combined = compat.combined_loader(trainer.fit_loop)
        if self._loaded is not None and isinstance(combined, _NotingLoader) and combined.holders():
            compat.make_iterator_anew(trainer.fit_loop)
        self._loaded = None

    def put_back_(self, combined: _NotingLoader) -> Sequence[bool]:
        """Give the loaders their states, once, before their iterators are made.

        Returns:
            Which of them had ended on this rank in the epoch that goes on.

        Raises:
            InputError: on every rank, for states that cannot be put back in the middle of an epoch.
        """
        saved, self._loaded = self._loaded, None
        if saved is None:
            return ()
        is_inside = self.trained() > 0
        holders = combined.holders()
        if is_inside:
            _refuse_part_of_epoch(combined, saved)
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
            _load_(holder, state, at_end=saved["at_end"])
        ended: Sequence[bool] = () if saved["at_end"] else saved["ended"][rank]
        return ended

    def trained(self) -> int:
        """Return how many batches of this epoch were trained on."""
        assert self._trainer is not None
        return trained_batches(self._trainer).batches

    @property
    def window(self) -> int:
        """How many batches a step has; between two steps training can go on, inside of one it cannot."""
        assert self._trainer is not None
        is_automatic = self._trainer.lightning_module.automatic_optimization
        return self._trainer.accumulate_grad_batches if is_automatic else 1


class _StateNote(NamedTuple):
    """What one rank's training loaders say before a fetch.

    Attributes:
        states: Of each loader that has one, a copy: a state may hold what the loader goes on to change.
        ended: Of each loader, whether this rank has run out of it.
    """

    states: list[Any]
    ended: list[bool]


def _states_of_all_ranks(own: _StateNote, facts: Mapping[str, object]) -> list[_StateNote]:
    """Return what every rank noted. Communication: one handshake, as long as the states."""
    what = "states of training loaders in a checkpoint"
    try:
        payload = safe_payload.pack_readable(tuple(own), _TITLE)
    except InputError as error:
        handshake.raise_in_all_groups(error, what)
    payloads = handshake.all_gather(what, facts, payload, of_user=True)
    try:
        return [_StateNote(*safe_payload.unpack_from(payload, what, rank)) for rank, payload in enumerate(payloads)]
    except PeerError as error:
        handshake.raise_in_all_groups(error, what)


class _NotingLoader(CombinedLoader):
    """A fit's combined loader that notes the states of its loaders; the class of one is made of this and the class that it had.

    Attributes:
        notes: Of the latest places in this epoch, by k.
    """

    states: LoaderStates
    notes: dict[int, _StateNote]
    _place = 0
    _has_states = False  # decided with each iterator

    def __iter__(self) -> Any:
        try:
            ended = self.states.put_back_(self)
        except Exception as error:
            handshake.raise_in_all_groups(error, "load_state_dict of a training loader")
        super().__iter__()
        for stream, has_ended in zip(self._ending_streams(), ended, strict=False):
            stream.has_ended = has_ended
        self._place, self.notes = self.states.trained(), {}
        self._has_states = bool(self.holders())
        self._note()
        self._refuse_unreadable()
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
        """Return what has a state: loaders, or their data sets."""
        found = [state_holder(loader) for loader in self.flattened]
        return [holder for holder in found if holder is not None]

    def note_now(self) -> _StateNote:
        """Read the states as they are."""
        states = copy.deepcopy([holder.state_dict() for holder in self.holders()])
        return _StateNote(states, [stream.has_ended for stream in self._ending_streams()])

    def note_at(self, place: int) -> _StateNote:
        """Return what was noted before the fetch of a batch.

        Raises:
            InputError: where that is too long ago.
        """
        if place not in self.notes:
            raise InputError(
                f"{_TITLE}, in a checkpoint at batch {place}",
                expected="the state before that batch",
                got=f"those before batches {', '.join(map(str, self.notes))}",
                fix="Save where a step has ended (on_train_batch_end), or at the end of an epoch.",
            )
        return self.notes[place]

    def _refuse_unreadable(self) -> None:
        """Refuse a state that could not be saved, before anything is trained.

        Raises:
            InputError: on every rank.
        """
        try:
            for note in self.notes.values():
                safe_payload.pack_readable(note.states, _TITLE)
        except InputError as error:
            handshake.raise_in_all_groups(error, "state_dict of a training loader")

    def _ending_streams(self) -> Sequence[Any]:
        return getattr(self, "_streams", ())

    def _note(self) -> None:
        # inside a window training cannot go on, so that nobody will ask
        if not self._has_states or self._place % self.states.window:
            return
        try:
            self.notes[self._place] = self.note_now()
        except Exception as error:
            handshake.raise_in_all_groups(error, "state_dict of a training loader")
        if len(self.notes) > _REMEMBERED:
            del self.notes[min(self.notes)]


def _noting(given: Any, states: LoaderStates) -> CombinedLoader:
    """Return what is given for training as a combined loader that notes states."""
    loader = copy.copy(given) if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    kind = type(loader)
    loader.__class__ = type(kind.__name__, (_NotingLoader, kind), {"states": states, "notes": {}})
    return loader


# ---------------------------------------------------------------------- what has a state


def state_holder(loader: Any) -> Any:
    """Return what a training loader's state is read from and loaded into: itself or its data set; None where there is no state."""
    if draw_of(loader) is not None:
        return None  # its place is saved for all ranks together
    if _has_state(loader):
        return loader
    is_in_this_process = _has_stateful_rows(loader) and loader.num_workers == 0
    return loader.dataset if is_in_this_process else None


def warn_of_workers(loader: Any) -> None:
    """Say of a training loader that the state of its data set stays in the workers."""
    if not _has_state(loader) and _has_stateful_rows(loader) and loader.num_workers:
        rank_zero_warn(
            f"The state_dict of {type(loader.dataset).__name__} is in {loader.num_workers} workers and not in checkpoints: training "
            "cannot go on in the middle of an epoch. Use num_workers=0, or a loader with a state_dict of its own."
        )


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _has_stateful_rows(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset) and _has_state(loader.dataset)


def _refuse_part_of_epoch(combined: _NotingLoader, saved: Mapping[str, Any]) -> None:
    """Refuse to go on in the middle of an epoch where that is not possible.

    Raises:
        InputError: naming why.
    """
    # 1. data sets whose state nobody can give back
    for loader in combined.flattened:
        if not _has_state(loader) and _has_stateful_rows(loader) and loader.num_workers:
            raise InputError(
                f"{type(loader.dataset).__name__}, resumed in the middle of an epoch",
                expected="its state in this process",
                got=f"its copies in {loader.num_workers} workers",
                fix=f"Use num_workers=0, a loader with a state_dict of its own, or: {_FROM_AN_END}.",
            )
    states = saved.get("states")
    if not states:
        return
    # 2. states of others
    W, holders = process_groups.world_size(), combined.holders()
    if len(states) != W:
        raise InputError(
            f"{_TITLE}, resumed in the middle of an epoch",
            expected=f"{len(states)} ranks, whose states were saved",
            got=f"{W}",
            fix=f"A part of an epoch cannot be dealt anew. {_FROM_AN_END}, or use GlobalBatchSampler, which can.",
        )
    if len(states[0]) != len(holders):
        raise InputError(
            f"{_TITLE}, resumed in the middle of an epoch",
            expected=f"{len(states[0])}, as saved",
            got=f"{len(holders)}",
            fix=f"Resume with the loaders that were saved. {_FROM_AN_END} where they are others.",
        )
    # 3. an epoch whose end depends on which of several loaders have been through
    if holders and len(combined.flattened) > 1 and compat.cycles(combined) and None in map(_length, combined.flattened):
        raise InputError(
            f"{_TITLE}, several of unknown lengths, resumed in the middle of an epoch",
            expected="lengths, which say where the epoch ends",
            got="none",
            fix=f"Give the data sets a __len__, or CombinedLoader(mode='min_size'). {_FROM_AN_END}.",
        )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _load_(holder: Any, state: Any, *, at_end: bool) -> None:
    """Give a loader or data set its state; one from the end of an epoch such that the next epoch follows."""
    holder.load_state_dict(state)
    # of an epoch that is over nothing comes; whoever counts from the start again by then gives its first rows, which are still to come
    if at_end and next(iter(holder), _NOTHING) is not _NOTHING:
        holder.load_state_dict(state)


class Resume(FitPart):
    """Saves and restores the places of samplers, the states of loaders and the random states of all ranks."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._places, self._loader_states, self._random_states = SamplerPlaces(), LoaderStates(), RandomStates()

    def setup(self) -> None:
        """Note the states of training loaders."""
        if self.fit.is_fitting:
            self._loader_states.install(self.fit.trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Place the sampler of a training loader."""
        with self.fit.raise_on_all_ranks("train_dataloader"):
            self._places.place(self.fit.trainer, dataloader)
            if self.fit.trainer.training:
                warn_of_workers(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Make sure that all samplers stand where the checkpoint says, and random numbers go on."""
        trainer = self.fit.trainer
        with self.fit.raise_on_all_ranks("on_train_start"):
            self._places.start(trainer, keeps_state=state_holder)
            self._loader_states.start(trainer)
            self._random_states.restore(trainer, self.fit.strategy.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Forget the checkpoint: training has begun."""
        self._places.on_first_batch()

    def state_dict(self, checkpoint: Mapping[str, Any], *, together: bool) -> Mapping[str, Any]:
        """Return the places of global samplers, and the states of loaders and generators of all ranks."""
        trainer, saved = self.fit.trainer, dict(checkpoint)
        saved = self._places.with_places(trainer, saved)
        saved = self._loader_states.with_states(trainer, saved, together=together)
        return self._random_states.with_states(trainer, saved, self.fit.strategy.root_device, together=together)

    def load_state_dict(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remember places and states, and return the checkpoint with the counters that Lightning restores."""
        trainer = self.fit.trainer
        self._random_states.loaded(trainer, checkpoint)
        return self._loader_states.loaded(trainer, self._places.loaded(trainer, checkpoint))

    def teardown(self) -> None:
        """Let samplers and loaders begin the next fit by themselves."""
        self._places.teardown()
        self._loader_states.remove()
