"""Options that had a place in a signature still work there for one release, with a warning; tools see keyword-only options."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lightning_ddp_losses import BufferSyncCheck, GradientFlowCheck, LossCheck, ParameterSyncCheck

FORMER: list[tuple[Any, dict[str, Any]]] = [
    (LossCheck, {"zero_steps": 3, "bias": 1.5, "file": False}),
    (GradientFlowCheck, {"parts": 4, "full_every_n_steps": 7, "probe_scale": False}),
    (ParameterSyncCheck, {"parts": 4, "full_every_n_steps": 7}),
    (BufferSyncCheck, {"tolerance": 0.3}),
]


@pytest.mark.parametrize(("check", "options"), FORMER, ids=lambda value: getattr(value, "__name__", ""))
def test_by_position_they_work_and_warn(check: Any, options: dict[str, Any]) -> None:
    with pytest.warns(DeprecationWarning, match=f"{check.__name__}: give options by name, .*=...") as caught:
        made = check(*options.values(), every_n_steps=2)
    assert caught[0].filename == __file__
    assert {name: getattr(made, name) for name in options} == options
    assert made.every_n_steps == 2
    with pytest.warns(DeprecationWarning, match="by position"):
        part = check(next(iter(options.values())))
    assert vars(part).items() >= dict(list(options.items())[:1]).items()


@pytest.mark.parametrize(("check", "options"), FORMER, ids=lambda value: getattr(value, "__name__", ""))
def test_by_name_nothing_is_said(check: Any, options: dict[str, Any]) -> None:
    made = check(**options)  # warnings are errors
    assert {name: getattr(made, name) for name in options} == options
    parameters = inspect.signature(check).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert {p.name for p in parameters} == {*options, "every_n_steps", "action"}


@pytest.mark.parametrize(("check", "options"), FORMER, ids=lambda value: getattr(value, "__name__", ""))
def test_what_never_worked_does_not(check: Any, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"at most {len(options)} positional options, got {len(options) + 1}"):
        check(*options.values(), 1)
    name, value = next(iter(options.items()))
    with pytest.raises(TypeError, match=f"several values for {name}"):
        check(value, **{name: value})
