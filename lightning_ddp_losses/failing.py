"""What fails on one rank of a fit ends all of them, also those that wait for it in a loss over a part of the ranks.

A rank that failed cannot know where its peers wait: in the frame of a group that is a part of the world, or in the world's next one. So it
tells each part that it belongs to, without waiting, and then the world; who hears of it passes it on likewise, but not where it was
heard. So every member sends one frame more in each part, and none is left unmatched.
"""

from __future__ import annotations

import contextlib
from typing import NoReturn

from lightning_ddp_losses import frames, groups

__all__ = ["fail_on_all_ranks", "tell_parts"]


def tell_parts(error: Exception, where: str) -> bool:
    """Let the next frame of each part of the world that this rank belongs to be an error, with this one as the reason.

    Returns:
        Whether there are parts: then an error that a part raised together is news to the rest of the world.

    Communication: one frame for each part, not awaited.
    """
    parts = groups.parts()
    text = "; ".join(f"rank {groups.rank()} failed in {where}: {type(error).__name__}: {error}".splitlines())
    for part in parts:
        if part is frames.heard_in(error):
            continue
        with contextlib.suppress(RuntimeError):  # its members may be gone
            frames.start(text, {}, group=part)
    return bool(parts)


def fail_on_all_ranks(error: Exception, where: str) -> NoReturn:
    """Raise ``error`` on every rank: here, and at the next frame of each peer.

    Raises:
        DDPLossError: as ``frames.fail_together``; a peer that heard of it in a part says so.

    Communication: one frame of the world, one for each part.
    """
    if (
        tell_parts(error, where) and frames.heard_in(error) is not groups.family().frames
    ):  # all have heard what the world said
        with contextlib.suppress(AttributeError):  # an exception class may forbid it
            error.collective = False  # type: ignore[attr-defined]
    frames.fail_together(error, where)
