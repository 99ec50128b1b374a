"""Everything that runs on an accelerator: CUDA (``python -m tests.gpu``), or the pretended one.

That one must be in the process before this file is imported, which imports names that it replaces.

Each run is made twice from the same seed, on the CPU and on the device, and compared: value, and gradient of every input and parameter.
On the CPU the formula itself runs where there is one (PML's or torch's loss, the textbook's expression), else the same code of ours.
"""

from __future__ import annotations

import json
import math
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    GlobalBatchMiner,
    SigLipLoss,
    differentiable,
)
from tests.doors import (
    Call,
    Scope,
    evaluator,
    gather_statistics,
    map_tensors,
    normalise,
    operands,
    process_groups,
    tensors_in,
)
from tests.doors import fingerprint_file as fingerprint
from tests.losses import harness, sharded_cases, test_tiled, variants
from tests.losses.cases import PML
from tests.losses.test_two_towers import CASES as TOWER_CASES
from tests.losses.test_two_towers import EXTRA, Towers, further, textbook
from tests.losses.torch_cases import TORCH
from tests.metrics.cases import CASES as METRICS
from tests.oracle import own
from tests.pretended import backend
from tests.pretended.devices import HOST, Device

ROWS, WIDTH = 512, 32
EXACT = 1e-7  # relative; float64, through roots and logarithms of near equals
IN_FLOAT32 = (
    "ManifoldLoss",
    "CosineSimilarity",
    "SpatialCorrelationCoefficient",
)  # their formulas convert to it, always
EXACT_IN_FLOAT32 = 1e-6
NUDGES = 64  # of the inputs, where a difference may be that of a tie


@dataclass
class Found:
    """What a run gave.

    Attributes:
        difference: The largest relative one to the CPU, of the value and all gradients.
        is_a_tie: If that is not exact: whether the CPU finds the same once its inputs are moved by one rounding.
        error: Instead: what it failed with.
        forward: Counts of the second call.
        backward: Counts of its backward.
    """

    difference: float = 0.0
    is_a_tie: bool = False
    error: str = ""
    forward: dict[str, int] = field(default_factory=dict)
    backward: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """The most that one call may cost, forward and backward, from the second call on; at one rank, 512 rows x 32.

    Attributes:
        make: The module.
        inputs: Its arguments, on the host.
        launches: Operators, in forward and backward together.
        waits: Of the host for the device.
        uploads: From the host to the device.
        own_waits: Of the waits, those that a line of ours asks for; the others are PML's and torchmetrics' own.
        messages: Handshakes, from host to host, of ranks whose collectives carry the device's tensors.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    launches: int
    waits: int
    uploads: int
    own_waits: int = 0
    messages: int = 99


class NormOfTheGroup(nn.Module):
    """Our batch norm's functions, which a world of one never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        call = Call("layer", self.calls, Scope())
        return normalise(call, x, gather_statistics(call, x, ""), self.weight, self.bias, 1e-5)


def rows() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def pairs_of_rows() -> tuple[Tensor, Tensor]:
    return rows(), torch.arange(ROWS) // 2


def classes_of_rows() -> tuple[Tensor, Tensor]:
    return rows(), torch.arange(ROWS) // 16


def exact_pairs_of_rows() -> tuple[Tensor, Tensor]:
    """Rows of which none lies so close to a margin that rounding decides."""
    return rows().double(), torch.arange(ROWS) // 2


def two_towers() -> tuple[Tensor, Tensor]:
    return rows(), rows().flip(1)


def two_columns() -> tuple[Tensor, Tensor]:
    return rows()[:, 0], rows()[:, 1]


class Mined(nn.Module):
    """A loss that gets what a miner names.

    Args:
        loss: Of embeddings, labels and tuples.
        miner: PML's, or ours over all ranks.
    """

    def __init__(self, loss: nn.Module, miner: Any) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = self.loss(embeddings, labels, self.miner(embeddings, labels))
        return value


