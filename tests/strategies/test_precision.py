"""Numerics never go down: what a loss computes in, what its weight and optimizer state are, under each precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss
from lightning_ddp_losses.losses import global_batch
from lightning_ddp_losses.strategies import register_loss_type
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.doors import ProductForm, choose_form, towers
from tests.fits import Trained, listed, make_trainer, scale_of, scaled
from tests.oracle import assert_close, batches, cuts, differences, own
from tests.strategies.jobs import OPTIMIZERS, TASK, strategy_of

PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"]
# of a float32 loss: the dtype of its weight, and the one it computes in, under each precision
LOSS_DTYPE = dict.fromkeys(PRECISIONS, torch.float32) | {"64-true": torch.float64}


@register_loss_type
class Records(nn.Module):  # a softmax loss that writes down what it is given and how
    def __init__(self, learnable: bool = True) -> None:
        super().__init__()
        torch.manual_seed(6)
        weight = torch.randn(TASK.dim, TASK.classes)
        self.W = nn.Parameter(weight) if learnable else None
        self.register_buffer("weight", weight)
        self.seen: set[Any] = set()

    def forward(self, embeddings: Tensor, labels: Tensor, weights: Tensor, *, index: Tensor) -> Tensor:
        weight = self.weight.to(embeddings.dtype) if self.W is None else self.W
        logits = embeddings @ weight
        dtypes = [tensor.dtype for tensor in (embeddings, weight, logits, weights, labels, index)]
        self.seen.add((*dtypes, torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
        return nn.functional.cross_entropy(logits, labels, reduction="none").mul(weights).mean()


class OneLayer(Trained):  # whose rows are converted to its own dtype
    def build(self) -> None:
        self.encoder = nn.Linear(TASK.features, TASK.dim)

    def encode(self, features: Tensor) -> Tensor:
        rows: Tensor = self.encoder(features.to(self.encoder.weight.dtype))
        return rows


class Recording(OneLayer):
    def __init__(self, learnable: bool = True, optimizer: str = "adam") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.loss = Records(learnable)
        self.encoded: set[torch.dtype] = set()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        embeddings = self.encode(batch[0])
        self.encoded.add(embeddings.dtype)
        rows = torch.arange(len(embeddings), dtype=torch.int32)
        return self.loss(embeddings, batch[1], weights=torch.ones(len(embeddings)), index=rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def data(dtype: torch.dtype = torch.float32) -> DataLoader:
    part = cuts(TASK.rows, dist.get_world_size())[dist.get_rank()]
    return listed([(x[part].to(dtype), y[part]) for x, y in batches(TASK)])


def record(precision: str, learnable: bool) -> tuple[Any, ...]:
    module = Recording(learnable)
    trainer = make_trainer(strategy_of({}), precision=precision)
    trainer.fit(module, data())
    state = {name: {s.dtype for s in trainer.optimizers[0].state[p].values() if s.ndim} for name, p in named(module)}
    return module.loss.seen, module.encoded, {name: p.dtype for name, p in named(module)}, state


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


@pytest.mark.parametrize("learnable", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_loss_computes_in(pool: RankPool, precision: str, learnable: bool) -> None:
    for seen, encoded, dtypes, states in pool.run(2, record, precision, learnable):
        ((embeddings, weight, logits, weights, labels, index, autocast, default),) = seen
        assert embeddings == weight == logits == weights == LOSS_DTYPE[precision]
        assert (labels, index, autocast) == (torch.int64, torch.int32, False)
        assert default in (torch.float32, torch.float64)
        if learnable:
            assert dtypes["loss.W"] == LOSS_DTYPE[precision]
            assert states["loss.W"] == {LOSS_DTYPE[precision]}
        halves = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-true": torch.float16}
        assert encoded == {halves.get(precision, LOSS_DTYPE[precision])}, "the precision itself did nothing"


class Learnable(OneLayer):
    def __init__(self, loss: str = "ArcFaceLoss", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.loss = getattr(pml, loss)(num_classes=TASK.classes, embedding_size=TASK.dim)
        self.to(dtype)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.loss(self.encode(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["adam"](self.parameters(), lr=self.lr)

    lr = 0.05


class Still(Learnable):
    lr = 0.0


def fit_precision(make: Any, precision: str, strategy: Any = None) -> dict[str, Tensor]:
    module = make()
    make_trainer(strategy_of(strategy or {}), precision=precision).fit(module, data())
    return dict(module.state_dict())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loss", ["ArcFaceLoss", "SoftTripleLoss", "ProxyNCALoss", "SubCenterArcFaceLoss"])
def test_losses_of_pml_keep_dtype_and_bits(pool: RankPool, loss: str, precision: str) -> None:
    before = Still(loss).state_dict()
    for state in pool.run(2, fit_precision, partial(Still, loss), precision):
        for name in (name for name in before if name.startswith("loss.")):
            assert state[name].dtype == LOSS_DTYPE[precision]
            assert torch.equal(state[name], before[name].to(LOSS_DTYPE[precision])), "restored from before the halving"


def fit_and_resume(precision: str, file: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters that are saved, and those of a run that is resumed for no step more."""
    trained, resumed = Learnable(), Learnable()
    trainer = make_trainer(strategy_of({}), precision=precision)
    trainer.fit(trained, data())
    trainer.save_checkpoint(file)
    make_trainer(strategy_of({}), precision=precision).fit(resumed, data(), ckpt_path=file)
    return dict(trained.state_dict()), dict(resumed.state_dict())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_begins_with_the_bits_that_were_saved(pool: RankPool, tmp_path: Path, precision: str) -> None:
    for trained, resumed in pool.run(2, fit_and_resume, precision, str(tmp_path / "trained.ckpt")):
        assert {name: t.dtype for name, t in resumed.items()} == {name: t.dtype for name, t in trained.items()}
        assert_close(resumed, trained, rtol=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("loss", ["ArcFaceLoss", "LargeMarginSoftmaxLoss", "SphereFaceLoss", "NormalizedSoftmaxLoss"])
def test_half_precision_trains_near_full_precision_and_equally_on_all_ranks(
    pool: RankPool, loss: str, precision: str
) -> None:
    full = pool.run(1, fit_precision, partial(Learnable, loss), "32-true")[0]
    for world_size in (1, 2, 3):
        states = pool.run(world_size, fit_precision, partial(Learnable, loss), precision)
        assert differences(states[0], full)["loss.W"] < 0.1
        assert_all_close(states[1:], states[0], rtol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_float64_stays_float64(pool: RankPool, world_size: int) -> None:
    make = partial(Learnable, "CosFaceLoss", torch.float64)
    alone = pool.run(1, fit_precision, make, "32-true", "ddp")[0]
    for state in pool.run(world_size, fit_precision, make, "32-true"):
        assert {tensor.dtype for tensor in state.values()} == {torch.float64}
        assert_close(state, alone)
    plain = partial(Learnable, "CosFaceLoss")
    double = pool.run(1, fit_precision, plain, "64-true", "ddp")[0]
    assert_all_close(pool.run(world_size, fit_precision, plain, "64-true"), double)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_that_the_user_made_half_computes_in_float32(pool: RankPool, dtype: torch.dtype) -> None:
    for seen, kept in pool.run(2, record_half, dtype):
        ((embeddings, weight, logits, *_),) = seen
        assert embeddings == weight == logits == torch.float32
        assert kept == dtype, "the parameter is the user's"


def record_half(dtype: torch.dtype) -> tuple[set[Any], torch.dtype]:
    module = Recording(optimizer="sgd")  # Adam's epsilon is 0 in float16
    module.loss.to(dtype)
    make_trainer(strategy_of({})).fit(module, data())
    return module.loss.seen, module.loss.W.dtype


class Overflows(Learnable):  # in batch 1 the inputs of the last rank are more than a half can hold
    lr = 0.01

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        spoilt = index == 1 and self.global_rank == self.trainer.world_size - 1
        return super().training_step((batch[0] * 1e6 if spoilt else batch[0], batch[1]), index)


def fit_scaled(make: Any) -> tuple[dict[str, Tensor], float, torch.dtype, int]:
    """The state, the scale, the dtype of Adam's memory of W and the steps that Adam took, under float16 with a scaler."""
    module = make()
    trainer = make_trainer(strategy_of({}), plugins=[scaled()])
    trainer.fit(module, data())
    state = trainer.optimizers[0].state[module.loss.W]
    return dict(module.state_dict()), scale_of(trainer), state["exp_avg"].dtype, int(state["step"])


@pytest.mark.parametrize("make", [Learnable, Overflows])
def test_a_gradient_scaler_skips_a_step_on_all_ranks_or_on_none(pool: RankPool, make: Any) -> None:
    skipped = int(make is Overflows)
    alone = pool.run(1, fit_scaled, make)[0]
    for world_size in (2, 3):
        results = pool.run(world_size, fit_scaled, make)
        for state, scale, dtype, steps in results:
            assert (scale, dtype) == (2.0**4 / 2**skipped, torch.float32)
            assert steps == alone[3] == len(batches(TASK)) - skipped
            assert_close(state, results[0][0], rtol=0)
            assert_close(state, alone[0], rtol=0.05)


class Manually(Learnable):
    """Manual optimisation: a global loss for the encoder alone, then a learnable one for both, an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pairs = GlobalBatchLoss(pml.SupConLoss())

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, labels = batch
        encoder, loss = self.optimizers()
        encoder.zero_grad()
        self.manual_backward(self.pairs(self.encoder(features), labels))
        encoder.step()
        encoder.zero_grad()
        loss.zero_grad()
        self.manual_backward(self.loss(self.encoder(features), labels))
        self.clip_gradients(loss, 0.5, "norm")
        encoder.step()
        loss.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.encoder, self.loss)]


def test_manual_optimisation_under_bf16(pool: RankPool) -> None:
    """As far from full precision as the halved encoder is, in one process as on ranks; equal bits on all ranks."""
    before = Manually().state_dict()
    full = moved(pool.run(1, fit_precision, Manually, "32-true", "ddp_find_unused_parameters_true")[0], before)
    for world_size in (1, 2, 3):
        assert_close(moved(pool.run(world_size, fit_precision, Manually, "32-true")[0], before), full, rtol=1e-4)
        states = pool.run(world_size, fit_precision, Manually, "bf16-mixed")
        assert {tensor.dtype for tensor in states[0].values()} == {torch.float32}
        assert_close(moved(states[0], before), full, rtol=0.05)
        assert_all_close(states[1:], states[0], rtol=0)


def moved(state: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    """What training has changed."""
    return {name: tensor - before[name] for name, tensor in state.items()}


SEVEN_CLASSES, DIM = 7, 16
ROWS_OF_RANKS = [5, 0, 8]
OURS: dict[str, tuple[Any, Callable[[], nn.Module]]] = {
    "tiles": (GlobalBatchLoss, pml.SupConLoss),
    "rows of all ranks": (GlobalBatchLoss, partial(pml.SoftTripleLoss, SEVEN_CLASSES, DIM)),
    "elements": (GlobalBatchLoss, partial(pml.ArcFaceLoss, SEVEN_CLASSES, DIM)),
    "class-sharded": (ClassShardedLoss, partial(pml.ArcFaceLoss, SEVEN_CLASSES, DIM)),
}


class GlobalInHalf(OneLayer):  # keeps what its loss over all ranks is given, and what comes back
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Linear(TASK.features, DIM)
        over_all_ranks, make = OURS[name]
        self.loss = over_all_ranks(make())

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        self.embeddings = self.encode(batch[0])
        self.embeddings.retain_grad()
        self.value: Tensor = self.loss(self.embeddings, batch[1])
        return self.value

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.grads = [p.grad.clone() for p in self.loss.parameters() if p.grad is not None]


def half_precision_step(name: str, precision: str) -> dict[str, Any]:
    part = own(ROWS_OF_RANKS)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(ROWS_OF_RANKS), TASK.features, generator=generator)
    module = GlobalInHalf(name)
    batch = (rows[part], (torch.arange(len(rows)) % SEVEN_CLASSES)[part])
    make_trainer(strategy_of({}), precision=precision).fit(module, listed([batch]))
    embeddings = module.embeddings
    return {
        "embeddings": embeddings.detach(),
        "back": embeddings.grad,
        "value": module.value.detach(),
        "grads": module.grads,
        "labels": batch[1],
    }


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", OURS)
def test_our_losses_compute_in_full_precision_on_narrow_rows(pool: RankPool, name: str, precision: str) -> None:
    ranks = pool.run(3, half_precision_step, name, precision)
    # one process, in float64, on the rows as the encoder gave them
    rows = torch.cat([rank["embeddings"] for rank in ranks])
    assert rows.dtype == torch.bfloat16, "the precision itself did nothing"
    leaf = rows.double().requires_grad_()
    torch.manual_seed(1)
    nn.Linear(TASK.features, DIM)
    loss = OURS[name][1]().double()
    expected = loss(leaf, torch.cat([rank["labels"] for rank in ranks]))
    expected.backward()
    for number, rank in enumerate(ranks):
        assert rank["value"].dtype == torch.float32
        torch.testing.assert_close(rank["value"].double(), expected.detach(), rtol=1e-5, atol=0)
        # DDP takes the mean over ranks; what goes back into bfloat16 rows is rounded once
        assert leaf.grad is not None
        torch.testing.assert_close(
            rank["back"].double() / 3, leaf.grad[own(ROWS_OF_RANKS, number)], rtol=2**-8, atol=1e-6
        )
    # each rank has the gradient of the whole weight, or of its classes
    for number, parameter in enumerate(loss.parameters()):
        whole = parameter.grad
        assert whole is not None
        found = [rank["grads"][number].double() for rank in ranks]
        if name == "class-sharded":
            found = [torch.cat(found, dim=1)]
        for grad in found:
            torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-6)


# `products="auto"` under the strategy: tensor cores where the encoder gives bfloat16, float32 where its rows are that.


class Chooses(OneLayer):
    """Two losses that choose by the dtype of their rows; ``wide``: these are float32 whatever the encoder gives."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.of_pairs = GlobalBatchLoss(pml.SupConLoss(), mode="rows", products="auto")
        self.of_towers = ClipLoss(products="auto")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        rows = self.encoder(batch[0])
        rows = rows.float() if self.wide else rows
        value: Tensor = self.of_pairs(rows, batch[1]) + self.of_towers(rows, rows.flip(1))
        return value


def forms(precision: str, wide: bool) -> dict[str, set[str]]:
    """What each loss chose in a fit."""
    found: dict[str, set[str]] = {}

    def noting(title: str, *args: Any) -> ProductForm:
        form = choose_form(title, *args)
        found.setdefault(title.partition("(")[0], set()).add(form)
        return form

    patched = mock.patch.object
    with patched(global_batch, "choose_form", noting), patched(towers, "choose_form", noting):
        make_trainer(strategy_of({}), precision=precision).fit(Chooses(wide), data())
    return found


@pytest.mark.parametrize(
    ("precision", "wide", "form"),
    [("bf16-mixed", False, "bf16"), ("bf16-mixed", True, "float32"), ("32-true", False, "float32")],
)
def test_auto_follows_what_the_encoder_gives(pool: RankPool, precision: str, wide: bool, form: str) -> None:
    for found in pool.run(2, forms, precision, wide):
        assert found == {"GlobalBatchLoss": {form}, "ClipLoss": {form}}
