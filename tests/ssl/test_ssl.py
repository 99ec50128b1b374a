"""`ssl`: each function on ranks equals the naive formula of one process on all rows, in value and gradient; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import ssl
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.oracle import Found, Place, normal, own, parity
from tests.refusals import refusals

FEATURES, OUTPUTS = 4, 6
SPLITS = {1: [[16]], 2: [[8, 8], [5, 11]], 3: [[5, 5, 6], [5, 11, 0]]}


def encoder() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, OUTPUTS), nn.Tanh()).double()


def views() -> Tensor:
    """(2, 16, F): two views of all rows."""
    return normal(2, 16, FEATURES, seed=5)


# ---------------------------------------------------------------------- naive formulas of one process


def naive_barlow(a: Tensor, b: Tensor) -> Tensor:
    c = naive_correlation(a, b)
    on = c.diagonal()
    return (on - 1).square().sum() + 5e-3 * (c.square().sum() - on.square().sum())


def naive_correlation(a: Tensor, b: Tensor) -> Tensor:
    return (
        functional.batch_norm(a, None, None, training=True).T
        @ functional.batch_norm(b, None, None, training=True)
        / len(a)
    )


def naive_vicreg(a: Tensor, b: Tensor) -> Tensor:
    value = 25 * functional.mse_loss(a, b)
    for view in (a, b):
        value = value + 25 * 0.5 * (1 - (view.var(0) + 1e-4).sqrt()).relu().mean()
        covariance = torch.cov(view.T)
        value = value + (covariance - covariance.diagonal().diag()).square().sum() / a.shape[1]
    return value


def naive_koleo(rows: Tensor) -> Tensor:
    unit = functional.normalize(rows, dim=1)
    similarities = (unit @ unit.T).fill_diagonal_(-2)
    return -(functional.pairwise_distance(unit, unit[similarities.argmax(1)], eps=1e-8) + 1e-8).log().mean()


def weighted(tensor: Tensor) -> Tensor:
    """A number in which each entry of a tensor has a part of its own."""
    return (tensor * torch.linspace(-1, 2, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)).sum()


def of_moments(rows: Tensor) -> Tensor:
    found = ssl.moments(rows)
    return weighted(found.mean) + weighted(found.covariance) + weighted(found.variance.sqrt())


def naive_of_moments(rows: Tensor) -> Tensor:
    return weighted(rows.mean(0)) + weighted(torch.cov(rows.T)) + weighted(rows.std(0))


Function = Callable[[Tensor, Tensor], Tensor]
CASES: dict[str, tuple[Function, Function]] = {
    "barlow_twins": (ssl.barlow_twins, naive_barlow),
    "cross_correlation": (
        lambda a, b: weighted(ssl.cross_correlation(a, b)),
        lambda a, b: weighted(naive_correlation(a, b)),
    ),
    "vicreg": (ssl.vicreg, naive_vicreg),
    "koleo": (lambda a, b: ssl.koleo(a) + 2 * ssl.koleo(b), lambda a, b: naive_koleo(a) + 2 * naive_koleo(b)),
    "moments": (lambda a, b: of_moments(a * b), lambda a, b: naive_of_moments(a * b)),
}


def own_rows(everywhere: Tensor, sizes: list[int]) -> Tensor:
    """This rank's rows of (..., rows, features)."""
    return everywhere[..., own(sizes), :]


def play(place: Place, name: str) -> Found:
    model = place.ddp(encoder())
    ours, naive = CASES[name]
    outputs = model(views()[:, place.part].flatten(0, 1)).unflatten(0, (2, -1))
    return place.graded((naive if place.alone else ours)(outputs[0], outputs[1]), net=model)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_process(pool: RankPool, world_size: int, name: str) -> None:
    for sizes in SPLITS[world_size]:
        parity(pool, play, sizes, name, rtol=1e-10, every_rank=True)


# ---------------------------------------------------------------------- sinkhorn and the centre


def naive_sinkhorn(logits: Tensor, temperature: float, iterations: int) -> Tensor:
    weights = (logits / temperature).exp()
    for _ in range(iterations):
        weights = weights / weights.sum(0)
        weights = weights / weights.sum(1, keepdim=True)
    return weights


def all_logits(largest: float) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(16, OUTPUTS, generator=generator, dtype=torch.float64) * 2 - 1) * largest


def assigned(place: Place, iterations: int) -> Found:
    logits = place.own(all_logits(1.0)).requires_grad_()
    if place.alone:
        return {"rows assigned": naive_sinkhorn(logits, 0.05, iterations)}
    found = ssl.sinkhorn(logits, temperature=0.05, iterations=iterations)
    assert not found.requires_grad
    return {"rows assigned": found}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 3, 30])
def test_assignments_of_one_process(pool: RankPool, world_size: int, iterations: int) -> None:
    for sizes in SPLITS[world_size]:
        parity(pool, assigned, sizes, iterations, rtol=1e-10)


