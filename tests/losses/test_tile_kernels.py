"""``compile_tiles="auto"``: which calls hand-written kernels compute, that ranks agree on it, and what happens if a kernel fails.

No kernel runs here: functions as they are stand in their place (``tests/kernels`` runs the kernels).
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers
from torch import Tensor, nn

from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss, tile_compiler
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives, nothing_rides
from tests.doors import KernelError, TowerCall, choice
from tests.processes import run_python
from tests.strategies.jobs import Job, fit

MAKE: dict[str, Callable[..., nn.Module]] = {
    "CLIP": ClipLoss,
    "SigLIP": SigLipLoss,
    "ArcFace": lambda **options: ClassShardedLoss(pml.ArcFaceLoss(8, 4), **options),
    "SupCon": lambda **options: GlobalBatchLoss(pml.SupConLoss(), mode="rows", **options),
    "NTXent": lambda **options: GlobalBatchLoss(pml.NTXentLoss(), mode="rows", **options),
    "MultiSimilarity": lambda **options: GlobalBatchLoss(pml.MultiSimilarityLoss(), mode="rows", **options),
    "Contrastive": lambda **options: GlobalBatchLoss(pml.ContrastiveLoss(), mode="rows", **options),
}
FUNCTIONS = {
    "CLIP": ["clip_stats", "clip_terms"],
    "SigLIP": ["siglip_tile"],
    "ArcFace": ["class_stats", "class_terms"],
    "SupCon": ["supcon_rows", "supcon_grad"],
    "NTXent": ["ntxent_rows", "ntxent_grad"],
    "MultiSimilarity": ["multi_similarity_rows", "multi_similarity_grad"],
    "Contrastive": ["contrastive_rows", "contrastive_grad"],
}
# forward finds the gradient of a margin
IN_A_CALL = FUNCTIONS | {"Contrastive": ["contrastive_rows"]}


def multiply_(result: Any, factor: float) -> None:
    """Multiply all tensors of a result."""
    if isinstance(result, Tensor):
        result.mul_(factor)
    for part in result if isinstance(result, tuple | list) else ():
        multiply_(part, factor)


class FakeKernels:
    """Stands in the place of the kernels of this rank.

    Attributes:
        asked: Names of the functions that were called.
        error: Kernels fail with it. None: they do not.
        factor: Kernels return their numbers times it.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.factor = 1.0

    def launch_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            self.asked.append(function.__name__)
            if self.error is not None:
                raise self.error
            result = function(*args)
            multiply_(result, self.factor)
            return result

        return launch


@contextlib.contextmanager
def with_kernels(fewest: int = 0, *, here: bool = True) -> Iterator[FakeKernels]:
    """Inside the block this rank has kernels, which are taken from so many products on."""
    fake = FakeKernels()
    with (
        mock.patch.object(choice, "have_kernels", return_value=here),
        mock.patch.object(choice, "FEWEST_ENTRIES", fewest),
        mock.patch.object(choice, "launch_of", fake.launch_of),
        mock.patch.object(tile_compiler, "_HOST_TILE", (12, 16)),
    ):
        yield fake


def numbers_of(loss: nn.Module, seed: int = 0, rows: int = 6) -> list[Tensor]:
    """Value and gradients of a call on this rank's rows."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    leaf, other = torch.randn(2, rows, 4, generator=generator)
    leaf.requires_grad_()
    is_two_towers = isinstance(loss, ClipLoss | SigLipLoss)
    value = loss(leaf, other if is_two_towers else torch.arange(rows) * 3 // rows)
    value.backward()
    return [value.detach(), leaf.grad, *(each.grad.clone() for each in loss.parameters())]  # type: ignore[list-item,union-attr]


def both_of(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A loss as it is by default, and one of torch's operators, with the same weights."""
    torch.manual_seed(0)
    loss, eager = MAKE[name](**options), MAKE[name](compile_tiles=False, **options)
    eager.load_state_dict(loss.state_dict())
    return loss, eager


# ---------------------------------------------------------------------- which calls


