"""The code of the pages about retrieval, export and tests runs, and does what its page says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_losses
from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer

ROWS, CLASSES, NEAREST = 23, 4, 5


def code_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", manual.about()[page], re.DOTALL)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) + labels[:, None], labels


def validated_recall() -> float:
    """The page's module on this rank, over all rows. The sampler repeats some of them."""
    (code,) = code_of("retrieval")
    given: dict[str, Any] = {}
    exec(code, given)
    trainer = make_trainer("ddp_losses", precision="64-true")
    loader = DataLoader(TensorDataset(*rows(), torch.arange(ROWS)), batch_size=4)
    (metrics,) = trainer.validate(given["Embedder"](nn.Identity()), loader, verbose=False)
    assert dist.is_initialized()
    return float(metrics["hit_rate@5"])


def naive_recall() -> float:
    """One query at a time."""
    x, labels = rows()
    hits = 0
    for query in range(ROWS):
        similarity = torch.nn.functional.cosine_similarity(x[query][None], x)
        similarity[query] = -torch.inf
        nearest = similarity.argsort(descending=True)[:NEAREST]
        hits += bool((labels[nearest] == labels[query]).any())
    return hits / ROWS


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_recall_is_that_of_all_rows(pool: RankPool, world_size: int) -> None:
    expected = naive_recall()
    assert 0 < expected < 1
    assert pool.run(world_size, validated_recall) == pytest.approx([expected] * world_size, rel=1e-9)


def test_an_encoder_is_exported() -> None:
    (code,) = code_of("export")
    given: dict[str, Any] = {}
    exec(code, given)
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    lightning_ddp_losses.SyncBatchNorm().apply(module)
    example = torch.randn(5, 6)
    exported = given["export"](module, example).module()
    torch.testing.assert_close(exported(example), module.encoder(example))


def test_the_page_of_tests_names_what_there_is() -> None:
    first, second = code_of("testing")
    assert 'pytest_plugins = ["lightning_ddp_losses.testing"]' in first
    given: dict[str, Any] = {}
    exec(second, given)
    assert given["assert_parity"] is lightning_ddp_losses.assert_parity


# ---------------------------------------------------------------------- late interaction


def late_interaction() -> Tensor:
    """The page's loss on this rank's texts."""
    (code,) = code_of("maxsim")
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(8, size, 4, generator=generator, dtype=torch.float64) for size in (3, 5))
    part = slice(0, 3) if dist.get_rank() == 0 else slice(3, 8)
    masks = {"query_mask": None, "document_mask": torch.arange(1, 9)[part].clamp(max=5)}
    given: dict[str, Any] = {"queries": queries[part], "documents": documents[part], **masks}
    exec(code, given)
    return given["value"]  # type: ignore[no-any-return]


def test_late_interaction(pool: RankPool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(8, size, 4, generator=generator, dtype=torch.float64) for size in (3, 5))
    scores = torch.stack(
        [
            torch.stack(
                [(query @ document[: min(number + 1, 5)].T).amax(1).sum() for number, document in enumerate(documents)]
            )
            for query in queries
        ]
    )
    truth = nn.functional.cross_entropy(20 * scores, torch.arange(8))
    for found in pool.run(2, late_interaction):
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)
