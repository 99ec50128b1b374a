"""The oracle against itself, and plain Lightning DDP in the pool against it: what we measure with must be right."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer
from tests.oracle import Encoder, Found, Place, Task, assert_close, batches, cuts, differences, parity, train

TASK = Task()
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Encoder(TASK).double()
        self.loss = ArcFaceLoss(TASK.classes, TASK.dim).double()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.loss(self.encoder(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def fit_plain(even: bool, accumulate: int) -> tuple[dict[str, Tensor], bool]:
    part = cuts(TASK.rows, dist.get_world_size(), even=even)[dist.get_rank()]
    data = [(features[part], labels[part]) for features, labels in batches(TASK)]
    module = Plain()
    trainer = make_trainer("ddp", accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    trainer.fit(module, DataLoader(data, batch_size=None))
    dist.barrier()  # Lightning must leave the pool's group alone
    return dict(module.state_dict()), dist.is_initialized()


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lightning_ddp_in_the_pool_follows_the_oracle(pool: RankPool, world_size: int, even: bool) -> None:
    """The rule per rank is DDP's; plain DDP is right while the loss is a registered submodule that runs on each step."""
    module = Plain()
    ranks = cuts(TASK.rows, world_size, even=even)
    train(module.encoder, module.loss, batches(TASK), sgd, clip_norm=0.5, accumulate=2, ranks=ranks)
    for state, alive in pool.run(world_size, fit_plain, even, 2):
        assert alive
        assert_close(state, module.state_dict())


def test_whole_and_per_rank_agree_on_even_slices_only() -> None:
    def trained(**rule: object) -> dict[str, Tensor]:
        module = Plain()
        train(module.encoder, module.loss, batches(TASK), sgd, **rule)
        return dict(module.state_dict())

    whole = trained()
    assert_close(trained(ranks=cuts(TASK.rows, 3)), whole, rtol=1e-12)
    assert max(differences(trained(ranks=cuts(TASK.rows, 3, even=False)), whole).values()) > 1e-3


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_cuts_cover_all_rows_once(world_size: int, even: bool) -> None:
    parts = cuts(12, world_size, even=even)
    assert [row for part in parts for row in range(12)[part]] == list(range(12))
    assert len({part.stop - part.start for part in parts}) == (1 if even else world_size)


def test_batches_depend_on_the_seed_alone() -> None:
    first, again, other = batches(TASK), batches(TASK), batches(Task(seed=1))
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    assert not torch.equal(first[0][0], other[0][0])


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (2 * torch.ones(3), torch.zeros(2), "norm ratio 2"),
        (torch.ones(3), None, "names differ"),
        (torch.ones(3, 1), torch.zeros(2), "shapes"),
        (torch.ones(3), torch.tensor([0.0, float("nan")]), "b: relative difference inf"),
    ],
)
def test_assert_close_tells_what_is_off(a: Tensor, b: Tensor | None, words: str) -> None:
    truth = {"a": torch.ones(3), "b": torch.zeros(2)}
    assert_close({"b": torch.zeros(2), "a": torch.ones(3)}, truth)
    with pytest.raises(AssertionError, match=words):
        assert_close({"a": a} | ({} if b is None else {"b": b}), truth)


def test_encoder_treats_rows_one_by_one() -> None:
    encoder = nn.Module.double(Encoder(TASK))
    features = batches(TASK)[0][0]
    assert_close({"y": encoder(features[:5])}, {"y": encoder(features)[:5]}, rtol=1e-14)


def sum_of_squares(place: Place, wrong: str) -> Found:
    """The sum over all ranks' rows, with what is wrong on the last rank."""
    rows = place.leaf("x", torch.arange(1.0, 7.0, dtype=torch.float64))
    found = place.graded(rows.square().sum() * place.world_size)
    value = found["value"] / place.world_size
    if not place.alone:
        dist.all_reduce(value)
    if place.rank == len(place.sizes) - 1:
        value += wrong == "the value of a rank"
        found["rows x"] *= 1 + 1e-8 * (wrong == "a gradient")
        if wrong == "a name":
            found["more"] = value
    return found | {"value": value}


@pytest.mark.parametrize("sizes", [[6], [2, 4], [1, 0, 5]], ids=str)
def test_parity_is_silent_where_ranks_are_one_process(pool: RankPool, sizes: list[int]) -> None:
    parity(pool, sum_of_squares, sizes, cases=["", "nothing"])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("the value of a rank", "ranks return"),
        ("a gradient", "rows x: relative difference"),
        ("a name", "gradients on some ranks only"),
    ],
)
def test_parity_tells_what_is_wrong_and_of_which_case(pool: RankPool, wrong: str, words: str) -> None:
    with pytest.raises(AssertionError, match=f"^{wrong}: .*{words}"):
        parity(pool, sum_of_squares, [2, 4], cases=["", wrong])
