"""`MaxSimLoss`: value and every gradient of one process, from texts of several vectors and different lengths."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import DDPChecks, MaxSimLoss, accumulation_window
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.counting import CountCollectives, sizes_of_results
from tests.doors import max_sim
from tests.each_rank import each_rank
from tests.fits import Trained, make_trainer
from tests.oracle import Found, Place, normal, parity
from tests.processes import run_python
from tests.refusals import Refused, refusals

ROWS = {1: [[7]], 2: [[2, 5], [0, 6], [4, 4]], 3: [[4, 0, 3], [1, 1, 1]]}
WIDTH, DIM = 6, 4
LENGTHS = (5, 9, 3)  # of the padded queries, documents and negatives
FORMS = ("documents", "negatives", "lengths", "no mask", "a score of one's own")


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, DIM)).double()


def texts(rows: int, column: int) -> tuple[Tensor, Tensor]:
    """Padded inputs (rows, T, WIDTH), and which of them count: not always the first."""
    draw = torch.Generator().manual_seed(column)
    inputs = normal(rows, LENGTHS[column], WIDTH, seed=draw)
    counts = torch.rand(rows, LENGTHS[column], generator=draw) < 0.6
    counts[:, column] = True
    return inputs, counts


def farthest(queries: Tensor, documents: Tensor, *, queries_mask: Tensor, documents_mask: Tensor) -> Tensor:
    """A score in which the documents of a query depend on each other."""
    products = torch.einsum("btd,gnud->bgntu", queries, documents)
    products = products.masked_fill(~documents_mask[None, :, :, None], -30.0)
    products = products.masked_fill(~queries_mask[:, None, None, :, None], 0.0)
    scores = products.logsumexp(4).sum(3).flatten(1)
    return scores - scores.amax(1, keepdim=True) * 0.5


def naive(form: str, queries: Tensor, columns: list[Tensor], counts: list[Tensor]) -> Tensor:
    """The loss of one process, with all products of vectors at once."""
    if form == "a score of one's own":
        stacked = torch.stack([nn.functional.pad(c, (0, 0, 0, max(LENGTHS) - c.shape[1])) for c in columns], 1)
        masks = torch.stack([nn.functional.pad(m, (0, max(LENGTHS) - m.shape[1])) for m in counts[1:]], 1)
        scores = farthest(queries, stacked, queries_mask=counts[0], documents_mask=masks)
        return cross_entropy(scores * 0.7, torch.arange(len(queries)) * len(columns))
    scores = []
    for column, mask in zip(columns, counts[1:], strict=True):
        products = torch.einsum("itd,jud->ijtu", queries, column).masked_fill(~mask[None, :, None], -torch.inf)
        scores.append((products.max(3).values * counts[0][:, None]).sum(2))
    return cross_entropy(torch.cat(scores, 1) * 0.7, torch.arange(len(queries)))


def masks_of(form: str, counts: list[Tensor]) -> list[Any]:
    """The masks as they are given, and as the oracle reads them."""
    if form == "no mask":
        return [None for _ in counts]
    return [mask.sum(1) for mask in counts] if form == "lengths" else counts


def as_mask(given: Any, inputs: Tensor) -> Tensor:
    places = torch.arange(inputs.shape[1]).expand(inputs.shape[:2])
    if given is None:
        return places >= 0
    return given if given.ndim == 2 else places < given[:, None]


def play(place: Place, form: str, tile: int) -> Found:
    """The value and the gradients, in one process the naive ones."""
    columns = 2 if form in ("documents", "lengths", "no mask") else 3
    made = [texts(sum(place.sizes), column) for column in range(columns)]
    inputs, counts = ([place.own(each) for each in column] for column in zip(*made, strict=True))
    model = place.ddp(net())
    # all texts in one call, as DDP reduces one forward
    flat = model(torch.cat([column.flatten(0, 1) for column in inputs]))
    pieces = flat.split([column.shape[:2].numel() for column in inputs])
    queries, *documents = [piece.view(*c.shape[:2], DIM) for piece, c in zip(pieces, inputs, strict=True)]
    if place.alone:
        value = naive(form, queries, documents, list(map(as_mask, masks_of(form, counts), inputs)))
        return place.graded(value * 3, net=model) | {"value": value.detach()}
    own, *others = masks_of(form, counts)
    loss = MaxSimLoss(0.7, similarity=farthest if form == "a score of one's own" else None)
    is_single = len(documents) == 1
    with mock.patch.object(max_sim, "TILE_ELEMENTS", tile):
        value = loss(
            queries,
            documents[0] if is_single else documents,
            queries_mask=own,
            documents_mask=others[0] if is_single else others,
        )
        return place.graded(value * 3, net=model) | {"value": value.detach()}


@pytest.mark.parametrize("tile", [max_sim.TILE_ELEMENTS, 60], ids=["one tile", "many tiles"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_process(pool: RankPool, world_size: int, form: str, tile: int) -> None:
    for rows in ROWS[world_size]:
        parity(pool, play, rows, form, tile, every_rank=True)


# ---------------------------------------------------------------------- what travels, what is alive


@each_rank(2)
def test_only_vectors_that_count_travel() -> None:
    queries, documents = torch.randn(40, 4, DIM, requires_grad=True), torch.randn(40, 200, DIM, requires_grad=True)
    loss, lengths = MaxSimLoss(), torch.full((40,), 5)
    loss(queries, documents, documents_mask=lengths).backward()
    with CountCollectives() as forward:
        value = loss(queries, documents, documents_mask=lengths)
    with CountCollectives() as backward:
        value.backward()
    padded = 2 * documents.nbytes
    assert forward.num_bytes < padded / 8
    assert backward.num_bytes < padded / 8
    assert len(forward.names) <= 3, forward.names
    assert len(backward.names) <= 2, backward.names


def test_no_tensor_of_all_products() -> None:
    rows, length, width = 48, 32, 180
    queries, documents = (
        torch.randn(rows, length, 8, requires_grad=True),
        torch.randn(rows, width, 8, requires_grad=True),
    )
    with sizes_of_results() as sizes:
        MaxSimLoss()(queries, documents).backward()
    assert max(sizes) <= max_sim.TILE_ELEMENTS < rows * rows * length * width / 6


LARGE = """
import resource, torch
from lightning_ddp_losses import MaxSimLoss
loss = MaxSimLoss()
texts = [torch.randn(256, length, 128, requires_grad=True) for length in (32, 180)]
loss(*(text[:2] for text in texts)).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loss(*texts).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_resident_set_is_a_tenth_of_all_products() -> None:
    done = run_python("-c", LARGE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 256 * 256 * 32 * 180 * 4 / 8


# ---------------------------------------------------------------------- under the Trainer


class Retriever(Trained):
    """Trains queries and documents of one encoder."""

    def build(self) -> None:
        self.net, self.loss = net(), MaxSimLoss(0.7)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        queries, counts, documents, document_counts = batch
        masks = {"queries_mask": counts, "documents_mask": document_counts}
        return self.loss(self.net(queries), self.net(documents), **masks)  # type: ignore[no-any-return]


BATCHES = {1: [[range(6)], [range(6, 12)]], 2: [[range(2), range(2, 6)], [range(6, 11), range(11, 12)]]}


def fitted(strategy: str) -> dict[str, Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(*texts(12, 0), *texts(12, 1))
    model = Retriever()
    loader = DataLoader(data, batch_sampler=[[*batch[rank]] for batch in BATCHES[world_size]])
    make_trainer(strategy, max_epochs=2, callbacks=[DDPChecks()]).fit(model, loader)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_alone() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _, (batch,) in itertools.product(range(2), BATCHES[1]):
        (queries, counts), (documents, document_counts) = texts(12, 0), texts(12, 1)
        part = [*batch]
        optimizer.zero_grad()
        naive("", model(queries[part]), [model(documents[part])], [counts[part], document_counts[part]]).backward()
        optimizer.step()
    return {f"net.{name}": p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
def test_a_fit(pool: RankPool, strategy: str) -> None:
    assert_all_close(pool.run(2, fitted, strategy), trained_alone())


# ---------------------------------------------------------------------- bad input


def misused(how: str) -> None:
    rank = dist.get_rank()
    loss, other = MaxSimLoss(), MaxSimLoss()
    queries, documents = torch.randn(3, 4, DIM), torch.randn(3, 5, DIM)
    masks: dict[str, Any] = {}
    if how == "widths":
        documents = torch.randn(3, 5, DIM + rank)
        queries = torch.randn(3, 4, DIM + rank)
    elif how == "scale":
        loss.scale = 1.0 + rank
    elif how == "columns":
        documents = [documents] * (1 + rank)
        masks["documents_mask"] = [None] * (1 + rank)
    elif how == "rows":
        documents = documents[: 3 - rank]
    elif how == "lengths" and rank:
        masks["documents_mask"] = torch.tensor([5, 6, 1])
    elif how == "no vector" and rank:
        masks["documents_mask"] = torch.tensor([5, 0, 1])
    elif how == "mask" and rank:
        masks["queries_mask"] = torch.ones(3, 2, dtype=torch.bool)
    elif how == "numbers" and rank:
        masks["documents_mask"] = torch.full((3, 5), 0.5)
    elif how == "flat" and rank:
        documents = documents[:, 0]
    elif how == "order":
        for one in (loss, other) if rank else (other, loss):
            one(queries, documents)
    elif how == "window":
        with accumulation_window(nn.Linear(1, 1)) as window, window.micro_batch():
            loss(queries.requires_grad_(), documents).backward()
    loss(queries, documents, **masks)


MISUSES = {
    "widths": ("RankMismatchError", "documents 0"),
    "scale": ("RankMismatchError", "scale=2.0"),
    "columns": ("RankMismatchError", "documents 1"),
    "rows": ("InputError", "2"),
    "lengths": ("InputError", "[6]"),
    "no vector": ("InputError", "none in row 1"),
    "mask": ("InputError", "(3, 2)"),
    "numbers": ("InputError", "0 and 1"),
    "flat": ("InputError", f"(3, {DIM})"),
    "order": ("RankMismatchError", "which of several"),
    "window": ("ConfigurationError", "MaxSimLoss"),
}
REFUSED = {
    how: Refused(lambda _, how=how: misused(how), words, kind, same=False) for how, (kind, words) in MISUSES.items()
}
test_misuse = refusals(__name__, "REFUSED")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers_are_compared_in_float32(dtype: torch.dtype) -> None:
    queries, documents = torch.randn(4, 3, DIM).to(dtype), torch.randn(4, 6, DIM).to(dtype)
    value = MaxSimLoss()(queries, documents)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, MaxSimLoss()(queries.float(), documents.float()))
