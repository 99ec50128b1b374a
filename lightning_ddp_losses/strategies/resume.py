"""`Resume`: a resumed run continues with the batch and the random numbers that would have come next.

Lightning restores its counters, and rank 0's loader states for all ranks. A checkpoint of this strategy holds more:

| key | content |
|---|---|
| ``global_batch_samplers`` | epoch, trained batches and the place of each global sampler, which any number of ranks can take up |
| ``training_loader_states`` | every rank's states of loaders and data sets that have a ``state_dict`` (``loader_states``) |
| ``random_states`` | every rank's generators of random numbers, and the call counts of losses that draw (sampled classes, random miners) |

A sampler's place is set when a loader is handed to the strategy, because Lightning makes the iterator, from which workers read ahead,
before it names the epoch. Random states are restored when the iterator exists, because it draws a seed for the workers. A checkpoint
between two epochs was saved before the next iterator was made, so that iterator is made again from the restored state (twice if
loaders are made in that epoch, as Lightning does).

A checkpoint inside an accumulation window has lost the window's gradients: it resumes at the window's first micro-batch.

On another number of ranks, generators are seeded from the run's seed, the step and the rank, and the log reports it. Not restored inside an
epoch: random numbers of workers, and those of a batch that was fetched ahead (a loader without a length).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses.core import compat, safe_payload
from lightning_ddp_losses.core.random_state import (
    derived_seed,
    read_draw_counts,
    read_random_states,
    seed_generators_,
    write_draw_counts_,
    write_random_states_,
)
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.samplers.global_batch import draw_of
from lightning_ddp_losses.samplers.global_draw import GlobalDraw
from lightning_ddp_losses.strategies.epoch_ends import as_combined
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.loader_states import TITLE, NotingLoader, StateNote, state_holder, warn_of_workers

PLACES = "global_batch_samplers"
LOADER_STATES = "training_loader_states"
RANDOM_STATES = "random_states"
"""Keys of a checkpoint."""

_SAVED = "states of loaders and generators in a checkpoint"
_PLACES_TITLE = "GlobalBatchSampler in a checkpoint"
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class TrainedBatches(NamedTuple):
    """The batches that a fit has trained on.

    Attributes:
        epoch: Epoch that training continues in.
        batches: Trained batches of that epoch.
        rewinds: True if Lightning's counters differ and have to be set back.
    """

    epoch: int
    batches: int
    rewinds: bool


class Resume(FitPart):
    """Saves and restores the places of samplers, the states of loaders and the random states of all ranks."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        # entries of a loaded checkpoint, until they are restored. None: no checkpoint was loaded
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
        """Note the states of training loaders at each fetch. ``epoch_ends`` asks for the same loaders, before this part."""
        if not self.fit.is_fitting:
            return

        def noting(request: Callable[[], Any]) -> Any:
            functions = {"take_saved": self._take_loader_states, "progress": self._progress}
            members = {name: staticmethod(function) for name, function in functions.items()}
            return as_combined(request(), NotingLoader, {"fit": self.fit, "notes": {}, **members})

        self.undo.callback(compat.replace_training_source(self.fit.trainer, noting))

    def process_dataloader(self, dataloader: object) -> object:
        """Set epoch and place of a training loader's global sampler, before Lightning makes an iterator.

        Communication: one handshake if a fit resumes.
        """
        with self.fit.raise_on_all_ranks("train_dataloader"):
            if self.fit.trainer.training:
                self._place_loader(dataloader)
                warn_of_workers(dataloader)
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
        """Let samplers and loaders begin the next fit by themselves."""
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
        trainer, entries, run_seed = self.fit.trainer, dict[str, Any](), self.fit.strategy.run_seed
        combined = compat.combined_loader(trainer.fit_loop)
        with_loops, is_fit = "loops" in checkpoint, trainer.state.fn == TrainerFn.FITTING
        trained = trained_batches(trainer)
        # 1. places of global samplers: the same on all ranks
        if with_loops and combined is not None and any(map(draw_of, combined.flattened)):
            entries[PLACES] = {**trained._asdict(), "samplers": _places_in(combined, trained)}
        # 2. states of this rank
        has_loaders = with_loops and is_fit and isinstance(combined, NotingLoader) and bool(combined.holders())
        has_random = "optimizer_states" in checkpoint and is_fit
        if not has_loaders and not has_random:
            return entries
        at_end, device = iterator_follows(trainer), self.fit.strategy.root_device
        notes, random = list[StateNote](), dict[str, Tensor]()
        if together:
            note, names = None, list[str]()
            if has_loaders:
                note = combined.note_now() if at_end else combined.note_at(trained.batches)
                names = [type(holder).__name__ for holder in combined.holders()]
            own_random = read_random_states(device) if has_random else {}
            notes, random = self._states_of_all_ranks(note, names, own_random)
        # 3. states of all ranks
        if has_loaders:
            states, ended = [note.states for note in notes], [note.ended for note in notes]
            entries[LOADER_STATES] = {**trained._asdict(), "at_end": at_end, "states": states, "ended": ended}
        if has_random:
            entries[RANDOM_STATES] = {
                "world_size": process_groups.world_size(),
                "seed": torch.initial_seed() >> 1 if run_seed is None else run_seed,
                "iterator_follows": at_end,
                "loaders_made_in": compat.loaders_made_in(trainer.fit_loop),
                "states": random,
                "draw_counts": read_draw_counts(trainer.lightning_module),
            }
        return entries

    def _states_of_all_ranks(
        self, note: StateNote | None, names: list[str], random: Mapping[str, Tensor]
    ) -> tuple[list[StateNote], dict[str, Tensor]]:
        """Gather the states of loaders and generators.

        Args:
            note: States of this rank's loaders. None if none has a state, on every rank.
            names: Names of the owners' classes, which ranks have in common.
            random: uint8 (bytes,) by name of the generator. Empty to leave it out.

        Returns:
            The loader states by rank, and uint8 (W, bytes) by name of the generator, equal on every rank.

        Communication: one handshake, as long as the states.
        """
        facts = {"loaders": names, "generators": {name: len(state) for name, state in random.items()}}
        with self.fit.raise_on_all_ranks(_SAVED):
            payload = safe_payload.pack_readable((None if note is None else tuple(note), dict(random)), TITLE)
            payloads = handshake.all_gather(_SAVED, facts, payload, of_user=True)
            everyone = [safe_payload.unpack_from(payload, _SAVED, rank) for rank, payload in enumerate(payloads)]
        notes = [StateNote(*own) for own, _ in everyone if own is not None]
        return notes, {name: torch.stack([states[name] for _, states in everyone]) for name in random}

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
                fit_loop = _rewound(fit_loop, self._trained)
        else:
            self._trained = _trained(fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"])
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
        # Lightning may ask for the loaders twice. It keeps their order
        state = self._places[self._num_placed % len(self._places)]
        self._num_placed += 1
        draw.load_state_dict(state, announced=epoch)
        handshake.all_gather(f"{draw.title} resumes", {name: state[name] for name in ("epoch", "seed", "rows")})

    def _restore_early_loaders(self) -> None:
        """Restore loaders that were made before the checkpoint was loaded, because ``estimated_stepping_batches`` asked for them."""
        fit_loop = self.fit.trainer.fit_loop
        combined = compat.combined_loader(fit_loop)
        draws = self._draws if self._places is not None and not self._num_placed else []
        for draw in draws:
            self._place(draw)
        late = self._samplers if self._places is not None else []
        late = [sampler for sampler in late if getattr(sampler, "epoch", None) != self._trained.epoch]
        for sampler in late:
            sampler.set_epoch(self._trained.epoch)
        has_states = isinstance(combined, NotingLoader) and combined.holders()
        if draws or late or (self._loaders is not None and has_states):
            compat.make_iterator_anew(fit_loop)
        self._loaders = None

    def _check_places(self) -> None:
        """Compare the samplers with those of the checkpoint. Silence Lightning's warning if all loaders resume.

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
        resumes = [saved if draw_of(loader) else state_holder(loader) for loader in self._loaders_of_fit()]
        if all(resumes):
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)

    # ------------------------------------------------------------------ loaders with a state

    def _take_loader_states(self) -> Mapping[str, Any] | None:
        """Return the loader states of a checkpoint, once."""
        saved, self._loaders = self._loaders, None
        return saved

    def _progress(self) -> tuple[int, int]:
        """Return the number of trained batches of this epoch, and the number of batches of a step."""
        trainer = self.fit.trainer
        return trained_batches(trainer).batches, _window(trainer)

    def _loaders_of_fit(self) -> list[Any]:
        combined = compat.combined_loader(self.fit.trainer.fit_loop)
        return [] if combined is None else list(combined.flattened)

    # ------------------------------------------------------------------ random states

    def _restore_random_states(self) -> None:
        """Set the generators to their states in the checkpoint, once."""
        saved, self._random = self._random, None
        self.fit.strategy.run_seed = None if saved is None else saved["seed"]
        if saved is None:
            return
        trainer, device = self.fit.trainer, self.fit.strategy.root_device
        fit_loop, rank = trainer.fit_loop, process_groups.rank()
        write_draw_counts_(trainer.lightning_module, saved.get("draw_counts", {}))
        reason = _reason_to_derive(saved, read_random_states(device))
        if reason is None:
            write_random_states_({name: states[rank] for name, states in saved["states"].items()}, device)
        else:
            seed_generators_(derived_seed(saved["seed"], trainer.global_step, rank), device)
            rank_zero_info(
                f"Random numbers (dropout, augmentation) are drawn anew, from the run's seed, step {trainer.global_step} and the rank: "
                f"{reason}."
            )
        made_in = compat.loaders_made_in(fit_loop)
        is_made_by_lightning = compat.makes_loaders_anew(fit_loop)
        compat.set_loaders_made_in_(fit_loop, saved.get("loaders_made_in", made_in))
        if not saved["iterator_follows"]:
            return
        self._make_iterator_anew()
        if compat.makes_loaders_anew(fit_loop) and not is_made_by_lightning:
            # the other run makes an iterator with its loaders, and one more for the epoch
            self._make_iterator_anew()
            compat.set_loaders_made_in_(fit_loop, made_in)

    def _make_iterator_anew(self) -> None:
        """Make the training iterator from the restored state, or draw as that would: an IterableDataset may have no second first batch."""
        loaders = self._loaders_of_fit()
        torchs = [loader for loader in loaders if isinstance(loader, DataLoader)]
        if len(torchs) == len(loaders) and not any(isinstance(loader.dataset, IterableDataset) for loader in torchs):
            # workers may have read the epoch to its end
            for draw in self._draws:
                draw.go_back()
            compat.make_iterator_anew(self.fit.trainer.fit_loop)
            return
        for loader in torchs:
            # the seed of the workers, as torch draws it for each iterator
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
        if compat.cycles(combined):
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


# ---------------------------------------------------------------------- Lightning's counters


def _window(trainer: pl.Trainer) -> int:
    """Return the number of batches of a step. Training can continue between two steps, not inside one."""
    return trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1


def trained_batches(trainer: pl.Trainer) -> TrainedBatches:
    """Return the batches that a trainer has trained on. Those of an unfinished accumulation window do not count."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    return _trained(
        vars(loop.epoch_progress.current),
        {"current": vars(progress.current), "is_last_batch": progress.is_last_batch},
        length=trainer.num_training_batches,
        window=_window(trainer),
    )


