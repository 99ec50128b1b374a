"""`SyncedMetric`: a metric of torchmetrics that syncs its states in one exchange, and is unchanged otherwise.

torchmetrics gathers state by state, and a list that is not concatenated item by item: ranks with different numbers of updates wait for each
other (its issue 3336). Here all states travel at once with their lengths. ``conversion.synced`` makes the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection, MetricTracker
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import ClasswiseWrapper, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_ddp_losses.core.configuration import configuration_digest
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import expect
from lightning_ddp_losses.metrics.composites import Classwise, Members, Windowed
from lightning_ddp_losses.metrics.exchange import Packet, exchange
from lightning_ddp_losses.metrics.states import ExchangingMetric, States, is_correlation


class SyncedMetric(ExchangingMetric):
    """A metric with states that are synced in one exchange: a leaf of a metric that ``synced`` returns."""

    _configuration = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Note the configuration before the first update, and refuse states that cannot be joined."""
        self._refuse_own_sync(f"synced {type(self).__name__}")
        self._refuse_states()
        self._configuration = configuration_digest(self)

    def _refuse_states(self) -> None:
        """Refuse tensors that are only stacked (``compute`` of NormalizedRootMeanSquaredError fails on them, torchmetrics 1.9)."""
        if is_correlation(type(self)):
            return
        for name, reduce in self._reductions.items():
            expect(
                reduce is not None or not isinstance(getattr(self, name), Tensor),
                f"synced {type(self).__name__}: state `{name}`",
                expected="a list, or a tensor with a reduction",
                got="a tensor with dist_reduce_fx=None: how to join those of all ranks is not known",
                fix="Give add_state a reduction, or dist_reduce_fx=lambda stacked: stacked if compute joins them itself.",
            )

    def packet(self) -> Packet:
        """Return the states of everything since ``reset``, to be exchanged."""
        self._refuse_states()
        untouched, found = self._update_count == 0, []
        for name, reduce in self._reductions.items():
            value: Any = getattr(self, name)
            rows = self._update_count
            if untouched and reduce is dim_zero_mean:  # states may be loaded or merged without an update
                rows = int(not torch.equal(value, self._defaults[name]))  # type: ignore[arg-type]
            found.append(self._state(name, value, rows, untouched))
        return Packet(found, self.process_group, self._configuration)

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] | None = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        if dist_sync_fn not in (None, gather_all_tensors):  # the user's gather
            super()._sync_dist(dist_sync_fn, process_group=process_group)
            return
        group, title = process_group or self.process_group, self._title("compute")
        try:
            packet = self.packet()
        except Exception as error:
            handshake.raise_on_all_ranks(error, title, group=group)
        self._receive(*exchange(title, [packet._replace(group=group)]))

    def _receive(self, values: Sequence[Any]) -> States:
        reduced = super()._receive(values)
        for name, reduce in self._reductions.items():
            if reduce is dim_zero_cat and isinstance(reduced[name], list):  # no rank has rows
                setattr(self, name, torch.tensor([], device=self.device, dtype=self.dtype))
        return reduced

    @property
    def _waits(self) -> bool:
        return super()._waits and self.dist_sync_fn is None


class SyncedTracker(Members):
    """A metric for each increment. ``compute`` is that of the last one, ``compute_all`` syncs all of them at once."""

    def compute(self) -> Any:
        """Return the value of the last increment."""
        return super(Members, self).compute()  # type: ignore[misc]

    def compute_all(self) -> Any:
        """Return the values of all increments."""
        with self._in_one_exchange():
            return super().compute_all()  # type: ignore[misc]

    def _leaves(self) -> list[ExchangingMetric]:
        base = {id(leaf) for leaf in self._base_metric.modules()}  # type: ignore[attr-defined]
        return [leaf for leaf in super()._leaves() if id(leaf) not in base]


SYNCED_COMPOSITES: dict[type, type[Members]] = {
    MetricTracker: SyncedTracker,
    Running: Windowed,
    ClasswiseWrapper: Classwise,
    WrapperMetric: Members,
    CompositionalMetric: Members,
    MetricCollection: Members,
}
"""For each class of torchmetrics that is made of metrics, the class that syncs its members. The first that fits counts."""