def by_rows(loss: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: GlobalBatchLoss(loss(), mode="rows")


# Of Circle's launches 115 are PML's formula and its backward, 12 of its waits too (masks of pairs as indices, `any`); ours list the pairs
# (the host learns their numbers once, our wait), sum and divide. Of ArcFace's in elements 93 and both waits are PML's (the targets by a
# mask), ours check labels, sum and divide.
BOUNDS: dict[str, Bound] = {
    "SupCon, tiles": Bound(by_rows(pml.SupConLoss), pairs_of_rows, 59, 0, 0),
    "NTXent, tiles": Bound(by_rows(pml.NTXentLoss), pairs_of_rows, 54, 0, 0),
    "MultiSimilarity, tiles": Bound(by_rows(pml.MultiSimilarityLoss), pairs_of_rows, 65, 0, 0),
    "Contrastive, tiles": Bound(by_rows(pml.ContrastiveLoss), pairs_of_rows, 64, 0, 0),
    "Triplet, tiles": Bound(by_rows(pml.TripletMarginLoss), exact_pairs_of_rows, 69, 0, 0),
    "Triplet, tiles, 16 rows a class": Bound(by_rows(pml.TripletMarginLoss), classes_of_rows, 73, 0, 0),
    "Circle, row tiles": Bound(by_rows(pml.CircleLoss), pairs_of_rows, 158, 13, 0, own_waits=1),
    "MultiSimilarity, mined": Bound(
        lambda: Mined(by_rows(pml.MultiSimilarityLoss)(), GlobalBatchMiner(miners.MultiSimilarityMiner())),
        classes_of_rows,
        179,
        5,
        0,
        own_waits=1,
    ),
    "ArcFace, elements": Bound(lambda: GlobalBatchLoss(pml.ArcFaceLoss(256, WIDTH)), pairs_of_rows, 113, 2, 1),
    "cross entropy, elements": Bound(lambda: GlobalBatchLoss(nn.CrossEntropyLoss()), classes_of_rows, 21, 0, 0),
    "ArcFace, class-sharded": Bound(lambda: ClassShardedLoss(pml.ArcFaceLoss(256, WIDTH)), pairs_of_rows, 84, 0, 0),
    "ProxyNCA, class-sharded": Bound(lambda: ClassShardedLoss(pml.ProxyNCALoss(256, WIDTH)), pairs_of_rows, 95, 0, 0),
    "CLIP": Bound(ClipLoss, two_towers, 78, 0, 0),
    "SigLIP": Bound(SigLipLoss, two_towers, 45, 0, 0),
    "batch norm": Bound(NormOfTheGroup, lambda: (rows(),), 44, 0, 0),
    "MeanSquaredError": Bound(lambda: differentiable(torchmetrics.MeanSquaredError()), two_columns, 18, 0, 0),
    "PearsonCorrCoef": Bound(lambda: differentiable(torchmetrics.PearsonCorrCoef()), two_columns, 286, 10, 0),
}


@dataclass(frozen=True)
class Slope:
    """The most launches that one more tile may cost, forward and backward together.

    Attributes:
        make: Number of tiles -> the module.
        inputs: Its arguments, on the host.
        launches: Per tile.
        is_large: As for a matrix over ``evaluator.MASKED_BYTES``, whose masks are those of a band.
    """

    make: Callable[[int], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    launches: int
    is_large: bool = False


def in_tiles(loss: type[nn.Module], **options: Any) -> Callable[[int], nn.Module]:
    """Makes a loss of so many tiles."""
    return lambda tiles: GlobalBatchLoss(loss(**options), mode="rows", tile_bytes=ROWS * ROWS * 4 // tiles)


# Aimed at: about 25. A tile is computed in forward and once more in backward (Contrastive and Triplet in forward alone, where their
# gradient is known but for a factor). NTXent needs 29 since each positive is a softmax of its own, against the negatives of its row and
# of its column; MultiSimilarity 26 since a row is two log-sum-exps. Bands of columns, of matrices over `MASKED_BYTES`, cost some launches
# of a few bytes more, and less time on a GPU (`benchmarks/README.md`).
SLOPES: dict[str, Slope] = {
    "SupCon": Slope(in_tiles(pml.SupConLoss), pairs_of_rows, 20),
    "NTXent": Slope(in_tiles(pml.NTXentLoss), pairs_of_rows, 29),
    "MultiSimilarity": Slope(in_tiles(pml.MultiSimilarityLoss), pairs_of_rows, 26),
    "Contrastive": Slope(in_tiles(pml.ContrastiveLoss), pairs_of_rows, 23),
    "Triplet": Slope(
        in_tiles(pml.TripletMarginLoss), classes_of_rows, 30
    ),  # 24 with cumsum, which is not deterministic on CUDA
    "SupCon, over 64 MiB": Slope(in_tiles(pml.SupConLoss), pairs_of_rows, 22, is_large=True),
    "NTXent, over 64 MiB": Slope(in_tiles(pml.NTXentLoss), pairs_of_rows, 65, is_large=True),
    "MultiSimilarity, over 64 MiB": Slope(in_tiles(pml.MultiSimilarityLoss), pairs_of_rows, 65, is_large=True),
    "Contrastive, over 64 MiB": Slope(in_tiles(pml.ContrastiveLoss), pairs_of_rows, 61, is_large=True),
    "Triplet, over 64 MiB": Slope(in_tiles(pml.TripletMarginLoss), classes_of_rows, 111, is_large=True),
    "ArcFace, class-sharded": Slope(
        lambda tiles: ClassShardedLoss(pml.ArcFaceLoss(256, WIDTH), chunk_size=256 // tiles), pairs_of_rows, 24
    ),
    "CLIP": Slope(lambda tiles: ClipLoss(tile_bytes=ROWS * ROWS * 4 // tiles), two_towers, 20),
    "SigLIP": Slope(lambda tiles: SigLipLoss(tile_bytes=ROWS * ROWS * 4 // tiles), two_towers, 11),
}
FEW_TILES, MANY_TILES = 4, 16


@dataclass(frozen=True)
class Passes:
    """The most that an entry of a tile may cost, forward and backward, of bf16 rows at one rank.

    Attributes:
        loss: The loss.
        inputs: Its arguments, on the host.
        entries: Entries of the whole matrix.
        tiles: Of how many tiles it is.
        products: Launches of matrix products, per tile.
        passes: Other launches that touch a whole tile, per tile.
        entry_bytes: Bytes that these read and write, per entry.
        copies: The most memory at a time, in copies of the floating inputs, which themselves are one.
    """

    loss: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    entries: int
    tiles: int
    products: int
    passes: int
    entry_bytes: float
    copies: float = math.inf


# a sixteenth of 65,536 rows x 768 in each direction: 16 x 16 tiles, each a third of both towers in bf16, as 64 MiB are of those
PASSES_ROWS, PASSES_WIDTH, PASSES_SIDE = 4096, 48, 256


def towers_in_tiles(
    loss: Callable[..., nn.Module], products: int, passes: int, entry_bytes: float, dtype: torch.dtype, **most: float
) -> Passes:
    """The most that both towers of so many rows may cost."""

    def inputs() -> tuple[Tensor, ...]:
        rows = torch.randn(2, PASSES_ROWS, PASSES_WIDTH, generator=torch.Generator().manual_seed(0))
        return rows.to(dtype).unbind()

    tiles = (PASSES_ROWS // PASSES_SIDE) ** 2
    made = partial(loss, tile_bytes=PASSES_SIDE**2 * 4)
    return Passes(made, inputs, PASSES_ROWS**2, tiles, products, passes, entry_bytes, **most)


def labelled_rows(count: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows in bf16, and two of each class."""
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return rows.bfloat16(), torch.arange(count) // 2


def one_tower_in_tiles(loss: Callable[..., nn.Module], products: int, passes: int, entry_bytes: float) -> Passes:
    """The most that 2,048 rows may cost, two of each class, in 16 tiles."""
    count = 2048

    def made() -> nn.Module:
        return GlobalBatchLoss(loss(), mode="rows", tile_bytes=count**2 * 4 // 16)

    return Passes(made, partial(labelled_rows, count, 48), count**2, 16, products, passes, entry_bytes)


def arcface_in_chunks(chunks: int, products: int, passes: int, entry_bytes: float) -> Passes:
    """The most that 512 rows may cost against 8,192 classes."""

    def loss() -> nn.Module:
        return ClassShardedLoss(pml.ArcFaceLoss(8192, 16), products="bf16", chunk_size=8192 // chunks)

    return Passes(loss, partial(labelled_rows, 512, 16), 512 * 8192, chunks, products, passes, entry_bytes)


# of SigLIP's copies 0.67 are sums of each tile's rows, which are 0.04 at full size (3.85 in all)
PASSES: dict[str, Passes] = {
    "SigLIP": towers_in_tiles(SigLipLoss, 3, 9, 62.5, torch.bfloat16, copies=4.6),
    "SigLIP, float32 rows": towers_in_tiles(SigLipLoss, 3, 5, 32.9, torch.float32),
    "CLIP": towers_in_tiles(ClipLoss, 4, 20, 146.5, torch.bfloat16, copies=4.6),
    "SupCon": one_tower_in_tiles(pml.SupConLoss, 3, 20, 127.3),
    "NTXent": one_tower_in_tiles(pml.NTXentLoss, 3, 29, 205.4),
    "MultiSimilarity": one_tower_in_tiles(pml.MultiSimilarityLoss, 3, 26, 184.4),
    # forward finds a gradient of positives and one of negatives
    "Contrastive": one_tower_in_tiles(pml.ContrastiveLoss, 3, 19, 139.1),
    "ArcFace": arcface_in_chunks(16, 4, 15, 102.2),
    "ArcFace, one chunk": arcface_in_chunks(1, 3, 12, 86.1),
}


def passes_of(device: Device, name: str) -> dict[str, float]:
    """Counts products, passes and bytes of a tile, and the most memory of a call, in the units of ``Passes``."""
    most, before = PASSES[name], backend.live_bytes()  # of what ran earlier
    inputs = most.inputs()
    given = [device.to_device(tensor).requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    loss = most.loss().to(device.name)
    with (
        mock.patch.object(operands, "_PIECE_BYTES", operands._PIECE_BYTES // 256),
        backend.counting(large=most.entries // most.tiles) as counts,
    ):
        loss(*given).backward()
    size = sum(tensor.nbytes for tensor in inputs if tensor.is_floating_point())
    return {
        "products": counts["products"] / most.tiles,
        "passes": counts["passes"] / most.tiles,
        "entry_bytes": counts["bytes"] / most.entries,
        "copies": (backend.peak_bytes() - before) / size,
    }


def slope_of(device: Device, name: str) -> tuple[float, float]:
    """Counts how many launches a tile more costs; returns the largest difference to the CPU too."""
    slope, launches, differences = SLOPES[name], list[int](), list[float]()
    masked_bytes = 0 if slope.is_large else evaluator.MASKED_BYTES
    for tiles in (FEW_TILES, MANY_TILES):
        inputs = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), slope.inputs())
        with mock.patch.object(evaluator, "MASKED_BYTES", masked_bytes):
            found = measure(device, partial(slope.make, tiles), inputs)
        assert not found.error, found.error
        launches.append(found.forward["launches"] + found.backward["launches"])
        differences.append(found.difference)
    return (launches[1] - launches[0]) / (MANY_TILES - FEW_TILES), max(differences)


# ---------------------------------------------------------------------- one run

Naive = Callable[..., Tensor]
"""The formula itself: our module, then the arguments of the call -> the value, by no code of ours."""


def measure(
    device: Device,
    make: Callable[[], nn.Module],
    inputs: Any,
    *,
    calls: int = 1,
    kwargs: Any = None,
    naive: Naive | None = None,
) -> Found:
    """Runs a module on the CPU and on the device.

    Args:
        device: The device.
        make: The module, the same at each call.
        inputs: Its arguments on the host; floating ones that require a gradient get one.
        calls: How often it is called on the device; the last one is counted.
        kwargs: Arguments by name.
        naive: What runs on the CPU; None: the module itself.
    """
    given = (inputs, kwargs or {})
    torch.manual_seed(5)
    module = make()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(6)
    on_host = _call(module, given, HOST, naive=naive)
    found = Found()
    try:
        torch.manual_seed(5)
        module = make()
        module.load_state_dict(state)
        module.to(device.name)
        for _ in range(calls):
            device.catch_up()
            module.zero_grad()
            torch.manual_seed(6)
            on_device = _call(module, given, device, found)
        found.difference = _difference(on_host, on_device)
        if not found.difference < EXACT:
            found.is_a_tie = _is_a_tie(on_device, module.to("cpu"), given, naive)
    except Exception as error:
        found.error = _described(error)
    return found


def _is_a_tie(on_device: dict[str, Tensor], module: nn.Module, given: Any, naive: Naive | None) -> bool:
    """Returns whether the CPU finds what the device found if its floating inputs are moved by one rounding, up or down."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUDGES):
        done: dict[int, Tensor] = {}

        def nudged(tensor: Tensor, done: dict[int, Tensor] = done) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            # one tensor that is given twice stays one
            if id(tensor) not in done:
                signs = torch.randint(2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
                rounded = tensor.detach() * (1 + torch.finfo(tensor.dtype).eps * signs)
                done[id(tensor)] = rounded.requires_grad_(tensor.requires_grad)
            return done[id(tensor)]

        module.zero_grad()
        torch.manual_seed(6)
        on_host = _call(module, map_tensors(nudged, given), HOST, naive=naive)
        if _difference(on_host, on_device) < EXACT:
            return True
    return False


def _call(
    module: nn.Module, given: Any, device: Device, found: Found | None = None, *, naive: Naive | None = None
) -> dict[str, Tensor]:
    """Calls a module on copies of its arguments and runs backward; returns the value and all gradients."""
    found, done = found or Found(), dict[int, Tensor]()

    def copied(tensor: Tensor) -> Tensor:
        # one tensor that is given twice stays one
        if id(tensor) not in done:
            done[id(tensor)] = device.to_device(tensor).requires_grad_(tensor.requires_grad)
        return done[id(tensor)]

    args, kwargs = map_tensors(copied, given)
    with device.counting() as forward:
        value = module(*args, **kwargs) if naive is None else naive(module, *args, **kwargs)
        total = _as_number(value)
    with device.counting() as backward:
        if total.requires_grad:
            total.backward()
    found.forward, found.backward = dict(forward), dict(backward)
    results = {"value": total.detach()}
    for index, tensor in enumerate(done.values()):
        if tensor.grad is not None:
            results[f"input {index}"] = tensor.grad
    results |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: device.to_host(tensor) for name, tensor in results.items()}


def _as_number(value: Any) -> Tensor:
    """Makes one number of what a module returned: itself where it is one."""
    if isinstance(value, Tensor) and value.ndim == 0:
        return value
    parts = [part.to(torch.float64).sum() for part in tensors_in(value)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _difference(on_host: dict[str, Tensor], on_device: dict[str, Tensor]) -> float:
    """Returns the largest relative difference; a parameter that the formula leaves alone has a gradient of zeros, or none."""
    missing = on_host.keys() - on_device.keys()
    assert not missing, f"no gradient on the device: {missing}"
    worst = 0.0
    for name, got in on_device.items():
        expected = on_host.get(name, torch.zeros_like(got))
        assert expected.dtype == got.dtype, f"{expected.dtype} on the host, {got.dtype} on the device"
        if torch.equal(expected.isnan(), got.isnan()) and bool(expected.isnan().any()):
            continue
        off = float((expected - got).norm() / expected.norm().clamp(min=1e-9))
        # a maximum with a NaN among its numbers is that
        worst = off if math.isnan(off) else max(worst, off)
    return worst


def _described(error: BaseException) -> str:
    places = [f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:300]} at {' '.join(places[-6:])}"


# ---------------------------------------------------------------------- the runs

LOSSES = [f"loss; {name}; {mode}" for name, case in {**PML, **TORCH}.items() for mode in case.modes or ("auto",)]
MINERS = [f"miner; {name}" for name in variants.MINERS]
# (those of other distances differ in what the CPU tests already)
TILED = [f"tiles; {name}" for name in test_tiled.CASES if not any(word in name for word in test_tiled.DISTANCES)]
SHARDED = {**sharded_cases.CASES, **sharded_cases.NOT_A_NUMBER}
CLASS_SHARDED = [f"class-sharded; {name}" for name in SHARDED]
TOWERS = [f"two towers; {name}" for name in TOWER_CASES]
_RANDOM_MINERS = ("miner; DistanceWeightedMiner", "miner; UniformHistogramMiner")
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


def metric_cases() -> dict[str, Any]:
    """Names the metrics' cases."""
    named = {}
    for name, cases in METRICS.items():
        named |= {f"metric; {name} {index}": case for index, case in enumerate(cases)}
    return named


def runs_of(device: Device) -> dict[str, Callable[[], Found]]:
    """Names the runs that are compared with the CPU; those that draw numbers where the same seed draws others are left out."""
    metrics = metric_cases()
    runs: dict[str, Callable[[], Found]] = {}
    for name in LOSSES:
        if device.draws_as_the_host or not case_of(name).random:
            runs[name] = partial(_loss, device, name)
    for name in MINERS:
        if device.draws_as_the_host or name not in _RANDOM_MINERS:
            runs[name] = partial(_miner, device, name)
    runs |= {name: partial(_tiled, device, name) for name in TILED}
    runs |= {name: partial(_class_sharded, device, name) for name in CLASS_SHARDED}
    runs |= {name: partial(_two_towers, device, name) for name in TOWERS}
    runs["layer; batch norm"] = partial(_batch_norm, device)
    runs |= {name: partial(_metric, device, case) for name, case in metrics.items()}
    runs |= {f"fingerprint; {dtype}": partial(_fingerprint, device, dtype) for dtype in _DTYPES}
    return runs


def bounded_run(device: Device, name: str) -> Found:
    """Runs one row of ``BOUNDS``; what it found was counted at the third call."""
    bound = BOUNDS[name]
    inputs = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), bound.inputs())
    return measure(device, bound.make, inputs, calls=3)


def _fingerprint(device: Device, dtype: torch.dtype) -> Found:
    """Tells a parameter from one with one other element, as the checks of parameters over ranks do."""
    values = (rows() * 10).to(dtype)
    other = values.clone()
    other[3, 7] = 1 - other[3, 7].to(torch.int64)
    transposed = device.to_device(values.T.contiguous()).T
    tensors = [device.to_device(values), transposed, device.to_device(other)]
    own, same, changed = fingerprint.fingerprints(tensors)
    return Found(error="" if own == same != changed else f"{own}, {same}, {changed}")


def case_of(name: str) -> harness.Case:
    return {**PML, **TORCH}[name.split("; ")[1]]


def _loss(device: Device, name: str, sizes: list[int] | None = None) -> Found:
    """Runs a loss in one mode on the small batch, beside the plain loss; or on this rank's part of it, beside our own, as all do."""
    case, mode = case_of(name), name.split("; ")[2]
    net, _ = harness.fresh(case)
    torch.manual_seed(harness.SEED + process_groups.rank())  # what draws does so from rank 0's seed
    args, kwargs = case.give(net, harness.own_rows(sizes or [harness.ROWS]))
    options: Any = {**case.options, "mode": mode}
    # what draws, and what one process is called with other arguments, is compared with our own on the CPU
    has_formula = not case.random and case.give_alone is None and sizes is None
    naive = _plain_loss if has_formula else None
    return measure(device, lambda: GlobalBatchLoss(case.make().double(), **options), args, kwargs=kwargs, naive=naive)


def _plain_loss(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    value: Tensor = module.wrapped(*args, **kwargs)  # type: ignore[operator]
    return value


def _tiled(device: Device, name: str, sizes: list[int] | None = None) -> Found:
    """Runs a loss in several tiles: all reducers, distances and regularisers."""
    make, give = test_tiled.CASES[name.removeprefix("tiles; ")]
    batch = {each: rows[own(sizes or [test_tiled.ROWS])].clone() for each, rows in test_tiled.batch().items()}
    given = give(batch["embeddings"].requires_grad_(), batch, batch["views"].requires_grad_(), True)
    options: Any = {"mode": "rows", "tile_bytes": test_tiled.TILE_BYTES}
    return measure(
        device,
        lambda: GlobalBatchLoss(make().double(), **options),
        (),
        kwargs=given,
        naive=None if sizes else _plain_loss,
    )


def _class_sharded(device: Device, name: str, sizes: list[int] | None = None) -> Found:
    """Runs a class-sharded loss on the small batch, beside PML's with the same weight; on several ranks twice: the second call no longer
    looks at the labels.
    """
    case, batch = SHARDED[name.removeprefix("class-sharded; ")], sharded_cases.global_rows(sizes)
    embeddings = sharded_cases.net()(batch["features"])
    args = [embeddings, batch["labels"]]
    if case.mine is not None:
        args.append(case.mine(embeddings, batch["labels"]))

    def naive(module: nn.Module, *args: Any) -> Tensor:
        weights = dict(module.named_parameters())
        value: Tensor = torch.func.functional_call(sharded_cases.make(case), weights, args)
        return value

    more: Any = {"calls": 2} if sizes else {"naive": naive}
    return measure(device, lambda: ClassShardedLoss(sharded_cases.make(case), **case.sharded), tuple(args), **more)


class TwoTowers(nn.Module):
    """Two encoders and a loss, called on the features of both."""

    def __init__(self, case: Any, gather: str = "all") -> None:
        super().__init__()
        self.towers = Towers(case, gather)

    def forward(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> Tensor:
        towers = self.towers
        extra = None if extra is None else towers.text(extra)
        value: Tensor = towers.loss(towers.image(images), towers.text(texts), extra, queue, **towers.numbers())
        return value


def _two_towers(device: Device, name: str, sizes: list[int] | None = None, gather: str = "all") -> Found:
    """Runs a loss between two towers on the small batch, beside the textbook's expression."""
    case, batch = TOWER_CASES[name.removeprefix("two towers; ")], harness.own_rows(sizes or [harness.ROWS])
    extra, queue = further(case)
    if extra is not None and sizes is not None:
        extra = extra[own(EXTRA[len(sizes)])]

    def naive(module: Any, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> Tensor:
        towers = module.towers
        extra = None if extra is None else towers.text(extra)
        return textbook(case, towers, towers.image(images), towers.text(texts), extra, queue)

    given = (batch["features"], batch["views"], extra, queue)
    return measure(device, lambda: TwoTowers(case, gather), given, naive=None if sizes else naive)


def _batch_norm(device: Device) -> Found:
    """Runs our batch norm's functions beside torch's."""

    def naive(module: Any, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, module.weight, module.bias, training=True)

    return measure(device, lambda: NormOfTheGroup().double(), (rows().double().requires_grad_(),), naive=naive)


def _miner(device: Device, name: str) -> Found:
    """Runs a miner: its tuples must be the same, in a loss that takes them."""
    batch = harness.global_rows()
    embeddings = batch["targets"].requires_grad_()

    def make() -> nn.Module:
        miner = GlobalBatchMiner(variants.MINERS[name.removeprefix("miner; ")]())
        return Mined(by_rows(pml.TripletMarginLoss)(), miner)

    return measure(device, make, (embeddings, batch["labels"]))


def _metric(device: Device, case: Any) -> Found:
    """Runs a differentiable metric."""
    batch = case.global_batch(0)
    first = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), batch[0])

    class Fed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.metric = differentiable(case.make())
            self.metric.set_dtype(torch.float64)

        def forward(self, *batch: Any) -> Tensor:
            return case.quantity(self.metric(*batch))

    return measure(device, Fed, (first, *batch[1:]))


def join_world_of_one() -> None:
    """Makes this process a world of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main(device: Device, path: Path) -> None:
    """Runs everything; writes what was found, by name."""
    join_world_of_one()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = {name: asdict(bounded_run(device, name)) for name in BOUNDS}
        found |= {name: asdict(run()) for name, run in runs_of(device).items()}
        found["slopes"] = {name: slope_of(device, name) for name in SLOPES}
        found["passes"] = {name: passes_of(device, name) for name in PASSES}
    path.write_text(json.dumps(found))
