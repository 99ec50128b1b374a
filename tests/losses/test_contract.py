"""What callers may rely on: coefficients, ranks without gradient, precision, draws, registration, one process."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, InputError
from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.losses import GlobalBatchLoss, check_separable, register_element_wise, register_row_separable
from lightning_ddp_losses.testing import RankPool
from tests.doors import (
    LOSSES,
    Contrastive,
    FoundLoss,
    Head,
    LossForwardPatch,
    PairLoss,
    head_class_of,
    inputs,
    may_draw,
    pair_loss_of,
)
from tests.each_rank import each_rank
from tests.losses.cases import PML, classes
from tests.losses.harness import (
    CLASSES,
    DIM,
    SPLITS,
    Case,
    by_labels,
    fresh,
    global_rows,
    line_of_rows,
    on_ranks,
    own_rows,
    truth_of,
)
from tests.losses.variants import Tempered
from tests.oracle import Found, Place, assert_near, graded, joined, parity

rows = line_of_rows
PARTS = [5, 7]


def without_rows_or_graph(place: Place, plain: nn.Module) -> Found:
    """The first rank has neither."""
    batch = global_rows()
    rows = place.leaf("", batch["features"][:, :CLASSES].float()).requires_grad_(place.rank != 0)
    loss = plain if place.alone else GlobalBatchLoss(plain)
    found = place.graded(loss(rows, place.own(batch["labels"])))
    assert ("rows " in found) == (place.rank != 0)
    return {"rows ": torch.empty(0, CLASSES).double()} | found


@pytest.mark.parametrize("plain", [nn.CrossEntropyLoss(), nn.MultiMarginLoss()], ids=lambda loss: type(loss).__name__)
def test_a_rank_without_rows_or_graph_takes_part(pool: RankPool, plain: nn.Module) -> None:
    parity(pool, without_rows_or_graph, [0, 12], plain, rtol=1e-6)


def with_a_frozen_rank(place: Place, name: str, mode: str) -> Found:
    """The rows of the second rank get no gradient."""
    net, plain = fresh(Case(getattr(pml, name)))
    batch = {name: place.own(tensor) for name, tensor in global_rows().items()}
    embeddings = net(batch["features"])
    if place.alone:
        embeddings = torch.cat([embeddings[: PARTS[0]], embeddings[PARTS[0] :].detach()])
    elif place.rank == 1:
        embeddings = embeddings.detach()
    loss = plain if place.alone else GlobalBatchLoss(plain, mode=mode)  # type: ignore[arg-type]
    found = place.graded(loss(embeddings, batch["labels"]), net=net, loss=plain)
    assert place.rank != 1 or set(found) == {"value"}
    # as DDP averages what a rank has no gradient of
    zeros = {f"net.{name}": torch.zeros_like(p) for name, p in net.named_parameters() if name != "logit_scale"}
    return zeros | found


@pytest.mark.parametrize(("name", "mode"), [("SupConLoss", "rows"), ("SupConLoss", "replicated"), ("NCALoss", "auto")])
def test_a_rank_whose_rows_need_no_gradient_takes_part(pool: RankPool, name: str, mode: str) -> None:
    parity(pool, with_a_frozen_rank, PARTS, name, mode, compare=assert_near)


def hand_made_labels(labels: str) -> list[str]:
    own = torch.arange(4) if labels == "same" else torch.arange(4) + 4 * dist.get_rank()
    loss = GlobalBatchLoss(pml.NTXentLoss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss(rows(), own, ref_emb=rows(), ref_labels=own)
    return [str(w.message) for w in caught if "labels" in str(w.message)]


def test_ranks_that_number_their_own_rows_are_warned_once(pool: RankPool) -> None:
    first, second = pool.run(2, hand_made_labels, "same")
    assert len(first) == 1
    assert "GlobalBatchLoss(SelfSupervisedLoss(...))(view1, view2)" in first[0]
    assert second == []
    assert pool.run(2, hand_made_labels, "distinct") == [[], []]


def coefficients(place: Place, backward: str) -> Found:
    """Gradients of the second of two steps: each rank weighs the loss by a number of its own, one process by their mean."""
    net, loss = fresh(Case(partial(pml.MarginLoss, learn_beta=True, num_classes=CLASSES)))
    batch = {name: place.own(tensor) for name, tensor in global_rows().items()}
    factor = 2 if place.rank is None else 1 + 2 * place.rank
    judge = loss if place.alone else GlobalBatchLoss(loss, backward=backward)  # type: ignore[arg-type]
    for _ in range(2):
        net.zero_grad(), loss.zero_grad()
        found = place.graded(judge(net(batch["features"]), batch["labels"]) * factor, net=net, loss=loss)
    return {**found, "value": torch.ones(())}


def test_coefficients_that_differ_are_exact_with_summed_gradients(pool: RankPool) -> None:
    parity(pool, coefficients, PARTS, "sum", compare=assert_near)


def in_low_precision(place: Place, name: str, dtype: torch.dtype) -> Found:
    """Embeddings as an encoder under autocast hands them over, while autocast is on; one process has the same numbers in float32."""
    batch = global_rows()
    torch.manual_seed(3)
    loss = PML[name].make()
    embeddings = nn.functional.pad(batch["features"], (0, 1)).to(dtype)
    leaf = place.leaf("", embeddings.float() if place.alone else embeddings)
    with torch.autocast("cpu", torch.bfloat16, enabled=not place.alone):
        value = (loss if place.alone else GlobalBatchLoss(loss))(leaf, place.own(batch["labels"]))
    assert {value.dtype, *(p.dtype for p in loss.parameters())} == {torch.float32}
    return place.graded(value)


def compare_low(found: Found, truth: Found, rtol: float) -> None:
    torch.testing.assert_close(found["value"], truth["value"])
    torch.testing.assert_close(found["rows "], truth["rows "], rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("name", ["ArcFaceLoss", "MultiSimilarityLoss", "ProxyAnchorLoss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numerics_never_go_below_float32(pool: RankPool, dtype: torch.dtype, name: str) -> None:
    """Only the embeddings are low: value and gradient are those of float32 on the very same numbers."""
    parity(pool, in_low_precision, PARTS, name, dtype, rtol=2e-2, compare=compare_low)


def draws(steps: int) -> list[float]:
    net, loss = fresh(Case(partial(Tempered, 0.5)))
    wrapped = GlobalBatchLoss(loss)
    torch.manual_seed(dist.get_rank())
    embeddings = net(own_rows(PARTS)["features"])
    return [wrapped(embeddings, embeddings, net.logit_scale).item() for _ in range(steps)]


def test_each_call_draws_anew_and_all_ranks_draw_alike(pool: RankPool) -> None:
    first, second = pool.run(2, draws, 3)
    assert first == second
    assert len(set(first)) == 3


@each_rank(2)
def test_one_row_with_a_stride_travels_like_any() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    matrix = torch.arange(6.0).view(1, 6) + 10 * rank
    expected = torch.tensor([2.0 + 10 * r for r in range(world)])
    assert torch.equal(all_gather_with_grad(matrix[:, 2]), expected)
    column = matrix[:, 2].clone().requires_grad_()
    wide = torch.stack([column] * 6, 1)[:, 2]  # one row, stride 6
    GlobalBatchLoss(nn.MSELoss(), mode="replicated")(wide, matrix[:, 1]).backward()
    torch.testing.assert_close(column.grad / world, torch.tensor([2.0 / world]))


class OwnRows(pml.ContrastiveLoss):
    """A user's subclass: nobody knows that it is still a sum over anchors."""


