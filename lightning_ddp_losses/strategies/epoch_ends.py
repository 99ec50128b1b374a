"""Uneven ends: a fit with different numbers of training batches on the ranks.

Under plain DDP the rank with more batches waits until the timeout, if there is one. Before each step Lightning decides from this rank's
loader whether this is the last batch, whether the optimizer steps and whether validation runs. So ranks agree on the ends where batches
are fetched: the combined loader of the fit has the same length and end on every rank, and so Lightning's decisions are equal as well.

| lengths | how the end is agreed | communication |
|---|---|---|
| known on every rank | compared when an iterator is made | one handshake per epoch |
| unknown | each fetch says whether there was a batch; Lightning fetches one ahead | one handshake per fetch |

Legend: ``W`` ranks. A *stream* is the sequence of batches from one loader, for one rank in one epoch. With ``uneven="error"``, which
must not change batches, it is the sequence from all loaders together. A rank *lacks rows* in a step if its stream has ended: with
``uneven="join"`` it gets a batch of 0 rows if gradients remain exact.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_ddp_losses.core import lightning_compat, safe_values
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.strategies.empty_batches import batch_without_rows, refuse_local_losses, refuse_plain_norms
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

N = TypeVar("N", int, float)
_REMEMBERED = 8  # batches: more than Lightning fetches ahead
_FETCH = "fetching a training batch"
_STRUCTURE = "uneven='join': the structure of a batch, for ranks that never had one"


def batches_until_max_steps(trainer: pl.Trainer) -> float:
    """Return the batches after which ``max_steps`` ends the fit. Infinity if that is not known. Equal on every rank."""
    is_automatic = trainer.lightning_module.automatic_optimization  # else a step may take any number of batches
    if trainer.max_steps is None or trainer.max_steps < 0 or not is_automatic:
        return math.inf
    return (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches


class UnevenEnds(FitPart):
    """The ends of one fit's epochs: makes them the same on every rank, or refuses them.

    Args:
        fit: The fit. Its training loaders will be replaced by ones with common ends, in a world of several ranks.

    Attributes:
        mode: ``uneven`` of the options.
    """

    _has_logged = False

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self.mode = fit.options.uneven

    def setup(self) -> None:
        """Replace the training loaders. This runs before ``configure_optimizers``, which may use them.

        Raises:
            ConfigurationError: for ``training_step(dataloader_iter)``, which fetches its own batches.
        """
        if not self.fit.is_fitting:
            return
        expect(
            not is_param_in_hook_signature(self.fit.module.training_step, "dataloader_iter", explicit=True),
            "training_step(dataloader_iter) under DDPLossStrategy",
            expected="training_step(batch) or training_step(batch, batch_idx)",
            got="a step that fetches by itself, of which the ranks cannot agree on an end",
            fix="Take the batch as an argument, or use strategy='ddp'.",
        )
        if process_groups.world_size() > 1:
            self.undo.callback(lightning_compat.replace_training_source(self.fit.trainer, self._request_loader))

    # ------------------------------------------------------------------ the loader

    def _request_loader(self, request: Callable[[], Any]) -> CombinedLoader:
        """Return the user's training loaders with common ends. Communication: one handshake."""
        with self.fit.raise_on_all_ranks("train_dataloader"):
            given = request()
        # Lightning waits at this place for all ranks, and one may have failed
        handshake.all_gather_between_steps("train_dataloader", {})
        return as_combined(given, CommonEnds, ends=self)

    def compare_loaders(self, loaders: Sequence[Any]) -> None:
        """Refuse loaders with a length, or with batches, on some ranks only, before Lightning sums lengths over ranks.

        Raises:
            InputError: on every rank.
            RankMismatchError: on every rank, for another number of loaders.

        Communication: one handshake.
        """
        with self.fit.raise_on_all_ranks("len() of a training loader"):
            own = [sized_len(loader) for loader in loaders]
        by_rank = handshake.all_gather_json("training loaders", {"number": len(own)}, own)
        for loader, lengths in zip(loaders, zip(*by_rank, strict=True), strict=True):
            if None in lengths and set(lengths) != {None}:
                expected, fix = "known on every rank or on none", None
            elif 0 in lengths and any(lengths) and not self._allows_no_batches():
                expected = "a batch on every rank"
                fix = "Divide the data such that each rank has some, or set allow_zero_length_dataloader_with_multiple_devices."
            else:
                continue
            title = f"length of the training loader ({type(loader).__name__})"
            ranks = ["unknown" if length is None else f"{length} batches" for length in lengths]
            raise InputError(title, expected=expected, ranks=ranks, fix=fix, collective=True)

    def _allows_no_batches(self) -> bool:
        trainer = self.fit.trainer
        holders = trainer.lightning_module, getattr(trainer, "datamodule", None)
        return any(getattr(holder, "allow_zero_length_dataloader_with_multiple_devices", False) for holder in holders)

    # ------------------------------------------------------------------ the ends of one epoch

    def common(self, numbers: Sequence[N]) -> N:
        """Return the numbers of all ranks, given this rank's."""
        return max(numbers) if self.mode == "join" else min(numbers)

    def trained_batches(self) -> int:
        """Return how many batches of this epoch were trained on, before the first fetch: some, if a fit resumes inside it."""
        return int(self.fit.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def refuse_lengths(self, lengths: Sequence[float]) -> None:
        """Refuse lengths that differ by rank, unless the fit ends earlier.

        Raises:
            InputError: on every rank.
        """
        trained = self.trained_batches() if self.fit.trainer.fit_loop.restarting else 0
        if len(set(lengths)) > 1 and min(lengths) < self._end_of_fit(trained):
            self._refuse([f"{length} batches" for length in lengths])

    def end_early(self, has_batch: Sequence[bool], fetched: int) -> None:
        """Refuse an end on some ranks only, or warn of the batches it leaves out.

        Args:
            has_batch: For each rank, whether it has a batch.
            fetched: Batches of this epoch that every rank had.

        Raises:
            StopIteration: if the epoch ends here for all.
            InputError: on every rank, if ends must not differ and the fit continues.
        """
        if self.mode == "stop":
            self.log_left_out(["1 or more" if has else "none" for has in has_batch])
            raise StopIteration
        if fetched < self._end_of_fit(self.trained_batches()):
            more, no_more = f"more than {fetched} batches", f"{fetched} batches"
            self._refuse([more if has else no_more for has in has_batch])

    def _end_of_fit(self, trained: int) -> float:
        """Return the batch of this epoch at which ``max_steps`` ends the fit, given how many were trained on."""
        trainer = self.fit.trainer
        return trained - trained % trainer.accumulate_grad_batches + batches_until_max_steps(trainer)

    def _refuse(self, ranks: Sequence[str]) -> None:
        texts = FAULTS["F36"].explain("check")
        raise InputError(texts.what, expected=texts.expected, ranks=ranks, fix=texts.fix, collective=True)

    def log_left_out(self, left: Sequence[object]) -> None:
        """Log once in a fit the number of batches that each rank leaves out."""
        if not self._has_logged and any(left):
            self._has_logged = True
            shown = ", ".join(f"rank {rank}: {batches}" for rank, batches in enumerate(left))
            rank_zero_info(
                f"uneven='stop': epochs end with the first rank that runs out. Batches left out of this one: {shown}."
            )


class JoinedEnds(FitPart):
    """Looks at each step with a rank without rows. A part with ``uneven="join"`` only."""

    needs = ("uneven", "join")

    def before_step(self) -> None:
        """Refuse layers that would need rows, if some rank lacks rows in this step."""
        loop = self.fit.trainer.fit_loop
        loader = lightning_compat.combined_loader(loop)
        self.fit.lacks_rows = (
            isinstance(loader, CommonEnds) and loader.lacks_rows[-1 - lightning_compat.prefetched_batches(loop)]
        )
        if self.fit.lacks_rows:
            refuse_plain_norms(self.fit.module)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Refuse a loss that is not over the rows of all ranks, if some rank lacks rows. Communication: one handshake in such a step."""
        if self.fit.lacks_rows:
            refuse_local_losses(loss, self.fit.module)
        return loss


def as_combined(given: Any, kind: type[CombinedLoader], **members: Any) -> CombinedLoader:
    """Return a user's training loaders as a combined loader of one more class, with these members."""
    # a copy: the user's own keeps its loaders, and its class
    loader = copy.copy(given) if isinstance(given, CombinedLoader) else CombinedLoader(given, "max_size_cycle")
    own = type(loader)
    loader.__class__ = type(own.__name__, (kind, own), members)
    return loader


def replace_training_loader(part: FitPart, kind: type[CombinedLoader], **members: Any) -> None:
    """Make the training loader an object of a further class in each fit, until the part undoes it.

    Args:
        part: Part of the strategy that needs the class.
        kind: The class.
        members: Its class attributes.
    """

    def replacement(request: Callable[[], Any]) -> CombinedLoader:
        return as_combined(request(), kind, **members)

    part.undo.callback(lightning_compat.replace_training_source(part.fit.trainer, replacement))


class CommonEnds(CombinedLoader):
    """A combined loader that ends on every rank at the same batch. The class of a fit's own is made of this one and the user's.

    Attributes:
        lacks_rows: For the latest batches, whether some rank lacks rows.
    """

    ends: UnevenEnds
    lacks_rows: deque[bool]
    _common_length: int | None = None
    _together: _Stream | None = None
    _streams: Sequence[_Stream] = ()

    @property
    def flattened(self) -> list[Any]:
        """The loaders. Lightning sets them after it has inserted its samplers, and reads their lengths next."""
        return super().flattened

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        CombinedLoader.flattened.fset(self, flattened)  # type: ignore[attr-defined]
        self.ends.compare_loaders(flattened)

    def __len__(self) -> int:
        own = super().__len__()
        return own if self._common_length is None else self._common_length

    def __iter__(self) -> Any:
        """Make the ranks' iterators and agree on their ends. Communication: one handshake."""
        with self.ends.fit.raise_on_all_ranks("the iterator of a training loader"):
            super().__iter__()
            self._common_length, self.lacks_rows = None, deque(maxlen=_REMEMBERED)
            # numbers of batches, None if unknown: of each loader, and of all together within Lightning's limits
            own_lengths, own_limits = [sized_len(loader) for loader in self.flattened], self.limits
            own = own_lengths, list(own_limits or [math.inf] * len(own_lengths)), sized_len(self)
        by_rank = handshake.all_gather_json("training epoch", {"uneven": self.ends.mode}, own)
        lengths, limits, together = zip(*by_rank, strict=True)
        # a limit does not give the number of batches
        is_known = all(None not in numbers for numbers in (together, *lengths))
        if self.ends.mode == "error":
            # all loaders together are one stream, of the same length on every rank
            if is_known:
                self.ends.refuse_lengths(together)
                self._common_length = min(together)  # the fit ends before
            agreed = together if is_known else None
            self._together = _Stream(self.ends, self.flattened, agreed).over(super().__next__)
            return self
        self._agree(lengths, limits)
        if is_known:
            self.ends.log_left_out([max(number - len(self), 0) for number in together])
        return self

    def __next__(self) -> Any:
        if self._together is not None:
            return next(self._together)
        for stream in self._streams:
            stream.lacks_rows = False
        batch = super().__next__()
        self.lacks_rows.append(any(stream.lacks_rows for stream in self._streams))
        return batch

    def _agree(self, lengths_by_rank: Sequence[Any], limits_by_rank: Sequence[Any]) -> None:
        """Let each loader be a stream with a common end. Lightning's modes combine those."""
        iterator = lightning_compat.mode_iterator(self)
        # 1. limits that are a fraction of a length differ as lengths do
        iterator.limits = [self.ends.common(limits) for limits in zip(*limits_by_rank, strict=True)]
        # 2. the streams, around the iterators that were made
        streams = []
        for loader, *lengths in zip(self.flattened, *lengths_by_rank, strict=True):
            known = None if None in lengths else lengths
            streams.append(_Stream(self.ends, [loader], known, is_alone=len(self.flattened) == 1))
        self._streams = iterator.iterables = streams
        iterators = zip(streams, iterator.iterators, strict=False)
        iterator.iterators = [stream.over(own.__next__) for stream, own in iterators]


class _Stream:
    """Batches of this rank that end on every rank at the same place.

    Args:
        ends: The fit's.
        loaders: The loaders that give a batch together. A single one is iterated again when it is shorter than others.
        lengths: Number of batches on each rank. None if unknown.
        is_alone: True if no other stream belongs to the same batches.

    Attributes:
        lacks_rows: True if some rank has none in the latest batch.
        has_ended: True if this rank has run out.
    """

    def __init__(
        self, ends: UnevenEnds, loaders: Sequence[Any], lengths: Sequence[int] | None, *, is_alone: bool = True
    ) -> None:
        self._ends, self._loaders, self._lengths, self._is_alone = ends, loaders, lengths, is_alone
        self._trained: int | None = None  # batches before the first of this iterator; None until it is fetched
        self._empty: Any = None  # a batch of 0 rows, or why there cannot be one
        self._has_empty = self._is_shared = self.lacks_rows = False

    def over(self, fetch: Callable[[], Any]) -> _Stream:
        """Begin an epoch with what returns this rank's next batch, or raises StopIteration."""
        self._fetch, self._fetched, self._trained, self.has_ended = fetch, 0, None, False
        return self

    def __iter__(self) -> _Stream:
        """Start again, like a shorter loader while the longest continues."""
        self.over(iter(self._loaders[0]).__next__)
        self._trained = 0
        return self

    def __len__(self) -> int:
        if self._lengths is None:
            raise TypeError("the length is not known")
        return self._ends.common(self._lengths)

    def __next__(self) -> Any:
        if self._trained is None:
            self._trained = self._ends.trained_batches()
        # 1. this rank's batch, and which ranks have one. The places of several resumed loaders are unknown
        if self._lengths is None or (self._trained > 0 and not self._is_alone):
            have, know, batch = self._fetch_by_exchange()
        else:
            have, know, batch = self._fetch_by_length(self._lengths, self._trained)
        if not any(have):
            raise StopIteration
        # 2. an end on some ranks only
        has_batch, self.lacks_rows = have[process_groups.rank()], False
        if not all(have) and self._ends.mode == "join":
            self.lacks_rows = True
            if not all(know) and not self._is_shared:
                self._share_structure(batch)
            batch = batch if has_batch else self._empty_batch()
        elif not all(have):
            self._ends.end_early(have, self._fetched)
            batch = batch if has_batch else (None, self._fetched, 0)  # fetched ahead by a fit that ends before
        self._fetched += 1
        return batch

    def _fetch_by_length(self, lengths: Sequence[int], trained: int) -> tuple[list[bool], list[bool], Any]:
        """Return from the lengths which ranks have a batch, which have seen the structure of one, and this rank's batch."""
        place, own, batch = trained + self._fetched, lengths[process_groups.rank()], None
        if place >= len(self):
            raise StopIteration
        if place < own:
            has_batch, batch = self._own_batch()
            if not has_batch:
                names = ", ".join(sorted({type(loader).__name__ for loader in self._loaders}))
                error = InputError(
                    f"training loader ({names})",
                    expected=f"{own} batches, as its len() says",
                    got=f"{place}",
                    fix="Let len() say what comes: of an iterable data set, the rows of this rank and this worker.",
                )
                handshake.raise_in_all_groups(error, _FETCH)
            if place + 1 == own < len(self):
                self._keep_structure(batch)
        return [place < length for length in lengths], [trained < length for length in lengths], batch

    def _fetch_by_exchange(self) -> tuple[list[bool], list[bool], Any]:
        """Return the same as the ranks say it. Communication: one handshake."""
        has_batch, batch = self._own_batch()
        if has_batch and self._ends.mode == "join":
            self._keep_structure(batch)  # now: the step may change the batch
        payloads = handshake.all_gather_between_steps(_FETCH, {}, bytes([has_batch, self._has_empty]))
        return [bool(payload[0]) for payload in payloads], [bool(payload[1]) for payload in payloads], batch

    def _keep_structure(self, batch: Any) -> None:
        """Remember a batch of 0 rows for when this rank has run out, or the error if there cannot be one."""
        self._has_empty = True
        try:
            self._empty = batch_without_rows(batch)
        except InputError as error:
            self._empty = error

    def _empty_batch(self) -> Any:
        """Return a batch of 0 rows, a new one each time: a step may change it."""
        if isinstance(self._empty, InputError):
            handshake.raise_in_all_groups(self._empty, _FETCH)
        return copy.deepcopy(self._empty)

    def _share_structure(self, batch: Any) -> None:
        """Send the structure of a batch to ranks that never had one. Collective: call on every rank, with the batch or None.

        Raises:
            InputError: on every rank, for a batch that other ranks could not read without running something.

        Communication: one handshake, with a batch of 0 rows.
        """
        self._is_shared = True
        own = b""
        if batch is not None:
            self._keep_structure(batch)
            with self._ends.fit.raise_on_all_ranks(_FETCH):
                own = safe_values.pack_readable(self._empty_batch(), _STRUCTURE)
        payloads = handshake.all_gather_between_steps("structure of a batch", {}, own)
        first = next(rank for rank, payload in enumerate(payloads) if payload)
        with self._ends.fit.raise_on_all_ranks(_FETCH):  # every rank reads it, so that all refuse the same one
            shared = safe_values.unpack_from(payloads[first], _STRUCTURE, first)
        if batch is None and not self._has_empty:
            self._empty, self._has_empty = shared, True

    def _own_batch(self) -> tuple[bool, Any]:
        """Return whether this rank has a batch, and the batch. An error is one on every rank."""
        if self.has_ended:
            return False, None
        try:
            return True, self._fetch()
        except StopIteration:
            self.has_ended = True
            return False, None
        except Exception as error:
            handshake.raise_in_all_groups(error, _FETCH)
