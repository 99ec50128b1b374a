"""Training loops that are wrong in one known way each, and the same loops mended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_ddp_losses.collectives import all_gather_with_grad

ROWS = 12
Batch = dict[str, Tensor]


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def batches(count: int = 1) -> list[Batch]:
    """Global batches; `keep` leaves out more rows of the last ranks."""
    torch.manual_seed(1)
    keep = torch.tensor([row in (0, 1, 2, 3, 4, 6, 8) for row in range(ROWS)])
    return [
        {"x": torch.randn(ROWS, 3), "y": torch.randn(ROWS, 2), "keep": keep, "w": torch.rand(ROWS, 2)}
        for _ in range(count)
    ]


def same_on_every_rank(rank: int, ranks: int) -> list[Batch]:
    return batches()


def half_repeated(rank: int, ranks: int) -> list[Batch]:
    (whole,) = batches()
    start = 2 * rank  # four rows each: two of them the next rank's
    return [{name: rows[start : start + 4] for name, rows in whole.items()}]


def divided(rank: int, ranks: int) -> list[Batch]:
    (whole,) = batches()
    return [{name: rows[4 * rank : 4 * rank + 4] for name, rows in whole.items()}]


# ---------------------------------------------------------------------- models


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def encoder() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), sgd


def with_dropout() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)), sgd


def with_norm() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), sgd


class ProxyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(3, 2))

    def forward(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        return ((embeddings @ self.proxies.T).logsumexp(1) * weights[:, 0]).mean()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.loss = nn.Linear(3, 2), ProxyLoss()

    def forward(self, batch: Batch, gather: Callable[[Tensor], Tensor]) -> Tensor:
        return self.loss(gather(self.encoder(batch["x"])), gather(batch["w"]))


def with_loss() -> Any:
    return WithLoss(), sgd


class Centred(nn.Module):
    """Keeps a centre that is a moving mean of the rows it has seen."""

    def __init__(self, synchronise: bool) -> None:
        super().__init__()
        self.linear, self.synchronise = nn.Linear(3, 2), synchronise
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0)
        if self.synchronise and world() > 1:
            dist.all_reduce(mean)
            mean /= world()
        self.centre = 0.5 * self.centre + mean
        return y - self.centre


def centred() -> Any:
    return Centred(synchronise=False), sgd


def together() -> Any:
    return Centred(synchronise=True), sgd


# ---------------------------------------------------------------------- gathers


def no_gather(rows: Tensor) -> Tensor:
    return rows


def gather_cut(rows: Tensor) -> Tensor:
    """Keep the graph of this rank's rows only."""
    if world() == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(parts, rows.detach().contiguous())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def gather_without_graph(rows: Tensor) -> Tensor:
    return gather_cut(rows.detach()) if world() > 1 else rows


def gather(rows: Tensor) -> Tensor:
    return all_gather_with_grad(rows) if world() > 1 else rows


