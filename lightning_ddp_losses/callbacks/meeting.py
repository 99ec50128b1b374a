"""How the checks' rows travel: in frames of their own, on a process group that only checks use.

Ranks that come from different places of the program meet in equal frames and raise the same error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.raw_collectives import gather

_CHUNK = 1 << 20
_AWAKE_SECONDS, _NAP_SECONDS = 0.002, 0.005


class Meeting:
    """Swaps rows between the ranks of the world and counts what that takes.

    Args:
        look: Called while this rank waits; raises when a peer has failed.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self._look = look
        self.gathers = 0
        self.bytes = 0

    def swap(self, place: str, row: bytes, must_match: dict[str, object] | None = None) -> list[bytes]:
        """The rows of all ranks, in rank order.

        Raises:
            RankMismatchError: on every rank, when ranks are at different places.

        Communication: one gather; one more when a row outgrew the agreed size. None in a world of one.
        """
        frame = handshake.start(place, must_match or {}, row, channel="checks")
        self._await(frame)
        rows = frame.finish()
        self.gathers += process_groups.world_size() > 1
        self.bytes += frame.sent_bytes
        return rows

    def _await(self, frame: handshake.PendingHandshake) -> None:
        """Wait, first awake, and leave when a peer has failed: it will not come."""
        begun = time.perf_counter()
        while not frame.is_completed():
            waited = time.perf_counter() - begun
            if waited < _AWAKE_SECONDS:
                time.sleep(0)
            else:
                self._look()
                time.sleep(min(waited / 20, _NAP_SECONDS))

    def spread(self, own: Tensor | None) -> float | None:
        """The largest difference between any two ranks of a tensor's elements; None where ranks cannot be compared.

        Communication: one gather, and two for each 8 MiB of the tensor.
        """
        if process_groups.world_size() == 1:
            return None
        usable = own is not None and not own.is_complex() and own.layout == torch.strided
        about = f"{tuple(own.shape)} {own.dtype}" if own is not None and usable else ""
        everyone = self.swap("a tensor's difference", about.encode())
        if own is None or not about or len(set(everyone)) > 1:
            return None
        group, worst = process_groups.internal_groups().checks, 0.0
        flat = own.detach().reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].double().cpu()
            table = part.new_empty(process_groups.world_size() * part.numel())
            gather(table, part, group=group)
            table = table.view(-1, part.numel())
            difference = (table.amax(0) - table.amin(0)).nan_to_num(nan=float("inf")).max()
            worst = max(worst, float(difference))
        return worst

    def texts(self, own: str | None) -> list[str] | None:
        """The ranks' texts; None where a rank has none."""
        everyone = [json.loads(row) for row in self.swap("texts about findings", json.dumps(own).encode())]
        return None if any(text is None for text in everyone) else everyone

    @staticmethod
    def group() -> dist.ProcessGroup:
        """The group that only checks use."""
        return process_groups.internal_groups().checks
