"""Where global samplers stand, in the checkpoint: a run that is killed in an epoch goes on with the batch that would have come.

Lightning restores its counters and draws the epoch from the start. It makes the iterator, from which workers read ahead, before it tells
a sampler the epoch; so the place is set where a loader is handed to the strategy. Lengths stay those of the whole epoch: Lightning
adds the number of restored batches to what it fetches.

A checkpoint inside an accumulation window has lost the window's gradients: its place is the window's first micro-batch, and
Lightning's counters are set back to it when it is loaded.

Legend: ``e`` epoch, ``b`` batches of it that were trained on.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.samplers.global_batch import draw_of
from lightning_ddp_losses.samplers.seeded_draw import GlobalDraw

PLACES = "global_batch_samplers"
"""Key of a checkpoint under which the places are."""

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"
_TITLE = "GlobalBatchSampler in a checkpoint"


class TrainedBatches(NamedTuple):
    """What a fit has trained on.

    Attributes:
        epoch: e.
        batches: b.
        rewinds: Whether Lightning's counters say something else and have to be set back.
    """

    epoch: int
    batches: int
    rewinds: bool


class SamplerPlaces:
    """The places of the training loaders' global samplers, on their way into a checkpoint and out of it."""

    def __init__(self) -> None:
        self._draws: list[GlobalDraw] = []  # of the training loaders, in Lightning's order
        self._states: list[Mapping[str, Any]] | None = None  # what a checkpoint says; None: nothing was loaded
        self._trained = TrainedBatches(0, 0, rewinds=False)
        self._placed = 0  # loaders that got their place
        self._quiet = ExitStack()

    # ------------------------------------------------------------------ into the checkpoint

    def with_places(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint that says where the samplers of the training loaders stand; the same without such."""
        combined = compat.combined_loader(trainer.fit_loop)
        loaders = [] if combined is None else combined.flattened
        if "loops" not in checkpoint or not any(draw_of(loader) for loader in loaders):
            return checkpoint
        trained = trained_batches(trainer)
        states = []
        for loader in loaders:
            draw = draw_of(loader)
            if draw is not None:
                # a shorter loader among several begins again while the longest goes on
                epoch, batches = trained.epoch, trained.batches
                if compat.cycles(combined):
                    rounds, batches = divmod(batches, len(loader))
                    epoch += rounds
                states.append(draw.state_at(epoch, min(batches, len(loader))))
        return {**checkpoint, PLACES: {**trained._asdict(), "samplers": states}}

    # ------------------------------------------------------------------ out of the checkpoint

    def loaded(self, trainer: pl.Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Remember what a checkpoint says, for a fit; return it with the counters that Lightning shall restore."""
        if trainer.state.fn != TrainerFn.FITTING or "loops" not in checkpoint:
            return checkpoint
        places = checkpoint.get(PLACES)
        if places is None:
            self._states = []
            counters = checkpoint["loops"]["fit_loop"]
            self._trained = _trained(counters["epoch_progress"]["current"], counters["epoch_loop.batch_progress"])
            return checkpoint
        self._states = list(places["samplers"])
        self._trained = TrainedBatches(places["epoch"], places["batches"], places["rewinds"])
        return rewound(checkpoint, self._trained) if self._trained.rewinds else checkpoint

    def place(self, trainer: pl.Trainer, dataloader: object) -> None:
        """Set epoch and place of a loader's global sampler, before Lightning makes an iterator.

        Raises:
            InputError: on every rank, for a sampler that is not the one that was saved.

        Communication: one handshake where a fit resumes.
        """
        draw = draw_of(dataloader)
        if draw is None or not trainer.training:
            return
        self._draws.append(draw)
        if self._states is None:
            return
        self._refuse_own_places(dataloader)
        self._place(draw)

    def start(self, trainer: pl.Trainer, keeps_state: Callable[[Any], object]) -> None:
        """Place what was handed over before the checkpoint was loaded; silence the warning that loaders cannot resume.

        Args:
            trainer: The trainer.
            keeps_state: Says of a loader without a global sampler that it resumes all the same.

        Raises:
            InputError: where the checkpoint is of other samplers.
        """
        if self._states is None:
            return
        if self._draws and not self._placed:
            # estimated_stepping_batches asked for the loaders before the checkpoint was loaded (adopt=True)
            for draw in self._draws:
                self._place(draw)
            compat.make_iterator_anew(trainer.fit_loop)
        saved = len(self._states)
        all_placed = self._placed > 0 and self._placed % saved == 0
        if self._trained.batches and saved and not all_placed:
            raise InputError(
                f"{_TITLE}, {self._trained.batches} batches into epoch {self._trained.epoch}",
                expected=f"{saved} training loaders with a GlobalBatchSampler",
                got=self._placed,
                fix="Resume with the loaders that were saved, or from a checkpoint at the end of an epoch.",
            )
        combined = compat.combined_loader(trainer.fit_loop)
        loaders = [] if combined is None else combined.flattened
        has_no_place = any(draw_of(loader) and not self._states for loader in loaders)
        if not has_no_place and all(draw_of(loader) or keeps_state(loader) for loader in loaders):
            self._quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)

    def on_first_batch(self) -> None:
        """Forget the checkpoint: training has begun; called before every batch."""
        if self._states is not None:
            self._states = None
            self._quiet.close()

    def teardown(self) -> None:
        """Let the samplers begin the next fit at the start of an epoch."""
        self.on_first_batch()
        for draw in self._draws:
            draw.forget_place()

    def _place(self, draw: GlobalDraw) -> None:
        assert self._states is not None
        trained = self._trained
        if not self._states:
            if trained.batches:
                rank_zero_warn(
                    f"The checkpoint does not say where {draw.title} stood: epoch {trained.epoch}, of which {trained.batches} batches were "
                    "trained on, begins again at its first batch. Checkpoints that DDPLossStrategy has written since say it."
                )
            draw.set_epoch(trained.epoch)
            return
        # Lightning may ask for the loaders twice; it keeps their order
        state = self._states[self._placed % len(self._states)]
        self._placed += 1
        draw.load_state_dict(state, announced=trained.epoch)
        place = {name: state[name] for name in ("epoch", "seed", "rows")}
        handshake.all_gather(f"{draw.title} resumes", place)

    def _refuse_own_places(self, dataloader: object) -> None:
        """Refuse loaders that skip batches by themselves (torchdata's): they would skip what the sampler has skipped."""
        if hasattr(dataloader, "load_state_dict"):
            raise InputError(
                f"{type(dataloader).__name__} around GlobalBatchSampler, resumed under DDPLossStrategy",
                expected="torch's DataLoader, which keeps no place of its own",
                got="a loader with load_state_dict",
                fix="Use torch.utils.data.DataLoader: the strategy saves the place.",
            )


