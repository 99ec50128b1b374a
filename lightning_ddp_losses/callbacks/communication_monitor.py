"""`CommunicationMonitor`: the collectives of a step, their bytes, and their share of the step's time.

In every n-th step, a dispatch mode records all collectives, including the collectives of DDP and the user. Other steps have no overhead. A
dispatch mode does not record collectives that DDP runs on separate autograd threads (on accelerators). In that case, the buckets are read
from DDP's log.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import DDPSnapshot
from lightning_ddp_losses.core import inputs, torch_compat

_FIRST_STEP = 2  # DDP rebuilds its buckets in earlier steps


@dataclass(kw_only=True, eq=False, repr=False)
class CommunicationMonitor(RankCheck, default=True):
    """Measures calls, bytes and time of collectives per step, by kind, and finds the largest collective.

    The figures are shown in the table at the end of the fit. With ``DDPChecks(log_figures=True)`` they are also sent to the loggers
    (``ddp_checks/comm/...``). The time of a collective is measured from its start to its end, including the wait for slower ranks.
    Overlapping collectives count once.

    Args:
        every_n_steps: Period of the recorded steps. The first steps are skipped, because DDP rebuilds its buckets in them.
        action: Same as in ``RankCheck``.

    Communication: none.

    Example:
        >>> checks = DDPChecks([CommunicationMonitor(every_n_steps=200)], log_figures=True)
    """

    shares = (("_snapshot", DDPSnapshot),)
    _snapshot: DDPSnapshot = field(init=False)

    every_n_steps: int = 50

    def _forget(self) -> None:
        self._watch: CollectiveWatch | None = None
        self._calls: list[CollectiveCall] = []
        self._step_seconds: list[float] = []
        self._busy_seconds: list[float] = []

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start recording at the first batch of a step that is due."""
        steps = self.runner.steps - _FIRST_STEP
        is_due = steps >= 0 and steps % self.every_n_steps == 0
        if is_due and self._watch is None:
            self._watch = CollectiveWatch()
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def see_step(self, trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """Stop recording after the step, and log its figures."""
        if self._watch is None:
            return
        watch = self._watch
        self._stop_watching()
        if watch.error is not None:
            raise watch.error
        ended = time.perf_counter()
        calls = watch.calls
        # a dispatch mode does not record collectives on autograd's threads. They are read from DDP's log
        ddp = self._snapshot.ddp
        if ddp is not None and not any(call.kind.startswith("allreduce") for call in calls):
            calls += _ddp_calls(torch_compat.ddp_logging_data(ddp), watch.began)
        self._calls += calls
        self._step_seconds.append(ended - watch.began)
        intervals = [(call.began, min(call.ended or ended, ended)) for call in calls]
        self._busy_seconds.append(covered_seconds(intervals))
        self.runner.row_exchange.report.log_step(trainer, _figures(calls, 1), self.runner.step)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Leave the dispatch mode."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def figures(self) -> dict[str, float]:
        """Return means over the recorded steps."""
        if not self._step_seconds:
            return {}
        share = sum(self._busy_seconds) / sum(self._step_seconds)
        return _figures(self._calls, len(self._step_seconds)) | {"comm/share_of_step": share}

    def remarks(self) -> list[str]:
        """Return the traffic of a step, and the largest collective by name."""
        if not self._calls:
            return []
        figures = self.figures()
        megabytes, share = figures["comm/bytes"] / 2**20, figures["comm/share_of_step"]
        per_step = f"{figures['comm/calls']:.3g} collectives and {megabytes:.2f} MiB per step, {share:.0%} of its time"
        largest = max(self._calls, key=lambda call: call.num_bytes)
        return [f"{per_step}; the largest: {largest.kind}, {largest.num_bytes / 2**20:.2f} MiB"]


def _figures(calls: Iterable[CollectiveCall], steps: int) -> dict[str, float]:
    """Return calls and bytes per step, in total and by kind, and milliseconds by kind."""
    found = {"comm/calls": 0.0, "comm/bytes": 0.0}
    for call in calls:
        seconds = 0.0 if call.ended is None else call.ended - call.began
        numbers = {"calls": 1.0, "bytes": float(call.num_bytes), "ms": 1e3 * seconds}
        for name, number in numbers.items():
            for place in ("comm", f"comm/{call.kind}"):
                found[f"{place}/{name}"] = found.get(f"{place}/{name}", 0.0) + number / steps
    found.pop("comm/ms", None)  # the total would count overlapping collectives more than once
    return found


class CollectiveCall:
    """Records one collective.

    Attributes:
        kind: Name of the operator.
        num_bytes: Bytes of its tensors on this rank.
        began: Start time.
        ended: End time, or None while the collective is running.
    """

    def __init__(self, kind: str, num_bytes: int, began: float, ended: float | None = None) -> None:
        self.kind, self.num_bytes, self.began, self.ended = kind, num_bytes, began, ended

    def end(self, _: Any) -> None:
        """Record the end. This may be called on any thread."""
        self.ended = time.perf_counter()


class CollectiveWatch(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the collectives that torch's dispatcher runs in this thread.

    Attributes:
        began: Time at which the watch was created.
        error: Error while recording. The collective itself was run.
        calls: Collectives recorded so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.began = time.perf_counter()
        self.error: Exception | None = None
        self.calls: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator. Record it if it is a collective."""
        if torch_compat.reads_scalar(func) and not isinstance(args[0], Tensor):
            return args[0]  # torch passes a number that autograd has saved to a mode as a Python number (torch 2.13)
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        try:
            call = self._note(func, args)
        except Exception as error:  # run the user's collective, and raise the error later in the check
            self.error = error
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        work = result[-1] if isinstance(result, (tuple, list)) else result
        try:
            torch_compat.on_completion(work, call.end)
        except (AttributeError, RuntimeError, TypeError):  # a backend without futures
            call.end(None)
        return result

    def _note(self, func: Any, args: Any) -> CollectiveCall:
        """Record the start of a collective."""
        kind = torch_compat.operator_schema(func).name.rpartition("::")[2].strip("_")
        tensors = {id(tensor): tensor for tensor in inputs.tensors_in(args)}
        num_bytes = sum(_bytes_of(tensor) for tensor in tensors.values())
        call = CollectiveCall(kind, num_bytes, time.perf_counter())
        self.calls.append(call)
        return call


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor in a collective. For a sparse tensor, these are the bytes of its indices and values."""
    if tensor.layout == torch.sparse_coo:
        # all entries are sent, whether the tensor is coalesced or not
        indices, values = torch_compat.sparse_entries(tensor)
        return indices.nbytes + values.nbytes
    if tensor.layout != torch.strided:
        return 0
    return tensor.nbytes


def _ddp_calls(log: Mapping[str, Any], began: float) -> list[CollectiveCall]:
    """Return DDP's buckets as collectives, read from its log."""
    sizes = str(log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or "")
    seconds = float(log.get("avg_backward_comm_time") or 0) / 1e9
    found = [CollectiveCall("allreduce", int(size), began, began) for size in sizes.replace(",", " ").split()]
    if found:
        found[0].ended = began + seconds
    return found


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by at least one interval."""
    covered, reached = 0.0, 0.0
    for began, ended in sorted(intervals):
        covered += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return covered
