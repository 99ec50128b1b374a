"""Values of an accelerator on their way to the host: asked for now, read later, when they have long arrived.

To read a value at once makes the host wait until the device has done all that was asked of it before, and the device then waits for
the host. A copy that nobody waits for costs neither; whoever reads it one step later finds it there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor on the host, which ``read`` returns.

    Args:
        values: On any device; on the CPU it is copied at once.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        if values.device.type == "cpu":
            self._values = values.detach().clone()
            return
        # pinned memory of torch's own, which the device writes to while the host goes on
        self._values = values.detach().to("cpu", non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record(torch.accelerator.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Say whether ``read`` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Return the values; waits where they have not arrived yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