class OwnElements(pml.ArcFaceLoss):
    """A user's subclass: nobody knows that it is still a sum over samples."""


def registered() -> dict[str, dict[str, Tensor]]:
    register_row_separable(OwnRows)
    register_element_wise(OwnElements)
    sizes = SPLITS[dist.get_world_size()]["uneven"]
    own = {"rows": Case(OwnRows), "elements": Case(partial(OwnElements, **classes))}
    assert all(GlobalBatchLoss(case.make()).exact_modes() == (mode, "replicated") for mode, case in own.items())
    return {mode: on_ranks(case, sizes, mode) for mode, case in own.items()}


def test_a_declared_class_runs_in_the_declared_mode(pool: RankPool) -> None:
    assert GlobalBatchLoss(OwnRows()).exact_modes() == ("replicated",)
    results = pool.run(2, registered)
    assert_near(joined([r["rows"] for r in results]), truth_of(PML["ContrastiveLoss"]))
    assert_near(joined([r["elements"] for r in results]), truth_of(PML["ArcFaceLoss"]))


class OwnTiles(pml.ContrastiveLoss):
    """Another user's subclass, with an evaluation in tiles."""


class OwnPairs(Contrastive):
    """Theirs."""


def registered_tiles() -> dict[str, Tensor]:
    register_row_separable(OwnTiles, pair_loss=OwnPairs)
    assert pair_loss_of(OwnTiles()) is OwnPairs
    assert GlobalBatchLoss(OwnTiles(), mode="rows").evaluation == "tiled, symmetric"
    return on_ranks(Case(OwnTiles), SPLITS[dist.get_world_size()]["uneven"], "rows")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_declared_class_brings_its_own_tiles(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, registered_tiles)
    assert_near(joined(results), truth_of(PML["ContrastiveLoss"]))


