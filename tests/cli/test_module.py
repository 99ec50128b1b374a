"""EmbeddingModule: the same training and the same metrics on 1 and 2 ranks, under Lightning's own trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from pytorch_metric_learning.losses import ArcFaceLoss, ContrastiveLoss, CrossBatchMemory, SupConLoss, TripletMarginLoss
from pytorch_metric_learning.miners import TripletMarginMiner
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.cli import DigitsDataModule, DigitsEncoder, EmbeddingModule, MLPEncoder
from lightning_ddp_losses.demo.evaluation import HeldOut, HeldOutRows, effective_rank, retrieval_metrics
from lightning_ddp_losses.testing import RankPool
from tests.cli.shipped_configs import fit_config
from tests.fits import make_trainer
from tests.oracle import assert_close
from tests.processes import ROOT

DINO = str(ROOT / "configs" / "digits_dino.yaml")


def train(steps: int) -> dict[str, Any]:
    """Two short epochs in double precision, `use_distributed_sampler` left at Lightning's default."""
    seed_everything(0, verbose=False)
    data = DigitsDataModule(batch_size=66, held_out=0.1)
    module = EmbeddingModule(DigitsEncoder(16, 4), ArcFaceLoss(10, 16, scale=16), lr=3e-3, loss_lr=1e-2)
    options = {"use_distributed_sampler": True, "precision": "64-true", "limit_train_batches": steps}
    trainer = make_trainer("ddp_losses", max_epochs=2, **options)
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    trainer.test(module, datamodule=data, verbose=False)
    tested = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test_")}
    trainer.predict(module, datamodule=data)
    return {"metrics": metrics, "parameters": parameters, "test": tested, "predicted": module.held_out}


def test_any_number_of_ranks_trains_and_measures_like_one_in_float64(pool: RankPool) -> None:
    (one,) = pool.run(1, train, 6)
    assert set(one["metrics"]) == {"train_loss", "val_loss", "precision_at_1", "r_precision", "map_at_r"}
    assert one["test"] == pytest.approx(
        {"test_loss": one["metrics"]["val_loss"]}
        | {f"test_{name}": one["metrics"][name] for name in ("precision_at_1", "r_precision", "map_at_r")}
    )
    for world_size in (2, 3):
        for rank, many in enumerate(pool.run(world_size, train, 6)):
            assert many["metrics"] == pytest.approx(one["metrics"], rel=1e-9)
            assert many["test"] == pytest.approx(one["test"], rel=1e-9)
            for name, parameter in one["parameters"].items():
                assert parameter.dtype == torch.float64
                torch.testing.assert_close(many["parameters"][name], parameter, rtol=1e-9, atol=1e-12)
            if rank == 0:
                torch.testing.assert_close(
                    many["predicted"].embeddings, one["predicted"].embeddings, rtol=1e-9, atol=1e-12
                )
                assert torch.equal(many["predicted"].labels, one["predicted"].labels)


def train_global(kind: str) -> tuple[dict[str, float], dict[str, torch.Tensor], list[float]]:
    """Two short epochs of a loss over the global batch; the memory holds one batch and a part of another."""
    seed_everything(0, verbose=False)
    triplets = TripletMarginMiner(0.2, type_of_triplets="semihard")
    loss, miner = {
        "wrapped": (GlobalBatchLoss(SupConLoss()), None),
        "by the strategy": (SupConLoss(), None),
        "mined": (GlobalBatchLoss(TripletMarginLoss(0.2)), GlobalBatchMiner(triplets)),
        "memory": (GlobalBatchLoss(CrossBatchMemory(ContrastiveLoss(0, 1), 16, memory_size=100)), None),
    }[kind]
    data = DigitsDataModule(batch_size=60, held_out=0.06, m_per_class=6)
    module = EmbeddingModule(DigitsEncoder(16, 4), loss, miner, lr=3e-3)
    strategy = DDPLossStrategy(global_batch="auto" if kind == "by the strategy" else False)
    reduced: list[float] = []
    reduce = strategy.reduce

    def noting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():  # lengths and counts are whole numbers
            reduced.append(float(tensor))
        return reduce(tensor, *args, **kwargs)

    strategy.reduce = noting  # type: ignore[method-assign]
    trainer = make_trainer(strategy, max_epochs=2, limit_train_batches=5, precision="64-true")
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, {name: value.clone() for name, value in module.state_dict().items()}, reduced


