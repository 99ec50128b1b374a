"""How many bytes of intermediate results a loss keeps at a time where nobody says: what fits a core's cache, or what fills a GPU.

On a CPU small pieces stay in the cache. On an accelerator a piece must be large to be worth its launches: with 256 MiB, 65,536 rows
against as many columns are 64 tiles of float32.
"""

from __future__ import annotations

import torch

DEVICE_BYTES = 256 << 20
MASKED_BYTES = 64 << 20
"""Up to so large a matrix of pairs an accelerator computes with masks in place of lists of pairs; SupCon at any size.

A list has a length that the host waits for, which costs the launches of all that could have been queued meanwhile, about a millisecond.
Masks cost bytes. What a tile's elements read and write, there and back, counted in times the tile's own bytes; lists of one positive a row:

| | SupCon | NTXent | MultiSimilarity | Contrastive |
|---|---|---|---|---|
| masks | 20 | 40 | 35 | 35 |
| lists | 14 | 14 | 14 | 22 |

The longer the lists, the more they cost: with ten classes as much as SupCon's masks. At 64 MiB and 3 TB/s 26 times the bytes are 0.6 ms,
less than the wait; of larger matrices, whose tiles are of 256 MiB, neither the wait of a call nor the 65 launches of a listed tile bound
the time. Triplets with masks are sorted twice, which beside few positives a row is many times what lists cost.
"""


def tile_budget(device: torch.device, host_bytes: int) -> int:
    """Return the bytes for a device: ``host_bytes`` on the CPU, ``DEVICE_BYTES`` elsewhere."""
    return host_bytes if device.type == "cpu" else DEVICE_BYTES