@pytest.mark.parametrize("name", [n for n, c in PML.items() if c.modes and c.modes[0] != "replicated"])
def test_the_table_is_what_the_check_measures(name: str) -> None:
    mode = (PML[name].modes or ("",))[0]
    assert mode in check_separable(PML[name].make(), embedding_size=DIM, num_classes=CLASSES)


@pytest.mark.parametrize("cls", LOSSES, ids=lambda cls: cls.__name__)
def test_what_the_table_names_is_there(cls: type[nn.Module]) -> None:
    loss = cls.__new__(cls)
    assert (LOSSES[cls].pair_loss is None) == (pair_loss_of(loss) is None)
    assert (LOSSES[cls].head is None) == (head_class_of(loss) is None)
    assert issubclass(pair_loss_of(loss) or PairLoss, PairLoss)
    assert issubclass(head_class_of(loss) or Head, Head)


NO_SPLIT = {name: PML[name].make for name in ("NPairsLoss", "LiftedStructureLoss", "FastAPLoss", "SmoothAPLoss")}
NO_SPLIT["RankedListLoss"] = PML["RankedListLoss"].make
NO_SPLIT["a reducer that does not split"] = lambda: pml.MultiSimilarityLoss(
    reducer=reducers.ClassWeightedReducer(torch.linspace(0.1, 2, CLASSES))
)


@pytest.mark.parametrize("name", NO_SPLIT)
def test_the_check_finds_losses_that_no_split_gives(name: str) -> None:
    assert check_separable(NO_SPLIT[name](), embedding_size=DIM, num_classes=CLASSES) == ("replicated",)


@pytest.mark.parametrize("name", ["ArcFaceLoss", "SupConLoss", "NCALoss", "MultipleLosses"])
def test_without_a_process_group_it_is_the_loss_itself(name: str) -> None:
    net, loss = fresh(PML[name])
    args, kwargs = by_labels(net, global_rows())
    assert not dist.is_initialized()
    assert_near(graded(GlobalBatchLoss(loss)(*args, **kwargs), net=net, loss=loss), truth_of(PML[name]))


def evaluated(name: str) -> tuple[float, bool]:
    (net, loss), batch = fresh(PML[name]), own_rows(PARTS)
    with torch.no_grad():
        value = GlobalBatchLoss(loss)(net(batch["features"]), batch["labels"])
    return value.item(), value.requires_grad


@pytest.mark.parametrize("name", ["ArcFaceLoss", "SupConLoss", "NCALoss"])
def test_without_gradient_it_gives_the_value(pool: RankPool, name: str) -> None:
    truth = float(truth_of(PML[name])["value"])
    assert pool.run(2, evaluated, name) == [(pytest.approx(truth, rel=1e-9), False)] * 2


