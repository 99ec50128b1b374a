"""Products of rows on tensor cores: how far loss and gradients are from float64, and refusals; unit rows and sums of exponentials.

``VALUES`` says what rows are: float32, or float32 that holds values of bfloat16, whose gradient then shows what the cast back would hide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from pytorch_metric_learning import distances
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, ConfigurationError, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.losses import tile_compiler, two_towers
from lightning_ddp_losses.testing import RankPool
from tests.doors import (
    LogSumExp,
    RunningLogSumExp,
    forms,
    max_and_sum_exp,
    operands,
    product_choices,
    unit_roundoff,
    unit_rows,
)
from tests.oracle import clip_of, graded, joined, normal, own, siglip_of
from tests.refusals import refusals
from tests.slow_parameters import slow_parameters
from tests.tensor_cores import multiplying_bf16, off

ROWS, DIM, CLASSES = 60, 24, 9
SIZES = {1: [60], 2: [23, 37], 3: [31, 0, 29]}
CHOICES = ("float32", "bf16", "bf16x2", "bf16x3", "bf16x6", "auto")
VALUES: dict[str, torch.dtype] = {"float32": torch.float32, "bf16": torch.bfloat16}
# relative, about twice what is measured: value, gradient
LIMITS = {
    ("float32", "float32"): (1e-6, 2e-6),
    ("float32", "bf16"): (1e-6, 2e-6),
    ("bf16", "float32"): (5e-4, 1e-2),
    ("bf16", "bf16"): (1e-6, 2e-5),
}
TILED: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "NTXent": pml.NTXentLoss,
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "dot product": lambda: pml.TripletMarginLoss(
        distance=distances.DotProductSimilarity(normalize_embeddings=False), margin=30.0, smooth_loss=True
    ),
}
LOSSES = [
    *TILED,
    "CLIP",
    "CLIP, a ring",
    "CLIP, smoothing",
    "CLIP, not normalised",
    "SigLIP",
    "SigLIP, a ring",
    "ArcFace",
]


def towers_of_all_ranks(values: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(ROWS, DIM, generator=generator)
    texts = images + torch.randn(ROWS, DIM, generator=generator)
    # the values of that dtype, as float32
    return images.to(VALUES[values]).float(), texts.to(VALUES[values]).float()


def weight_of_all_classes(values: str) -> Tensor:
    weight = torch.randn(DIM, CLASSES, generator=torch.Generator().manual_seed(4))
    return weight.to(VALUES[values]).float()


def labels_of_all_ranks() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def make(name: str, choice: Any) -> nn.Module:
    options: dict[str, Any] = {"products": choice, "tile_bytes": 2048, "gather": "ring" if "ring" in name else "all"}
    if "smoothing" in name:
        options["label_smoothing"] = 0.2
    if "not normalised" in name:
        options |= {"normalize": False, "init_temperature": 4.0}
    return SigLipLoss(**options) if "SigLIP" in name else ClipLoss(**options)


def textbook(name: str, loss: Any, images: Tensor, texts: Tensor) -> Tensor:
    """The loss in one process and float64, without any of our code."""
    if "not normalised" not in name:
        images, texts = functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
    logits = loss.logit_scale.exp() * images @ texts.t()
    if "SigLIP" in name:
        return siglip_of(logits + loss.logit_bias)
    return clip_of(logits, label_smoothing=loss.label_smoothing)


def evaluate(name: str, values: str, choice: str | None, part: slice = slice(None)) -> dict[str, Tensor]:
    """Value and gradients of some rows: of our loss with a choice of products, or (None) of one process in float64 without our code."""
    rows = (tensor[part] if choice else tensor.double() for tensor in towers_of_all_ranks(values))
    images, texts = (tensor.clone().requires_grad_() for tensor in rows)
    given, kind = (images, labels_of_all_ranks()[part]), name.partition(",")[0]
    if kind == "ArcFace":
        loss: Any = pml.ArcFaceLoss(CLASSES, DIM)
        loss.W.data = weight_of_all_classes(values)
        loss = ClassShardedLoss(loss, products=choice, chunk_size=2) if choice else loss.double()
    elif kind in TILED:
        loss = TILED[kind]()
        loss = GlobalBatchLoss(loss, mode="rows", products=choice, tile_bytes=4096) if choice else loss
    else:
        given, loss = (images, texts), make(name, choice) if choice else make(name, "float32").double()
    value = loss(*given) if choice or given[1] is not texts else textbook(name, loss, images, texts)
    parameters = {n: p for n in ("W", "logit_scale") if (p := getattr(loss, n, None)) is not None}
    return graded(value, images=images, texts=texts, **parameters)


def on_a_rank(names: list[str]) -> dict[str, dict[str, Tensor]]:
    """Value and gradients by case; those of rows are W times the rank's share of one process's."""
    part = own(SIZES[dist.get_world_size()])
    cases = [(name, *limit) for limit in LIMITS for name in names]
    return {f"{name}; {choice}; {values}": evaluate(name, values, choice, part) for name, choice, values in cases}


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2}))
def test_rounding(pool: RankPool, world_size: int) -> None:
    """The table of ``products``: float32 and bf16 if nothing is rounded, 2^-9 if it is."""
    results = pool.run(world_size, on_a_rank, LOSSES)
    problems = []
    for key in results[0]:
        name, choice, values = key.split("; ")
        found, truth = joined([result[key] for result in results], "images", "texts", W=1), evaluate(name, values, None)
        of_value, of_gradient = LIMITS[choice, values]
        for what, expected in truth.items():
            limit = of_value if what == "value" else of_gradient
            if not off(found[what], expected) < limit:
                problems.append(f"{key}: {what} off by {off(found[what], expected):.1e}")
    assert not problems, "\n".join(problems)


def bits(loss: nn.Module, dtype: torch.dtype, *, rows: Callable[[str], Any] = towers_of_all_ranks) -> list[Tensor]:
    images, texts = (tensor.to(dtype).requires_grad_() for tensor in rows("bf16"))
    value = loss(images, texts)
    value.backward()
    return [value.detach(), images.grad, texts.grad]


@pytest.mark.parametrize("kind", [ClipLoss, SigLipLoss])
def test_auto_follows_the_rows(kind: Callable[..., nn.Module]) -> None:
    for dtype, same, other in ((torch.bfloat16, "bf16", "float32"), (torch.float32, "float32", "bf16")):
        automatic, chosen = bits(kind(products="auto"), dtype), bits(kind(products=same), dtype)
        assert all(map(torch.equal, automatic, chosen))
        assert not torch.equal(automatic[1], bits(kind(products=other), torch.float32)[1])
        assert all(map(torch.equal, bits(kind(), dtype), automatic))  # as it is by default


def form_of(loss: Any) -> str:
    """How the last planned call multiplies."""
    *_, plan = loss._plans.values()
    return str(plan.form)


def test_auto_of_class_shards_follows_rows_and_weight() -> None:
    embeddings = torch.randn(4, DIM, dtype=torch.bfloat16)
    labels = torch.arange(4) % CLASSES
    loss = ClassShardedLoss(pml.CosFaceLoss(CLASSES, DIM), products="auto")
    loss(embeddings, labels)
    assert form_of(loss) == "float32"  # the weight would be rounded
    loss.bfloat16()(embeddings, labels)
    assert form_of(loss) == "bf16"
    # logits that are not one product
    centers = ClassShardedLoss(pml.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=DIM), products="auto")
    centers.bfloat16()(embeddings, labels)
    assert form_of(centers) == "float32"


def test_float64_stays_float64() -> None:
    for kind in (ClipLoss, SigLipLoss):
        expected = bits(kind().double(), torch.float64)
        for choice in ("bf16", "auto"):
            assert all(map(torch.equal, bits(kind(products=choice).double(), torch.float64), expected))


def test_queue_and_further_negatives() -> None:
    """Columns of all kinds bring their lengths along."""
    images, texts = towers_of_all_ranks("bf16")
    given = (images[:20], texts[:20], texts[20:40] * 4, images[40:] / 8)
    exact, found = (ClipLoss(products=choice)(*given) for choice in ("float32", "bf16"))
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


# by option: of how many products of rows a logit is the sum, and a gradient
NUMBERS = {"auto": (1, 1), "bf16": (1, 1), "bf16x2": (1, 2), "bf16x3": (3, 3), "bf16x6": (6, 6)}


@pytest.mark.parametrize("compile_tiles", [False, True])
@pytest.mark.parametrize("choice", NUMBERS)
@pytest.mark.parametrize(("kind", "in_forward"), [(SigLipLoss, True), (ClipLoss, False)])
def test_each_number_of_a_gradient_is_multiplied(
    kind: Callable[..., nn.Module], in_forward: bool, choice: str, compile_tiles: bool
) -> None:
    """For each tower; the logits are one product of longer rows; the only tile is not computed twice, compiled or not."""
    inner, number = NUMBERS[choice]
    dtype = torch.float32 if inner > 1 else torch.bfloat16
    images, texts = (tensor.to(dtype).requires_grad_() for tensor in towers_of_all_ranks("bf16"))
    as_it_is = mock.patch.object(tile_compiler, "compiled", lambda function: function)
    with multiplying_bf16() as calls, as_it_is:
        value = kind(products=choice, compile_tiles=compile_tiles)(images, texts)
        assert len(calls) == (1 + 2 * number if in_forward else 1)
        value.backward()
    assert sorted(calls) == sorted([(ROWS, inner * DIM), *[(ROWS, ROWS)] * (2 * number)])


@pytest.mark.parametrize("mib", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("columns", [9001, 33_333])
def test_tiles_have_aligned_columns(mib: int, columns: int) -> None:
    """Rows of a result that begin elsewhere than at multiples of 16 bytes halve the speed of bf16 products on a GPU."""
    rows, entries = 20_001, mib * 2**20 // 4
    tiles = list(two_towers.tiles_of(rows, columns, entries))
    sizes = [(part.stop - part.start, place.stop - place.start) for part, place in tiles]
    assert sum(height * width for height, width in sizes) == rows * columns
    assert max(height * width for height, width in sizes) <= entries
    assert sizes[0][1] > min(columns - 1, 0.97 * entries / sizes[0][0])
    assert all(place.start % 64 == 0 for _, place in tiles)
    assert all(width % 64 == 0 for (_, width), (_, place) in zip(sizes, tiles, strict=True) if place.stop < columns)


# in units of what float32 products are off from float64; at most twice what is measured
UNITS = {"CLIP": 10.0, "SigLIP": 30.0, "SupCon": 10.0, "NTXent": 10.0, "MultiSimilarity": 10.0, "ArcFace": 10.0}


@pytest.mark.parametrize("name", UNITS)
def test_two_numbers_of_bf16_rows_lose_nothing_that_bfloat16_shows(name: str) -> None:
    """The gradient before it is rounded, in units of float32's error; rounded, it is as far from float64 as float32's."""
    truth = evaluate(name, "bf16", None)
    exact = evaluate(name, "bf16", "float32")
    with multiplying_bf16() as calls:
        found = evaluate(name, "bf16", "bf16x2")
    assert calls
    for what in truth.keys() - {"value", "logit_scale"}:
        units = off(found[what], truth[what]) / off(exact[what], truth[what])
        assert units < UNITS[name], f"{what}: {units:.1f}"
        rounded = [off(gradient[what].bfloat16(), truth[what]) for gradient in (exact, found)]
        assert rounded[1] < 1.001 * rounded[0], what


# relative, about twice what is measured: value, gradient; of float32 the largest was 3.2e-7
OF_FLOAT32_ROWS = {"bf16x3": (1e-5, 6e-5), "bf16x6": (1e-6, 2e-6)}


@pytest.mark.parametrize("choice", OF_FLOAT32_ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_float32_rows(name: str, choice: str) -> None:
    """Six products of parts are as exact as float32, three lose seven of its digits."""
    truth = evaluate(name, "float32", None)
    with multiplying_bf16() as calls:
        found = evaluate(name, "float32", choice)
    assert calls
    of_value, of_gradient = OF_FLOAT32_ROWS[choice]
    for what, expected in truth.items():
        limit = of_value if what == "value" else of_gradient
        assert off(found[what], expected) < limit, f"{what}: {off(found[what], expected):.1e}"


def test_parts_on_a_device_that_has_no_products_of_bf16_into_float32() -> None:
    """They are float32, as on the CPU."""
    for choice in OF_FLOAT32_ROWS:
        for kind in (ClipLoss, SigLipLoss):
            expected = bits(kind(products="float32"), torch.float32)
            assert all(map(torch.equal, bits(kind(products=choice), torch.float32), expected))


def test_parts_of_bf16_rows_are_the_rows() -> None:
    with multiplying_bf16():
        for kind in (ClipLoss, SigLipLoss):
            found = bits(kind(products="bf16x6"), torch.bfloat16)
            expected = bits(kind(products="float32"), torch.bfloat16)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch's own inductor
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_compiled_gradient_has_the_same_numbers(number: int) -> None:
    """The compiler keeps what is left of each rounding."""
    grad, of_rows, of_columns = torch.randn(8, 6), torch.rand(8), torch.rand(6)
    expected = operands.split(grad.clone(), of_rows, of_columns, number)
    found = torch.compile(operands.split, fullgraph=True)(grad.clone(), of_rows, of_columns, number)
    whole = grad.double() * of_rows.unsqueeze(1) * of_columns
    for terms in (found, expected):
        signs = [1, -1, 1]
        total = sum(sign * term.double() for sign, term in zip(signs, terms, strict=False))
        assert off(total, whole) < (2.0**-8, 2.0**-16, 2.0**-23)[number - 1]
    assert [term.dtype for term in found] == [torch.bfloat16] * number


def without_bf16(rank: int) -> None:
    loss = ClipLoss(products="bf16")
    with mock.patch.object(forms, "has_bf16", return_value=rank == 0):  # on one rank only
        loss(*towers_of_all_ranks("bf16"))


def ask(loss: nn.Module) -> None:
    images, texts = towers_of_all_ranks("bf16")
    loss(images, texts if isinstance(loss, SigLipLoss) else labels_of_all_ranks())


REFUSED: dict[str, tuple[Any, ...]] = {
    "a device without bf16": (without_bf16, "which has none", "ConfigurationError"),
    "towers": (lambda r: ask(SigLipLoss(products=["float32", "bf16"][r])), "products", "RankMismatchError"),
    "class shards": (
        lambda r: ask(ClassShardedLoss(pml.ArcFaceLoss(CLASSES, DIM), products=["auto", "float32"][r])),
        "products",
        "RankMismatchError",
    ),
    "tiles": (
        lambda r: ask(GlobalBatchLoss(pml.SupConLoss(), mode="rows", products=["bf16", "float32"][r])),
        "products",
        "RankMismatchError",
    ),
}
test_a_choice_that_one_rank_alone_can_or_makes = refusals(__name__, "REFUSED")


LOOSE: dict[str, Callable[[], nn.Module]] = {
    "SigLipLoss": lambda: SigLipLoss(products="float32"),
    "GlobalBatchLoss(SupConLoss)": lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows"),
}


@pytest.mark.parametrize("name", LOOSE)
def test_tf32_is_named_once_with_its_size(name: str) -> None:
    images, texts = towers_of_all_ranks("float32")
    loss = LOOSE[name]()
    with (
        mock.patch.object(forms, "is_tf32", return_value=True),
        mock.patch.object(forms, "_warned_of_tf32", set()),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            loss(images, texts if "Lip" in name else labels_of_all_ranks())
    (text,) = (str(one.message) for one in said)
    assert text.startswith(name)
    assert "rounds each operand by 2^-11" in text


def test_euclidean_tiles_keep_float32() -> None:
    """Whatever the program allows its other products."""
    found = []
    plain_mm = torch.mm

    def mm(*args: Any, **options: Any) -> Tensor:
        found.append(torch.get_float32_matmul_precision())
        return plain_mm(*args, **options)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with mock.patch.object(forms, "is_tf32", return_value=True), mock.patch.object(torch, "mm", mm):
            loss = GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows")
            loss(towers_of_all_ranks("float32")[0].requires_grad_(), labels_of_all_ranks()).backward()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert {*found} == {"highest"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            (partial(kind, products="tf32"), f"one of {', '.join(map(repr, CHOICES))}")
            for kind in (ClipLoss, SigLipLoss)
        ),
        (
            lambda: ClassShardedLoss(pml.SoftTripleLoss(num_classes=CLASSES, embedding_size=DIM), products="bf16"),
            "not one number times cosines",
        ),
        *(
            (partial(GlobalBatchLoss, loss, mode=mode, products="bf16"), "not evaluated in tiles of products")
            for loss, mode in (
                (pml.TripletMarginLoss(), "auto"),
                (pml.NCALoss(), "auto"),
                (pml.SupConLoss(), "replicated"),
            )
        ),
    ],
)
def test_no_choice_and_no_product(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()
    if "tiles" in words:
        make.func(*make.args, **make.keywords | {"products": "auto"})  # type: ignore[attr-defined]


def test_from_yaml() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(nn.Module, "loss")
    given = {"class_path": "lightning_ddp_losses.ClipLoss", "init_args": {"products": "bf16"}}
    made = parser.instantiate(parser.parse_object({"loss": given}))
    assert made.loss.products == "bf16"


def test_the_audit_knows_the_rounding() -> None:
    plain, rough = nn.ModuleList([ClipLoss()]), nn.ModuleList([ClipLoss(products="auto"), SigLipLoss(products="bf16")])
    assert unit_roundoff(plain, "32-true") == 2.0**-24
    assert unit_roundoff(rough, "32-true") == 2.0**-9
    assert unit_roundoff(rough.double(), "32-true") == 2.0**-53
    assert product_choices(rough) == ["bf16"]


# ---------------------------------------------------------------------- rows of unit length


def test_rows_and_gradient_are_those_of_torch() -> None:
    rows, weight = normal(2, 6, 5, seed=0)
    rows[1], rows[2], rows[3] = 0, 1e-14 * rows[2], 1e-11 * rows[3]  # none, shorter than 1e-12, longer
    expected, got = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    unit, theirs = unit_rows(got), nn.functional.normalize(expected, dim=1)
    assert torch.equal(unit, theirs)
    found, truth = graded((unit * weight).sum(), rows=got), graded((theirs * weight).sum(), rows=expected)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    assert unit_rows(rows).grad_fn is None


# ---------------------------------------------------------------------- running log-sum-exp: torch's, however the entries arrive


FEW, COLUMNS = 5, 12


def entries(dtype: torch.dtype, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(FEW, COLUMNS, generator=generator, dtype=dtype) * size
    values[2, :7] = torch.finfo(dtype).min  # a row whose first pieces count nothing
    return values


def running_over(values: Tensor, width: int, keep: bool = False) -> RunningLogSumExp:
    """What arrives in pieces of so many columns, each in two parts of rows."""
    running = RunningLogSumExp(len(values), values.new_zeros(()))
    for piece in values.split(width, 1):
        for start, rows in zip(range(0, len(values), 2), piece.split(2), strict=True):
            running.add_piece(max_and_sum_exp(rows if keep else rows.clone(), keep=keep), start)
    return running


def log_sum_exp(running: LogSumExp | RunningLogSumExp) -> Tensor:
    return running.maximum + running.above_maximum()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("width", [1, 5, COLUMNS])
def test_pieces_are_the_whole(dtype: torch.dtype, size: float, width: int, keep: bool) -> None:
    values = entries(dtype, size)
    before, running = values.clone(), running_over(values, width, keep)
    tolerance = {"rtol": 1e-12, "atol": 0} if keep and dtype == torch.float64 else {}
    torch.testing.assert_close(log_sum_exp(running), values.logsumexp(1), **tolerance)
    assert (running.sum_exp > 0).all()
    assert torch.equal(values, before)


def test_rows_without_entries_have_a_sum_of_nothing() -> None:
    running = RunningLogSumExp(FEW, torch.zeros(()))
    assert not running.sum_exp.any()
    assert running.maximum.isfinite().all()


def test_merged_parts_are_the_whole() -> None:
    values = entries(torch.float64)
    parts = [running_over(piece, 5) for piece in values.split(5, 1)]
    maxima, sums = (torch.stack([getattr(part, name) for part in parts]) for name in ("maximum", "sum_exp"))
    torch.testing.assert_close(log_sum_exp(LogSumExp.merged(maxima, sums)), values.logsumexp(1))


def test_one_entry_that_outweighs_all_others_leaves_exactly_nothing_above_it() -> None:
    """And what is added to the difference to another does not round it."""
    assert running_over(torch.tensor([[0.0, -1000.0, 500.0, 100.0]]), 2).above_maximum().item() == 0.0
    assert float(running_over(torch.tensor([[100.0, 80.0]]), 2).relative_to(torch.tensor([99.5]))) == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_that_are_not_normalised_are_smoothed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(5, 4, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    wide_images, wide_texts = (rows.detach().float().requires_grad_() for rows in (images, texts))
    loss = ClipLoss(normalize=False, label_smoothing=0.1)
    value, expected = loss(images, texts), loss(wide_images, wide_texts)
    torch.testing.assert_close(value.float(), expected, rtol=1e-5, atol=0)
    value.backward()
    expected.backward()
    for narrow, wide in ((images, wide_images), (texts, wide_texts)):
        torch.testing.assert_close(narrow.grad.float(), wide.grad, rtol=2e-2, atol=2e-3)
