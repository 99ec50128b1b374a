"""`Resume`: a resumed run continues with the same batches and random numbers as the uninterrupted run.

Lightning restores its counters, and rank 0's loader states for all ranks. A checkpoint of this strategy holds more:

| key | content |
|---|---|
| ``global_batch_samplers`` | epoch, trained batches and the place of each global sampler, which any number of ranks can take up |
| ``training_loader_states`` | every rank's states of loaders and data sets that have a ``state_dict`` |
| ``random_states`` | every rank's generators of random numbers, and the call counts of losses that draw (sampled classes, random miners) |

A sampler's place is set when a loader is handed to the strategy, because Lightning makes the iterator, from which workers read ahead,
before it names the epoch. Random states are restored when the iterator exists, because it draws a seed for the workers. A checkpoint
between two epochs was saved before the next iterator was made, so that iterator is made again from the restored state (twice if
loaders are made in that epoch, like in Lightning).

A checkpoint inside an accumulation window has lost the window's gradients: it resumes at the window's first micro-batch.

On another number of ranks, generators are seeded from the run's seed, the step and the rank, and the log reports it. Not restored inside an
epoch: random numbers of workers and of a batch that was fetched ahead (a loader without a length; windows that are counted first).

Loaders with a state: Lightning saves rank 0's state for all ranks, one batch too far if it fetches ahead, and never a data set's state. So
each rank records the state before each fetch, and a checkpoint holds the record for the batch with which training continues.

| owner of the state | read from and loaded into |
|---|---|
| a loader with ``state_dict`` and ``load_state_dict`` (torchdata's, one of the user's) | the loader |
| an ``IterableDataset`` with both, in a DataLoader without workers | the data set |
| such a data set in a DataLoader with workers | nothing: the workers' copies move on. A warning, inside an epoch an error |

After ``load_state_dict`` the next iterator continues from the state. After a state from the end of an epoch, it is the next epoch. Another
number of ranks cannot divide the remaining part of an epoch: that is an error. Between two epochs it is a warning that loaders start from
their initial state.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses.core import lightning_compat, random_state, safe_values
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.samplers.global_batch import draw_of
from lightning_ddp_losses.samplers.global_draw import GlobalDraw
from lightning_ddp_losses.strategies.epoch_ends import replace_training_loader
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.windows import TrainedBatches, batches_of_step, iterator_follows

PLACES = "global_batch_samplers"
LOADER_STATES = "training_loader_states"
RANDOM_STATES = "random_states"
"""Keys of a checkpoint."""

_SAVED = "states of loaders and generators in a checkpoint"
_PLACES_TITLE = "GlobalBatchSampler in a checkpoint"
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"
_STATES_TITLE = "training loaders with a state of their own"
_INSIDE = f"{_STATES_TITLE}, resumed in the middle of an epoch"
_FROM_AN_END = "Resume from a checkpoint at the end of an epoch"
_REMEMBERED = 4  # places: one more than Lightning fetches ahead of the batch that it trains on
_NOTHING = object()


class Resume(FitPart):
    """Saves and restores the places of samplers, the states of loaders and the random states of all ranks."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        # entries of a loaded checkpoint, until they are restored; None if no checkpoint was loaded
        self._places: list[Mapping[str, Any]] | None = None
        self._loaders: Mapping[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None
        self._trained = TrainedBatches(0, 0, rewinds=False)
        self._draws: list[GlobalDraw] = []  # of the training loaders, in Lightning's order
        self._samplers: list[Any] = []  # of other training loaders, which draw by the number of the epoch
        self._num_placed = 0
        self._quiet = ExitStack()

    # ------------------------------------------------------------------ hooks of a fit

    def setup(self) -> None:
        """Record the states of training loaders at each fetch. ``epoch_ends`` replaces the same loaders, and is set up first."""
        if not self.fit.is_fitting:
            return
        replace_training_loader(self, NotingLoader, resume=self)

    def process_dataloader(self, dataloader: object) -> object:
        """Set epoch and place of a training loader's global sampler, before Lightning makes an iterator.

        Communication: one handshake if a fit resumes.
        """
        with self.fit.raise_on_all_ranks("train_dataloader"):
            if self.fit.trainer.training:
                self._place_loader(dataloader)
                _warn_of_workers(dataloader)
        return dataloader

    def on_train_start(self) -> None:
        """Complete what could not be restored with the loaders: the checkpoint is loaded, the iterators are made."""
        with self.fit.raise_on_all_ranks("on_train_start"):
            self._restore_early_loaders()
            self._check_places()
            self._restore_random_states()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Forget the checkpoint: training has begun."""
        if self._places is not None:
            self._places = None
            self._quiet.close()

    def teardown(self) -> None:
        """Stop controlling samplers and loaders, so that the next fit starts normally."""
        super().teardown()
        self._quiet.close()
        for draw in self._draws:
            draw.forget_place()

    # ------------------------------------------------------------------ into the checkpoint

    def state_dict(self, checkpoint: Mapping[str, Any], *, together: bool) -> Mapping[str, Any]:
        """Return the places of global samplers, and the states of loaders and generators of all ranks.

        Without ``together`` the checkpoint holds the run's seed and no states: ranks may be anywhere.

        Communication: one handshake, as long as the states, if ``together``.
        """
        trainer, strategy, is_fit = self.fit.trainer, self.fit.strategy, self.fit.is_fitting
        combined = lightning_compat.combined_loader(trainer.fit_loop)
        trained, at_end = TrainedBatches.of(trainer), iterator_follows(trainer)
        entries, own, names = dict[str, Any](), dict[str, Any](), list[str]()
        # 1. places of global samplers: the same on all ranks
        if "loops" in checkpoint and combined is not None and any(map(draw_of, combined.flattened)):
            entries[PLACES] = {**trained._asdict(), "samplers": _places_in(combined, trained)}
        # 2. states of this rank
        has_loaders = (
            "loops" in checkpoint and is_fit and isinstance(combined, NotingLoader) and bool(combined.holders())
        )
        has_random = "optimizer_states" in checkpoint and is_fit
        if has_loaders and together:
            own.update(combined.note_now() if at_end else combined.note_at(trained.batches))
            names = [type(holder).__name__ for holder in combined.holders()]
        if has_random and together:
            own["random"] = random_state.read_random_states(strategy.root_device)
        # 3. states of all ranks
        ranks = self._gather_states(own, names) if own else []
        if has_loaders:
            notes = {name: [rank[name] for rank in ranks] for name in ("states", "ended")}
            entries[LOADER_STATES] = {**trained._asdict(), "at_end": at_end, **notes}
        if has_random:
            entries[RANDOM_STATES] = {
                "world_size": process_groups.world_size(),
                "seed": torch.initial_seed() >> 1 if strategy.run_seed is None else strategy.run_seed,
                "iterator_follows": at_end,
                "loaders_made_in": lightning_compat.loaders_made_in(trainer.fit_loop),
                "states": {
                    name: torch.stack([rank["random"][name] for rank in ranks]) for name in own.get("random", ())
                },
                "draw_counts": random_state.read_draw_counts(trainer.lightning_module),
            }
        return entries

    def _gather_states(self, own: Mapping[str, Any], names: list[str]) -> list[dict[str, Any]]:
        """Gather the states of loaders and generators by rank.

        Args:
            own: This rank's note of its loaders (``note_now``), and by ``"random"`` its generators: uint8 (bytes,) by name.
            names: Names of the classes that own the states, which ranks have in common.

        Communication: one handshake, as long as the states.
        """
        facts = {"loaders": names, "generators": {name: len(state) for name, state in own.get("random", {}).items()}}
        with self.fit.raise_on_all_ranks(_SAVED):
            payload = safe_values.pack_readable(own, _STATES_TITLE)
            payloads = handshake.all_gather(_SAVED, facts, payload, of_user=True)
            return [safe_values.unpack_from(payload, _SAVED, rank) for rank, payload in enumerate(payloads)]

    # ------------------------------------------------------------------ out of the checkpoint

    def load_state_dict(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remember the entries of a checkpoint, and return it with the counters and loader states that Lightning restores."""
        if not self.fit.is_fitting:
            return checkpoint
        self._random = checkpoint.get(RANDOM_STATES)
        if "loops" not in checkpoint:
            return checkpoint
        places = checkpoint.get(PLACES, {})
        self._places, self._loaders = list(places.get("samplers", ())), checkpoint.get(LOADER_STATES, {})
        fit_loop = checkpoint["loops"]["fit_loop"]
        counted = places or self._loaders
        if counted:
            self._trained = TrainedBatches(counted["epoch"], counted["batches"], counted["rewinds"])
            if self._trained.rewinds:
                fit_loop = self._trained.rewound(fit_loop)
        else:
            self._trained = TrainedBatches.read(fit_loop)
        if self._loaders and self._loaders["states"]:
            # what Lightning would give all ranks is rank 0's
            fit_loop = {**fit_loop, "state_dict": {**fit_loop["state_dict"], "combined_loader": []}}
        return {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": fit_loop}}

    # ------------------------------------------------------------------ global samplers

    def _place_loader(self, dataloader: object) -> None:
        draw = draw_of(dataloader)
        if draw is None:
            # Lightning names the epoch when workers may have read its order ahead
            samplers = [sampler for sampler in _samplers_of(dataloader) if hasattr(sampler, "set_epoch")]
            self._samplers += samplers
            for sampler in samplers:
                sampler.set_epoch(self.fit.trainer.current_epoch if self._places is None else self._trained.epoch)
            return
        self._draws.append(draw)
        if self._places is None:
            # Lightning names a later epoch before it makes its iterator
            epoch = self.fit.trainer.current_epoch
            draw.set_epoch(epoch) if epoch else draw.announce_epoch(0)
            return
        # torchdata's loader would skip the sampler's rows again
        expect(
            not hasattr(dataloader, "load_state_dict"),
            f"{type(dataloader).__name__} around GlobalBatchSampler, resumed under DDPLossStrategy",
            expected="torch's DataLoader, which keeps no place of its own",
            got="a loader with load_state_dict",
            fix="Use torch.utils.data.DataLoader: the strategy saves the place.",
            error=InputError,
        )
        self._place(draw)

    def _place(self, draw: GlobalDraw) -> None:
        assert self._places is not None
        epoch, batches, _ = self._trained
        if not self._places:
            if batches:
                rank_zero_warn(
                    f"The checkpoint does not say where {draw.title} stood: epoch {epoch}, of which {batches} batches were "
                    "trained on, begins again at its first batch. Checkpoints that DDPLossStrategy has written since say it."
                )
            draw.announce_epoch(epoch)
            return
        # Lightning may call this twice for the same loaders, in the same order
        state = self._places[self._num_placed % len(self._places)]
        self._num_placed += 1
        draw.load_state_dict(state, announced=epoch)
        handshake.all_gather(f"{draw.title} resumes", {name: state[name] for name in ("epoch", "seed", "rows")})

    def _restore_early_loaders(self) -> None:
        """Restore loaders that were made before the checkpoint was loaded, because ``estimated_stepping_batches`` asked for them."""
        fit_loop = self.fit.trainer.fit_loop
        combined = lightning_compat.combined_loader(fit_loop)
        draws = self._draws if self._places is not None and not self._num_placed else []
        for draw in draws:
            self._place(draw)
        late = self._samplers if self._places is not None else []
        late = [sampler for sampler in late if getattr(sampler, "epoch", None) != self._trained.epoch]
        for sampler in late:
            sampler.set_epoch(self._trained.epoch)
        has_states = isinstance(combined, NotingLoader) and combined.holders()
        if draws or late or (self._loaders is not None and has_states):
            lightning_compat.make_iterator_anew(fit_loop)
        self._loaders = None

    def _check_places(self) -> None:
        """Compare the samplers with the checkpoint's. Silence Lightning's warning if all loaders resume.

        Raises:
            InputError: if the checkpoint belongs to other samplers.
        """
        if self._places is None:
            return
        saved = len(self._places)
        all_placed = self._num_placed > 0 and self._num_placed % max(saved, 1) == 0
        expect(
            all_placed or not saved or not self._trained.batches,
            f"{_PLACES_TITLE}, {self._trained.batches} batches into epoch {self._trained.epoch}",
            expected=f"{saved} training loaders with a GlobalBatchSampler",
            got=self._num_placed,
            fix="Resume with the loaders that were saved, or from a checkpoint at the end of an epoch.",
            error=InputError,
        )
        # a sampler without a place does not resume
        resumes = [saved if draw_of(loader) else _state_holder(loader) for loader in self._loaders_of_fit()]
        if all(resumes):
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)

    def _loaders_of_fit(self) -> list[Any]:
        combined = lightning_compat.combined_loader(self.fit.trainer.fit_loop)
        return [] if combined is None else list(combined.flattened)

    # ------------------------------------------------------------------ loaders with a state

    def restore_states_(self, combined: NotingLoader) -> Sequence[bool]:
        """Load the states of a checkpoint into the loaders, once, before their iterators are made.

        Returns:
            Whether each loader had ended on this rank in the epoch that continues.

        Raises:
            InputError: for states that cannot be restored in the middle of an epoch.
        """
        saved, self._loaders = self._loaders, None
        if saved is None:
            return ()
        is_inside = TrainedBatches.of(self.fit.trainer).batches > 0
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
            # after the end of an epoch the iterator must be empty. If it has rows, the owner has started a new epoch: restore it again
            if saved["at_end"] and next(iter(holder), _NOTHING) is not _NOTHING:
                holder.load_state_dict(state)
        return () if saved["at_end"] else saved["ended"][rank]

    # ------------------------------------------------------------------ random states

    def _restore_random_states(self) -> None:
        """Set the generators to their states in the checkpoint, once."""
        saved, self._random = self._random, None
        self.fit.strategy.run_seed = None if saved is None else saved["seed"]
        if saved is None:
            return
        trainer, device = self.fit.trainer, self.fit.strategy.root_device
        fit_loop, rank = trainer.fit_loop, process_groups.rank()
        random_state.write_draw_counts_(trainer.lightning_module, saved.get("draw_counts", {}))
        reason = _reason_to_derive(saved, random_state.read_random_states(device))
        if reason is None:
            random_state.write_random_states_({name: states[rank] for name, states in saved["states"].items()}, device)
        else:
            random_state.seed_generators_(random_state.derived_seed(saved["seed"], trainer.global_step, rank), device)
            rank_zero_info(
                f"Random numbers (dropout, augmentation) are drawn anew, from the run's seed, step {trainer.global_step} and the rank: "
                f"{reason}."
            )
        made_in = lightning_compat.loaders_made_in(fit_loop)
        is_made_by_lightning = lightning_compat.makes_loaders_anew(fit_loop)
        lightning_compat.set_loaders_made_in_(fit_loop, saved.get("loaders_made_in", made_in))
        if not saved["iterator_follows"]:
            return
        self._make_iterator_anew()
        if lightning_compat.makes_loaders_anew(fit_loop) and not is_made_by_lightning:
            # an uninterrupted run makes one iterator with its loaders, and a second one for the epoch
            self._make_iterator_anew()
            lightning_compat.set_loaders_made_in_(fit_loop, made_in)

    def _make_iterator_anew(self) -> None:
        """Make the training iterator from the restored state, or draw the same seeds: an IterableDataset may not restart."""
        loaders = self._loaders_of_fit()
        torchs = [loader for loader in loaders if isinstance(loader, DataLoader)]
        if len(torchs) == len(loaders) and not any(isinstance(loader.dataset, IterableDataset) for loader in torchs):
            # workers may have read the epoch to its end
            for draw in self._draws:
                draw.go_back()
            lightning_compat.make_iterator_anew(self.fit.trainer.fit_loop)
            return
        for loader in torchs:
            # torch draws this seed of the workers for each iterator
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _samplers_of(dataloader: Any) -> list[Any]:
    """Return the samplers of a loader: its own, its batch sampler, and the one inside that."""
    batches = getattr(dataloader, "batch_sampler", None)
    return [getattr(dataloader, "sampler", None), batches, getattr(batches, "sampler", None)]


def _places_in(combined: Any, trained: TrainedBatches) -> list[Mapping[str, Any]]:
    """Return the place of each global sampler of the training loaders."""
    places = list[Mapping[str, Any]]()
    for loader in combined.flattened:
        draw = draw_of(loader)
        if draw is None:
            continue
        # a shorter loader among several begins again while the longest continues
        epoch, batches = trained.epoch, trained.batches
        if lightning_compat.cycles(combined):
            rounds, batches = divmod(batches, len(loader))
            epoch += rounds
        places.append(draw.state_at(epoch, min(batches, len(loader))))
    return places


def _reason_to_derive(saved: Mapping[str, Any], own: Mapping[str, Tensor]) -> str | None:
    """Return why saved random states cannot be restored. None if they can."""
    W = process_groups.world_size()
    if not saved["states"]:
        return "the checkpoint was saved after an error or in a signal, when ranks could not be asked for theirs"
    if saved["world_size"] != W:
        return f"the checkpoint holds those of {saved['world_size']} ranks, and there are {W}"
    sizes = {name: tuple(states.shape[1:]) for name, states in saved["states"].items()}
    if sizes != {name: tuple(state.shape) for name, state in own.items()}:
        return f"the checkpoint holds those of {', '.join(sizes)}, of another kind than {', '.join(own)} here"
    return None


# ---------------------------------------------------------------------- loaders with a state


class NotingLoader(CombinedLoader):
    """A fit's combined loader that notes the states of its loaders. ``replace_training_loader`` adds this class to the loader's own class.

    Attributes:
        resume: The fit's.
        notes: By place in this epoch, what ``note_now`` returned before the fetch of that batch.
    """

    resume: Resume
    notes: dict[int, dict[str, Any]]
    _place = 0
    _has_states = False  # decided with each iterator

    def __iter__(self) -> Any:
        fit = self.resume.fit
        with fit.raise_on_all_ranks("load_state_dict of a training loader"):
            ended = self.resume.restore_states_(self)
        super().__iter__()
        for stream, has_ended in zip(self._ending_streams(), ended, strict=False):
            stream.has_ended = has_ended
        self._place, self.notes = TrainedBatches.of(fit.trainer).batches, {}
        self._has_states = bool(self.holders())
        self._note()
        with fit.raise_on_all_ranks("state_dict of a training loader"):
            # a state that could not be saved, before anything is trained
            for note in self.notes.values():
                safe_values.pack_readable(note["states"], _STATES_TITLE)
        return self

    def __len__(self) -> int:
        if lightning_compat.mode_iterator(self) is None:  # read by Lightning after an error in __iter__
            raise NotImplementedError("the length is not known before there is an iterator")
        return super().__len__()

    def __next__(self) -> Any:
        batch = super().__next__()
        self._place += 1
        self._note()
        return batch

    def holders(self) -> list[Any]:
        """Return the owners of states: loaders, or their data sets."""
        found = [_state_holder(loader) for loader in self.flattened]
        return [holder for holder in found if holder is not None]

    def note_now(self) -> dict[str, Any]:
        """Return ``"states"``, copies that the owners do not change, and ``"ended"``: whether this rank has run out of each loader."""
        states = copy.deepcopy([holder.state_dict() for holder in self.holders()])
        return {"states": states, "ended": [stream.has_ended for stream in self._ending_streams()]}

    def note_at(self, place: int) -> dict[str, Any]:
        """Return the note from before the fetch of a batch.

        Raises:
            InputError: if that is too long ago.
        """
        expect(
            place in self.notes,
            f"{_STATES_TITLE}, in a checkpoint at batch {place}",
            expected="the state before that batch",
            got=f"those before batches {', '.join(map(str, self.notes))}",
            fix="Save where a step has ended (on_train_batch_end), or at the end of an epoch.",
            error=InputError,
        )
        return self.notes[place]

    def _ending_streams(self) -> Sequence[Any]:
        return getattr(self, "_streams", ())

    def _note(self) -> None:
        # training cannot continue inside a window, so a checkpoint never uses a place inside one
        fit = self.resume.fit
        if not self._has_states or self._place % batches_of_step(fit.trainer):
            return
        with fit.raise_on_all_ranks("state_dict of a training loader"):
            self.notes[self._place] = self.note_now()
        if len(self.notes) > _REMEMBERED:
            del self.notes[min(self.notes)]


# ---------------------------------------------------------------------- owners of states


def _state_holder(loader: Any) -> Any:
    """Return the owner of a training loader's state: itself or its data set. None if this process does not hold a state."""
    if draw_of(loader) is not None:
        return None  # its place is saved for all ranks together
    if _has_state(loader):
        return loader
    return loader.dataset if _has_stateful_rows(loader) and not loader.num_workers else None


def _warn_of_workers(loader: Any) -> None:
    """Warn if the state of a training loader's data set stays in the workers."""
    if _is_out_of_reach(loader):
        rank_zero_warn(
            f"The state_dict of {type(loader.dataset).__name__} is in {loader.num_workers} workers and not in checkpoints: training "
            "cannot go on in the middle of an epoch. Use num_workers=0, or a loader with a state_dict of its own."
        )


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _has_stateful_rows(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset) and _has_state(loader.dataset)


def _is_out_of_reach(loader: Any) -> bool:
    return _state_holder(loader) is None and _has_stateful_rows(loader)


def _refuse_part_of_epoch(combined: NotingLoader, saved: Mapping[str, Any]) -> None:
    """Refuse to continue in the middle of an epoch if that is not possible."""
    states, holders, W = saved.get("states"), combined.holders(), process_groups.world_size()
    beyond_reach = [loader for loader in combined.flattened if _is_out_of_reach(loader)]
    ends_together = len(combined.flattened) > 1 and lightning_compat.cycles(combined)
    got: object
    # 1. data sets with their state in the workers
    if beyond_reach:
        loader = beyond_reach[0]
        what, expected = (
            f"{type(loader.dataset).__name__}, resumed in the middle of an epoch",
            "its state in this process",
        )
        got = f"its copies in {loader.num_workers} workers"
        fix = f"Use num_workers=0, a loader with a state_dict of its own, or: {_FROM_AN_END}."
    elif not states:
        return
    # 2. states of other ranks and loaders
    elif len(states) != W:
        what, expected, got = _INSIDE, f"{len(states)} ranks, whose states were saved", W
        fix = f"A part of an epoch cannot be dealt anew. {_FROM_AN_END}, or use GlobalBatchSampler, which can."
    elif len(states[0]) != len(holders):
        what, expected, got = _INSIDE, f"{len(states[0])}, as saved", len(holders)
        fix = f"Resume with the loaders that were saved. {_FROM_AN_END} where they are others."
    # 3. an epoch with an end that depends on several loaders
    elif holders and ends_together and None in map(sized_len, combined.flattened):
        what = f"{_STATES_TITLE}, several of unknown lengths, resumed in the middle of an epoch"
        expected, got = "lengths, which say where the epoch ends", "none"
        fix = f"Give the data sets a __len__, or CombinedLoader(mode='min_size'). {_FROM_AN_END}."
    else:
        return
    raise InputError(what, expected=expected, got=got, fix=fix)
