"""Private names of torchmetrics 1.9 and pytorch-metric-learning 2.9: every import or read of one goes through here."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any, cast


def torchmetrics_states(module: Any) -> dict[str, Any] | None:
    """Return the states of a metric with their defaults, by name. None for anything but a metric."""
    return cast("dict[str, Any] | None", getattr(module, "_defaults", None))


def state_reductions(metric: Any) -> dict[str, Any] | None:
    """Return how each state of a metric is reduced over ranks, by name. None for anything but a metric."""
    reductions = getattr(metric, "_reductions", None)
    return reductions if isinstance(reductions, dict) else None


def metric_of_frame(frame: FrameType) -> Any:
    """Return the metric of torchmetrics whose states are gathered in this frame. None for any other frame."""
    code = frame.f_code
    is_gathering = code.co_name == "_sync_dist" and code.co_filename.endswith(os.path.join("torchmetrics", "metric.py"))
    return frame.f_locals.get("self") if is_gathering else None