@pytest.mark.parametrize(
    ("option", "all_serve", "entries", "expected"),
    [
        ("auto", True, choice.FEWEST_ENTRIES, "auto"),
        ("auto", True, choice.FEWEST_ENTRIES - 1, False),  # too few
        ("auto", False, 1 << 40, False),  # a rank has none
        (True, False, 0, True),
        (False, True, 1 << 40, False),
    ],
)
def test_what_computes_a_call(option: Any, all_serve: bool, entries: int, expected: Any) -> None:
    compiler = choice.tile_compiler("Loss", option)
    assert choice.option_of(compiler) == option
    assert choice.option_of(choice.chosen(compiler, all_serve, entries)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_kernels_serve_float32_where_they_are(dtype: torch.dtype) -> None:
    kernels, device = choice.tile_compiler("Loss", "auto"), torch.device("cpu")
    assert not choice.serves(kernels, dtype, device)
    with with_kernels():
        assert choice.serves(kernels, dtype, device) == (dtype == torch.float32)
        assert not choice.serves(choice.tile_compiler("Loss", True), dtype, device)
        assert not choice.serves(None, dtype, device)


@pytest.mark.parametrize(
    ("capability", "hip", "triton", "expected"),
    [
        ((9, 0), None, True, True),
        ((8, 0), None, True, True),
        ((7, 5), None, True, False),  # without bfloat16
        ((9, 0), None, False, False),
        ((9, 4), "6.4", True, False),  # AMD's
    ],
)
def test_a_gpu_with_kernels(capability: tuple[int, int], hip: str | None, triton: bool, expected: bool) -> None:
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", hip),
        mock.patch("importlib.util.find_spec", return_value=object() if triton else None),
    ):
        assert choice.have_kernels.__wrapped__(torch.device("cuda", 0)) is expected
        assert choice.have_kernels.__wrapped__(torch.device("meta")) is False


@pytest.mark.parametrize("name", MAKE)
def test_the_default_is_auto(name: str) -> None:
    assert (
        choice.option_of(getattr(MAKE[name](), "_compiler", None) or MAKE[name]().__dict__.get("_tile_compiler"))
        == "auto"
    )


def with_kernels_on(name: str, world_size: int) -> dict[str, Any]:
    loss, eager = both_of(name)
    with with_kernels() as fake:
        found = [numbers_of(loss, seed) for seed in range(2)]
    return {"asked": fake.asked, "found": found, "eager": [numbers_of(eager, seed) for seed in range(2)]}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_kernels_compute_every_tile(pool: RankPool, name: str, world_size: int) -> None:
    for rank in pool.run(world_size, with_kernels_on, name, world_size):
        # once on the tile that all ranks try, then in each call
        assert rank["asked"] == FUNCTIONS[name] + IN_A_CALL[name] * 2
        for found, eager in zip(rank["found"], rank["eager"], strict=True):
            torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)


def uneven(name: str, sizes: list[int], fewest: int) -> list[str]:
    loss, _ = both_of(name)
    with with_kernels(fewest) as fake:
        numbers_of(loss, rows=sizes[dist.get_rank()])
    return fake.asked


