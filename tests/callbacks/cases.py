"""Every sabotaged run with its healthy twin; a family of faults each has a file."""

from __future__ import annotations

from tests.callbacks import data_cases, flow, loss_cases, optimizers, parameters, scale, state_cases

__all__ = ["CASES"]

CASES = [
    *parameters.CASES,
    *flow.CASES,
    *optimizers.CASES,
    *scale.CASES,
    *data_cases.CASES,
    *loss_cases.CASES,
    *state_cases.CASES,
]