def iterator_follows(trainer: pl.Trainer) -> bool:
    """Return whether the iterator from which training continues is yet to be made: between two epochs."""
    trained, progress = trained_batches(trainer), trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    is_over = current.processed == 0 or progress.is_last_batch or current.processed >= trainer.num_training_batches
    return trained.epoch > 0 and trained.batches == 0 and is_over and current.ready <= current.processed


def _trained(
    epochs: Mapping[str, int], progress: Mapping[str, Any], *, length: float = float("inf"), window: int = 1
) -> TrainedBatches:
    batches, epoch = progress["current"], epochs["processed"]
    trained = batches["processed"]
    is_over = trained >= length or (progress["is_last_batch"] and trained == batches["ready"])
    is_inside = epochs["started"] > epoch
    # 1. between two epochs, at the start or the end of the fit
    if not is_inside and (is_over or trained == 0):
        return TrainedBatches(epoch, 0, rewinds=is_over)
    # 2. all batches of an epoch are trained on that is not over for Lightning: it runs validation and the hooks at its end, but not
    #    if the last batch itself was not over, and then it would lose count of the epochs
    if is_over:
        return TrainedBatches(epoch + 1, 0, rewinds=batches["completed"] < trained)
    # 3. inside an epoch. max_steps may have ended it, then Lightning counts it as over
    stepped = trained - trained % window
    rewinds = stepped != trained or progress["is_last_batch"] or not is_inside
    return TrainedBatches(epoch - (not is_inside), stepped, rewinds=rewinds)


