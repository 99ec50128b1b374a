"""Every sabotaged run with its healthy twin; a family of faults each has a file."""

from __future__ import annotations

from tests.callbacks import flow, optimizers, parameters, scale

__all__ = ["CASES"]

CASES = [*parameters.CASES, *flow.CASES, *optimizers.CASES, *scale.CASES]
