"""What this process holds in the host's memory: anonymous pages, which unlike mapped files cannot be dropped when memory runs short."""

from __future__ import annotations

import os
from pathlib import Path

_STATM = Path("/proc/self/statm")  # Linux; in pages: size, resident, of these backed by files or shared, ...


def anonymous_bytes() -> int:
    """Return the resident anonymous memory of this process (RssAnon of ``/proc/self/status``); 0 where the system does not tell."""
    try:
        resident, shared = _STATM.read_text().split()[1:3]
    except OSError:  # macOS has no such file
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
