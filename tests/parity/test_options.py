"""Options of `parity` that the table of loops leaves alone: `join` for each tensor, `precision`, `wrap=None`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_losses import ConfigurationError, InputError, parity
from tests.parity.loops import batches, encoder, gathered_times_w, plain_loop, regression, sgd, world

TIME, ROWS = 5, 12


def sequences() -> list[dict[str, Any]]:
    """Time comes first in `x`; `weights` has as many elements as a rank of two has rows."""
    torch.manual_seed(2)
    x, y = torch.randn(TIME, ROWS, 3), torch.randn(ROWS, 2)
    return [{"x": x, "y": y, "weights": torch.rand(6), "nested": [torch.randn(3, TIME, ROWS)]}]


JOIN = {"x": 1, "weights": None, "nested": [2]}  # `y` has none: its rows come first


def over_time(model: Any, batch: Any) -> Tensor:
    rows = len(batch["y"])  # of all ranks in the one process
    assert rows == ROWS // world() or world() == 1
    shapes = batch["x"].shape, batch["y"].shape, batch["weights"].shape, batch["nested"][0].shape
    assert shapes == ((TIME, rows, 3), (rows, 2), (6,), (3, TIME, rows))
    assert all(tensor.dtype == torch.float64 for tensor in (batch["x"], batch["weights"]))
    off = model(batch["x"].mean(0) + batch["nested"][0].mean(1).T) - batch["y"]
    return off.square().mean() * batch["weights"].sum()


def test_each_tensor_is_cut_and_joined_along_its_dimension() -> None:
    report = parity(encoder, over_time, sequences(), join=JOIN)
    assert report.equal, str(report)
    assert report.losses[0].rows == (6, 6)
    wrong = parity(encoder, lambda model, batch: over_time(model, batch) * world(), sequences(), join=JOIN)
    assert [each.fault for each in wrong.diagnoses] == ["F21"], str(wrong)


def test_a_tensor_that_every_rank_has_whole_must_be_the_same_there() -> None:
    def of_rank(rank: int, ranks: int) -> list[dict[str, Any]]:
        (batch,) = sequences()
        return [{"x": batch["x"], "y": batch["y"], "weights": batch["weights"] + rank}]

    def step(model: Any, batch: Any) -> Tensor:
        return model(batch["x"].mean(0)).square().mean() * batch["weights"].sum()

    with pytest.raises(InputError, match=r"(?s)\['weights'\].*the same on every rank.*rank 1: a tensor"):
        parity(encoder, step, of_rank, join=JOIN)


def test_a_batch_of_one_tensor_can_have_its_rows_second() -> None:
    report = parity(encoder, lambda model, x: model(x.mean(0)).square().mean(), [sequences()[0]["x"]], join=1)
    assert report.equal, str(report)
    assert report.losses[0].rows == (6, 6)


# ---------------------------------------------------------------------- precision


def in_bf16(model: Any, batch: Any) -> Tensor:
    assert torch.is_autocast_enabled("cpu")
    assert model(batch["x"]).dtype == torch.bfloat16
    return regression(model, batch)


HALF: dict[str, Any] = {"dtype": torch.float32, "precision": torch.bfloat16}


def test_a_step_runs_under_autocast_and_its_rounding_is_allowed() -> None:
    report = parity(encoder, in_bf16, batches(), **HALF)
    assert report.equal, str(report)
    assert report.settings["precision"] == "bf16-mixed"
    assert report.settings["rounding_unit"] == 2.0**-8
    assert max(row.tolerance for row in report.rows) > 1e-3


def test_a_factor_is_found_under_autocast() -> None:
    report = parity(encoder, gathered_times_w, batches(), **HALF)
    assert report.diagnoses[0].fault == "F21", str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_models_stay_in_the_dtype_that_is_asked_for(dtype: torch.dtype | None) -> None:
    expected = dtype or torch.float32  # None: as they are built

    def step(model: Any, batch: Any) -> Tensor:
        assert {batch["x"].dtype, *(parameter.dtype for parameter in model.parameters())} == {expected}
        return regression(model, batch)

    report = parity(encoder, step, batches(), dtype=dtype)
    assert report.equal, str(report)


def test_the_rounding_of_a_model_is_its_own() -> None:
    """float64 that the model brings is not judged as float32."""

    def build() -> Any:
        return nn.Linear(3, 2).double(), sgd

    def slightly_off(model: Any, batch: Any) -> Tensor:
        return regression(model, batch) * (1 + 1e-8 * world())

    (batch,) = batches()
    assert not parity(build, slightly_off, [{"x": batch["x"].double(), "y": batch["y"].double()}], dtype=None).equal


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_autocast_has_half_precision_only(precision: torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match=r"precision=.*bfloat16"):
        parity(encoder, regression, batches(), dtype=torch.float32, precision=precision)


def test_autocast_would_leave_float64_alone() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)precision=.*float64.*Add dtype=torch.float32"):
        parity(encoder, regression, batches(), precision=torch.bfloat16)


# ---------------------------------------------------------------------- no wrapper


def averaging(model: Any, optimizer: Any, micro_batches: list[Any]) -> None:
    """Average gradients by hand."""
    optimizer.zero_grad()
    regression(model, micro_batches[0]).backward()
    for parameter in model.parameters():
        if dist.is_initialized():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_a_wrapper_a_loop_reduces_its_gradients_itself(ranks: int) -> None:
    report = parity(encoder, loop=averaging, batches=batches(), wrap=None, ranks=ranks)
    assert report.equal, str(report)
    assert report.settings["strategy"] == "no wrapper"


def test_without_a_wrapper_nobody_reduces_gradients() -> None:
    for given in ({"step": regression}, {"loop": plain_loop}):
        report = parity(encoder, batches=batches(), wrap=None, **given)
        assert [each.fault for each in report.diagnoses] == ["SYNC"], str(report)


class Spectrum(nn.Module):
    """A model with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(self.filter.dtype) @ self.filter).abs())


def conjugated_on_ranks(model: Any, batch: Any) -> Tensor:
    if world() > 1:
        inner = model.module
        if not inner.filter._backward_hooks:
            inner.filter.register_hook(torch.conj)
    return regression(model, batch)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, None])
def test_complex_parameters_are_compared_as_complex_numbers(dtype: torch.dtype | None) -> None:
    healthy = parity(Spectrum, regression, batches(), dtype=dtype)
    assert healthy.equal, str(healthy)
    wrong = parity(Spectrum, conjugated_on_ranks, batches(), dtype=dtype)
    assert "filter" in {row.parameter for row in wrong.rows if row.verdict != "exact"}, str(wrong)


class Centred(nn.Module):
    """A buffer is a running mean of own rows. Gradients show it in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x) - self.centre
        self.centre.lerp_(found.detach().mean(0), 0.5)
        return found


def test_all_batches_are_trained_on() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Centred()

    two = [*batches(), *batches()]
    assert parity(build, regression, two, steps=1).settings["steps"] == 1
    report = parity(build, regression, two)
    assert report.settings["steps"] == 2
    assert not report.equal
    assert "centre" in str(report)
