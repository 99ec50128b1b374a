"""`CommunicationMonitor`: how many collectives a step runs, how many bytes they carry, and how much of the step they are on their way.

Every n-th step a dispatch mode looks at all collectives, DDP's and the user's too; the other steps cost nothing. What DDP runs on
an autograd thread of its own (accelerators) a dispatch mode does not see; its buckets are taken from DDP's own log then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import Wrap
from lightning_ddp_losses.callbacks.report import log_figures
from lightning_ddp_losses.core import precision


class CommunicationMonitor(RankCheck):
    """Calls, bytes and time of collectives per step, by kind; the largest by name.

    Figures go to the logger (``ddp_checks/comm/...``) and to the summary at the end of the fit. The time is that from the start of a
    collective to its end, waiting for slower ranks included; overlapping collectives count once.

    Args:
        every_n_steps: How often a step is looked at; the first steps, in which DDP is still sorting its buckets, are not.
        action: As ``RankCheck``.

    Communication: none.
    """

    def __init__(self, *, every_n_steps: int = 50, action: Mapping[str, str] | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._watch: _Watch | None = None
        self._seen: list[_Call] = []
        self._step_seconds: list[float] = []
        self._busy_seconds: list[float] = []
        self._looked = 0

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Forget an earlier fit."""
        self._seen, self._step_seconds, self._busy_seconds, self._looked = [], [], [], 0
        self.session.shared(Wrap)

    @property
    def _due(self) -> bool:
        return self.session.steps >= 2 and (self.session.steps - 2) % self.every_n_steps == 0

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to look, with the first batch of a step that is due."""
        if self._due and self._watch is None:
            self._watch = _Watch()
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def see_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """The step is made: stop looking."""
        watch = self._close()
        if watch is None:
            return
        ended = time.perf_counter()
        calls = watch.calls()
        ddp = self.session.shared(Wrap).ddp
        if ddp is not None and not any(call.kind.startswith("allreduce") for call in calls):
            calls += _ddp_calls(ddp._get_ddp_logging_data(), watch.begun)  # type: ignore[no-untyped-call]
        self._seen += calls
        self._looked += 1
        self._step_seconds.append(ended - watch.begun)
        self._busy_seconds.append(_union((c.begun, min(c.ended or ended, ended)) for c in calls))
        figures = {f"comm/{name}": value for name, value in self._figures(calls, 1).items()}
        log_figures(trainer, figures, self.session.step)

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave no dispatch mode behind."""
        self._close()

    def figures(self) -> dict[str, float]:
        """Means over the steps looked at."""
        if not self._looked:
            return {}
        found = {f"comm/{name}": value for name, value in self._figures(self._seen, self._looked).items()}
        found["comm/share_of_step"] = sum(self._busy_seconds) / sum(self._step_seconds)
        return found

    def remarks(self) -> list[str]:
        """The largest collective, by name."""
        if not self._seen:
            return []
        largest = max(self._seen, key=lambda call: call.num_bytes)
        return [f"largest collective: {largest.kind}, {largest.num_bytes / 2**20:.2f} MiB"]

    def _close(self) -> _Watch | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return watch

    @staticmethod
    def _figures(calls: Iterable[_Call], steps: int) -> dict[str, float]:
        found: dict[str, float] = {"calls": 0.0, "bytes": 0.0}
        for call in calls:
            seconds = 0.0 if call.ended is None else call.ended - call.begun
            for name, value in (("calls", 1), ("bytes", call.num_bytes)):
                found[name] += value / steps
                found[f"{call.kind}/{name}"] = found.get(f"{call.kind}/{name}", 0.0) + value / steps
            found[f"{call.kind}/ms"] = found.get(f"{call.kind}/ms", 0.0) + 1e3 * seconds / steps
        return found


class _Call:
    """One collective: kind, bytes that this rank holds of it, start and end."""

    def __init__(self, kind: str, num_bytes: int, begun: float, ended: float | None = None) -> None:
        self.kind, self.num_bytes, self.begun, self.ended = kind, num_bytes, begun, ended

    def end(self, _: Any) -> None:
        """Called when it is complete, on whatever thread."""
        self.ended = time.perf_counter()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the collectives that pass torch's dispatcher in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begun = time.perf_counter()
        self._calls: list[_Call] = []

    def calls(self) -> list[_Call]:
        """Those so far."""
        return list(self._calls)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it; note it if it is a collective."""
        if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], Tensor):
            return args[0]  # torch hands a number that autograd has saved to a mode as the number itself
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        kind = func._schema.name.rpartition("::")[2].strip("_")
        call = _Call(
            kind, sum(t.nbytes for t in {id(t): t for t in precision.tensors_in(args)}.values()), time.perf_counter()
        )
        self._calls.append(call)
        result = func(*args, **(kwargs or {}))
        try:
            work = result[-1] if isinstance(result, (tuple, list)) else result
            torch._C._distributed_c10d.Work.unbox(work).get_future().add_done_callback(call.end)
        except (AttributeError, RuntimeError, TypeError):  # a backend whose works have no future
            call.end(None)
        return result


def _ddp_calls(log: Mapping[str, Any], begun: float) -> list[_Call]:
    """DDP's buckets, from its own log."""
    sizes = str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or "")
    seconds = float(log.get("avg_backward_comm_time") or 0) / 1e9
    found = [_Call("allreduce", int(size), begun, begun) for size in sizes.replace(",", " ").split()]
    if found:
        found[0].ended = begun + seconds
    return found


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the time that at least one interval covers."""
    covered, reached = 0.0, 0.0
    for begun, ended in sorted(intervals):
        covered += max(0.0, ended - max(begun, reached))
        reached = max(reached, ended)
    return covered