@pytest.mark.parametrize("kind", ["wrapped", "mined", "memory"])
def test_a_global_loss_trains_and_measures_like_one_process(pool: RankPool, kind: str) -> None:
    ((one, state, _),) = pool.run(1, train_global, kind)
    assert one["val_loss"] > 0
    if kind == "memory":  # 10 batches of 60 rows in a ring of 100, and no held-out row among them
        assert state["loss.queue_position.position"].tolist() == [0, 1]
    for many, other, reduced in pool.run(3, train_global, kind):
        assert many == pytest.approx(one, rel=1e-9)
        assert len(reduced) == 2  # train_loss, once an epoch; the other numbers are global already
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-8, atol=1e-11)


def test_the_strategys_global_batch_is_the_wrapper(pool: RankPool) -> None:
    by_strategy, wrapped = (pool.run(2, train_global, kind)[0][0] for kind in ("by the strategy", "wrapped"))
    assert by_strategy == pytest.approx(wrapped, rel=1e-9)


def test_held_out_rows_leave_a_memory_as_it_was() -> None:
    memory = CrossBatchMemory(ContrastiveLoss(), 4, memory_size=20)
    module = EmbeddingModule(torch.nn.Identity(), memory)
    x, labels = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    module.compute_loss(x, labels)
    before = memory.embedding_memory.clone()
    module.on_validation_epoch_start()
    module.validation_step((-x, labels), 0)
    assert memory.queue_idx == 12
    assert torch.equal(memory.embedding_memory, before)
    assert module.rows.loss_sum > 0
    assert set(module.state_dict()) == {"loss.embedding_memory", "loss.label_memory"}


def validate_padded(with_indices: bool, evaluation: Any = "padded") -> list[str]:
    """Validate 13 rows on 2 ranks with the sampler that Lightning puts in, or with ours."""
    import warnings

    x, labels = torch.arange(13.0)[:, None].expand(13, 4).contiguous(), torch.arange(13) % 3
    dataset = TensorDataset(x, labels, *([torch.arange(13)] if with_indices else []))
    module = EmbeddingModule(MLPEncoder(4, 3), ArcFaceLoss(3, 3))
    trainer = make_trainer(DDPLossStrategy(evaluation=evaluation), use_distributed_sampler=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(module, DataLoader(dataset, batch_size=4), verbose=False)
    if trainer.is_global_zero:
        assert module.held_out is not None
        assert len(module.held_out.labels) == (13 if with_indices or evaluation == "exact" else 14)
        if with_indices:
            assert torch.equal(module.held_out.labels, labels)
    return [str(warning.message) for warning in caught if warning.category is not PossibleUserWarning]


def test_rows_that_a_foreign_sampler_repeats_are_dropped_or_reported(pool: RankPool) -> None:
    said, _ = pool.run(2, validate_padded, False)
    assert any("the distributed sampler repeats: expected 0, got 1" in message for message in said)
    silent, _ = pool.run(2, validate_padded, True)
    assert not any("repeats" in message for message in silent)
    silent, _ = pool.run(2, validate_padded, False, "exact")
    assert not any("repeats" in message for message in silent)


def test_optimizer_has_the_parameters_of_encoder_and_loss_each_once_at_its_own_rate() -> None:
    loss = ArcFaceLoss(10, 16)
    encoder = DigitsEncoder(16)
    groups = EmbeddingModule(encoder, loss, lr=0.1, loss_lr=0.2).configure_optimizers().param_groups
    assert [(group["name"], group["lr"]) for group in groups] == [("encoder", 0.1), ("loss", 0.2)]
    assert groups[1]["params"] == [loss.W]
    groups = EmbeddingModule(encoder, loss, lr=0.1).configure_optimizers().param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.1]
    encoder.proxies = loss.W  # one parameter, two owners
    assert len(EmbeddingModule(encoder, loss).configure_optimizers().param_groups) == 1
    assert len(EmbeddingModule(encoder, TripletMarginLoss()).configure_optimizers().param_groups) == 1


def test_miner_tuples_reach_the_loss() -> None:
    module = EmbeddingModule(torch.nn.Identity(), TripletMarginLoss(), TripletMarginMiner(type_of_triplets="hard"))
    embeddings, labels = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    expected = module.loss(embeddings, labels, module.miner(embeddings, labels))
    assert module.compute_loss(embeddings, labels) == expected
    assert expected != module.loss(embeddings, labels)


def test_rows_of_any_shape_are_embedded() -> None:
    assert MLPEncoder(12, 7)(torch.zeros(2, 3, 4)).shape == (2, 7)