def _rewound(fit_loop: Mapping[str, Any], trained: TrainedBatches) -> dict[str, Any]:
    """Return the fit loop of a checkpoint with the counters of epochs and batches after ``trained``."""
    # Lightning logs by the batches that stepped, and counts one after the hooks that save
    logged = dict(fit_loop["epoch_loop.state_dict"])
    logged["_batches_that_stepped"] += trained.epoch > fit_loop["epoch_progress"]["current"]["processed"]
    # 1. epochs: this one has begun if some of its batches are trained on
    begun = trained.epoch + (trained.batches > 0)
    wanted = {"ready": begun, "started": begun, "processed": trained.epoch, "completed": trained.epoch}
    epochs = _counted(fit_loop["epoch_progress"], wanted)
    # 2. batches
    batches = _counted(fit_loop["epoch_loop.batch_progress"], dict.fromkeys(wanted, trained.batches))
    batches["is_last_batch"] = False
    changed = {"epoch_loop.state_dict": logged, "epoch_progress": epochs, "epoch_loop.batch_progress": batches}
    return {**fit_loop, **changed}


def _counted(progress: Mapping[str, Any], wanted: Mapping[str, int]) -> dict[str, Any]:
    """Return counters with these values, and totals that fit them."""
    # totals count from processed batches: one that failed was ready and started only
    before = progress["total"]["processed"] - progress["current"]["processed"]
    total = {field: before + value for field, value in wanted.items()}
    return {**progress, "current": {**progress["current"], **wanted}, "total": {**progress["total"], **total}}
