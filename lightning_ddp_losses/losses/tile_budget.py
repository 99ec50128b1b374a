"""How many bytes of intermediate results a loss keeps at a time where nobody says: what fits a core's cache, or what fills a GPU.

On a CPU small pieces stay in the cache. On an accelerator a piece must be large to be worth its launches: with 256 MiB, 65,536 rows
against as many columns are 64 tiles of float32.
"""

from __future__ import annotations

import torch

DEVICE_BYTES = 256 << 20
MASKED_BYTES = 64 << 20
"""Up to so large a matrix of pairs an accelerator computes with masks in place of lists of pairs. A list has a length that the host
waits for, which costs a launch of all that could have been queued meanwhile, about a millisecond; masks cost up to 10 passes more over
the matrix (SupCon 1, MultiSimilarity 7, Contrastive 8, NTXent 10, Triplet none), of read and written bytes at 3 TB/s half a millisecond for
so many. Of larger matrices, whose tiles are of 256 MiB, neither the wait of a call nor the 80 launches of a listed tile bound the time."""


def tile_budget(device: torch.device, host_bytes: int) -> int:
    """Return the bytes for a device: ``host_bytes`` on the CPU, ``DEVICE_BYTES`` elsewhere."""
    return host_bytes if device.type == "cpu" else DEVICE_BYTES