class SummedTwice(torch.autograd.Function):
    """An all-reduce whose backward sums over ranks again."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


# ---------------------------------------------------------------------- steps


def regression(model: Any, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def summed(model: Any, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().sum()


def contrastive(rows: Tensor, targets: Tensor) -> Tensor:
    return ((rows @ targets.T) / 4).logsumexp(1).mean() - (rows * targets).mean()


def local_negatives(model: Any, batch: Batch) -> Tensor:
    return contrastive(model(batch["x"]), batch["y"])


def gathered_cut(model: Any, batch: Batch) -> Tensor:
    return contrastive(gather_cut(model(batch["x"])), gather_cut(batch["y"]))


def gathered(model: Any, batch: Batch) -> Tensor:
    return contrastive(gather(model(batch["x"])), gather(batch["y"]))


def gathered_times_w(model: Any, batch: Batch) -> Tensor:
    return gathered(model, batch) * world()


def rows_by_rank(model: Any, batch: Batch, first: int = 0) -> Tensor:
    """Weigh rows by their place, beginning with one of them."""
    rows, targets = gather(model(batch["x"])).roll(-first, 0), gather(batch["y"]).roll(-first, 0)
    return (torch.arange(1.0, len(rows) + 1) * (rows - targets).square().sum(1)).mean()


def own_rows_first(model: Any, batch: Batch) -> Tensor:
    return rows_by_rank(model, batch, dist.get_rank() * len(batch["x"]) if world() > 1 else 0)


def pml_wrapper(model: Any, batch: Batch) -> Tensor:
    """Gather this rank's rows with graph and multiply by W, which the loss's own weights get too."""
    return model(batch, gather_cut) * world()


def exact_loss(model: Any, batch: Batch) -> Tensor:
    return model(batch, gather)


def gathered_bare(model: Any, batch: Batch) -> Tensor:
    return model(batch, gather_without_graph)


def cut_beside(model: Any, batch: Batch) -> Tensor:
    return gathered_cut(model, batch) + regression(model, batch)


def right_beside(model: Any, batch: Batch) -> Tensor:
    return gathered(model, batch) + regression(model, batch)


def token_mean(model: Any, batch: Batch) -> Tensor:
    off = (model(batch["x"]) - batch["y"]).square().sum(1)
    return off[batch["keep"]].mean()


def kept_apart() -> dict[str, Any]:
    """Two micro-batches, of which the second keeps more rows of the last ranks."""
    first, second = batches(2)
    return {"batches": [first, second | {"keep": second["keep"].flip(0)}], "accumulate": 2}


def window_token_mean(model: Any, optimizer: Any, micro_batches: list[Batch]) -> None:
    """A loop that divides by the kept rows of the window, over all ranks."""
    count = sum(batch["keep"].sum() for batch in micro_batches)
    if world() > 1:
        dist.all_reduce(count)
    optimizer.zero_grad()
    for batch in micro_batches:
        off = (model(batch["x"]) - batch["y"]).square().sum(1)
        (off[batch["keep"]].sum() * world() / count).backward()
    optimizer.step()


def global_token_mean(model: Any, batch: Batch) -> Tensor:
    off = (model(batch["x"]) - batch["y"]).square().sum(1)
    count = batch["keep"].sum().to(off)
    if world() > 1:
        dist.all_reduce(count)
    return off[batch["keep"]].sum() * world() / count


def moment_without_gradient(model: Any, batch: Batch) -> Tensor:
    mean = model(batch["x"]).mean(0)
    if world() > 1:
        dist.all_reduce(mean.data)
        mean = mean / world()
    return mean.square().sum()


def moment_summed_again(model: Any, batch: Batch) -> Tensor:
    """The backward of the all-reduce sums, and the loss is multiplied by W as if nobody had."""
    mean = model(batch["x"]).mean(0)
    if world() > 1:
        mean = SummedTwice.apply(mean) / world()
    return mean.square().sum() * world()


def moment(model: Any, batch: Batch) -> Tensor:
    return gather(model(batch["x"])).mean(0).square().sum()


def seeded_by_rank(model: Any, batch: Batch) -> Tensor:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return regression(model, batch)


# ---------------------------------------------------------------------- loops


def looped(synchronised: Callable[[int, int], bool], divisor: Callable[[int], int]) -> Callable[..., None]:
    """A loop over micro-batches, by whether one of so many is reduced, and what each of so many is divided by."""

    def loop(model: Any, optimizer: Any, micro_batches: list[Batch]) -> None:
        optimizer.zero_grad()
        for index, batch in enumerate(micro_batches):
            with contextlib.nullcontext() if synchronised(index, len(micro_batches)) else model.no_sync():
                (regression(model, batch) / divisor(len(micro_batches))).backward()
        optimizer.step()

    return loop


def each(index: int, count: int) -> bool:
    return True


plain_loop = looped(lambda index, count: index == count - 1, lambda count: count)
always_synchronised = looped(each, lambda count: count)
no_sync_too_long = looped(lambda index, count: False, lambda count: count)
divided_twice = looped(each, lambda count: count**2)
divided_three_times = looped(each, lambda count: count**3)
never_divided = looped(each, lambda count: 1)


def _average(model: Any) -> None:
    for parameter in model.parameters():
        if world() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world()


def clipped_early(model: Any, optimizer: Any, micro_batches: list[Batch]) -> None:
    optimizer.zero_grad()
    with model.no_sync():
        regression(model, micro_batches[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    _average(model)
    optimizer.step()


def clipped_late(model: Any, optimizer: Any, micro_batches: list[Batch], limit: float = 0.1) -> None:
    optimizer.zero_grad()
    regression(model, micro_batches[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()


def clipped_on_rank_0(model: Any, optimizer: Any, micro_batches: list[Batch]) -> None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    clipped_late(model, optimizer, micro_batches, 0.1 if is_first else 0.2)


# ---------------------------------------------------------------------- wraps


def summing_shards(model: nn.Module) -> nn.Module:
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined, operator]
    return model


def finds_unused(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def keeps_buffers(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


# ---------------------------------------------------------------------- the table


class Case(NamedTuple):
    """A wrong loop, the fault that is named, words of its diagnosis, and the loop mended."""

    name: str
    wrong: dict[str, Any]
    fault: str
    words: str
    mended: dict[str, Any]


def stepping(step: Any, build: Any = encoder, **options: Any) -> dict[str, Any]:
    return {"build": build, "step": step, "batches": batches()} | options


def looping(loop: Any, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    given = {"build": encoder, "loop": loop, "batches": batches(accumulate), "accumulate": accumulate}
    return given | options


CASES = [
    Case("gather without gradient", stepping(gathered_cut), "F20", "1/{W}", stepping(gathered)),
    Case("gather and W", stepping(gathered_times_w), "F21", "{W} times", stepping(gathered)),
    Case("W on the loss's weights", stepping(pml_wrapper, with_loss), "F24", "{W}", stepping(exact_loss, with_loss)),
    Case("token means", stepping(token_mean), "F30", "weights", stepping(global_token_mean)),
    Case("windows", stepping(token_mean, **kept_apart()), "F30", "micro-batches", looping(window_token_mean, **kept_apart())),
    Case("uneven rows", stepping(regression, splits="uneven"), "F30", "rows", stepping(regression)),
    Case("local negatives", stepping(local_negatives), "F29", "", stepping(gathered)),
    Case("own rows first", stepping(own_rows_first), "F26", "", stepping(rows_by_rank)),
    Case("graph cut", stepping(gathered_bare, with_loss, wrap=finds_unused), "F20", "no rank has", stepping(exact_loss, with_loss)),
    Case("cut beside a right term", stepping(cut_beside), "F20", "in gather_cut", stepping(right_beside)),
    Case("moment cut", stepping(moment_without_gradient), "F20", "1/{W}", stepping(moment)),
    Case("moment summed again", stepping(moment_summed_again), "F21", "{W} times", stepping(moment)),
    Case("sum", stepping(summed), "F18", "1/{W}", stepping(regression)),
    Case("seeds by rank", stepping(seeded_by_rank, with_dropout), "F72", "dropout", stepping(regression)),
    Case("local batch norm", stepping(regression, with_norm), "F59", "", stepping(regression)),
    Case("buffers", stepping(regression, centred, wrap=keeps_buffers), "F64", "centre", stepping(regression, together)),
    Case("the same rows", stepping(regression, batches=same_on_every_rank), "F67", "divides", stepping(regression, batches=divided)),
    Case("some rows twice", stepping(regression, batches=half_repeated), "F67", "more than one", stepping(regression, batches=divided)),
    Case("FSDP2 sums", stepping(regression, wrap=summing_shards), "F21", "{W} times", stepping(regression, wrap="fully_shard")),
    Case("no_sync too long", looping(no_sync_too_long, 2), "SYNC", "another gradient", looping(plain_loop, 2)),
    Case("divided twice", looping(divided_twice, 4), "F18", "1/A", looping(plain_loop, 4)),
    Case("divided three times", looping(divided_three_times, 2), "F18", "1/A**2", looping(plain_loop, 2)),
    Case("never divided", looping(never_divided, 4), "F18", "= A", looping(always_synchronised, 4)),
    Case("clipped early", looping(clipped_early), "F13", "when it was clipped", looping(clipped_late)),
    Case("clipped by rank", looping(clipped_on_rank_0), "F13", "then changed", looping(clipped_late)),
]  # fmt: skip
