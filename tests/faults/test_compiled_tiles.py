"""``compile_tiles=True`` with the compiler of this machine: value and gradient of one process, in one graph for all sizes.

And the kernels that it makes of a tile's functions, with the bytes that these read and write, as the compiler counts them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config, metrics
from torch.utils._pytree import tree_leaves

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, SigLipLoss
from lightning_ddp_losses.losses import tile_compiler
from lightning_ddp_losses.testing import RankPool
from tests.doors import Chunk, Factors, Targets, class_stats, class_terms, clip_stats, clip_terms, siglip_tile
from tests.losses import sharded_cases
from tests.losses.test_tiled import ROWS, TILE_BYTES, play
from tests.oracle import Found, Place, parity

NAMES = ["SupCon, ", "Contrastive, "]
CLASS_NAMES = ["ArcFaceLoss", "ArcFaceLoss, chunks of 2", "NormalizedSoftmaxLoss, chunks of 2"]
SIZE = 512  # rows and columns of a tile


def compiled(place: Place, name: str) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own; to fall back would be an error
        return play(place, name, TILE_BYTES, {"compile_tiles": True})


def test_compiled_tiles_are_one_process(pool: RankPool) -> None:
    parity(pool, compiled, [ROWS], cases=NAMES, seconds=240)


def compiled_classes(place: Place, case: sharded_cases.Case) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return sharded_cases.play(place, case, compile_tiles=True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_compiled_classes_are_one_process(pool: RankPool, world_size: int) -> None:
    """Of 7 classes each of three ranks has 3, 3 or 1, which torch compiles once more; batches are uneven too."""
    sharded_cases.assert_as_one_process(pool, world_size, CLASS_NAMES, compiled_classes, seconds=600)


def compiled_graphs(name: str, dtype: torch.dtype) -> list[int]:
    """How many graphs are compiled where the ranks compile together, and after that."""
    found, rehearse = [0, 0], tile_compiler.TileCompiler.rehearse
    graphs = counters["stats"]

    def counted(self: tile_compiler.TileCompiler, *args: Any) -> None:
        before = graphs["unique_graphs"]
        rehearse(self, *args)
        found[0] += graphs["unique_graphs"] - before

    torch._dynamo.reset()
    start = graphs["unique_graphs"]
    rows = torch.randn(2, 48, 8).to(dtype)
    with warnings.catch_warnings(), mock.patch.object(tile_compiler.TileCompiler, "rehearse", counted):
        warnings.simplefilter("ignore", DeprecationWarning)
        left, right = rows.clone().requires_grad_().unbind()
        if name == "ArcFace":
            ClassShardedLoss(pml.ArcFaceLoss(12, 8), chunk_size=4, compile_tiles=True)(
                left, torch.arange(48) % 12
            ).backward()
        else:
            {"SigLIP": SigLipLoss, "CLIP": ClipLoss}[name](compile_tiles=True, tile_bytes=4096)(left, right).backward()
    found[1] = graphs["unique_graphs"] - start - found[0]
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("SigLIP", torch.float32),
        ("SigLIP", torch.bfloat16),
        ("CLIP", torch.float32),
        ("CLIP", torch.bfloat16),
        ("ArcFace", torch.float32),
    ],
)
def test_what_the_ranks_compile_together_is_what_a_call_runs(pool: RankPool, name: str, dtype: torch.dtype) -> None:
    ((together, later),) = pool.run(1, compiled_graphs, name, dtype, seconds=240)
    assert together > 0
    assert later == 0


# ---------------------------------------------------------------------- kernels of a tile of bf16 rows, forward and backward


@dataclass(frozen=True)
class Kernels:
    """The most that a loss may cost, as compiled.

    Attributes:
        functions: Each with its arguments behind the products.
        entry_bytes: Bytes that all kernels read and write, per entry of a tile.
        kernels: Their number.
    """

    functions: Callable[[], list[tuple[Callable[..., Any], Any]]]
    entry_bytes: float
    kernels: int


def _numbers() -> Tensor:
    return torch.rand(SIZE) + 0.5


def _factors() -> Factors:
    return Factors(torch.tensor(2.0), _numbers(), _numbers(), torch.arange(SIZE).unsqueeze(1))


def siglip(term_count: int) -> list[tuple[Callable[..., Any], Any]]:
    return [(siglip_tile, (_factors(), torch.tensor(-1.0), True, term_count, term_count == 1))]


def clip(term_count: int, *, keeps: bool = False) -> list[tuple[Callable[..., Any], Any]]:
    lse = _numbers() + 9
    terms = _factors(), lse, _numbers() + 9, lse, term_count, keeps, lse if term_count == 1 else None
    return [(clip_stats, (_factors(), SIZE, keeps)), (clip_terms, terms)]


def classes(*, keeps: bool, is_inside: Tensor | None = None) -> list[tuple[Callable[..., Any], Any]]:
    chunk = Chunk(_numbers(), _numbers(), Targets(is_inside, torch.arange(SIZE).unsqueeze(1)), None)
    lse, of_grad = -_numbers().unsqueeze(1) - 9, (_numbers(), _numbers())
    terms = chunk.of_logits() if keeps else chunk, lse, _numbers(), of_grad, 1
    return [(class_stats, (chunk, _numbers(), True, keeps)), (class_terms, terms)]


# aims: 16 bytes of SigLIP, 24 of CLIP and of ArcFace
KERNELS: dict[str, Kernels] = {
    "SigLIP": Kernels(lambda: siglip(1), 8, 3),
    "SigLIP, two numbers": Kernels(lambda: siglip(2), 16, 3),
    # one kernel adds the sums of the rows
    "CLIP": Kernels(lambda: clip(1), 20, 8),
    "CLIP, one tile": Kernels(lambda: clip(1, keeps=True), 20, 8),
    "CLIP, two numbers": Kernels(lambda: clip(2), 24, 7),
    "ArcFace": Kernels(lambda: classes(keeps=False), 24, 4),
    "ArcFace, one chunk": Kernels(lambda: classes(keeps=True), 24, 4),
    "ArcFace, of two ranks": Kernels(lambda: classes(keeps=False, is_inside=_numbers() > 1), 24, 4),
}


@pytest.fixture
def counted_kernels() -> Iterator[None]:
    """Inductor counts bytes if it reports them, and only what it has not compiled before."""
    torch._logging.set_logs(inductor_metrics=True)
    with config.patch(fx_graph_cache=False):
        yield
    torch._logging.set_logs()


def _with_terms_joined(found: Any) -> list[Tensor]:
    """Tensors of a result, high and low number of a gradient together, which may be rounded another way one by one."""
    tensors = [tensor for tensor in tree_leaves(found) if tensor is not None]
    terms = [tensor.float() for tensor in tensors if tensor.dtype == torch.bfloat16]
    if terms:
        terms = [terms[0] - sum(terms[1:])]
    return [*(tensor for tensor in tensors if tensor.dtype != torch.bfloat16), *terms]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch's own inductor
@pytest.mark.usefixtures("counted_kernels")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name: str) -> None:
    torch.manual_seed(0)
    most, kernels, entry_bytes = KERNELS[name], 0, 0.0
    for function, options in most.functions():
        products = torch.randn(SIZE, SIZE)
        torch._dynamo.reset()
        metrics.reset()
        with torch.no_grad():
            expected = _with_terms_joined(function(products.clone(), *options))
            found = _with_terms_joined(tile_compiler.compiled(function)(products, *options))
        kernels += metrics.generated_kernel_count
        entry_bytes += metrics.num_bytes_accessed / SIZE**2
        rounding = 2.0**-7 if " numbers" not in name else 2e-5  # of one bf16 number, whose last bit may differ
        for theirs, ours in zip(expected, found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=1e-6)
    print(f"{name}: {kernels} kernels, {entry_bytes:.1f} bytes an entry")
    assert 0 < kernels <= most.kernels
    assert 0 < entry_bytes <= most.entry_bytes