def assigned_of_large_logits(dtype: torch.dtype) -> Tensor:
    logits = own_rows(all_logits(30.0), [5, 11, 0]).to(dtype)
    return ssl.sinkhorn(logits, temperature=0.04, iterations=30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_logits_stay_finite(pool: RankPool, dtype: torch.dtype) -> None:
    found = torch.cat(pool.run(3, assigned_of_large_logits, dtype))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(1), torch.ones(16, dtype=found.dtype))
    # the wide computation of one process, without a group
    logits = all_logits(30.0).to(dtype).double()
    wide = ssl.sinkhorn(logits, temperature=0.04, iterations=30)
    torch.testing.assert_close(found.double(), wide, atol=1e-3 if found.dtype == torch.float32 else 1e-9, rtol=0)


def centred(place: Place) -> Found:
    if place.alone:
        mean = torch.zeros(OUTPUTS, dtype=torch.float64)
        for step in range(3):
            mean = 0.8 * mean + 0.2 * all_logits(1.0 + step).mean(0)
        return {"value": mean, "targets": ((all_logits(1.0) - mean) / 0.1).softmax(1)}
    center = ssl.Center(OUTPUTS, momentum=0.8).double()
    for step in range(3):
        center.update(place.own(all_logits(1.0 + step)))
    return {"value": center.center, "targets": center.softmax(all_logits(1.0), temperature=0.1)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_centre_of_one_process(pool: RankPool, world_size: int) -> None:
    for sizes in SPLITS[world_size]:
        parity(pool, centred, sizes, rtol=1e-10)


# ---------------------------------------------------------------------- parts, precision, bytes


@pytest.mark.parametrize("sizes", SPLITS[3], ids=str)
@each_rank(3)
def test_koleo_compares_equal_parts(sizes: list[int]) -> None:
    parts = views().flatten(0, 1).chunk(2)
    crops = torch.cat([own_rows(part, sizes) for part in parts])
    assert ssl.koleo(crops, groups=2).item() == pytest.approx(float(sum(map(naive_koleo, parts))) / 2, rel=1e-10)


@pytest.mark.parametrize("name", ["barlow_twins", "vicreg", "koleo"])
@each_rank(2)
def test_halves_are_computed_in_float32(name: str) -> None:
    rows = own_rows(views(), [5, 11])
    with torch.autocast("cpu", torch.bfloat16):
        value = CASES[name][0](rows[0].bfloat16(), rows[1].bfloat16())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(float(CASES[name][1](*views().bfloat16().double())), rel=1e-4)


@pytest.mark.parametrize("name", ["barlow_twins", "cross_correlation", "vicreg"])
@each_rank(2)
def test_moments_need_a_handshake_and_two_sums(name: str) -> None:
    a, b = torch.randn(2, 300, OUTPUTS, requires_grad=True).unbind()
    with CountCollectives() as collectives:
        value = CASES[name][0](a, b)
        forward = collectives.take()
        value.backward()
    assert len(forward) == 3
    assert forward[1:] == ["allreduce_"] * 2
    assert collectives.take() == []


def bytes_of_call(name: str, rows: int) -> int:
    logits = torch.randn(rows, OUTPUTS)
    with CountCollectives() as collectives:
        if name == "sinkhorn":
            ssl.sinkhorn(logits, temperature=0.1)
        elif name == "center":
            ssl.Center(OUTPUTS).update(logits)
        else:
            CASES[name][0](*torch.randn(2, rows, OUTPUTS, requires_grad=True).unbind()).backward()
    return collectives.num_bytes


@pytest.mark.parametrize("name", ["sinkhorn", "center", "barlow_twins", "vicreg"])
def test_bytes_do_not_grow_with_the_rows(pool: RankPool, name: str) -> None:
    few, many = (pool.run(2, bytes_of_call, name, rows) for rows in (300, 3000))
    assert few == many
    assert max(many) < 3000 * OUTPUTS * 4  # one view of a rank


# ---------------------------------------------------------------------- refusals


def _rows(*shape: int) -> Tensor:
    return torch.zeros(shape) if 0 in shape else torch.linspace(-1, 1, torch.Size(shape).numel()).sin().view(shape)


def _logits_with(value: float) -> Tensor:
    logits = _rows(4, 3)
    if dist.get_rank() == 1:
        logits[0, 0] = value
    return logits


def _weighed(factor: float) -> None:
    for _ in range(2):
        rows = _rows(4, 3).requires_grad_()
        (ssl.vicreg(rows, 2 * rows) * factor).backward()


def _two_centres(name: str | None) -> None:
    """Update two centres, in another order on rank 1."""
    names = [name and f"{name} {place}" for place in range(2)]
    centres = [ssl.Center(3, name=each) for each in names]
    for centre in centres if dist.get_rank() == 0 else reversed(centres):
        centre.update(_rows(4, 3))


def _named(function: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Call a function by two names, in another order on rank 1."""
    for name in ("student", "teacher") if dist.get_rank() == 0 else ("teacher", "student"):
        function(*args, name=name, **options)


sinkhorn = partial(ssl.sinkhorn, temperature=1.0)
MISMATCH, CONFIGURATION = "RankMismatchError", "ConfigurationError"
REFUSED: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "prototypes": (lambda rank: sinkhorn(_rows(4, 3 + rank)), "(rows, 4)", MISMATCH),
    "features": (lambda rank: ssl.vicreg(_rows(4, 3 + rank), _rows(4, 3 + rank)), "(rows, 4)", MISMATCH),
    "no rows": (lambda rank: sinkhorn(_rows(0, 3)), "rank 1: 0", "InputError"),
    "no outputs": (lambda rank: ssl.Center(3).update(_rows(0, 3)), "1 or more on all ranks", "InputError"),
    "one row": (lambda rank: ssl.moments(_rows(1 - rank, 3)), "2 or more on all ranks", "InputError"),
    "one row a part": (lambda rank: ssl.koleo(_rows(2 * rank, 3), groups=2), "4 or more on all ranks", "InputError"),
    "temperature": (lambda rank: sinkhorn(_rows(4, 3), temperature=0.0), "positive number", CONFIGURATION),
    "temperature of one rank": (
        lambda rank: sinkhorn(_rows(4, 3), temperature=1.0 - rank),
        "positive number",
        CONFIGURATION,
    ),
    "temperatures": (lambda rank: sinkhorn(_rows(4, 3), temperature=1.0 + rank), "temperature", MISMATCH),
    "iterations": (lambda rank: sinkhorn(_rows(4, 3), iterations=0), "1 or more", CONFIGURATION),
    "infinite": (lambda rank: sinkhorn(_logits_with(torch.inf)), "rank 1: 1 numbers", "InputError"),
    "masked": (lambda rank: sinkhorn(_logits_with(-torch.inf)), "rank 1: 1 numbers", "InputError"),
    "not a number": (lambda rank: sinkhorn(_logits_with(torch.nan)), "rank 1: 1 num", "InputError"),
    "three dimensions": (lambda rank: ssl.koleo(_rows(2, 2, 2)), "floating tensor", "InputError"),
    "integers": (lambda rank: ssl.moments(torch.ones(4, 3, dtype=torch.int64)), "floating tensor", "InputError"),
    "views": (lambda rank: ssl.barlow_twins(_rows(4, 3), _rows(3 + rank, 3)), "views of one shape", "InputError"),
    "parts": (lambda rank: ssl.koleo(_rows(4 + rank, 3), groups=2), "a multiple of 2 rows", "InputError"),
    "weights": (lambda rank: ssl.vicreg(_rows(4, 3), _rows(4, 3), covariance=rank), "weights", MISMATCH),
    "outputs": (lambda rank: ssl.Center(3).update(_rows(4, 2)), "features of outputs", "InputError"),
    "two centres": (lambda rank: _two_centres(None), "Center", MISMATCH),
    "two centres with names": (lambda rank: _two_centres("of crops"), ("of crops 0", "of crops 1"), MISMATCH),
    "named sinkhorn": (lambda rank: _named(sinkhorn, _rows(4, 3)), "sinkhorn `teacher`", MISMATCH),
    "named koleo": (lambda rank: _named(ssl.koleo, _rows(4, 3)), "koleo `teacher`", MISMATCH),
    "named moments": (lambda rank: _named(ssl.moments, _rows(4, 3)), "moments `teacher`", MISMATCH),
    "named vicreg": (lambda rank: _named(ssl.vicreg, _rows(4, 3), _rows(4, 3)), "vicreg `teacher`", MISMATCH),
    "named barlow_twins": (
        lambda rank: _named(ssl.barlow_twins, _rows(4, 3), _rows(4, 3)),
        "barlow_twins `teacher`",
        MISMATCH,
    ),
    "named cross_correlation": (
        lambda rank: _named(ssl.cross_correlation, _rows(4, 3), _rows(4, 3)),
        "cross_correlation `teacher`",
        MISMATCH,
    ),
    "other coefficients": (lambda rank: _weighed(1 + rank), "coefficient of the last backward", MISMATCH),
}
test_refusals_on_all_ranks = refusals(__name__, "REFUSED")


@each_rank(2)
def test_a_name_changes_no_value() -> None:
    rows = own_rows(views(), [5, 11])
    assert ssl.koleo(rows[0], name="crops").item() == ssl.koleo(rows[0]).item()
    assert ssl.vicreg(*rows, name="crops").item() == ssl.vicreg(*rows).item()


@pytest.mark.parametrize("name", CASES)
@each_rank(1, distributed=False)
def test_without_a_process_group(name: str) -> None:
    ours, naive = (float(function(*views()[:, :, :3])) for function in CASES[name])
    assert ours == pytest.approx(naive, rel=1e-10)
