"""What another release of torch, or another system, lacks: each feature that is asked for is hidden, and training stays one process's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import CommunicationMonitor, DDPChecks, GlobalBatchLoss
from lightning_ddp_losses.cli import doctor
from lightning_ddp_losses.testing import RankPool
from tests.doors import forms, random_state, raw_collectives, rendezvous, torch_compat
from tests.oracle import assert_close
from tests.strategies.jobs import Job, fit, fit_alone


class Without:
    """An object as it is in a release that lacks one of its names, or a name of one of its parts (`part.name`)."""

    def __init__(self, whole: Any, path: str) -> None:
        self._whole, self._path = whole, path

    def __getattr__(self, name: str) -> Any:
        first, _, rest = self._path.partition(".")
        if name != first:
            return getattr(self._whole, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self._whole, name), rest)


def sleep_nothing() -> None:
    time.sleep(0)


# what is hidden: (module of ours, its name, what stands there instead)
HIDDEN: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "all_gather_single": (raw_collectives, "_gather_into", lambda: dist.all_gather_into_tensor),
    "reduce_scatter_single": (raw_collectives, "_reduce_scatter_into", lambda: dist.reduce_scatter_tensor),
    "sched_yield": (raw_collectives, "_give_way", lambda: sleep_nothing),
    "hooks on saved tensors": (
        torch_compat,
        "torch",
        lambda: Without(torch, "_C._autograd._top_saved_tensors_default_hooks"),
    ),
    "futures of works": (torch_compat, "torch", lambda: Without(torch, "_C._distributed_c10d.Work")),
    "the default store": (torch_compat, "dist", lambda: Without(dist, "distributed_c10d._get_default_store")),
    "a group's time-out": (torch_compat, "group_timeout", lambda: unknown_timeout),
}


def unknown_timeout(group: Any) -> None:
    """What `torch_compat.group_timeout` returns where torch does not show it."""


class Pairs(Job):
    """A learnable loss, and one over the pairs of all ranks, whose rows are gathered and whose gradients go back."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.pairs: Any = pml.SupConLoss()
        if dist.is_initialized():
            self.pairs = GlobalBatchLoss(self.pairs, mode="rows")

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(embeddings, labels) + self.pairs(embeddings, labels)


def fit_without(feature: str) -> tuple[dict[str, Tensor], set[str]]:
    """Train without a feature; returns the state, and what the monitor of collectives has measured."""
    owner, name, instead = HIDDEN[feature]
    monitor = CommunicationMonitor(every_n_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, instead())
        state = fit(Pairs, callbacks=[DDPChecks([monitor], summary=False, file=False)])
    return state, set(monitor.figures())


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("feature", HIDDEN)
def test_training_without_a_feature_is_one_process(pool: RankPool, feature: str) -> None:
    expected = fit_alone(Pairs)
    for state, figures in pool.run(2, fit_without, feature, fresh=True):
        assert_close(state, expected)
        assert {"comm/calls", "comm/share_of_step"} <= figures


def test_what_is_not_shown_has_a_value_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_compat.group_timeout(object()) is None
    assert torch_compat.collectives_started() == 0
    assert torch_compat.default_store() is None  # there is no group here
    monkeypatch.setattr(torch_compat, "torch", Without(torch, "_C._autograd._top_saved_tensors_default_hooks"))
    assert torch_compat.are_saved_tensors_hooked(), "there may be some"


class Accelerator:
    """Torch's module of an accelerator that offers nothing but itself."""


def test_accelerators_of_which_torch_tells_little(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: Accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert torch_compat.device_generators("cuda") == ()
    assert rendezvous.device_identity(device).endswith(" cuda:0")
    assert random_state.devices_in_use() == [device, torch.device("cuda", 1)]
    assert ("accelerators", "2 (cuda)", False) in list(doctor.machine())
    monkeypatch.setattr(torch, "cuda", Without(torch.cuda, "is_bf16_supported"))
    forms.has_bf16.cache_clear()
    assert forms.has_bf16(device)
    forms.has_bf16.cache_clear()