@pytest.mark.parametrize(
    ("name", "products"),
    [("CLIP", 12 * 12), ("SigLIP", 12 * 12), ("ArcFace", 12 * 8), ("SupCon", 12 * 12), ("NTXent", 12 * 12)],
)
def test_ranks_of_other_sizes_choose_the_same(pool: RankPool, name: str, products: int) -> None:
    """The mean over ranks decides: a rank with a row or none would not take kernels alone, and its peer would."""
    for sizes, fewest, expected in (
        ([11, 1], products // 2, True),
        ([12, 0], products // 2, True),
        ([11, 1], products // 2 + 1, False),
    ):
        first, second = pool.run(2, uneven, name, sizes, fewest)
        assert bool(first) == bool(second) == expected


class Mined(nn.Module):
    """A loss of the pairs that a miner selects on this rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.loss, self.miner = MAKE["MultiSimilarity"](**options), miners.MultiSimilarityMiner()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = self.loss(embeddings, labels, self.miner(embeddings, labels))
        return value


def with_reducer(loss: type[nn.Module], reducer: nn.Module) -> Callable[..., nn.Module]:
    return lambda **options: GlobalBatchLoss(loss(reducer=reducer), mode="rows", **options)


WITHOUT: dict[str, Callable[..., nn.Module]] = {
    "NTXent between limits": with_reducer(pml.NTXentLoss, reducers.ThresholdReducer(high=2.0)),
    "NTXent above 0": with_reducer(pml.NTXentLoss, reducers.AvgNonZeroReducer()),
    "numbers are recorded": with_reducer(pml.ContrastiveLoss, reducers.MeanReducer(collect_stats=True)),
    "pairs of a miner": Mined,
    "sorted rows": with_reducer(pml.TripletMarginLoss, reducers.MeanReducer()),
}


def without_kernels(name: str) -> dict[str, Any]:
    with warnings.catch_warnings(), with_kernels() as fake:
        warnings.simplefilter("error")
        found = numbers_of(WITHOUT[name]())
    return {"asked": fake.asked, "found": found, "eager": numbers_of(WITHOUT[name](compile_tiles=False))}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_kernels_do_not_compute_is_as_without(pool: RankPool, name: str) -> None:
    for rank in pool.run(2, without_kernels, name):
        assert not rank["asked"]
        torch.testing.assert_close(rank["found"], rank["eager"], rtol=0, atol=0)


# ---------------------------------------------------------------------- ranks that differ


def with_kernels_on_one_rank(name: str) -> dict[str, Any]:
    loss, eager = both_of(name)
    messages = []
    with warnings.catch_warnings(), with_kernels(here=dist.get_rank() == 0) as fake, nothing_rides():
        warnings.simplefilter("error")
        for each in (loss, eager):
            numbers_of(each)  # what is agreed on once
            with CountCollectives() as counted:
                found = numbers_of(each, seed=1)
            messages.append((counted.take(), found))
    return {"asked": fake.asked, "messages": messages}


@pytest.mark.parametrize("name", MAKE)
def test_kernels_of_one_rank_are_not_taken(pool: RankPool, name: str) -> None:
    """Without a word, and in the collectives of ``compile_tiles=False``."""
    for rank in pool.run(2, with_kernels_on_one_rank, name):
        assert not rank["asked"]
        (names, found), (eager_names, eager) = rank["messages"]
        assert names == eager_names
        torch.testing.assert_close(found, eager, rtol=0, atol=0)


def with_options_of_ranks(name: str) -> list[str]:
    loss = MAKE[name](compile_tiles="auto" if dist.get_rank() else False)
    with with_kernels() as fake:
        numbers_of(loss)
    return fake.asked


@pytest.mark.parametrize("name", MAKE)
def test_a_rank_that_wants_none_has_none(pool: RankPool, name: str) -> None:
    assert pool.run(2, with_options_of_ranks, name) == [[], []]


def with_kernels_that_fail(name: str, *, later: bool) -> dict[str, Any]:
    """Three calls, where a kernel of rank 1 fails: when the ranks try it, or in the first call after."""
    loss, eager = both_of(name)
    found, asked, sizes, rehearse = [], [], [], tile_compiler.TileCompiler.rehearse
    error = KernelError("RuntimeError: no kernel here") if dist.get_rank() == 1 else None
    post_init = TowerCall.__post_init__

    def rehearse_first(self: tile_compiler.TileCompiler, *args: Any) -> None:
        fake.error = None if later else error
        rehearse(self, *args)
        fake.error = error

    def sized(self: TowerCall) -> None:
        post_init(self)
        sizes.append(self.tile_entries)

    with (
        warnings.catch_warnings(record=True) as said,
        with_kernels() as fake,
        mock.patch.object(tile_compiler.TileCompiler, "rehearse", rehearse_first),
        mock.patch.object(TowerCall, "__post_init__", sized),
    ):
        warnings.simplefilter("always")
        for seed in range(3):
            fake.asked.clear()
            found.append(numbers_of(loss, seed))
            asked.append(len(fake.asked))
        kernel_sizes, eager_found = [*sizes], [numbers_of(eager, seed) for seed in range(3)]
    return {
        "found": found,
        "eager": eager_found,
        "asked": asked,
        "said": [str(one.message) for one in said],
        "last size": kernel_sizes[-1:],
        "eager size": sizes[-1:],
    }


@pytest.mark.parametrize("name", MAKE)
def test_where_a_kernel_fails_on_one_rank_all_are_eager(pool: RankPool, name: str) -> None:
    """In the tiles of ``compile_tiles=False``, and rank 0 says it, once."""
    first, second = pool.run(2, with_kernels_that_fail, name, later=False)
    (said,) = first["said"]
    assert "compile_tiles: a kernel failed on rank 1 (KernelError: RuntimeError: no kernel here)" in said
    assert "All ranks compute tiles eagerly, which gives the same numbers" in said
    assert not second["said"]
    for rank, tried in ((first, len(FUNCTIONS[name])), (second, 1)):
        assert rank["asked"] == [tried, 0, 0]
        assert rank["last size"] == rank["eager size"]
        torch.testing.assert_close(rank["found"], rank["eager"], rtol=0, atol=0)


def with_kernels_that_are_wrong(name: str, factor: float) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """A call where the kernels of rank 1 return other numbers."""
    loss, eager = both_of(name)
    with warnings.catch_warnings(record=True) as said, with_kernels() as fake:
        warnings.simplefilter("always")
        fake.factor = factor if dist.get_rank() == 1 else 1.0
        found = numbers_of(loss)
        return found, numbers_of(eager), [str(one.message) for one in said]


@pytest.mark.parametrize("name", MAKE)
def test_a_kernel_with_other_numbers_on_one_rank_is_not_taken(pool: RankPool, name: str) -> None:
    first, second = pool.run(2, with_kernels_that_are_wrong, name, 1.01)
    (said,) = first[2]
    assert f"a kernel failed on rank 1 (KernelError: {FUNCTIONS[name][0]}: result" in said
    assert not second[2]
    for found, eager, _ in (first, second):
        torch.testing.assert_close(found, eager, rtol=0, atol=0)
    # rounding is allowed
    for found, eager, said_of_rank in pool.run(2, with_kernels_that_are_wrong, name, 1 + 1e-6):
        torch.testing.assert_close(found, eager, rtol=1e-3, atol=1e-4)
        assert not said_of_rank


@pytest.mark.parametrize("name", MAKE)
def test_where_a_kernel_fails_later_all_are_eager_from_the_next_call_on(pool: RankPool, name: str) -> None:
    first, second = pool.run(2, with_kernels_that_fail, name, later=True)
    (said,) = second["said"]  # the other rank has not failed
    function = FUNCTIONS[name][0]
    assert f"compile_tiles: {function} is computed eagerly on this rank, which gives the same numbers" in said
    assert "on all ranks from the next call on: RuntimeError: no kernel here" in said
    assert not first["said"]
    number = len(FUNCTIONS[name])
    assert first["asked"] == [number + len(IN_A_CALL[name]), 0, 0]
    assert second["asked"] == [number + 1, 0, 0]
    for rank in (first, second):
        torch.testing.assert_close(rank["found"], rank["eager"], rtol=1e-5, atol=1e-6)


def with_an_error_of_torch() -> str:
    """What a rank gets whose operator behind a kernel fails: the kernel may have written, so that nothing is computed again."""
    loss, _ = both_of("SigLIP")
    with with_kernels() as fake, mock.patch.object(tile_compiler.TileCompiler, "rehearse"):
        fake.error = MemoryError("behind the kernel")
        with pytest.raises(MemoryError) as error:
            numbers_of(loss)
    return str(error.value)


def test_an_error_behind_a_kernel_is_an_error(pool: RankPool) -> None:
    (said,) = pool.run(1, with_an_error_of_torch)
    assert "behind the kernel" in said


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_tries_its_own_kernels(copied: Callable[[nn.Module], Any]) -> None:
    loss = SigLipLoss()
    loss._compiler.has_failed = True  # type: ignore[union-attr]
    other = copied(loss)
    assert other.compile_tiles == "auto"
    assert not other._compiler.has_failed


# ---------------------------------------------------------------------- a fit, and a device


class SupConJob(Job):
    """SupCon as a user writes it, of float32 rows."""

    def build(self, loss: str) -> None:
        self.loss = MAKE["SupCon"]()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        value: Tensor = self.loss(self.encoder(features).float(), labels)
        return value


def fitted() -> dict[str, Any]:
    eager = fit(SupConJob)
    with with_kernels() as fake:
        found = fit(SupConJob)
    return {"asked": {*fake.asked}, "difference": max(float((found[name] - eager[name]).abs().max()) for name in eager)}


def test_a_fit(pool: RankPool) -> None:
    for rank in pool.run(2, fitted):
        assert rank["asked"] == {*FUNCTIONS["SupCon"]}
        assert rank["difference"] < 1e-6


ON_A_DEVICE = """
from tests.pretended.devices import pretended
device = pretended()
import torch
from tests.losses.test_tile_kernels import MAKE, with_kernels
from tests.pretended.devices import waits_in

def cost(name, here):
    torch.manual_seed(0)
    loss = MAKE[name]().to(device.name)
    host = torch.randn(2, 40, 4)
    left, right = map(device.to_device, host)
    left.requires_grad_()
    labels = device.to_device(torch.arange(40) % 3)
    with with_kernels(here=here) as fake:
        for _ in range(2):
            fake.asked.clear()
            device.catch_up()
            with device.counting() as counted:
                loss(left, right if name in ("CLIP", "SigLIP") else labels).backward()
    return fake.asked, dict(counted), sum(waits_in(counted).values())

from unittest import mock
from lightning_ddp_losses.losses.kernels import choice
for name in MAKE:
    asked, without, waits = cost(name, here=False)
    assert not asked
    with mock.patch.object(choice, "launch_of", side_effect=AssertionError), mock.patch.object(choice, "FEWEST_ENTRIES", 0):
        loss = MAKE[name]()
        assert not choice.serves(choice.tile_compiler("x", "auto"), torch.float32, torch.device(device.name))
    asked, counted, more_waits = cost(name, here=True)
    assert asked and more_waits <= waits, (name, asked, waits, more_waits)
    assert counted.get("uploads", 0) <= without.get("uploads", 0), (name, counted, without)
    print(name, "fine")
"""


@pytest.mark.slow
def test_on_a_device() -> None:
    """A device that is not CUDA has no kernels. Where there are, the host waits for no more than without, and uploads no more."""
    done = run_python("-c", ON_A_DEVICE, seconds=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[: len(MAKE)] == [f"{name} fine" for name in MAKE]
