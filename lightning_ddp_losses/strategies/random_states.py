"""The random numbers of every rank, in the checkpoint: dropout goes on with the masks that would have come.

Ranks draw different numbers, so a checkpoint holds the states of all, in rank order. They are put back when Lightning has made the
iterator, which draws a seed for the workers. A checkpoint between two epochs was saved before the iterator of the next one was made:
that one is made once more, from the restored state (twice where loaders are made anew in that epoch, as Lightning does).

Losses that draw by the number of their calls (sampled classes, random miners) go on counting.

On another number of ranks there is nothing to go on with: generators are seeded by the run's seed, the step and the rank, and the log
says so. Not restored in the middle of an epoch: what workers draw, and what a batch had drawn that was fetched ahead (a loader without
a length).

Legend: ``W`` ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.random_state import (
    derived_seed,
    read_draw_counts,
    read_random_states,
    seed_generators_,
    write_draw_counts_,
    write_random_states_,
)
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.strategies.sampler_places import trained_batches

RANDOM_STATES = "random_states"
"""Key of a checkpoint under which the random states are."""


class RandomStates:
    """Random states of all ranks, on their way into a checkpoint and out of it."""

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] | None = None  # what a checkpoint says, until training begins
        self._seed: int | None = None  # the run's, of the run that was resumed

    def with_states(
        self, trainer: pl.Trainer, checkpoint: dict[str, Any], device: torch.device, *, together: bool
    ) -> dict[str, Any]:
        """Return a checkpoint that holds the random states of all ranks; the same where only weights are saved, or outside of a fit.

        Args:
            trainer: The trainer.
            checkpoint: As Lightning collected it.
            device: This rank's.
            together: Every rank comes here; not after an error or in a signal, where ranks may be anywhere. The checkpoint holds the run's
                seed alone then.

        Communication: one handshake where ``together``.
        """
        if "optimizer_states" not in checkpoint or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        seed = torch.initial_seed() >> 1 if self._seed is None else self._seed
        states = gathered_states(device) if together else {}
        saved = {
            "world_size": process_groups.world_size(),
            "seed": seed,
            "iterator_follows": iterator_follows(trainer),
            "loaders_made_in": compat.loaders_made_in(trainer.fit_loop),
            "states": states,
            "draw_counts": read_draw_counts(trainer.lightning_module),
        }
        return {**checkpoint, RANDOM_STATES: saved}

    def loaded(self, trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
        """Remember what a checkpoint says, for a fit; one that another strategy wrote says nothing."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._saved = checkpoint.get(RANDOM_STATES)

    def restore(self, trainer: pl.Trainer, device: torch.device) -> None:
        """Put the generators where the checkpoint says, once; call it when the iterator is made."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self._seed = saved["seed"]
        write_draw_counts_(trainer.lightning_module, saved.get("draw_counts", {}))
        W, rank = process_groups.world_size(), process_groups.rank()
        reason = _reason_to_derive(saved, read_random_states(device), W)
        if reason is None:
            own = {name: states[rank] for name, states in saved["states"].items()}
            write_random_states_(own, device)
        else:
            seed_generators_(derived_seed(saved["seed"], trainer.global_step, rank), device)
            rank_zero_info(
                f"Random numbers (dropout, augmentation) are drawn anew, from the run's seed, step {trainer.global_step} and the rank: "
                f"{reason}."
            )
        made_in = compat.loaders_made_in(trainer.fit_loop)
        is_made_by_lightning = compat.makes_loaders_anew(trainer.fit_loop)
        compat.set_loaders_made_in_(trainer.fit_loop, saved.get("loaders_made_in", made_in))
        if not saved["iterator_follows"]:
            return
        _make_iterator_anew(trainer)
        if compat.makes_loaders_anew(trainer.fit_loop) and not is_made_by_lightning:
            # the other run makes an iterator with its loaders, and one more for the epoch
            _make_iterator_anew(trainer)
            compat.set_loaders_made_in_(trainer.fit_loop, made_in)


def gathered_states(device: torch.device) -> dict[str, Tensor]:
    """Return the random states of all ranks.

    Args:
        device: This rank's.

    Returns:
        By generator, uint8 (W, bytes), equal on every rank.

    Communication: one handshake of about 15 KB per rank.
    """
    own = read_random_states(device)
    sizes = {name: len(state) for name, state in own.items()}
    payload = torch.cat(list(own.values())).numpy().tobytes()
    payloads = handshake.all_gather("random states in a checkpoint", {"bytes": sizes}, payload)
    everyone = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8).view(len(payloads), -1)
    parts = torch.split(everyone, list(sizes.values()), dim=1)
    return {name: part.clone() for name, part in zip(sizes, parts, strict=True)}


def _reason_to_derive(saved: Mapping[str, Any], own: Mapping[str, Tensor], world_size: int) -> str | None:
    """Return why saved states cannot be put back; None where they can."""
    if not saved["states"]:
        return "the checkpoint was saved after an error or in a signal, when ranks could not be asked for theirs"
    if saved["world_size"] != world_size:
        return f"the checkpoint holds those of {saved['world_size']} ranks, and there are {world_size}"
    sizes = {name: tuple(states.shape[1:]) for name, states in saved["states"].items()}
    if sizes != {name: tuple(state.shape) for name, state in own.items()}:
        return f"the checkpoint holds those of {', '.join(sizes)}, of another kind than {', '.join(own)} here"
    return None


def iterator_follows(trainer: pl.Trainer) -> bool:
    """Say whether the iterator from which training will go on is yet to be made: between two epochs."""
    trained, progress = trained_batches(trainer), trainer.fit_loop.epoch_loop.batch_progress
    counts = vars(progress.current)
    processed = counts["processed"]
    is_fetched = counts["ready"] > processed
    is_over = processed == 0 or progress.is_last_batch or processed >= trainer.num_training_batches
    return trained.epoch > 0 and trained.batches == 0 and is_over and not is_fetched


def _make_iterator_anew(trainer: pl.Trainer) -> None:
    """Make the training iterator from the restored state, or draw what that would; an IterableDataset may have no second first batch."""
    combined = compat.combined_loader(trainer.fit_loop)
    loaders = [] if combined is None else combined.flattened
    torchs = [loader for loader in loaders if isinstance(loader, DataLoader)]
    if len(torchs) == len(loaders) and not any(isinstance(loader.dataset, IterableDataset) for loader in torchs):
        compat.make_iterator_anew(trainer.fit_loop)
        return
    for loader in torchs:
        # the seed of the workers, as torch draws it for each iterator
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
