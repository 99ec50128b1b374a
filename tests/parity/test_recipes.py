"""The code of the page on loops, block by block: what it shows is equal, and a mistake in it is found."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_losses
from lightning_ddp_losses import parity
from lightning_ddp_losses.testing import RankEnvironment
from tests.parity.loops import batches as global_batches
from tests.parity.loops import encoder, gather_cut, regression

PAGE = (Path(lightning_ddp_losses.__file__).parent / "cli/pages/about/loop.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def summed(model: Any) -> nn.Module:
    for part in (model, model[0], model[2]):
        part.set_gradient_divide_factor(1.0)
    return model


def blocks(section: str = "") -> list[str]:
    """The code of a section; of none: what comes before the first."""
    _, _, rest = PAGE.partition(f"\n## {section}") if section else ("", "", PAGE)
    return BLOCK.findall(rest.split("\n## ")[0])


def started() -> tuple[dict[str, Any], list[Any]]:
    """The names that a reader of the page has, after its first block, and all reports that `parity` has made."""
    reports: list[Any] = []

    def kept(*args: Any, **options: Any) -> Any:
        reports.append(parity(*args, **options))
        return reports[-1]

    torch.manual_seed(1)
    names: dict[str, Any] = {}  # its code needs nothing else
    with mock.patch.object(lightning_ddp_losses, "parity", kept):
        exec(blocks()[0], names)
    return names, reports


def test_the_first_block_of_the_page_is_equal() -> None:
    _, reports = started()
    assert [report.equal for report in reports] == [True]


def test_plain_ddp_with_accumulation() -> None:
    names, reports = started()
    (code,) = blocks("Plain DDP")
    exec(code, names)
    assert reports[-1].equal, str(reports[-1])
    assert reports[-1].settings["accumulate_grad_batches"] == 4
    # a mistake in it: the first micro-batch is reduced, the others are not
    exec(code.replace("len(micro_batches) - 1", "0"), names)
    assert reports[-1].diagnoses[0].fault == "SYNC", str(reports[-1])


def test_fsdp2_and_a_parallelize_fn() -> None:
    names, reports = started()
    (code,) = blocks("FSDP2")
    exec(code, names)
    assert reports[-1].equal, str(reports[-1])
    assert reports[-1].settings["strategy"] == "parallelize"
    # a mistake in it: gradients are summed
    names["summed"] = summed
    exec(code.replace("return fully_shard(model)", "return summed(fully_shard(model))"), names)
    assert reports[-1].diagnoses[0].fault == "F21", str(reports[-1])


def test_fabric_and_accelerate() -> None:
    """Their part is torch's wrapper; accelerate is not installed here, so its recipe is this block."""
    names, _ = started()
    (code,) = blocks("Lightning Fabric")
    for gather, fault in (("all_gather_with_grad", None), ("gather_cut", "F20")):
        given = names | {"gather_cut": gather_cut}
        exec(code.replace("= all_gather_with_grad", f"= {gather}"), given)
        report = parity(given["build"], given["step"], given["batches"])
        assert [each.fault for each in report.diagnoses] == ([fault] if fault else []), str(report)


def with_fabric(model: nn.Module) -> Any:
    """Fabric's own wrapper, on the ranks that are there."""
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", plugins=[RankEnvironment()])
    fabric.launch()
    wrapped = fabric.setup_module(model)
    assert isinstance(wrapped._forward_module, DistributedDataParallel)
    return wrapped


@pytest.mark.parametrize("splits", ["even", "uneven"])
def test_fabrics_own_wrapper(splits: str) -> None:
    before = dict(os.environ)
    report = parity(encoder, regression, global_batches(), wrap=with_fabric, splits=splits)
    assert report.equal == (splits == "even"), str(report)
    assert {row.parameter for row in report.rows} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert dict(os.environ) == before