# ---------------------------------------------------------------------- Lightning's counters


def trained_batches(trainer: pl.Trainer) -> TrainedBatches:
    """Return what a trainer has trained on; what an accumulation window has not stepped with yet does not count."""
    loop = trainer.fit_loop
    window = trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1
    return _trained(
        vars(loop.epoch_progress.current),
        {
            "current": vars(loop.epoch_loop.batch_progress.current),
            "is_last_batch": loop.epoch_loop.batch_progress.is_last_batch,
        },
        length=trainer.num_training_batches,
        window=window,
    )


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
    #    where the last batch itself was not over, and then it would lose count of the epochs
    if is_over:
        return TrainedBatches(epoch + 1, 0, rewinds=batches["completed"] < trained)
    # 3. inside an epoch; max_steps may have ended it, then Lightning counts it as over
    stepped = trained - trained % window
    rewinds = stepped != trained or progress["is_last_batch"] or not is_inside
    return TrainedBatches(epoch - (not is_inside), stepped, rewinds=rewinds)


def rewound(checkpoint: dict[str, Any], trained: TrainedBatches) -> dict[str, Any]:
    """Return a checkpoint whose counters of epochs and batches are those after ``trained``."""
    fit_loop = dict(checkpoint["loops"]["fit_loop"])
    # Lightning logs by the batches that stepped, and counts one after the hooks in which it saves
    progress = fit_loop["epoch_loop.state_dict"]
    if trained.epoch > fit_loop["epoch_progress"]["current"]["processed"]:
        fit_loop["epoch_loop.state_dict"] = progress | {"_batches_that_stepped": progress["_batches_that_stepped"] + 1}
    # 1. epochs: this one has begun where some of its batches are trained on
    begun = trained.epoch + (trained.batches > 0)
    wanted = {"ready": begun, "started": begun, "processed": trained.epoch, "completed": trained.epoch}
    fit_loop["epoch_progress"] = _counted(fit_loop["epoch_progress"], wanted)
    # 2. batches
    name = "epoch_loop.batch_progress"
    fit_loop[name] = _counted(fit_loop[name], dict.fromkeys(wanted, trained.batches)) | {"is_last_batch": False}
    return {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": fit_loop}}


def _counted(progress: Mapping[str, Any], wanted: Mapping[str, int]) -> dict[str, Any]:
    """Return counters with these values, and totals that fit them."""
    counted = copy.deepcopy(dict(progress))
    # totals count from what was processed: a batch that failed was ready and started only
    before = progress["total"]["processed"] - progress["current"]["processed"]
    for field, value in wanted.items():
        counted["current"][field] = value
        counted["total"][field] = before + value
    return counted
