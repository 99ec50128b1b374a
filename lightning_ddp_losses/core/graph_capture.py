"""Refuses to be captured: a graph that a device replays leaves out the messages that ranks exchange on the host.

What was captured once would be replayed with the sizes, labels and errors of that one call.
"""

from __future__ import annotations

import torch

from lightning_ddp_losses.errors import ConfigurationError


def is_capturing() -> bool:
    """Say whether the kernels of this thread are recorded instead of run."""
    # the question is an error where torch is built without CUDA
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse_capture(title: str) -> None:
    """Refuse a call inside a capture.

    Args:
        title: How the message names what is called.

    Raises:
        ConfigurationError: inside ``torch.cuda.graph`` and what uses it.
    """
    if is_capturing():
        raise capture_error(title)


def capture_error(title: str) -> ConfigurationError:
    """Return the error of a call inside a capture."""
    return ConfigurationError(
        f"{title}: captured graph",
        expected="a call that runs each time, since ranks exchange messages on the host",
        got='a call inside torch.cuda.graph, torch.cuda.make_graphed_callables or torch.compile(mode="reduce-overhead")',
        fix="Capture the encoder alone and call this outside of it, or compile with mode='default'.",
    )