def labels_on_an_accelerator(divided: bool, bad_at: int, read: bool = False) -> list[float]:
    """Values of three calls as they are made where the batch is not on the CPU; one has a label out of range on rank 1."""
    torch.manual_seed(0)
    plain, found = pml.ArcFaceLoss(num_classes=4, embedding_size=3), []
    loss = ClassShardedLoss(plain) if divided else GlobalBatchLoss(plain)
    with mock.patch.object(inputs, "on_host", return_value=False):
        for step in range(3):
            labels = torch.tensor([0, 3]) + (step == bad_at) * dist.get_rank()
            found.append(float(loss(torch.randn(2, 3), labels).detach()))
    if read:
        with pytest.raises(InputError, match="labels of call 3") if dist.get_rank() else contextlib.nullcontext():
            read_late(loss)
    return found


def read_late(loss: nn.Module) -> None:
    for reading in inputs.readings_in(nn.ModuleDict({"loss": loss})):
        reading.raise_late()


@pytest.mark.parametrize("divided", [False, True])
def test_labels_out_of_range_in_the_last_call_on_an_accelerator(pool: RankPool, divided: bool) -> None:
    """They are read at the end (`test_refusals`: those of the calls before)."""
    for values in pool.run(2, labels_on_an_accelerator, divided, 2, read=True):
        assert all(value > 0 for value in values)


def test_nan_on_an_accelerator_is_an_error_one_call_later() -> None:
    """The strategy's loss, at its second call and later; what nobody called again is read at the end."""
    module = nn.ModuleDict({"loss": pml.NormalizedSoftmaxLoss(num_classes=4, embedding_size=3)})
    found = FoundLoss("loss", module["loss"], learnable=True, owned=True)
    patch = LossForwardPatch(found, refuse_nan=True)
    patch.install()
    rows, labels = torch.randn(2, 3), torch.tensor([0, 3])
    with mock.patch.object(inputs, "on_host", return_value=False):
        module["loss"](rows, labels)
        module["loss"](rows * torch.nan, labels)
        with pytest.raises(InputError, match=r"embeddings of call 2: expected numbers, got NaN"):
            module["loss"](rows, labels)
        module["loss"](rows, labels)
        patch.value_reading.raise_late()
        module["loss"](rows * torch.nan, labels)
        with pytest.raises(InputError, match="embeddings of call 5"):
            patch.value_reading.raise_late()


def break_before_the_gather() -> None:
    loss = GlobalBatchLoss(pml.SupConLoss())
    broken = RuntimeError("the device is lost") if dist.get_rank() == 1 else None
    with mock.patch.object(inputs, "check_inputs", side_effect=broken):
        loss(torch.randn(4, DIM), torch.tensor([0, 0, 1, 1]))


class Noisy(pml.SupConLoss):
    pass


DRAWS: dict[str, tuple[nn.Module, bool]] = {
    "deterministic": (pml.SupConLoss(), False),
    "all triplets": (pml.TripletMarginLoss(), False),
    "some triplets": (pml.TripletMarginLoss(triplets_per_anchor=3), True),
    "some triplets, inside": (pml.MultipleLosses([pml.SupConLoss(), pml.MarginLoss(triplets_per_anchor=1)]), True),
    "random classes": (pml.ManifoldLoss(4), True),
    "a memory": (pml.CrossBatchMemory(pml.NTXentLoss(), DIM), False),
    "a memory with a miner": (pml.CrossBatchMemory(pml.NTXentLoss(), DIM, miner=miners.TripletMarginMiner()), True),
    "a class that nobody knows": (Noisy(), True),
    "a part that nobody knows": (pml.SupConLoss(embedding_regularizer=Tempered()), True),
    "somebody else's": (nn.Dropout(), True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_generators_are_left_alone_by_losses_that_never_draw(name: str) -> None:
    loss, draws = DRAWS[name]
    assert may_draw(loss) == draws


class Constant(nn.Module):
    """Returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(2.0))

    def forward(self, rows: Tensor) -> Tensor:
        return self.value


@each_rank(2)
def test_a_loss_that_returns_its_parameter_gathers_no_hooks() -> None:
    loss = GlobalBatchLoss(Constant())
    for _ in range(3):
        value = loss(torch.ones(2, 2))
        value.backward()
    hooks = loss.loss.value._backward_hooks
    assert (value is loss.loss.value, float(loss.loss.value.grad), bool(hooks)) == (False, 3.0, False)