@pytest.mark.parametrize("targets", ["center", "sinkhorn"])
def test_self_distillation_on_ranks_trains_as_one_process(pool: RankPool, targets: str) -> None:
    options = ["--model.init_args.targets", targets, "--trainer.max_epochs", "2"]
    limits = {"limit_train_batches": 4, "max_epochs": 2}
    ((one, weights),) = pool.run(1, fit_config, DINO, options, **limits)
    assert set(one) == {"train_loss", "precision_at_1", "r_precision", "map_at_r", "effective_rank"}
    for metrics, state in pool.run(2, fit_config, DINO, options, **limits):
        assert metrics == pytest.approx(one, rel=1e-9)
        assert_close(state, weights, rtol=1e-8)


def test_the_rank_tells_spread_from_collapse() -> None:
    rows = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    spread, collapsed = effective_rank(rows), effective_rank(rows * torch.tensor([1, 1e-3, 1e-3, 1e-3]))
    assert spread == pytest.approx(4, abs=0.1)
    assert collapsed == pytest.approx(1, abs=0.05)


# Metrics of the global held-out set: against a naive oracle, and the same on any number of ranks.


def held_out_set() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (53,), generator=generator)
    return torch.randn(53, 6, dtype=torch.float64, generator=generator) + labels[:, None], labels


def naive(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """One query at a time, straight from the definitions."""
    similarity = torch.nn.functional.normalize(embeddings) @ torch.nn.functional.normalize(embeddings).T
    first, precision, mean_average = [], [], []
    for query in range(len(labels)):
        others = [row for row in similarity[query].argsort(descending=True).tolist() if row != query]
        r = int((labels == labels[query]).sum()) - 1
        if r:
            hits = [float(labels[row] == labels[query]) for row in others]
            first.append(hits[0])
            precision.append(sum(hits[:r]) / r)
            mean_average.append(sum(hits[k] * sum(hits[: k + 1]) / (k + 1) for k in range(r)) / r)
    means = [sum(values) / len(values) for values in (first, precision, mean_average)]
    return dict(zip(("precision_at_1", "r_precision", "map_at_r"), means, strict=True))


def test_metrics_are_those_of_the_definitions() -> None:
    embeddings, labels = held_out_set()
    labels[0] = 2**40 + 1  # alone in its class, and beyond what float32 can tell apart
    labels[1:3] = 2**40
    assert retrieval_metrics(embeddings, labels) == pytest.approx(naive(embeddings, labels), abs=1e-12)


def test_float64_neighbours_that_float32_cannot_tell_apart_stay_in_order() -> None:
    angles = torch.tensor([0.0, 1.0, 1.0 + 1e-9, -1.0 - 2e-9], dtype=torch.float64)
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    labels = torch.tensor([0, 0, 1, 1])
    assert retrieval_metrics(embeddings, labels) == pytest.approx(naive(embeddings, labels), abs=1e-12)


def test_metrics_are_nan_where_no_class_has_two_rows() -> None:
    embeddings, _ = held_out_set()
    assert all(math.isnan(value) for value in retrieval_metrics(embeddings, torch.arange(53)).values())


def gather_shards(sizes: list[int], repeat: int) -> HeldOut:
    """Deal the rows out by `sizes`, two batches on each rank; the first `repeat` rows come to the last rank a second time."""
    embeddings, labels = held_out_set()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    positions = list(order.split(sizes))
    positions[-1] = torch.cat([positions[-1], order[:repeat]])
    rows = HeldOutRows()
    for batch in positions[dist.get_rank()].tensor_split(2):
        rows.add(embeddings[batch], labels[batch], batch, loss=embeddings[batch].square().mean())
    return rows.gather()


@pytest.mark.parametrize("sizes", [[53], [30, 23], [2, 49, 2]], ids=str)
@pytest.mark.parametrize("repeat", [0, 2])
def test_uneven_shards_give_the_one_process_set(pool: RankPool, sizes: list[int], repeat: int) -> None:
    embeddings, labels = held_out_set()
    for joined in pool.run(len(sizes), gather_shards, sizes, repeat):
        torch.testing.assert_close(joined.embeddings, embeddings, rtol=0, atol=0)
        torch.testing.assert_close(joined.labels, labels, rtol=0, atol=0)
        if not repeat:
            assert joined.loss == pytest.approx(float(embeddings.square().mean()), rel=1e-12)
